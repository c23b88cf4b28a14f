"""Operators compared with NumPy over random shapes, broadcasts, types and axes, with static and dynamic shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx.reference import ReferenceEvaluator

from kernel_harness import run_op

Array = np.ndarray
FLOATS = ["float32", "float16"]
INTS = ["int32", "int64"]
few = settings(max_examples=12)
each = settings(max_examples=5)
"""Settings of tests with a parameter per operator: few examples each, since the operators share a kernel generator."""
dynamic = st.booleans()
dims = st.integers(0, 7) | st.sampled_from([1, 1, 33, 300, 1500, 2500])
shapes = st.lists(dims, max_size=4).filter(lambda shape: math.prod(shape) <= 20000).map(tuple)
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, -2.5, math.inf, -math.inf, math.nan, 1e-4, 30.0]


def seeded(shape: tuple[int, ...], dtype: str, seed: int, special: bool = False) -> Array:
    """Return random elements; ``special`` adds infinities, NaN, zeros and multiples of 0.5."""
    random = np.random.default_rng(seed)
    if dtype == "bool":
        return random.integers(0, 2, shape).astype(bool)
    if dtype.startswith(("int", "uint")):
        low = -40 if dtype.startswith("int") else 0
        return random.integers(low, 41, shape).astype(dtype)
    values = random.normal(scale=3.0, size=shape)
    if special:
        chosen = random.random(shape) < 0.3
        values = np.where(chosen, random.choice(SPECIAL, shape), values)
    return values.astype(dtype)


def assert_close(actual: Array, expected: Array, dtype: str | None = None) -> None:
    """Assert equality for integers and bool, and a relative error of 8 epsilon of ``dtype`` for floats."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    if actual.dtype.kind != "f":
        np.testing.assert_array_equal(actual, expected)
        return
    eps = float(np.finfo(dtype or actual.dtype).eps)
    np.testing.assert_allclose(actual.astype(np.float64), expected.astype(np.float64), rtol=8 * eps, atol=8 * eps)


def widened(x: Array) -> Array:
    return x.astype(np.float64) if x.dtype.kind == "f" else x


def erf(x: Array) -> Array:
    result: Array = np.vectorize(math.erf, otypes=[np.float64])(x)
    return result


UNARY: dict[str, Callable[[Array], Array]] = {
    "Abs": np.abs,
    "Neg": np.negative,
    "Sign": np.sign,
    "Floor": np.floor,
    "Ceil": np.ceil,
    "Round": np.round,
    "Sqrt": np.sqrt,
    "Exp": np.exp,
    "Log": np.log,
    "Sin": np.sin,
    "Cos": np.cos,
    "Tanh": np.tanh,
    "Erf": erf,
    "Reciprocal": lambda x: 1 / x,
    "Relu": lambda x: np.maximum(x, 0),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Softplus": lambda x: np.logaddexp(x, 0),
    "Softsign": lambda x: x / (1 + np.abs(x)),
    "HardSwish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    "Gelu": lambda x: 0.5 * x * (1 + erf(x * math.sqrt(0.5))),
    "Elu": lambda x: np.where(x < 0, np.expm1(x), x),
    "LeakyRelu": lambda x: np.where(x < 0, 0.01 * x, x),
    "ThresholdedRelu": lambda x: np.where(x > 1, x, 0),
    "IsNaN": np.isnan,
    "IsInf": np.isinf,
}
FINITE_ONLY = {"Softsign", "HardSwish", "Gelu", "Sin", "Cos", "Sigmoid"}
"""Functions that are tested with finite values only: at infinities they are undefined or overflow in NumPy."""


@pytest.mark.parametrize("name", sorted(UNARY))
@given(shape=shapes, dtype=st.sampled_from(FLOATS), seed=st.integers(0, 99), dynamic=dynamic)
@each
@np.errstate(all="ignore")
def test_functions_of_one_float_match_numpy(
    name: str, shape: tuple[int, ...], dtype: str, seed: int, dynamic: bool
) -> None:
    x = seeded(shape, dtype, seed, special=name not in FINITE_ONLY)
    (actual,) = run_op(name, [x], dynamic=dynamic)
    expected = UNARY[name](widened(x))
    assert_close(actual, expected if expected.dtype == bool else expected.astype(dtype))


BINARY = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Min": np.minimum,
    "Max": np.maximum,
    "Equal": np.equal,
    "Less": np.less,
    "Greater": np.greater,
    "LessOrEqual": np.less_equal,
    "GreaterOrEqual": np.greater_equal,
}


@st.composite
def broadcastable(draw: st.DrawFn, count: int) -> list[tuple[int, ...]]:
    return list(draw(hnp.mutually_broadcastable_shapes(num_shapes=count, max_dims=4, max_side=9)).input_shapes)


@pytest.mark.parametrize("name", sorted(BINARY))
@given(pair=broadcastable(2), dtype=st.sampled_from(FLOATS + INTS), seed=st.integers(0, 99), dynamic=dynamic)
@each
@np.errstate(all="ignore")
def test_functions_of_two_numbers_broadcast_as_numpy_does(
    name: str, pair: list[tuple[int, ...]], dtype: str, seed: int, dynamic: bool
) -> None:
    a, b = (seeded(shape, dtype, seed + i, special=True) for i, shape in enumerate(pair))
    expected = BINARY[name](widened(a), widened(b))
    if name == "Div" and dtype in INTS:
        b = np.where(b == 0, 1, b).astype(dtype)
        expected = np.trunc(a / b)
    (actual,) = run_op(name, [a, b], dynamic=dynamic)
    assert_close(actual, expected if expected.dtype == bool else expected.astype(dtype))


@given(pair=broadcastable(2), dtype=st.sampled_from([*INTS, "uint8", "int8"]), fmod=st.booleans(), dynamic=dynamic)
@few
def test_mod_of_integers_has_the_sign_of_the_divisor_or_of_the_dividend(
    pair: list[tuple[int, ...]], dtype: str, fmod: bool, dynamic: bool
) -> None:
    a, b = (seeded(shape, dtype, i) for i, shape in enumerate(pair))
    b = np.where(b == 0, 3, b).astype(dtype)
    (actual,) = run_op("Mod", [a, b], {"fmod": int(fmod)}, dynamic=dynamic)
    assert_close(actual, (np.fmod if fmod else np.mod)(a, b))


@pytest.mark.parametrize("dtype", INTS)
def test_integer_division_by_zero_and_of_the_smallest_number_does_not_trap(dtype: str) -> None:
    smallest = np.iinfo(dtype).min
    a, b = np.array([1, smallest, smallest], dtype), np.array([0, -1, 0], dtype)
    assert run_op("Div", [a, b])[0][1] == smallest
    assert run_op("Mod", [a, b])[0][1] == 0


@given(triple=broadcastable(3), dtype=st.sampled_from([*FLOATS, *INTS, "bool"]), dynamic=dynamic)
@few
def test_where_takes_elements_of_either_side(triple: list[tuple[int, ...]], dtype: str, dynamic: bool) -> None:
    condition = seeded(triple[0], "bool", 1)
    x, y = seeded(triple[1], dtype, 2), seeded(triple[2], dtype, 3)
    (actual,) = run_op("Where", [condition, x, y], dynamic=dynamic)
    assert_close(actual, np.where(condition, x, y))


@given(shape=shapes, source=st.sampled_from([*FLOATS, *INTS, "bool"]), target=st.sampled_from([*FLOATS, *INTS, "bool"]))
@few
def test_cast_converts_as_numpy_does(shape: tuple[int, ...], source: str, target: str) -> None:
    from onnx import helper

    x = seeded(shape, source, 5)
    (actual,) = run_op("Cast", [x], {"to": helper.np_dtype_to_tensor_dtype(np.dtype(target))})
    assert_close(actual, x.astype(target))


@given(shape=shapes, exponent=st.sampled_from([2.0, 0.5, 3.0, -1.0, 1.7]), dtype=st.sampled_from(FLOATS))
@few
@np.errstate(all="ignore")
def test_pow_by_a_constant_and_by_an_input_agree_with_numpy(
    shape: tuple[int, ...], exponent: float, dtype: str
) -> None:
    x = np.abs(seeded(shape, dtype, 8))
    power = np.array(exponent, dtype)
    expected = (widened(x) ** float(power)).astype(dtype)
    assert_close(run_op("Pow", [x, power], constant=[1])[0], expected)
    assert_close(run_op("Pow", [x, power])[0], expected)


@st.composite
def with_axes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = draw(st.lists(dims, min_size=1, max_size=4).filter(lambda shape: math.prod(shape) <= 20000))
    axes = draw(st.lists(st.integers(0, len(shape) - 1), unique=True, min_size=1))
    negative = draw(st.booleans())
    return tuple(shape), tuple(axis - len(shape) if negative else axis for axis in axes)


def log_sum_exp(x: Array, axis: Any, keepdims: bool) -> Array:
    result: Array = np.log(np.sum(np.exp(x), axis=axis, keepdims=keepdims))
    return result


def mean_or_zero(x: Array, axis: Any, keepdims: bool) -> Array:
    """Return the mean; 0 for an empty row, as in the CPU provider."""
    total = np.sum(x, axis=axis, keepdims=keepdims)
    result: Array = total / max(x.size // max(total.size, 1), 1)
    return result


REDUCTIONS: dict[str, Callable[..., Any]] = {
    "ReduceSum": np.sum,
    "ReduceMean": mean_or_zero,
    "ReduceMax": lambda x, axis, keepdims: np.max(x, axis=axis, keepdims=keepdims, initial=-np.inf),
    "ReduceMin": lambda x, axis, keepdims: np.min(x, axis=axis, keepdims=keepdims, initial=np.inf),
    "ReduceProd": np.prod,
    "ReduceL1": lambda x, axis, keepdims: np.sum(np.abs(x), axis=axis, keepdims=keepdims),
    "ReduceL2": lambda x, axis, keepdims: np.sqrt(np.sum(x * x, axis=axis, keepdims=keepdims)),
    "ReduceSumSquare": lambda x, axis, keepdims: np.sum(x * x, axis=axis, keepdims=keepdims),
    "ReduceLogSumExp": log_sum_exp,
}


@pytest.mark.parametrize("name", sorted(REDUCTIONS))
@given(case=with_axes(), keepdims=st.booleans(), dtype=st.sampled_from(FLOATS), dynamic=dynamic)
@each
@np.errstate(all="ignore")
def test_reductions_match_numpy_along_any_axes(
    name: str, case: tuple[tuple[int, ...], ...], keepdims: bool, dtype: str, dynamic: bool
) -> None:
    shape, axes = case
    x = (seeded(shape, dtype, 3) / 3).astype(dtype)
    (actual,) = run_op(name, [x, np.array(axes, np.int64)], {"keepdims": int(keepdims)}, constant=[1], dynamic=dynamic)
    expected = REDUCTIONS[name](widened(x), axis=axes, keepdims=keepdims)
    with np.errstate(all="ignore"):
        expected = np.asarray(expected).astype(dtype)
    assert actual.shape == expected.shape
    # Terms of opposite sign cancel, so the error is relative to the sum of magnitudes.
    magnitude = np.sum(np.abs(widened(x)), axis=axes, keepdims=keepdims) + 1
    eps = float(np.finfo(dtype).eps)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    np.testing.assert_array_equal(actual[~finite], expected[~finite])
    error = np.abs(widened(actual) - widened(expected))[finite]
    scale = np.maximum(np.broadcast_to(magnitude, expected.shape)[finite], np.abs(widened(expected)[finite]))
    assert np.all(error <= 64 * eps * scale)


@given(case=with_axes(), dtype=st.sampled_from(INTS), dynamic=dynamic)
@few
def test_integer_sums_are_exact(case: tuple[tuple[int, ...], ...], dtype: str, dynamic: bool) -> None:
    shape, axes = case
    x = seeded(shape, dtype, 4)
    (actual,) = run_op("ReduceSum", [x, np.array(axes, np.int64)], constant=[1], dynamic=dynamic)
    assert_close(actual, np.sum(x, axis=axes, keepdims=True, dtype=dtype))


@pytest.mark.parametrize("name", ["ArgMax", "ArgMin"])
@given(
    shape=st.lists(st.integers(1, 6) | st.sampled_from([40, 3000]), min_size=1, max_size=3).filter(
        lambda shape: math.prod(shape) <= 20000
    ),
    data=st.data(),
    last=st.booleans(),
    dynamic=dynamic,
)
@few
def test_the_index_of_an_extreme_is_the_first_or_last_one(
    name: str, shape: list[int], data: st.DataObject, last: bool, dynamic: bool
) -> None:
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    x = seeded(tuple(shape), "int32", 6).astype(data.draw(st.sampled_from(["float32", "int64"])))
    (actual,) = run_op(name, [x], {"axis": axis, "select_last_index": int(last), "keepdims": 0}, dynamic=dynamic)
    find = np.argmax if name == "ArgMax" else np.argmin
    expected = x.shape[axis] - 1 - find(np.flip(x, axis), axis=axis) if last else find(x, axis=axis)
    assert_close(actual, np.asarray(expected, np.int64))


@pytest.mark.parametrize("name", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize("axis", [0, 1])
def test_the_index_of_an_extreme_is_that_of_nan(name: str, axis: int) -> None:
    """ArgMax and ArgMin return the index of a NaN, as in NumPy. The CPU provider's result depends on the position."""
    x = seeded((70, 90), "float32", 3)
    x[np.random.default_rng(0).uniform(size=x.shape) < 0.02] = np.nan
    (actual,) = run_op(name, [x], {"axis": axis, "keepdims": 0})
    np.testing.assert_array_equal(actual, (np.argmax if name == "ArgMax" else np.argmin)(x, axis))
    (last,) = run_op(name, [x], {"axis": axis, "keepdims": 0, "select_last_index": 1})
    expected = x.shape[axis] - 1 - (np.argmax if name == "ArgMax" else np.argmin)(np.flip(x, axis), axis)
    np.testing.assert_array_equal(last, expected)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["ArgMax", "ArgMin"])
def test_the_index_of_an_extreme_needs_elements_only_where_there_is_a_result(name: str, dynamic: bool) -> None:
    (empty,) = run_op(name, [np.zeros((0, 0), np.float32)], {"axis": 0}, dynamic=dynamic)
    assert empty.shape == (1, 0)
    with pytest.raises(Exception, match="data must have elements along axis 0"):
        run_op(name, [np.zeros((0, 3), np.float32)], {"axis": 0}, dynamic=dynamic)


@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax"])
@given(case=with_axes(), dtype=st.sampled_from(FLOATS), opset=st.sampled_from([11, 13]), dynamic=dynamic)
@few
def test_softmax_of_both_definitions(
    name: str, case: tuple[tuple[int, ...], ...], dtype: str, opset: int, dynamic: bool
) -> None:
    shape, (axis, *_) = case
    x = seeded(shape, dtype, 9)
    (actual,) = run_op(name, [x], {"axis": axis}, opset, dynamic=dynamic)
    axes = tuple(range(axis % x.ndim, x.ndim)) if opset < 13 else axis
    assert actual.shape == x.shape
    if x.size:
        shifted = widened(x) - np.max(widened(x), axis=axes, keepdims=True)
        expected = shifted - np.log(np.sum(np.exp(shifted), axis=axes, keepdims=True))
        assert_close(actual, (np.exp(expected) if name == "Softmax" else expected).astype(dtype))


@pytest.mark.parametrize("columns", [7, 70_000], ids=["sum-in-range", "sum-beyond-float16"])
def test_softmax_of_float16_rounds_as_the_steps_that_define_it(columns: int) -> None:
    x = (seeded((3, columns), "float32", 5) if columns < 100 else np.zeros((2, columns))).astype(np.float16)
    (actual,) = run_op("Softmax", [x], {"axis": -1}, 13)
    e = np.exp(widened(x) - widened(x).max(-1, keepdims=True)).astype(np.float16).astype(np.float32)
    total = e.sum(-1, keepdims=True)
    if columns < 100:
        total = total.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(actual, (e / total).astype(np.float16))
    assert actual.all()


@given(
    rows=st.integers(0, 5),
    columns=st.integers(1, 6) | st.sampled_from([31, 384, 5000]),
    dtype=st.sampled_from(FLOATS),
    bias=st.booleans(),
    dynamic=dynamic,
)
@few
def test_layer_normalization_of_rows_far_from_zero(
    rows: int, columns: int, dtype: str, bias: bool, dynamic: bool
) -> None:
    x = seeded((2, rows, columns), dtype, 1) + np.array(50, dtype)
    scale, shift = seeded((columns,), dtype, 2), seeded((columns,), dtype, 3)
    actual = run_op(
        "LayerNormalization", [x, scale, *([shift] if bias else [])], {"epsilon": 1e-3}, outputs=3, dynamic=dynamic
    )
    mean = widened(x).mean(-1, keepdims=True)
    inverse = 1 / np.sqrt(widened(x).var(-1, keepdims=True) + 1e-3)
    expected = (widened(x) - mean) * inverse * scale + (shift if bias else 0)
    # The mean, near 50, is rounded to float32. ``inverse`` amplifies this error.
    tolerance = 16 * float(np.finfo(dtype).eps) * 4 + 50 * 2.0**-22 * float(inverse.max(initial=1))
    np.testing.assert_allclose(widened(actual[0]), expected, rtol=tolerance, atol=tolerance * 4)
    np.testing.assert_allclose(actual[1], mean, rtol=1e-6)
    np.testing.assert_allclose(actual[2], inverse, rtol=1e-4)


@given(
    shape=st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(1, 9), st.integers(1, 9)),
    dtype=st.sampled_from(FLOATS),
    constant=st.booleans(),
    dynamic=dynamic,
)
@few
def test_batch_and_instance_normalization(shape: tuple[int, ...], dtype: str, constant: bool, dynamic: bool) -> None:
    x = seeded(shape, dtype, 1)
    scale, bias, mean = (seeded(shape[1:2], dtype, i) for i in (2, 3, 4))
    variance = np.abs(seeded(shape[1:2], dtype, 5)) + np.array(0.5, dtype)
    weights = [1, 2, 3, 4] if constant else []
    (actual,) = run_op("BatchNormalization", [x, scale, bias, mean, variance], constant=weights, dynamic=dynamic)
    s, b, m, v = (widened(a)[:, None, None] for a in (scale, bias, mean, variance))
    expected = (widened(x) - m) / np.sqrt(v + 1e-5) * s + b
    tolerance = 64 * float(np.finfo(dtype).eps)
    np.testing.assert_allclose(widened(actual), expected, rtol=tolerance, atol=tolerance)
    (actual,) = run_op("InstanceNormalization", [x, scale, bias], constant=weights[:2], dynamic=dynamic)
    if x.size:
        m, v = widened(x).mean((2, 3), keepdims=True), widened(x).var((2, 3), keepdims=True)
        expected = (widened(x) - m) / np.sqrt(v + 1e-5) * s + b
        # A variance near epsilon amplifies the rounding error of the mean.
        np.testing.assert_allclose(widened(actual), expected, rtol=1e-2, atol=1e-2)


def test_the_reference_evaluator_agrees_on_a_cumulative_sum() -> None:
    x = seeded((3, 40, 2), "float32", 7)
    from kernel_harness import make_model

    for reverse in (0, 1):
        for exclusive in (0, 1):
            attributes = {"reverse": reverse, "exclusive": exclusive}
            model = make_model("CumSum", [x, np.array(1)], attributes, constant=[1])
            (expected,) = ReferenceEvaluator(model).run(None, {"x0": x})
            (actual,) = run_op("CumSum", [x, np.array(1)], attributes, constant=[1])
            np.testing.assert_allclose(actual, np.asarray(expected), rtol=1e-5, atol=1e-5)
