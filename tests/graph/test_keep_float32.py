"""The option keep_float32: float16 nodes that overflow give the results of float32, in as many launches as before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper, parser

import ort_cuda_plugin
from contexts import compile_model, settings
from fuzzing.profiles import Profile
from kernel_harness import Array, run_model
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.device import DeviceProperties, LoweringOptions
from programs.models import random_model
from programs.states import DEVICES, CannotRunError, first_difference, record


def model(text: str, **constants: Array | float) -> onnx.ModelProto:
    """Return the model of a graph in ONNX's text form; ``constants`` are arrays, or numbers in float16."""
    made = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]> kept {text}')
    for name, value in constants.items():
        array = value if isinstance(value, np.ndarray) else np.array(value, np.float16)
        made.graph.initializer.append(numpy_helper.from_array(array, name))
    return onnx.shape_inference.infer_shapes(made)


def halves(*shape: int, scale: float = 1.0, seed: int = 0) -> Array:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float16)


# ---- models that overflow, with their results in float32 ----


@dataclass(frozen=True)
class Case:
    """``listed`` is the value of keep_float32; ``launches`` is the number of launches with and without it."""

    text: str
    listed: str
    inputs: Sequence[Array]
    expected: Callable[..., Array]
    launches: int = 1

    @property
    def model(self) -> onnx.ModelProto:
        return model(self.text, axis=np.array([-1]), two=2.0, eps=1e-5, small=2**-8)


def rms_norm(x: Array, w: Array) -> Array:
    return np.asarray(x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-5) * w)


def layer_norm(x: Array, r: Array, w: Array, b: Array) -> Array:
    h = x + r
    d = h - h.mean(-1, keepdims=True)
    return np.asarray(d / np.sqrt(np.mean(d * d, -1, keepdims=True) + 1e-5) * w + b)


def attention(q: Array, k: Array, v: Array) -> Array:
    scores = q @ np.swapaxes(k, -1, -2)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True) @ v)


HEADS = (1, 2, 32, 64)
CASES = {
    "RMS normalization": Case(
        """(float16[4, 64] x, float16[64] w) => (float16[4, 64] y)
        { s = Pow(x, two) m = ReduceMean(s, axis) a = Add(m, eps) r = Sqrt(a) d = Div(x, r) y = Mul(d, w) }""",
        "Pow,ReduceMean,Add,Sqrt,Div",
        [halves(4, 64, scale=3000), halves(64, seed=1)],
        rms_norm,
    ),
    "variance": Case(
        """(float16[4, 64] x) => (float16[4, 1] y)
        { m = ReduceMean(x, axis) d = Sub(x, m) s = Mul(d, d) v = ReduceMean(s, axis) y = Sqrt(v) }""",
        "s,v,y",
        [halves(4, 64, scale=2000)],
        lambda x: np.std(x, -1, keepdims=True),
    ),
    "attention scores": Case(
        """(float16[1, 2, 32, 64] q, float16[1, 2, 32, 64] k, float16[1, 2, 32, 64] v) => (float16[1, 2, 32, 64] y)
        { t = Transpose<perm = [0, 1, 3, 2]>(k) s = MatMul(q, t) p = Softmax<axis = -1>(s) y = MatMul(p, v) }""",
        "s,p",
        [halves(*HEADS, scale=150), halves(*HEADS, scale=150, seed=1), halves(*HEADS, seed=2)],
        attention,
    ),
    "LayerNormalization of a residual": Case(
        """(float16[4, 64] x, float16[4, 64] r, float16[64] w, float16[64] b) => (float16[4, 64] y)
        { h = Add(x, r) y = LayerNormalization(h, w, b) }""",
        "Add,LayerNormalization",
        [halves(4, 64, scale=3e3) + np.float16(4e4), halves(4, 64, scale=3e3, seed=1) + np.float16(3e4),
         halves(64, seed=2), halves(64, seed=3)],
        layer_norm,
    ),
    "residuals of products": Case(
        """(float16[8, 64] x, float16[64, 64] w, float16[64, 32] v, float16[8, 32] r) => (float16[8, 32] y)
        { a = MatMul(x, w) c = MatMul(a, v) h = Add(c, r) y = Mul(h, small) }""",
        "c,h,y",
        [halves(8, 64, scale=10), halves(64, 64, seed=1), halves(64, 32, scale=300, seed=2), halves(8, 32, seed=3)],
        lambda x, w, v, r: ((x @ w) @ v + r) / 256,
        launches=2,
    ),
}  # fmt: skip


def is_close(found: Array, expected: Array) -> bool:
    return np.allclose(found, expected, rtol=4e-3, atol=4e-3 * float(np.abs(expected).max()))


def options(listed: str = "", **more: Any) -> LoweringOptions:
    return LoweringOptions(keep_float32=tuple(filter(None, listed.split(","))), **more)


def launches(made: onnx.ModelProto, given: LoweringOptions, device: DeviceProperties | None = None) -> int:
    plan = CompiledCluster(read_model(made), device or DeviceProperties(), given).prepare().plan
    assert plan is not None
    return len(plan.records)


@pytest.mark.every_case
@pytest.mark.parametrize("name", CASES)
def test_an_overflowing_chain_gives_the_results_of_float32(name: str) -> None:
    case = CASES[name]
    expected = case.expected(*(x.astype(np.float32) for x in case.inputs))
    with np.errstate(all="ignore"):
        # Fused attention stores no scores, so some of its kernels do not overflow.
        (plain,) = run_model(case.model, case.inputs, options=options(fusion=False))
        assert not is_close(plain, expected), "the case does not overflow in float16"
    (kept,) = run_model(case.model, case.inputs, options=options(case.listed))
    assert kept.dtype == np.float16
    assert is_close(kept, expected)
    (unfused,) = run_model(case.model, case.inputs, options=options(case.listed, fusion=False))
    assert is_close(unfused, expected)


@pytest.mark.every_case
@pytest.mark.parametrize("name", CASES)
def test_the_conversions_need_no_launches(name: str) -> None:
    case = CASES[name]
    for device in (DeviceProperties(), DeviceProperties.gpu((9, 0))):
        assert launches(case.model, options(), device) == case.launches
        assert launches(case.model, options(case.listed), device) == case.launches


@pytest.mark.parametrize("name", CASES)
def test_no_pass_changes_what_the_program_computes(name: str) -> None:
    case = CASES[name]
    for kind, device in DEVICES.items():
        recorded = record(case.model, case.inputs, device, options(case.listed))
        found = first_difference(recorded, case.inputs)
        assert found is None, f"{kind}: {found}"


# ---- what is computed in float32 ----


def test_a_value_is_rounded_once_where_it_leaves_the_listed_nodes() -> None:
    """In float32, (x + 1) - 1 keeps the bits of a small x that x + 1 loses in float16."""
    made = model("(float16[n] x) => (float16[n] y, float16[n] s) { s = Add(x, one) y = Sub(s, one) }", one=1.0)
    x = np.array([2**-12, 3 * 2**-13], np.float16)
    for listed, expected in (("", [0, 0]), ("Add", [0, 0]), ("Add,Sub", x)):
        y, s = run_model(made, [x], dynamic=True, options=options(listed))
        np.testing.assert_array_equal(y, np.array(expected, np.float16))
        np.testing.assert_array_equal(s, np.ones(2, np.float16))


def test_bfloat16_keeps_the_bits_of_float32() -> None:
    made = model("(bfloat16[4] x, bfloat16[4] b) => (bfloat16[4] y) { s = Add(x, b) y = Sub(s, b) }")
    x, b = np.array([1.25, 3.5, -7.0, 0.25], ml_dtypes.bfloat16), np.full(4, 4096, ml_dtypes.bfloat16)
    (plain,) = run_model(made, [x, b])
    (kept,) = run_model(made, [x, b], options=options("Add,Sub"))
    np.testing.assert_array_equal(kept.view(np.uint16), x.view(np.uint16))
    np.testing.assert_array_equal(plain.view(np.uint16), np.zeros(4, np.uint16))


def test_a_listed_cast_keeps_the_wider_value() -> None:
    made = model("(float[4] x) => (float[4] y) { h = Cast<to = 10>(x) d = Add(h, h) y = Cast<to = 1>(d) }")
    x = np.array([70000, 1.0001, -1e30, 3], np.float32)
    (kept,) = run_model(made, [x], options=options("Cast,Add"))
    np.testing.assert_array_equal(kept, 2 * x)
    (plain,) = run_model(made, [x], options=options("Add"))
    assert np.isinf(plain[0])


def test_a_listed_dequantization_returns_float32() -> None:
    text = """(uint8[4] q, float16 s) => (float16[4] y)
        { w = DequantizeLinear<output_dtype = 10>(q, s) d = Add(w, w) y = Mul(d, small) }"""
    made = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 23]> kept {text}')
    made.graph.initializer.append(numpy_helper.from_array(np.array(2**-4, np.float16), "small"))
    q, s = np.array([1, 100, 200, 255], np.uint8), np.float16(500)
    (kept,) = run_model(onnx.shape_inference.infer_shapes(made), [q, s], options=options("DequantizeLinear,Add,y"))
    np.testing.assert_array_equal(kept, (q * np.float32(62.5)).astype(np.float16))


LOOP = """(float16[4] x) => (float16[4] y)
    { y = Loop(trips, , x) <body = step (int64 i, bool on, float16[4] h) => (bool still, float16[4] next)
      { still = Identity(on) [square] q = Mul(h, h) [root] next = Sqrt(q) }> }"""


def test_nodes_in_a_body_are_listed_by_their_names() -> None:
    made = model(LOOP, trips=np.array(3))
    x = np.array([300, 1000, 5000, 60000], np.float16)
    (kept,) = run_model(made, [x], options=options("square,root"))
    np.testing.assert_array_equal(kept, x)
    (plain,) = run_model(made, [x])
    assert np.isinf(plain).all()


def test_uniform_numbers_stay_below_the_upper_limit() -> None:
    made = model("(float16[64, 1024] x) => (float16[64, 1024] y) { y = RandomUniformLike<dtype = 10, seed = 1.0>(x) }")
    (y,) = run_model(made, [np.zeros((64, 1024), np.float16)], options=options("RandomUniformLike"))
    assert y.max() < 1


def test_slices_of_a_packed_projection_are_multiplied_without_a_copy() -> None:
    made = model(
        """(float16[2, 16, 192] x) => (float16[2, 16, 16] y)
        { q, k, v = Split<axis = -1, num_outputs = 3>(x) t = Transpose<perm = [0, 2, 1]>(k) s = MatMul(q, t)
          y = Mul(s, small) }""",
        small=2**-6,
    )
    x = halves(2, 16, 192, scale=200)
    kept = options("s,y")
    assert launches(made, kept) == launches(made, options()) == 1
    (result,) = run_model(made, [x], options=kept)
    q, k, _ = np.split(x.astype(np.float32), 3, -1)
    np.testing.assert_allclose(result, q @ np.swapaxes(k, -1, -2) / 64, rtol=2e-3)


def test_nodes_without_float32_forms_keep_their_type() -> None:
    """A sequence has one element type, and BitCast reads bits: listing such nodes changes nothing."""
    made = model(
        """(float16[4] x) => (float16[4] y, float16[4] z)
        { s = SequenceConstruct(x, x) i = Constant<value_int = 0>() a = SequenceAt(s, i) y = Neg(a)
          z = Where(c, x, y) }""",
        c=np.array([True, False, True, False]),
    )
    x = halves(4)
    for got, expected in zip(
        run_model(made, [x], options=options("SequenceConstruct,SequenceAt,Neg,Where")),
        run_model(made, [x]),
        strict=True,
    ):
        np.testing.assert_array_equal(got, expected)


def test_views_pass_float32_on() -> None:
    made = model(
        """(float16[2, 8] x) => (float16[4, 4] y, float16[2, 8, 1] z)
        { s = Mul(x, x) r = Reshape(s, shape) t = Transpose(r) y = Sqrt(t) u = Unsqueeze(s, last) z = Identity(u) }""",
        shape=np.array([4, 4]), last=np.array([2]),
    )  # fmt: skip
    x = halves(2, 8, scale=1000)
    y, z = run_model(made, [x], options=options("Mul,Sqrt"))
    np.testing.assert_array_equal(y, np.abs(x).reshape(4, 4).T)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(z, (x * x).reshape(2, 8, 1))
    assert launches(made, options("Mul,Sqrt")) == launches(made, options())


# ---- sessions ----


def run(made: onnx.ModelProto, feeds: dict[str, Array], **given: str) -> Array:
    session = ort_cuda_plugin.session(made.SerializeToString(), emulate=True, provider_options=given)
    return np.asarray(session.run(None, feeds)[0])


NORM = CASES["RMS normalization"]
FEEDS = dict(zip("xw", NORM.inputs, strict=True))
EXPECTED = rms_norm(*(x.astype(np.float32) for x in NORM.inputs))


@pytest.mark.parametrize("graphs", ["automatic_cuda_graphs", "enable_cuda_graph"])
def test_a_session_keeps_the_listed_nodes_in_float32(graphs: str) -> None:
    case = CASES["residuals of products"]
    given = {"keep_float32": case.listed, graphs: "1"}
    session = ort_cuda_plugin.session(case.model.SerializeToString(), emulate=True, provider_options=given)
    memory = ort_cuda_plugin.register(emulate=True)[0].memory_info(ort.OrtDeviceMemoryType.DEFAULT)
    binding = session.io_binding()
    bound = {
        name: ort.OrtValue.ortvalue_from_numpy(array, "gpu", 0, memory.device_vendor_id)
        for name, array in {**dict(zip("xwvr", case.inputs, strict=True)), "y": np.zeros((8, 32), np.float16)}.items()
    }
    for name, value in bound.items():
        (binding.bind_ortvalue_output if name == "y" else binding.bind_ortvalue_input)(name, value)
    before = ort_cuda_plugin.counters()
    for _ in range(5):
        session.run_with_iobinding(binding)
    after = ort_cuda_plugin.counters()
    assert after["graph_replays"] > before["graph_replays"] or graphs == "enable_cuda_graph"
    expected = case.expected(*(x.astype(np.float32) for x in case.inputs))
    assert is_close(bound["y"].numpy(), expected)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []

    def log(level: str, message: str, *_: object) -> None:
        if level == "WARNING":
            lines.append(message)

    monkeypatch.setattr("ort_cuda_plugin.abi.host.log", log)
    return lines


def test_an_entry_that_names_no_node_is_in_the_log(warnings: list[str]) -> None:
    run(NORM.model, FEEDS, keep_float32=f"{NORM.listed},Poww,ai.onnx.Mul")
    assert warnings == [
        "keep_float32: no node has this name, output or operator type: 'Poww'. Similar: 'Pow'. ONNX Runtime may have "
        "fused or renamed the node: ort-cuda-plugin explain MODEL lists the nodes that the plugin gets"
    ]


def test_the_log_has_the_name_that_onnx_runtime_gives_a_fused_node(warnings: list[str]) -> None:
    made = model("(float16[4, 8] x) => (float16[4, 8] y) { [projection] p = MatMul(x, w) y = Add(p, b) }",
                 w=halves(8, 8), b=halves(8))  # fmt: skip
    run(made, {"x": halves(4, 8)}, keep_float32="projection")
    assert len(warnings) == 1
    assert "Similar: 'projection/MatMulAddFusion'" in warnings[0]


def test_a_name_that_layout_changes_have_replaced_is_in_the_log(warnings: list[str]) -> None:
    made = model(
        "(float16[1, 4, 6, 6] x) => (float16[1, 4, 4, 4] y) { c = Conv(x, w) y = Relu(c) }", w=halves(4, 4, 3, 3)
    )
    feeds = {"x": halves(1, 4, 6, 6)}
    run(made, feeds, keep_float32="c,y", prefer_nhwc="1")
    assert len(warnings) == 1
    assert "no node has this name, output or operator type: 'c'" in warnings[0]
    del warnings[:]
    run(made, feeds, keep_float32="Conv,Relu", prefer_nhwc="1")
    assert warnings == []


def test_a_listed_node_without_half_types_is_in_the_log(warnings: list[str]) -> None:
    made = model("(float[4] x) => (float[4] y) { s = Abs(x) y = Sqrt(s) }")
    run(made, {"x": np.ones(4, np.float32)}, keep_float32="Sqrt")
    assert warnings == ["keep_float32: 'Sqrt' has no effect on y (Sqrt): it reads and returns no float16 or bfloat16"]


def test_single_nodes_store_16_bits_between_listed_nodes(warnings: list[str]) -> None:
    result = run(NORM.model, FEEDS, keep_float32=NORM.listed, single_nodes="1")
    assert not is_close(result, EXPECTED)
    assert len(warnings) == 1
    assert "values that pass from a listed node to another in 16 bits" in warnings[0]
    made = model("(float16[4, 64] x, float16[64] w) => (float16[4, 64] y) { y = RMSNormalization(x, w) }")
    made.opset_import[0].version = 23
    assert is_close(run(made, FEEDS, keep_float32="RMSNormalization", single_nodes="1"), EXPECTED)


def test_a_loop_of_onnx_runtime_reports_no_node_of_its_body_as_unknown(warnings: list[str]) -> None:
    for trips in ("(float16[4] x)", "(float16[4] x, int64 trips)"):
        made = model(LOOP.replace("(float16[4] x)", trips), **({} if "trips" in trips else {"trips": np.array(2)}))
        feeds = {"x": np.full(4, 300, np.float16), **({"trips": np.array(2)} if "trips" in trips else {})}
        np.testing.assert_array_equal(run(made, feeds, keep_float32="square,root"), feeds["x"])
    assert warnings == []


def test_an_empty_entry_is_an_error() -> None:
    with pytest.raises(Exception, match="keep_float32='Pow,,Add': use names of nodes and operator types"):
        run(NORM.model, FEEDS, keep_float32="Pow,,Add")


def test_a_compiled_model_keeps_its_list(tmp_path: Path, warnings: list[str]) -> None:
    path = tmp_path / "m_ctx.onnx"
    compile_model(NORM.model.SerializeToString(), path, keep_float32=NORM.listed)

    def loaded(**given: str) -> Array:
        session = ort.InferenceSession(
            str(path), settings({}, {"context_allow_host_code": "1", **given}), enable_fallback=0
        )
        return np.asarray(session.run(None, FEEDS)[0])

    before = ort_cuda_plugin.counters()["plan_variants_built"]
    assert is_close(loaded(), EXPECTED)
    assert is_close(loaded(keep_float32=NORM.listed), EXPECTED)
    assert ort_cuda_plugin.counters()["plan_variants_built"] == before
    assert warnings == []
    assert not is_close(loaded(keep_float32="Sqrt"), EXPECTED)
    assert f"compiled with keep_float32={NORM.listed}, and the session has keep_float32=Sqrt" in warnings[0]


def test_an_operator_without_float32_keeps_its_type(warnings: list[str]) -> None:
    made = model(
        """(float[1, 2, 4] e, float16[1, 1, 2, 4] q, float16[1, 1, 2, 4] r)
            => (float16[1, 1, 2, 4] a, float16[1, 1, 2, 4] b)
        { a, b = com.microsoft.GemmaRotaryEmbedding(e, q, r, q, r) }""",
    )
    feeds = {"e": np.ones((1, 2, 4), np.float32), "q": halves(1, 1, 2, 4), "r": halves(1, 1, 2, 4, seed=1)}
    kept = run(made, feeds, keep_float32="com.microsoft.GemmaRotaryEmbedding")
    np.testing.assert_array_equal(kept, run(made, feeds))
    assert len(warnings) == 1
    assert "a (GemmaRotaryEmbedding): GemmaRotaryEmbedding does not support float32 for input 1" in warnings[0]


# ---- keep_float32=auto ----

CUBE = """(float16[4, 64] x) => (float16[4, 64] y)
    { n = LayerNormalization(x, w, b) s = Mul(n, n) q = Mul(s, n) y = Mul(q, scale) }"""


def cube(weight: float, text: str = CUBE) -> onnx.ModelProto:
    return model(text, w=np.full(64, weight, np.float16), b=np.zeros(64, np.float16), scale=2**-9)


def test_auto_computes_in_float32_what_may_exceed_float16() -> None:
    """The largest element of a normalized row of 64 elements is 8."""
    spike = np.zeros((4, 64), np.float16)
    spike[:, 5] = 1000
    for weight, chosen in ((4.0, []), (30.0, ["q", "y"])):
        cluster = CompiledCluster(read_model(cube(weight)), DeviceProperties(), options("auto"))
        lines: list[str] = []
        cluster.tell = lines.append
        plan = cluster.prepare().plan
        assert plan is not None
        assert len(plan.records) == 1
        assert [line.split(" node ")[1].split(" ")[0] for line in lines] == chosen
        (result,) = run_model(cube(weight), [spike], options=options("auto"))
        n = (
            weight
            * (spike - spike.mean(-1, keepdims=True, dtype=np.float32))
            / spike.std(-1, keepdims=True, dtype=np.float32)
        )
        np.testing.assert_allclose(result, n**3 / 512, rtol=4e-3, atol=1e-3)
    (plain,) = run_model(cube(30.0), [spike])
    assert np.isinf(plain).any()


def test_auto_knows_the_bounds_of_rounded_results() -> None:
    """The result r is in the range of float16 again; its bound shows that its square is not."""
    text = CUBE.replace("y = Mul(q, scale)", "r = Mul(q, scale) z = Mul(r, r) t = Mul(z, scale) y = Mul(t, scale)")
    cluster = CompiledCluster(read_model(cube(30.0, text)), DeviceProperties(), options("auto"))
    lines: list[str] = []
    cluster.tell = lines.append
    cluster.prepare()
    assert [line.split(" node ")[1].split(" ")[0] for line in lines] == ["q", "r", "z", "t", "y"]


def test_auto_and_names_are_one_list() -> None:
    text = CUBE.replace("(float16[4, 64] x)", "(float16[4, 64] x, float16[4, 64] r)").replace(
        "y = Mul(q, scale)", "d = Add(r, r) h = Mul(d, scale) o = Mul(q, scale) y = Add(o, h)"
    )
    x, r = halves(4, 64), np.full((4, 64), 60000, np.float16)
    (both,) = run_model(cube(30.0, text), [x, r], options=options("auto,d,h"))
    assert np.isfinite(both).all()
    (auto,) = run_model(cube(30.0, text), [x, r], options=options("auto"))
    assert np.isinf(auto).all(), "the bound of an input is unknown"


def test_the_log_names_the_nodes_of_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr("ort_cuda_plugin.abi.host.log", lambda level, message, *_: lines.append(f"{level} {message}"))
    run(cube(30.0), {"x": halves(4, 64)}, keep_float32="auto")
    found = [line for line in lines if "keep_float32" in line]
    assert found == [
        "INFO keep_float32=auto computes node q (Mul) in float32, because its values may exceed float16: q up to "
        "1.39e+07",
        "INFO keep_float32=auto computes node y (Mul) in float32, because it reads values that may exceed float16",
    ]


# ---- random programs ----


@pytest.mark.parametrize("number", range(4))
def test_passes_keep_what_random_programs_compute_in_float32(number: int) -> None:
    made = random_model(Profile.GRAPHS, number)
    proto = onnx.shape_inference.infer_shapes(made.proto)
    types = sorted({node.op_type for node in proto.graph.node})
    for device in DEVICES.values():
        try:
            recorded = record(proto, made.feeds, device, options(",".join(types)))
        except CannotRunError:
            continue
        assert first_difference(recorded, made.feeds) is None
