"""The layout of graphs on pages: boxes do not overlap, and edges do not run behind boxes."""

from __future__ import annotations

import random
from collections.abc import Hashable
from itertools import combinations, pairwise

import pytest

from ort_cuda_plugin.pages.kinds import KINDS, kind_of
from ort_cuda_plugin.pages.layout import LONGEST_ROW, Layout, layout
from ort_cuda_plugin.pages.model_graph import GraphNode, GraphStep, ModelGraph, graph_data, short_type

Edges = list[tuple[Hashable, Hashable]]
SIZE = (180, 50)


def random_graph(seed: int) -> tuple[dict[Hashable, tuple[int, int]], Edges]:
    """Return boxes of two sizes and random edges, most of them short, some over many rows, and a few that go back."""
    chance = random.Random(seed)
    count = 60
    sizes: dict[Hashable, tuple[int, int]] = {n: (180, 50) if n % 7 else (400, 130) for n in range(count)}
    edges: Edges = [(chance.randrange(max(n - 5, 0), n), n) for n in range(1, count)]
    edges += [(chance.randrange(n), n) for n in range(1, count, 3)]
    edges += [(n, chance.randrange(n)) for n in range(20, count, 17)]
    return sizes, edges


def rectangles(found: Layout, sizes: dict[Hashable, tuple[int, int]]) -> dict[Hashable, tuple[int, int, int, int]]:
    return {key: (x, y, x + sizes[key][0], y + sizes[key][1]) for key, (x, y) in found.corners.items()}


@pytest.mark.parametrize("seed", range(4))
def test_boxes_do_not_overlap_and_edges_pass_between_them(seed: int) -> None:
    sizes, edges = random_graph(seed)
    found = layout(sizes, edges)
    boxes = rectangles(found, sizes)
    for (_, a), (_, b) in combinations(boxes.items(), 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    for first, second in pairwise(found.rows):
        assert first[1] < second[0]  # no box obstructs edges between two rows
    for source, route in found.routes.items():
        for row, x in enumerate(route.trunk, found.row_of[source] + 1):
            members = [box for key, box in boxes.items() if found.row_of[key] == row]
            assert all(not box[0] <= x <= box[2] for box in members)


@pytest.mark.parametrize("seed", range(4))
def test_each_edge_has_a_way_to_its_target(seed: int) -> None:
    sizes, edges = random_graph(seed)
    found = layout(sizes, edges)
    boxes = rectangles(found, sizes)
    drawn = {(source, target) for source, route in found.routes.items() for target in route.ends}
    assert drawn == {(t, s) if (t, s) in found.turned else (s, t) for s, t in edges if s != t}
    for source, route in found.routes.items():
        for target, x in route.ends.items():
            between = found.row_of[target] - found.row_of[source] - 1
            assert 0 <= between <= len(route.trunk)
            assert boxes[target][0] <= x <= boxes[target][2]


def test_boxes_lie_below_what_they_read_also_in_circles() -> None:
    edges: Edges = [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"), ("x", "y"), ("y", "x"), ("lost", "a"), ("b", "b")]
    found = layout(dict.fromkeys("abcdxy", SIZE), edges)
    assert len(set(found.corners.values())) == 6
    heights = {name: y for name, (_, y) in found.corners.items()}
    assert heights["a"] < heights["b"] == heights["c"] < heights["d"]
    assert found.turned == {("x", "y")}
    assert heights["x"] < heights["y"]


def test_a_chain_is_straight_and_a_wide_layer_takes_several_rows() -> None:
    chain = layout(dict.fromkeys(range(9), SIZE), [(n, n + 1) for n in range(8)])
    assert len({x for x, _ in chain.corners.values()}) == 1
    wide = layout(dict.fromkeys(range(LONGEST_ROW + 2), SIZE), [(0, n) for n in range(1, LONGEST_ROW + 2)])
    assert len(wide.rows) == 3
    assert layout({}, []).corners == {}


def test_views_have_no_box_among_the_steps_and_their_readers_are_joined_to_their_makers() -> None:
    nodes = [
        GraphNode("conv", "Conv", ("x",), ("a",), "c"),
        GraphNode("view", "Reshape", ("a",), ("b",), "c"),
        GraphNode("relu", "Relu", ("b",), ("y",), "c"),
        GraphNode("other", "Custom", ("y",), ("z",), "", "CPUExecutionProvider", is_own=False),
    ]
    steps = [
        GraphStep("step-0", "conv2d", "kernel", "c", ("conv",), ("Conv",), 0.0),
        GraphStep("step-1", "conv2d_large", "kernel", "c", ("conv",), ("Conv",), 3.0),
        GraphStep("step-2", "relu", "kernel", "c", ("relu",), ("Relu",), 1.0),
    ]
    graph = graph_data(ModelGraph(nodes, steps, {"a": "FLOAT32[1, 8]"}, "MB", {"y": False}))
    view = graph["views"]["steps"]
    boxes = view["boxes"]
    assert [box["id"] for box in boxes if box["s"] == "own"] == ["step-1", "step-2"]  # no box for a kernel without time
    joined = {
        (boxes[edge["s"]]["id"], boxes[branch[0]]["id"]): branch for edge in view["edges"] for branch in edge["e"]
    }
    assert joined["step-1", "step-2"][4:] == [["b"], 0]
    assert joined["cluster-0", "node other"][4:] == [["y"], 1]
    assert [box["l"][0] for box in graph["views"]["nodes"]["boxes"] if box["s"] == "free"] == ["Reshape"]
    assert [box["l"][2] for box in boxes if box.get("st") == 1] == ["f32 1\N{MULTIPLICATION SIGN}8"]


@pytest.mark.parametrize(
    ("step", "op_types", "name", "kind"),
    [
        ("kernel", ["Conv", "Relu"], "", "conv"),
        ("kernel", ["MatMul", "Softmax", "MatMul"], "", "attention"),
        ("kernel", ["Add", "MatMul"], "attention_64x64", "attention"),
        ("library", ["MatMulNBits"], "", "gemm"),
        ("kernel", ["Add", "LayerNormalization"], "", "norm"),
        ("kernel", ["BatchNormalization", "Relu"], "", "elementwise"),
        ("kernel", ["BatchNormalization"], "", "elementwise"),
        ("kernel", ["Transpose", "Concat"], "", "data"),
        ("kernel", ["GlobalAveragePool"], "", "pool"),
        ("copy", ["Conv"], "", "copy"),
        ("kernel", [], "", "other"),
    ],
)
def test_the_most_expensive_operator_decides_the_color(step: str, op_types: list[str], name: str, kind: str) -> None:
    assert kind_of(step, op_types, name) == kind
    assert kind in KINDS


def test_types_are_short_in_boxes() -> None:
    assert (
        short_type("FLOAT32[1, 64, n, ?]")
        == "f32 1\N{MULTIPLICATION SIGN}64\N{MULTIPLICATION SIGN}n\N{MULTIPLICATION SIGN}?"
    )
    assert short_type("BFLOAT16[]") == "bf16 scalar"
    assert short_type("UINT8[2]") == "u8 2"
    assert short_type("FLOAT[2]") == "f32 2"
    assert short_type("") == ""
