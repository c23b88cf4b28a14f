"""Attention of floats that an Attend step is, by a GPU's tensor cores: one walk over the keys (`stream`).

Heads that share keys and values are rows of one matrix, and many keys of few rows are split among blocks.
"""

from __future__ import annotations

import functools
import math
import operator

from ...model.ir import DType
from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import ceildiv, hint, le, product
from ...program.lowering.context import Lowering, Tensor
from ...program.lowering.views import expand
from ...program.steps.steps import Attend
from ..codegen.guards import try_guard
from ..library.library_attention import Softmax, softmax_of, uncast
from .flash import FEW_ROWS, SPLIT_KEYS, Reading, has_matrices, has_matrices_for, stream_attention
from .flash_mma_shapes import small_form

__all__ = ["attend_by_matrices", "try_flash_attention", "try_flash_in_one_wave"]


def try_flash_attention(ctx: Lowering, step: Attend) -> Softmax | None:
    """The softmax of attention that one walk should do, by tensor cores where they can; None where it gains nothing.

    Other types gain where few rows of several heads share keys and values: only such a walk reads these once.
    """
    if not has_matrices(ctx) or len(step.outputs) != 1 or uncast(step.outputs[0][0]) is not step.total:
        return None
    *_, rows, keys = step.score_shape
    if hint(rows) <= FEW_ROWS and hint(keys) < 2 * SPLIT_KEYS:
        return None
    operands = _operands(ctx, step)
    shared = hint(rows) <= FEW_ROWS and _share_keys(*operands)
    if not (has_matrices_for(ctx, *operands) or shared) or any(x.strides[-1] != 1 for x in operands):
        return None
    return softmax_of(step)


def attend_by_matrices(ctx: Lowering, step: Attend) -> bool:
    """Launches attention whose weights are a softmax; False where one walk cannot do it, or gains nothing."""
    softmax = try_flash_attention(ctx, step)
    if softmax is None:
        return False
    batch, out = step.batch, step.outputs[0][1]
    value, factor, unit = _logit(step, softmax)
    q, k, v = (expand(ctx, x, (*batch, *x.shape[-2:])) for x in _operands(ctx, step))
    alike = tuple((leaf, x) for leaf, x in step.score_inputs if x.size == 1)
    inputs = tuple((leaf, expand(ctx, x, step.score_shape)) for leaf, x in step.score_inputs if x.size != 1)
    if _share_keys(q, k, v):
        k, v = (ctx.view(x, (*batch[:-1], *x.shape[-2:]), (*x.strides[:-3], *x.strides[-2:]), x.offset) for x in (k, v))
    else:
        inputs = tuple((leaf, _of_one_group(ctx, x)) for leaf, x in inputs)
        q, out = _of_one_group(ctx, q), _of_one_group(ctx, out)
    reading = Reading(step.score, (*alike, *inputs), value, step.row, factor=factor, unit=unit, without_keys=math.nan)
    stream_attention(ctx, q, k, v, out, reading)
    return True


def try_flash_in_one_wave(ctx: Lowering, step: Attend) -> bool:
    """Return whether flash attention has few blocks for tensor cores (`small_form`); guards that it has no more."""
    if try_flash_attention(ctx, step) is None or not has_matrices_for(ctx, *_operands(ctx, step)):
        return False
    q, k, v = (expand(ctx, x, (*step.batch, *x.shape[-2:])) for x in _operands(ctx, step))
    batch, rows = step.batch, q.shape[-2]
    if _share_keys(q, k, v):
        batch, rows = batch[:-1], batch[-1] * rows
    form = small_form(product(batch), rows, v.shape[-1], v.dtype.itemsize, ctx.device.multiprocessors)
    return form is not None and try_guard(ctx, le(product(batch) * ceildiv(rows, form.m), ctx.device.multiprocessors))


def _logit(step: Attend, softmax: Softmax) -> tuple[Scalar, float, Scalar | None]:
    """What softmax is taken of, and two positive factors of that, one of which is known.

    In float32 as cuDNN has it: to round scores takes longer than to multiply them.
    """
    score = s.cast(step.score, DType.FLOAT32)
    unit = functools.reduce(operator.mul, softmax.units) if softmax.units else None
    if softmax.addend is not None:
        scale = softmax.scale if unit is None else unit * softmax.scale
        return score * scale + s.cast(softmax.addend, DType.FLOAT32), 1.0, None
    return (score, softmax.scale, unit) if softmax.scale > 0 else (score * softmax.scale, 1.0, unit)


def _share_keys(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the last dimension of batches are heads that share keys and values, and their rows are one matrix."""
    if q.rank < 3 or q.shape[-3] == 1 or q.strides[-3] != q.shape[-2] * q.strides[-2]:
        return False
    return k.strides[-3] == 0 and v.strides[-3] == 0


def _operands(ctx: Lowering, step: Attend) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, a row of each for each token."""
    q, b, v = step.operands
    k = ctx.view(
        b, (*b.shape[:-2], b.shape[-1], b.shape[-2]), (*b.strides[:-2], b.strides[-1], b.strides[-2]), b.offset
    )
    return q, k, v


def _of_one_group(ctx: Lowering, x: Tensor) -> Tensor:
    """A view [..., 1, rows, columns]."""
    shape, strides = (*x.shape[:-2], 1, *x.shape[-2:]), (*x.strides[:-2], 0, *x.strides[-2:])
    return ctx.view(x, shape, strides, x.offset)
