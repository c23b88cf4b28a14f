"""Test models y = -sign(exp(x)) for x [n, 4], and custom operators that replace Sign in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from onnx import TensorProto, helper

from ort_cuda_plugin.custom import registry
from ort_cuda_plugin.custom.kernels.kernels import Kernel, launch
from ort_cuda_plugin.custom.operator import CustomOperator, LowerFunction, Port
from ort_cuda_plugin.model.ir import DType
from ort_cuda_plugin.program.expressions.symbolic import ceildiv
from ort_cuda_plugin.program.lowering.context import Lowering, Tensor

FLOAT = frozenset({DType.FLOAT32})


def model(node: str = "Sign") -> bytes:
    """Return the model y = -f(exp(x)); f is the operator ``node``, and its node is named "mine"."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in "xy")
    nodes = [
        helper.make_node("Exp", ["x"], ["a"]),
        helper.make_node(node, ["a"], ["b"], name="mine"),
        helper.make_node("Neg", ["b"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "g", [x], [y])
    return bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9).SerializeToString()
    )


@contextmanager
def in_place_of(name: str, function: LowerFunction, version: int = 1) -> Iterator[CustomOperator]:
    """Within the block, register ``function`` in place of the built-in operator ``name``, with one float32 input and
    output.
    """
    ports = (Port("x", FLOAT),), (Port("y", FLOAT),)
    operator = registry.register(CustomOperator(name, "", version, *ports, (), function, priority=1))
    try:
        yield operator
    finally:
        registry.unregister(operator)


def launches(kernel: Kernel, factor: float = 2.0) -> LowerFunction:
    """Return a lowering function that launches ``kernel`` with the arguments x, y, the size of x, and ``factor``."""

    def function(ctx: Lowering, inputs: Sequence[Tensor | None], _: object) -> list[Tensor]:
        x = inputs[0]
        assert x is not None
        y = ctx.empty(x.shape, x.dtype)
        launch(ctx, kernel, ceildiv(x.size, 64), 64, [ctx.contiguous(x), y, x.size, factor], writes=[y])
        return [y]

    return function


def random_rows(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, 4), dtype=np.float32)
