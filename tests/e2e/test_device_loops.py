"""Loop and Scan as parts of a plan whose iterations the device counts: results, launches, CUDA graphs, reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, parser

import ort_cuda_plugin
from contexts import assert_same, compile_model, load
from device_faults import faults
from isolated import python
from ort_cuda_plugin.clusters.claims.claims import analyze
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.lowering.context import DeviceProperties
from session_pair import FLOAT, floats, info

Feed = dict[str, np.ndarray]


def parse(text: str, opset: int = 18) -> bytes:
    model: onnx.ModelProto = parser.parse_model(f'<ir_version: 9, opset_import: ["" : {opset}]> m {text}')
    return bytes(model.SerializeToString())


class Pair:
    """A session on the plugin, of which every node must run on the plugin in one cluster, and one on the CPU."""

    def __init__(self, model: bytes, **provider_options: object) -> None:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 3
        self.cpu = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.ours = ort_cuda_plugin.session(
            model, emulate=True, sess_options=options, provider_options=provider_options
        )

    @property
    def is_one_cluster(self) -> bool:
        parts = self.ours.get_provider_graph_assignment_info()
        return [part.ep_name for part in parts] == [ort_cuda_plugin.get_ep_name()]

    def check(self, feed: Feed) -> dict[str, int]:
        """Run both sessions and compare. Return the counters that the plugin's Run changed."""
        expected = self.cpu.run(None, feed)
        before = ort_cuda_plugin.counters()
        results = self.ours.run(None, feed)
        after = ort_cuda_plugin.counters()
        for actual, wanted in zip(results, expected, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=2e-5, atol=1e-5, strict=True)
        return {name: after[name] - before[name] for name in after if after[name] != before[name]}


def scan_model(width: int = 4) -> bytes:
    """Return a selective state-space model: h = a * h + b * x and y = c * h in each step, for [steps, batch, width]."""
    names = ("a", "b", "c", "x")
    body = helper.make_graph(
        [
            helper.make_node("Mul", ["a", "before"], ["kept"]),
            helper.make_node("Mul", ["b", "x"], ["added"]),
            helper.make_node("Add", ["kept", "added"], ["after"]),
            helper.make_node("Mul", ["c", "after"], ["y"]),
        ],
        "step",
        [info(name, FLOAT, ["batch", width]) for name in ("before", *names)],
        [info(name, FLOAT, ["batch", width]) for name in ("after", "y")],
    )
    scan = helper.make_node("Scan", ["first", *map(str.upper, names)], ["last", "Y"], body=body, num_scan_inputs=4)
    inputs = [info("first", FLOAT, ["batch", width])]
    inputs += [info(name.upper(), FLOAT, ["steps", "batch", width]) for name in names]
    outputs = [info("last", FLOAT, ["batch", width]), info("Y", FLOAT, ["steps", "batch", width])]
    graph = helper.make_graph([scan], "ssm", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return bytes(model.SerializeToString())


def scan_feed(steps: int, batch: int = 3, width: int = 4) -> Feed:
    return {"first": floats(batch, width)} | {name: floats(steps, batch, width) for name in "ABCX"}


def test_a_state_space_model_is_one_graph_launch_for_each_request() -> None:
    pair = Pair(scan_model())
    assert pair.is_one_cluster
    cold = pair.check(scan_feed(6))
    # One launch before the loop, and four in each iteration: slices, map, stacked row, counter. The host knows the
    # number of iterations, so it reads no flag back.
    # The map updates the state in place, so the only copy is that of the initial state.
    assert (cold["launches"], cold["copies_d2d"], cold["device_loops"]) == (1 + 6 * 4, 1, 1)
    assert "device_loop_iterations" not in cold
    assert "host_value_reads" not in cold
    pair.check(scan_feed(6))
    warm = [pair.check(scan_feed(6)) for _ in range(3)]
    assert warm[0]["graph_captures"] == 1
    for each in warm:
        assert (each["graph_replays"], each["device_loops"], each["runs"]) == (1, 1, 1)
        assert "python_calls" not in each
        assert "host_value_reads" not in each
    pair.check(scan_feed(2))
    pair.check(scan_feed(9, batch=1))


def test_a_steady_request_is_one_launch_of_an_unchanged_graph() -> None:
    pair = Pair(scan_model())
    binding = pair.ours.io_binding()
    device = {name: ort.OrtValue.ortvalue_from_numpy(x, "cpu") for name, x in scan_feed(5).items()}
    for name, value in device.items():
        binding.bind_ortvalue_input(name, value)
    for name in ("last", "Y"):
        binding.bind_output(name, "cpu")
    for _ in range(4):
        pair.ours.run_with_iobinding(binding)
    before = ort_cuda_plugin.counters()
    for _ in range(3):
        pair.ours.run_with_iobinding(binding)
    after = ort_cuda_plugin.counters()
    grown = {name: after[name] - before[name] for name in after}
    assert (grown["graph_replays"], grown["graph_captures"], grown["graph_updates"]) == (3, 0, 0)
    assert grown["python_calls"] == 0


COUNTED = """(float[n, 4] x, int64 most) => (float[n, 4] y) { y = Loop(most, , x) <body = step
    (int64 i, bool on, float[n, 4] state) => (bool on, float[n, 4] next)
    { f = Cast<to = 1>(i)  t = Mul(f, x)  next = Add(state, t) }> }"""


def test_a_graph_serves_other_trip_counts() -> None:
    pair = Pair(parse(COUNTED))
    assert pair.is_one_cluster
    x = floats(2, 4)
    # Each Run has a new key, so its instance takes over the graph of the previous Run's instance. In this graph, the
    # plugin updates the launch that begins the loop. If the loop reads x at another address, the plugin captures a new
    # graph.
    grown = [pair.check({"x": x, "most": np.array(most)}) for most in (3, 4, 5, 0, 6, 1, -2, 7)]
    assert all(each["graph_replays"] == 1 for each in grown[2:])
    assert all("graph_updates" in each or "graph_captures" in each for each in grown[2:])


CONDITIONS = """(float[n, 4] x, int64 most, bool first, float bound) => (float[n, 4] y, int64 steps)
    { zero = Constant<value_int = 0>()
      y, steps = Loop(most, first, x, zero) <body = step
      (int64 i, bool on, float[n, 4] state, int64 count) => (bool still, float[n, 4] next, int64 counted)
      { next = Add(state, x)  sum = ReduceSum<keepdims = 0>(next)  still = Less(sum, bound)
        one = Constant<value_int = 1>()  counted = Add(count, one) }> }"""


def test_the_device_evaluates_the_condition() -> None:
    pair = Pair(parse(CONDITIONS))
    assert pair.is_one_cluster
    x = np.abs(floats(2, 4)) + 1

    def feed(steps: float, most: int = 100, first: bool = True) -> Feed:
        bound = np.array(x.sum() * (steps + 0.5), np.float32)
        return {"x": x, "most": np.array(most), "first": np.array(first), "bound": bound}

    cold = pair.check(feed(4))
    assert cold["device_loop_iterations"] == 4  # the host reads a flag before each iteration, and one after the last
    assert cold["host_value_reads"] == 5 + 1  # 5 flags, and the trip count
    for each in (feed(4), feed(4), feed(6), feed(50, most=3), feed(3, first=False), feed(0), feed(9, most=0)):
        pair.check(each)
    last = pair.check(feed(5))
    assert last["graph_replays"] == 1
    assert "device_loop_iterations" not in last


BODIES = {
    "swapped states": """(float[4] x, float[4] z, int64 n) => (float[4] a, float[4] b) { a, b = Loop(n, , x, z) <body =
        step (int64 i, bool on, float[4] s, float[4] t) => (bool on, float[4] u, float[4] v)
        { u = Identity(t)  v = Identity(s) }> }""",
    "one value for two results": """(float[4] x, int64 n) => (float[4] a, float[4] b, float[k, 4] c) {
        a, b, c = Loop(n, , x, x) <body = step (int64 i, bool on, float[4] s, float[4] t)
        => (bool on, float[4] u, float[4] u, float[4] u) { u = Add(s, t) }> }""",
    "an unchanged state": """(float[4] x, float[4] z, int64 n) => (float[4] a, float[4] b, float[k, 4] c) {
        a, b, c = Loop(n, , x, z) <body = step (int64 i, bool on, float[4] s, float[4] t)
        => (bool on, float[4] u, float[4] t, float[4] s) { u = Sub(s, t) }> }""",
    "a state that is read after its next value": """(float[4, 4] x, int64 n) => (float[4, 4] a, float[k, 4, 4] b) {
        a, b = Loop(n, , x) <body = step (int64 i, bool on, float[4, 4] s) => (bool on, float[4, 4] t, float[4, 4] m)
        { u = Add(s, x)  t = Tanh(u)  m = MatMul(s, t) }> }""",
    "a state whose next value reads another element": """(float[4, 4] x, int64 n) => (float[4, 4] a) { a = Loop(n, , x)
        <body = step (int64 i, bool on, float[4, 4] s) => (bool on, float[4, 4] t)
        { r = Transpose(s)  u = Add(s, r)  t = Tanh(u) }> }""",
    "a part of a larger result": """(float[4, 4] x, int64 n) => (float[2, 4] a) { axes = Constant<value_ints = [0]>()
        zero = Constant<value_ints = [0]>() two = Constant<value_ints = [2]>() z = Slice(x, zero, two, axes)
        a = Loop(n, , z) <body = step (int64 i, bool on, float[2, 4] s) => (bool on, float[2, 4] t)
        { c = Concat<axis = 0>(s, s)  u = Tanh(c)  t = Slice(u, zero, two, axes) }> }""",
    "a state that becomes an outer value": """(float[4] x, float[4] z, int64 n) => (float[4] a) { a = Loop(n, , x)
        <body = step (int64 i, bool on, float[4] s) => (bool on, float[4] u) { u = Identity(z) }> }""",
    "a constant initial state": """(int64 n) => (float[2] a, int64[k] c) { z = Constant<value_floats = [1.0, 2.0]>()
        a, c = Loop(n, , z) <body = step (int64 i, bool on, float[2] s) => (bool on, float[2] u, int64 j)
        { u = Add(s, s)  j = Mul(i, i) }> }""",
    "work that does not depend on the iteration": """(float[4, 4] x, int64 n) => (float[4, 4] a) { a = Loop(n, , x)
        <body = step (int64 i, bool on, float[4, 4] s) => (bool on, float[4, 4] u)
        { t = MatMul(x, x)  e = Softmax(t)  u = MatMul(s, e) }> }""",
    "a condition that is a state": """(float[4] x, bool c, int64 n) => (float[4] a, bool b) { a, b = Loop(n, , x, c)
        <body = step (int64 i, bool on, float[4] s, bool d) => (bool d, float[4] u, bool e)
        { u = Add(s, s)  e = Not(d) }> }""",
    "a first condition and rows": """(float[4] x, bool c, int64 n) => (float[4] a, float[k, 4] b) { a, b = Loop(n, c, x)
        <body = step (int64 i, bool on, float[4] s) => (bool on, float[4] u, float[4] v)
        { u = Add(s, x)  v = Neg(u) }> }""",
    "a trip count that the device computes": """(float[4] x, int64[3] z) => (float[4] a) {
        n = ReduceMax<keepdims = 0>(z)  a = Loop(n, , x)
        <body = step (int64 i, bool on, float[4] s) => (bool on, float[4] u) { u = Add(s, x) }> }""",
    "rows and a trip count that the device computes": """(float[4] x, int64[3] z) => (float[4] a, float[k, 4] b) {
        n = ReduceMax<keepdims = 0>(z)  a, b = Loop(n, , x)
        <body = step (int64 i, bool on, float[4] s) => (bool on, float[4] u, float[4] s) { u = Add(s, x) }> }""",
    "nested loops": """(float[4] x, int64 n, int64 m) => (float[4] a, float[k, 4] c) { a, c = Loop(n, , x) <body = outer
        (int64 i, bool on, float[4] s) => (bool on, float[4] t, float[4] t) { r = Add(s, x)
        t = Loop(m, , r) <body = inner (int64 j, bool go, float[4] u) => (bool go, float[4] v)
        { f = Cast<to = 1>(j)  g = Cast<to = 1>(i)  w = Mul(f, x)  y = Add(w, g)  v = Add(u, y) }> }> }""",
    "a loop as often as the outer iteration says": """(float[4] x, int64 n) => (float[4] a) { a = Loop(n, , x)
        <body = outer (int64 i, bool on, float[4] s) => (bool on, float[4] t) {
        t = Loop(i, , s) <body = inner (int64 j, bool go, float[4] u) => (bool go, float[4] v)
        { v = Add(u, x) }> }> }""",
    "an unrolled loop in a loop": """(float[4] x, int64 n) => (float[4] a) { a = Loop(n, , x)
        <body = outer (int64 i, bool on, float[4] s) => (bool on, float[4] t) { m = Constant<value_int = 2>()
        t = Loop(m, , s) <body = inner (int64 j, bool go, float[4] u) => (bool go, float[4] v)
        { v = Add(u, x) }> }> }""",
    "an If whose condition an iteration computes": """(float[4] x, int64 n) => (float[4] a, float[k, 4] b) {
        a, b = Loop(n, , x) <body = step (int64 i, bool on, float[4] s) => (bool on, float[4] u, float[4] v) {
        z = Constant<value_float = 1.0>()  m = ReduceMax<keepdims = 0>(s)  large = Greater(m, z)
        u, v = If(large) <then_branch = yes () => (float[4] p, float[4] q) { h = Constant<value_float = 0.25>()
            p = Mul(s, h)  q = Neg(p) },
          else_branch = no () => (float[4] e, float[4] f) { e = Add(s, x)  f = Identity(s) }> }> }""",
    "an If of the iteration number in nested loops": """(float[4] x, int64 n) => (float[4] a) { a = Loop(n, , x)
        <body = outer (int64 i, bool on, float[4] s) => (bool on, float[4] t) { m = Constant<value_int = 2000>()
        o = Constant<value_int = 1>()  t = Loop(n, , s) <body = inner (int64 j, bool go, float[4] u) =>
        (bool go, float[4] v) { c = Less(j, o)  v = If(c) <then_branch = yes () => (float[4] p) { p = Add(u, x) },
          else_branch = no () => (float[4] e) { e = Sub(u, s) }> }> }> }""",
    "sizes in the body": """(float[k, 4] x, int64 n) => (float[k, 4] a) { a = Loop(n, , x) <body = step
        (int64 i, bool on, float[k, 4] s) => (bool on, float[k, 4] u)
        { h = Shape(x)  f = ConstantOfShape(h)  t = Cos(f)  u = Add(s, t) }> }""",
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies(name: str) -> None:
    pair = Pair(parse(BODIES[name]))
    for trips in (1, 3, 3, 3, 3, 2):
        feed: Feed = {}
        for value in pair.ours.get_inputs():
            shape = [2 if isinstance(dim, str) else dim for dim in value.shape]
            kinds = {"tensor(int64)": np.full(shape, trips), "tensor(bool)": np.array(trips != 2)}
            feed[value.name] = kinds.get(value.type, floats(*shape))
        assert pair.check(feed)["runs"] == 1


def test_no_iteration_gives_rows_of_onnx_runtimes_shape() -> None:
    text = """(float[n, 4] x, int64 most) => (float[n, 4] y, float[k, n, 4] rows) { y, rows = Loop(most, , x)
        <body = step (int64 i, bool on, float[n, 4] s) => (bool on, float[n, 4] t, float[n, 4] t)
        { t = Add(s, x) }> }"""
    pair = Pair(parse(text))
    assert pair.is_one_cluster
    for most in (2, 0, 3, 0):  # 0 iterations: rows is [0, 0, 4], as ONNX Runtime does not know n
        pair.check({"x": floats(2, 4), "most": np.array(most)})


SCANS = {
    "backwards": "scan_input_directions = [1, 0], scan_output_directions = [1]",
    "axes": "scan_input_axes = [1, -1], scan_output_axes = [1]",
    "axes and directions": "scan_input_axes = [1, 1], scan_input_directions = [0, 1], scan_output_axes = [-1]",
}


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize(("dtype", "kind"), [("float", np.float32), ("int8", np.int8), ("double", np.float64)])
def test_scans(name: str, dtype: str, kind: Any) -> None:
    shape = "t, 5" if name == "backwards" else "5, t"
    text = f"""({dtype}[5] h, {dtype}[{shape}] x, {dtype}[{shape}] z) => ({dtype}[5] last, {dtype}[a, b] rows)
        {{ last, rows = Scan<num_scan_inputs = 2, {SCANS[name]}, body = step
        ({dtype}[5] s, {dtype}[5] p, {dtype}[5] q) => ({dtype}[5] t, {dtype}[5] r)
        {{ t = Add(s, p)  r = Sub(t, q) }}>(h, x, z) }}"""
    pair = Pair(parse(text))
    assert pair.is_one_cluster
    for steps in (3, 3, 3, 1):
        whole = (steps, 5) if name == "backwards" else (5, steps)
        pair.check({n: (floats(*s) * 9).astype(kind) for n, s in (("h", (5,)), ("x", whole), ("z", whole))})


def test_an_if_in_a_loop_in_a_scan_is_one_graph_launch() -> None:
    text = """(float[n, 4] x, int64 trips) => (float[4] last, float[4, n] y)
        { axis = Constant<value_ints = [0]>()  sum = ReduceSum<keepdims = 0>(x, axis)
          last, y = Scan<num_scan_inputs = 1, scan_output_axes = [1], body = outer (float[4] state, float[4] row)
            => (float[4] next, float[4] out) {
              next = Loop(trips, , state) <body = inner (int64 i, bool on, float[4] c) => (bool on, float[4] d) {
                s = ReduceSum<keepdims = 0>(c)  most = Constant<value_float = 20.0>()  large = Greater(s, most)
                d = If(large) <then_branch = yes () => (float[4] t) { h = Constant<value_float = 0.25>()  t = Mul(c, h)
                }, else_branch = no () => (float[4] e) { e = Add(c, row) }> }>
              out = Neg(next) }>(sum, x) }"""
    pair = Pair(parse(text))
    for _ in range(4):
        grown = pair.check({"x": np.abs(floats(6, 4)) * 3, "trips": np.array(3)})
        assert grown["device_loops"] == 1, "inner loops do not count, with a CUDA graph or without"
    assert (grown["graph_replays"], grown["runs"]) == (1, 1)


REFUSED = {
    "rows of unknown number": (
        """(float[4] x, int64 n) => (float[4] a, float[k, 4] b) { z = Constant<value_float = 3.0>() a, b = Loop(n, , x)
        <body = step (int64 i, bool on, float[4] s) => (bool c, float[4] t, float[4] s)
        { t = Add(s, x)  r = ReduceSum<keepdims = 0>(t)  c = Less(r, z) }> }""",
        "Loop stacks values of its iterations, whose number is unknown before the last one",
    ),
    "rows of unknown rank": (
        """(float[4] x, int64 n) => (float[4] a, float[k, 4] b) { a, b = Loop(n, , x) <body = step
        (int64 i, bool on, float[] s) => (bool on, float[] t, float[] t) { t = Add(s, x) }> }""",
        "the model does not declare the shape or the type of the body's result",
    ),
    "a state that grows": (
        """(float[m, 4] x, int64 n) => (float[k, 4] a) { a = Loop(n, , x) <body = step
        (int64 i, bool on, float[p, 4] s) => (bool on, float[q, 4] t) { t = Concat<axis = 0>(s, x) }> }""",
        "loop-carried value 0 may have the shape",
    ),
    "a size that an iteration computes": (
        """(float[8] x, int64 n) => (float[8] a) { a = Loop(n, , x) <body = step (int64 i, bool on, float[8] s)
        => (bool on, float[8] t) { o = Constant<value_ints = [1]>() j = Reshape(i, o) k = Add(j, o)
        r = Constant<value_ints = [0]>()  v = Slice(s, r, k)  w = ReduceSum(v) t = Add(s, w) }> }""",
        "in each iteration; supported: values that no iteration computes",
    ),
    "no end": (
        """(float[4] x) => (float[4] a) { a = Loop( , , x) <body = step (int64 i, bool on, float[4] s)
        => (bool on, float[4] t) { t = Add(s, x) }> }""",
        "Loop has no trip count, and its body computes a condition that is always true",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_loops_name_the_reason_and_run_by_a_kernel(name: str) -> None:
    text, reason = REFUSED[name]
    pair = Pair(parse(text))
    model = onnx.load_from_string(parse(text))
    (verdict,) = [each for each in analyze(read_model(model), DeviceProperties()) if each.op_type == "Loop"]
    assert reason in verdict.reason
    assert not pair.is_one_cluster
    if name != "no end":
        rows = {"float[m, 4]": (2, 4), "float[8]": (8,)}.get(text[1:].split(" x")[0], (4,))
        pair.check({"x": floats(*rows) + 1, "n": np.array(3)})


def test_a_driver_that_refuses_conditional_nodes_leaves_the_loop_to_the_host() -> None:
    pair = Pair(scan_model())
    with faults("unsupported=GraphAddNode"):
        for _ in range(4):
            grown = pair.check(scan_feed(3))
    assert grown["graph_fallbacks_driver"] == 1
    assert "graph_replays" not in grown


def test_a_state_and_its_initial_value_may_share_memory() -> None:
    """The loop reads x in each iteration, so that a plan that writes y in place would read the new values."""
    session = ort_cuda_plugin.session(parse(COUNTED), emulate=True)
    binding = session.io_binding()
    value = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.float32)
    shared = ort.OrtValue.ortvalue_from_numpy(value, "cuda", 0)
    binding.bind_ortvalue_input("x", shared)
    binding.bind_cpu_input("most", np.array(4))
    binding.bind_ortvalue_output("y", shared)
    for run in range(1, 6):
        session.run_with_iobinding(binding)
        np.testing.assert_allclose(shared.numpy(), value * 7.0**run, rtol=1e-5)  # 7 = 1 + (0 + 1 + 2 + 3)


def test_rows_may_be_written_to_the_memory_of_the_scanned_input() -> None:
    text = """(float[5] h, float[t, 5] x) => (float[5] last, float[t, 5] rows) {
        last, rows = Scan<num_scan_inputs = 1, scan_input_directions = [1], body = step (float[5] s, float[5] p)
        => (float[5] t, float[5] r) { t = Add(s, p)  r = Neg(t) }>(h, x) }"""
    session = ort_cuda_plugin.session(parse(text), emulate=True)
    binding = session.io_binding()
    first, x = floats(5), floats(4, 5)
    shared = ort.OrtValue.ortvalue_from_numpy(x, "cuda", 0)
    binding.bind_cpu_input("h", first)
    binding.bind_ortvalue_input("x", shared)
    binding.bind_output("last", "cpu")
    binding.bind_ortvalue_output("rows", shared)
    for _ in range(5):
        session.run_with_iobinding(binding)
        x = -(first + np.cumsum(x[::-1], axis=0))
        np.testing.assert_allclose(shared.numpy(), x, rtol=1e-4, atol=1e-4)


def test_a_capture_of_whole_runs_holds_the_iterations_that_the_host_knows() -> None:
    session = ort_cuda_plugin.session(scan_model(), emulate=True, provider_options={"enable_cuda_graph": 1})
    binding = session.io_binding()
    feed = scan_feed(4)
    inputs = {name: ort.OrtValue.ortvalue_from_numpy(x, "cuda", 0) for name, x in feed.items()}
    outputs = {name: ort.OrtValue.ortvalue_from_numpy(np.zeros_like(x), "cuda", 0)
               for name, x in (("last", feed["first"]), ("Y", feed["X"]))}  # fmt: skip
    for name, value in inputs.items():
        binding.bind_ortvalue_input(name, value)
    for name, value in outputs.items():
        binding.bind_ortvalue_output(name, value)
    cpu = ort.InferenceSession(scan_model(), providers=["CPUExecutionProvider"])
    for _ in range(3):
        session.run_with_iobinding(binding)
        for value, expected in zip(outputs.values(), cpu.run(None, feed), strict=True):
            np.testing.assert_allclose(value.numpy(), expected, rtol=1e-5, atol=1e-5)
        feed = scan_feed(4)
        for name, x in feed.items():
            ort.copy_tensors([ort.OrtValue.ortvalue_from_numpy(x)], [inputs[name]])


def test_a_capture_of_whole_runs_is_refused_if_the_device_evaluates_the_condition() -> None:
    text = """(float[n, 4] x, float bound) => (float[n, 4] y) { most = Constant<value_int = 50>()  y = Loop(most, , x)
        <body = step (int64 i, bool on, float[n, 4] state) => (bool still, float[n, 4] next)
        { next = Add(state, x)  sum = ReduceSum<keepdims = 0>(next)  still = Less(sum, bound) }> }"""
    session = ort_cuda_plugin.session(parse(text), emulate=True, provider_options={"enable_cuda_graph": 1})
    binding = session.io_binding()
    for name, x in (("x", floats(2, 4)), ("bound", np.array(1, np.float32))):
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(x, "cuda", 0))
    binding.bind_ortvalue_output("y", ort.OrtValue.ortvalue_from_numpy(floats(2, 4), "cuda", 0))
    with pytest.raises(
        Exception, match="the host must read before each iteration of a loop whether the loop continues"
    ):
        session.run_with_iobinding(binding)


def test_a_compiled_model_has_the_loop(tmp_path: Path) -> None:
    text = parse(CONDITIONS)
    compile_model(text, tmp_path / "m_ctx.onnx")
    session = load(tmp_path / "m_ctx.onnx")
    x = np.abs(floats(2, 4)) + 1
    feeds = [
        {"x": x, "most": np.array(9), "first": np.array(True), "bound": np.array(x.sum() * (k + 0.5), np.float32)}
        for k in (2, 2, 2, 3)
    ]
    before = ort_cuda_plugin.counters()
    assert_same(session, text, feeds)
    after = ort_cuda_plugin.counters()
    assert after["device_loops"] - before["device_loops"] == 4
    assert after["graph_replays"] - before["graph_replays"] == 2


def test_streams_may_run_in_any_order() -> None:
    code = """
    import sys
    sys.path[:0] = ["tests/harness", "tests/e2e"]
    import numpy as np
    from ort_cuda_plugin.abi.emulation import findings
    from test_device_loops import BODIES, Pair, parse, scan_feed, scan_model
    scan = Pair(scan_model())
    for _ in range(4):
        scan.check(scan_feed(3))
    nested = Pair(parse(BODIES["nested loops"]))
    for trips in (2, 2, 2, 2):
        nested.check({"x": np.arange(4, dtype=np.float32), "n": np.array(trips), "m": np.array(3)})
    assert findings() == []
    """
    environment = {"ORT_CUDA_PLUGIN_EMULATE_STREAMS": "adversarial", "ORT_CUDA_PLUGIN_EMULATE_CHECK": "1"}
    python(code, env=environment | {"CUDA_VISIBLE_DEVICES": ""})
