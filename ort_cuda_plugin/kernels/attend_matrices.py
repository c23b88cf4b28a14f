"""Attention of 16-bit floats that an Attend step is, by a GPU's tensor cores: one walk over the keys (`stream`).

Few rows of many keys leave tensor cores idle, but the walk splits the keys among blocks.
"""

from __future__ import annotations

import math

from ..model.ir import DType
from ..program import scalar as s
from ..program.lowering import Lowering, Tensor
from ..program.steps import Attend
from ..program.symbolic import hint
from ..program.views import expand
from .library_attention import Softmax, softmax_of, uncast
from .stream import FEW_ROWS, SPLIT_KEYS, Reading, has_matrices, has_matrices_for, stream_attention

__all__ = ["attend_by_matrices", "fits_matrices"]


def fits_matrices(ctx: Lowering, step: Attend) -> Softmax | None:
    """The softmax of attention that tensor cores can do; None where they cannot, or would be idle."""
    return _softmax(ctx, step) if hint(step.score_shape[-2]) > FEW_ROWS else None


def _softmax(ctx: Lowering, step: Attend) -> Softmax | None:
    """The softmax of attention that one walk can do."""
    if not has_matrices(ctx) or len(step.outputs) != 1 or uncast(step.outputs[0][0]) is not step.total:
        return None
    operands = _operands(ctx, step)
    if not has_matrices_for(*operands) or any(x.strides[-1] != 1 for x in operands):
        return None
    return softmax_of(step)


def attend_by_matrices(ctx: Lowering, step: Attend) -> bool:
    """Launches attention whose weights are a softmax; False where one walk cannot do it, or gains nothing."""
    *_, rows, keys = step.score_shape
    gains = hint(rows) > FEW_ROWS or hint(keys) >= 2 * SPLIT_KEYS
    softmax = _softmax(ctx, step) if gains else None
    if softmax is None:
        return False
    (q, k, v), batch = _operands(ctx, step), step.batch
    out = step.outputs[0][1]
    inputs = tuple((leaf, _of_one_group(ctx, expand(ctx, x, step.score_shape))) for leaf, x in step.score_inputs)
    value = s.cast(softmax.logit, DType.FLOAT32)
    reading = Reading(step.score, inputs, value, step.row, without_keys=math.nan)
    wide = [expand(ctx, x, (*batch, *x.shape[-2:])) for x in (q, k, v)]
    stream_attention(ctx, _of_one_group(ctx, wide[0]), wide[1], wide[2], _of_one_group(ctx, out), reading)
    return True


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
