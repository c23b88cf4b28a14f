"""PagedAttention: attention over a paged K/V cache, whose blocks a table assigns to sequences.

Tokens of all sequences are packed. An invalid page or slot reads as zeros and is not written; a token outside all
sequences has zeros as its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ....kernels.attention.kv_cache import carry_over
from ....kernels.elementwise.index_map import IndexMap, Source, gather_map, scatter_map
from ....model.ir import HALVES, DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import Dim, ceildiv, floordiv, le, lt, select, sym_min
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.views import part, reshape
from ....program.steps.row_program import MAX
from ... import requirements as require
from ...onnx.attention.attention import attend
from ...onnx.attention.scores import Variant, window_before
from ...outputs import is_used
from ...registry import FLOAT32, INT32, T_CACHE, T_KV_SCALE, HostTensor, S, T, contrib_op
from ..packed_tokens import PackedTokens, int64
from .grouped_query import QUANTIZED
from .multi_head import separate, sink_of_heads
from .preparation import Preparation, prepares

# ---- tokens ----


class CachedTokens(PackedTokens):
    """Packed tokens of sequences with cached keys.

    ``past`` [sequences] is the number of cached keys. ``positions`` [tokens] is the position in the sequence, -1 for a
    token outside all sequences.
    """

    def __init__(
        self, ctx: Lowering, total: Dim, bounds: Tensor, past: Tensor, table: Tensor, slots: Tensor | None
    ) -> None:
        super().__init__(ctx, bounds, total, empty=True)
        require.shape(ctx, (self.count,), past_seqlens=past)
        self.past, self.table, self.slots = past, table, slots

        def position(maps: IndexMap, c: list[Scalar]) -> Scalar:
            sequence, row, inside = self.row(maps, c[0])
            return s.where(inside, int64(maps.source(past).at([sequence])) + row, -1)

        self.positions = gather_map(ctx, [total], DType.INT64, position)
        require.rank(2, block_table=table)
        require.shape(ctx, (self.count, table.shape[1]), block_table=table)
        require.shape(ctx, (total,), slot_mapping=slots)

    def sequence(self, maps: IndexMap, token: Scalar) -> Scalar:
        """Return the index of a token's sequence, or the number of sequences for a token outside all of them."""
        sequence, _, inside = self.row(maps, token)
        return s.where(inside, sequence, maps.dim(self.count))

    def length(self, maps: IndexMap, sequence: Scalar) -> Scalar:
        """Return the number of past and new keys of a sequence, 0 for an invalid index."""
        known = (sequence >= 0) & (sequence < maps.dim(self.count))
        new = s.where(known, self.range(maps, s.where(known, sequence, 0))[1], 0)
        return int64(maps.source(self.past).at([sequence], known)) + new


@dataclass(frozen=True)
class Batch:
    """The batch of attention over packed tokens: ``entries`` entries, each with ``rows`` queries and ``keys`` keys.

    An entry is a sequence, or with ``by_token`` a single token.
    """

    tokens: CachedTokens
    entries: Dim
    rows: Dim
    keys: Dim
    by_token: bool

    def sequence(self, maps: IndexMap, entry: Scalar) -> Scalar:
        return self.tokens.sequence(maps, entry) if self.by_token else entry

    def token(self, maps: IndexMap, entry: Scalar, row: Scalar) -> tuple[Scalar, Scalar]:
        """Return the index of the token at ``row`` of ``entry``, and whether the token exists."""
        if self.by_token:
            return entry, s.constant(True, DType.BOOL)
        begin, count = self.tokens.range(maps, entry)
        return begin + row, row < count

    def row(self, maps: IndexMap, token: Scalar) -> tuple[Scalar, Scalar, Scalar]:
        """Return the batch entry and the query row of a token, and whether they exist."""
        if self.by_token:
            return token, s.constant(0, DType.INT64), s.constant(True, DType.BOOL)
        entry, row, inside = self.tokens.row(maps, token)
        return entry, row, inside & (row < maps.dim(self.rows))


def batch_of(ctx: Lowering, tokens: CachedTokens, room: Dim, metadata: Tensor | None, key_bound: int | None) -> Batch:
    """Choose the batch of attention over packed tokens, for sequences of at most ``room`` keys.

    If there are at most as many tokens as sequences, each token is an entry. ``metadata`` bounds the new tokens of a
    sequence (element 0) and its keys (element ``key_bound``; None: no element bounds them); a bound of 0 means none.
    If the entries are sequences, and ``metadata`` is None or of unknown size, the Run reads the maxima of both back.
    """

    def bound(number: int | None, most: Dim) -> Dim:
        if metadata is None or number is None or not isinstance(metadata.size, int) or metadata.size <= number:
            return most
        value = ctx.host_values(metadata, "attention_metadata")[number]
        require.least_dim(ctx, 0, attention_metadata=value)
        return select(lt(0, value), sym_min(value, most), most)

    if ctx.settled(le(tokens.total, tokens.count)):
        return Batch(tokens, tokens.total, 1, bound(key_bound, room), True)
    if metadata is not None and isinstance(metadata.size, int):
        return Batch(tokens, tokens.count, bound(0, tokens.total), bound(key_bound, room), False)

    def longest(maps: IndexMap, c: list[Scalar]) -> Scalar:
        def lengths(i: Scalar) -> Sequence[Scalar]:
            return [s.where(s.equal(c[0], 0), tokens.range(maps, i)[1], tokens.length(maps, i))]

        most = s.where(s.equal(c[0], 0), maps.dim(tokens.total), maps.dim(room))
        return s.minimum(s.maximum(maps.fold(MAX, maps.dim(tokens.count), lengths)[0], 0), most)

    found = gather_map(ctx, [2], DType.INT64, longest)
    rows, keys = ctx.read_back(found, "greatest numbers of new tokens and of keys of a sequence", 0)
    return Batch(tokens, tokens.count, rows, keys, False)


# ---- caches ----


@dataclass(frozen=True)
class Cache:
    """A paged cache of keys or of values, [blocks, slots, heads, size], with scales if it is quantized.

    With 4 ``bits`` a byte holds two elements, each stored as its value plus 8, the first in the low nibble; the last
    byte may hold only one.
    """

    blocks: Tensor
    size: Dim
    scale: Tensor | None
    bits: int = 8

    def number(
        self, maps: IndexMap, slot: Sequence[Scalar], head: Scalar, at: Scalar, inside: Scalar, dtype: DType
    ) -> Scalar:
        """Return element ``at`` of a head in ``slot``, which is (block, index in the block); 0 unless ``inside``."""
        source = maps.source(self.blocks)
        if self.scale is None:
            return source.at([*slot, head, at], inside)
        if self.bits == 4:
            byte = s.cast(source.at([*slot, head, at >> 1], inside, 8 + 8 * 16), DType.INT32)
            code = ((byte >> s.cast((at & 1) << 2, DType.INT32)) & 15) - 8
        else:
            code = source.at([*slot, head, at], inside, s.cast(s.constant(0.0, DType.FLOAT32), self.blocks.dtype))
        return s.cast(s.cast(code, DType.FLOAT32) * self._scale(maps, head, at), dtype)

    def stored(self, maps: IndexMap, new: Source, token: Scalar, head: Scalar, at: Scalar) -> Scalar:
        """Return the stored code of element ``at`` of a head of ``new`` [tokens, heads, size]."""
        if self.scale is None:
            return new.at([token, head, at])
        if self.bits == 8:
            return self._code(maps, new.at([token, head, at]), head, at, -128, 127)
        low, high = at * 2, s.minimum(at * 2 + 1, maps.dim(self.size) - 1)
        first, second = (self._code(maps, new.at([token, head, i]), head, i, -8, 7) + 8 for i in (low, high))
        return s.cast(first | (s.where(high > low, second, 8) << 4), DType.UINT8)

    def _code(self, maps: IndexMap, value: Scalar, head: Scalar, at: Scalar, low: int, high: int) -> Scalar:
        """Quantize an element to float8 or to an integer in [low, high]."""
        scaled = s.widen(value) / self._scale(maps, head, at)
        if self.blocks.dtype.is_float:
            return s.cast(scaled, self.blocks.dtype)
        whole = s.minimum(s.maximum(s.round_half_even(scaled), float(low)), float(high))
        return s.cast(whole, self.blocks.dtype if self.bits == 8 else DType.INT32)

    def _scale(self, maps: IndexMap, head: Scalar, at: Scalar) -> Scalar:
        assert self.scale is not None
        if self.scale.rank == 0:
            return maps.number(self.scale)
        return maps.source(self.scale).at([head, at])


_STORED = {
    DType.FLOAT16: "float16",
    DType.BFLOAT16: "bfloat16",
    DType.INT8: "int8",
    DType.FLOAT8E4M3FN: "float8e4m3fn",
    DType.UINT8: "int4",
}
"""Values of k_cache_dtype and v_cache_dtype, by element type of the cache."""


def cache_of(
    ctx: Lowering,
    blocks: Tensor,
    heads: int,
    size: Dim,
    scale: Tensor | None,
    kind: str,
    dtype: DType,
    what: str,
    elements: str = "",
) -> Cache:
    """Check the cache that messages call ``what``, and return it.

    ``kind`` is its quant_type attribute, ``dtype`` the type of the query. ``elements`` is the attribute that names the
    cache's element type; empty: the node does not have the attribute.
    """
    require.one_of(("NONE", "PER_TENSOR", "PER_CHANNEL"), **{f"{what[0]}_quant_type": kind})
    if elements.lower() == "float4e2m1":
        raise require.unsupported("attribute", f"the element type of {what}", elements, ", ".join(_STORED.values()))
    given = blocks.dtype
    if elements.lower() != _STORED.get(given) and (elements or given is DType.UINT8):
        wanted = f"not be u8 without {what[0]}_cache_dtype"
        if elements:
            wanted = f"have the element type that {what[0]}_cache_dtype names ({elements!r})"
        raise require.violation(what, wanted, given.short)
    if (kind == "NONE") != (scale is None) or (kind == "NONE") == (given in QUANTIZED):
        wanted = f"have a quantized element type and a scale if {what[0]}_quant_type is not 'NONE', else neither"
        found = (
            f"{what[0]}_quant_type = {kind!r}, element type {given.short} and {'no' if scale is None else 'a'} scale"
        )
        raise require.violation(what, wanted, found)
    if scale is None and given is not dtype:
        raise require.unsupported("dtype", f"the element type of {what}", given.short, f"that of query, {dtype.short}")
    require.rank(4, **{what: blocks})
    bits = 4 if given is DType.UINT8 else 8
    require.shape(ctx, (*blocks.shape[:2], heads, size if bits == 8 else ceildiv(size, 2)), **{what: blocks})
    if scale is None:
        return Cache(blocks, size, None)
    if kind == "PER_TENSOR":
        require.scalar(ctx, **{f"the scale of {what}": scale})
        return Cache(blocks, size, reshape(ctx, scale, []), bits)
    require.size(ctx, heads * size, **{f"the scale of {what}": scale})
    return Cache(blocks, size, reshape(ctx, scale, [heads, size]), bits)


def written(ctx: Lowering, cache: Cache, new: Tensor, tokens: CachedTokens) -> Cache:
    """Write ``new`` [tokens, heads, size] into the cache; in place if past and present share a buffer."""
    blocks, block_size = cache.blocks.shape[:2]
    result = ctx.empty(cache.blocks.shape, cache.blocks.dtype)
    carry_over(ctx, cache.blocks, result)

    def move(maps: IndexMap, c: list[Scalar]) -> tuple[list[Scalar], Scalar, Scalar]:
        count = maps.dim(block_size)
        if tokens.slots is None:
            block, at, known = _page(maps, tokens, count, c[0])
        else:
            slot = int64(maps.source(tokens.slots).at([c[0]]))
            block, at, known = s.trunc_divide(slot, count), s.trunc_modulo(slot, count), slot >= 0
        known = known & (block >= 0) & (block < maps.dim(blocks))
        return [block, at, c[1], c[2]], cache.stored(maps, maps.source(new), *c), known

    scatter_map(ctx, (*new.shape[:2], cache.blocks.shape[3]), result, move)
    return Cache(result, cache.size, cache.scale, cache.bits)


def _page(maps: IndexMap, tokens: CachedTokens, block_size: Scalar, token: Scalar) -> tuple[Scalar, Scalar, Scalar]:
    """Return block and slot of a token, and whether the table has an entry for it."""
    table, at = tokens.table, maps.source(tokens.positions).at([token])
    sequence = tokens.sequence(maps, token)
    page = s.trunc_divide(at, block_size)
    known = (at >= 0) & (sequence < maps.dim(table.shape[0])) & (page < maps.dim(table.shape[1]))
    return int64(maps.source(table).at([sequence, page], known, -1)), s.trunc_modulo(at, block_size), known


def gathered(
    ctx: Lowering,
    cache: Cache,
    batch: Batch,
    dtype: DType,
    more: Dim = 0,
    other: Callable[[IndexMap, Scalar, Scalar, Scalar, Scalar], Scalar] | None = None,
) -> Tensor:
    """Gather keys or values of each entry, [entries, heads, keys + more, size] of ``dtype``; zeros behind the last key.

    ``other(maps, sequence, head, index, element)`` computes the ``more`` additional rows.
    """
    (_, block_size, heads, _), table = cache.blocks.shape, batch.tokens.table

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        sequence, count = batch.sequence(maps, c[0]), maps.dim(block_size)
        page = s.trunc_divide(c[2], count)
        known = (sequence < maps.dim(table.shape[0])) & (page < maps.dim(table.shape[1]))
        known = known & (c[2] < batch.tokens.length(maps, sequence)) & (c[2] < maps.dim(batch.keys))
        block = int64(maps.source(table).at([sequence, page], known, -1))
        inside = (block >= 0) & (block < maps.dim(cache.blocks.shape[0]))
        slot = [block, s.trunc_modulo(c[2], count)]
        value = cache.number(maps, slot, c[1], c[3], inside, dtype)
        if other is None:
            return value
        return s.where(
            c[2] < maps.dim(batch.keys), value, other(maps, sequence, c[1], c[2] - maps.dim(batch.keys), c[3])
        )

    return gather_map(ctx, [batch.entries, heads, batch.keys + more, cache.size], dtype, element)


# ---- queries and results ----


def heads_of_tokens(
    ctx: Lowering, query: Tensor, key: Tensor | None, value: Tensor | None, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Q, K and V [tokens, heads, size]; without a key, unpack all three from the query."""
    require.heads(heads, kv_heads)
    require.rank(2, query=query, key=key, value=value)
    query, key, value = separate(ctx, query, key, value, heads, kv_heads)
    size = floordiv(query.shape[1], heads)

    def split(x: Tensor, count: int, what: str) -> Tensor:
        require.shape(ctx, (query.shape[0], count * size), **{what: x})
        return reshape(ctx, x, [query.shape[0], count, size])

    return split(query, heads, "query"), split(key, kv_heads, "key"), split(value, kv_heads, "value")


def queries(ctx: Lowering, q: Tensor, batch: Batch) -> Tensor:
    """Return q [tokens, heads, size] as [entries, heads, rows, size], with zeros in rows without a token."""

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        token, inside = batch.token(maps, c[0], c[2])
        return maps.source(q).at([token, c[1], c[3]], inside)

    return gather_map(ctx, [batch.entries, q.shape[1], batch.rows, q.shape[2]], q.dtype, element)


def results(ctx: Lowering, output: Tensor, batch: Batch) -> Tensor:
    """Return ``output`` [entries, heads, rows, size] as [tokens, heads * size]."""
    heads, size = output.shape[1], output.shape[3]

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        entry, row, inside = batch.row(maps, c[0])
        return maps.source(output).at([entry, c[1], row, c[2]], inside)

    shape = [batch.tokens.total, heads, size]
    return reshape(ctx, gather_map(ctx, shape, output.dtype, element), [shape[0], heads * size])


def query_positions(ctx: Lowering, batch: Batch) -> Tensor:
    """Return the position of each query row among the keys, int64 [entries, 1, rows, 1]."""

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        token, inside = batch.token(maps, c[0], c[2])
        return maps.source(batch.tokens.positions).at([token], inside, -1)

    return gather_map(ctx, [batch.entries, 1, batch.rows, 1], DType.INT64, element)


def key_counts(ctx: Lowering, batch: Batch) -> Tensor:
    """Return the number of keys of each entry, int64 [entries, 1, 1, 1]."""
    length, sequence = batch.tokens.length, batch.sequence
    return gather_map(ctx, [batch.entries, 1, 1, 1], DType.INT64, lambda maps, c: length(maps, sequence(maps, c[0])))


# ---- PagedAttention ----


@contrib_op("PagedAttention", T=HALVES, T_CACHE=HALVES | QUANTIZED, T_KV_SCALE=FLOAT32, S=INT32)
@prepares
def paged_attention(
    ctx: Lowering,
    query: T,
    key: T | None,
    value: T | None,
    key_cache: T_CACHE,
    value_cache: T_CACHE | None,
    cumulative_sequence_length: S,
    past_seqlens: S,
    block_table: S,
    cos_cache: T | None = None,
    sin_cache: T | None = None,
    slot_mapping: S | None = None,
    head_sink: T | None = None,
    q_norm_weight: T | None = None,
    k_norm_weight: T | None = None,
    k_scale: T_KV_SCALE | None = None,
    v_scale: T_KV_SCALE | None = None,
    attention_metadata: HostTensor | None = None,
    *,
    is_causal: int = 1,
    k_cache_dtype: str = "",
    k_quant_type: str = "NONE",
    kv_cache_layout: str = "SEPARATE",
    kv_num_heads: int,
    local_window_size: int = -1,
    num_heads: int,
    scale: float = 0.0,
    softcap: float = 0.0,
    v_cache_dtype: str = "",
    v_head_size: int = 0,
    v_quant_type: str = "NONE",
    **attributes: Any,
) -> tuple[Tensor, ...]:
    """Return output and updated caches. Values of a LATENT cache are the first elements of its keys (MLA)."""
    latent = kv_cache_layout == "LATENT"
    require.one_of(("SEPARATE", "LATENT"), kv_cache_layout=kv_cache_layout)
    require.least(0, v_head_size=v_head_size)
    if not is_used(ctx, 1) or (not latent and not is_used(ctx, 2)):
        wanted = "nodes with both, or with output 1 alone if kv_cache_layout is 'LATENT'"
        raise require.unsupported("op", "output 1 or 2, an updated K/V cache,", "left out", wanted)
    if latent and (value is not None or value_cache is not None or key is None or kv_num_heads != 1):
        wanted_inputs = "have kv_num_heads = 1 and a key, but neither value nor value_cache"
        found = f"kv_num_heads = {kv_num_heads} and {require.named(key=key, value=value, value_cache=value_cache)}"
        raise require.violation("a node with kv_cache_layout = 'LATENT'", wanted_inputs, found)
    if not latent and value_cache is None:
        raise require.violation("value_cache", "be given with kv_cache_layout = 'SEPARATE'", "none")
    q, k, v = heads_of_tokens(ctx, query, key, key if latent else value, num_heads, kv_num_heads)
    size = q.shape[2]
    tokens = CachedTokens(ctx, q.shape[0], cumulative_sequence_length, past_seqlens, block_table, slot_mapping)
    prepare = Preparation(cos_cache, sin_cache, q_norm_weight, k_norm_weight, **attributes)
    q, k = prepare(ctx, q, k, tokens.positions)
    keys = cache_of(ctx, key_cache, kv_num_heads, size, k_scale, k_quant_type, q.dtype, "key_cache", k_cache_dtype)
    keys = written(ctx, keys, k, tokens)
    batch = batch_of(ctx, tokens, block_table.shape[1] * key_cache.shape[1], attention_metadata, 1)
    all_keys = gathered(ctx, keys, batch, q.dtype)
    present = [keys.blocks]
    if value_cache is None:
        width = v_head_size or size
        require.most_dim(ctx, size, v_head_size=width)
        all_values = part(ctx, all_keys, 3, 0, width)
    else:
        values = cache_of(
            ctx, value_cache, kv_num_heads, size, v_scale, v_quant_type, q.dtype, "value_cache", v_cache_dtype
        )
        require.shape(ctx, key_cache.shape, value_cache=value_cache)
        values = written(ctx, values, v, tokens)
        all_values = gathered(ctx, values, batch, q.dtype)
        present.append(values.blocks)
    rows = queries(ctx, q, batch)
    variant = Variant(
        position=query_positions(ctx, batch),
        length=key_counts(ctx, batch),
        sink=sink_of_heads(ctx, head_sink, num_heads, 0),
        reach=window_before(is_causal, local_window_size),
        scale=scale or None,
        softcap=softcap,
    )
    output, _ = attend(ctx, rows, all_keys, all_values, variant)
    return results(ctx, output, batch), *present
