"""FlashAttention for an Attend step of the program: converts the step to a call of `flash.stream_attention`.

Query heads that share a K/V head become rows of one matrix.
"""

from __future__ import annotations

import functools
import math
import operator

from ...model.ir import DType
from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar
from ...program.lowering.context import Lowering, Tensor
from ...program.lowering.views import expand, transpose_matrices
from ...program.steps.steps import Attend
from ..library.library_attention import Softmax, softmax_of
from .flash import Reading, stream_attention


def launch_flash(ctx: Lowering, step: Attend) -> None:
    """Launch FlashAttention with the step's schedule. The step's row program must be a softmax of the scores."""
    assert step.schedule is not None
    stream_attention(ctx, *flash_call(ctx, step), step.schedule)


def flash_call(ctx: Lowering, step: Attend) -> tuple[Tensor, Tensor, Tensor, Tensor, Reading]:
    """Return the arguments q, k, v, out and reading of `stream_attention` for a step whose row program is a softmax."""
    softmax = softmax_of(step)
    assert softmax is not None
    batch, out = step.batch, step.outputs[0][1]
    value, factor, unit = _logit(step, softmax)
    q, k, v = (expand(ctx, x, (*batch, *x.shape[-2:])) for x in flash_operands(ctx, step))
    scalars = tuple((leaf, x) for leaf, x in step.score_inputs if x.size == 1)
    inputs = tuple((leaf, expand(ctx, x, step.score_shape)) for leaf, x in step.score_inputs if x.size != 1)
    if share_keys(q, k, v):
        k, v = (ctx.view(x, (*batch[:-1], *x.shape[-2:]), (*x.strides[:-3], *x.strides[-2:]), x.offset) for x in (k, v))
    else:
        inputs = tuple((leaf, _of_one_group(ctx, x)) for leaf, x in inputs)
        q, out = _of_one_group(ctx, q), _of_one_group(ctx, out)
    reading = Reading(step.score, (*scalars, *inputs), value, step.row, factor=factor, unit=unit, without_keys=math.nan)
    return q, k, v, out, reading


def _logit(step: Attend, softmax: Softmax) -> tuple[Scalar, float, Scalar | None]:
    """Split the softmax's operand into (value, positive constant factor, factor computed on the device or None for 1).

    The product of the three is float32, as in cuDNN. Unfused steps of 16-bit types round the scores to 16 bits. The
    fused kernel omits this rounding, which would take longer than the multiplications.
    """
    score = s.cast(step.score, DType.FLOAT32)
    unit = functools.reduce(operator.mul, softmax.units) if softmax.units else None
    if softmax.addend is not None:
        scale = softmax.scale if unit is None else unit * softmax.scale
        return score * scale + s.cast(softmax.addend, DType.FLOAT32), 1.0, None
    return (score, softmax.scale, unit) if softmax.scale > 0 else (score * softmax.scale, 1.0, unit)


def share_keys(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Tell whether several heads (the last batch dimension) share one K/V head, and q's heads and rows flatten."""
    if min(q.rank, k.rank, v.rank) < 3 or q.shape[-3] == 1 or q.strides[-3] != q.shape[-2] * q.strides[-2]:
        return False
    return k.strides[-3] == 0 and v.strides[-3] == 0


def flash_operands(ctx: Lowering, step: Attend) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [..., rows, size], k [..., keys, size] and v [..., keys, width]; the step's second operand is k^T."""
    q, b, v = step.operands
    return q, transpose_matrices(ctx, b), v


def _of_one_group(ctx: Lowering, x: Tensor) -> Tensor:
    """View x [..., rows, columns] as [..., 1, rows, columns], for query heads that do not share K/V heads."""
    shape, strides = (*x.shape[:-2], 1, *x.shape[-2:]), (*x.strides[:-2], 0, *x.strides[-2:])
    return ctx.view(x, shape, strides, x.offset)
