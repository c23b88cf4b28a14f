"""GroupQueryAttention: grouped-query attention with a K/V cache that may be quantized and grow in place.

The device reads the lengths of sequences. Successive decoder steps differ in the lengths only, and so share a plan and
a CUDA graph.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

from ....kernels.attention.kv_cache import CachePart, append
from ....kernels.elementwise.index_map import IndexMap, gather_map
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import Dim, floordiv, product, sym_max
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise
from ....program.lowering.views import reshape, unsqueeze
from ... import requirements as require
from ...onnx.attention.attention import attend, merge_heads
from ...onnx.attention.flash_attention import flash_attention
from ...onnx.attention.scores import Scores, Variant, window_before
from ...onnx.tensor.indexing import select_index
from ...outputs import is_used
from ...registry import FLOAT32, INT32, T_CACHE, T_KV_SCALE, UP_TO_FLOAT32, HostTensor, Int64, M, T, contrib_op
from .multi_head import grouped_heads, sink_of_heads
from .preparation import Preparation, rotates
from .window_cache import window_step

QUANTIZED: Final = frozenset({DType.INT8, DType.UINT8, DType.FLOAT8E4M3FN})


@contrib_op("GroupQueryAttention", T=UP_TO_FLOAT32, T_CACHE=UP_TO_FLOAT32 | QUANTIZED, T_KV_SCALE=FLOAT32, M=INT32)
@rotates
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
    k_quant_type: str = "NONE",
    kv_cache_bit_width: int = 0,
    local_window_size: int = -1,
    qk_norm_epsilon: float = 1e-6,
    qk_output: int = 0,
    scale: float = 0.0,
    sliding_window_cache: int = 0,
    smooth_softmax: int = 0,
    softcap: float = 0.0,
    v_quant_type: str = "NONE",
    **attributes: Any,
) -> tuple[Tensor, ...]:
    """Return output, present key, present value and scores. Past and present may share a buffer.

    In a shared buffer only new rows are written. Otherwise rows after the last key are zeros. New keys are stored after
    the past keys of their sequence; ``seqlens_k`` gives their positions. The present has the past's capacity if all
    keys fit.
    """
    if sliding_window_cache and past_key is None:
        raise require.unsupported("attribute", "sliding_window_cache", "1 without past_key", "0, or 1 with past_key")
    if sliding_window_cache and is_used(ctx, 3):
        found = "1, and the node has the output output_qk"
        raise require.unsupported("attribute", "sliding_window_cache", found, "0 with this output")
    require.one_of((0, 1, 2), qk_output=qk_output)
    require.one_of((0, 1), causal=causal)
    q, k, v = grouped_heads(ctx, query, key, value, num_heads, kv_num_heads)
    batch, _, rows, _ = q.shape
    require.least_dim(ctx, 1, **{"the number of new tokens": rows})
    lengths = reshape(ctx, seqlens_k, [batch])
    positions = _positions(ctx, lengths, rows, total_sequence_length)
    prepare = Preparation(
        cos_cache, sin_cache, q_norm_weight, k_norm_weight, qk_norm_epsilon=qk_norm_epsilon, **attributes
    )
    q, k = prepare(ctx, q, k, positions if position_ids is None else position_ids)
    require.rank(4, attention_bias=attention_bias)
    require.dim(ctx, 2, rows, attention_bias=attention_bias)
    bias, window = attention_bias, None
    if sliding_window_cache and past_key is not None:
        require.rank(4, past_key=past_key)
        window = window_step(ctx, positions, lengths, past_key.shape[2], local_window_size)
        # Copy cached and new keys to a separate buffer: queries also attend to keys that this step evicts.
        capacity: Dim = window.capacity + rows
        positions, lengths = window.indices(ctx, positions), window.last
        bias = None if bias is None else window.bias(ctx, bias, batch, capacity)
    else:
        capacity = _capacity(ctx, past_key, rows, total_sequence_length)
    keys = _cache(ctx, past_key, k, capacity, k_scale, k_quant_type, kv_cache_bit_width)
    values = _cache(ctx, past_value, v, capacity, v_scale, v_quant_type, kv_cache_bit_width)
    append(ctx, [keys, values], select_index(ctx, positions, 1, 0))
    variant = Variant(
        mask=bias,
        count=None if bias is None else bias.shape[-1],
        position=unsqueeze(ctx, positions, (1, 3)),
        last=unsqueeze(ctx, lengths, (1, 2, 3)),
        sink=sink_of_heads(ctx, head_sink, num_heads, smooth_softmax),
        reach=window_before(causal, local_window_size),
        scale=scale or None,
        softcap=softcap,
        returned=(Scores.RAW, Scores.BIASED, Scores.PROBABILITIES)[qk_output],
    )
    if not is_used(ctx, 3):
        output = flash_attention(ctx, q, keys, values, variant)
        if window is not None:
            return output, *(window.after(ctx, x.present) for x in (keys, values))
        return output, keys.present, values.present
    is_plain, found = keys.scale is None and values.scale is None, "used with a quantized cache"
    require.supported(is_plain, "attribute", "the output output_qk", found, "a cache of query's type")
    total = ctx.host_number(total_sequence_length, "total_sequence_length")
    k, v = (_valid(ctx, x.present, lengths, total) for x in (keys, values))
    counts = unsqueeze(ctx, elementwise(ctx, lambda x: s.cast(x, DType.INT64) + 1, lengths), (1, 2, 3))
    output, scores = attend(ctx, q, k, v, replace(variant, count=None, last=None, length=counts))
    if qk_output == 1:
        # The scores of keys that a query does not attend to are zeros, as in the CPU provider.
        scores = elementwise(ctx, lambda x: s.where(s.equal(x, -math.inf), 0.0, x), scores)
    return merge_heads(ctx, output), keys.present, values.present, scores


def _positions(ctx: Lowering, lengths: Tensor, rows: Dim, total: Tensor) -> Tensor:
    """Return the positions of the new keys, int64 [batch, rows]; 0, 1, ... for a prompt, whose keys are all new.

    Unless shapes determine ``total``, the device reads it, so that the plan does not depend on its value.
    """

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        count = maps.dim(rows)
        host = total.host
        number = maps.dim(host[0]) if host is not None and len(host) == 1 else s.cast(maps.number(total), DType.INT64)
        begin = s.cast(maps.source(lengths).at([c[0]]), DType.INT64) + 1 - count
        return s.where(s.equal(count, number), 0, begin) + c[1]

    return gather_map(ctx, [*lengths.shape, rows], DType.INT64, element)


def _capacity(ctx: Lowering, past: Tensor | None, rows: Dim, total: Tensor) -> Dim:
    """Return the capacity of the present: the maximum of the past's capacity and the number of keys.

    The host needs the total number of keys. If the model computes it from a mask's shape, as exporters do, it is known
    on the host without a read-back.
    """
    number = ctx.host_number(total, "total_sequence_length")
    require.least_dim(ctx, rows, total_sequence_length=number)
    return number if past is None or past.rank != 4 else ctx.settled_size(sym_max(past.shape[2], number))


def _cache(
    ctx: Lowering, past: Tensor | None, new: Tensor, capacity: Dim, scale: Tensor | None, kind: str, bits: int
) -> CachePart:
    """Return the cache of keys or values, with an uninitialized present buffer of ``capacity`` rows."""
    batch, heads, _, size = new.shape
    require.one_of(("NONE", "PER_TENSOR", "PER_CHANNEL"), **{"k_quant_type and v_quant_type": kind})
    require.one_of((0, 4, 8), kv_cache_bit_width=bits)
    dtype, stored = new.dtype, size
    if kind == "NONE":
        if past is not None and past.dtype is not new.dtype:
            what = "the element type of past_key and past_value without quantization"
            raise require.unsupported("dtype", what, past.dtype.short, new.dtype.short)
        bits, scale = 8, None
    else:
        if past is None or past.dtype not in QUANTIZED or scale is None:
            given = "no cache" if past is None else f"a cache of {past.dtype.short}"
            raise require.violation(
                f"past_key or past_value with quantization {kind!r}",
                f"be given with type {' or '.join(sorted(x.short for x in QUANTIZED))} and a scale",
                f"{given} and {'no scale' if scale is None else 'a scale'}",
            )
        dtype, bits = past.dtype, bits or 8
        fits, what = (dtype is DType.UINT8) == (bits == 4), f"kv_cache_bit_width of a cache of {dtype.short}"
        require.supported(fits, "dtype", what, bits, "4 for u8, 8 for i8 and f8e4m3fn")
        if bits == 4:
            require.multiple_of(ctx, size, 2, "the head size of a cache of 4 bits")
            stored = floordiv(size, 2)
        wanted = (1, 1, 1) if kind == "PER_TENSOR" else (heads, 1, size)
        require.size(ctx, product(wanted), **{"k_scale and v_scale": scale})
        scale = reshape(ctx, scale, list(wanted))
    if past is not None:
        wanted_past = (batch, heads, past.shape[2] if past.rank == 4 else 0, stored)
        require.shape(ctx, wanted_past, **{"past_key and past_value": past})
    return CachePart(past, ctx.empty((batch, heads, capacity, stored), dtype), new, scale, bits)


def _valid(ctx: Lowering, x: Tensor, lengths: Tensor, total: Dim) -> Tensor:
    """Return the valid keys or values of each sequence, and zeros behind them."""

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        return maps.source(x).at(c, c[2] <= s.cast(maps.source(lengths).at([c[0]]), DType.INT64))

    return gather_map(ctx, [*x.shape[:2], total, x.shape[3]], x.dtype, element)
