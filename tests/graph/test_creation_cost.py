"""Cost of session creation: proportional to the number of nodes, and measured in function calls instead of time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from counted_calls import counted_calls
from ort_cuda_plugin.clusters.claims.claims import claim
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.analysis.verify import VERIFY_VARIABLE
from ort_cuda_plugin.program.lowering.context import DeviceProperties

WIDTH = 64


def chain(nodes: int) -> onnx.ModelProto:
    """Return a chain of elementwise operators, half of them binary with the shared constant c."""
    names = ["x", *(f"t{number}" for number in range(nodes - 1)), "y"]
    made = []
    for number, (source, result) in enumerate(pairwise(names)):
        unary = ("Relu", "Tanh", "Sigmoid", "Abs")[number // 2 % 4]
        op_type = ("Mul", unary, "Add", unary)[number % 4]
        made.append(helper.make_node(op_type, [source] if number % 2 else [source, "c"], [result]))
    return _model(made, [numpy_helper.from_array(np.full(WIDTH, 0.5, np.float32), "c")])


def residual(nodes: int) -> onnx.ModelProto:
    """Return a chain of blocks ``x + Relu(x @ w + b)`` of four nodes each."""
    made, x = [], "x"
    for number in range(nodes // 4):
        end = "y" if number == nodes // 4 - 1 else f"o{number}"
        made += [
            helper.make_node("MatMul", [x, "w"], [f"m{number}"]),
            helper.make_node("Add", [f"m{number}", "b"], [f"a{number}"]),
            helper.make_node("Relu", [f"a{number}"], [f"r{number}"]),
            helper.make_node("Add", [f"r{number}", x], [end]),
        ]
        x = end
    weights = np.full((WIDTH, WIDTH), 0.01, np.float32)
    return _model(made, [numpy_helper.from_array(weights, "w"), numpy_helper.from_array(weights[0], "b")])


def _model(nodes: list[onnx.NodeProto], weights: list[onnx.TensorProto]) -> onnx.ModelProto:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", WIDTH]) for name in "xy")
    graph = helper.make_graph(nodes, "repeated", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def calls(model: onnx.ModelProto) -> int:
    """Count the calls of Python and C functions in claiming the model's nodes and building the first plan."""
    graph = read_model(model)

    def create() -> None:
        assert len(claim(graph, DeviceProperties()).clusters) == 1
        CompiledCluster(graph, DeviceProperties()).prepare()

    return counted_calls(create, lambda frame, event: event in ("call", "c_call"))


@pytest.mark.parametrize(("make", "most"), [(chain, 1750), (residual, 1950)])
def test_calls_of_session_creation_are_proportional_to_the_nodes(
    make: Callable[[int], onnx.ModelProto], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VERIFY_VARIABLE, "0")
    calls(make(32))  # work that a process does once, such as imports
    few, many = calls(make(192)), calls(make(384))
    assert many <= 2.2 * few
    assert (many - few) / 192 <= most
