"""Sessions with prefer_nhwc=1: the graph that ONNX Runtime converts to NHWC, its placement, and its results."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, parser

import ort_cuda_plugin as plugin
from isolated import python
from ort_cuda_plugin import models
from ort_cuda_plugin.ops.registry import CHANNELS_LAST_DOMAIN, channels_last_operators

Arrays = dict[str, np.ndarray]
RNG = np.random.default_rng(0)
COPIES = ("copies_h2d", "copies_d2h", "copies_d2d", "launches")


def graph_model(graph: str, opset: int = 17) -> bytes:
    text = f'<ir_version: 8, opset_import: ["" : {opset}]> channels {graph}'
    return bytes(parser.parse_model(text).SerializeToString())


def layout_session(model: bytes, prefer: bool = True) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return plugin.session(model, emulate=True, sess_options=options, provider_options={"prefer_nhwc": int(prefer)})


def placed(session: ort.InferenceSession) -> dict[str, Counter[str]]:
    """Count the nodes of each provider by operator; names in the channels-last domain end with a star."""
    found: dict[str, Counter[str]] = {}
    for part in session.get_provider_graph_assignment_info():
        names = (node.op_type + "*" * (node.domain == CHANNELS_LAST_DOMAIN) for node in part.get_nodes())
        found.setdefault(part.ep_name, Counter()).update(names)
    return found


def launches(session: ort.InferenceSession, feeds: Arrays) -> int:
    """Return the number of launches of a second Run."""
    session.run(None, feeds)
    before = plugin.counters()["launches"]
    session.run(None, feeds)
    return plugin.counters()["launches"] - before


def random_feeds(session: ort.InferenceSession, free: int = 2) -> Arrays:
    kinds = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16}
    return {
        x.name: RNG.standard_normal([d if isinstance(d, int) else free for d in x.shape]).astype(kinds[x.type])
        for x in session.get_inputs()
    }


def compare(
    model: bytes, converted: Counter[str], elsewhere: Counter[str] | None = None, feeds: Arrays | None = None
) -> int:
    """Compare sessions in both layouts with the CPU provider. Return how many more launches NHWC needs.

    ``converted`` counts the NHWC nodes by operator, ``elsewhere`` the nodes of the CPU provider.
    """
    cpu = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    feeds = feeds or random_feeds(cpu)
    expected = cpu.run(None, feeds)
    plain, preferred = layout_session(model, False), layout_session(model)
    nodes = placed(preferred)
    found = Counter({name[:-1]: count for name, count in nodes[plugin.get_ep_name()].items() if name.endswith("*")})
    assert found == converted
    assert nodes.get("CPUExecutionProvider", Counter()) == (elsewhere or Counter())
    for session in (plain, preferred):
        for wanted, got in zip(expected, session.run(None, feeds), strict=True):
            assert got.dtype == wanted.dtype
            tolerance = 2e-3 if wanted.dtype == np.float16 else 2e-5
            np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)
    return launches(preferred, feeds) - launches(plain, feeds)


SINGLE = {
    "AveragePool": "(float[n, 3, 9, 8] x) => (float[n, 3, p, q] y) { y = AveragePool<kernel_shape = [3, 2]>(x) }",
    "BatchNormalization": """(float[n, 3, 5, 4] x, float[3] s, float[3] b, float[3] m) => (float[n, 3, 5, 4] y)
        { v = Mul(m, m) y = BatchNormalization(x, s, b, m, v) }""",
    "Conv": """(float[n, 4, 9, 8] x, float[6, 2, 3, 3] w, float[6] b) => (float[n, 6, p, q] y)
        { y = Conv<group = 2, pads = [1, 0, 1, 0], strides = [2, 1]>(x, w, b) }""",
    "ConvTranspose": """(float[n, 4, 5, 6] x, float[4, 3, 3, 3] w) => (float[n, 3, p, q] y)
        { y = ConvTranspose<strides = [2, 2]>(x, w) }""",
    "DepthToSpace": "(float[n, 8, 3, 4] x) => (float[n, 2, 6, 8] y) { y = DepthToSpace<blocksize = 2>(x) }",
    "GlobalAveragePool": "(float[n, 3, 5, 4] x) => (float[n, 3, 1, 1] y) { y = GlobalAveragePool(x) }",
    "GlobalMaxPool": "(float[n, 3, 5, 4] x) => (float[n, 3, 1, 1] y) { y = GlobalMaxPool(x) }",
    "GridSample": """(float[n, 3, 5, 4] x, float[n, 6, 7, 2] g) => (float[n, 3, 6, 7] y) { y = GridSample(x, g) }""",
    "LRN": "(float[n, 6, 5, 4] x) => (float[n, 6, 5, 4] y) { y = LRN<size = 3>(x) }",
    "MaxPool": """(float[n, 3, 9, 8] x) => (float[n, 3, p, q] y, int64[n, 3, p, q] i)
        { y, i = MaxPool<kernel_shape = [3, 2]>(x) }""",
    "SpaceToDepth": "(float[n, 2, 6, 8] x) => (float[n, 8, 3, 4] y) { y = SpaceToDepth<blocksize = 2>(x) }",
}


def test_every_operator_is_converted_and_right() -> None:
    assert set(SINGLE) == set(channels_last_operators())
    for name, graph in SINGLE.items():
        for opset in (17, 22) if name != "BatchNormalization" else (11, 17):
            assert compare(graph_model(graph, opset), Counter({name: 1})) <= 2, (name, opset)


@pytest.mark.parametrize("opset", [7, 13, 20, 23])
def test_other_types_and_versions(opset: int) -> None:
    for kind in ("double", "float16"):
        model = graph_model(
            f"""({kind}[n, 3, 8, 6] x, {kind}[4, 3, 3, 3] w) => ({kind}[n, 4, 4, 3] y)
            {{ c = Conv<pads = [1, 1, 1, 1]>(x, w) r = Relu(c)
               y = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(r) }}""",
            opset,
        )
        plain, preferred = layout_session(model, False), layout_session(model)
        assert placed(preferred)[plugin.get_ep_name()] == Counter(
            {"Transpose": 2, "Conv*": 1, "Relu": 1, "AveragePool*": 1}
        )
        feeds = random_feeds(plain)
        np.testing.assert_array_equal(preferred.run(None, feeds)[0], plain.run(None, feeds)[0])


RESIDUAL = """(float[n, 3, h, w] x, float[8, 3, 3, 3] w1, float[8] b, float[8, 8, 3, 3] w2, float[1, 8, 1, 1] s)
    => (float[n, 16, p, q] y, float[n, 8] z) {
    a = Conv<pads = [1, 1, 1, 1]>(x, w1, b) r = Relu(a) c = Conv<pads = [1, 1, 1, 1]>(r, w2) t = Add(c, r)
    m = Mul(t, s) g = Sigmoid(m) u = Mul(g, t)
    j = Concat<axis = 1>(u, t) y = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(j)
    k = GlobalAveragePool(t) z = Flatten(k) }"""


def test_what_lies_between_convolutions_needs_no_copies() -> None:
    """A residual, a per-channel factor and a Concat of channels between convolutions need no transposition."""
    model = graph_model(RESIDUAL)
    feeds: Arrays = {"x": RNG.standard_normal((2, 3, 8, 6), dtype=np.float32)}
    for name, shape in {"w1": (8, 3, 3, 3), "b": (8,), "w2": (8, 8, 3, 3), "s": (1, 8, 1, 1)}.items():
        feeds[name] = RNG.standard_normal(shape, dtype=np.float32) / 4
    assert compare(model, Counter(Conv=2, MaxPool=1, GlobalAveragePool=1), feeds=feeds) == 0


@pytest.mark.parametrize("name", ["light_squeezenet", "light_shufflenet"])
def test_networks_have_as_many_launches(name: str) -> None:
    model, _ = models.before_softmax(models.with_noise_weights(onnx.load(models.find_model(name))))
    plain, preferred = (layout_session(model.SerializeToString(), prefer) for prefer in (False, True))
    feeds = random_feeds(plain)
    np.testing.assert_array_equal(plain.run(None, feeds)[0], preferred.run(None, feeds)[0])
    assert launches(preferred, feeds) == launches(plain, feeds)
    nodes = placed(preferred)
    assert set(nodes) == {plugin.get_ep_name()}
    unconverted = set(channels_last_operators()) & set(nodes[plugin.get_ep_name()])
    assert not unconverted


def test_a_cpu_node_in_the_middle_and_a_recurrent_layer() -> None:
    graph = """(float[n, 2, 6, 5] x, float[4, 2, 3, 3] w, float[4, 4, 1, 1] w2, float[1, 12, 4] lw, float[1, 12, 3] lr)
        => (float[a, b, c, d] y, int64[n, 4, 6, 5] i) {
        c1 = Conv<pads = [1, 1, 1, 1]>(x, w) r = Relu(c1)
        text = Cast<to = 8>(r) back = Cast<to = 1>(text)
        c2 = Conv(back, w2) m = MaxPool<kernel_shape = [1, 1]>(c2) i = Cast<to = 7>(m)
        f = ReduceMean<axes = [3], keepdims = 0>(m) t = Transpose<perm = [2, 0, 1]>(f)
        y, h, s = LSTM<hidden_size = 3>(t, lw, lr) }"""
    model = graph_model(graph)
    extra = compare(model, Counter(Conv=2, MaxPool=1), Counter(Cast=2))
    assert extra <= 2


def test_control_flow_a_cpu_node_and_a_recurrent_layer_in_both_layouts() -> None:
    """Run a model with convolutions, a Loop that contains an If, Casts on the CPU, and an LSTM."""
    model = graph_model(
        """(float[n, 2, 6, 5] x, bool c, int64 trips, float[4, 2, 3, 3] w, float[4, 4, 1, 1] w2, float[1, 12, 4] lw,
            float[1, 12, 3] lr) => (float[a, b, e, d] y, int64[n, 4, 6, 5] i) {
        c1 = Conv<pads = [1, 1, 1, 1]>(x, w) r = Relu(c1)
        l = Loop(trips, c, r) <body = b (int64 k, bool on, float[n, 4, 6, 5] carried)
              => (bool still, float[n, 4, 6, 5] next) {
            still = Identity(on) one = Constant<value_int = 1>() bit = BitwiseAnd(k, one) odd = Cast<to = 9>(bit)
            next = If(odd) <then_branch = yes () => (float[n, 4, 6, 5] t) { t0 = Conv(carried, w2) t = Tanh(t0) },
                            else_branch = no () => (float[n, 4, 6, 5] s) { s = Add(carried, r) }> }>
        text = Cast<to = 8>(l) back = Cast<to = 1>(text)
        c2 = Conv(back, w2) m = MaxPool<kernel_shape = [1, 1]>(c2) i = Cast<to = 7>(m)
        axis = Constant<value_ints = [3]>() f = ReduceMean<keepdims = 0>(m, axis) t = Transpose<perm = [2, 0, 1]>(f)
        y, h, s = LSTM<hidden_size = 3>(t, lw, lr) }""",
        18,
    )
    cpu = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    feeds: Arrays = {"c": np.array(True), "trips": np.array(4)}
    for value in cpu.get_inputs():
        if value.name not in feeds:
            shape = [dim if isinstance(dim, int) else 2 for dim in value.shape]
            feeds[value.name] = RNG.standard_normal(shape, dtype=np.float32) / 2
    expected = cpu.run(None, feeds)
    moved = {}
    for prefer in (False, True):
        session = layout_session(model, prefer)
        for got, wanted in zip(session.run(None, feeds), expected, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)
        assert (placed(session)[plugin.get_ep_name()]["Conv*"] > 1) is prefer
        assert "Conv" not in placed(session)["CPUExecutionProvider"]
        session.run(None, feeds)
        before = plugin.counters()
        session.run(None, feeds)
        after = plugin.counters()
        moved[prefer] = {name: after[name] - before[name] for name in COPIES}
    assert moved[False] == moved[True]


def test_a_quantized_network() -> None:
    constants: Arrays = {
        "wq": RNG.integers(-90, 90, (6, 3, 3, 3)).astype(np.int8),
        "ws": (RNG.random(6) / 200 + 0.001).astype(np.float32),
    }
    constants |= {"xs": np.array(0.02, np.float32), "xz": np.array(128, np.uint8)}
    constants |= {"ys": np.array(0.03, np.float32), "yz": np.array(7, np.uint8)}
    graph = helper.make_graph(
        [
            helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["xq"]),
            helper.make_node("DequantizeLinear", ["xq", "xs", "xz"], ["xf"]),
            helper.make_node("DequantizeLinear", ["wq", "ws"], ["wf"], axis=0),
            helper.make_node("Conv", ["xf", "wf"], ["c"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["c"], ["r"]),
            helper.make_node("QuantizeLinear", ["r", "ys", "yz"], ["rq"]),
            helper.make_node("DequantizeLinear", ["rq", "ys", "yz"], ["rf"]),
            helper.make_node("MaxPool", ["rf"], ["m"], kernel_shape=[2, 2], strides=[2, 2]),
            helper.make_node("QuantizeLinear", ["m", "ys", "yz"], ["mq"]),
            helper.make_node("DequantizeLinear", ["mq", "ys", "yz"], ["y"]),
        ],
        "quantized",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 6, 4, 3])],
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    x = RNG.standard_normal((2, 3, 8, 6), dtype=np.float32)
    expected = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
    session = layout_session(model)
    nodes = placed(session)
    assert set(nodes) == {plugin.get_ep_name()}
    assert nodes[plugin.get_ep_name()]["Conv*"] == 1
    result = session.run(None, {"x": x})[0]
    assert np.abs(result - expected).max() <= 0.0301  # at most one quantization step
    np.testing.assert_array_equal(result, layout_session(model, False).run(None, {"x": x})[0])


def test_other_operators_between_convolutions() -> None:
    """Operators whose results depend on the order of axes see NCHW: NonZero, Flatten, Softmax over channels."""
    model = graph_model(
        """(float[n, 4, 6, 6] x) => (float[n, 4, a, b] y, float[n, c] z, int64[4, d] nz)
        <float[4, 4, 1, 1] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 8, 7, 6, 5, 4, 3, 2},
         int64[8] pads = {0, 0, 1, 1, 0, 0, 2, 1}, float[4] up = {1, 1, 2, 2}, float[4] one = {1, 2, 3, 4}>
        { c0 = Conv(x, w) p = Pad<mode = "reflect">(c0, pads) q = Conv(p, w) r = Resize<mode = "linear">(q, , up)
          s = Softmax<axis = 1>(r) i = InstanceNormalization(s, one, one) y = Conv(i, w) z = Flatten(q)
          nz = NonZero(c0) }"""
    )
    compare(model, Counter(Conv=3))


def test_a_vector_is_left_as_it_is() -> None:
    """The plugin declines BatchNormalization of a vector, because ONNX Runtime fails to convert a vector to NHWC."""
    graph = """(float[5] x, float[1] s, float[1] b, float[1] m, float[1] v) => (float[5] y)
        { y = BatchNormalization(x, s, b, m, v) }"""
    options = {"prefer_nhwc": "1"}
    (verdict,) = plugin.explain(graph_model(graph), emulate=True, provider_options=options)
    assert (verdict.kind, verdict.supported) == ("shape", False)
    assert "channels-last" in verdict.reason


def test_verdicts_are_those_of_the_graph_that_runs() -> None:
    verdicts = plugin.explain(graph_model(SINGLE["LRN"]), emulate=True, provider_options={"prefer_nhwc": "1"})
    assert sorted((verdict.domain, verdict.op_type, verdict.supported) for verdict in verdicts) == [
        ("", "Transpose", True),
        ("", "Transpose", True),
        (CHANNELS_LAST_DOMAIN, "LRN", True),
    ]


def test_a_converted_node_that_no_kernel_takes_is_named() -> None:
    code = """
    import sys
    import ort_cuda_plugin as plugin
    from ort_cuda_plugin.ops import registry
    from ort_cuda_plugin.model.ir import Unsupported

    lookup = registry.lookup
    def without_channels_last(domain, op_type, since_version):
        if domain == registry.CHANNELS_LAST_DOMAIN:
            raise Unsupported("op", "there is no row")
        return lookup(domain, op_type, since_version)

    registry.lookup = without_channels_last
    try:
        plugin.session(bytes.fromhex(sys.argv[1]), emulate=True, provider_options={"prefer_nhwc": 1})
    except Exception as error:
        print(error)
    """
    done = python(code, graph_model(SINGLE["LRN"]).hex(), preloaded=True)
    assert "LRN" in done.stdout
    assert f"no kernel supports {CHANNELS_LAST_DOMAIN}.LRN-13 of (FLOAT32): there is no row" in done.stderr
    assert "prefer_nhwc=0" in done.stderr
