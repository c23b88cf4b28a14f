"""Widths of attention_mask at which a model switches between branches."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ort_cuda_plugin.model.mask_widths import width_limits


def model(operator: str, bound: list[onnx.NodeProto], *, swapped: bool = False, negated: bool = False) -> bytes:
    """Return a model with an If whose condition compares the width of "mask" with "bound".

    ``bound`` are the nodes that compute "bound". ``swapped`` exchanges the operands of the comparison.
    """
    operands = ["width", "bound"][:: -1 if swapped else 1]
    nodes = [
        helper.make_node("Shape", ["mask"], ["shape"]),
        helper.make_node("Gather", ["shape", "one"], ["number"]),
        helper.make_node("Cast", ["number"], ["width"], to=TensorProto.INT64),
        *bound,
        helper.make_node(operator, operands, ["wide" if not negated else "narrow"]),
        *([helper.make_node("Not", ["narrow"], ["wide"])] if negated else []),
        helper.make_node("If", ["wide"], ["y"], then_branch=branch(1), else_branch=branch(0)),
    ]
    inputs = [helper.make_tensor_value_info("mask", TensorProto.INT64, ["batch", "total"])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.INT64, [])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, [numpy_helper.from_array(np.array(1), "one")])
    return helper.make_model(graph).SerializeToString()  # type: ignore[no-any-return]


def branch(value: int) -> onnx.GraphProto:
    node = helper.make_node("Constant", [], [f"b{value}"], value_int=value)
    return helper.make_graph([node], "b", [], [helper.make_tensor_value_info(f"b{value}", TensorProto.INT64, [])])


def constant(value: onnx.TensorProto) -> list[onnx.NodeProto]:
    return [helper.make_node("Constant", [], ["bound"], value=value)]


NUMBER = constant(numpy_helper.from_array(np.array(4096)))


@pytest.mark.parametrize(
    ("operator", "first", "second"),
    [("Greater", 4096, 4095), ("GreaterOrEqual", 4095, 4096), ("Less", 4095, 4096), ("LessOrEqual", 4096, 4095)],
)
def test_limits_are_the_last_widths_before_a_comparison_changes(operator: str, first: int, second: int) -> None:
    for swapped, limit in ((False, first), (True, second)):
        for negated in (False, True):
            made = model(operator, NUMBER, swapped=swapped, negated=negated)
            assert width_limits(made, "mask", lambda name: None) == [limit]


@pytest.mark.parametrize(
    "value",
    [
        helper.make_tensor("t", TensorProto.INT64, [], [4096]),
        helper.make_tensor("t", TensorProto.INT64, [1], [4096]),
        helper.make_tensor("t", TensorProto.INT32, [], [4096]),
        numpy_helper.from_array(np.array([4096], np.int32)),
    ],
    ids=["listed", "vector", "listed int32", "int32"],
)
def test_constants_have_any_form(value: onnx.TensorProto) -> None:
    assert width_limits(model("Greater", constant(value)), "mask", lambda name: None) == [4096]


def test_a_bound_may_be_an_initializer() -> None:
    made = model("Greater", [])
    assert width_limits(made, "mask", {"bound": 7}.get) == [7]
    assert width_limits(made, "mask", lambda name: None) == []


@pytest.mark.parametrize(
    "value",
    [numpy_helper.from_array(np.array([1, 2])), numpy_helper.from_array(np.array(1.5))],
    ids=["several", "float"],
)
def test_other_constants_are_no_limits(value: onnx.TensorProto) -> None:
    assert width_limits(model("Greater", constant(value)), "mask", lambda name: None) == []


def test_comparisons_of_other_tensors_are_no_limits() -> None:
    assert width_limits(model("Greater", NUMBER), "input_ids", lambda name: None) == []
