"""Claims: clusters of graphs with toy operators, and the reasons for declined nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper, parser

from graph_toys import DOMAIN, Builder
from ort_cuda_plugin.clusters.claims.claims import Claims, analyze, claim
from ort_cuda_plugin.clusters.nodes.ranks import Ranks
from ort_cuda_plugin.model.ir import Constant, DType, Graph, InvalidModel, Node, Unsupported, Value
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.ops.registry import op
from ort_cuda_plugin.program.expressions.symbolic import eq
from ort_cuda_plugin.program.lowering.context import DeviceProperties, Lowering, Tensor

DEVICE = DeviceProperties()


@op("Broken", domain=DOMAIN)
def broken(ctx: Lowering, x: Tensor) -> Tensor:
    raise LookupError("a mistake in an operator")


@op("Mistyped", domain=DOMAIN)
def mistyped(ctx: Lowering, x: Tensor) -> Tensor:
    return ctx.empty(x.shape, DType.FLOAT64)


@op("Limited", domain=DOMAIN)
def limited(ctx: Lowering, x: Tensor) -> Tensor:
    if x.rank == 5:
        raise Unsupported("shape", "nothing for rank 5")
    return x


@op("Square", domain=DOMAIN)
def square(ctx: Lowering, x: Tensor) -> Tensor:
    """Lower a toy operator: its input must be a square matrix, its result is a scalar."""
    if x.rank != 2:
        raise InvalidModel("no matrix")
    ctx.require(eq(*x.shape), "not square")
    return ctx.empty((), x.dtype)


def reasons(graph: Graph) -> list[tuple[str, str]]:
    return [(verdict.kind, verdict.reason) for verdict in analyze(graph, DEVICE)]


def operators(claims: Claims) -> list[list[str]]:
    return [[node.op_type for node in cluster] for cluster in claims.clusters]


def test_every_verdict_of_a_supported_graph_is_without_a_reason() -> None:
    b = Builder()
    x = b.input("x", "n", 3)
    graph = b.graph(b.node("Add", b.node("Transpose", b.node("Transpose", x)), x))
    assert reasons(graph) == [("", "")] * 3
    assert [len(cluster) for cluster in claim(graph, DEVICE).clusters] == [3]


def one_node(**changes: object) -> Graph:
    b = Builder()
    x = b.input("x", "n")
    b.node("Add", x, x)
    for name, change in changes.items():
        setattr(b.nodes[0], name, change)
    return b.graph(*(value for value in b.nodes[0].outputs if value is not None))


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"op_type": "Unheard"}, "op", "graph.test.Unheard is not implemented"),
        (
            {"op_type": "Broken", "inputs": (Value("x", DType.FLOAT32, ()),)},
            "op",
            "internal error: LookupError: a mistake",
        ),
        ({"attributes": {"axis": 1}}, "attribute", "axis"),
        ({"unreadable_attributes": ("body",)}, "attribute", "attribute 'body' cannot be read; supported: an integer"),
        ({"has_subgraphs": True}, "control-flow", "the bodies of Add are nested too deeply"),
        ({"inputs": (Value("s", DType.STRING, ("n",)),) * 2}, "dtype", "'s': element type STRING is not supported"),
        ({"inputs": (Value("q", None, None),) * 2}, "dtype", "'q' is not a tensor"),
        (
            {"op_type": "Limited", "inputs": (Value("u", DType.FLOAT32, None),)},
            "shape",
            "nothing for rank 5 (a rank of its inputs is not known)",
        ),
        (
            {"op_type": "Square", "inputs": (Value("u", DType.FLOAT32, (2, 3)),)},
            "shape",
            "the model is invalid at this node",
        ),
        ({"inputs": (Value("a", DType.FLOAT32, (2,)), Value("b", DType.FLOAT32, (3,)))}, "shape", "broadcast"),
        (
            {"outputs": (Value("o", DType.INT8, None),)},
            "dtype",
            "the model declares 'o' as INT8, but Add returns FLOAT32",
        ),
        ({"outputs": (None, Value("o", DType.FLOAT32, None))}, "attribute", "output 1 of Add is not implemented"),
    ],
)
def test_a_declined_node_has_a_kind_and_a_reason(changes: dict[str, Any], kind: str, text: str) -> None:
    ((actual_kind, reason),) = reasons(one_node(**changes))
    assert actual_kind == kind
    assert text in reason


def test_nodes_after_a_declined_one_go_by_what_ort_infers() -> None:
    b = Builder()
    x = b.input("x", "n")
    hidden = b.node("Unheard", x)
    hidden.shape = ("n", 4)
    total = b.node("Add", hidden, b.constant(np.zeros(4, np.float32)))
    wrong = b.node("Add", hidden, b.constant(np.zeros(3, np.float32)))
    assert [kind for kind, _ in reasons(b.graph(total, wrong))] == ["op", "", "shape"]


def test_a_shape_of_unknown_rank_that_the_device_computes_is_declined() -> None:
    b = Builder()
    x, y = b.input("x", "k", dtype=DType.INT64), b.input("y", "n")
    computed = b.node("Negative", x, dtype=DType.INT64)
    assert reasons(b.graph(b.node("Reshape", y, computed))) == [
        ("", ""),
        (
            "shape",
            "Reshape: the number of elements of shape is known only when the model runs; supported: numbers "
            "known when the session is created",
        ),
    ]


def test_shape_arithmetic_for_declined_nodes_only_is_left_to_the_host() -> None:
    b = Builder()
    x = b.input("x", "n", "m")
    shape = b.node("Shape", x, dtype=DType.INT64)
    twice = b.node("Add", shape, shape, dtype=DType.INT64)
    b.node("Unheard", twice)
    graph = b.graph(b.node("Add", x, x))
    assert [verdict.kind for verdict in analyze(graph, DEVICE)] == ["cost", "cost", "op", ""]
    graph.outputs.append(shape)
    assert [verdict.kind for verdict in analyze(graph, DEVICE)] == ["", "cost", "op", ""]


def test_shape_arithmetic_that_nothing_uses_is_claimed_with_all_other_nodes() -> None:
    b = Builder()
    x = b.input("x", "n")
    b.node("Shape", x, dtype=DType.INT64)
    graph = b.graph(b.node("Add", x, x))
    claims = claim(graph, DEVICE)
    assert all(verdict.supported for verdict in claims.verdicts)
    assert operators(claims) == [["Shape", "Add"]]


def split_shape_arithmetic() -> Graph:
    """Return a graph of Reshape(x, s + Unheard(s)) with s = y + [1, 2] and y int64 [2].

    The plugin does not know the operator Unheard, and ORT infers only the rank of its result.
    """
    b = Builder()
    x, y = b.input("x", "n"), b.input("y", 2, dtype=DType.INT64)
    shape = b.node("Add", y, b.constant(np.array([1, 2])), dtype=DType.INT64)
    blocked = b.node("Unheard", shape, dtype=DType.INT64)
    blocked.shape = (None,)
    return b.graph(b.node("Reshape", x, b.node("Add", shape, blocked, dtype=DType.INT64)))


def test_a_cluster_that_lost_what_the_whole_graph_knew_is_analyzed_again() -> None:
    graph = split_shape_arithmetic()
    assert [verdict.supported for verdict in analyze(graph, DEVICE)] == [True, False, True, True]
    # Analyzed without the first cluster, the second Add has two inputs of unknown length.
    claims = claim(graph, DEVICE)
    assert [verdict.kind for verdict in claims.verdicts] == ["", "op", "", "shape"]
    assert "is known only when the model runs" in claims.verdicts[3].reason
    assert operators(claims) == [["Add"], ["Add"]]
    output = graph.nodes[1].outputs[0]
    assert output is not None
    output.shape = (2,)
    # With a known length the plan can read the sum back to the host, so Reshape is claimed.
    assert operators(claim(graph, DEVICE)) == [["Add"], ["Add", "Reshape"]]


def test_ranks_that_ort_does_not_infer_are_kept_from_the_analysis_of_the_whole_graph() -> None:
    ranks = Ranks()
    claim(split_shape_arithmetic(), DEVICE, ranks=ranks)
    assert ranks.known == {"v0": 1, "v2": 1, "v3": 2}


def test_what_takes_every_rank_that_may_come_is_claimed_where_nobody_knows_one() -> None:
    b = Builder()
    x = Value("u", DType.FLOAT32, None)
    b.inputs.append(x)
    total = b.node("Square", b.node("Add", x, x))
    other = b.node("Limited", b.node("Add", total, x))
    total.shape = other.shape = None
    ranks = Ranks()
    claims = claim(b.graph(other), DEVICE, ranks=ranks)
    # Square accepts only rank 2 and then returns rank 0, so its result has rank 0 although u's rank is unknown.
    assert [verdict.supported for verdict in claims.verdicts] == [True, True, True, True]
    assert [len(cluster) for cluster in claims.clusters] == [4]
    assert ranks.known["v1"] == 0
    assert "u" not in ranks.known


def test_a_body_that_alone_reads_a_value_is_declined_where_ort_does_not_pass_it() -> None:
    model = """<ir_version: 9, opset_import: ["" : 18]> m (float[4] x, float[4] z, bool c) => (float[4] y) { a = Neg(x)
        y = If(c) <then_branch = yes () => (float[4] t) { t = Add(a, NAME) },
        else_branch = no () => (float[4] e) { e = Exp(x) }> }"""
    for name, count in (("x", 2), ("z", 1)):
        graph = read_model(parser.parse_model(model.replace("NAME", name)))
        assert operators(claim(graph, DEVICE)) == [["Neg", "If"]]
        claims = claim(graph, DEVICE, passes_implicit_inputs=False)
        assert [len(cluster) for cluster in claims.clusters] == [count]
        assert claims.verdicts[1].supported is (count == 2)
    assert (
        "only a body reads 'z', and this version of ONNX Runtime does not pass it to a fused node"
        in claims.verdicts[1].reason
    )


def test_claims_do_not_read_large_initializers() -> None:
    def fail() -> np.ndarray:
        raise AssertionError("read")

    b = Builder()
    x = b.input("x", 3000)
    value = Value("big", DType.FLOAT32, (3000,), Constant(DType.FLOAT32, (3000,), fail, borrowed=True))
    assert reasons(b.graph(b.node("Add", x, value))) == [("", "")]


def test_verdicts_keep_the_identity_of_the_node() -> None:
    (verdict,) = analyze(one_node(), DEVICE)
    assert (verdict.name, verdict.op_type, verdict.domain, verdict.since_version) == ("Add_0", "Add", DOMAIN, 1)
    assert verdict.supported


def test_a_node_is_labeled_by_its_first_output_where_it_has_no_name() -> None:
    assert Node("", "Add", "", 7, (), (Value("sum", None, None),)).label == "sum (Add)"
    assert Node("", "Add", "", 7, (), ()).label == "(unnamed) (Add)"


def test_a_transposed_convolution_runs_where_only_its_weights_say_how_many_channels_there_are() -> None:
    graph = read_model(
        parser.parse_model(
            """<ir_version: 8, opset_import: ["" : 17]> g (float[n, c, h, w] x, float[3, 5, 2, 2] k) => (y)
            { y = ConvTranspose <strides = [2, 2], kernel_shape = [2, 2]> (x, k) }"""
        )
    )
    for device in (DEVICE, DeviceProperties(False, frozenset(), (9, 0), 132)):
        assert [verdict.reason for verdict in analyze(graph, device)] == [""]


@pytest.mark.parametrize("shift", [-15, -16, -17, -18])
def test_a_formula_that_is_no_size_for_the_guess_alone_does_not_decline_a_reshape(shift: int) -> None:
    """The guessed length of ``samples`` may make the size samples + shift negative; larger lengths are valid.

    Speech encoders have such sizes if the guess is shorter than a convolution's window.
    """
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[batch, 4, samples] x) => (y)
        <int64[2] rest = {-1, 2}, int64[1] zero = {0}, int64[1] two = {2}, int64[1] one = {1}> {
            t = Transpose<perm = [0, 2, 1]>(x) s = Shape(t) b = Slice(s, zero, one) q = Slice(s, one, two)
            r = Add(q, shift) to = Concat<axis = 0>(b, r, rest) p = Slice(t, zero, shift, one) y = Reshape(p, to) }"""
    )
    model.graph.initializer.append(numpy_helper.from_array(np.array([shift]), "shift"))
    assert [verdict.reason for verdict in analyze(read_model(model), DEVICE)] == [""] * len(model.graph.node)


ANALYZED: list[int] = []


@op("Counted", domain=DOMAIN)
def counted(ctx: Lowering, x: Tensor) -> Tensor:
    ANALYZED.append(x.rank)
    return ctx.empty(x.shape, x.dtype)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("second", "single_nodes", "analyses"), [("Transpose", False, 1), ("Broken", False, 2), ("Transpose", True, 2)]
)
def test_a_cluster_is_analyzed_alone_unless_it_is_the_whole_graph(
    second: str, single_nodes: bool, analyses: int
) -> None:
    ANALYZED.clear()
    b = Builder()
    claim(b.graph(b.node(second, b.node("Counted", b.input("x", "n", 3)))), DEVICE, single_nodes=single_nodes)
    assert len(ANALYZED) == analyses
