"""Test model: a GPT-2-like decoder with K/V caches in the nodes that exporters write.

The batch, the number of new tokens and the length of the past are symbolic.
"""

from __future__ import annotations

import math

import numpy as np
import onnx
from onnx import TensorProto, helper

from encoder import GraphBuilder

LONGEST = 256
"""Maximum number of tokens, past included: size of the causal mask and of the position embedding."""


class _DecoderBuilder(GraphBuilder):
    def gemm(self, x: str, inputs: int, outputs: int) -> str:
        """Add GPT-2's linear layer: Reshape to [rows, inputs], Gemm, Reshape back by a shape computed in the graph."""
        rows = self.node("Reshape", x, self.constant([-1, inputs]))
        weight = self.noise(inputs, outputs, scale=1 / math.sqrt(inputs))
        product = self.node("Gemm", rows, weight, self.noise(outputs, scale=0.1))
        sizes = self.shape(self.dim(x, 0), self.dim(x, 1), self.constant(outputs))
        return self.node("Reshape", product, sizes)

    def causal(self, scores: str, query: str, key: str) -> str:
        """Add a causal mask to attention scores: Where with a slice of a triangular constant of bools."""
        rows, keys = self.dim(query, 2), self.dim(key, 2)
        start = self.node("Sub", keys, rows)
        triangle = self.constant(np.tri(LONGEST, dtype=np.bool_)[None, None], np.bool_)
        one = self.constant([1])
        start, end = (self.node("Unsqueeze", x, self.constant([0])) for x in (start, keys))
        triangle = self.node("Slice", triangle, start, end, self.constant([2]), one)
        triangle = self.node("Slice", triangle, self.constant([0]), end, self.constant([3]), one)
        return self.node("Where", triangle, scores, self.constant(-10000.0, np.float32))

    def gelu(self, x: str) -> str:
        cube = self.node("Pow", x, self.constant(3.0, np.float32))
        inner = self.node("Add", x, self.node("Mul", cube, self.constant(0.044715, np.float32)))
        tanh = self.node("Tanh", self.node("Mul", inner, self.constant(math.sqrt(2 / math.pi), np.float32)))
        half = self.node("Mul", x, self.constant(0.5, np.float32))
        return self.node("Mul", half, self.node("Add", tanh, self.constant(1.0, np.float32)))


def decoder(layers: int = 2, hidden: int = 48, heads: int = 3, vocabulary: int = 100, seed: int = 0) -> onnx.ModelProto:
    """Return the decoder.

    Inputs: ``input_ids`` (batch, sequence), and for each layer ``past_key_i`` and ``past_value_i`` (batch, heads, past,
    width). Outputs: ``last_hidden_state``, ``present_key_i`` and ``present_value_i``.
    """
    b = _DecoderBuilder(seed)
    width = hidden // heads
    past = b.dim("past_key_0", 2)
    start = b.node("Unsqueeze", past, b.constant([0]))
    end = b.node("Unsqueeze", b.node("Add", past, b.dim("input_ids", 1)), b.constant([0]))
    places = b.noise(1, LONGEST, hidden, scale=1.0)
    positions = b.node("Slice", places, start, end, b.constant([1]), b.constant([1]))
    x = b.node("Add", b.node("Gather", b.noise(vocabulary, hidden, scale=1.0), "input_ids", axis=0), positions)
    cache = []
    for layer in range(layers):
        mixed = b.gemm(b.layer_norm(x, hidden, False), hidden, 3 * hidden)
        parts = [f"part_{layer}_{i}" for i in range(3)]
        b.nodes.append(helper.make_node("Split", [mixed, b.constant([hidden] * 3)], parts, axis=-1))
        query, key, value = (b.heads(part, x, heads, width) for part in parts)
        for kind, new in (("key", key), ("value", value)):
            cache.append(f"present_{kind}_{layer}")
            b.nodes.append(helper.make_node("Concat", [f"past_{kind}_{layer}", new], [cache[-1]], axis=2))
        key, value = cache[-2:]
        scores = b.node("MatMul", query, b.node("Transpose", key, perm=[0, 1, 3, 2]))
        scores = b.node("Div", scores, b.constant(math.sqrt(width), np.float32))
        attention = b.node("Softmax", b.causal(scores, query, key), axis=-1)
        context = b.node("Transpose", b.node("MatMul", attention, value), perm=[0, 2, 1, 3])
        merged = b.node("Reshape", context, b.shape(b.dim(x, 0), b.dim(x, 1), b.constant(hidden)))
        x = b.node("Add", x, b.gemm(merged, hidden, hidden))
        wide = b.gelu(b.gemm(b.layer_norm(x, hidden, False), hidden, 4 * hidden))
        x = b.node("Add", x, b.gemm(wide, 4 * hidden, hidden))
    x = b.layer_norm(x, hidden, False)
    b.nodes.append(helper.make_node("Identity", [x], ["last_hidden_state"]))

    def cached(name: str, length: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", heads, length, width])

    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])
    state = helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, ["batch", "sequence", hidden])
    inputs = [ids, *(cached(name.replace("present", "past"), "past") for name in cache)]
    outputs = [state, *(cached(name, "total") for name in cache)]
    graph = helper.make_graph(b.nodes, "decoder", inputs, outputs, b.initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model


def decoder_inputs(
    model: onnx.ModelProto, batch: int, sequence: int, past: int, seed: int = 0
) -> dict[str, np.ndarray]:
    """Return random token ids, and noise for the past keys and values."""
    rng = np.random.default_rng(seed)
    feeds: dict[str, np.ndarray] = {"input_ids": rng.integers(0, 100, (batch, sequence))}
    for value in model.graph.input[1:]:
        dims = value.type.tensor_type.shape.dim
        feeds[value.name] = rng.standard_normal((batch, dims[1].dim_value, past, dims[3].dim_value), dtype=np.float32)
    return feeds
