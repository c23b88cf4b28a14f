"""Devices of nodes, and the stages that follow from them."""

from __future__ import annotations

import math
import random

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from ort_cuda_plugin.clusters.stage_balance import Rule, balanced, by_rules, unmatched
from ort_cuda_plugin.clusters.stages import StageError, placed_nodes, split
from ort_cuda_plugin.model.ir import Graph
from ort_cuda_plugin.model.onnx_graph import read_model
from staged_models import CASES, layers, parsed

MIB = 1 << 20


def graph_of(text: str) -> Graph:
    return read_model(parsed(text))


def stages_of(graph: Graph, devices: dict[str, int]) -> list[tuple[int, list[str], list[str], list[str]]]:
    """Return each stage: its device, its nodes by the names of their results, and its inputs and outputs."""
    nodes = {node: devices[node.outputs[0].name] for node in placed_nodes(graph) if node.outputs[0] is not None}
    return [
        (
            stage.device,
            [node.outputs[0].name for node in stage.graph.nodes if node.outputs[0] is not None],
            [value.name for value in stage.graph.inputs],
            [value.name for value in stage.graph.outputs],
        )
        for stage in split(graph, graph.inputs, graph.outputs, nodes)
    ]


def test_a_node_that_waits_for_another_device_is_in_a_later_stage() -> None:
    graph = graph_of("(float[8] x) => (float[8] y) { a = Exp(x) b = Neg(a) c = Sin(x) d = Add(b, c) y = Tanh(d) }")
    assert stages_of(graph, {"a": 0, "b": 1, "c": 0, "d": 0, "y": 0}) == [
        (0, ["a", "c"], ["x"], ["a", "c"]),
        (1, ["b"], ["a"], ["b"]),
        (0, ["d", "y"], ["c", "b"], ["y"]),
    ]
    assert stages_of(graph, dict.fromkeys("abcdy", 1)) == [(1, list("abcdy"), ["x"], ["y"])]


def test_shape_arithmetic_is_repeated_in_each_stage_that_needs_it() -> None:
    graph = graph_of(CASES["shape arithmetic"][0])
    assert [node.op_type for node in placed_nodes(graph)] == [
        "MatMul", "Tanh", "Reshape", "MatMul", "Sigmoid", "Reshape"
    ]  # fmt: skip
    first, second = stages_of(graph, {"a": 0, "b": 0, "c": 1, "d": 1, "e": 1, "y": 1})
    assert first[1:] == (["a", "b"], ["x", "w"], ["b"])
    assert {"shape", "last", "target"} < set(second[1])
    assert second[2:] == (["w", "b"], ["y"])


def test_a_tensor_of_which_only_the_shape_is_read_is_marked() -> None:
    graph = graph_of(
        """(float[n, 8] x) => (float[n, 8] p, float[k] z) {
            p = Exp(x)  s = Shape(p)  f = Cast<to = 1>(s)  r = Neg(f)  z = Sin(r) }"""
    )
    nodes = {node: int(node.outputs[0] is not graph.outputs[0]) for node in placed_nodes(graph)}
    first, second = split(graph, graph.inputs, graph.outputs, nodes)
    assert [value.name for value in first.graph.outputs] == ["p"]
    assert {value.name for value in second.only_shapes} == {"p"} == {value.name for value in second.graph.inputs}


def test_random_divisions_compute_each_value_once_and_read_only_earlier_ones() -> None:
    rng = random.Random(0)
    for _ in range(60):
        size = rng.randint(2, 14)
        text, names = "", ["x"]
        for number in range(size):
            text += f" v{number} = Add({rng.choice(names)}, {rng.choice(names)})"
            names.append(f"v{number}")
        unread = [name for name in names[1:] if text.split().count(name) + text.count(f"({name},") == 1]
        outputs = sorted({names[-1], *rng.sample(unread, min(1, len(unread)))})
        graph = graph_of(f"(float[4] x) => ({', '.join(f'float[4] {name}' for name in outputs)}) {{{text} }}")
        found = stages_of(graph, {name: rng.randrange(3) for name in names})
        known, computed = {"x"}, list[str]()
        for _, nodes, inputs, results in found:
            assert set(inputs) <= known
            known.update(results)
            computed += nodes
        assert len(computed) == len(set(computed))
        assert set(outputs) <= known


def test_a_sequence_cannot_cross() -> None:
    graph = graph_of(CASES["a sequence"][0])
    with pytest.raises(StageError, match="'s' would cross between devices, but is not a tensor of numbers"):
        stages_of(graph, {"a": 0, "b": 0, "s": 0, "c": 1, "y": 1})
    nodes = placed_nodes(graph)
    found = balanced(nodes, [MIB, MIB, MIB, MIB])
    at = {node.outputs[0].name: found[node] for node in nodes if node.outputs[0] is not None}
    assert at["s"] == at["c"]


def test_rules_match_names_of_nodes_and_of_results() -> None:
    graph = read_model(onnx.load_from_string(layers(4)))
    nodes = graph.nodes

    def devices(*rules: str) -> list[int]:
        parsed_rules = [Rule(pattern, int(ordinal)) for pattern, _, ordinal in (text.rpartition(":") for text in rules)]
        found = by_rules(nodes, parsed_rules, [5, 7, 9])
        return [found[node] for node in nodes]

    assert devices("/layer.2/*:7", "*:9") == [2, 2, 2, 2, 1, 1, 2, 2]
    assert devices("m1:7", "m3:9") == [0, 0, 1, 1, 1, 1, 2, 2]
    assert devices("/layer.1/MatMul:9", "/layer.1/*:7") == [0, 0, 2, 1, 1, 1, 1, 1]
    assert unmatched([Rule("m1", 0), Rule("m4", 0), Rule("/LAYER*", 0)], nodes) == [Rule("m4", 0), Rule("/LAYER*", 0)]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_equal_layers_are_divided_equally(count: int) -> None:
    graph = read_model(onnx.load_from_string(layers(12, width=64)))
    found = balanced(graph.nodes, [1 << 30] * count)
    sizes = [
        sum(device == each and node.op_type == "MatMul" for node, device in found.items()) for each in range(count)
    ]
    assert sum(sizes) == 12
    assert max(sizes) - min(sizes) <= 1, sizes
    assert [found[node] for node in graph.nodes] == sorted(found.values())


def test_weights_decide_where_memory_is_small() -> None:
    graph = read_model(onnx.load_from_string(layers(8, width=64)))
    weight = 64 * 64 * 4
    found = balanced(graph.nodes, [math.ceil(2 * weight / 0.9), 1 << 30])
    assert sum(device == 0 and node.op_type == "MatMul" for node, device in found.items()) == 2
    with pytest.raises(StageError, match=r"the weights of the model \(0.1 MB\) do not fit into the available memory"):
        balanced(graph.nodes, [3 * weight, 3 * weight])


def test_a_weight_that_two_nodes_read_counts_once() -> None:
    weight = np.zeros((64, 64), np.float32)
    nodes = [helper.make_node("MatMul", [f"t{index}" if index else "x", "w"], [f"t{index + 1}"]) for index in range(4)]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 64]) for name in ("x", "t4")]
    made = helper.make_model(
        helper.make_graph(nodes, "tied", infos[:1], infos[1:], [onnx.numpy_helper.from_array(weight, "w")]),
        opset_imports=[helper.make_opsetid("", 20)],
    )
    graph = read_model(onnx.shape_inference.infer_shapes(made))
    room = math.ceil(weight.nbytes / 0.9)
    assert sorted(set(balanced(graph.nodes, [room, room]).values())) == [0, 1]


def test_a_cut_is_where_few_bytes_cross() -> None:
    graph = graph_of(
        """(float[64, 64] x, float[64, 64] w) => (float[64, 64] y) {
            a = MatMul(x, w)  b = Tanh(a)  c = ReduceMax<keepdims = 1>(b)  d = Add(c, x)  e = MatMul(d, w)
            y = Tanh(e) }"""
    )
    for value in graph.producers():
        value.shape = (1, 1) if value.name == "c" else (64, 64)
    found = balanced(graph.nodes, [1 << 30, 1 << 30])
    assert [found[node] for node in graph.nodes] == [0, 0, 0, 1, 1, 1]


def test_a_deep_model_is_divided_in_little_time() -> None:
    """The search considers at most 256 cuts, so its work is bounded; 3000 layers take as long as 128."""
    text, before = "", "x"
    for number in range(3000):
        text, before = f"{text} v{number} = Exp({before})", f"v{number}"
    graph = graph_of(f"(float[4] x) => (float[4] {before}) {{{text} }}")
    found = balanced(graph.nodes, [1 << 30] * 4)
    sizes = [list(found.values()).count(device) for device in range(4)]
    assert min(sizes) > 600, sizes
