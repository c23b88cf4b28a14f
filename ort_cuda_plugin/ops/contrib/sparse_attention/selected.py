"""Attention to keys that an indexer selected, from the main cache or an auxiliary cache.

An invalid index selects nothing; a duplicate index counts once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from ....kernels.elementwise.index_map import IndexMap, gather_map, scatter_map
from ....model.ir import HALVES, DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import Dim, eq, logical_or, sym_max
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.views import part, reshape
from ... import requirements as require
from ...onnx.attention.attention import attend, merge_heads
from ...onnx.attention.scores import Variant
from ...onnx.tensor.slicing import concat
from ...outputs import is_used
from ...registry import FLOAT32, INT32, T_CACHE, T_KV_SCALE, UP_TO_FLOAT32, HostTensor, Int64, M, S, T, contrib_op
from ..attention import paged
from ..attention.decoder import grown
from ..attention.multi_head import grouped_heads, sink_of_heads
from ..attention.preparation import Preparation, prepares
from ..packed_tokens import int64

Local: TypeAlias = Callable[[IndexMap, Scalar, Scalar, Scalar], Scalar]
"""Predicate (entry, row, key): whether the query attends to the key although it is not selected."""
Locate: TypeAlias = Callable[[IndexMap, Scalar, Scalar], tuple[list[Scalar], Scalar]]
"""Maps (token, index in the selection) to the key's mask coordinates (entry, row, key), and whether the key exists."""


def selection(
    ctx: Lowering, shape: tuple[Dim, Dim, Dim], local: Local | None, indices: Tensor, counts: Tensor, locate: Locate
) -> Tensor:
    """Return the mask [entries, 1, rows, keys] of keys that ``local`` accepts, or that are selected.

    A token's selected keys are the first ``counts[token]`` of ``indices[token]``.
    """
    require.rank(2, selected_indices=indices)
    require.shape(ctx, indices.shape[:1], selected_counts=counts)
    entries, rows, keys = shape
    if local is None:
        result = ctx.empty((entries, 1, rows, keys), DType.BOOL)
        ctx.memset(result, 0)
    else:
        nearby = local
        result = gather_map(
            ctx, (entries, 1, rows, keys), DType.BOOL, lambda maps, c: nearby(maps, c[0], c[2], c[3])
        )  # fmt: skip

    def move(maps: IndexMap, c: list[Scalar]) -> tuple[list[Scalar], Scalar, Scalar]:
        index = int64(maps.source(indices).at(c))
        (entry, row, key), known = locate(maps, c[0], index)
        known = known & (index >= 0) & (c[1] < int64(maps.source(counts).at([c[0]])))
        return [entry, s.constant(0, DType.INT64), row, key], s.constant(True, DType.BOOL), known

    scatter_map(ctx, indices.shape, result, move)
    return result


def _check_modes(mode: str, source: str, window: int) -> None:
    require.one_of(("selected_only", "local_plus_selected"), attention_mode=mode)
    require.one_of(("main", "auxiliary"), selected_kv_source=source)
    require.that(window == -1 or window > 0, "local_window_size", "be positive, or -1 for none", window)


def _auxiliary(
    key: Tensor | None, value: Tensor | None, shared: int, is_selected: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return keys and values of the auxiliary cache, (None, None) unless ``is_selected``.

    With ``shared`` the value may be missing: the keys are then the values as well.
    """
    if not is_selected:
        return None, None
    if key is None or (value is None and not shared):
        wanted = "be given if selected_kv_source is 'auxiliary' (auxiliary_key alone if auxiliary_kv_shared is 1)"
        given = require.named(auxiliary_key=key, auxiliary_value=value)
        raise require.violation("auxiliary_key and auxiliary_value", wanted, given)
    return key, key if value is None else value


# ---- pages ----


@contrib_op("SparsePagedAttention", T=HALVES, T_CACHE=HALVES | {DType.INT8}, T_KV_SCALE=FLOAT32, S=INT32)
@prepares
def sparse_paged_attention(
    ctx: Lowering,
    query: T,
    key: T | None,
    value: T | None,
    key_cache: T_CACHE,
    value_cache: T_CACHE,
    cumulative_sequence_length: S,
    past_seqlens: S,
    block_table: S,
    slot_mapping: S | None,
    selected_indices: S,
    selected_counts: S,
    auxiliary_key: T | None = None,
    auxiliary_value: T | None = None,
    auxiliary_lengths: S | None = None,
    cos_cache: T | None = None,
    sin_cache: T | None = None,
    head_sink: T | None = None,
    q_norm_weight: T | None = None,
    k_norm_weight: T | None = None,
    k_scale: T_KV_SCALE | None = None,
    v_scale: T_KV_SCALE | None = None,
    attention_metadata: HostTensor | None = None,
    *,
    attention_mode: str = "selected_only",
    auxiliary_cache_layout: str = "contiguous",
    auxiliary_kv_shared: int = 0,
    is_causal: int = 1,
    k_quant_type: str = "NONE",
    kv_num_heads: int,
    local_window_size: int = -1,
    num_heads: int,
    scale: float = 0.0,
    selected_kv_source: str = "main",
    softcap: float = 0.0,
    v_quant_type: str = "NONE",
    **attributes: Any,
) -> tuple[Tensor, ...]:
    """Compute PagedAttention with selected keys; return output and updated caches."""
    _check_modes(attention_mode, selected_kv_source, local_window_size)
    require.one_of(("contiguous",), auxiliary_cache_layout=auxiliary_cache_layout)
    if not is_used(ctx, 1) or not is_used(ctx, 2):
        raise require.unsupported("op", "output 1 or 2, an updated K/V cache,", "left out", "nodes with both outputs")
    from_main = selected_kv_source == "main"
    q, k, v = paged.heads_of_tokens(ctx, query, key, value, num_heads, kv_num_heads)
    size = q.shape[2]
    tokens = paged.CachedTokens(ctx, q.shape[0], cumulative_sequence_length, past_seqlens, block_table, slot_mapping)
    prepare = Preparation(cos_cache, sin_cache, q_norm_weight, k_norm_weight, **attributes)
    q, k = prepare(ctx, q, k, tokens.positions)
    require.shape(ctx, key_cache.shape, value_cache=value_cache)
    keys = paged.cache_of(ctx, key_cache, kv_num_heads, size, k_scale, k_quant_type, q.dtype, "key_cache")
    values = paged.cache_of(ctx, value_cache, kv_num_heads, size, v_scale, v_quant_type, q.dtype, "value_cache")
    keys = paged.written(ctx, keys, k, tokens)
    values = paged.written(ctx, values, v, tokens)
    # A selection may refer to keys beyond the maximum length in attention_metadata. So the last argument is None: the
    # block table's capacity bounds the keys.
    batch = paged.batch_of(ctx, tokens, block_table.shape[1] * key_cache.shape[1], attention_metadata, None)
    others = _auxiliary(auxiliary_key, auxiliary_value, auxiliary_kv_shared, not from_main)
    room = others[0].shape[1] if others[0] is not None and others[0].rank == 4 else 0
    for x in others:
        if x is not None:
            heads = x.shape[2] if x.rank == 4 else 0
            require.shape(ctx, (tokens.count, room, heads, size), **{"auxiliary cache": x})
            fits = logical_or(eq(heads, 1), eq(heads, kv_num_heads))
            require.holds(ctx, fits, "the auxiliary cache", f"have 1 or kv_num_heads = {kv_num_heads} heads", heads)
    if not from_main:
        if auxiliary_lengths is None:
            raise require.violation("auxiliary_lengths", "be given if selected_kv_source is 'auxiliary'", "none")
        require.shape(ctx, (tokens.count,), auxiliary_lengths=auxiliary_lengths)
    all_keys, all_values = (
        paged.gathered(ctx, cache, batch, q.dtype, room, None if x is None else _other(x))
        for cache, x in ((keys, others[0]), (values, others[1]))
    )

    def local(maps: IndexMap, entry: Scalar, row: Scalar, at: Scalar) -> Scalar:
        token, inside = batch.token(maps, entry, row)
        position = maps.source(tokens.positions).at([token], inside, -1)
        near = inside & _is_visible(maps, batch, batch.sequence(maps, entry), position, at, is_causal)
        return near & (at > position - local_window_size) if local_window_size > 0 else near

    def locate(maps: IndexMap, token: Scalar, index: Scalar) -> tuple[list[Scalar], Scalar]:
        entry, row, inside = batch.row(maps, token)
        sequence = tokens.sequence(maps, token)
        if from_main:
            at = maps.source(tokens.positions).at([token])
            return [entry, row, index], inside & _is_visible(maps, batch, sequence, at, index, is_causal)
        assert auxiliary_lengths is not None
        inside = inside & (sequence < maps.dim(tokens.count))
        length = s.minimum(int64(maps.source(auxiliary_lengths).at([sequence], inside)), maps.dim(room))
        return [entry, row, maps.dim(batch.keys) + index], inside & (index < length)

    shape, nearby = (batch.entries, batch.rows, batch.keys + room), local if attention_mode != "selected_only" else None
    mask = selection(ctx, shape, nearby, selected_indices, selected_counts, locate)
    rows = paged.queries(ctx, q, batch)
    sink = sink_of_heads(ctx, head_sink, num_heads, 0)
    variant = Variant(mask=mask, sink=sink, scale=scale or None, softcap=softcap)
    output, _ = attend(ctx, rows, all_keys, all_values, variant)
    return paged.results(ctx, output, batch), keys.blocks, values.blocks


def _is_visible(
    maps: IndexMap, batch: paged.Batch, sequence: Scalar, position: Scalar, key: Scalar, is_causal: int
) -> Scalar:
    """Return whether the query at ``position`` of a sequence may attend to a key of the main cache."""
    visible = (key < batch.tokens.length(maps, sequence)) & (key < maps.dim(batch.keys))
    return visible & (key <= position) if is_causal else visible


def _other(x: Tensor) -> Callable[[IndexMap, Scalar, Scalar, Scalar, Scalar], Scalar]:
    """Return the argument ``other`` of `paged.gathered` for an auxiliary cache [sequences, keys, heads or 1, size]."""

    def element(maps: IndexMap, sequence: Scalar, head: Scalar, number: Scalar, at: Scalar) -> Scalar:
        source = maps.source(x)
        inside = (number >= 0) & (sequence < source.dim(0))
        return source.at([sequence, number, s.minimum(head, source.dim(2) - 1), at], inside)

    return element


# ---- contiguous caches ----


@contrib_op("DynamicSparseAttention", T=UP_TO_FLOAT32, M=INT32)
@prepares
def dynamic_sparse_attention(
    ctx: Lowering,
    query: T,
    key: T | None,
    value: T | None,
    past_key: T | None,
    past_value: T | None,
    auxiliary_key: T | None,
    auxiliary_value: T | None,
    selected_indices: M,
    selected_counts: M,
    seqlens_k: M,
    total_sequence_length: HostTensor,
    cos_cache: T | None = None,
    sin_cache: T | None = None,
    position_ids: Int64 | None = None,
    q_norm_weight: T | None = None,
    k_norm_weight: T | None = None,
    head_sink: T | None = None,
    *,
    attention_mode: str = "selected_only",
    auxiliary_kv_shared: int = 0,
    is_causal: int = 1,
    kv_num_heads: int,
    local_window_size: int = -1,
    num_heads: int,
    output_bf16: int = 0,
    scale: float = 0.0,
    selected_kv_source: str = "main",
    smooth_softmax: int = 0,
    **attributes: Any,
) -> tuple[Tensor, ...]:
    """Compute GroupQueryAttention with selected keys; return output and present caches."""
    require.one_type(query=query, key=key, value=value, past_key=past_key, past_value=past_value)
    require.one_type(query=query, auxiliary_key=auxiliary_key, cos_cache=cos_cache, head_sink=head_sink)
    _check_modes(attention_mode, selected_kv_source, local_window_size)
    from_main = selected_kv_source == "main"
    if from_main != (attention_mode == "selected_only") or (not from_main and local_window_size < 0):
        wanted = "be 'main' with attention_mode 'selected_only', else 'auxiliary' with local_window_size of at least 0"
        found = f"{selected_kv_source!r} with {attention_mode!r} and local_window_size = {local_window_size}"
        raise require.violation("selected_kv_source", wanted, found)
    require.one_of((1,), is_causal=is_causal)
    require.one_of((0,), output_bf16=output_bf16)
    require.all_or_none(past_key=past_key, past_value=past_value)
    q, k, v = grouped_heads(ctx, query, key, value, num_heads, kv_num_heads)
    batch, _, rows, size = q.shape
    total = ctx.host_number(total_sequence_length, "total_sequence_length")
    require.least_dim(ctx, rows, total_sequence_length=total)
    lengths = reshape(ctx, seqlens_k, [batch])
    first = gather_map(
        ctx, [batch], DType.INT64, lambda maps, c: int64(maps.source(lengths).at(c)) + 1 - maps.dim(rows)
    )
    prepare = Preparation(cos_cache, sin_cache, q_norm_weight, k_norm_weight, **attributes)
    if position_ids is None and prepare.do_rotary:
        position_ids = gather_map(ctx, [batch, rows], DType.INT64, lambda maps, c: maps.source(first).at([c[0]]) + c[1])
    q, k = prepare(ctx, q, k, first if position_ids is None else position_ids)
    capacity = total if past_key is None or past_key.rank != 4 else ctx.settled_size(sym_max(past_key.shape[2], total))
    present = grown(ctx, (past_key, past_value), (k, v), first, capacity)
    keys, values = (part(ctx, x, 2, 0, total) for x in present)
    room: Dim = 0
    other_keys, other_values = _auxiliary(auxiliary_key, auxiliary_value, auxiliary_kv_shared, not from_main)
    if other_keys is not None and other_values is not None:
        room = other_keys.shape[2] if other_keys.rank == 4 else 0
        for x in (other_keys, other_values):
            require.shape(ctx, (batch, kv_num_heads, room, size), **{"auxiliary cache": x})
        keys, values = concat(ctx, keys, other_keys, axis=2), concat(ctx, values, other_values, axis=2)

    def local(maps: IndexMap, entry: Scalar, row: Scalar, at: Scalar) -> Scalar:
        position = maps.source(first).at([entry]) + row
        return (at <= position) & (at > position - local_window_size) & (at < maps.dim(total))

    def locate(maps: IndexMap, token: Scalar, index: Scalar) -> tuple[list[Scalar], Scalar]:
        entry, row = s.trunc_divide(token, maps.dim(rows)), s.trunc_modulo(token, maps.dim(rows))
        if not from_main:
            return [entry, row, maps.dim(total) + index], index < maps.dim(room)
        inside = (index <= maps.source(first).at([entry]) + row) & (index < maps.dim(total))
        return [entry, row, index], inside

    require.size(ctx, batch * rows, selected_counts=selected_counts)
    counts, nearby = reshape(ctx, selected_counts, [batch * rows]), None if from_main else local
    mask = selection(ctx, (batch, rows, total + room), nearby, selected_indices, counts, locate)
    sink = sink_of_heads(ctx, head_sink, num_heads, smooth_softmax)
    output, _ = attend(ctx, q, keys, values, Variant(mask=mask, sink=sink, scale=scale or None))
    return merge_heads(ctx, output), *present
