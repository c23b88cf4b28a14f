"""Variable-length sequences of com.microsoft: padding, its removal, and attention over packed tokens.

``token_offset`` holds the padded index (batch * length + position) of each token, followed by the indices of padding.
An index out of range counts as padding.
"""

from __future__ import annotations

from dataclasses import replace

from ....kernels.elementwise.index_map import IndexMap, gather_map, scatter_map
from ....kernels.scan_sort.select import count_prefixes
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import Dim, floordiv
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise
from ....program.lowering.reduce import reduce
from ....program.lowering.views import permute, reshape
from ....program.steps.row_program import MAX
from ... import requirements as require
from ...onnx.attention.attention import attend
from ...onnx.math.matmul import affine
from ...onnx.tensor.indexing import select_index
from ...registry import FLOAT_OR_HALF, INT32, M, T, contrib_op
from .multi_head import MASKED, Masking, projection_sizes, split_columns, with_bias

# ---- padding ----


@contrib_op("RemovePadding", T=FLOAT_OR_HALF, M=INT32)
def remove_padding(ctx: Lowering, x: T, sequence_token_count: M) -> tuple[Tensor, ...]:
    """Return packed tokens, ``token_offset``, cumulative and maximum lengths; no length exceeds the padded length."""
    require.rank(3, input=x)
    batch, rows, hidden = x.shape
    require.shape(ctx, (batch,), sequence_token_count=sequence_token_count)
    last = ctx.host_tensor([rows], (), DType.INT64)
    lengths = elementwise(
        ctx, lambda n, most: s.minimum(s.maximum(s.cast(n, DType.INT64), 0), most), sequence_token_count, last
    )
    is_token = gather_map(ctx, [batch, rows], DType.BOOL, lambda maps, c: c[1] < maps.source(lengths).at([c[0]]))
    before, total = count_prefixes(ctx, is_token)
    (count,) = ctx.read_back(total, "number of tokens", 0, batch * rows)
    before = reshape(ctx, before, [batch, rows])
    packed = ctx.empty((count, hidden), x.dtype)
    offsets = ctx.empty((batch * rows,), DType.INT32)

    def move(maps: IndexMap, c: list[Scalar]) -> tuple[list[Scalar], Scalar, Scalar]:
        token = c[:2]
        return [maps.source(before).at(token), c[2]], maps.source(x).at(c), maps.source(is_token).at(token)

    def offset(maps: IndexMap, c: list[Scalar]) -> tuple[list[Scalar], Scalar, None]:
        flat = c[0] * maps.dim(rows) + c[1]
        tokens = maps.source(before).at(c)
        padding = maps.dim(count) + flat - tokens
        return [s.where(maps.source(is_token).at(c), tokens, padding)], s.cast(flat, DType.INT32), None

    def start(maps: IndexMap, c: list[Scalar]) -> Scalar:
        inside = (c[0] < maps.dim(batch)) & (maps.dim(rows) > 0)
        zero = s.constant(0, DType.INT64)
        return s.cast(maps.source(before).at([c[0], zero], inside, maps.dim(count)), DType.INT32)

    scatter_map(ctx, (batch, rows, hidden), packed, move)
    scatter_map(ctx, (batch, rows), offsets, offset)
    starts = gather_map(ctx, [batch + 1], DType.INT32, start)
    longest = reduce(ctx, lambda row, n: s.cast(s.maximum(row.reduce(MAX, n), 0), DType.INT32), lengths, [0])
    return packed, reshape(ctx, offsets, [batch, rows]), starts, longest


@contrib_op("RestorePadding", T=FLOAT_OR_HALF, M=INT32)
def restore_padding(ctx: Lowering, x: T, token_offset: M) -> Tensor:
    """Scatter packed tokens to their padded positions; padding is zeros."""
    return padded_rows(ctx, x, token_offset)


def padded_rows(ctx: Lowering, x: Tensor, token_offset: Tensor) -> Tensor:
    """Return x [tokens, size] as [batch, sequence, size], with zeros for padding."""
    require.rank(2, input=x, token_offset=token_offset)
    batch, rows = token_offset.shape
    result = ctx.empty((batch * rows, x.shape[1]), x.dtype)
    ctx.memset(result, 0)
    flat = reshape(ctx, token_offset, [batch * rows])

    def move(maps: IndexMap, c: list[Scalar]) -> tuple[list[Scalar], Scalar, Scalar]:
        offset, inside = _padded_index(maps, flat, c[0])
        return [offset, c[1]], maps.source(x).at(c), inside

    scatter_map(ctx, x.shape, result, move)
    return ctx.view(result, (batch, rows, x.shape[1]))


def _padded_index(maps: IndexMap, offsets: Tensor, token: Scalar) -> tuple[Scalar, Scalar]:
    """Return a packed token's padded index, from the flat ``token_offset``, and whether there is such an index."""
    # ``token_offset`` has an entry per padded position; there may be more tokens than positions.
    known = token < maps.dim(offsets.size)
    offset = s.cast(maps.source(offsets).at([token], known, -1), DType.INT64)
    return offset, (offset >= 0) & (offset < maps.dim(offsets.size))


# ---- packed attention ----


@contrib_op("PackedAttention", T=FLOAT_OR_HALF, M=INT32)
def packed_attention(
    ctx: Lowering,
    x: T,
    weights: T,
    bias: T,
    token_offset: M,
    cumulative_sequence_length: M,
    attention_bias: T | None = None,
    *,
    num_heads: int,
    qkv_hidden_sizes: tuple[int, ...] | None = None,
    scale: float = 0.0,
) -> Tensor:
    """Compute self-attention within each sequence of the packed tokens x @ weights + bias."""
    require.rank(2, input=x)
    projected = affine(ctx, x, weights, bias)
    tokens = split_columns(ctx, projected, projection_sizes(qkv_hidden_sizes, projected), "weights of PackedAttention")
    q, k, v = (_heads_of_tokens(ctx, y, num_heads) for y in tokens)
    return _attended(ctx, q, k, v, token_offset, cumulative_sequence_length, attention_bias, scale)


@contrib_op("PackedMultiHeadAttention", T=FLOAT_OR_HALF, M=INT32)
def packed_multi_head_attention(
    ctx: Lowering,
    query: T,
    key: T | None,
    value: T | None,
    bias: T | None,
    token_offset: M,
    cumulative_sequence_length: M,
    attention_bias: T | None = None,
    *,
    mask_filter_value: float = MASKED,
    num_heads: int,
    scale: float = 0.0,
) -> Tensor:
    """Compute attention within each packed sequence. There is no padding, so ``mask_filter_value`` is unused."""
    require.all_or_none(key=key, value=value)
    if key is None or value is None:
        require.rank(4, query=query)
        wanted = (query.shape[0], num_heads, 3, query.shape[3])
        require.shape(ctx, wanted, **{"packed query": query})
        heads = [select_index(ctx, query, 2, number) for number in range(3)]
    else:
        heads = [_heads_of_tokens(ctx, x, num_heads) for x in (query, key, value)]
    q, k, v = with_bias(ctx, heads, bias, [x.shape[1:] for x in heads])
    return _attended(ctx, q, k, v, token_offset, cumulative_sequence_length, attention_bias, scale)


def _heads_of_tokens(ctx: Lowering, x: Tensor, heads: int) -> Tensor:
    """Return x [tokens, heads * size] as [tokens, heads, size]."""
    require.rank(2, input=x)
    require.least(1, num_heads=heads)
    size = floordiv(x.shape[1], heads)
    require.multiple_of(ctx, x.shape[1], heads, "the last dimension of input", "num_heads")
    return reshape(ctx, x, [x.shape[0], heads, size])


def _attended(
    ctx: Lowering,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    token_offset: Tensor,
    cumulative: Tensor,
    attention_bias: Tensor | None,
    scale: float,
) -> Tensor:
    """Return attention [tokens, heads * size] of packed Q, K, V [tokens, heads, size]."""
    require.rank(2, token_offset=token_offset)
    batch, rows = token_offset.shape
    require.shape(ctx, (batch + 1,), cumulative_sequence_length=cumulative)
    require.dim(ctx, 0, q.shape[0], key=k, value=v)

    def length(maps: IndexMap, c: list[Scalar]) -> Scalar:
        starts = maps.source(cumulative)
        return s.cast(starts.at([c[0] + 1]), DType.INT64) - s.cast(starts.at([c[0]]), DType.INT64)

    queries, keys, values = (sequences_of_tokens(ctx, x, cumulative, rows) for x in (q, k, v))
    variant = Masking(None, attention_bias, scale=scale).variant(ctx, queries, rows)
    lengths = gather_map(ctx, [batch, 1, 1, 1], DType.INT64, length)
    output, _ = attend(ctx, queries, keys, values, replace(variant, length=lengths))
    flat = reshape(ctx, token_offset, [batch * rows])
    tokens = reshape(ctx, permute(ctx, output, (0, 2, 1, 3)), [batch * rows, v.shape[1] * v.shape[2]])

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        offset, inside = _padded_index(maps, flat, c[0])
        return maps.source(tokens).at([offset, c[1]], inside)

    return gather_map(ctx, [q.shape[0], tokens.shape[1]], q.dtype, element)


def sequences_of_tokens(ctx: Lowering, x: Tensor, cumulative: Tensor, rows: Dim) -> Tensor:
    """Return x [tokens, heads, size] as [batch, heads, rows, size], with zeros behind the last token of a sequence."""
    batch = cumulative.shape[0] - 1

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        starts = maps.source(cumulative)
        token = s.cast(starts.at([c[0]]), DType.INT64) + c[2]
        inside = (token >= 0) & (token < maps.dim(x.shape[0])) & (token < s.cast(starts.at([c[0] + 1]), DType.INT64))
        return maps.source(x).at([token, c[1], c[3]], inside)

    return gather_map(ctx, [batch, x.shape[1], rows, x.shape[2]], x.dtype, element)
