"""Program interpreter: no pass changes what a program computes, for any kind of device, and broken passes are found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper, parser

from fuzzing.profiles import Profile
from ort_cuda_plugin.passes.analysis import expression_equality
from ort_cuda_plugin.passes.attention import attention_fusion
from ort_cuda_plugin.passes.fusion import horizontal_gemm, vertical_fusion
from ort_cuda_plugin.passes.simplification import common_subexpression_elimination
from ort_cuda_plugin.program.steps.steps import Attend
from programs.campaign import check
from programs.interpreter import Interpreter
from programs.models import network, random_model
from programs.states import DEVICES, differing, first_difference, record
from programs.values import Array, Reading

SAMPLE = 12


def numbers(*shape: int, seed: int = 0, dtype: str = "float32") -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def model(text: str, **constants: Array) -> onnx.ModelProto:
    """Return the model of a graph in ONNX's text form; ``constants`` are its initializers."""
    made = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> g {text}')
    made.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    return made


# ---- the interpreter ----


def test_a_program_as_lowered_computes_what_the_cpu_provider_does() -> None:
    """Check the interpreter itself against the CPU provider."""
    made = model(
        """(float[n, 4, 6, 6] x, float[n, 5, 8] q) => (float[n, 6, 3, 3] y, float[n, 5, 3] z, int64[n, 5] i)
        { c = Conv<strides = [2, 2], pads = [1, 1, 1, 1], group = 2>(x, w, b) y = Sigmoid(c)
          h = MatMul(q, v) e = Erf(h) z = Softmax(e) a = ArgMax<axis = 2, keepdims = 0>(q)
          l = ReduceSum<keepdims = 0>(q, axis) t = CastLike(l, a) i = Sub(a, t) }""",
        w=numbers(6, 2, 3, 3), b=numbers(6, seed=1), v=numbers(8, 3, seed=2), axis=np.array([2]),
    )  # fmt: skip
    feeds = [numbers(2, 4, 6, 6, seed=3), numbers(2, 5, 8, seed=4)]
    recorded = record(made, feeds, DEVICES["emulated"])
    values = recorded.values(feeds)
    assert values is not None
    found = Interpreter(values, feeds, Reading.EXACT).run(recorded.states[0].steps)
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    for number, wanted in enumerate(session.run(None, dict(zip("xq", feeds, strict=True)))):
        np.testing.assert_allclose(found["output", number], wanted.reshape(-1), rtol=1e-4, atol=1e-5)


def test_a_value_that_a_model_stores_in_float16_is_rounded_in_one_reading() -> None:
    made = model("(float16[n] x) => (float16[n] y) { t = Sigmoid(x) y = Mul(t, t) }")
    feeds = [numbers(7, dtype="float16")]
    recorded = record(made, feeds, DEVICES["emulated"])
    values = recorded.values(feeds)
    assert values is not None
    exact, rounded = (Interpreter(values, feeds, reading).run(recorded.states[0].steps) for reading in Reading)
    t = 1 / (1 + np.exp(-feeds[0].astype(np.float64)))
    np.testing.assert_allclose(exact["output", 0], t * t, rtol=1e-12)
    halves = t.astype(np.float16).astype(np.float64)
    np.testing.assert_array_equal(rounded["output", 0], (halves * halves).astype(np.float16))


def test_a_plan_takes_other_sizes_where_its_guards_hold() -> None:
    feeds = [numbers(2, 3), numbers(2, 3, seed=1)]
    recorded = record(
        model("(float[n, m] a, float[n, m] b) => (float[n, m] c) { c = Add(a, b) }"), feeds, DEVICES["sm_90"]
    )
    assert recorded.values(feeds) != recorded.values([numbers(4, 5)] * 2)
    assert recorded.values([numbers(4, 5)] * 2) is not None
    assert recorded.values([numbers(4, 5), numbers(4, 6)]) is None


def test_a_result_that_is_missing_or_has_another_element_differs() -> None:
    expected = {("output", 0): np.arange(4.0)}
    assert not differing({("output", 0): np.arange(4.0) + 1e-9}, expected)
    assert differing({}, expected) == "output 0 is not written"
    assert not differing({}, {("output", 0): np.zeros(0)}), "no kernel is launched for an empty result"
    text = differing({("output", 0): np.array([0.0, 1.0, 2.5, 3.0])}, expected)
    assert text == "output 0: 1 of 4 elements, element 2 is 2.5, not 2.0"


# ---- every pass ----


@pytest.mark.full
def test_random_models_compute_the_same_after_each_pass_on_every_device_kind() -> None:
    report = check([random_model(Profile.GRAPHS, number) for number in range(SAMPLE)])
    assert not report.findings, "\n\n".join(f"{name}: {found}" for name, found in report.findings)
    assert report.runs["of the plan's sizes"] > 3 * SAMPLE
    assert report.runs["of other sizes"] > 3 * SAMPLE


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "dtype", "devices"),
    [
        ("bert_base", "float32", ("emulated", "sm_90", "sm_90 with libraries")),
        ("bert_base", "int8", ("sm_90",)),
        ("llama_decode", "float16", ("sm_90 with libraries",)),
        ("mobilenet_v2", "float32", ("sm_80", "sm_90 with libraries")),
        ("efficientnet_b0", "float16", ("sm_120",)),
        ("resnet50", "float32", ("sm_90",)),
        ("unet", "float16", ("sm_90 with libraries",)),
    ],
)
def test_networks_compute_the_same_after_each_pass(name: str, dtype: str, devices: tuple[str, ...]) -> None:
    report = check([network(name, dtype)], devices, others=1)
    assert not report.findings, "\n\n".join(f"{name}: {found}" for name, found in report.findings)
    assert report.programs == len(devices)


def test_a_launch_that_writes_to_another_place_is_still_the_launch() -> None:
    """Concat(s, i, s): a launch stores the sizes s in the first slice, and a copy fills the third one."""
    made = model(
        """(float[n, m] x, int64[k] i) => (int64[l] y)
        { s = Shape(x) y = Concat<axis = 0>(s, i, s) }"""
    )
    feeds = [numbers(3, 4), np.arange(5)]
    assert not first_difference(record(made, feeds, DEVICES["emulated"]), feeds)


def test_a_launch_may_read_one_slice_of_a_buffer_and_write_another() -> None:
    made = model(
        """(float[6] x) => (float[8] y)
        { p = CumSum(x, axis) v, i = TopK<axis = 0>(p, count) y = Concat<axis = 0>(p, v) }""",
        axis=np.array(0), count=np.array([2]),
    )  # fmt: skip
    feeds = [numbers(6)]
    recorded = record(made, feeds, DEVICES["emulated"])
    both = [step for step in recorded.states[-1].steps if not set(step.reads).isdisjoint(step.writes)]
    assert both, "concat elimination has TopK read and write the output"
    assert not first_difference(recorded, feeds)


@pytest.mark.parametrize(("number", "device"), [(40040, "emulated"), (40285, "sm_80")])
def test_shapes_without_elements_and_sums_that_cancel_are_no_difference(number: int, device: str) -> None:
    report = check([random_model(Profile.GRAPHS, number)], [device])
    assert not report.findings, str(report.findings[0][1])


# ---- broken passes ----


HALVES = "(float16[n, 8] x) => (float16[n, 8] y) { a = Exp(x) b = Mul(a, x) y = Sub(b, a) }"
ATTENTION = """(float[2, 3, 5, 8] q, float[2, 3, 5, 8] k, float[2, 3, 5, 8] v) => (float[2, 3, 5, 8] y)
    { t = Transpose<perm = [0, 1, 3, 2]>(k) s = MatMul(q, t) w = Softmax(s) y = MatMul(w, v) }"""
"""Models that vertical fusion and attention fusion change."""


def difference(made: onnx.ModelProto, shapes: Sequence[tuple[int, ...]], dtype: str = "float32") -> str:
    """Return the first difference between two states of the program for the emulated device, as text; "" if none."""
    feeds = [numbers(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]
    return str(first_difference(record(made, feeds, DEVICES["emulated"]), feeds) or "")


def test_fusion_that_forgets_where_the_model_rounds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not difference(model(HALVES), [(3, 8)], "float16")
    monkeypatch.setattr(vertical_fusion, "stored", lambda x: x)
    found = difference(model(HALVES), [(3, 8)], "float16")
    assert found.startswith("after vertical_fusion (before it: sink_through_concat): output 0: ")
    assert "(rounded)\n-    0  map" in found
    assert "Exp" in found
    assert "+    0  map" in found


def test_attention_that_forgets_its_softmax_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    made, shapes = model(ATTENTION), [(2, 3, 5, 8)] * 3
    assert not difference(made, shapes)

    def without_softmax(*arguments: Any, **named: Any) -> Attend:
        return Attend(*arguments, **{**named, "weight": named["score"]})

    monkeypatch.setattr(attention_fusion, "Attend", without_softmax)
    assert difference(made, shapes).startswith("after attention_fusion")


def test_products_whose_weights_are_joined_in_another_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model(
        """(float[n, 8] x) => (float[n, 6] y, float[n, 6] z)
        { p = MatMul(x, a) y = Softmax(p) q = MatMul(x, b) z = Softmax(q) }""",
        a=numbers(8, 6), b=numbers(8, 6, seed=1),
    )  # fmt: skip
    assert not difference(made, [(5, 8)])
    join = expression_equality.joined_constant
    monkeypatch.setattr(horizontal_gemm, "joined_constant", lambda tensors, axis: join(tensors[::-1], axis))
    assert difference(made, [(5, 8)]).startswith("after horizontal_gemm")


def test_different_results_that_are_taken_for_equal_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model(
        """(float[9, 8] x, float[8, 6] a, float[8, 6] b) => (float[9, 6] y, float[9, 6] z)
        { e = Exp(x) s = Mul(e, two) t = Mul(e, three) y = MatMul(s, a) z = MatMul(t, b) }""",
        two=np.array([2.0], np.float32), three=np.array([3.0], np.float32),
    )  # fmt: skip
    shapes = [(9, 8), (8, 6), (8, 6)]
    assert not difference(made, shapes)
    monkeypatch.setattr(common_subexpression_elimination, "are_equal", lambda *arguments: True)
    assert difference(made, shapes).startswith("after common_subexpression_elimination")
