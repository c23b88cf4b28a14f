"""Attention of ai.onnx, rotary embedding and cache update; `attend` lowers every attention variant."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence

import numpy as np

from ....kernels.elementwise.index_map import IndexMap, gather_map, scatter_map
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import Dim, eq, floordiv, hint, le
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import copy_of, elementwise
from ....program.lowering.multiply import multiply
from ....program.lowering.reduce import row_map
from ....program.lowering.views import permute, reshape, unsqueeze
from ....program.steps.row_program import MAX, SUM, Row
from ....schedule.flash import FEW_ROWS, SPLIT_KEYS, has_tensor_cores_for
from ... import requirements as require
from ...axes import normalize_axis
from ...outputs import is_used
from ...registry import ALL_TENSORS, FLOATS, INT64, T1, T2, Int64, M, T, U, op
from ..tensor.indexing import wrapped
from ..tensor.slicing import concat, pad
from .flash_attention import CachePart, flash_attention
from .scores import Reach, Scores, Variant, biased_score, checked_heads, scaled_by


def split_heads(ctx: Lowering, x: Tensor, heads: int | None) -> Tensor:
    """Return x [batch, sequence, heads * size] as [batch, heads, sequence, size], the layout of rank 4."""
    if x.rank == 4:
        return x
    require.rank((3, 4), **{"query, key and value": x})
    if heads is None or heads <= 0:
        subject = "the number of heads (num_heads, or q_num_heads and kv_num_heads)"
        raise require.violation(subject, "be positive for an input of rank 3", "none" if heads is None else heads)
    size = floordiv(x.shape[2], heads)
    require.multiple_of(ctx, x.shape[2], heads, "the last dimension of query, key and value", "the number of heads")
    return permute(ctx, reshape(ctx, x, [x.shape[0], x.shape[1], heads, size]), (0, 2, 1, 3))


def merge_heads(ctx: Lowering, x: Tensor) -> Tensor:
    """Return x [batch, heads, sequence, size] as [batch, sequence, heads * size]."""
    batch, heads, length, size = x.shape
    return reshape(ctx, permute(ctx, x, (0, 2, 1, 3)), [batch, length, heads * size])


def _grouped(ctx: Lowering, x: Tensor, kv_heads: Dim) -> Tensor:
    """Return x [batch, heads, ...] as [batch, kv_heads, heads per kv head, ...]."""
    return reshape(ctx, x, [x.shape[0], kv_heads, floordiv(x.shape[1], kv_heads), *x.shape[2:]])


def _product_of_heads(ctx: Lowering, a: Tensor, b: Tensor) -> Tensor:
    """Return a [batch, heads, m, k] @ b [batch, kv heads, k, n]; adjacent heads of a share a head of b."""
    heads, kv_heads = a.shape[1], b.shape[1]
    if heads == kv_heads:
        return multiply(ctx, a, b)
    shared = ctx.view(b, (*b.shape[:2], 1, *b.shape[2:]), (*b.strides[:2], 0, *b.strides[2:]), b.offset)
    result = multiply(ctx, _grouped(ctx, a, kv_heads), shared)
    return reshape(ctx, result, [a.shape[0], heads, *result.shape[3:]])


def query_positions(ctx: Lowering, rows: Dim, past: Dim, lengths: Tensor | None) -> Tensor:
    """Return the position of each query among the keys, int64 [batch or 1, 1, rows, 1].

    Positions start after ``past`` keys. With ``lengths`` the last query is at the last key of its sequence.
    """

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        if lengths is None:
            return c[2] + maps.dim(past)
        return c[2] + maps.source(lengths).at([c[0]]) - maps.dim(rows)

    return gather_map(ctx, [1 if lengths is None else lengths.shape[0], 1, rows, 1], DType.INT64, element)


def _padded_mask(ctx: Lowering, mask: Tensor, keys: Dim) -> Tensor:
    """Pad the mask to all keys; keys without a column are masked."""
    if mask.rank == 0 or mask.shape[-1] == keys:
        return mask
    require.most_dim(ctx, keys, **{"the number of columns of attn_mask": mask.shape[-1]})
    fill = ctx.constant(np.array(-math.inf, np.float64))
    number = elementwise(ctx, lambda x: s.cast(x, mask.dtype), fill) if mask.dtype.is_float else None
    none = [0] * mask.rank
    return pad(ctx, mask, none, [*none[:-1], keys - mask.shape[-1]], "constant", number)


def after_past(
    ctx: Lowering, past_key: Tensor | None, past_value: Tensor | None, k: Tensor, v: Tensor
) -> tuple[Dim, Tensor, Tensor]:
    """Return the number of past keys, and keys and values with the past prepended."""
    require.all_or_none(past_key=past_key, past_value=past_value)
    if past_key is None or past_value is None:
        return 0, k, v
    return past_key.shape[2], concat(ctx, past_key, k, axis=2), concat(ctx, past_value, v, axis=2)


def _probability(row: Row, score: Scalar, sink: Scalar | None) -> Scalar:
    """Return a row's softmax element for ``score``; 0 if the row is empty or all its scores are -inf.

    ``sink`` is the score of an additional key with the value zero.
    """
    largest = row.reduce(MAX, score)
    if sink is not None:
        largest = s.maximum(largest, sink)
    # An empty row has the maximum -inf and the sum 0.
    largest = s.where(s.equal(largest, -math.inf), 0.0, largest)
    e = s.exp(score - largest)
    total = row.reduce(SUM, e)
    if sink is not None:
        total = total + s.exp(sink - largest)
    return e / s.where(s.equal(total, 0.0), 1.0, total)


@op("Attention", since=23, types={"T1": FLOATS, "T2": FLOATS, "U": ALL_TENSORS})
def attention(
    ctx: Lowering,
    q: T1,
    k: T1,
    v: T2,
    attn_mask: U | None = None,
    past_key: T1 | None = None,
    past_value: T2 | None = None,
    nonpad_kv_seqlen: Int64 | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    left_window_size: int = -1,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = Scores.RAW,
    right_window_size: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
) -> tuple[Tensor, ...]:
    """Return output, present key, present value and scores. A query without visible keys has zeros as output."""
    require.one_of(range(4), qk_matmul_output_mode=qk_matmul_output_mode)
    flat = q.rank == 3
    q, k, v = split_heads(ctx, q, q_num_heads), split_heads(ctx, k, kv_num_heads), split_heads(ctx, v, kv_num_heads)
    past, k, v = after_past(ctx, past_key, past_value, k, v)
    reach = Reach(bool(is_causal), left_window_size, right_window_size)
    lengths = nonpad_kv_seqlen if past_key is None else None
    variant = Variant(
        mask=None if attn_mask is None else _padded_mask(ctx, attn_mask, k.shape[2]),
        position=query_positions(ctx, q.shape[2], past, lengths) if reach.is_limited else None,
        length=None if nonpad_kv_seqlen is None else unsqueeze(ctx, nonpad_kv_seqlen, (1, 2, 3)),
        reach=reach,
        scale=scale,
        softcap=softcap,
        returned=qk_matmul_output_mode,
        precise=softmax_precision == DType.FLOAT64.onnx,
    )
    output, scores = attend(ctx, q, k, v, variant)
    return merge_heads(ctx, output) if flat else output, k, v, scores


MANY_SCORES = 1 << 26
"""Number of scores above which FlashAttention is used, which does not store them (256 MiB of float32)."""


def prefers_flash_attention(ctx: Lowering, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether FlashAttention is faster: on tensor cores, for very many scores, or few queries and many keys.

    Return False on the emulated device, if the option ``sdpa_kernel`` excludes it, for an unknown number of heads, and
    for types other than float32, float16 and bfloat16.
    """
    (batch, heads, rows, _), keys = q.shape, k.shape[2]
    if ctx.device.emulated or not ctx.options.fuses_attention or not isinstance(heads, int):
        return False
    if {q.dtype, k.dtype, v.dtype} - {DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16}:
        return False
    if has_tensor_cores_for(ctx, q, k, v) or hint(batch) * heads * hint(rows) * hint(keys) > MANY_SCORES:
        return True
    return hint(rows) <= FEW_ROWS and hint(keys) >= 2 * SPLIT_KEYS


def attend(ctx: Lowering, q: Tensor, k: Tensor, v: Tensor, variant: Variant) -> tuple[Tensor, Tensor]:
    """Return softmax(q @ k^T * scale) @ v for tensors [batch, heads, sequence, size], and the scores.

    ``variant`` adds mask, softcap and sink; its ``returned`` says which scores the second tensor has. That tensor is
    valid only if the node's fourth output is used.
    """
    k, v = checked_heads(ctx, q, k, v)
    assert ctx.node is not None
    wants_scores = is_used(ctx, 3)
    if not wants_scores and not variant.precise and prefers_flash_attention(ctx, q, k, v):
        flat = flash_attention(ctx, q, CachePart(None, k, k), CachePart(None, v, v), variant)
        return split_heads(ctx, flat, operator.index(q.shape[1])), flat
    # Scale the query, not q @ k: unscaled scores may overflow float16.
    scores = _product_of_heads(ctx, scaled_by(ctx, q, q.shape[3], variant.scale), permute(ctx, k, (0, 1, 3, 2)))
    operands, softcap, kept = {"score": scores} | variant.operands, variant.softcap, variant.returned
    precision = DType.FLOAT64 if variant.precise or q.dtype is DType.FLOAT64 else DType.FLOAT32

    def program(row: Row, *elements: Scalar) -> tuple[Sequence[Scalar], Sequence[Scalar]]:
        at = dict(zip(operands, elements, strict=True))
        capped = s.cast(at["score"], precision)
        if softcap > 0.0:
            capped = softcap * s.tanh(capped / softcap)
        biased = biased_score(row, capped, at, variant.reach)
        probability = _probability(row, biased, s.cast(at["sink"], precision) if "sink" in at else None)
        results = [s.cast(probability, v.dtype)]
        if wants_scores and kept != Scores.RAW:
            results.append(s.cast((capped, biased, probability)[kept - Scores.CAPPED], q.dtype))
        return results, []

    probabilities, *intermediate = row_map(ctx, program, [3], *operands.values())
    output = _product_of_heads(ctx, probabilities, v)
    if output.dtype is not q.dtype:
        output = elementwise(ctx, lambda x: s.cast(x, q.dtype), output)
    return output, (intermediate or [scores])[0]


@op("RotaryEmbedding", since=23, types={"T": FLOATS, "M": INT64})
def rotary_embedding(
    ctx: Lowering,
    x: T,
    cos_cache: T,
    sin_cache: T,
    position_ids: M | None = None,
    *,
    interleaved: int = 0,
    num_heads: int | None = None,
    rotary_embedding_dim: int = 0,
) -> Tensor:
    """Rotate pairs of elements of each head; positions outside the caches rotate to zeros."""
    heads = split_heads(ctx, x, num_heads)
    if x.rank == 3:
        heads = permute(ctx, heads, (0, 2, 1, 3))
    rotated: Dim = rotary_embedding_dim or heads.shape[3]
    sequence = 1 if x.rank == 3 else 2
    result = rotate(ctx, heads, sequence, cos_cache, sin_cache, position_ids, rotated, interleaved=bool(interleaved))
    return ctx.view(result, x.shape)


def rotate(
    ctx: Lowering,
    heads: Tensor,
    sequence: int,
    cos_cache: Tensor,
    sin_cache: Tensor,
    position_ids: Tensor | None,
    rotated: Dim,
    *,
    interleaved: bool,
    offset: int = 0,
    stream: Callable[[Scalar], Scalar] | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Rotate and scale ``rotated`` elements of each head from ``offset`` on; ``sequence`` is the axis of tokens.

    The caches have a row per position, or without ``position_ids`` a row per token. ``position_ids`` are [batch,
    sequence], or with ``stream`` [3, batch, sequence]: ``stream(pair)`` then selects one of a token's three positions.
    """
    require.most_dim(ctx, heads.shape[3], **{"the number of rotated elements": rotated + offset})
    require.multiple_of(ctx, rotated, 2, "the number of rotated elements")
    tokens = (heads.shape[0], heads.shape[sequence])
    if position_ids is not None:
        wanted = tokens if stream is None else (3, *tokens)
        require.shape(ctx, wanted, position_ids=position_ids)
    for cache in (cos_cache, sin_cache):
        rows = tokens if position_ids is None else cos_cache.shape[:1]
        require.shape(ctx, (*rows, floordiv(rotated, 2)), **{"cos_cache and sin_cache": cache})

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        source = maps.source(heads)
        at = c[3] - offset
        half = maps.dim(floordiv(rotated, 2))
        inside = at < maps.dim(rotated)
        if offset:
            inside = inside & (at >= 0)
        if interleaved:
            first, pair, partner = s.equal(at & 1, 0), at >> 1, at ^ 1
        else:
            first = at < half
            pair, partner = s.where(first, at, at - half), s.where(first, at + half, at - half)

        def angle(cache: Tensor) -> Scalar:
            table = maps.source(cache)
            if position_ids is None:
                return s.widen(table.at([c[0], c[sequence], pair], inside))
            token = [c[0], c[sequence]]
            given = maps.source(position_ids).at(token if stream is None else [stream(pair), *token])
            position, known = wrapped(given, table.dim(0))
            return s.widen(table.at([position, pair], inside & known))

        value, other = s.widen(source.at(c)), s.widen(source.at([*c[:3], partner + offset], inside))
        turned = value * angle(cos_cache) + s.where(first, -other, other) * angle(sin_cache)
        turned = turned if scale == 1.0 else turned * scale
        return s.cast(s.where(inside, turned, value), heads.dtype)

    return gather_map(ctx, heads.shape, heads.dtype, element)


@op("TensorScatter", since=24, types={"T": ALL_TENSORS})
def tensor_scatter(
    ctx: Lowering, past_cache: T, update: T, write_indices: Int64 | None = None, *, axis: int = -2, mode: str = "linear"
) -> Tensor:
    """Copy the cache and write ``update`` into it from write_indices[batch] on.

    Elements outside of the cache are skipped, or in mode "circular" written from its start on.
    """
    require.one_of(("linear", "circular"), mode=mode)
    require.rank(past_cache.rank, update=update)
    at = normalize_axis(axis, past_cache.rank)
    for other, (dim, updated) in enumerate(zip(past_cache.shape, update.shape, strict=True)):
        fits = le(updated, dim) if other == at else eq(updated, dim)
        expected = f"have {'at most ' if other == at else ''}{dim!r} elements in dimension {other}, as past_cache has"
        require.holds(ctx, fits, "update", expected, updated)
    require.shape(ctx, past_cache.shape[:1], write_indices=write_indices)
    result = copy_of(ctx, past_cache)

    def move(maps: IndexMap, c: list[Scalar]) -> tuple[Sequence[Scalar], Scalar, Scalar]:
        index, dim = c[at], maps.dim(past_cache.shape[at])
        if write_indices is not None:
            index = index + maps.source(write_indices).at([c[0]])
        if mode == "circular":
            index = s.floor_modulo(index, dim)
        return [*c[:at], index, *c[at + 1 :]], maps.source(update).at(c), (index >= 0) & (index < dim)

    scatter_map(ctx, update.shape, result, move)
    return result
