"""Process of test_nn_libraries.py: runs library calls with fused epilogues, and measures their errors.

The libraries are stand-ins, and the expected results are exact. ``python library_epilogues.py FAKE_CUBLASLT.so
FAKE_CUDNN.so`` prints a JSON list.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from kernel_harness import Array, run_model
from library_scenarios import number, offer, use
from ort_cuda_plugin.program.lowering.context import LoweringOptions

Shapes = dict[str, tuple[int, ...]]
PRODUCT: Shapes = {"x": (9, 8), "w": (8, 16), "b": (16,), "r": (9, 16)}
PRODUCTS: Shapes = {"x": (3, 9, 8), "w": (3, 8, 16), "b": (16,), "r": (3, 9, 16)}
PICTURES: Shapes = {"x": (2, 4, 7, 5), "w": (6, 2, 3, 3), "b": (6,), "r": (2, 6, 5, 3)}
VOLUMES: Shapes = {"x": (2, 4, 5, 4, 3), "w": (6, 2, 2, 3, 2), "b": (6,), "r": (2, 6, 4, 2, 2)}
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def node(op_type: str, inputs: str, output: str, **attributes: Any) -> NodeProto:
    return helper.make_node(op_type, inputs.split(), [output], **attributes)


def gelu(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


@dataclass(frozen=True)
class Case:
    """A GEMM or convolution p of x and w (see `sums`), and ``nodes`` that compute y from p, a bias b and a residual r.

    ``expected`` computes y from p, b and r in NumPy.
    """

    shapes: Shapes
    expected: Callable[[Array, Array, Array], Array]
    nodes: list[NodeProto] = field(default_factory=list)
    bias: bool = False

    def sums(self, bias: bool, output: str = "p") -> NodeProto:
        if self.shapes in (PRODUCT, PRODUCTS):
            return node("MatMul", "x w", output)
        return node("Conv", "x w b" if bias else "x w", output, group=2)

    def model(self, nodes: list[NodeProto], values: dict[str, Array], dynamic: bool) -> onnx.ModelProto:
        """Return the model with initializers w and b. With ``dynamic`` the first dimension of x and r is symbolic."""
        dtype = helper.np_dtype_to_tensor_dtype(values["x"].dtype)
        shapes = [("n" if dynamic else self.shapes[name][0], *self.shapes[name][1:]) for name in "xr"]
        inputs = [helper.make_tensor_value_info(name, dtype, shape) for name, shape in zip("xr", shapes, strict=True)]
        outputs = [helper.make_tensor_value_info("y", dtype, None)]
        weights = [numpy_helper.from_array(values[name], name) for name in "wb"]
        graph = helper.make_graph(nodes, "epilogue", inputs, outputs, weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


add_bias, add_residual = node("Add", "p b", "s"), node("Add", "s r", "t")
CASES = {
    "product, bias": Case(PRODUCT, lambda p, b, r: p + b, [node("Add", "p b", "y")]),
    "product, bias, ReLU": Case(PRODUCT, lambda p, b, r: relu(p + b), [add_bias, node("Relu", "s", "y")]),
    "product, residual": Case(PRODUCT, lambda p, b, r: p + r, [node("Add", "r p", "y")]),
    "product, all": Case(PRODUCT, lambda p, b, r: relu(p + b + r), [add_bias, add_residual, node("Relu", "t", "y")]),
    "products, all": Case(PRODUCTS, lambda p, b, r: relu(p + b + r), [add_bias, add_residual, node("Relu", "t", "y")]),
    "product, GELU": Case(
        PRODUCT, lambda p, b, r: gelu(p + b), [add_bias, node("Gelu", "s", "y", approximate="tanh")]
    ),
    "convolution, ReLU": Case(PICTURES, lambda p, b, r: relu(p + b), [node("Relu", "p", "y")], True),
    "convolution, residual": Case(PICTURES, lambda p, b, r: p + r, [node("Add", "p r", "y")]),
    "convolution, all": Case(
        PICTURES, lambda p, b, r: relu(p + b + r), [node("Add", "r p", "t"), node("Relu", "t", "y")], True
    ),
    "products, Concat": Case(
        PRODUCTS,
        lambda p, b, r: np.concatenate([p + b + r, r], -1),
        [add_bias, add_residual, node("Concat", "t r", "y", axis=2)],
    ),
    "convolution, Concat": Case(
        PICTURES,
        lambda p, b, r: np.concatenate([r, relu(p + b)], 1),
        [node("Relu", "p", "t"), node("Concat", "r t", "y", axis=1)],
        True,
    ),
    "volumes, all": Case(
        VOLUMES, lambda p, b, r: relu(p + b + r), [node("Add", "r p", "t"), node("Relu", "t", "y")], True
    ),
}  # fmt: skip


def values(case: Case, seed: int) -> dict[str, Array]:
    """Return inputs for which products and sums are exact in float32, but not in 16-bit types."""
    random = np.random.default_rng(seed)
    return {name: (random.integers(-64, 65, shape) / 32).astype(np.float32) for name, shape in case.shapes.items()}


def expected(case: Case, inputs: dict[str, Array]) -> Array:
    """Return the exact result, in float32."""
    model = case.model([case.sums(False, "y")], inputs, False)
    (result,) = ReferenceEvaluator(model).run(None, {name: inputs[name] for name in "xr"})
    sums = np.asarray(result)
    bias = inputs["b"]
    if case.shapes in (PICTURES, VOLUMES):
        bias = bias.reshape(-1, *[1] * (sums.ndim - 2))
    return case.expected(sums, bias, inputs["r"]).astype(np.float32)


def run(case: Case, inputs: dict[str, Array], dynamic: bool, fusion: bool) -> Array:
    model = case.model([case.sums(case.bias), *case.nodes], inputs, dynamic)
    (result,) = run_model(model, [inputs[name] for name in "xr"], options=LoweringOptions(fusion=fusion))
    return result.view(inputs["x"].dtype).astype(np.float64)


def main(cublaslt: str, cudnn: str) -> list[dict[str, Any]]:
    """Return, for each case and type, the calls of each library and the largest error, with and without fusion."""
    fakes = use("cublaslt", 0, cublaslt), use("cudnn", 1, cudnn)
    offer("cublaslt", "cudnn")
    results = []
    for seed, (name, type_name) in enumerate(itertools.product(CASES, TYPES)):
        inputs = values(CASES[name], seed)
        once = expected(CASES[name], inputs).astype(TYPES[type_name]).astype(np.float64)
        result: dict[str, Any] = {"case": name, "dtype": type_name}
        for fusion in (True, False):
            before = [number(fake, "fake_runs") for fake in fakes]
            narrow = {key: value.astype(TYPES[type_name]) for key, value in inputs.items()}
            found = run(CASES[name], narrow, seed % 2 == 1, fusion)
            result["fused" if fusion else "unfused"] = {
                "error": float(np.max(np.abs(found - once) / np.maximum(np.abs(once), 1.0))),
                "runs": [number(fake, "fake_runs") - count for fake, count in zip(fakes, before, strict=True)],
            }
        results.append(result)
    return results


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
