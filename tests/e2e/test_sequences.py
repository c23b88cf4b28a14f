"""Sequences and optional values: the plugin runs their operators within a cluster; they cannot enter or leave it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

import ort_cuda_plugin
from ort_cuda_plugin.clusters.claims import claims
from ort_cuda_plugin.ep.provider import last_verdicts
from ort_cuda_plugin.ops import registry
from session_pair import floats

INSIDE = {
    "SequenceConstruct and SequenceAt": """(float[n, 4] x) => (float[n, 4] y)
        { a = Neg(x) b = Exp(x) s = SequenceConstruct(a, b, x) i = Constant<value_int = -2>() c = SequenceAt(s, i)
          y = Add(c, a) }""",
    "a position that is fed": """(float[n, 4] x, int64 i) => (float[] y)
        { a = Neg(x) two = Constant<value_ints = [0]>() b = Unsqueeze(x, two) s = SequenceConstruct(a, b)
          c = SequenceAt(s, i) y = Exp(c) }""",
    "several positions that are fed": """(float[n, 4] x, int64 i) => (float[n, 4] y)
        { a = Neg(x) s = SequenceConstruct(a, x, x) t = SequenceErase(s, i) u = SequenceInsert(t, a, i)
          y = SequenceAt(u, i) }""",
    "a position in a long sequence": """(float[n, 4] x, int64 i) => (float[n, 1] y)
        { w = Concat<axis = 1>(x, x, x) s = SplitToSequence<axis = 1>(w)
          c = SequenceAt(s, i) y = Exp(c) }""",
    "SequenceEmpty, SequenceInsert, SequenceErase, SequenceLength": """(float[n, 4] x) => (float[n, 4] y, int64 l)
        { e = SequenceEmpty<dtype = 1>() a = Neg(x) zero = Constant<value_int = 0>() s1 = SequenceInsert(e, x)
          s2 = SequenceInsert(s1, a, zero) b = Exp(x) s3 = SequenceInsert(s2, b) s4 = SequenceErase(s3, zero)
          s5 = Identity(s4) s6 = SequenceErase(s5) l = SequenceLength(s5) y = SequenceAt(s6, zero) }""",
    "ConcatFromSequence": """(float[n, 4] x) => (float[m, 4] y, float[n, 4, 2] z)
        { a = Neg(x) s = SequenceConstruct(a, x) y = ConcatFromSequence<axis = 0>(s)
          z = ConcatFromSequence<axis = -1, new_axis = 1>(s) }""",
    "SplitToSequence": """(float[n, 4] x) => (float[n, 1] y, float[n, 3] z, float[n] u, float[n, 1] v)
        { sizes = Constant<value_ints = [1, 3]>() s = SplitToSequence<axis = 1>(x, sizes)
          i = Constant<value_int = 0>() j = Constant<value_int = 1>() y = SequenceAt(s, i) z = SequenceAt(s, j)
          t = SplitToSequence<axis = -1, keepdims = 0>(x) u = SequenceAt(t, j) three = Constant<value_int = 3>()
          w = SplitToSequence<axis = 1>(x, three) v = SequenceAt(w, j) }""",
    "a sequence that a Loop builds": """(float[n, 4] x) => (float[m, 4] y)
        { e = SequenceEmpty<dtype = 1>() trips = Constant<value_int = 3>()
          s = Loop(trips, , e) <body = b (int64 i, bool on, seq(float[p, 4]) carried)
            => (bool still, seq(float[p, 4]) next)
            { still = Identity(on) f = Cast<to = 1>(i) g = Add(x, f) next = SequenceInsert(carried, g) }>
          y = ConcatFromSequence<axis = 0>(s) }""",
    "optional values": """(float[n, 4] x) => (float[n, 4] y, bool h)
        { a = Neg(x) o = Optional(a) p = Identity(o) h = OptionalHasElement(p) b = OptionalGetElement(p)
          s = SequenceConstruct(b, x) q = Optional(s) t = OptionalGetElement(q) i = Constant<value_int = 0>()
          c = SequenceAt(t, i) y = Exp(c) }""",
}


def sessions(text: str) -> tuple[ort.InferenceSession, ort.InferenceSession]:
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]> m {text}')
    return of_model(model)


def of_model(model: onnx.ModelProto, **provider_options: int) -> tuple[ort.InferenceSession, ort.InferenceSession]:
    """Return a session on the plugin and one on the CPU provider."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    ort_cuda_plugin.register(emulate=True)
    providers = [("CudaPluginExecutionProvider", provider_options), "CPUExecutionProvider"]
    data = model.SerializeToString()
    return tuple(ort.InferenceSession(data, options, providers=chosen) for chosen in (providers, providers[1:]))


def clusters(session: ort.InferenceSession) -> list[list[str]]:
    parts = session.get_provider_graph_assignment_info()
    return [[node.op_type for node in part.get_nodes()] for part in parts if part.ep_name.startswith("Cuda")]


def elsewhere(session: ort.InferenceSession) -> set[str]:
    parts = session.get_provider_graph_assignment_info()
    return {node.op_type for part in parts if part.ep_name == "CPUExecutionProvider" for node in part.get_nodes()}


def assert_equal(pair: tuple[ort.InferenceSession, ort.InferenceSession], feed: dict[str, Any]) -> None:
    ours, cpu = (session.run(None, feed) for session in pair)
    for actual, expected in zip(ours, cpu, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, strict=True)


@pytest.mark.parametrize("name", INSIDE)
def test_sequences_within_one_cluster(name: str) -> None:
    pair = sessions(INSIDE[name])
    assert elsewhere(pair[0]) == set()
    assert len(clusters(pair[0])) == 1
    has_position = any(value.name == "i" for value in pair[0].get_inputs())
    for rows, position in ((2, 0), (3, 1), (1, -1)):
        assert_equal(pair, {"x": floats(rows, 4)} | ({"i": np.array(position)} if has_position else {}))
    if has_position and "long" not in name:
        with pytest.raises(Exception, match=r"Sequence(At|Erase)\): position must be in .*, got 3"):
            pair[0].run(None, {"x": floats(1, 4), "i": np.array(3)})


def test_what_makes_a_sequence_is_in_the_cluster_that_reads_it() -> None:
    """SequenceConstruct moves to the second cluster, which reads its result, since no sequence can leave a cluster."""
    pair = sessions(
        """(float[n, 4] x) => (float[n, 4] y) { a = Neg(x) s = SequenceConstruct(a, x) t = Cast<to = 8>(a)
        b = Cast<to = 1>(t) u = SequenceInsert(s, b) i = Constant<value_int = 0>() c = SequenceAt(u, i)
        y = Add(c, b) }"""
    )
    assert elsewhere(pair[0]) == {"Cast"}
    assert clusters(pair[0]) == [["Neg"], ["SequenceConstruct", "SequenceInsert", "SequenceAt", "Add"]]
    assert_equal(pair, {"x": np.ones((2, 4), np.float32)})


@pytest.mark.parametrize(
    ("text", "op_type", "reason"),
    [
        (
            "(float[n, 4] x) => (seq(float[n, 4]) s) { a = Neg(x) s = SequenceConstruct(a, x) }",
            "SequenceConstruct",
            "'s' is not a tensor, and a fused node can output only tensors",
        ),
        (
            "(seq(float[n, 4]) x) => (float[n, 4] y) { i = Constant<value_int = 0>() a = SequenceAt(x, i) y = Neg(a) }",
            "SequenceAt",
            "'x' is not a tensor",
        ),
        (
            """(float[n, 4] x) => (float[n, 4] y) { s = SequenceConstruct(x, x) m = ArgMax<axis = 1, keepdims = 0>(x)
            zero = Constant<value_int = 0>() i = Gather(m, zero) a = SequenceAt(s, i) y = Neg(a) }""",
            "SequenceAt",
            "SequenceAt: position is computed on the device; supported: values from shapes and inputs",
        ),
        (
            """(float[n, 12] x, int64 i) => (float[n, 1] y) { zero = Constant<value_int = 0>()
            s = SplitToSequence<axis = 1>(x) t = SequenceErase(s, i) y = SequenceAt(t, zero) }""",
            "SequenceErase",
            "SequenceErase: position is known only when the model runs, and has 12 possible values; supported: up to 9",
        ),
        (
            """(float[n, 4] x) => (float[m, 4] y) { i = Constant<value_int = 0>() s = SplitToSequence(x)
            a = SequenceAt(s, i) y = Neg(a) }""",
            "SplitToSequence",
            "the number of parts is known only when the model runs",
        ),
    ],
)
def test_sequences_that_a_plan_cannot_hold_run_elsewhere(text: str, op_type: str, reason: str) -> None:
    pair = sessions(text)
    (verdict,) = [verdict for verdict in last_verdicts() if verdict.op_type == op_type]
    assert reason in verdict.reason
    assert {op for op in elsewhere(pair[0]) if "Sequence" in op} == {
        verdict.op_type for verdict in last_verdicts() if "Sequence" in verdict.op_type
    }
    x = floats(2, 12 if "12] x" in text else 4)
    x[:, 1] = 9  # one of the models uses the 9 as a position
    if op_type != "SequenceConstruct":
        feed = {"x": [x, -x] if "seq(float[n, 4]) x" in text else x}
        assert_equal(pair, feed | ({"i": np.array(3)} if "int64 i" in text else {}))


BESIDE_A_TENSOR = {
    "a sequence of a Loop": """(float[n, 4] x, int64 trips) => (float[n, 4] y, float[m, 4] z)
        { e = SequenceEmpty() y, s = Loop(trips, , x, e) <body = b
            (int64 i, bool on, float[n, 4] state, seq(float[n, 4]) carried)
            => (bool on, float[n, 4] next, seq(float[n, 4]) longer)
            { next = MatMul(state, w) longer = SequenceInsert(carried, next) }>
          z = ConcatFromSequence<axis = 0>(s) }""",
    "a sequence of an If": """(float[n, 4] x, int64 trips) => (float[n, 4] y, float[m, 4] z)
        { one = Constant<value_int = 1>() c = Greater(trips, one)
          y, s = If(c) <then_branch = t () => (float[n, 4] a, seq(float[n, 4]) p)
              { a = MatMul(x, w) p = SequenceConstruct(x, a) },
            else_branch = e () => (float[n, 4] b, seq(float[n, 4]) q) { b = MatMul(x, w) q = SequenceConstruct(b) }>
          z = ConcatFromSequence<axis = 0>(s) }""",
    "an optional value of a Loop": """(float[n, 4] x, int64 trips) => (float[n, 4] y)
        { o = Optional(x) y, last = Loop(trips, , x, o) <body = b
            (int64 i, bool on, float[n, 4] state, optional(float[n, 4]) old)
            => (bool on, float[n, 4] next, optional(float[n, 4]) new) { next = MatMul(state, w) new = Optional(next) }>
        }""",
    "a string of a Loop": """(float[n, 4] x, int64 trips) => (float[n, 4] y, string[n, 4] z)
        { start = Cast<to = 8>(x) y, z = Loop(trips, , x, start) <body = b
            (int64 i, bool on, float[n, 4] state, string[n, 4] old)
            => (bool on, float[n, 4] next, string[n, 4] new) { next = MatMul(state, w) new = Identity(old) }> }""",
    "strings of each iteration": """(float[n, 4] x, int64 trips) => (float[n, 4] y, string[m, n, 4] z)
        { start = Cast<to = 8>(x) y, z = Loop(trips, , x) <body = b (int64 i, bool on, float[n, 4] state)
            => (bool on, float[n, 4] next, string[n, 4] each) { next = MatMul(state, w) each = Identity(start) }> }""",
    "an If in a Loop": """(float[n, 4] x, int64 trips) => (float[n, 4] y, float[m, 4] z)
        { e = SequenceEmpty() y, s = Loop(trips, , x, e) <body = b
            (int64 i, bool on, float[n, 4] state, seq(float[n, 4]) carried)
            => (bool on, float[n, 4] next, seq(float[n, 4]) longer)
            { sum = ReduceSum<keepdims = 0>(state) zero = Constant<value_float = 0.0>() c = Greater(sum, zero)
              next, longer = If(c) <then_branch = t () => (float[n, 4] a, seq(float[n, 4]) p)
                  { a = MatMul(state, w) p = SequenceInsert(carried, a) },
                else_branch = f () => (float[n, 4] d, seq(float[n, 4]) q)
                  { d = MatMul(x, w) q = SequenceInsert(carried, x) }> }>
          z = ConcatFromSequence<axis = 0>(s) }""",
}


@pytest.mark.parametrize("single_nodes", [False, True])
@pytest.mark.parametrize("name", BESIDE_A_TENSOR)
def test_what_stays_on_the_host_beside_a_tensor_keeps_a_control_flow_node_there(name: str, single_nodes: bool) -> None:
    """ONNX Runtime selects the kernel of If and Loop only by the type of the first state, here a tensor.

    The plugin declines such nodes if another state is a sequence, an optional value or a string.
    """
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]> m {BESIDE_A_TENSOR[name]}')
    model.graph.initializer.append(numpy_helper.from_array(np.rint(4 * floats(4, 4)), "w"))
    pair = of_model(model, single_nodes=int(single_nodes))
    declined = [verdict for verdict in last_verdicts() if verdict.op_type in ("If", "Loop")]
    assert declined
    for verdict in declined:
        assert not verdict.supported
        assert "strings, sequences and optional values stay on the host" in verdict.reason
    assert "MatMul" not in elsewhere(pair[0])
    for trips in (0, 3):
        if trips or "SequenceEmpty" not in BESIDE_A_TENSOR[name]:
            feed = {"x": np.rint(4 * floats(2, 4)), "trips": np.array(trips)}
            for actual, expected in zip(*(session.run(None, feed) for session in pair), strict=True):
                np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("where", ["If", "Loop"])
def test_a_body_reads_a_sequence_from_outside(where: str) -> None:
    inside = "first = Constant<value_int = 0>() a = SequenceAt(s, first)"
    node = {
        "If": f"""one = Constant<value_int = 1>() c = Greater(trips, one)
            y = If(c) <then_branch = t () => (float[n, 4] p) {{ {inside} p = MatMul(a, w) }},
            else_branch = e () => (float[n, 4] q) {{ q = MatMul(x, w) }}>""",
        "Loop": f"""y = Loop(trips, , x) <body = b (int64 i, bool on, float[n, 4] state) => (bool on, float[n, 4] next)
            {{ {inside} b = Add(state, a) next = MatMul(b, w) }}>""",
    }[where]
    text = f"""(float[n, 4] x, int64 trips) => (float[n, 4] y)
        {{ t = Cast<to = 8>(x) u = Cast<to = 1>(t) s = SequenceConstruct(u, u) {node} }}"""
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]> m {text}')
    model.graph.initializer.append(numpy_helper.from_array(floats(4, 4), "w"))
    pair = of_model(model)
    assert where not in elsewhere(pair[0])
    assert {"MatMul"}.isdisjoint(elsewhere(pair[0]))
    for trips in (1, 3):
        assert_equal(pair, {"x": np.round(floats(2, 4)), "trips": np.array(trips)})


def test_onnx_runtime_lets_no_fused_node_make_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin never lets a sequence leave a cluster because ORT's C API allocates only tensors as outputs."""
    monkeypatch.setattr(claims, "_crossing", lambda graph, clusters: ())
    row = registry.lookup("", "SequenceConstruct", 11)
    monkeypatch.setattr(type(row), "lower", lambda self, ctx, inputs, attributes: (inputs[0],))
    graph = helper.make_graph(
        [helper.make_node("SequenceConstruct", ["x"], ["s"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, [2])],
    )
    ours, _ = of_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9))
    assert clusters(ours) == [["SequenceConstruct"]]
    with pytest.raises(Exception, match=r"output 0, of node 's \(SequenceConstruct\)'"):
        ours.run(None, {"x": floats(2)})
