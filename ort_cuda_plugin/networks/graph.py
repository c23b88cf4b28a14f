"""Builder of networks: nodes as PyTorch's exporter writes them, and weights of seeded noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import ArrayLike, DTypeLike, NDArray
from onnx import TensorProto, helper, numpy_helper

DTYPES = ("float32", "float16", "int8")
OPSET = 17
_STEP = 1 / 32
"""Quantization step of int8 activations. It makes their range -4 to 4, and few activations are outside of it."""


class NetworkGraph:
    """Collects nodes and weights. Methods take and return names of values.

    ``dtype`` is ``float32``, ``float16`` or ``int8``. With ``int8``, values are float32. Activations that GEMMs and
    convolutions read pass QuantizeLinear and DequantizeLinear, and weights are int8 with one scale per channel and a
    DequantizeLinear.
    """

    def __init__(self, name: str, dtype: str, seed: int) -> None:
        self.name = name
        self.quantized = dtype == "int8"
        self.dtype = np.dtype(np.float16 if dtype == "float16" else np.float32)
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []

    @property
    def element(self) -> int:
        return int(helper.np_dtype_to_tensor_dtype(self.dtype))

    def input(self, name: str, shape: Sequence[int | str], element: int | None = None) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, element or self.element, shape))
        return name

    def output(self, value: str, name: str, shape: Sequence[int | str]) -> None:
        self.nodes.append(helper.make_node("Identity", [value], [name], name=f"{name}/Identity"))
        self.outputs.append(helper.make_tensor_value_info(name, self.element, shape))

    def add(self, op_type: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """Add a node; return the name of its output, or a tuple of names if it has several."""
        number = len(self.nodes)
        names = [f"{op_type.lower()}_{number}_{index}" for index in range(outputs)]
        self.nodes.append(helper.make_node(op_type, inputs, names, name=f"/{op_type}_{number}", **attributes))
        return names[0] if outputs == 1 else tuple(names)

    def constant(self, values: ArrayLike, dtype: DTypeLike = np.int64) -> str:
        name = f"constant_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return name

    def number(self, value: float) -> str:
        """Add a scalar of the network's type."""
        return self.constant(value, self.dtype)

    def noise(self, *shape: int, deviation: float = 0.1, mean: float = 0.0) -> str:
        return self.constant(self._noise(shape, deviation) + np.float32(mean), self.dtype)

    def conv(
        self, x: str, inputs: int, outputs: int, kernel: int | Sequence[int] = 1, gain: float = 2.0, **attributes: Any
    ) -> str:
        """Add a convolution with a bias, as after folding a BatchNormalization.

        By default padding keeps the image size at stride 1.
        """
        sizes = [kernel] * 2 if isinstance(kernel, int) else list(kernel)
        group = int(attributes.get("group", 1))
        shape = (outputs, inputs // group, *sizes)
        weight = self._weight(shape, math.sqrt(gain / math.prod(shape[1:])), axis=0)
        given = {"kernel_shape": sizes, "pads": [size // 2 for size in sizes] * 2} | attributes
        return str(self.add("Conv", self._activation(x), weight, self.noise(outputs, deviation=0.05), **given))

    def linear(self, x: str, inputs: int, outputs: int, bias: bool = True, gain: float = 1.0) -> str:
        """Add MatMul and Add, the exported form of a linear layer over the last axis."""
        weight = self._weight((inputs, outputs), math.sqrt(gain / inputs), axis=1)
        product = self.add("MatMul", self._activation(x), weight)
        return str(self.add("Add", self.noise(outputs, deviation=0.02), product) if bias else product)

    def gemm(self, x: str, inputs: int, outputs: int) -> str:
        """Add a Gemm with a bias, the exported form of a linear layer over a matrix."""
        weight = self._weight((outputs, inputs), math.sqrt(1 / inputs), axis=0)
        return str(self.add("Gemm", self._activation(x), weight, self.noise(outputs), transB=1))

    def layer_norm(self, x: str, width: int, epsilon: float = 1e-5) -> str:
        scale, bias = self.noise(width, mean=1.0), self.noise(width)
        return str(self.add("LayerNormalization", x, scale, bias, axis=-1, epsilon=epsilon))

    def gelu(self, x: str) -> str:
        """Add GELU with erf, as the five nodes that exporters write for opset 17."""
        inner = self.add("Erf", self.add("Div", x, self.number(math.sqrt(2))))
        return str(self.add("Mul", self.add("Mul", x, self.add("Add", inner, self.number(1))), self.number(0.5)))

    def silu(self, x: str) -> str:
        return str(self.add("Mul", x, self.add("Sigmoid", x)))

    def heads(self, x: str, count: int, width: int) -> str:
        """Reshape (batch, sequence, count * width) to (batch, count, sequence, width)."""
        split = self.add("Reshape", x, self.constant([0, 0, count, width]))
        return str(self.add("Transpose", split, perm=[0, 2, 1, 3]))

    def merge_heads(self, x: str, columns: int) -> str:
        together = self.add("Transpose", x, perm=[0, 2, 1, 3])
        return str(self.add("Reshape", together, self.constant([0, 0, columns])))

    def attention(self, query: str, key: str, value: str, width: int, mask: str = "") -> str:
        """Add scaled dot-product attention of heads: scores, an added mask, Softmax, and the weighted sum of values."""
        turned = self.add("Transpose", key, perm=[0, 1, 3, 2])
        scores = self.add("Div", self.add("MatMul", query, turned), self.number(math.sqrt(width)))
        scores = self.add("Add", scores, mask) if mask else scores
        return str(self.add("MatMul", self.add("Softmax", scores, axis=-1), value))

    def model(self) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, self.name, self.inputs, self.outputs, self.weights)
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
        made.producer_name = "ort-cuda-plugin networks"
        return made

    def _noise(self, shape: Sequence[int], deviation: float) -> NDArray[np.float32]:
        return self.rng.standard_normal(tuple(shape), np.float32) * np.float32(deviation)

    def _weight(self, shape: Sequence[int], deviation: float, axis: int) -> str:
        if not self.quantized:
            return self.constant(self._noise(shape, deviation), self.dtype)
        codes = self.rng.normal(0, 32, tuple(shape)).round().clip(-127, 127)
        scales = self.constant(np.full(shape[axis], deviation / 32), np.float32)
        zeros = self.constant(np.zeros(shape[axis]), np.int8)
        return str(self.add("DequantizeLinear", self.constant(codes, np.int8), scales, zeros, axis=axis))

    def _activation(self, x: str) -> str:
        if not self.quantized:
            return x
        scale, zero = self.constant(_STEP, np.float32), self.constant(0, np.int8)
        return str(self.add("DequantizeLinear", self.add("QuantizeLinear", x, scale, zero), scale, zero))


INT64 = TensorProto.INT64
