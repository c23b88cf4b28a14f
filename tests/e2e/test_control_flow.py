"""If, Loop and Scan run by ONNX Runtime with bodies compiled by the plugin: results, placement, and copies."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper, parser

import ort_cuda_plugin
from ort_cuda_plugin.ep.provider import last_verdicts
from session_pair import floats

Feed = dict[str, np.ndarray]
LEVELS = ort.GraphOptimizationLevel


def parse(text: str, opset: int = 18, weights: Feed | None = None) -> bytes:
    model: onnx.ModelProto = parser.parse_model(f'<ir_version: 9, opset_import: ["" : {opset}]> m {text}')
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in (weights or {}).items())
    return bytes(model.SerializeToString())


class Pair:
    """Sessions on the plugin and on the CPU provider, without ONNX Runtime's graph optimizations."""

    def __init__(self, model: bytes, **provider_options: object) -> None:
        options = ort.SessionOptions()
        options.graph_optimization_level = LEVELS.ORT_DISABLE_ALL
        options.log_severity_level = 3
        self.cpu = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.ours = ort_cuda_plugin.session(
            model, emulate=True, sess_options=options, provider_options=provider_options
        )

    def elsewhere(self) -> list[str]:
        """Return the operators that do not run on the plugin."""
        parts = self.ours.get_provider_graph_assignment_info()
        name = ort_cuda_plugin.get_ep_name()
        return sorted(node.op_type for part in parts if part.ep_name != name for node in part.get_nodes())

    def check(self, **feed: np.ndarray) -> dict[str, int]:
        """Run both sessions and compare. Return the change of each counter during the plugin's Run."""
        expected = self.cpu.run(None, feed)
        before = ort_cuda_plugin.counters()
        results = self.ours.run(None, feed)
        after = ort_cuda_plugin.counters()
        for actual, wanted in zip(results, expected, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=2e-5, atol=1e-5, strict=True)
        return {name: after[name] - before[name] for name in after}


DECODER = """(int64[1] first, float[p, 8] keys, float[p, 8] values, int64 steps)
    => (int64[s, 1] tokens, float[q, 8] k_last) {
      last, k_last, v_last, tokens = Loop(steps, , first, keys, values) <body = step
        (int64 i, bool on, int64[1] token, float[k, 8] k_in, float[k, 8] v_in)
        => (bool on, int64[1] next, float[r, 8] k_out, float[r, 8] v_out, int64[1] chosen)
      { e = Gather(embedding, token)  q = MatMul(e, wq)  k = MatMul(e, wk)  v = MatMul(e, wv)
        k_out = Concat<axis = 0>(k_in, k)  v_out = Concat<axis = 0>(v_in, v)
        kt = Transpose<perm = [1, 0]>(k_out)  scores = MatMul(q, kt)  p = Softmax(scores)
        o = MatMul(p, v_out)  logits = MatMul(o, head)
        next = ArgMax<axis = 1, keepdims = 0>(logits)  chosen = Identity(next) }> }"""


def decoder_weights() -> Feed:
    shapes = {"embedding": (32, 8), "wq": (8, 8), "wk": (8, 8), "wv": (8, 8), "head": (8, 32)}
    return {name: floats(*shape) for name, shape in shapes.items()}


def test_the_growing_state_of_a_decoder_loop_stays_on_the_device() -> None:
    pair = Pair(parse(DECODER, weights=decoder_weights()))
    assert pair.elsewhere() == []
    feed = {"first": np.array([3]), "keys": floats(2, 8), "values": floats(2, 8), "steps": np.array(64)}
    pair.check(**feed)
    grown = pair.check(**feed)
    assert grown["runs"] == 64
    assert (grown["copies_h2d"], grown["copies_d2h"]) == (3, 2)  # copies of inputs and outputs; sizes stay on the host
    assert grown["python_calls"] == 0
    assert grown["host_value_reads"] == 0


ENDS = """(float[n, 4] x, int64 most) => (float[n, 4] y, float[s, n, 4] each)
    { yes = Constant<value = bool {1}>()
      y, each = Loop(most, yes, x) <body = step (int64 i, bool on, float[k, 4] state)
        => (bool still, float[k, 4] next, float[k, 4] out)
      { more = Mul(state, state)  next = Add(more, x)  sum = ReduceMax<keepdims = 0>(next)
        limit = Constant<value_float = 900.0>()  still = Less(sum, limit)  out = Neg(next) }> }"""


def test_a_condition_that_is_computed_comes_back_once_in_each_iteration() -> None:
    pair = Pair(parse(ENDS))
    assert pair.elsewhere() == []
    x = np.full((3, 4), 1.25, np.float32)
    steps = len(pair.cpu.run(None, {"x": x, "most": np.array(50)})[1])
    assert 2 < steps < 50
    pair.check(x=x, most=np.array(50))
    grown = pair.check(x=x, most=np.array(50))
    assert (grown["copies_h2d"], grown["copies_d2h"]) == (1, steps + 2)
    assert grown["python_calls"] == 0
    assert pair.check(x=x, most=np.array(2))["copies_d2h"] == 4
    pair.check(x=x, most=np.array(1))


def test_a_condition_that_needs_no_device_is_left_to_the_host() -> None:
    text = """(float[n, 4] x, int64 most, bool c) => (float[n, 4] y)
        { y = Loop(most, c, x) <body = step (int64 i, bool on, float[k, 4] state) => (bool still, float[k, 4] next)
          { one = Constant<value_int = 1>()  j = Add(i, one)  less = Less(j, few)  still = And(on, less)
            next = Add(state, x) }> }"""
    feed = {"x": floats(2, 4), "most": np.array(6), "c": np.array(True)}
    few = "few = Constant<value_int = 3>()  one"
    pair = Pair(parse(text.replace("one = Constant", few + " = Constant")), device_loops=0)
    assert pair.elsewhere() == ["Add", "And", "Less"]
    costs = [verdict for verdict in last_verdicts() if verdict.kind == "cost"]
    assert {verdict.body_of for verdict in costs} == {"y (Loop)"}
    assert "copying them costs more time than the device saves" in costs[0].reason
    grown = pair.check(**feed)
    assert (grown["runs"], grown["copies_h2d"], grown["copies_d2h"]) == (3, 1, 1)
    # With claim_unprofitable_nodes the plugin also runs these nodes, and copies their values in each iteration.
    everything = Pair(
        parse(text.replace("one = Constant", few + " = Constant")), claim_unprofitable_nodes=1, device_loops=0
    )
    assert everything.elsewhere() == []
    everything.check(**feed)


NESTED = """(float[n, 4] x, int64 trips) => (float[4] last, float[4, n] y)
    { axis = Constant<value_ints = [0]>()  sum = ReduceSum<keepdims = 0>(x, axis)
      last, y = Scan<num_scan_inputs = 1, scan_output_axes = [1], body = outer (float[4] state, float[4] row)
        => (float[4] next, float[4] out) {
          next = Loop(trips, , state) <body = inner (int64 i, bool on, float[4] c) => (bool on, float[4] d) {
            s = ReduceSum<keepdims = 0>(c)  most = Constant<value_float = 20.0>()  large = Greater(s, most)
            d = If(large) <then_branch = yes () => (float[4] t) { h = Constant<value_float = 0.25>()  t = Mul(c, h) },
              else_branch = no () => (float[4] e) { e = Add(c, row) }> }>
          out = Neg(next) }>(sum, x) }"""


def test_an_if_in_a_loop_in_a_scan_runs_here() -> None:
    pair = Pair(parse(NESTED), device_loops=0)
    assert pair.elsewhere() == []
    ours = {(verdict.op_type, verdict.body_of) for verdict in last_verdicts() if verdict.supported}
    assert ours >= {("If", "next (Loop)"), ("Loop", "last (Scan)"), ("Scan", "")}
    x = np.abs(floats(6, 4)) * 3
    pair.check(x=x, trips=np.array(3))
    grown = pair.check(x=x, trips=np.array(3))
    # ORT copies the outer values that a Scan reads to the device, even the trip count that Loop reads on the host.
    assert grown["copies_h2d"] == 2
    assert grown["copies_d2h"] == 2 + 6 * 3 + 6  # 2 results; in each of 6 steps: 3 conditions of If, the trip count
    pair.check(x=x[:1], trips=np.array(0))


def conditional(outer: str, then_nodes: str, else_nodes: str, inputs: str) -> str:
    return f"""({inputs}) => (float[n, 16] y) {{ {outer}
        y = If(c) <then_branch = yes () => (float[p, 16] t) {{ {then_nodes} }},
          else_branch = no () => (float[q, 16] e) {{ {else_nodes} }}> }}"""


@pytest.mark.parametrize("computed", [False, True])
def test_both_large_branches_of_a_merged_decoder_run_here(computed: bool) -> None:
    branch = "{0}1 = MatMul({1}, w{0})  {0}2 = Tanh({0}1)  {0}3 = MatMul({0}2, w{0})  {0}4 = Sigmoid({0}3)  {2}"
    condition = "total = ReduceSum<keepdims = 0>(past)  zero = Constant<value_float = 0.0>()  c = Greater(total, zero)"
    text = conditional(
        "h = Add(x, past) " + (condition if computed else ""),
        branch.format("a", "h", "t = Add(a4, h)"),
        branch.format("b", "x", "e = Mul(b4, h)"),
        "float[n, 16] x, float[n, 16] past" + ("" if computed else ", bool c"),
    )
    pair = Pair(parse(text, weights={"wa": floats(16, 16), "wb": floats(16, 16)}))
    assert pair.elsewhere() == []
    for sign in (1, -1, 1, -1):
        feed = {"x": floats(2, 16), "past": sign * np.abs(floats(2, 16))}
        pair.check(**feed, **({} if computed else {"c": np.array(sign > 0)}))


def test_a_streaming_model_with_an_if_on_the_sample_rate_runs_here() -> None:
    weights = {"w16": floats(4, 1, 8), "w8": floats(4, 1, 4)}
    text = """(float[1, n] audio, int64 rate, float[1, 4] state) => (float[1, 4] new, float[1, 1] speech)
        { high = Constant<value_int = 16000>()  c = Equal(rate, high)  one = Constant<value_ints = [1]>()
          x = Unsqueeze(audio, one)
          f = If(c) <then_branch = yes () => (float[1, 4, p] t) { a = Conv<strides = [4]>(x, w16)  t = Relu(a) },
            else_branch = no () => (float[1, 4, q] e) { b = Conv<strides = [2]>(x, w8)  e = Relu(b) }>
          two = Constant<value_ints = [2]>()  m = ReduceMean<keepdims = 0>(f, two)
          s = Add(m, state)  new = Tanh(s)  p = ReduceMean<keepdims = 1>(new, one)  speech = Sigmoid(p) }"""
    pair = Pair(parse(text, weights=weights))
    assert pair.elsewhere() == []
    for rate, samples in ((16000, 64), (8000, 32), (16000, 64), (8000, 48)):
        pair.check(audio=floats(1, samples), rate=np.array(rate), state=floats(1, 4))


def test_what_pays_runs_here_also_where_the_host_must_run_the_node() -> None:
    text = """(float[n, 16] x, bool c, string[k] s) => (string[k] z, float[n, 16] y)
        { z, y = If(c) <then_branch = yes () => (string[k] t, float[n, 16] a) { t = Identity(s)  a = MatMul(x, w) },
            else_branch = no () => (string[k] e, float[n, 16] b) { e = Identity(s)  b = Neg(x) }> }"""
    model = parse(text, weights={"w": floats(16, 16)})
    pair = Pair(model)
    assert pair.elsewhere() == ["Identity", "Identity", "If", "Neg"]
    verdicts = {(verdict.op_type, verdict.body_of): verdict for verdict in last_verdicts()}
    assert "strings" in verdicts[("If", "")].reason
    assert verdicts[("Neg", "z (If)")].kind == "cost"
    feed = {"x": floats(2, 16), "s": np.array(["a", "b", "c"])}
    for condition in (True, False):
        expected = pair.cpu.run(None, feed | {"c": np.array(condition)})
        results = pair.ours.run(None, feed | {"c": np.array(condition)})
        assert list(results[0]) == list(expected[0])
        np.testing.assert_allclose(results[1], expected[1], rtol=1e-5)


SIZES = ["bool", "int8", "float16", "float32", "float64"]


@pytest.mark.parametrize("dtype", SIZES)
def test_a_scan_along_any_axis_moves_it_on_the_device(dtype: str) -> None:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    body = helper.make_graph(
        [helper.make_node("Identity", ["a"], ["b"]), helper.make_node("Identity", ["c"], ["d"])],
        "body",
        [helper.make_tensor_value_info("a", kind, None), helper.make_tensor_value_info("c", kind, None)],
        [helper.make_tensor_value_info("b", kind, None), helper.make_tensor_value_info("d", kind, None)],
    )
    scan = helper.make_node(
        "Scan",
        ["x", "z"],
        ["y", "v"],
        body=body,
        num_scan_inputs=2,
        scan_input_axes=[1, -1],
        scan_output_axes=[3, 0],
        scan_input_directions=[0, 1],
        scan_output_directions=[1, 0],
    )
    values = [helper.make_tensor_value_info(name, kind, None) for name in "yv"]
    inputs = [
        helper.make_tensor_value_info("x", kind, ["i", "n", "j", "k"]),
        helper.make_tensor_value_info("z", kind, ["m", "n"]),
    ]
    graph = helper.make_graph([scan], "g", inputs, values)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 16)], ir_version=8)
    pair = Pair(model.SerializeToString())
    assert pair.elsewhere() == []
    rng = np.random.default_rng(0)
    for sizes in ((2, 5, 3, 4), (1, 2, 1, 7), (2, 5, 3, 4)):
        x = rng.integers(0, 2 if dtype == "bool" else 100, sizes).astype(dtype)
        grown = pair.check(x=x, z=x[0, :, 0].T.copy())
        assert (grown["copies_h2d"], grown["copies_d2h"]) == (2, 2)
    assert grown["python_calls"] == 0


def test_no_iteration_gives_empty_results() -> None:
    text = """(float[n, 4] x, float[m, 4] z, int64 trips) => (float[n, 4] y, float[k, n, 4] each,
          float[4] last, float[l, 4] rows)
        { y, each = Loop(trips, , x) <body = step (int64 i, bool on, float[n, 4] s)
            => (bool on, float[n, 4] t, float[n, 4] u) { t = Add(s, x)  u = Neg(t) }>
          axis = Constant<value_ints = [0]>()  sum = ReduceSum<keepdims = 0>(x, axis)
          last, rows = Scan<num_scan_inputs = 1, body = one (float[4] a, float[4] b) => (float[4] c, float[4] d)
            { c = Add(a, b)  d = Neg(c) }>(sum, z) }"""
    pair = Pair(parse(text))
    assert pair.elsewhere() == []
    x = floats(2, 4)
    for trips, rows in ((2, 3), (0, 1), (1, 2)):
        pair.check(x=x, z=floats(rows, 4), trips=np.array(trips))


def test_threads_that_share_a_session_have_their_own_loops() -> None:
    pair = Pair(parse(DECODER, weights=decoder_weights()))

    def work(thread: int) -> None:
        for steps in (3, 7, 5):
            feed = {"first": np.array([thread]), "keys": floats(thread, 8), "values": floats(thread, 8)}
            feed["steps"] = np.array(steps)
            for actual, wanted in zip(pair.ours.run(None, feed), pair.cpu.run(None, feed), strict=True):
                np.testing.assert_allclose(actual, wanted, rtol=2e-5, atol=1e-5)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, (1, 2, 3)))


def test_a_capture_of_whole_runs_is_refused_where_a_kernel_runs_a_loop() -> None:
    with pytest.raises(Exception, match=r"cannot use the graph capture feature .* control flow nodes"):
        Pair(parse(ENDS), enable_cuda_graph=1)


def types_of(op_type: str) -> set[tuple[int, int]]:
    from onnxruntime.capi import _pybind_state

    Pair(parse(ENDS))
    definitions: list[Any] = _pybind_state.get_registered_ep_kernel_defs(ort_cuda_plugin.get_ep_name())
    return {tuple(d.version_range) for d in definitions if d.op_name == op_type and d.domain == ""}


@pytest.mark.parametrize(("op_type", "first"), [("If", 1), ("Loop", 1), ("Scan", 9)])
def test_the_registry_has_control_flow_of_every_opset(op_type: str, first: int) -> None:
    ranges = sorted(types_of(op_type))
    assert ranges[0][0] == first
    assert [start for start, _ in ranges[1:]] == [end + 1 for _, end in ranges[:-1]]
    assert ranges[-1][1] == 2**31 - 1
