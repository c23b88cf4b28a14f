"""Unknown ranks: nodes that read values whose rank ONNX Runtime does not infer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import parser

import ort_cuda_plugin
from mutation.bases import operators
from mutation.oracle import Kind, judge
from ort_cuda_plugin.ep.provider import last_verdicts
from session_pair import floats

CONSTANTS = """<int64[1] first = {0}, int64[1] one = {1}, int64[1] flat = {-1}, int64 zero = {0}, float low = {0.0},
    float[2, 2] m = {1.0, 2.0, 3.0, 4.0}, float[1, 2, 1, 1] kernel = {1.0, 2.0}, int64[1] last = {-1},
    float[2] w = {0.5, 2.0}>"""


def make(graph: str) -> bytes:
    opsets = '["" : 18, "ai.onnx.ml" : 3]'
    return bytes(parser.parse_model(f"<ir_version: 9, opset_import: {opsets}> m {graph}").SerializeToString())


def after_reshape(nodes: str) -> str:
    """Return a graph in which ``nodes`` compute y from r = Reshape(x, s). The length of ``s`` is the rank of r."""
    return f"(float[n] x, int64[k] s) => (float[] y) {CONSTANTS} {{ r = Reshape(x, s) {nodes} }}"


def sessions(graph: str) -> tuple[ort.InferenceSession, ort.InferenceSession]:
    """Return a session on the plugin and one on the CPU provider."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4  # no warnings about the ranks that the models declare for their results
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    ort_cuda_plugin.register(emulate=True)
    providers = ["CudaPluginExecutionProvider", "CPUExecutionProvider"]
    return tuple(ort.InferenceSession(make(graph), options, providers=chosen) for chosen in (providers, providers[1:]))


def elsewhere(session: ort.InferenceSession) -> list[str]:
    parts = session.get_provider_graph_assignment_info()
    return sorted(node.op_type for part in parts if part.ep_name == "CPUExecutionProvider" for node in part.get_nodes())


def of_shape(*shape: int) -> dict[str, np.ndarray]:
    return {"x": floats(int(np.prod(shape))), "s": np.array(shape, np.int64)}


def assert_equal(pair: Sequence[ort.InferenceSession], feed: dict[str, np.ndarray]) -> None:
    ours, cpu = (session.run(None, feed) for session in pair)
    for actual, expected in zip(ours, cpu, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5, strict=True)


ANY_RANK = {
    "elementwise": ("a = Mul(r, w) b = Greater(a, low) y = Where(b, a, r)", 0),
    "reductions": ("a = ReduceSum(r, last) b = ReduceMean<keepdims = 0>(r, first) c = ReduceMax(r) d = Add(a, c) "
                   "y = Sub(d, b)", 0),
    "products": ("a = MatMul(r, m) y = Transpose(a)", 1),
    "shapes": ("a = Shape(r) b = Flatten(r) c = Reshape(r, flat) d = Concat<axis = 0>(c, c) e = Size(r) "
               "f = Cast<to = 1>(e) g = Cast<to = 1>(a) h = ReduceSum(g) i = ReduceSum(b) j = Mul(h, i) k = Mul(j, f) "
               "y = Add(d, k)", 1),
    "positions": ("a = Gather(r, first) b = Slice(r, first, one, first) c = Concat<axis = 0>(a, b) d = Softmax(c) "
                  "i = ArgMax(d) j = Cast<to = 1>(i) y = Add(d, j)", 1),
    "normalization": ("a = LayerNormalization(r, w) y = Relu(a)", 1),
}  # fmt: skip
SHAPES = [(), (2,), (3, 2), (2, 1, 2), (1, 2, 3, 2), (2, 1, 1, 2, 2)]


@pytest.mark.parametrize("name", ANY_RANK)
def test_nodes_run_here_whatever_rank_a_run_brings(name: str) -> None:
    nodes, least = ANY_RANK[name]
    pair = sessions(after_reshape(nodes))
    assert elsewhere(pair[0]) == ["Reshape"]
    for _ in range(2):
        before = ort_cuda_plugin.counters()["plan_variants_built"]
        for shape in SHAPES[least:]:
            assert_equal(pair, of_shape(*shape))
    assert ort_cuda_plugin.counters()["plan_variants_built"] == before, "the second round needs no plan"


def test_an_operator_that_takes_one_rank_runs_here_and_a_run_with_another_names_node_input_and_rank() -> None:
    pair = sessions(after_reshape("a = Neg(r) y = Conv(a, kernel)"))
    assert elsewhere(pair[0]) == ["Reshape"]
    assert_equal(pair, of_shape(1, 2, 3, 1))
    with pytest.raises(Exception, match=r"node y \(Conv\).*'r' has rank 3"):
        pair[0].run(None, of_shape(1, 2, 3))
    assert_equal(pair, of_shape(2, 2, 1, 3))


def test_an_operator_that_lacks_some_rank_runs_elsewhere() -> None:
    pair = sessions(after_reshape("a = GlobalLpPool(r) y = Neg(a)"))
    assert elsewhere(pair[0]) == ["GlobalLpPool", "Reshape"]
    (verdict,) = [verdict for verdict in last_verdicts() if verdict.op_type == "GlobalLpPool"]
    assert "spatial dimensions" in verdict.reason
    assert "a rank of its inputs is not known" in verdict.reason
    assert_equal(pair, of_shape(1, 2, 3, 2))


def test_an_input_of_the_model_without_a_shape() -> None:
    model = onnx.load_model_from_string(make("(float[] x, float[] y) => (float[] z) { s = Add(x, y) z = Exp(s) }"))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    ours = ort_cuda_plugin.session(model.SerializeToString(), emulate=True)
    assert elsewhere(ours) == []
    for left, right in (((), (2,)), ((2, 3), (3,)), ((4,), (2, 1, 4)), ((), ())):
        feed = {"x": floats(*left), "y": floats(*right)}
        np.testing.assert_allclose(ours.run(None, feed)[0], np.exp(feed["x"] + feed["y"]), rtol=1e-6, strict=True)


@pytest.mark.parametrize(
    "result", ["y = Neg(l)", "y = Softmax(l)", "t = Transpose(l) y = ReduceMax(t)", "y = MatMul(l, l)"]
)
def test_what_follows_a_loop_runs_here(result: str) -> None:
    pair = sessions(
        """(float[n, 2] x, int64 trips) => (float[] y) { a = Exp(x)
        l = Loop(trips, , a) <body = b (int64 i, bool on, float[p, 2] carried) => (bool still, float[p, 2] next)
          { still = Identity(on) next = Add(carried, x) }> RESULT }""".replace("RESULT", result)
    )
    assert not {"Softmax", "Neg", "MatMul", "ReduceMax", "Transpose"} & set(elsewhere(pair[0]))
    for rows, trips in ((2, 3), (2, 0), (2, 1)):
        assert_equal(pair, {"x": floats(rows, 2), "trips": np.array(trips)})


IF = """(float[2, 3] x, CONDITION) => (float[] y) { zero = Constant<value_float = 0.0>() COMPUTED
    b = If(c) <then_branch = yes () => (float[2, 3] t) { t = Neg(x) },
      else_branch = no () => (float[1, 2, 3] e) { axis = Constant<value_ints = [0]>() e = Unsqueeze(x, axis) }>
    d = Exp(b) y = ReduceSum(d) }"""


@pytest.mark.parametrize("computed", [False, True])
def test_an_if_whose_branches_have_different_ranks(computed: bool) -> None:
    condition, nodes = ("float s", "c = Greater(s, zero)") if computed else ("bool c", "")
    pair = sessions(IF.replace("CONDITION", condition).replace("COMPUTED", nodes))
    assert {"Exp", "ReduceSum"}.isdisjoint(elsewhere(pair[0]))
    if not computed:
        assert elsewhere(pair[0]) == []
    for chosen in (True, False):
        value = np.array(float(chosen), np.float32) if computed else np.array(chosen)
        assert_equal(pair, {"x": floats(2, 3), "s" if computed else "c": value})


def test_what_follows_an_operator_of_ai_onnx_ml_runs_here() -> None:
    pair = sessions(
        """(float[n, 2] x) => (float[n, 2] y, float[] z) <float[2, 2] m = {1.0, 2.0, 3.0, 4.0}> { a = Neg(x)
        l = ai.onnx.ml.Imputer<imputed_value_floats = [1.0], replaced_value_float = 0.0>(a) b = MatMul(l, m)
        y = Gemm(b, m) label, score = ai.onnx.ml.LinearClassifier<coefficients = [1.0, 2.0, 3.0, 4.0],
          classlabels_ints = [0, 1], intercepts = [0.0, 0.0]>(y)
        c = Softmax(score) d = ReduceMax(c) e = Cast<to = 1>(label) z = Add(d, e) }"""
    )
    assert set(elsewhere(pair[0])) <= {"Imputer", "LinearClassifier"}
    for rows in (1, 4):
        assert_equal(pair, {"x": floats(rows, 2)})


def test_values_of_unknown_rank_cross_several_clusters() -> None:
    cut = "s1 = Cast<to = 8>(a) r1 = Cast<to = 1>(s1)"
    pair = sessions(after_reshape(f"a = Neg(r) {cut} y = Add(r1, a)"))
    assert elsewhere(pair[0]) == ["Cast", "Cast", "Reshape"]
    for shape in ((2,), (1, 2, 2)):
        assert_equal(pair, {"x": np.ones(int(np.prod(shape)), np.float32), "s": np.array(shape, np.int64)})


@pytest.mark.parametrize("length", [1, 2])
def test_index_tuples_of_unknown_length(length: int) -> None:
    shape = "k, 4" if length == 1 else "k"
    ours = ort_cuda_plugin.session(
        make(f"""(float16[3, 4] x, int64[k, l] i, float16[{shape}] u) => (float16[3, 4] y)
            {{ a = Neg(x) y = ScatterND<reduction = "add">(a, i, u) }}"""),
        emulate=True,
    )
    assert elsewhere(ours) == []
    indices = np.array([[2, 1], [0, 3], [2, 1]])[:, :length]
    x, u = (floats(*shape).astype(np.float16) for shape in ((3, 4), (3, 4) if length == 1 else (3,)))
    expected = -x.astype(np.float64)
    for place, update in zip(indices, u, strict=True):
        expected[tuple(place)] += update
    (y,) = ours.run(None, {"x": x, "i": indices, "u": u})
    np.testing.assert_allclose(y, expected, rtol=2e-3, atol=2e-3)
    with pytest.raises(Exception, match=rf"ScatterND.*indices must have the size {length} in dimension"):
        ours.run(None, {"x": x, "i": indices[:, [0] * (3 - length)], "u": u})


def test_results_whose_rank_is_that_of_unknown_index_tuples() -> None:
    pair = sessions("(float[3, 4, 2] x, int64[k, l] i) => (float[] y) { g = GatherND(x, i) y = Exp(g) }")
    assert elsewhere(pair[0]) == []
    for length in (1, 2, 3, 1):
        assert_equal(pair, {"x": floats(3, 4, 2), "i": np.array([[2, 1, 0], [0, 3, 1]])[:, :length]})


def test_operators_run_as_on_the_cpu_provider_where_no_input_has_a_shape() -> None:
    findings, agree = [], 0
    bases = sorted(operators(per_operator=1).items())[::3]
    for key, base in bases:
        model = onnx.load_model_from_string(base.model)
        for value in (*model.graph.input, *model.graph.output):
            if value.type.HasField("tensor_type"):
                value.type.tensor_type.ClearField("shape")
        outcome = judge(model.SerializeToString(), base.feeds, 0, lambda stage: None)
        findings += [f"{key}: {outcome.kind} {outcome.detail}"] if outcome.is_finding else []
        agree += outcome.kind is Kind.AGREES
    assert not findings, "\n".join(findings)
    assert agree > 0.7 * len(bases)
