"""Small models for tests of memory and streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
from onnx import NodeProto, TensorProto, helper

FLOAT = TensorProto.FLOAT


def model(
    nodes: Sequence[NodeProto],
    inputs: Mapping[str, Sequence[int | str]],
    outputs: Mapping[str, Sequence[int | str]],
    dtype: int = FLOAT,
) -> bytes:
    """Return a checked model of the nodes; ``inputs`` and ``outputs`` map names to shapes, and all have ``dtype``."""
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info(name, dtype, dims) for name, dims in inputs.items()],
        [helper.make_tensor_value_info(name, dtype, dims) for name, dims in outputs.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(made, full_check=True)
    return bytes(made.SerializeToString())


def add_and_double() -> bytes:
    """Return the model c = 2 (a + b) for vectors of any length, which has two launches.

    Trilu on a matrix of one row changes nothing, but it does not fuse with the other operators.
    """
    nodes = [
        helper.make_node("Constant", [], ["axis"], value_ints=[0]),
        helper.make_node("Unsqueeze", ["a", "axis"], ["row"]),
        helper.make_node("Trilu", ["row"], ["same"]),
        helper.make_node("Squeeze", ["same", "axis"], ["t"]),
        helper.make_node("Add", ["t", "b"], ["s"]),
        helper.make_node("Add", ["s", "s"], ["c"]),
    ]
    return model(nodes, {"a": ["n"], "b": ["n"]}, {"c": ["n"]})


def with_cpu_nodes(dtype: int, rounds: int = 1) -> bytes:
    """Return a model that appends x to itself ``rounds`` + 1 times, with nodes of the CPU provider in between.

    These cast to string and back, which the plugin declines, so ONNX Runtime copies to the host and back.
    """
    nodes = [helper.make_node("Concat", ["x", "x"], ["t0"], axis=0)]
    for i in range(rounds):
        nodes += [
            helper.make_node("Cast", [f"t{i}"], [f"text{i}"], to=TensorProto.STRING),
            helper.make_node("Cast", [f"text{i}"], [f"back{i}"], to=dtype),
            helper.make_node("Concat", [f"back{i}", f"back{i}"], [f"t{i + 1}"], axis=0),
        ]
    nodes[-1].output[0] = "y"
    return model(nodes, {"x": ["rows", "columns"]}, {"y": ["more_rows", "columns"]}, dtype)
