"""Attention of com.microsoft: its masks, packed inputs and caches, around the mechanism of ai.onnx.

What is masked there gets ``mask_filter_value`` added to its score. So a row of which all is masked is not zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from ort_cuda_plugin.kernels.index import IndexMap, gather_map
from ort_cuda_plugin.model.ir import DType, InvalidModel, Unsupported
from ort_cuda_plugin.ops.attention import (
    PROBABILITIES,
    RAW,
    Reach,
    after_past,
    attend,
    merge_heads,
    query_places,
    rotate,
    split_heads,
)
from ort_cuda_plugin.ops.contrib_fused import UP_TO_FLOAT32, wants
from ort_cuda_plugin.ops.indexing import select_index
from ort_cuda_plugin.ops.normalization import layer_norm
from ort_cuda_plugin.ops.registry import HostTensor, Int64, M, T, op
from ort_cuda_plugin.ops.slicing import concat
from ort_cuda_plugin.program import scalar as s
from ort_cuda_plugin.program.elementwise import elementwise, full
from ort_cuda_plugin.program.lowering import Lowering, Tensor
from ort_cuda_plugin.program.multiply import multiply
from ort_cuda_plugin.program.scalar import Scalar
from ort_cuda_plugin.program.symbolic import Dim, eq, floordiv, le, logical_or, sym_max
from ort_cuda_plugin.program.views import part, permute, reshape, unsqueeze

INT32: Final = frozenset({DType.INT32})
INT64: Final = frozenset({DType.INT64})
T_CACHE: TypeAlias = Tensor
T_KV_SCALE: TypeAlias = Tensor
MASKED: Final = -10000.0
"""The default of ``mask_filter_value``."""

# ---- masks ----


def _mask_bias(ctx: Lowering, mask: Tensor, batch: Dim, rows: Dim, keys: Dim, masked: float) -> Tensor:
    """What a mask of any form adds to scores [batch, heads, rows, keys]: 0, or ``masked``.

    A vector has the number of keys of each sequence, perhaps followed by where the sequences start, or by cumulated
    lengths, which say nothing more. Else there is a number for each key, or for each query and key: 0 masks.
    """
    if mask.rank == 1:
        has_starts = not ctx.guard(eq(mask.size, batch)) and ctx.guard(eq(mask.size, 2 * batch))
        fits = logical_or(logical_or(eq(mask.size, batch), eq(mask.size, 2 * batch)), eq(mask.size, 3 * batch + 2))
        ctx.require(fits, "the mask has another size than B, 2 B or 3 B + 2 for B sequences")

        def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
            lengths = maps.source(mask)
            attended = c[3] < s.cast(lengths.at([c[0]]), DType.INT64)
            if has_starts:
                attended = attended & (c[3] >= s.cast(lengths.at([c[0] + maps.dim(batch)]), DType.INT64))
            return s.where(attended, s.constant(0.0, DType.FLOAT32), masked)

        return gather_map(ctx, [batch, 1, 1, keys], DType.FLOAT32, element)
    if mask.rank not in (2, 3):
        raise Unsupported("shape", f"an attention mask of rank {mask.rank}")
    fits = logical_or(eq(mask.shape[-1], keys), eq(mask.shape[-1], 1))
    ctx.require(fits, "the attention mask has another number of columns than there are keys")
    if mask.rank == 3:
        ctx.require_shape(mask, (batch, rows, mask.shape[2]), "attention mask")
    else:
        ctx.require(logical_or(eq(mask.shape[0], batch), eq(mask.shape[0], 1)), "the attention mask has another batch")
    placed = unsqueeze(ctx, mask, (1, 2) if mask.rank == 2 else (1,))
    return elementwise(ctx, lambda x: s.where(x > 0, s.constant(0.0, DType.FLOAT32), masked), placed)


def score_bias(
    ctx: Lowering, mask: Tensor | None, attention_bias: Tensor | None, batch: Dim, rows: Dim, keys: Dim, masked: float
) -> Tensor | None:
    """The sum of what is added to the scores, float32 or the type of ``attention_bias``."""
    if attention_bias is not None:
        if attention_bias.rank != 4:
            raise InvalidModel(f"attention_bias of rank {attention_bias.rank}")
        for axis, wanted in ((2, rows), (3, keys)):
            ctx.require(eq(attention_bias.shape[axis], wanted), f"attention_bias has another size in dimension {axis}")
    if mask is None:
        return attention_bias
    padding = _mask_bias(ctx, mask, batch, rows, keys, masked)
    if attention_bias is None:
        return padding
    return elementwise(ctx, lambda a, b: s.widen(a) + b, attention_bias, padding)


# ---- attention over projected or packed inputs ----


def split_columns(ctx: Lowering, x: Tensor, sizes: Sequence[Dim], what: str) -> list[Tensor]:
    """x cut along its last axis into parts of ``sizes``."""
    axis = x.rank - 1
    starts: list[Dim] = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    ctx.require(eq(starts[-1], x.shape[axis]), f"the last dimension of {what} is not that of Q, K and V together")
    return [part(ctx, x, axis, start, size) for start, size in zip(starts, sizes, strict=False)]


@op("Attention", domain="com.microsoft", since=1, types={"T": UP_TO_FLOAT32, "M": INT32})
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
    """(attention of x @ weights + bias, keys and values with those of the past in one tensor)."""
    if do_rotary:
        raise Unsupported("attribute", "com.microsoft.Attention with do_rotary")
    if past_present_share_buffer or past_sequence_length is not None:
        raise Unsupported("attribute", "com.microsoft.Attention whose past and present share a buffer")
    if x.rank != 3 or weights.rank != 2:
        raise InvalidModel(f"com.microsoft.Attention of an input of rank {x.rank} and weights of rank {weights.rank}")
    addends = [] if bias is None else [bias]
    for y in addends:
        ctx.require_shape(y, weights.shape[1:], "bias of Attention")
    projected = multiply(ctx, x, weights, *addends, finish=lambda total, *b: total + s.widen(b[0]) if b else total)
    if qkv_hidden_sizes and (len(qkv_hidden_sizes) != 3 or min(qkv_hidden_sizes) <= 0):
        raise InvalidModel(f"com.microsoft.Attention with qkv_hidden_sizes = {list(qkv_hidden_sizes)}")
    sizes = list(qkv_hidden_sizes or [floordiv(weights.shape[1], 3)] * 3)
    q, k, v = (split_heads(ctx, y, num_heads) for y in split_columns(ctx, projected, sizes, "weights of Attention"))
    past_key = past_value = None
    if past is not None:
        if past.rank != 5:
            raise InvalidModel(f"com.microsoft.Attention with a past of rank {past.rank}")
        past_key, past_value = (select_index(ctx, past, 0, number) for number in (0, 1))
        ctx.require_shape(past, (2, *k.shape[:2], past.shape[3], k.shape[3]), "past of Attention")
    length, k, v = after_past(ctx, past_key, past_value, k, v)
    output = attended(ctx, q, k, v, length, mask_index, attention_bias, mask_filter_value, scale, unidirectional)[0]
    stacked = ctx.known(eq(k.shape[3], v.shape[3])) is not False
    present = [concat(ctx, unsqueeze(ctx, k, (0,)), unsqueeze(ctx, v, (0,)), axis=0)] if stacked else []
    return output, *present


def attended(
    ctx: Lowering,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: Dim,
    mask: Tensor | None,
    attention_bias: Tensor | None,
    masked: float,
    scale: float,
    unidirectional: int,
) -> tuple[Tensor, Tensor]:
    """(the heads' results side by side, scores before anything is added to them)."""
    batch, _, rows, _ = q.shape
    output, scores = attend(
        ctx,
        q,
        k,
        v,
        mask=score_bias(ctx, mask, attention_bias, batch, rows, k.shape[2], masked),
        position=query_places(ctx, rows, past, None) if unidirectional else None,
        reach=Reach(is_causal=bool(unidirectional)),
        scale=scale or None,
    )
    return merge_heads(ctx, output), scores


@op("MultiHeadAttention", domain="com.microsoft", since=1, types={"T": UP_TO_FLOAT32, "M": INT32})
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
    """(output, present key, present value, scores), where nothing masks the scores or is added to them."""
    biased = unidirectional or key_padding_mask is not None or attention_bias is not None
    if wants(ctx, 3) and biased:
        raise Unsupported("attribute", "MultiHeadAttention that gives its scores and masks them")
    if past_sequence_length is not None or cache_indirection is not None:
        raise Unsupported("attribute", "MultiHeadAttention whose past and present share a buffer")
    q, k, v = heads_of_inputs(ctx, query, key, value, bias, num_heads)
    length, k, v = after_past(ctx, past_key, past_value, k, v)
    output, scores = attended(
        ctx, q, k, v, length, key_padding_mask, attention_bias, mask_filter_value, scale, unidirectional
    )
    return output, k, v, scores


def heads_of_inputs(
    ctx: Lowering, query: Tensor, key: Tensor | None, value: Tensor | None, bias: Tensor | None, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V [batch, heads, sequence, size] of separate inputs, or where two or all three are packed in one."""

    def unpacked(x: Tensor, count: int, what: str) -> list[Tensor]:
        if x.rank != 5:
            raise InvalidModel(f"MultiHeadAttention with a {what} of rank {x.rank}")
        ctx.require_shape(x, (*x.shape[:2], heads, count, x.shape[4]), f"{what} of MultiHeadAttention")
        return [permute(ctx, select_index(ctx, x, 3, number), (0, 2, 1, 3)) for number in range(count)]

    if key is None:
        if value is not None:
            raise InvalidModel("MultiHeadAttention with a value and without a key")
        given = unpacked(query, 3, "packed query")
    elif value is None:
        given = [split_heads(ctx, query, heads), *unpacked(key, 2, "packed key")]
    else:
        given = [split_heads(ctx, x, heads) for x in (query, key, value)]
    if bias is None:
        return given[0], given[1], given[2]
    sizes = [x.shape[1] * x.shape[3] for x in given]
    if bias.rank != 1:
        raise InvalidModel(f"MultiHeadAttention with a bias of rank {bias.rank}")
    biases = split_columns(ctx, bias, sizes, "the bias")
    biased = []
    for x, b in zip(given, biases, strict=True):
        placed = reshape(ctx, b, [x.shape[1], 1, x.shape[3]])
        biased.append(elementwise(ctx, lambda value, added: value + added, x, placed))
    return biased[0], biased[1], biased[2]


# ---- rotary embedding ----


@op("RotaryEmbedding", domain="com.microsoft", since=1, types={"T": UP_TO_FLOAT32, "M": INT64})
def rotary_embedding(
    ctx: Lowering,
    x: T,
    position_ids: M,
    cos_cache: T,
    sin_cache: T,
    *,
    interleaved: int = 0,
    is_packed_batching: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    scale: float = 1.0,
) -> Tensor:
    """Positions are given for each place, or as one number: that of the first place. Others give zeros."""
    if is_packed_batching or scale != 1.0:
        raise Unsupported("attribute", "RotaryEmbedding with is_packed_batching or a scale")
    if x.rank not in (3, 4) or cos_cache.rank != 2:
        raise InvalidModel(f"RotaryEmbedding of rank {x.rank} with a cache of rank {cos_cache.rank}")
    rotated: Dim = rotary_embedding_dim or 2 * cos_cache.shape[1]
    if x.rank == 4:
        heads, sequence = x, 2
    else:
        if rotary_embedding_dim and num_heads <= 0:
            raise InvalidModel("RotaryEmbedding with rotary_embedding_dim and without num_heads")
        size = floordiv(x.shape[2], num_heads) if num_heads > 0 else rotated
        count = num_heads if num_heads > 0 else floordiv(x.shape[2], size)
        ctx.require(eq(count * size, x.shape[2]), "RotaryEmbedding: the hidden size is not a multiple of the heads")
        heads, sequence = reshape(ctx, x, [*x.shape[:2], count, size]), 1
    places = (x.shape[0], x.shape[sequence])
    if position_ids.rank == 1:
        ctx.require(eq(position_ids.size, 1), "RotaryEmbedding: positions of rank 1 are one number")
        first = position_ids
        position_ids = gather_map(ctx, places, DType.INT64, lambda maps, c: c[1] + maps.number(first))
    result = rotate(ctx, heads, sequence, cos_cache, sin_cache, position_ids, rotated, interleaved=bool(interleaved))
    return ctx.view(result, x.shape)


# ---- grouped queries and their cache ----


@op(
    "GroupQueryAttention",
    domain="com.microsoft",
    since=1,
    types={"T": UP_TO_FLOAT32, "T_CACHE": UP_TO_FLOAT32, "T_KV_SCALE": frozenset({DType.FLOAT32}), "M": INT32},
)
def group_query_attention(
    ctx: Lowering,
    query: T,
    key: T | None,
    value: T | None,
    past_key: T_CACHE | None,
    past_value: T_CACHE | None,
    seqlens_k: M,
    total_sequence_length: HostTensor,
    cos_cache: T | None = None,
    sin_cache: T | None = None,
    position_ids: Int64 | None = None,
    attention_bias: T | None = None,
    head_sink: T | None = None,
    k_scale: T_KV_SCALE | None = None,
    v_scale: T_KV_SCALE | None = None,
    q_norm_weight: T | None = None,
    k_norm_weight: T | None = None,
    *,
    num_heads: int,
    kv_num_heads: int,
    causal: int = 1,
    do_rotary: int = 0,
    k_quant_type: str = "NONE",
    kv_cache_bit_width: int = 0,
    local_window_size: int = -1,
    qk_norm_epsilon: float = 1e-6,
    qk_output: int = 0,
    rotary_interleaved: int = 0,
    scale: float = 0.0,
    sliding_window_cache: int = 0,
    smooth_softmax: int = 0,
    softcap: float = 0.0,
    v_quant_type: str = "NONE",
) -> tuple[Tensor, ...]:
    """(output, present key, present value, scores). What lies behind the last key of a sequence is zero or the past's.

    A sequence has its new keys behind its own past, which is as long as ``seqlens_k`` says. Where the past is as long
    as what is there in all, or longer, the present has its length.
    """
    if sliding_window_cache or k_scale is not None or v_scale is not None:
        raise Unsupported("attribute", "GroupQueryAttention with a quantized cache or sliding_window_cache")
    if (k_quant_type, v_quant_type) != ("NONE", "NONE") or kv_cache_bit_width:
        raise Unsupported("attribute", "GroupQueryAttention with a quantized cache")
    if num_heads <= 0 or kv_num_heads <= 0 or num_heads % kv_num_heads:
        raise InvalidModel(f"GroupQueryAttention of {num_heads} query heads and {kv_num_heads} others")
    if qk_output not in (0, 1, 2) or causal not in (0, 1):
        raise InvalidModel(f"GroupQueryAttention with qk_output = {qk_output}, causal = {causal}")
    if qk_output == 1:
        raise Unsupported("attribute", "GroupQueryAttention that gives its scores before the softmax")
    q, k, v = grouped_heads(ctx, query, key, value, num_heads, kv_num_heads)
    batch, _, rows, _ = q.shape
    total = ctx.host_number(total_sequence_length, "total_sequence_length of GroupQueryAttention")
    ctx.require(le(rows, total), "GroupQueryAttention: total_sequence_length is less than the number of new tokens")
    lengths = reshape(ctx, seqlens_k, [batch])
    first = _first_new(ctx, lengths, rows, total)
    if (q_norm_weight is None) != (k_norm_weight is None):
        raise InvalidModel("GroupQueryAttention with a norm of queries or of keys alone")
    if q_norm_weight is not None and k_norm_weight is not None:
        float32 = DType.FLOAT32.onnx
        q = layer_norm(ctx, q, q_norm_weight, None, [3], qk_norm_epsilon, float32, center=False)[0]
        k = layer_norm(ctx, k, k_norm_weight, None, [3], qk_norm_epsilon, float32, center=False)[0]
    if do_rotary:
        if cos_cache is None or sin_cache is None or cos_cache.rank != 2:
            raise InvalidModel("GroupQueryAttention with do_rotary needs caches of rank 2")
        if position_ids is None:
            position_ids = gather_map(
                ctx, [batch, rows], DType.INT64, lambda maps, c: maps.source(first).at([c[0]]) + c[1]
            )
        rotated = 2 * cos_cache.shape[1]
        turned = bool(rotary_interleaved)
        q, k = (
            rotate(ctx, x, 2, cos_cache, sin_cache, position_ids, rotated, interleaved=turned) for x in (q, k)
        )  # fmt: skip
    present_key = with_new(ctx, past_key, k, first, total)
    present_value = with_new(ctx, past_value, v, first, total)
    if past_key is not None and past_key.dtype is not q.dtype:
        raise Unsupported("dtype", f"GroupQueryAttention with a cache of {past_key.dtype.short}")
    scored = None if attention_bias is None else score_bias(ctx, None, attention_bias, batch, rows, total, MASKED)
    window = local_window_size - 1 if local_window_size > 0 else -1
    output, scores = attend(
        ctx,
        q,
        part(ctx, present_key, 2, 0, total),
        part(ctx, present_value, 2, 0, total),
        mask=scored,
        position=gather_map(
            ctx, [batch, 1, rows, 1], DType.INT64, lambda maps, c: maps.source(first).at([c[0]]) + c[2]
        ),
        length=unsqueeze(ctx, elementwise(ctx, lambda x: s.cast(x, DType.INT64) + 1, lengths), (1, 2, 3)),
        sink=sink_of_heads(ctx, head_sink, num_heads, smooth_softmax),
        reach=Reach(is_causal=bool(causal), left=window),
        scale=scale or None,
        softcap=softcap,
        kept=PROBABILITIES if qk_output == 2 else RAW,
    )
    return merge_heads(ctx, output), present_key, present_value, scores


def grouped_heads(
    ctx: Lowering, query: Tensor, key: Tensor | None, value: Tensor | None, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V [batch, heads, sequence, size]; without a key the query has all three side by side."""
    if (key is None) != (value is None) or query.rank != 3:
        raise InvalidModel("GroupQueryAttention takes a query of rank 3, and key and value or neither")
    if key is not None and value is not None:
        return split_heads(ctx, query, heads), split_heads(ctx, key, kv_heads), split_heads(ctx, value, kv_heads)
    size = floordiv(query.shape[2], heads + 2 * kv_heads)
    q, k, v = split_columns(ctx, query, [heads * size, kv_heads * size, kv_heads * size], "the packed query")
    return split_heads(ctx, q, heads), split_heads(ctx, k, kv_heads), split_heads(ctx, v, kv_heads)


def _first_new(ctx: Lowering, lengths: Tensor, rows: Dim, total: Dim) -> Tensor:
    """Where each sequence's new keys begin, int64 [batch]: at 0 for a prompt, in which all keys are new."""

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        count = maps.dim(rows)
        begin = s.cast(maps.source(lengths).at(c), DType.INT64) + 1 - count
        return s.where(s.equal(count, maps.dim(total)), 0, begin)

    return gather_map(ctx, lengths.shape, DType.INT64, element)


def with_new(ctx: Lowering, past: Tensor | None, new: Tensor, first: Tensor, total: Dim) -> Tensor:
    """The cache [batch, heads, keys, size] with new keys or values from ``first`` on."""
    batch, heads, rows, size = new.shape
    before = past.shape[2] if past is not None and past.rank == 4 else 0
    if past is not None:
        ctx.require_shape(past, (batch, heads, before, size), "past of GroupQueryAttention")

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        place = c[2] - maps.source(first).at([c[0]])
        is_new = (place >= 0) & (place < maps.dim(rows))
        value = maps.source(new).at([c[0], c[1], place, c[3]], is_new)
        if past is None:
            return value
        kept = (place < 0) & (c[2] < maps.dim(before))
        return s.where(is_new, value, maps.source(past).at(c, kept))

    return gather_map(ctx, [batch, heads, ctx.settled_size(sym_max(before, total)), size], new.dtype, element)


def sink_of_heads(ctx: Lowering, head_sink: Tensor | None, heads: int, smooth_softmax: int) -> Tensor | None:
    if head_sink is not None:
        ctx.require_shape(head_sink, (heads,), "head_sink of GroupQueryAttention")
        return reshape(ctx, head_sink, [heads, 1, 1])
    return full(ctx, (), 0.0, DType.FLOAT32) if smooth_softmax == 1 else None
