"""Kernel intrinsics and math functions on the emulated device, compared with NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kernel_launch import kernel, run
from ort_cuda_plugin.compiler.compile import KernelCompileError, compile_kernel, kernel_ir
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.targets import Target

sizes = {"f32": np.float32, "f64": np.float64, "i32": np.int32, "i64": np.int64, "u32": np.uint32, "u64": np.uint64}


def apply(expression: str, result: str, *operands: np.ndarray) -> np.ndarray:
    """Return ``expression`` for the elements ``a``, ``b``, ``c`` of the operands, as an array of type ``result``."""
    names = "abc"[: len(operands)]
    kinds = {np.dtype(np.float32): "f32", np.dtype(np.float64): "f64", np.dtype(np.uint16): "u16"}
    kinds |= {np.dtype(value): key for key, value in sizes.items()}
    loads = "".join(f"        {name} = p{name}[i]\n" for name in names)
    source = (
        f"def kernel({', '.join('p' + name for name in names)}, out, n):\n"
        f"    i = cuda.grid(1)\n    if i < n:\n{loads}        out[i] = {expression}\n"
    )
    spec = KernelSpec("apply", (*(f"*{kinds[x.dtype]}" for x in operands), f"*{result}", "i32"), source=source)
    dtype = {**sizes, "u16": np.uint16, "b1": np.uint8}[result]
    n = operands[0].size
    return run(spec, (-(-n // 256), 1, 1), (256, 1, 1), *operands, np.zeros(n, dtype), n)[-1]


# ---- quotients ----


@pytest.mark.parametrize("divisor", [3.0, 2**0.5, 1 - 2**-24, 2**-64, 1.7e19])
def test_quotients_by_a_known_number_are_rounded_ones(divisor: float) -> None:
    bits = np.random.default_rng(int(divisor)).integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 2**-100], np.float32)
    x, c = np.concatenate([bits.view(np.float32), special]), np.float32(divisor)
    with np.errstate(all="ignore"):
        expected = x / c
    quotients = apply("quotient_by_f32(a, b, float32(1) / b)", "f32", x, np.full_like(x, c))
    exact = ~(np.abs(x) < 2**-100)
    assert_same_floats(quotients[exact], expected[exact])
    np.testing.assert_array_max_ulp(quotients[~exact], expected[~exact], 1)
    assert_same_floats(quotients[x == 0], expected[x == 0])


# ---- storage types ----

all_halves = np.arange(65536, dtype=np.uint16)


def assert_same_floats(actual: np.ndarray, expected: np.ndarray) -> None:
    """Assert equality, where NaN equals NaN and -0 differs from 0."""
    np.testing.assert_array_equal(actual, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(actual[numbers]), np.signbit(expected[numbers]))


def test_every_float16_becomes_the_float32_of_its_value() -> None:
    assert_same_floats(apply("f16_to_f32(a)", "f32", all_halves), all_halves.view(np.float16).astype(np.float32))


def test_every_bfloat16_becomes_the_float32_of_its_value() -> None:
    expected = (all_halves.astype(np.uint32) << 16).view(np.float32)
    assert_same_floats(apply("bf16_to_f32(a)", "f32", all_halves), expected)


def rounding_cases(storage: Any) -> np.ndarray:
    """Return all finite values of a 16-bit type, the midpoints between neighbors, and float32 values next to those."""
    values = all_halves.view(storage).astype(np.float32)
    values = np.sort(values[np.isfinite(values)])
    middle = (values[:-1].astype(np.float64) + values[1:]) / 2
    middle = middle.astype(np.float32)
    around = [middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))]
    special = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 65519.9, 65520, -65520, 3.4e38, 3.39e38, 1e-45], np.float32)
    return np.concatenate([values, *around, special])


@pytest.mark.parametrize(("name", "storage"), [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_float32_is_rounded_to_nearest_even(name: str, storage: Any) -> None:
    x = rounding_cases(storage)
    with np.errstate(over="ignore"):
        expected = x.astype(storage).astype(np.float32)
    actual = apply(f"f32_to_{name}(a)", "u16", x).view(storage).astype(np.float32)
    assert_same_floats(actual, expected)


@pytest.mark.parametrize("storage", [np.float16, ml_dtypes.bfloat16])
def test_erf_of_halves_is_one_unit_off_at_most(storage: Any) -> None:
    x = all_halves.view(storage).astype(np.float32)
    with np.errstate(invalid="ignore"):
        actual = apply("half_erf(a)", "f32", x).astype(storage)
        expected = np.array([math.erf(value) for value in x.tolist()]).astype(np.float32).astype(storage)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(x))
    numbers = ~np.isnan(x)
    np.testing.assert_array_equal(np.signbit(actual[numbers]), np.signbit(x[numbers]))
    off = np.abs(actual.view(np.int16)[numbers].astype(int) - expected.view(np.int16)[numbers])
    assert off.max() <= 1
    assert np.mean(off) < 0.02


@pytest.mark.parametrize("storage", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    ("text", "function"),
    [("half_exp(a)", np.exp), ("half_exp2(a)", np.exp2), ("half_reciprocal(a)", np.reciprocal)],
)
def test_functions_of_halves_are_the_rounded_ones(storage: Any, text: str, function: Any) -> None:
    x = all_halves.view(storage).astype(np.float32)
    with np.errstate(all="ignore"):
        actual = apply(text, "f32", x).astype(storage).astype(np.float32)
        expected = function(x.astype(np.float64)).astype(np.float32).astype(storage).astype(np.float32)
        np.testing.assert_allclose(actual, expected, 2.0 ** (-7 if storage is ml_dtypes.bfloat16 else -10), 6e-8)


@given(arrays(np.float32, 50, elements=st.floats(width=32)))
@settings(max_examples=20)
def test_bit_casts_keep_the_bits(x: np.ndarray) -> None:
    np.testing.assert_array_equal(apply("f32_as_i32(a)", "i32", x), x.view(np.int32))
    np.testing.assert_array_equal(apply("u32_as_f32(a)", "f32", x.view(np.uint32)).view(np.uint32), x.view(np.uint32))
    y = x.astype(np.float64)
    np.testing.assert_array_equal(apply("f64_as_u64(a)", "u64", y), y.view(np.uint64))
    np.testing.assert_array_equal(apply("i64_as_f64(a)", "f64", y.view(np.int64)).view(np.int64), y.view(np.int64))


# ---- math: (Python expression of a, reference in float64, error in units in the last place, sampled range) ----

unary: list[tuple[str, Callable[[np.ndarray], np.ndarray], float, float]] = [
    ("math.exp(a)", np.exp, 2, 120),
    ("math.log(a)", np.log, 2, 1e6),
    ("math.log2(a)", np.log2, 2, 1e6),
    ("math.log10(a)", np.log10, 2, 1e6),
    ("math.log1p(a)", np.log1p, 2, 1e3),
    ("math.expm1(a)", np.expm1, 2, 100),
    ("math.exp2(a)", np.exp2, 2, 150),
    ("math.erf(a)", np.vectorize(math.erf), 2, 6),
    ("math.erfc(a)", np.vectorize(math.erfc), 4, 12),
    ("math.tanh(a)", np.tanh, 2, 12),
    ("math.sin(a)", np.sin, 2, 1e4),
    ("math.cos(a)", np.cos, 2, 1e4),
    ("math.tan(a)", np.tan, 4, 1e4),
    ("math.asin(a)", np.arcsin, 2, 1.2),
    ("math.acos(a)", np.arccos, 2, 1.2),
    ("math.atan(a)", np.arctan, 2, 1e3),
    ("math.sinh(a)", np.sinh, 3, 100),
    ("math.cosh(a)", np.cosh, 3, 100),
    ("math.asinh(a)", np.arcsinh, 3, 1e3),
    ("math.acosh(a)", np.arccosh, 3, 1e3),
    ("math.atanh(a)", np.arctanh, 3, 1.2),
    ("math.sqrt(a)", np.sqrt, 0.5, 1e30),
    ("rsqrt({}(a))", lambda x: 1 / np.sqrt(x), 2, 1e30),
    ("cbrt({}(a))", np.cbrt, 2, 1e30),
    ("math.floor(a)", np.floor, 0, 1e6),
    ("math.ceil(a)", np.ceil, 0, 1e6),
    ("math.trunc(a)", np.trunc, 0, 1e6),
    ("rint({}(a))", np.rint, 0, 1e3),
    ("abs(a)", np.abs, 0, 1e6),
]
specials = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -0.5,
    1.5,
    2.5,
    -2.5,
    np.inf,
    -np.inf,
    np.nan,
    1e-40,
    -1e-40,
    1e-30,
    88.8,
    -103.0,
]


def sample(dtype: Any, limit: float) -> np.ndarray:
    generator = np.random.default_rng(7)
    parts = [
        np.array(specials),
        generator.uniform(-limit, limit, 3000),
        generator.uniform(-1, 1, 2000),
        np.exp(generator.uniform(-60, math.log(limit), 1000)),
    ]
    return np.concatenate(parts).astype(dtype)


def assert_close_in_ulp(actual: np.ndarray, exact: np.ndarray, ulp: float) -> None:
    """Assert that ``actual`` is within ``ulp`` units in the last place of ``exact`` (float64 or wider).

    Infinities and NaN have the same indices in both.
    """
    with np.errstate(over="ignore"):
        expected = exact.astype(actual.dtype)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    # Where the exact result rounds to infinity, the largest finite number is allowed, and the reverse.
    finite = np.isfinite(actual) & np.isfinite(expected)
    np.testing.assert_array_equal(actual[~finite], expected[~finite])
    unit = np.spacing(np.abs(expected[finite])).astype(exact.dtype)
    error = np.abs(actual[finite].astype(exact.dtype) - exact[finite]) / unit
    worst = int(error.argmax())
    assert error[worst] <= max(ulp, 0.5), f"{error[worst]} ulp: {actual[finite][worst]!r} for {exact[finite][worst]!r}"


@pytest.mark.parametrize("name", ["f32", "f64"])
@pytest.mark.parametrize(("expression", "reference", "ulp", "limit"), unary, ids=[case[0] for case in unary])
def test_functions_of_one_number(
    expression: str, reference: Callable[[np.ndarray], np.ndarray], ulp: float, limit: float, name: str
) -> None:
    if "{}" in expression:
        expression = expression.replace("(", f"_{name}(", 1).replace("{}", {"f32": "float32", "f64": "float64"}[name])
    x = sample(sizes[name], limit)
    actual = apply(expression, name, x)
    wide = x.astype(np.float64)
    with np.errstate(all="ignore"):
        exact = np.asarray(reference(wide), np.float64)
    # For float64 the reference itself has a rounding error.
    assert_close_in_ulp(actual, exact, ulp if name == "f32" else ulp + 1)


binary: list[tuple[str, Callable[..., np.ndarray], float]] = [
    ("math.pow(a, b)", np.power, 4),
    ("math.atan2(a, b)", np.arctan2, 3),
    ("math.fmod(a, b)", np.fmod, 0),
    ("math.hypot(a, b)", np.hypot, 2),
    ("math.copysign(a, b)", np.copysign, 0),
    ("min(a, b)", np.fmin, 0),
    ("max(a, b)", np.fmax, 0),
    ("fmin_{0}(a, b)", np.fmin, 0),
    ("fmax_{0}(a, b)", np.fmax, 0),
    ("a / b", np.divide, 0.5),
]


@pytest.mark.parametrize("name", ["f32", "f64"])
@pytest.mark.parametrize(("expression", "reference", "ulp"), binary, ids=[case[0] for case in binary])
def test_functions_of_two_numbers(expression: str, reference: Callable[..., np.ndarray], ulp: float, name: str) -> None:
    generator = np.random.default_rng(3)
    a, b = (grid.ravel() for grid in np.meshgrid(specials, specials))
    a = np.concatenate([a, generator.uniform(-20, 20, 3000)]).astype(sizes[name])
    b = np.concatenate([b, generator.uniform(-20, 20, 3000)]).astype(sizes[name])
    actual = apply(expression.format(name), name, a, b)
    with np.errstate(all="ignore"):
        exact = reference(a.astype(np.float64), b.astype(np.float64))
    assert_close_in_ulp(actual, exact, ulp if name == "f32" else ulp + 1)


@pytest.mark.parametrize("name", ["f32", "f64"])
@pytest.mark.parametrize("function", ["isnan", "isinf", "isfinite"])
def test_classification(function: str, name: str) -> None:
    x = sample(sizes[name], 1e30)
    actual = apply(f"math.{function}(a)", "b1", x)
    np.testing.assert_array_equal(actual.astype(bool), getattr(np, function)(x))


@pytest.mark.parametrize("name", ["f32", "f64"])
def test_integer_powers_and_scaling(name: str) -> None:
    x = np.linspace(-5, 5, 101).astype(sizes[name])
    n = (np.arange(101) % 9 - 4).astype(np.int32)
    exact = np.power(x.astype(np.float64), n.astype(np.float64))
    assert_close_in_ulp(apply("math.pow(a, b)", name, x, n), exact, 2)
    np.testing.assert_array_equal(apply("math.ldexp(a, b)", name, x, n), np.ldexp(x, n))


def test_fma_rounds_once() -> None:
    x = np.float32(1) + np.arange(64, dtype=np.float32) * np.float32(2**-12)
    actual = apply("fma_f32(a, a, b)", "f32", x, -(x * x))
    np.testing.assert_array_equal(actual, (x.astype(np.float64) ** 2 - x * x).astype(np.float32))


def test_round_is_to_even() -> None:
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 2.4999, 1e9], np.float32)
    np.testing.assert_array_equal(apply("round(a)", "i64", x), np.rint(x).astype(np.int64))


# ---- integers ----

integers = {
    "i32": st.integers(-(2**31), 2**31 - 1),
    "i64": st.integers(-(2**63), 2**63 - 1),
    "u32": st.integers(0, 2**32 - 1),
    "u64": st.integers(0, 2**64 - 1),
}


@pytest.mark.parametrize("name", list(integers))
@given(data=st.data())
@settings(max_examples=20)
def test_integers_wrap_and_shift_as_numpy(name: str, data: st.DataObject) -> None:
    a = data.draw(arrays(sizes[name], 20, elements=integers[name]))
    b = data.draw(arrays(sizes[name], 20, elements=integers[name]))
    with np.errstate(over="ignore"):
        for symbol, operation in (("+", np.add), ("-", np.subtract), ("*", np.multiply), ("&", np.bitwise_and)):
            np.testing.assert_array_equal(apply(f"a {symbol} b", name, a, b), operation(a, b))
        np.testing.assert_array_equal(apply("a >> 3", name, a), a >> sizes[name](3))


@pytest.mark.parametrize("name", list(integers))
@given(data=st.data())
@settings(max_examples=20)
def test_truncating_division_rounds_toward_zero(name: str, data: st.DataObject) -> None:
    a = data.draw(arrays(sizes[name], 20, elements=integers[name]))
    b = data.draw(arrays(sizes[name], 20, elements=st.one_of(st.sampled_from([0, 1, 2]), integers[name])))
    bits = int(name[1:])

    def wrapped(value: int) -> int:
        value %= 2**bits
        return value - 2**bits if name[0] == "i" and value >= 2 ** (bits - 1) else value

    def quotient(x: int, y: int) -> int:
        return 0 if y == 0 else wrapped(abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1))

    expected = [quotient(int(x), int(y)) for x, y in zip(a, b, strict=True)]
    np.testing.assert_array_equal(apply(f"truncdiv_{name}(a, b)", name, a, b), np.array(expected, sizes[name]))
    rest = [0 if y == 0 else wrapped(int(x) - q * int(y)) for x, y, q in zip(a, b, expected, strict=True)]
    np.testing.assert_array_equal(apply(f"truncmod_{name}(a, b)", name, a, b), np.array(rest, sizes[name]))


@given(
    a=arrays(np.int32, 20, elements=st.one_of(st.integers(0, 2**31 - 2), st.just(2**31 - 2))),
    d=arrays(np.int32, 20, elements=st.one_of(st.integers(1, 9), st.integers(1, 2**31 - 1))),
)
@settings(max_examples=50)
def test_a_quotient_by_reciprocal_is_exact(a: np.ndarray, d: np.ndarray) -> None:
    reciprocal = (2**63 - 1) // d.astype(np.int64)
    np.testing.assert_array_equal(apply("quotient_i32(a, b)", "i32", a, reciprocal), a // d)


@pytest.mark.parametrize("bits", [2, 4])
def test_codes_of_bytes_have_the_lowest_bits_first(bits: int) -> None:
    places = np.arange(40, dtype=np.int32)
    values = np.random.default_rng(0).integers(0, 256, 40).astype(np.int32)
    expected = values >> (places % (8 // bits) * bits) & ((1 << bits) - 1)
    np.testing.assert_array_equal(apply(f"code{bits}(uint8(a), int64(b))", "i32", values, places), expected)


@given(arrays(np.uint32, 30, elements=integers["u32"]))
@settings(max_examples=20)
def test_bit_counting(x: np.ndarray) -> None:
    bits = [f"{int(value):032b}" for value in x]
    np.testing.assert_array_equal(apply("cuda.popc(a)", "i32", x), [b.count("1") for b in bits])
    np.testing.assert_array_equal(apply("cuda.clz(a)", "i32", x), [len(b) - len(b.lstrip("0")) for b in bits])
    np.testing.assert_array_equal(apply("cuda.brev(a)", "u32", x), [int(b[::-1], 2) for b in bits])
    np.testing.assert_array_equal(apply("cuda.ffs(a)", "i32", x), [b[::-1].find("1") + 1 for b in bits])


# ---- atomics ----

atomic_types = ["i32", "u32", "i64", "u64", "f32", "f64"]


@pytest.mark.parametrize("name", atomic_types)
@pytest.mark.parametrize(("function", "reduce"), [("add", np.sum), ("min", np.min), ("max", np.max)])
def test_atomics_combine_all_threads_of_all_blocks(name: str, function: str, reduce: Callable[..., Any]) -> None:
    spec = kernel(
        f"atomic_{function}",
        (f"*{name}", f"*{name}"),
        f"def kernel(x, out):\n    i = cuda.grid(1)\n    atomic_{function}_{name}(out, i % 3, x[i])\n",
    )
    low = -50 if name[0] != "u" else 1
    x = np.random.default_rng(5).integers(low, 1000, 960).astype(sizes[name])
    start = np.array(7, sizes[name])
    _, out = run(spec, (15, 1, 1), (64, 1, 1), x, np.full(3, start))
    for lane in range(3):
        assert out[lane] == reduce(np.append(x[lane::3], start))


@pytest.mark.parametrize("name", ["i32", "u32", "i64", "u64"])
@pytest.mark.parametrize(
    ("function", "reduce"), [("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)]
)
def test_bitwise_atomics(name: str, function: str, reduce: Any) -> None:
    spec = kernel(
        f"atomic_{function}",
        (f"*{name}", f"*{name}"),
        f"def kernel(x, out):\n    atomic_{function}_{name}(out, 0, x[cuda.grid(1)])\n",
    )
    x = np.random.default_rng(5).integers(0, 2**31, 128).astype(sizes[name])
    _, out = run(spec, (2, 1, 1), (64, 1, 1), x, np.full(1, 12345, sizes[name]))
    assert out[0] == reduce.reduce(np.append(x, np.array(12345, sizes[name])))


@pytest.mark.parametrize("name", ["i32", "i64"])
def test_compare_and_swap_and_exchange_return_the_old_value(name: str) -> None:
    spec = kernel(
        "swap",
        (f"*{name}", f"*{name}"),
        f"""
def kernel(x, old):
    old[0] = atomic_cas_{name}(x, 0, 5, 6)
    old[1] = atomic_cas_{name}(x, 1, 5, 6)
    old[2] = atomic_exch_{name}(x, 2, 9)
    old[3] = atomic_add_{name}(x, 3, 4)
""",
    )
    x, old = run(spec, (1, 1, 1), (1, 1, 1), np.array([5, 7, 8, 3], sizes[name]), np.zeros(4, sizes[name]))
    np.testing.assert_array_equal(x, [6, 7, 9, 7])
    np.testing.assert_array_equal(old, [5, 7, 8, 3])


def test_numba_atomics_on_shared_arrays() -> None:
    spec = kernel(
        "histogram",
        ("*i32", "*f32", "*i32"),
        """
def kernel(x, sums, counts):
    s = cuda.shared.array(4, float32)
    c = cuda.shared.array(4, int32)
    t = cuda.threadIdx.x
    if t < 4:
        s[t] = float32(0)
        c[t] = 0
    cuda.syncthreads()
    cuda.atomic.add(s, x[t], float32(1.5))
    cuda.atomic.max(c, x[t], int32(t))
    cuda.syncthreads()
    if t < 4:
        sums[t] = s[t]
        counts[t] = c[t]
""",
    )
    x = np.random.default_rng(1).integers(0, 4, 96).astype(np.int32)
    _, sums, counts = run(spec, (1, 1, 1), (96, 1, 1), x, np.zeros(4, np.float32), np.zeros(4, np.int32))
    np.testing.assert_array_equal(sums, 1.5 * np.bincount(x, minlength=4))
    np.testing.assert_array_equal(counts, [np.flatnonzero(x == value).max() for value in range(4)])


# ---- warps ----


@pytest.mark.parametrize("name", atomic_types)
def test_shuffles_move_values_between_lanes(name: str) -> None:
    spec = kernel(
        "shuffles",
        (f"*{name}", f"*{name}"),
        f"""
def kernel(x, out):
    t = int32(cuda.threadIdx.x)
    v = x[t]
    out[t * 4] = shfl_{name}(v, (t + 5) % 32)
    out[t * 4 + 1] = shfl_up_{name}(v, 3)
    out[t * 4 + 2] = shfl_down_{name}(v, 3)
    out[t * 4 + 3] = shfl_xor_{name}(v, 9)
""",
    )
    x = (np.arange(64) * (2**34 + 3 if name.endswith("64") else 3) + 1).astype(sizes[name])
    _, out = run(spec, (1, 1, 1), (64, 1, 1), x, np.zeros(256, sizes[name]))
    lane, warp = np.arange(64) % 32, np.arange(64) // 32 * 32
    np.testing.assert_array_equal(out[0::4], x[warp + (np.arange(64) + 5) % 32])
    np.testing.assert_array_equal(out[1::4], x[warp + np.where(lane < 3, lane, lane - 3)])
    np.testing.assert_array_equal(out[2::4], x[warp + np.where(lane > 28, lane, lane + 3)])
    np.testing.assert_array_equal(out[3::4], x[warp + (lane ^ 9)])


def test_votes_see_all_lanes_of_their_warp() -> None:
    spec = kernel(
        "votes",
        ("*i32", "*i32", "*u32"),
        """
def kernel(x, votes, ballots):
    t = cuda.threadIdx.x
    p = x[t] != 0
    votes[t] = int32(vote_all(p)) + 2 * int32(vote_any(p))
    ballots[t] = ballot(p)
""",
    )
    x = np.zeros(96, np.int32)
    x[:32], x[37], x[40] = 1, 1, 1
    _, votes, ballots = run(spec, (1, 1, 1), (96, 1, 1), x, np.zeros(96, np.int32), np.zeros(96, np.uint32))
    np.testing.assert_array_equal(votes.reshape(3, 32), [[3] * 32, [2] * 32, [0] * 32])
    np.testing.assert_array_equal(ballots.reshape(3, 32)[:, 0], [2**32 - 1, 2**5 + 2**8, 0])


# ---- vectors ----

vectors = [("f32", 4), ("f32", 2), ("i32", 4), ("u32", 4), ("f64", 2), ("i64", 2)]


@pytest.mark.parametrize(("name", "lanes"), vectors)
def test_vectors_are_loaded_and_stored_in_order(name: str, lanes: int) -> None:
    names = [f"v{lane}" for lane in range(lanes)]
    loaded, stored = ", ".join(names), ", ".join(reversed(names))
    spec = kernel(
        "vectors",
        (f"*{name}", f"*{name}"),
        f"def kernel(x, y):\n    i = cuda.grid(1) * {lanes}\n    {loaded} = load_{name}x{lanes}(x, i)\n"
        f"    store_{name}x{lanes}(y, i, {stored})\n",
    )
    x = np.arange(32 * lanes).astype(sizes[name])
    _, y = run(spec, (1, 1, 1), (32, 1, 1), x, np.zeros_like(x))
    np.testing.assert_array_equal(y.reshape(-1, lanes), x.reshape(-1, lanes)[:, ::-1])


@pytest.mark.parametrize("name", atomic_types)
@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (4, 2), (1, 3), (16, 16), (2, 16)])
def test_register_tiles_add_up_outer_products(name: str, rows: int, columns: int) -> None:
    spec = kernel(
        "tile",
        (f"*{name}", f"*{name}", f"*{name}", "i32"),
        f"""
def kernel(a, b, out, k):
    shared = array_pointer(cuda.shared.array({rows * columns}, {np.dtype(sizes[name])}))
    sums = registers_{name}({rows * columns})
    for i in range(k):
        multiply_add_tile_{name}(sums, a, i * {rows}, b, i * {columns}, {rows}, {columns})
    store_tile_{name}(shared, 0, {columns}, sums, {rows}, {columns})
    for i in range({rows * columns}):
        out[i] = shared[i]
""",
    )
    generator = np.random.default_rng(2)
    low = -9 if name[0] != "u" else 0
    a = generator.integers(low, 9, (7, rows)).astype(sizes[name])
    b = generator.integers(low, 9, (7, columns)).astype(sizes[name])
    out = run(spec, (1, 1, 1), (1, 1, 1), a, b, np.ones((rows, columns), sizes[name]), 7)[-1]
    np.testing.assert_array_equal(out, a.T @ b)


def test_a_row_of_a_wide_register_tile_is_one_vector() -> None:
    """As 256 scalars it would take most of a kernel's compile time for the emulated device."""
    source = "def kernel(a, b):\n    sums = registers_f32({0} * {0})\n"
    source += "    multiply_add_tile_f32(sums, a, 0, b, 0, {0}, {0})\n    store_tile_f32(a, 0, {0}, sums, {0}, {0})\n"
    texts = ["".join(kernel_ir(kernel("tile", ("*f32", "*f32"), source.format(size))).modules) for size in (8, 16)]
    assert "x float>" not in texts[0]
    assert texts[1].count('@"llvm.fma.v16f32"(') == 16 + 1  # the calls, and the declaration
    assert "llvm.fma.f32" not in texts[1]


@pytest.mark.parametrize("name", atomic_types)
@pytest.mark.parametrize("stride", [1, 3])
def test_a_chunk_is_copied_to_elements_at_a_stride(name: str, stride: int) -> None:
    lines = ["def kernel(x, out):", f"    copy_chunk_{name}(out, 2, {stride}, x, 1, 16)"]
    x = np.arange(20).astype(sizes[name])
    out = run(
        kernel("chunk", (f"*{name}", f"*{name}"), "\n".join(lines) + "\n"),
        (1, 1, 1),
        (1, 1, 1),
        x,
        np.zeros(50, x.dtype),
    )[-1]
    expected = np.zeros_like(out)
    expected[2 : 2 + 16 * stride : stride] = x[1:17]
    np.testing.assert_array_equal(out, expected)


def test_sizes_of_register_tiles_must_be_literal() -> None:
    spec = kernel("tile", ("*f32", "i32"), "def kernel(x, n):\n    x[0] = registers_f32(n)[0]\n")
    with pytest.raises(KernelCompileError, match="literal integers"):
        compile_kernel(spec, Target.emulated())


def test_a_vector_load_is_one_instruction_on_a_gpu() -> None:
    source = "def kernel(x, y):\n    a, b, c, d = load_f32x4(x, 4 * cuda.grid(1))\n    y[0] = a + b + c + d\n"
    ptx = compile_kernel(kernel("load", ("*f32", "*f32"), source), Target.cuda(9, 0)).ptx
    assert b"ld.global.v4.f32" in ptx or b"ld.global.v4.b32" in ptx or b"ld.global.nc.v4" in ptx


@pytest.mark.parametrize("compute_capability", [(8, 0), (12, 0)])
def test_every_intrinsic_compiles_for_gpus(compute_capability: tuple[int, int]) -> None:
    from ort_cuda_plugin.compiler import intrinsics

    lines = ["def kernel(pf32, pf64, pi32, pi64, pu32, pu64, pu16, pu8):"]
    for name in intrinsics.__all__:
        sig = getattr(intrinsics, name)._defn.__globals__.get("sig")
        if sig is None:  # generic in its argument types; tested with the kernels that call it
            continue
        arguments = []
        for ty in sig.args:
            text = str(ty)
            pointer = text.endswith("*")
            base = text.rstrip("*")
            short = base.replace("uint", "u").replace("int", "i").replace("float", "f")
            arguments.append(f"p{short}" if pointer else "pi32[0] > 3" if base == "bool" else f"{base}(p{short}[0])")
        lines.append(f"    {name}({', '.join(arguments)})")
    signature = ("*f32", "*f64", "*i32", "*i64", "*u32", "*u64", "*u16", "*u8")
    spec = kernel("everything", signature, "\n".join(lines) + "\n")
    assert compile_kernel(spec, Target.cuda(*compute_capability)).data
    assert compile_kernel(spec, Target.emulated()).data
