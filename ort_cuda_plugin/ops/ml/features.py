"""Feature preprocessing operators of ai.onnx.ml."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...kernels.elementwise.index_map import IndexMap, gather_map
from ...model.ir import Array, DType
from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import eq, sym_min
from ...program.lowering.context import Lowering, Tensor
from ...program.lowering.elementwise import copy_into, elementwise, full
from ...program.lowering.reduce import row_map
from ...program.lowering.views import reshape, unsqueeze
from ...program.steps.row_program import MAX, SUM, Row
from .. import requirements as require
from ..onnx.math.elementwise import cast
from ..registry import INDICES, T1, Int64, T, op

Floats = Sequence[float]
NUMBERS = frozenset({DType.FLOAT32, DType.FLOAT64}) | INDICES
DOMAIN = "ai.onnx.ml"


def real(x: Scalar) -> Scalar:
    """Convert x to the compute type of ai.onnx.ml: float64 stays, other types become float32."""
    return x if x.dtype is DType.FLOAT64 else s.cast(x, DType.FLOAT32)


def _per_feature(ctx: Lowering, x: Tensor, values: Array, what: str) -> Tensor:
    """Return ``values`` of the attribute ``what`` as a constant: one value, or one for each feature of x."""
    if len(values) != 1:
        require.supported(
            x.rank in (1, 2), "shape", f"the rank of X for {what} with one entry for each feature", x.rank, "1 and 2"
        )
        expected = f"have one entry, or one for each of {x.shape[-1]!r} features"
        require.holds(ctx, eq(x.shape[-1], len(values)), what, expected, len(values))
    return ctx.constant(values)


@op("ArrayFeatureExtractor", domain=DOMAIN, since=1, types={"T": NUMBERS})
def array_feature_extractor(ctx: Lowering, x: T, y: Int64) -> Tensor:
    """Gather elements of the last dimension; an index out of range yields 0."""
    require.least_rank(1, X=x)
    indices = reshape(ctx, y, [y.size])

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        source = maps.source(x)
        index = maps.source(indices).at([c[-1]])
        inside = (index >= 0) & (index < source.dim(x.rank - 1))
        return source.at([*(c[:-1] if x.rank > 1 else []), index], inside)

    return gather_map(ctx, [*(x.shape[:-1] if x.rank > 1 else [1]), y.size], x.dtype, element)


@op("Binarizer", domain=DOMAIN, since=1, types={"T": NUMBERS})
def binarizer(ctx: Lowering, x: T, *, threshold: float = 0.0) -> Tensor:
    def binary(value: Scalar, threshold: Scalar) -> Scalar:
        larger = real(value) > s.cast(threshold, real(value).dtype)
        return s.where(larger, s.constant(1, value.dtype), s.constant(0, value.dtype))

    return elementwise(ctx, binary, x, ctx.constant(np.array(threshold, np.float32)))


@op("Scaler", domain=DOMAIN, since=1, types={"T": NUMBERS})
def scaler(ctx: Lowering, x: T, *, offset: tuple[float, ...] = (), scale: tuple[float, ...] = ()) -> Tensor:
    given = require.named(offset=offset or None, scale=scale or None)
    require.that(bool(offset and scale), "offset and scale", "be given", given)
    offsets = _per_feature(ctx, x, np.array(offset, np.float32), "offset")
    factors = _per_feature(ctx, x, np.array(scale, np.float32), "scale")

    def scaled(value: Scalar, offset: Scalar, factor: Scalar) -> Scalar:
        value = real(value)
        result = (value - s.cast(offset, value.dtype)) * s.cast(factor, value.dtype)
        return s.cast(result, DType.FLOAT32)

    return elementwise(ctx, scaled, x, offsets, factors)


@op("Normalizer", domain=DOMAIN, since=1, types={"T": NUMBERS})
def normalizer(ctx: Lowering, x: T, *, norm: str = "MAX") -> Tensor:
    """Divide each row by its norm; a row with norm 0 is unchanged."""
    require.one_of(("MAX", "L1", "L2"), norm=norm)
    require.supported(x.rank in (1, 2), "shape", "the rank of X", x.rank, "1 and 2")

    def program(row: Row, element: Scalar) -> tuple[list[Scalar], list[Scalar]]:
        value = real(element)
        if norm == "MAX":
            size = row.reduce(MAX, value)
        elif norm == "L1":
            size = row.reduce(SUM, s.absolute(value))
        else:
            size = s.sqrt(row.reduce(SUM, value * value))
        return [s.cast(s.where(s.equal(size, 0.0), value, value / size), DType.FLOAT32)], []

    return row_map(ctx, program, [x.rank - 1], x)[0]


@op("Imputer", domain=DOMAIN, since=1, types={"T": NUMBERS})
def imputer(
    ctx: Lowering,
    x: T,
    *,
    imputed_value_floats: tuple[float, ...] = (),
    imputed_value_int64s: tuple[int, ...] = (),
    replaced_value_float: float = 0.0,
    replaced_value_int64: int = 0,
) -> Tensor:
    values: Sequence[float] = imputed_value_floats if x.dtype.is_float else imputed_value_int64s
    if not values:
        name = f"imputed_value_{'floats' if x.dtype.is_float else 'int64s'}"
        raise require.violation(name, f"be given for X of type {x.dtype.short}", "none")
    # int64 attributes may exceed the range of an int32 input: astype wraps them.
    imputed = _per_feature(ctx, x, np.array(values).astype(x.dtype.numpy), "the imputed values")
    wanted = replaced_value_float if x.dtype.is_float else replaced_value_int64

    replaced = ctx.constant(np.array(wanted).astype(x.dtype.numpy))

    def impute(value: Scalar, instead: Scalar, replaced: Scalar) -> Scalar:
        found = s.is_nan(value) if math.isnan(wanted) else s.equal(value, replaced)
        return s.where(found, instead, value)

    return elementwise(ctx, impute, x, imputed, replaced)


@op("OneHotEncoder", domain=DOMAIN, since=1, types={"T": NUMBERS})
def one_hot_encoder(
    ctx: Lowering, x: T, *, cats_int64s: tuple[int, ...] = (), cats_strings: tuple[str, ...] = (), zeros: int = 1
) -> Tensor:
    if cats_strings or not cats_int64s:
        found = "a list of strings" if cats_strings else "omitted"
        raise require.unsupported("dtype", "the list of categories", found, "integers, in cats_int64s")
    require.supported(bool(zeros), "attribute", "zeros", zeros, "1: a value in no category gives zeros")
    require.that(len(set(cats_int64s)) == len(cats_int64s), "cats_int64s", "name each category once", list(cats_int64s))
    categories = ctx.constant(np.array(cats_int64s, np.int64))

    def hot(value: Scalar, category: Scalar) -> Scalar:
        return s.cast(s.equal(s.cast(value, DType.INT64), category), DType.FLOAT32)

    return elementwise(ctx, hot, unsqueeze(ctx, x, [x.rank]), categories)


@op("FeatureVectorizer", domain=DOMAIN, since=1, types={"T1": NUMBERS})
def feature_vectorizer(ctx: Lowering, *inputs: T1, inputdimensions: tuple[int, ...] = ()) -> Tensor:
    """Concatenate the inputs' columns, each truncated or zero-padded to its entry of ``inputdimensions``."""
    require.count(len(inputs), inputdimensions=inputdimensions)
    require.least(0, inputdimensions=min(inputdimensions, default=0))
    for x in inputs:
        require.supported(x.rank in (1, 2), "shape", "the rank of an input", x.rank, "1 and 2")
    tables = [x if x.rank == 2 else unsqueeze(ctx, x, [0]) for x in inputs]
    rows = tables[0].shape[0]
    result = full(ctx, (rows, sum(inputdimensions)), 0, DType.FLOAT32)
    start = 0
    for x, width in zip(tables, inputdimensions, strict=True):
        require.dim(ctx, 0, rows, **{"each input": x})
        shape = (rows, sym_min(x.shape[1], width))
        columns = cast(ctx, ctx.view(x, shape, x.strides, x.offset), to=DType.FLOAT32.onnx)
        copy_into(ctx, ctx.view(result, shape, result.strides, result.offset + start), columns)
        start += width
    return result
