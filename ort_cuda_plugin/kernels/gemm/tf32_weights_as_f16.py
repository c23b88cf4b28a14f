"""Constant float32 weights stored as scaled float16, where tensor cores would round them to TF32 anyway.

TF32 and float16 have the same number of fraction bits. So weights become float16 with a power-of-two scale per column
of a GEMM, or per output channel of a convolution, which halves their bytes. They are rounded like TF32, except for
weights below 2**-24 of the largest one in their column, which lose bits. The epilogue multiplies the accumulators by
the scale, which is exact.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeVar

from ...model.ir import DType
from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import ceildiv
from ...program.lowering.context import Lowering, Tensor
from ...program.lowering.elementwise import elementwise_into
from ...program.lowering.reduce import row_map
from ...program.lowering.views import permute
from ...program.steps.row_program import MAX, Row
from ...program.steps.steps import Contract, Convolve, Substitution, Sums
from ...program.steps.tensor import contiguous_strides
from ..contraction.operand_axes import over_result, weights_axis
from .gemm_mma import kind_of

AnySums = TypeVar("AnySums", bound=Sums)
LINE = 32
"""Weights are zero-padded along k to a multiple of this number of elements, because kernels read whole k steps."""
_largest = 2.0**10
"""A column is scaled so that its maximum is from this number to below twice this number, as float16."""
_bounds = (2.0**-100, 2.0**127)
"""Bounds to which a column's maximum is clamped before its scale is computed, so that the scale is a normal float32."""


def has_compact_lines(ctx: Lowering, step: Sums) -> bool:
    """Tell whether `compact_lines` supports the step's weights, for tensor-core kernels."""
    x, w = step.operands
    if not _may_be_compact(ctx, step):
        return False
    if isinstance(step, Convolve):
        channels = w.static_shape[1]
        return x.shape[1] == channels * step.groups and channels % 8 == 0 and not step.transposed
    return w.static_shape[0] % 8 == 0


def has_compact_columns(ctx: Lowering, step: Contract) -> bool:
    """Tell whether `compact_columns` supports the step's weights, for GEMV kernels."""
    return _may_be_compact(ctx, step) and step.b.static_shape[1] % 8 == 0


def _may_be_compact(ctx: Lowering, step: Sums) -> bool:
    """Tell whether the step multiplies one matrix of constant float32 weights as TF32, without prologue or low rank.

    False if fusion is off, as for debugging.
    """
    x, w = step.operands
    if kind_of(ctx.device, ctx.options, x.dtype.short) != "tf32" or not ctx.options.fusion:
        return False
    if isinstance(step, Contract) and step.low_rank is not None:
        return False
    is_matrix = isinstance(step, Convolve) or (isinstance(step, Contract) and w.rank == 2)
    return is_matrix and not step.is_converted and w.dtype is DType.FLOAT32 and w.is_constant and 0 not in w.shape


def compact_lines(ctx: Lowering, step: AnySums) -> tuple[AnySums, Tensor]:
    """Return the step for scaled float16 weights, and these weights as [columns, k], for `MatrixTile`.

    For a convolution k is channels-last. The row pitch is a multiple of `LINE` elements. Each group of eight elements
    along k is permuted as `mma_fragments` describes.
    """
    return _lines(ctx, step, (1, 2), None)


def half_lines(ctx: Lowering, step: Contract, factors: Tensor) -> tuple[Contract, Tensor]:
    """Convert the weights as `compact_lines` does, but without its permutation along k, for float16 mma instructions.

    The weights at k are multiplied by ``factors[k]``, or by ``factors`` if this is one number.
    """
    depth = step.b.static_shape[0]
    along = ctx.view(factors, (depth, 1), (0 if factors.size == 1 else 1, 0), factors.offset)
    return _lines(ctx, step, (4, 1), along)


def _lines(ctx: Lowering, step: AnySums, steps: tuple[int, int], factors: Tensor | None) -> tuple[AnySums, Tensor]:
    """Convert weights to float16 [columns, k]; every eight weights along k, viewed as [2, 4], get strides ``steps``."""
    w, powers = step.operands[1], _powers(ctx, step, factors)
    if isinstance(step, Convolve):
        ordered = permute(ctx, w, (0, *range(2, w.rank), 1))
    else:
        ordered = permute(ctx, w, (1, 0))
    columns, *outer, last = ordered.static_shape
    *strides, one = ordered.strides
    eights = (columns, *outer, last // 8, 2, 4)
    source = ctx.view(ordered, eights, (*strides, 8 * one, 4 * one, one), ordered.offset)
    depth = math.prod(outer) * last
    codes = ctx.empty((columns, ceildiv(depth, LINE) * LINE), DType.FLOAT16)
    if codes.shape[1] != depth:
        ctx.memset(codes, 0)
    along = contiguous_strides((*outer, last // 8))
    target = ctx.view(codes, eights, (codes.strides[0], *(8 * stride for stride in along), *steps))
    if factors is None:
        _store_codes(ctx, target, source, powers, 0)
    else:
        of_lines = ctx.view(
            factors, (1, *eights[1:]), (0, *(factors.strides[0] * n for n in (8, 4, 1))), factors.offset
        )
        _store_codes(ctx, target, source, powers, 0, of_lines)
    return _scaled(ctx, step, powers), ctx.view(codes, (columns, depth), codes.strides)


def compact_columns(ctx: Lowering, step: AnySums) -> tuple[AnySums, Tensor]:
    """Return the step for scaled float16 weights, and these weights as [k, columns], for GEMV kernels."""
    w, powers = step.operands[1], _powers(ctx, step, None)
    codes = ctx.empty(w.shape, DType.FLOAT16)
    _store_codes(ctx, codes, w, powers, 1)
    return _scaled(ctx, step, powers), codes


def _powers(ctx: Lowering, step: Sums, factors: Tensor | None) -> Tensor:
    """Return the power of two by which each column is divided, a float32 vector. NaN weights stay NaN."""

    def power(row: Row, x: Scalar, *factor: Scalar) -> tuple[list[Scalar], list[Scalar]]:
        x = x * factor[0] if factor else x
        return [], [power_of(row.reduce(MAX, s.absolute(x)), _largest)]

    w = step.operands[1]
    axes = [axis for axis in range(w.rank) if axis != weights_axis(step)]
    (powers,) = row_map(ctx, power, axes, w, *(() if factors is None else (factors,)))
    return ctx.view(powers, (w.shape[weights_axis(step)],))


def power_of(largest: Scalar, wanted: float) -> Scalar:
    """Return the power of two p for which ``largest``, clamped to `_bounds`, / p is in [``wanted``, 2 * ``wanted``)."""
    largest = s.minimum(s.maximum(largest, _bounds[0]), _bounds[1])
    return s.cast(s.cast(largest, DType.FLOAT8E8M0, round_mode="down"), DType.FLOAT32) * (1 / wanted)


def _store_codes(ctx: Lowering, target: Tensor, weights: Tensor, powers: Tensor, axis: int, *factors: Tensor) -> None:
    shape = [dim if number == axis else 1 for number, dim in enumerate(weights.shape)]
    placed = ctx.view(powers, shape)

    def code(x: Scalar, power: Scalar, *factor: Scalar) -> Scalar:
        return s.cast((x * factor[0] if factor else x) / power, DType.FLOAT16)

    elementwise_into(ctx, code, target, weights, placed, *factors)


def _scaled(ctx: Lowering, step: AnySums, powers: Tensor) -> AnySums:
    """Return the step with an epilogue that first multiplies the accumulators by their columns' ``powers``."""
    w = step.operands[1]
    over_weights = ctx.view(powers, [dim if axis == weights_axis(step) else 1 for axis, dim in enumerate(w.shape)])
    leaf = Scalar(DType.FLOAT32, "leaf")
    changed = Substitution({step.total: step.total * leaf})
    outputs = tuple((changed(value), y) for value, y in step.outputs)
    return replace(step, inputs=(*step.inputs, (leaf, over_result(step, 1, over_weights))), outputs=outputs)
