"""Random number operators and Dropout; `RandomRun` defines the meaning of ``seed``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ....kernels.codegen.source import constant_number
from ....kernels.elementwise.index_map import IndexMap, gather_map
from ....kernels.elementwise.random import Bits, RandomRun, normal, uniform
from ....kernels.scan_sort.scan import scan
from ....model.ir import FLOATS_8, DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import Dim, ceildiv, product
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise, full
from ....program.lowering.reduce import row_map
from ....program.lowering.views import reshape
from ....program.steps.row_program import MAX, SUM, Row, Values
from ... import requirements as require
from ...folds import in_order
from ...outputs import is_used
from ...registry import (
    ALL_TENSORS,
    ARITHMETIC,
    BOOL,
    FLOATS,
    INDICES,
    NO_BFLOAT16,
    T1,
    T2,
    T,
    contrib_op,
    op,
    with_numbers,
)
from .elementwise import sum_like_first

Distribution = Callable[[Bits, DType], Scalar]
"""Maps random bits to a draw in the given element type."""

_DIGITS = {DType.FLOAT16: (11, -24), DType.BFLOAT16: (8, -133), DType.FLOAT32: (24, -149)}
"""Bits of a type's significand, and the exponent of its smallest positive value."""


def _draw(ctx: Lowering, shape: Sequence[Dim], dtype: DType, seed: float | None, distribution: Distribution) -> Tensor:
    """Return a tensor of independent draws from ``distribution``."""
    require.that(dtype in FLOATS, "dtype", "be a floating-point type", dtype.name)
    require.that(
        min((n for n in shape if isinstance(n, int)), default=0) >= 0, "shape", "have no negative size", tuple(shape)
    )
    random = RandomRun(ctx, seed)

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        return distribution(random.bits(maps, c[0]), dtype)

    return reshape(ctx, gather_map(ctx, (product(shape),), dtype, element), shape)


def _normal(mean: float, scale: float) -> Distribution:
    return lambda bits, dtype: s.cast(normal(bits, s.accumulation_type(dtype)) * scale + mean, dtype)


def _uniform(low: float, high: float) -> Distribution:
    require.that(
        -math.inf < low <= high < math.inf, "low and high", "be finite, with low at most high", f"{low} and {high}"
    )

    def between(bits: Bits, dtype: DType) -> Scalar:
        u = uniform(bits, s.accumulation_type(dtype))
        value = s.cast((1.0 - u) * low + u * high, dtype)
        # Rounding may have reached the upper limit, which is exclusive.
        return s.maximum(s.minimum(value, _largest_below(high, dtype)), low)

    return between


def _largest_below(x: float, dtype: DType) -> float:
    """Return the largest value of a float type that is less than x."""
    if dtype is DType.FLOAT64:
        return math.nextafter(x, -math.inf)
    digits, least = _DIGITS[dtype]
    fraction, exponent = math.frexp(x)
    spacing = 2.0 ** (max(exponent - digits - (fraction == 0.5), least) if x else least)
    return (math.ceil(x / spacing) - 1) * spacing


def _random(name: str, distribution: Callable[..., Distribution], **defaults: float) -> None:
    """Register operator ``name``, which has a shape attribute, and ``name``Like, which uses its input's shape.

    Both operators have the distribution's parameters as attributes, with these ``defaults``.
    """

    def by_shape(ctx: Lowering, shape: tuple[int, ...], dtype: int = 1, **given: Any) -> Tensor:
        seed = given.pop("seed", None)
        return _draw(ctx, shape, DType.of_attribute(dtype), seed, distribution(**(defaults | given)))

    def like(ctx: Lowering, x: T1, dtype: int | None = None, **given: Any) -> Tensor:
        seed = given.pop("seed", None)
        result = x.dtype if dtype is None else DType.of_attribute(dtype)
        return _draw(ctx, x.shape, result, seed, distribution(**(defaults | given)))

    with_seed: dict[str, float | None] = {**defaults, "seed": None}
    op(name, since=1)(with_numbers(by_shape, with_seed, inputs=1))
    op(f"{name}Like", since=1, types={"T1": ALL_TENSORS})(with_numbers(like, with_seed, inputs=2))


_random("RandomNormal", _normal, mean=0.0, scale=1.0)
_random("RandomUniform", _uniform, low=0.0, high=1.0)


@op("Bernoulli", since=15, types={"T1": FLOATS})
def bernoulli(ctx: Lowering, x: T1, *, dtype: int | None = None, seed: float | None = None) -> Tensor:
    """Draw from Bernoulli distributions; probabilities of float32 and 16-bit types have a resolution of 2**-24."""
    result = x.dtype if dtype is None else DType.of_attribute(dtype)
    require.that(result in ARITHMETIC | BOOL, "dtype", "be an arithmetic type or bool", result.name)
    probabilities = reshape(ctx, x, (x.size,))
    random = RandomRun(ctx, seed)

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        real = s.accumulation_type(x.dtype)
        return s.cast(uniform(random.bits(maps, c[0]), real) < s.cast(maps.source(probabilities).at(c), real), result)

    return reshape(ctx, gather_map(ctx, (x.size,), result, element), x.shape)


def _upper_bound(maps: IndexMap, sorted_rows: Tensor, row: Scalar, limit: Scalar) -> Scalar:
    """Return the number (int64) of elements of an ascending row that are at most ``limit``."""
    source = maps.source(sorted_rows)
    count = source.dim(1)

    def halve(bounds: Values, _: Values) -> Values:
        low, high = bounds
        middle = (low + high) >> 1
        goes_right = source.at([row, middle], low < high, math.inf) <= limit
        return s.where(goes_right, middle + 1, low), s.where(goes_right, high, s.minimum(middle, high))

    search = in_order((s.constant(0, DType.INT64), count), halve)
    # Add 0.5 to avoid powers of two: a GPU's log2 of a power of two may be just below the exact result.
    steps = s.cast(s.floor(s.unary_float("log2", s.cast(count, DType.FLOAT64) + 0.5)), DType.INT64) + 1
    return maps.fold(search, steps, lambda i: (i,))[0]


@op("Multinomial", since=7, types={"T1": FLOATS})
def multinomial(ctx: Lowering, x: T1, *, dtype: int = 6, sample_size: int = 1, seed: float | None = None) -> Tensor:
    """Draw [batch, sample_size] classes; ``x`` [batch, classes] are unnormalized log probabilities.

    As in ONNX Runtime, a class with an infinite or NaN logarithm is not drawn. A row without other classes yields the
    last class.
    """
    result = DType.of_attribute(dtype)
    require.that(result in INDICES, "dtype", "be int32 or int64", result.name)
    require.rank(2, input=x)
    require.least(1, sample_size=sample_size)
    random = RandomRun(ctx, seed)

    def draw(maps: IndexMap, row: Scalar, number: Scalar) -> Scalar:
        return uniform(random.bits(maps, row * sample_size + number), DType.FLOAT64)

    return drawn_classes(ctx, x, sample_size, result, draw)


def drawn_classes(
    ctx: Lowering, x: Tensor, count: int, dtype: DType, draw: Callable[[IndexMap, Scalar, Scalar], Scalar]
) -> Tensor:
    """Draw [batch, count] classes; ``x`` [batch, classes] are logarithms of weights.

    ``draw(maps, row, number)`` returns a random float64 in [0, 1).
    """
    batch, classes = x.shape
    require.least_dim(ctx, 1, **{"the number of classes": classes})

    def weights(row: Row, value: Scalar) -> tuple[list[Scalar], list[Scalar]]:
        logarithm = s.cast(value, DType.FLOAT64)
        is_finite = s.absolute(logarithm) < math.inf
        largest = row.reduce(MAX, s.where(is_finite, logarithm, -math.inf))
        return [s.where(is_finite, s.exp(logarithm - largest), 0.0)], []

    (weight,) = row_map(ctx, weights, [1], x)
    sums = scan(ctx, SUM, weight, 1, exclusive=False, reverse=False)

    def sample(maps: IndexMap, c: list[Scalar]) -> Scalar:
        row = c[0]
        total = maps.source(sums).at([row, maps.dim(classes) - 1])
        found = _upper_bound(maps, sums, row, draw(maps, row, c[1]) * total)
        # In a row without a class that can be drawn, the search ends behind the last class.
        return s.cast(s.minimum(found, maps.dim(classes) - 1), dtype)

    return gather_map(ctx, (batch, count), dtype, sample)


@op("Dropout", since=1, until=6, types={"T": NO_BFLOAT16})
def dropout_1(ctx: Lowering, data: Tensor, *, is_test: int = 0, ratio: float = 0.5) -> tuple[Tensor, ...]:
    if is_test:
        return _kept(ctx, data, data.dtype, 1)
    return _dropped(ctx, data, ctx.constant(np.array(ratio, np.float32)), None, None, data.dtype)


@op("Dropout", since=7, types={"T": FLOATS})
def dropout_7(ctx: Lowering, data: Tensor, *, ratio: float = 0.5) -> tuple[Tensor, ...]:
    # Before opset 12 the mask of inference is undefined; ONNX Runtime fills it with zeros.
    return _kept(ctx, data, data.dtype, 0)


@op("Dropout", since=10, types={"T": FLOATS})
def dropout_10(ctx: Lowering, data: Tensor, *, ratio: float = 0.5) -> tuple[Tensor, ...]:
    return _kept(ctx, data, DType.BOOL, False)


@op("Dropout", since=12, types={"T": FLOATS | FLOATS_8, "T1": FLOATS | FLOATS_8, "T2": BOOL})
def dropout_12(
    ctx: Lowering, data: T, ratio: T1 | None = None, training_mode: T2 | None = None, *, seed: int | None = None
) -> tuple[Tensor, ...]:
    """Drop elements. A ratio that is computed during the Run is not checked; a negative one drops nothing."""
    if training_mode is None or constant_number(training_mode) is False:
        return _kept(ctx, data, DType.BOOL, True)
    if ratio is None:
        ratio = ctx.constant(np.array(0.5, np.float32))
    known = constant_number(ratio)
    require.that(known is None or 0 <= known <= 1, "ratio", "be in [0, 1]", known)
    return _dropped(ctx, data, ratio, training_mode, seed, DType.BOOL)


def _kept(ctx: Lowering, data: Tensor, mask_dtype: DType, mask: float) -> tuple[Tensor, ...]:
    """Return data and, if the node uses this output, a constant mask: inference keeps every element."""
    return (data, full(ctx, data.shape, mask, mask_dtype)) if is_used(ctx, 1) else (data,)


def _dropped(
    ctx: Lowering, data: Tensor, ratio: Tensor, training_mode: Tensor | None, seed: int | None, mask_dtype: DType
) -> tuple[Tensor, ...]:
    """Return data with dropped elements, and the mask if used; the device reads ``training_mode`` and ``ratio``."""
    for x in (ratio, training_mode):
        found = x and f"the shape {list(x.shape)}"
        require.that(x is None or x.size == 1, "ratio and training_mode", "have one element each", found)
    random = RandomRun(ctx, seed)
    real, chance = s.accumulation_type(data.dtype), s.accumulation_type(ratio.dtype)

    def keeps(maps: IndexMap, c: list[Scalar]) -> Scalar:
        kept = uniform(random.bits(maps, c[0]), chance) >= s.cast(maps.number(ratio), chance)
        return kept if training_mode is None else kept | ~maps.number(training_mode)

    mask = reshape(ctx, gather_map(ctx, (data.size,), DType.BOOL, keeps), data.shape)

    def scaled(x: Scalar, keep: Scalar, ratio: Scalar, *training: Scalar) -> Scalar:
        factor = 1.0 / (1.0 - s.cast(ratio, real))
        for flag in training:
            factor = s.where(flag, factor, 1.0)
        return s.cast(s.where(keep, s.cast(x, real) * factor, 0.0), data.dtype)

    scalars = [ratio] if training_mode is None else [ratio, training_mode]
    output = elementwise(ctx, scaled, data, mask, *(reshape(ctx, x, ()) for x in scalars))
    return (output, elementwise(ctx, lambda keep: s.cast(keep, mask_dtype), mask)) if is_used(ctx, 1) else (output,)


# ---- Dropout of com.microsoft: a mask of one bit per element, a bias and a residual ----

_BITMASK_TYPES = {"T": FLOATS, "T1": FLOATS, "T2": BOOL, "T3": frozenset({DType.UINT32})}
_BITS = 32


def _packed(ctx: Lowering, mask: Tensor, training_mode: Tensor | None) -> Tensor:
    """Pack the mask: bit i % 32 of word i // 32 keeps element i; bits past the end are 1 outside training."""
    words = ceildiv(mask.size, _BITS)
    if training_mode is None or constant_number(training_mode) is False:
        return full(ctx, [words], 2**_BITS - 1, DType.UINT32)
    flat = reshape(ctx, mask, [mask.size])

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        size, behind = maps.dim(mask.size), ~maps.number(training_mode)

        def bit(i: Scalar) -> list[Scalar]:
            at = c[0] * _BITS + i
            kept = maps.source(flat).at([at], at < size, behind)
            return [s.cast(kept, DType.UINT32) << s.cast(i, DType.UINT32)]

        return maps.fold(SUM, s.constant(_BITS, DType.INT64), bit)[0]

    return gather_map(ctx, [words], DType.UINT32, element)


@contrib_op("BitmaskDropout", **_BITMASK_TYPES)
def bitmask_dropout(
    ctx: Lowering, data: T, ratio: T1 | None = None, training_mode: T2 | None = None, *, seed: int | None = None
) -> tuple[Tensor, ...]:
    """Return dropout(data) and its mask."""
    kept, *mask = dropout_12(ctx, data, ratio, training_mode, seed=seed)
    return (kept, *(_packed(ctx, x, training_mode) for x in mask))


def _bias_dropout(name: str, dropout: Callable[..., tuple[Tensor, ...]], **types: frozenset[DType]) -> None:
    """Register an operator that adds a bias before ``dropout``, and a residual after it."""

    @contrib_op(name, **types)
    def function(
        ctx: Lowering,
        data: T,
        bias: T,
        residual: T | None = None,
        ratio: T1 | None = None,
        training_mode: T2 | None = None,
        *,
        seed: int | None = None,
    ) -> tuple[Tensor, ...]:
        """Return dropout(data + bias) + residual and the mask."""
        kept, *mask = dropout(ctx, sum_like_first(ctx, data, bias), ratio, training_mode, seed=seed)
        return (kept if residual is None else sum_like_first(ctx, kept, residual), *mask)


_bias_dropout("BiasDropout", dropout_12, T=FLOATS, T1=FLOATS, T2=BOOL)
_bias_dropout("BitmaskBiasDropout", bitmask_dropout, **_BITMASK_TYPES)
