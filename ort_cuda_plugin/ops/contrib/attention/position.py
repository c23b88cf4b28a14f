"""Position encodings of com.microsoft: relative position bias, and rotary embeddings."""

from __future__ import annotations

from collections.abc import Callable

from ....kernels.elementwise.index_map import IndexMap, gather_map
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import Dim, eq, floordiv
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise
from ....program.lowering.reduce import reduce
from ....program.lowering.views import part, permute, reshape, unsqueeze
from ....program.steps.row_program import SUM
from ... import requirements as require
from ...onnx.attention.attention import rotate
from ...onnx.math.matmul import affine
from ...registry import FLOAT32, FLOAT_OR_HALF, INT32, INT64, UP_TO_FLOAT32, HostTensor, M, T, U, contrib_op
from .packed import padded_rows

# ---- biases ----


@contrib_op("RelativePositionBias", T=FLOAT_OR_HALF, U=INT64)
def relative_position_bias(
    ctx: Lowering,
    bias_table: T,
    query_length: HostTensor,
    key_length: HostTensor,
    *,
    is_bidirectional: int = 0,
    max_distance: int,
) -> Tensor:
    """Return T5's relative position bias: for each head, query and key, the table's value for their distance bucket.

    The table's shape is [buckets, heads], but its memory order is [heads, buckets].
    """
    require.rank(2, bias_table=bias_table)
    require.least(1, max_distance=max_distance)
    length = ctx.host_number(query_length, "query_length")
    keys = ctx.host_number(key_length, "key_length")
    require.holds(ctx, eq(length, keys), "query_length", f"be key_length = {keys!r}", length)
    require.least_dim(ctx, 0, query_length=length)
    size = length, length
    return distance_bias(
        ctx, bias_table, size, max_distance, lambda maps, index: index, is_bidirectional=bool(is_bidirectional)
    )


def distance_bias(
    ctx: Lowering,
    bias_table: Tensor,
    size: tuple[Dim, Dim],
    max_distance: int,
    query: Callable[[IndexMap, Scalar], Scalar],
    *,
    is_bidirectional: bool,
) -> Tensor:
    """Return the bias [1, heads, queries, keys] of ``size`` (queries, keys).

    ``bias_table`` is laid out as in RelativePositionBias. ``query(maps, index)`` is the position of a query among the
    keys.
    """
    buckets, heads = bias_table.shape
    table = reshape(ctx, bias_table, [heads, buckets])

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        distance = c[3] - query(maps, c[2])
        count = maps.dim(buckets)
        first = s.constant(0, DType.INT64)
        if is_bidirectional:
            count = count >> 1
            first = s.where(distance > 0, count, 0)
        distance = s.maximum(distance, -distance)
        exact = count >> 1
        start = s.cast(exact, DType.FLOAT32)
        steps = s.log(s.cast(distance, DType.FLOAT32) / start) / s.log(float(max_distance) / start)
        far = exact + s.cast(steps * s.cast(count - exact, DType.FLOAT32), DType.INT64)
        bucket = first + s.where(distance < exact, distance, s.minimum(far, count - 1))
        # With less than 2 buckets per direction, ``exact`` is 0: logarithms are infinite, and the bucket is invalid.
        known = (bucket >= 0) & (bucket < maps.dim(buckets))
        return maps.source(table).at([c[1], bucket], known)

    return gather_map(ctx, [1, heads, *size], bias_table.dtype, element)


@contrib_op("GatedRelativePositionBias", T=FLOAT_OR_HALF, M=INT32)
def gated_relative_position_bias(
    ctx: Lowering,
    query_layer: T,
    query_bias: T,
    rel_pos: T,
    weight: T,
    bias: T,
    eco_a: T,
    token_offset: M | None = None,
    *,
    num_heads: int,
) -> Tensor:
    """Return rel_pos times a gate computed from each query and head. Queries may be packed (RemovePadding)."""
    require.rank(2, weight=weight)
    require.least(1, num_heads=num_heads)
    if token_offset is not None:
        query_layer = padded_rows(ctx, query_layer, token_offset)
    require.rank(3, query_layer=query_layer)
    batch, rows, hidden = query_layer.shape
    size, columns = weight.shape

    require.dim(ctx, 2, num_heads * size, query_layer=query_layer)
    require.multiple_of(ctx, columns, 2, "the last dimension of weight")
    require.shape(ctx, (hidden,), query_bias=query_bias)
    require.shape(ctx, (1, num_heads, rows, rows), rel_pos=rel_pos)
    require.size(ctx, num_heads, eco_a=eco_a)
    heads = reshape(ctx, elementwise(ctx, lambda x, b: x + b, query_layer, query_bias), [batch, rows, num_heads, size])
    projected = affine(ctx, permute(ctx, heads, (0, 2, 1, 3)), weight, bias)
    halves = reshape(ctx, projected, [batch, num_heads, rows, 2, floordiv(columns, 2)])
    sums = reduce(ctx, lambda row, x: row.reduce(SUM, s.widen(x)), halves, [4], keepdims=False)
    u, r = (part(ctx, sums, 3, number, 1) for number in (0, 1))

    def gated(u: Scalar, r: Scalar, factor: Scalar, position: Scalar) -> Scalar:
        gate = s.sigmoid(u) * (s.sigmoid(r) * s.widen(factor) - 1.0) + 2.0
        return s.cast(gate * s.widen(position), query_layer.dtype)

    return elementwise(ctx, gated, u, r, reshape(ctx, eco_a, [num_heads, 1, 1]), rel_pos)


# ---- rotary embeddings ----


@contrib_op("RotaryEmbedding", T=UP_TO_FLOAT32, M=INT64)
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
    """Rotate pairs of elements by positions: one per token, or the first token's. Invalid positions give zeros.

    ``is_packed_batching`` changes nothing: packed tokens have explicit positions too.
    """
    require.supported(scale == 1.0, "attribute", "scale", scale, "1.0, since other providers ignore it")
    heads, sequence, rotated = _rotary_heads(ctx, x, cos_cache, num_heads, rotary_embedding_dim)
    tokens = (x.shape[0], x.shape[sequence])
    if position_ids.rank < 2:
        require.scalar(ctx, position_ids=position_ids)
        first = position_ids
        position_ids = gather_map(ctx, tokens, DType.INT64, lambda maps, c: c[1] + maps.number(first))
    result = rotate(ctx, heads, sequence, cos_cache, sin_cache, position_ids, rotated, interleaved=bool(interleaved))
    return ctx.view(result, x.shape)


def _rotary_heads(
    ctx: Lowering, x: Tensor, cos_cache: Tensor, num_heads: int, rotary_embedding_dim: int
) -> tuple[Tensor, int, Dim]:
    """Return x with separate heads, its sequence axis, and the number of rotated elements of a head."""
    require.rank((3, 4), input=x)
    require.rank(2, cos_cache=cos_cache)
    rotated: Dim = rotary_embedding_dim or 2 * cos_cache.shape[1]
    if x.rank == 4:
        return x, 2, rotated
    expected = f"be positive if rotary_embedding_dim is given ({rotary_embedding_dim})"
    require.that(not rotary_embedding_dim or num_heads > 0, "num_heads", expected, num_heads)
    size = floordiv(x.shape[2], num_heads) if num_heads > 0 else rotated
    count = num_heads if num_heads > 0 else floordiv(x.shape[2], size)
    require.dim(ctx, 2, count * size, input=x)
    return reshape(ctx, x, [*x.shape[:2], count, size]), 1, rotated


@contrib_op("MRotaryEmbedding", T=UP_TO_FLOAT32, M=INT64)
def multimodal_rotary_embedding(
    ctx: Lowering,
    x: T,
    position_ids: M,
    cos_cache: T,
    sin_cache: T,
    *,
    interleaved: int = 0,
    is_packed_batching: int = 0,
    mrope_layout: int = 0,
    mrope_section: tuple[int, ...],
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    scale: float = 1.0,
) -> Tensor:
    """Rotate each pair of elements by one of a token's three positions: time, height or width.

    ``is_packed_batching`` changes nothing: packed tokens have explicit positions too.
    """
    are_sizes = len(mrope_section) == 3 and min(mrope_section) >= 0
    require.that(are_sizes, "mrope_section", "be three sizes of at least 0", list(mrope_section))
    require.one_of((0, 1), mrope_layout=mrope_layout)
    heads, sequence, rotated = _rotary_heads(ctx, x, cos_cache, num_heads, rotary_embedding_dim)
    require.holds(
        ctx, eq(2 * sum(mrope_section), rotated), "mrope_section", f"add up to {rotated!r} / 2", mrope_section
    )
    in_time, in_height, in_width = mrope_section

    def stream(pair: Scalar) -> Scalar:
        if mrope_layout == 0:
            return s.where(pair < in_time, 0, s.where(pair < in_time + in_height, s.constant(1, DType.INT64), 2))
        turn = s.trunc_modulo(pair, 3)
        high = s.equal(turn, 1) & (pair < 3 * in_height)
        wide = s.equal(turn, 2) & (pair < 3 * in_width)
        return s.where(high, 1, s.where(wide, s.constant(2, DType.INT64), 0))

    result = rotate(
        ctx, heads, sequence, cos_cache, sin_cache, position_ids, rotated,
        interleaved=bool(interleaved), stream=stream, scale=scale,
    )  # fmt: skip
    return ctx.view(result, x.shape)


@contrib_op("GemmaRotaryEmbedding", T=frozenset({DType.FLOAT16}), U=FLOAT32)
def gemma_rotary_embedding(ctx: Lowering, emb: U, q: T, q_rot: T, k: T, k_rot: T) -> tuple[Tensor, ...]:
    """Return q * cos(emb) + q_rot * sin(emb), and the same for k, with cosine and sine rounded to float16."""
    require.rank(3, emb=emb)
    require.rank(4, q=q, q_rot=q_rot, k=k, k_rot=k_rot)
    angles = unsqueeze(ctx, emb, (1,))

    def turned(state: Tensor, partner: Tensor, what: str) -> Tensor:
        require.shape(ctx, state.shape, **{f"{what}_rot": partner})
        require.shape(ctx, (emb.shape[0], state.shape[1], *emb.shape[1:]), **{what: state})

        def element(x: Scalar, y: Scalar, angle: Scalar) -> Scalar:
            return x * s.cast(s.cos(angle), x.dtype) + y * s.cast(s.sin(angle), x.dtype)

        return elementwise(ctx, element, state, partner, angles)

    return turned(q, q_rot, "q"), turned(k, k_rot, "k")
