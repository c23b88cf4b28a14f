"""Test model: a GPT-2-like decoder without K/V caches, in the nodes that PyTorch's exporter wrote for GPT-2."""

from __future__ import annotations

import math

import numpy as np
import onnx
from onnx import TensorProto, helper

from encoder import GraphBuilder

ROOM = 32
"""Maximum number of tokens: rows of the position embedding, size of the causal mask."""


class _Writer(GraphBuilder):
    def __init__(self, hidden: int, heads: int, seed: int) -> None:
        super().__init__(seed)
        self.hidden, self.head_count = hidden, heads

    def flat_linear(self, x: str, inputs: int, outputs: int) -> str:
        """Add Hugging Face's Conv1D, a linear layer: Reshape to rows, Gemm, Reshape back."""
        rows = self.node("Reshape", x, self.constant([-1, inputs]))
        weights = self.noise(inputs, outputs, scale=1 / math.sqrt(inputs))
        product = self.node("Gemm", rows, weights, self.noise(outputs, scale=0.1), alpha=1.0, beta=1.0)
        sizes = self.shape(self.dim(x, 0), self.dim(x, 1), self.constant(outputs))
        return self.node("Reshape", product, sizes)

    def size(self, sizes: str, axis: int) -> str:
        """Add Slice and Squeeze that extract one element of the shape ``sizes`` as a scalar."""
        end = axis + 1 if axis != -1 else 2**63 - 1
        cut = self.node("Slice", sizes, self.constant([axis]), self.constant([end]), self.constant([0]))
        return self.node("Squeeze", cut, self.constant([0]))

    def attention(self, x: str) -> str:
        packed = self.flat_linear(x, self.hidden, 3 * self.hidden)
        parts = [f"part_{len(self.nodes)}_{i}" for i in range(3)]
        split = helper.make_node("Split", [packed, self.constant([self.hidden] * 3)], parts, name=parts[0], axis=2)
        self.nodes.append(split)
        width = self.hidden // self.head_count
        q, k, v = (
            self._split_heads(part, width, [0, 2, 3, 1] if i == 1 else [0, 2, 1, 3]) for i, part in enumerate(parts)
        )
        scores = self.node("Div", self.node("MatMul", q, k), self.constant(math.sqrt(width), np.float32))
        sizes = self.node("Shape", scores)
        keys, queries = self.size(sizes, -1), self.size(sizes, -2)
        begin = self.node("Unsqueeze", self.node("Sub", keys, queries), self.constant([0]))
        end = self.node("Unsqueeze", keys, self.constant([0]))
        seen = self.constant(np.tril(np.ones((1, 1, ROOM, ROOM), np.bool_)), np.bool_)
        one = self.constant([1])
        seen = self.node("Slice", seen, begin, end, self.constant([2]), one)
        seen = self.node("Slice", seen, self.constant([0]), end, self.constant([3]), one)
        masked = self.node("Where", seen, scores, self.constant(-10000.0, np.float32))
        mixed = self.node("MatMul", self.node("Softmax", masked, axis=3), v)
        mixed = self.node("Transpose", mixed, perm=[0, 2, 1, 3])
        sizes = self.shape(self.dim(mixed, 0), self.dim(mixed, 1), self.constant(self.hidden))
        return self.flat_linear(self.node("Reshape", mixed, sizes), self.hidden, self.hidden)

    def _split_heads(self, x: str, width: int, perm: list[int]) -> str:
        sizes = self.shape(self.dim(x, 0), self.dim(x, 1), self.constant(self.head_count), self.constant(width))
        return self.node("Transpose", self.node("Reshape", x, sizes), perm=perm)

    def gelu(self, x: str) -> str:
        """Add GPT-2's GELU: the tanh approximation."""
        cubed = self.node("Mul", self.node("Pow", x, self.constant(3.0, np.float32)), self._number(0.044715))
        inner = self.node("Mul", self.node("Add", x, cubed), self._number(math.sqrt(2 / math.pi)))
        outer = self.node("Add", self.node("Tanh", inner), self._number(1.0))
        return self.node("Mul", self.node("Mul", x, self._number(0.5)), outer)

    def _number(self, value: float) -> str:
        return self.constant(value, np.float32)


def gpt(layers: int = 1, hidden: int = 32, heads: int = 4, vocabulary: int = 64, *, seed: int = 0) -> onnx.ModelProto:
    """Return the model: ``input_ids`` (batch, sequence) int64 -> ``logits`` (batch, sequence, vocabulary)."""
    b = _Writer(hidden, heads, seed)
    words = b.noise(vocabulary, hidden, scale=1.0)
    length = b.dim("input_ids", 1)
    positions = b.node("Unsqueeze", b.node("Range", b.constant(0), length, b.constant(1)), b.constant([0]))
    embedded = b.node("Gather", b.noise(ROOM, hidden, scale=1.0), positions, axis=0)
    x = b.node("Add", b.node("Gather", words, "input_ids", axis=0), embedded)
    for _ in range(layers):
        x = b.node("Add", b.attention(b.layer_norm(x, hidden, False)), x)
        wide = b.gelu(b.flat_linear(b.layer_norm(x, hidden, False), hidden, 4 * hidden))
        x = b.node("Add", x, b.flat_linear(wide, 4 * hidden, hidden))
    logits = b.node("MatMul", b.layer_norm(x, hidden, False), b.noise(hidden, vocabulary, scale=1.0))
    b.nodes.append(helper.make_node("Identity", [logits], ["logits"], name="/Identity"))
    shape = ["batch", "sequence"]
    graph = helper.make_graph(
        b.nodes,
        "gpt",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, shape)],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [*shape, vocabulary])],
        b.initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model
