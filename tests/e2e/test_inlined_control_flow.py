"""Inlined control flow: If, Loop and Scan whose bodies are lowered into the cluster of the surrounding nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper, parser

import ort_cuda_plugin
from ort_cuda_plugin.clusters.claims.claims import analyze
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.clusters.nodes import node_lowering
from ort_cuda_plugin.clusters.nodes.control_flow import MAX_EXPANDED_BYTES, MAX_UNROLLED_NODES
from ort_cuda_plugin.ep.nodes.fused_node import FusedNode
from ort_cuda_plugin.ep.provider import last_verdicts
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.lowering.context import DeviceProperties, LoweringOptions
from session_pair import floats

IF = """b = If(c) <then_branch = yes () => (float[p, 4] t) { u = Mul(a, x)  t = Add(u, w) },
    else_branch = no () => (float[q, 4] e) { e = Neg(a) }>"""
SHAPES = """<then_branch = yes () => (int64[2] t) {{ {} }}, else_branch = no () => (int64[2] e) {{ {} }}>"""
INNER_SHAPES = """<then_branch = yes2 () => (int64[2] t2) { t2 = Sub(s, h) },
    else_branch = no2 () => (int64[2] e2) { e2 = Identity(h) }>"""
CLUSTERS = {
    "If on a fed condition": "(float[n, 4] x, bool c) => (float[n, 4] y) { a = Add(x, x) w = "
    f"Constant<value = float[4] {{1.0, 2.0, 3.0, 4.0}}>() {IF} y = Sub(b, a) }}",
    "If on a size": f"""(float[n, 4] x) => (float[n, 4] y) {{ a = Add(x, x) w = Constant<value_float = 2.0>()
        size = Size(x) few = Constant<value_int = 12>() c = Less(size, few) {IF} y = Sub(b, a) }}""",
    "If in a branch": """(float[n, 4] x, int64 rate) => (float[n, 4] y)
        { high = Constant<value_int = 1>() c = Equal(rate, high) low = Constant<value_int = 0>() d = Equal(rate, low)
          y = If(c) <then_branch = yes () => (float[p, 4] t) { t = Neg(x) }, else_branch = no () => (float[q, 4] e)
          { e = If(d) <then_branch = yes2 () => (float[r, 4] t2) { t2 = Exp(x) },
              else_branch = no2 () => (float[s, 4] e2) { e2 = Tanh(x) }> }> }""",
    "If that gives a shape": f"""(float[n, 4] x, bool c) => (float[k, l] y)
        {{ a = Add(x, x) s = Shape(x)
          z = If(c) {SHAPES.format("t = Identity(s)", "e = Constant<value_ints = [2, -1]>()")}
          y = Reshape(a, z) }}""",
    "If that gives a shape, or one that the device computes": f"""(float[n, 4] x, bool c) => (float[k, l] y)
        {{ i = Cast<to = 7>(x) none = Sub(i, i) axes = Constant<value_ints = [0, 1]>()
          sum = ReduceSum<keepdims = 0>(none, axes) s = Shape(x) computed = Add(sum, s)
          z = If(c) {SHAPES.format("t = Constant<value_ints = [2, -1]>()", "e = Identity(computed)")}
          y = Reshape(x, z) }}""",
    "If in a branch that gives where slices begin": f"""(float[n, 4] x, bool c, int64 rate) => (float[k, l] y)
        {{ s = Shape(x) one = Constant<value_int = 1>() d = Equal(rate, one) h = Constant<value_ints = [1, 2]>()
          z = If(c) {SHAPES.format("t = Constant<value_ints = [-2, 1]>()", f"e = If(d) {INNER_SHAPES}")}
          y = Slice(x, z, s) }}""",
    "If that gives one of two fed sizes": """(float[n, 4] x, bool c, int64 p, int64 q) => (float[k, n, 4] y)
        { z = If(c) <then_branch = yes () => (int64 t) { t = Identity(p) },
            else_branch = no () => (int64 e) { e = Add(q, q) }>
          minus = Constant<value_ints = [-1]>() ones = Constant<value_ints = [1, 1]>() r = Reshape(z, minus)
          sizes = Concat<axis = 0>(r, ones) y = Expand(x, sizes) }""",
    "If that gives a number or a vector": """(float[n, 4] x, int64 rate) => (float[n, 4] y)
        { one = Constant<value_int = 1>() c = Equal(rate, one) shape = Constant<value_ints = [1]>()
          f = Cast<to = 1>(rate) v = Reshape(f, shape)
          z = If(c) <then_branch = yes () => (float t) { t = Constant<value_float = 3.0>() },
            else_branch = no () => (float[1] e) { e = Neg(v) }>
          y = Mul(x, z) }""",
    "If that gives axes": f"""(float[n, 4] x, bool c) => (float[k, l, m, o] y)
        {{ z = If(c) {SHAPES.format("t = Constant<value_ints = [0, 3]>()", "e = Constant<value_ints = [1, 2]>()")}
          y = Unsqueeze(x, z) }}""",
    "Loop": """(float[n, 4] x, float[4] z) => (float[n, 4] y, float[4, k, 4] rows)
        { a = Add(x, x) trips = Constant<value_int = 4>()
          last, rows = Loop(trips, , a) <body = b (int64 i, bool on, float[p, 4] carried)
            => (bool still, float[p, 4] next, float[p, 4] row)
            { still = Identity(on) f = Cast<to = 1>(i) s = Add(carried, z) next = Mul(s, f) row = Neg(next) }>
          y = Sub(last, a) }""",
    "Loop that ends by a computed number": """(float[n, 4] x) => (float[n, 4] y)
        { yes = Constant<value = bool {1}>()
          y = Loop(, yes, x) <body = b (int64 i, bool on, float[p, 4] carried) => (bool still, float[p, 4] next)
            { limit = Constant<value_int = 3>() still = Less(i, limit) next = Add(carried, x) }> }""",
    "Loop whose state grows": """(float[n, 4] x) => (float[m, 4] y)
        { trips = Constant<value_int = 3>()
          y = Loop(trips, , x) <body = b (int64 i, bool on, float[p, 4] carried) => (bool still, float[r, 4] next)
            { still = Identity(on) next = Concat<axis = 0>(carried, x) }> }""",
    "Loop without iterations": """(float[n, 4] x) => (float[n, 4] y, float[k, 4] rows)
        { trips = Constant<value_int = 0>() a = Neg(x)
          y, rows = Loop(trips, , a) <body = b (int64 i, bool on, float[p, 4] carried)
            => (bool still, float[p, 4] next, float[4] row)
            { still = Identity(on) next = Add(carried, x) zero = Constant<value_int = 0>()
              row = Gather(next, zero) }> }""",
    "Scan": """(float[n, 4] x, float[3, 4] rows) => (float[4] last, float[4, 3] y)
        { axis = Constant<value_ints = [0]>() sum = ReduceSum<keepdims = 0>(x, axis)
          last, y = Scan<num_scan_inputs = 1, scan_input_directions = [1], scan_output_axes = [1],
            scan_output_directions = [1], body = b (float[4] state, float[4] row) => (float[4] next, float[4] out)
            { next = Add(state, row) out = Exp(next) }>(sum, rows) }""",
    "Scan of columns in a Loop in an If": """(float[2, 4] x, bool c) => (float[2] y)
        { start = Constant<value = float[2] {1.0, 2.0}>()
          y = If(c) <then_branch = yes () => (float[2] t) { trips = Constant<value_int = 2>()
            t = Loop(trips, , start) <body = b (int64 i, bool on, float[2] carried) => (bool still, float[2] next)
              { still = Identity(on) next = Scan<num_scan_inputs = 1, scan_input_axes = [1],
                  body = s (float[2] state, float[2] column) => (float[2] new)
                  { m = Mul(state, carried) new = Add(m, column) }>(carried, x) }> },
            else_branch = no () => (float[2] e) { e = Neg(start) }> }""",
    "results of bodies that are constants": """(float[n, 4] x, bool c) => (float[4] y)
        { y = If(c) <then_branch = yes () => (float[4] t) <float[4] t = {1.0, 2.0, 3.0, 4.0}> { },
            else_branch = no () => (float[4] e) { e = Constant<value = float[4] {4.0, 3.0, 2.0, 1.0}>() }> }""",
    "weights of a body": """(float[n, 4] x, bool c) => (float[n, 4] y)
        { y = If(c) <then_branch = yes () => (float[p, 4] t) <float[4] w = {1.0, 2.0, 3.0, 4.0}> { t = Mul(x, w) },
            else_branch = no () => (float[q, 4] e) <float[4] v = {4.0, 3.0, 2.0, 1.0}> { e = Sub(x, v) }> }""",
}


def parse(text: str, opset: int = 18) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 9, opset_import: ["" : {opset}]> m {text}')


def sessions(text: str, opset: int = 18, **provider_options: str) -> tuple[ort.InferenceSession, ort.InferenceSession]:
    """Return a session on the plugin and one on the CPU provider.

    ONNX Runtime's optimizations are off, since they would evaluate some conditions.
    """
    model = parse(text, opset).SerializeToString()
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    ort_cuda_plugin.register(emulate=True)
    providers = ["CudaPluginExecutionProvider", "CPUExecutionProvider"]
    given = [provider_options, {}]
    return (
        ort.InferenceSession(model, options, providers=providers, provider_options=given),
        ort.InferenceSession(model, options, providers=providers[1:]),
    )


def placement(session: ort.InferenceSession) -> list[tuple[str, int]]:
    """Return (provider, number of nodes) of each cluster, and of each node of another provider."""
    parts = session.get_provider_graph_assignment_info()
    return [(part.ep_name.removesuffix("ExecutionProvider"), len(part.get_nodes())) for part in parts]


def feeds(session: ort.InferenceSession, rows: int, condition: bool) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for value in session.get_inputs():
        kinds = {"tensor(bool)": np.array(condition), "tensor(int64)": np.array(rows - 2)}
        shape = [rows if isinstance(dim, str) else dim for dim in value.shape]
        made[value.name] = kinds[value.type] if value.type in kinds else floats(*shape)
    return made


PREPARE = FusedNode.prepare


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return a list that receives the operators of each compiled cluster, in the order of compilation."""
    found: list[list[str]] = []

    def prepare(self: FusedNode, later: bool = False) -> None:
        assert isinstance(self._cluster, CompiledCluster)
        found.append(sorted(node.op_type for node in self._cluster.graph.nodes))
        PREPARE(self, later)

    monkeypatch.setattr(FusedNode, "prepare", prepare)
    return found


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_node_with_bodies_runs_in_one_cluster_with_all_others(name: str, compiled: list[list[str]]) -> None:
    ours, cpu = sessions(CLUSTERS[name])
    assert compiled[-1] == sorted(
        node.op_type for node in parse(CLUSTERS[name]).graph.node if node.op_type != "Constant"
    )
    assert all(verdict.supported for verdict in last_verdicts() if verdict.op_type != "Constant")
    compiled.clear()
    for _ in range(2):
        before = ort_cuda_plugin.counters()["plan_variants_built"]
        for rows, condition in ((2, True), (3, False), (4, True)):
            feed = feeds(ours, rows, condition)
            for actual, expected in zip(ours.run(None, feed), cpu.run(None, feed), strict=True):
                np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5, strict=True)
    assert ort_cuda_plugin.counters()["plan_variants_built"] == before, "the second round needs no plan"


def test_the_first_version_of_scan(compiled: list[list[str]]) -> None:
    pair = sessions(
        """(float[2, 4] start, float[2, 3, 4] x, float[2, 3, 1] f)
          => (float[2, 4] last, float[2, 3, 4] y, float[2, 3] z)
        { last, y, z = Scan<num_scan_inputs = 2, directions = [0, 1],
            body = b (float[4] state, float[4] row, float[1] g) => (float[4] next, float[4] out, float s)
            { m = Mul(row, g) next = Add(state, m) out = Exp(next) s = ReduceSum<keepdims = 0>(m) }>
            (, start, x, f) }""",
        opset=8,
    )
    assert compiled == [["Scan"]]
    feed = {"start": floats(2, 4), "x": floats(2, 3, 4), "f": floats(2, 3, 1)}
    for actual, expected in zip(*(session.run(None, feed) for session in pair), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6, strict=True)  # atol: sums near 0


def test_weights_that_left_host_memory_with_a_body_serve_the_cluster_around_it(compiled: list[list[str]]) -> None:
    model = parse(CLUSTERS["weights of a body"])
    weights = floats(32768, 4)
    model.graph.node[0].attribute[0].g.initializer[0].CopyFrom(numpy_helper.from_array(weights, "w"))
    ours = ort_cuda_plugin.session(model.SerializeToString(), emulate=True)
    assert sorted(compiled) == [["If"], ["Mul"], ["Sub"]]
    x = floats(1, 4)
    np.testing.assert_array_equal(ours.run(None, {"x": x, "c": np.array(True)})[0], x * weights)
    np.testing.assert_array_equal(ours.run(None, {"x": x, "c": np.array(False)})[0], x - np.array([4, 3, 2, 1], "f"))


def test_a_body_with_many_weights_is_compiled_once(compiled: list[list[str]]) -> None:
    model = parse(CLUSTERS["weights of a body"])
    large = numpy_helper.from_array(np.ones((MAX_EXPANDED_BYTES // 16 + 1, 4), np.float32), "w")
    model.graph.node[0].attribute[0].g.initializer[0].CopyFrom(large)
    ort_cuda_plugin.session(model.SerializeToString(), emulate=True)
    assert sorted(compiled) == [["Mul"], ["Sub"]]


NO_DEVICE_LOOPS = LoweringOptions(device_loops=False)
LOOP = """(float[n, 4] x, int64 trips, bool c) => (float[n, 4] y)
    {{ {nodes} y = Loop({arguments}, x) <body = b (int64 i, bool on, float[p, 4] carried)
        => (bool still, float[p, 4] next) {{ still = {still} next = Add(carried, x) }}> }}"""
DECLINED = {
    "trip count": (
        LOOP.format(nodes="", arguments="trips, ", still="Identity(on)"),
        "trip count of Loop is known only",
    ),
    "condition": (
        LOOP.format(nodes="", arguments="trips, c", still="Identity(on)"),
        "trip count of Loop is known only",
    ),
    "condition of the body": (
        LOOP.format(nodes="m = Constant<value_int = 3>()", arguments="m, ", still="Greater(s, zero)").replace(
            "{ still", "{ zero = Constant<value_float = 0.0>() s = ReduceSum<keepdims = 0>(carried) still"
        ),
        "the condition of Loop is known only when the model runs",
    ),
    "too many": (
        LOOP.format(nodes=f"m = Constant<value_int = {MAX_UNROLLED_NODES}>()", arguments="m, ", still="Identity(on)"),
        f"{MAX_UNROLLED_NODES} iterations of 2 nodes; supported: up to {MAX_UNROLLED_NODES} nodes in all",
    ),
    "endless": (
        LOOP.format(nodes="", arguments=", ", still="Identity(on)"),
        f"{MAX_UNROLLED_NODES // 2 + 1} iterations of 2 nodes; supported: up to {MAX_UNROLLED_NODES} nodes in all",
    ),
    "computed branch": (
        """(float[n, 4] x) => (float[n, 4] y) { zero = Constant<value_float = 0.0>() s = ReduceSum<keepdims = 0>(x)
        c = Greater(s, zero) y = If(c) <then_branch = yes () => (float[p, 4] t) { t = Neg(x) },
        else_branch = no () => (float[q, 4] e) { e = Exp(x) }> }""",
        "the condition of If is computed on the device",
    ),
    "a node of a body": (
        """(float[n, 4] x, bool c) => (float[n, 4] y) { y = If(c) <then_branch = yes () => (float[p, 4] t)
        { t = Neg(x) }, else_branch = no () => (float[q, 4] e) { s = Cast<to = 8>(x) e = Cast<to = 1>(s) }> }""",
        "in its else_branch, node s (Cast): ",
    ),
}


@pytest.mark.parametrize("name", DECLINED)
def test_what_is_known_only_in_a_run_is_left_to_a_kernel_with_a_reason(name: str) -> None:
    text, reason = DECLINED[name]
    ours, cpu = sessions(text, device_loops="0")
    assert len(placement(ours)) > 1
    verdicts = analyze(read_model(parse(text)), DeviceProperties(), NO_DEVICE_LOOPS)
    (verdict,) = [verdict for verdict in verdicts if verdict.op_type in ("If", "Loop")]
    assert reason in verdict.reason
    if name == "endless":
        return
    feed = feeds(ours, 3, False)
    for actual, expected in zip(ours.run(None, feed), cpu.run(None, feed), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, strict=True)


def test_a_mistake_in_a_body_names_the_node() -> None:
    text = """(float[n, 4] x, float[m, k] z, bool c) => (float[n, 4] y) { y = If(c)
        <then_branch = yes () => (float[p, 4] t) { t = Add(x, z) }, else_branch = no () => (float[q, 4] e)
        { e = Neg(x) }> }"""
    ours, _ = sessions(text)
    assert {provider for provider, _ in placement(ours)} == {"CudaPlugin"}
    with pytest.raises(Exception, match=r"node 't \(Add\)': dimensions cannot be broadcast"):
        ours.run(None, {"x": floats(2, 4), "z": floats(3, 5), "c": np.array(True)})
    ours.run(None, {"x": floats(2, 4), "z": floats(3, 5), "c": np.array(False)})


def reason_of_loop(model: onnx.ModelProto) -> str:
    """Return why the plugin declines the last Loop of the outer graph; "" if it claims the Loop."""
    verdicts = analyze(read_model(model), DeviceProperties(), NO_DEVICE_LOOPS)
    return [verdict.reason for verdict in verdicts if verdict.op_type == "Loop"][-1]


def test_each_node_with_bodies_may_have_as_many_unrolled_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_lowering, "MAX_UNROLLED_NODES", 6)
    body = """<body = b (int64 i, bool on, float[p, 4] carried) => (bool still, float[p, 4] next)
        { still = Identity(on) next = Add(carried, x) }>"""
    text = f"""(float[n, 4] x) => (float[n, 4] y) {{ m = Constant<value_int = 3>()
        z = Loop(m, , x) {body} y = Loop(m, , z) {body} }}"""
    assert reason_of_loop(parse(text)) == ""  # each Loop unrolls to 6 nodes


def test_iterations_of_nested_loops_are_limited_together(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """(float[n, 4] x) => (float[n, 4] y) { m = Constant<value_int = 3>()
        y = Loop(m, , x) <body = outer (int64 i, bool on, float[p, 4] carried) => (bool still, float[p, 4] last)
        { still = Identity(on) last = Loop(m, , carried) <body = inner (int64 j, bool on2, float[q, 4] carried2)
          => (bool still2, float[q, 4] next) { still2 = Identity(on2) next = Add(carried2, x) }> }> }"""
    model = parse(text)
    assert reason_of_loop(model) == ""
    # 30 unrolled nodes: 3 outer iterations of 4 nodes, and in each of them 3 inner iterations of 2 nodes.
    monkeypatch.setattr(node_lowering, "MAX_UNROLLED_NODES", 29)
    assert "unrolling the node's loops results in too many nodes; supported: up to 29" in reason_of_loop(model)
    monkeypatch.setattr(node_lowering, "MAX_UNROLLED_NODES", 30)
    assert reason_of_loop(model) == ""


def test_rows_of_no_iteration_need_a_declared_shape() -> None:
    text = """(float[4] x) => (float[a, b] y) { m = Constant<value_int = 0>() c = Constant<value = bool {1}>()
        y = Loop(m, c) <body = b (int64 i, bool on) => (bool still, float[q] row)
        { still = Identity(on) row = Neg(x) }> }"""
    graph = read_model(parse(text))
    assert analyze(graph, DeviceProperties(), NO_DEVICE_LOOPS)[-1].reason == ""  # q is 0, as in ONNX Runtime
    graph.nodes[-1].subgraphs["body"].outputs[-1].shape = None
    unknown = "no iteration runs, and the model does not declare the type and all sizes of the body's result 'row'"
    assert analyze(graph, DeviceProperties(), NO_DEVICE_LOOPS)[-1].reason.startswith(unknown)
    graph.nodes[-1].subgraphs["body"].outputs[-1].shape = (4,)
    assert unknown not in analyze(graph, DeviceProperties(), NO_DEVICE_LOOPS)[-1].reason
