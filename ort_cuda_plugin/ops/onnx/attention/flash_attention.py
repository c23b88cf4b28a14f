"""FlashAttention over a K/V cache: one pass over the keys with an online softmax."""

from __future__ import annotations

import math

from ....kernels.attention.flash import Reading, stream_attention
from ....kernels.attention.kv_cache import CachePart, append
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import Dim, floordiv
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise, loadable
from ....program.lowering.shapes import aligned
from ....program.lowering.views import part, permute, reshape, unsqueeze
from ....program.steps.quarantine import schedule_kinds
from ....program.steps.row_program import Row
from ....program.steps.steps import Input
from ....schedule.flash import flash_choice
from ....schedule.reasons import note_schedule
from .scores import Variant, biased_score, checked_heads, scaled_by

__all__ = ["CachePart", "append", "flash_attention"]


def flash_attention(ctx: Lowering, q: Tensor, keys: CachePart, values: CachePart, variant: Variant) -> Tensor:
    """Compute FlashAttention over ``present`` of keys and values; the result is [batch, rows, heads * width].

    Scores are never stored, also on the emulated device. Keys beyond the variant's ``last`` or ``length``, or beyond
    the reach of ``position``, are not read, so that the cache may be uninitialized there.
    """
    k, v = checked_heads(ctx, q, keys.elements, values.elements)
    batch, heads, rows, size = q.shape
    kv_heads, width = k.shape[1], v.shape[3]
    if variant.count is not None:
        k, v = (part(ctx, x, 2, 0, variant.count) for x in (k, v))
    reach, scale, softcap = variant.reach, variant.scale, variant.softcap
    groups = floordiv(heads, kv_heads)
    factor = scale if scale is not None else 1 / math.sqrt(size) if isinstance(size, int) and size > 0 else None
    rows_of_q = _grouped_query(ctx, q, keys, kv_heads, factor is not None)
    shape = (batch, heads, rows, k.shape[2])
    leaves = {name: Scalar(x.dtype, "leaf") for name, x in variant.operands.items()}
    inputs: list[Input] = [
        (leaves[name], _by_group(ctx, x, shape, kv_heads, groups)) for name, x in variant.operands.items()
    ]
    score, row = Scalar(DType.FLOAT32, "leaf"), Row()
    value = score if factor is None else score * factor
    capped = softcap * s.tanh(value / softcap) if softcap > 0.0 else value
    if "last" in leaves:
        leaves["length"] = s.cast(leaves.pop("last"), DType.INT64) + 1
    ends = [leaves["length"]] if "length" in leaves else []
    first = None
    if "position" in leaves:
        after = 0 if reach.is_causal else reach.right
        if after >= 0:
            ends.append(leaves["position"] + (after + 1))
        if reach.left >= 0:
            first = leaves["position"] - reach.left
    reading = Reading(
        score,
        loadable(ctx, inputs),
        biased_score(row, capped, leaves, reach),
        row,
        first,
        s.minimum(*ends) if len(ends) > 1 else ends[0] if ends else None,
        s.cast(leaves["sink"], DType.FLOAT32) if "sink" in leaves else None,
    )
    kind = q.dtype if values.scale is None else DType.FLOAT32
    out = ctx.empty((batch, rows, heads, width), kind)
    placed = permute(ctx, reshape(ctx, out, [batch, rows, kv_heads, groups, width]), (0, 2, 3, 1, 4))
    stored = (keys.element, values.element) if keys.scale is not None or values.scale is not None else None
    choice = flash_choice(ctx, rows_of_q, k, v, reading, is_converted=stored is not None)
    ctx.take(choice, schedule_kinds("attention", q.dtype.short, choice.schedule))
    before = len(ctx.trace.steps)
    stream_attention(ctx, rows_of_q, k, v, placed, reading, choice.schedule, elements=stored)
    note_schedule(ctx.trace.steps[before:], choice.schedule, choice.why)
    if values.scale is not None:
        grouped = reshape(ctx, out, [batch, rows, kv_heads, groups, width])
        out = elementwise(ctx, lambda x, factor: s.cast(x * factor, q.dtype), grouped, values.scale)
    return reshape(ctx, out, [batch, rows, heads * width])


def _grouped_query(ctx: Lowering, q: Tensor, keys: CachePart, kv_heads: Dim, is_scaled: bool) -> Tensor:
    """Return q as dense [batch, kv heads, heads per kv head, rows, size], times the scale of the keys.

    Unless ``is_scaled``, which means that the scores are scaled later, q is also multiplied by 1 / sqrt(size).
    """
    batch, heads, rows, size = q.shape
    shape = [batch, kv_heads, floordiv(heads, kv_heads), rows, size]
    if keys.scale is not None:
        q = elementwise(ctx, lambda x: s.cast(x, DType.FLOAT32), q)
    if not is_scaled:
        q = scaled_by(ctx, q, size, None)
    grouped = reshape(ctx, ctx.contiguous(q), shape)
    if keys.scale is None:
        return grouped
    return ctx.contiguous(elementwise(ctx, lambda x, y: x * y, grouped, unsqueeze(ctx, keys.scale, (1,))))


def _by_group(ctx: Lowering, x: Tensor, shape: tuple[Dim, ...], kv_heads: Dim, groups: Dim) -> Tensor:
    """View x, which broadcasts to [batch, heads, rows, keys], for [batch, kv heads, groups, rows, keys]."""
    x = aligned(ctx, ctx.materialize(x) if x.size != 1 else x, shape)
    lead = 4 - x.rank
    dims, strides = [*[1] * lead, *x.shape], [*[0] * lead, *x.strides]
    split = (1, 1) if dims[1] == 1 else (kv_heads, groups)
    moved = (0, 0) if dims[1] == 1 else (groups * strides[1], strides[1])
    return ctx.view(x, (dims[0], *split, *dims[2:]), (strides[0], *moved, *strides[2:]), x.offset)
