"""Test model: a BERT-like encoder with symbolic batch and sequence, in the nodes that PyTorch's exporter writes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


class GraphBuilder:
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []

    def constant(self, values: object, dtype: type = np.int64) -> str:
        name = f"c{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return name

    def noise(self, *shape: int, scale: float, offset: float = 0.0) -> str:
        return self.constant(offset + scale * self.rng.standard_normal(shape, dtype=np.float32), np.float32)

    def node(self, op_type: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        names = [f"{op_type.lower()}_{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(
            helper.make_node(op_type, list(inputs), names, name=f"/{op_type}_{len(self.nodes)}", **attributes)
        )
        return names[0]

    def linear(self, x: str, inputs: int, outputs: int) -> str:
        product = self.node("MatMul", x, self.noise(inputs, outputs, scale=1 / math.sqrt(inputs)))
        return self.node("Add", self.noise(outputs, scale=0.1), product)

    def dim(self, x: str, axis: int) -> str:
        return self.node("Gather", self.node("Shape", x), self.constant(axis), axis=0)

    def shape(self, *parts: str) -> str:
        rows = [self.node("Unsqueeze", part, self.constant([0])) for part in parts]
        return self.node("Concat", *rows, axis=0)

    def layer_norm(self, x: str, hidden: int, decomposed: bool) -> str:
        scale, bias = self.noise(hidden, scale=0.1, offset=1.0), self.noise(hidden, scale=0.1)
        if not decomposed:
            return self.node("LayerNormalization", x, scale, bias, axis=-1, epsilon=1e-12)
        centered = self.node("Sub", x, self.node("ReduceMean", x, axes=[-1]))
        squared = self.node("Pow", centered, self.constant(2.0, np.float32))
        variance = self.node("ReduceMean", squared, axes=[-1])
        deviation = self.node("Sqrt", self.node("Add", variance, self.constant(1e-12, np.float32)))
        return self.node("Add", self.node("Mul", self.node("Div", centered, deviation), scale), bias)

    def heads(self, x: str, like: str, heads: int, width: int) -> str:
        """Reshape (batch, sequence, hidden) to (batch, heads, sequence, width); ``like`` has the first two sizes."""
        sizes = [self.dim(like, 0), self.dim(like, 1), self.constant(heads), self.constant(width)]
        return self.node("Transpose", self.node("Reshape", x, self.shape(*sizes)), perm=[0, 2, 1, 3])


def encoder(
    layers: int = 6,
    hidden: int = 384,
    heads: int = 12,
    vocabulary: int = 1000,
    *,
    decomposed: bool = False,
    seed: int = 0,
) -> onnx.ModelProto:
    """Return the encoder.

    Inputs: ``input_ids`` and ``attention_mask`` (batch, sequence) int64. Output: ``last_hidden_state`` (batch,
    sequence, hidden). With ``decomposed``, LayerNormalization is written as ReduceMean, Pow, Sqrt and so on, as in
    opsets below 17.
    """
    b = GraphBuilder(seed)
    width = hidden // heads
    words = b.node("Gather", b.noise(vocabulary, hidden, scale=1.0), "input_ids", axis=0)
    length = b.node("Unsqueeze", b.dim("input_ids", 1), b.constant([0]))
    positions = b.node("Slice", b.constant([np.arange(512)]), b.constant([0]), length, b.constant([1]), b.constant([1]))
    x = b.node("Add", words, b.node("Gather", b.noise(512, hidden, scale=1.0), positions, axis=0))
    x = b.layer_norm(x, hidden, decomposed)
    mask = b.node("Unsqueeze", b.node("Unsqueeze", "attention_mask", b.constant([1])), b.constant([2]))
    masked = b.node("Sub", b.constant(1.0, np.float32), b.node("Cast", mask, to=TensorProto.FLOAT))
    mask = b.node("Mul", masked, b.constant(-10000.0, np.float32))
    for _ in range(layers):
        query, key, value = (b.heads(b.linear(x, hidden, hidden), x, heads, width) for _ in range(3))
        scores = b.node("MatMul", query, b.node("Transpose", key, perm=[0, 1, 3, 2]))
        scores = b.node("Div", scores, b.constant(math.sqrt(width), np.float32))
        attention = b.node("Softmax", b.node("Add", scores, mask), axis=-1)
        context = b.node("Transpose", b.node("MatMul", attention, value), perm=[0, 2, 1, 3])
        merged = b.shape(b.dim(context, 0), b.dim(context, 1), b.constant(hidden))
        x = b.layer_norm(
            b.node("Add", b.linear(b.node("Reshape", context, merged), hidden, hidden), x), hidden, decomposed
        )
        wide = b.linear(x, hidden, 4 * hidden)
        erf = b.node("Erf", b.node("Div", wide, b.constant(math.sqrt(2.0), np.float32)))
        gelu = b.node(
            "Mul", b.node("Mul", wide, b.node("Add", erf, b.constant(1.0, np.float32))), b.constant(0.5, np.float32)
        )
        x = b.layer_norm(b.node("Add", b.linear(gelu, 4 * hidden, hidden), x), hidden, decomposed)
    b.nodes.append(helper.make_node("Identity", [x], ["last_hidden_state"], name="/Identity"))
    shape = ["batch", "sequence"]
    graph = helper.make_graph(
        b.nodes,
        "encoder",
        [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name in ("input_ids", "attention_mask")],
        [helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, [*shape, hidden])],
        b.initializers,
    )
    opset = 13 if decomposed else 17
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(model)
    return model


def encoder_inputs(batch: int, sequence: int, seed: int = 0, vocabulary: int = 1000) -> dict[str, np.ndarray]:
    """Return random token ids, and a mask that ends each row at a random length of at least one token."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, sequence + 1, (batch, 1))
    return {
        "input_ids": rng.integers(0, vocabulary, (batch, sequence)),
        "attention_mask": (np.arange(sequence)[None, :] < lengths).astype(np.int64),
    }
