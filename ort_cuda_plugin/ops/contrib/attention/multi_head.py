"""Attention and MultiHeadAttention of com.microsoft: masks, packed Q/K/V and caches.

These operators add ``mask_filter_value`` to the score of a masked key, so that the result for a query whose keys
are all masked is not zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from ....kernels.elementwise.index_map import IndexMap, gather_map
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import Dim, eq, floordiv, logical_or, product, sym_max
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise, full
from ....program.lowering.views import part, permute, reshape, unsqueeze
from ... import requirements as require
from ...onnx.attention.attention import after_past, attend, merge_heads, query_positions, split_heads
from ...onnx.attention.flash_attention import CachePart, append, flash_attention
from ...onnx.attention.scores import Reach, Variant
from ...onnx.math.matmul import affine
from ...onnx.tensor.indexing import select_index
from ...onnx.tensor.slicing import concat
from ...outputs import is_used
from ...registry import INT32, UP_TO_FLOAT32, M, T, contrib_op

MASKED: Final = -10000.0
"""Default of the attribute ``mask_filter_value``, added to scores of masked keys."""

# ---- masks ----


def _mask_bias(ctx: Lowering, mask: Tensor, batch: Dim, rows: Dim, keys: Dim, masked: float) -> Tensor:
    """Return a mask's additive bias for scores [batch, heads, rows, keys]: ``masked`` for a masked key, else 0.

    A vector holds the number of keys of each sequence, optionally followed by start indices, or by cumulative lengths,
    which are redundant. A mask of rank 2 has an element per key, a mask of rank 3 per query and key; 0 masks the key.
    """
    if mask.rank == 1:
        has_starts = not ctx.guard(eq(mask.size, batch)) and ctx.guard(eq(mask.size, 2 * batch))
        fits = logical_or(logical_or(eq(mask.size, batch), eq(mask.size, 2 * batch)), eq(mask.size, 3 * batch + 2))
        require.holds(ctx, fits, "the mask", f"have B, 2 B or 3 B + 2 elements for B = {batch!r} sequences", mask.size)

        def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
            lengths = maps.source(mask)
            attended = c[3] < s.cast(lengths.at([c[0]]), DType.INT64)
            if has_starts:
                attended = attended & (c[3] >= s.cast(lengths.at([c[0] + maps.dim(batch)]), DType.INT64))
            return s.where(attended, s.constant(0.0, DType.FLOAT32), masked)

        return gather_map(ctx, [batch, 1, 1, keys], DType.FLOAT32, element)
    require.supported(mask.rank in (2, 3), "shape", "the rank of the mask", mask.rank, "1 to 3")
    count, columns = mask.shape[0], mask.shape[-1]
    require.holds(
        ctx, logical_or(eq(columns, keys), eq(columns, 1)), "the mask", f"have 1 or {keys!r} columns", columns
    )
    if mask.rank == 3:
        require.shape(ctx, (batch, rows, columns), **{"the mask": mask})
    else:
        require.holds(ctx, logical_or(eq(count, batch), eq(count, 1)), "the mask", f"have 1 or {batch!r} rows", count)
    placed = unsqueeze(ctx, mask, (1, 2) if mask.rank == 2 else (1,))
    return elementwise(ctx, lambda x: s.where(x > 0, s.constant(0.0, DType.FLOAT32), masked), placed)


def score_bias(
    ctx: Lowering, mask: Tensor | None, attention_bias: Tensor | None, batch: Dim, rows: Dim, keys: Dim, masked: float
) -> Tensor | None:
    """Return mask bias plus ``attention_bias``, in float32 or, without a mask, the type of ``attention_bias``.

    Return None if both are None.
    """
    if attention_bias is not None:
        require.rank(4, attention_bias=attention_bias)
        require.dim(ctx, 2, rows, attention_bias=attention_bias)
        require.dim(ctx, 3, keys, attention_bias=attention_bias)
    if mask is None:
        return attention_bias
    padding = _mask_bias(ctx, mask, batch, rows, keys, masked)
    if attention_bias is None:
        return padding
    return elementwise(ctx, lambda a, b: s.widen(a) + b, attention_bias, padding)


@dataclass(frozen=True)
class Masking:
    """Masks, causality and scale (0: 1 / sqrt(size)) of the scores in attention of com.microsoft."""

    mask: Tensor | None
    attention_bias: Tensor | None = None
    filter_value: float = MASKED
    scale: float = 0.0
    is_causal: int = 0

    def variant(self, ctx: Lowering, q: Tensor, keys: Dim) -> Variant:
        """Return the attention variant for queries [batch, heads, rows, size]. The caller sets its ``position``."""
        added = score_bias(ctx, self.mask, self.attention_bias, q.shape[0], q.shape[2], keys, self.filter_value)
        return Variant(mask=added, reach=Reach(is_causal=bool(self.is_causal)), scale=self.scale or None)


# ---- attention over projected or packed inputs ----


def split_columns(ctx: Lowering, x: Tensor, sizes: Sequence[Dim], what: str) -> list[Tensor]:
    """Split x along its last axis into views of ``sizes``."""
    axis = x.rank - 1
    starts: list[Dim] = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    require.dim(ctx, axis, starts[-1], **{what: x})
    return [part(ctx, x, axis, start, size) for start, size in zip(starts, sizes, strict=False)]


def with_bias(
    ctx: Lowering, inputs: Sequence[Tensor], bias: Tensor | None, shapes: Sequence[Sequence[Dim]]
) -> Sequence[Tensor]:
    """Add consecutive parts of ``bias``, viewed with ``shapes``, to the inputs; None adds nothing."""
    if bias is None:
        return inputs
    require.rank(1, bias=bias)
    parts = split_columns(ctx, bias, [product(shape) for shape in shapes], "the bias")
    added = [reshape(ctx, part, shape) for part, shape in zip(parts, shapes, strict=True)]
    return [elementwise(ctx, lambda a, b: a + b, x, y) for x, y in zip(inputs, added, strict=True)]


def separate(
    ctx: Lowering, query: Tensor, key: Tensor | None, value: Tensor | None, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Q, K and V [..., heads * size]; without a key, unpack all three from the query."""
    require.all_or_none(key=key, value=value)
    if key is not None and value is not None:
        return query, key, value
    size = floordiv(query.shape[-1], heads + 2 * kv_heads)
    q, k, v = split_columns(ctx, query, [heads * size, kv_heads * size, kv_heads * size], "the packed query")
    return q, k, v


@contrib_op("Attention", T=UP_TO_FLOAT32, M=INT32)
def attention_of_projection(
    ctx: Lowering,
    x: T,
    weights: T,
    bias: T | None = None,
    mask_index: M | None = None,
    past: T | None = None,
    attention_bias: T | None = None,
    past_sequence_length: M | None = None,
    *,
    num_heads: int,
    do_rotary: int = 0,
    mask_filter_value: float = MASKED,
    past_present_share_buffer: int = 0,
    qkv_hidden_sizes: tuple[int, ...] | None = None,
    rotary_embedding_dim: int = 0,
    scale: float = 0.0,
    unidirectional: int = 0,
) -> tuple[Tensor, ...]:
    """Return attention over x @ weights + bias, and one tensor with the past and new keys and values."""
    require.supported(not do_rotary, "attribute", "do_rotary", do_rotary, "0")
    if bool(past_present_share_buffer) != (past_sequence_length is not None and past is not None):
        raise require.violation(
            "past and past_sequence_length",
            "be given if and only if past_present_share_buffer is 1",
            f"past_present_share_buffer = {past_present_share_buffer} and "
            f"{require.named(past=past, past_sequence_length=past_sequence_length)}",
        )
    require.rank(3, input=x)
    masking = Masking(mask_index, attention_bias, mask_filter_value, scale, unidirectional)
    projected = affine(ctx, x, weights, bias)
    return of_projection(ctx, projected, past, masking, num_heads, past_sequence_length, qkv_hidden_sizes)


def projection_sizes(qkv_hidden_sizes: tuple[int, ...] | None, projected: Tensor) -> list[Dim]:
    """Return the widths of Q, K and V in a merged projection: equal without ``qkv_hidden_sizes``."""
    if qkv_hidden_sizes and (len(qkv_hidden_sizes) != 3 or min(qkv_hidden_sizes) <= 0):
        raise require.violation("qkv_hidden_sizes", "be three positive sizes", list(qkv_hidden_sizes))
    return list(qkv_hidden_sizes or [floordiv(projected.shape[-1], 3)] * 3)


def of_projection(
    ctx: Lowering,
    projected: Tensor,
    past: Tensor | None,
    masking: Masking,
    num_heads: int,
    past_sequence_length: Tensor | None = None,
    qkv_hidden_sizes: tuple[int, ...] | None = None,
) -> tuple[Tensor, ...]:
    """Lower Attention over a merged Q/K/V projection [batch, sequence, columns]."""
    sizes = projection_sizes(qkv_hidden_sizes, projected)
    q, k, v = (split_heads(ctx, y, num_heads) for y in split_columns(ctx, projected, sizes, "weights of Attention"))
    past_key = past_value = None
    if past is not None:
        require.rank(5, past=past)
        past_key, past_value = (select_index(ctx, past, 0, number) for number in (0, 1))
        require.shape(ctx, (2, *k.shape[:2], past.shape[3], k.shape[3]), past=past)
        if past_sequence_length is not None:
            shared = ctx.empty(past.shape, past.dtype)
            keys = CachePart(past_key, select_index(ctx, shared, 0, 0), k)
            values = CachePart(past_value, select_index(ctx, shared, 0, 1), v)
            return attended_in_place(ctx, q, keys, values, past_sequence_length, masking), shared
    length, k, v = after_past(ctx, past_key, past_value, k, v)
    output = attended(ctx, q, k, v, length, masking)[0]
    stacked = ctx.known(eq(k.shape[3], v.shape[3])) is not False
    present = [concat(ctx, unsqueeze(ctx, k, (0,)), unsqueeze(ctx, v, (0,)), axis=0)] if stacked else []
    return output, *present


def attended(ctx: Lowering, q: Tensor, k: Tensor, v: Tensor, past: Dim, masking: Masking) -> tuple[Tensor, Tensor]:
    """Return output [batch, sequence, heads * size] and scores without bias; ``past`` is the number of cached keys.

    With causality and more keys than queries plus cached keys, the last query sees all keys, as in ONNX Runtime's
    CUDA provider.
    """
    rows, keys = q.shape[2], k.shape[2]
    variant = masking.variant(ctx, q, keys)
    if masking.is_causal:
        variant = replace(variant, position=query_positions(ctx, rows, sym_max(past, keys - rows), None))
    output, scores = attend(ctx, q, k, v, variant)
    return merge_heads(ctx, output), scores


def attended_in_place(
    ctx: Lowering, q: Tensor, keys: CachePart, values: CachePart, past_length: Tensor, masking: Masking
) -> Tensor:
    """Append the new K/V rows to a cache of ``past_length`` rows, and attend to all rows of the cache.

    The device reads the length, so that one plan serves all tokens.
    """
    batch, _, rows, _ = q.shape
    require.least_dim(ctx, 1, **{"the number of new tokens": rows})
    for cache in (keys, values):
        assert cache.past is not None
        (_, heads, _, size), capacity = cache.new.shape, cache.present.shape[2]
        require.shape(ctx, (batch, heads, capacity, size), past=cache.past)
    require.dim(ctx, 2, keys.present.shape[2], past_value=values.present)
    positions = gather_map(
        ctx, [batch, rows], DType.INT64, lambda maps, c: s.cast(maps.number(past_length), DType.INT64) + c[1]
    )
    append(ctx, [keys, values], select_index(ctx, positions, 1, 0))
    given = masking.attention_bias if masking.attention_bias is not None else masking.mask
    count = given.shape[-1] if given is not None and given.rank > 1 else keys.present.shape[2]
    variant = replace(
        masking.variant(ctx, q, count),
        count=count,
        position=unsqueeze(ctx, positions, (1, 3)) if masking.is_causal else None,
        last=unsqueeze(ctx, part(ctx, positions, 1, rows - 1, 1), (1, 2)),
    )
    return flash_attention(ctx, q, keys, values, variant)


@contrib_op("MultiHeadAttention", T=UP_TO_FLOAT32, M=INT32)
def multi_head_attention(
    ctx: Lowering,
    query: T,
    key: T | None = None,
    value: T | None = None,
    bias: T | None = None,
    key_padding_mask: M | None = None,
    attention_bias: T | None = None,
    past_key: T | None = None,
    past_value: T | None = None,
    past_sequence_length: M | None = None,
    cache_indirection: M | None = None,
    *,
    num_heads: int,
    mask_filter_value: float = MASKED,
    scale: float = 0.0,
    unidirectional: int = 0,
) -> tuple[Tensor, ...]:
    """Return output, present key, present value and scores.

    Scores are supported only without mask, attention bias, causality and ``past_sequence_length``.
    """
    biased = bool(unidirectional) or key_padding_mask is not None or attention_bias is not None
    found = "used with a mask, an attention bias or unidirectional"
    require.supported(not (is_used(ctx, 3) and biased), "attribute", "the output qk", found, "qk without these")
    require.supported(cache_indirection is None, "attribute", "cache_indirection", "given", "nodes without it")
    masking = Masking(key_padding_mask, attention_bias, mask_filter_value, scale, unidirectional)
    q, k, v = heads_of_inputs(ctx, query, key, value, bias, num_heads)
    if past_sequence_length is not None and past_key is not None and past_value is not None:
        found, wanted = "used with past_sequence_length", "qk without past_sequence_length"
        require.supported(not is_used(ctx, 3), "attribute", "the output qk", found, wanted)
        keys, values = (
            CachePart(past, ctx.empty(past.shape, past.dtype), new) for past, new in ((past_key, k), (past_value, v))
        )
        output = attended_in_place(ctx, q, keys, values, past_sequence_length, masking)
        return output, keys.present, values.present
    length, k, v = after_past(ctx, past_key, past_value, k, v)
    output, scores = attended(ctx, q, k, v, length, masking)
    return output, k, v, scores


def heads_of_inputs(
    ctx: Lowering, query: Tensor, key: Tensor | None, value: Tensor | None, bias: Tensor | None, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Q, K and V [batch, heads, sequence, size] of separate inputs, packed K/V or packed Q/K/V."""

    def unpacked(x: Tensor, count: int, what: str) -> list[Tensor]:
        require.rank(5, **{what: x})
        require.shape(ctx, (*x.shape[:2], heads, count, x.shape[4]), **{what: x})
        return [permute(ctx, select_index(ctx, x, 3, number), (0, 2, 1, 3)) for number in range(count)]

    if key is None:
        require.that(value is None, "value", "be left out if key is left out", "a value")
        given = unpacked(query, 3, "packed query")
    elif value is None:
        given = [split_heads(ctx, query, heads), *unpacked(key, 2, "packed key")]
    else:
        given = [split_heads(ctx, x, heads) for x in (query, key, value)]
    q, k, v = with_bias(ctx, given, bias, [[x.shape[1], 1, x.shape[3]] for x in given])
    # Keys and values of rank 4 already include their bias.
    return (q, given[1], given[2]) if key is not None and key.rank == 4 else (q, k, v)


# ---- grouped queries and their cache ----


def grouped_heads(
    ctx: Lowering, query: Tensor, key: Tensor | None, value: Tensor | None, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Q, K and V [batch, heads, sequence, size]; without a key, unpack all three from the query."""
    require.heads(heads, kv_heads)
    require.rank(3, query=query)
    q, k, v = separate(ctx, query, key, value, heads, kv_heads)
    return split_heads(ctx, q, heads), split_heads(ctx, k, kv_heads), split_heads(ctx, v, kv_heads)


def sink_of_heads(ctx: Lowering, head_sink: Tensor | None, heads: int, smooth_softmax: int) -> Tensor | None:
    if head_sink is not None:
        require.shape(ctx, (heads,), head_sink=head_sink)
        return reshape(ctx, head_sink, [heads, 1, 1])
    return full(ctx, (), 0.0, DType.FLOAT32) if smooth_softmax == 1 else None
