"""Attention of com.microsoft with a fixed sparsity pattern: blocks of keys, or a window and global tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ....kernels.elementwise.index_map import IndexMap, gather_map
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import floordiv
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise
from ....program.lowering.views import part, reshape, unsqueeze
from ....program.steps.row_program import MAX
from ... import requirements as require
from ...onnx.attention.attention import attend, merge_heads, split_heads
from ...onnx.attention.scores import Variant
from ...onnx.math.matmul import affine
from ...registry import FLOAT_OR_HALF, INT32, UP_TO_FLOAT32, G, HostTensor, M, T, contrib_op
from ..attention.decoder import grown
from ..attention.multi_head import grouped_heads, split_columns
from ..attention.preparation import Preparation, rotates

# ---- blocks ----


@contrib_op("SparseAttention", T=UP_TO_FLOAT32, M=INT32)
@rotates
def sparse_attention(
    ctx: Lowering,
    query: T,
    key: T | None,
    value: T | None,
    past_key: T,
    past_value: T,
    block_row_indices: M,
    block_col_indices: M,
    total_sequence_length: HostTensor,
    key_total_sequence_lengths: M,
    cos_cache: T | None = None,
    sin_cache: T | None = None,
    *,
    kv_num_heads: int,
    num_heads: int,
    scale: float = 0.0,
    sparse_block_size: int,
    **attributes: Any,
) -> tuple[Tensor, ...]:
    """Return output, present key and present value; a query attends to earlier keys in the blocks of its head's layout.

    Head h has layout h % layouts. New keys begin at index 0 for a prompt; otherwise they are the last keys of a
    sequence.
    """
    require.least(1, sparse_block_size=sparse_block_size)
    q, k, v = grouped_heads(ctx, query, key, value, num_heads, kv_num_heads)
    batch, _, rows, _ = q.shape
    total = ctx.host_number(total_sequence_length, "total_sequence_length")
    require.least_dim(ctx, rows, total_sequence_length=total)
    require.rank(4, past_key=past_key)
    require.most_dim(ctx, past_key.shape[2], total_sequence_length=total)
    require.shape(ctx, (batch,), key_total_sequence_lengths=key_total_sequence_lengths)

    def begin(maps: IndexMap, c: list[Scalar]) -> Scalar:
        last = s.cast(maps.source(key_total_sequence_lengths).at(c), DType.INT64)
        return s.where(s.equal(maps.dim(rows), maps.dim(total)), 0, last - maps.dim(rows))

    first = gather_map(ctx, [batch], DType.INT64, begin)
    positions = gather_map(ctx, [batch, rows], DType.INT64, lambda maps, c: maps.source(first).at([c[0]]) + c[1])
    q, k = Preparation(cos_cache, sin_cache, **attributes)(ctx, q, k, positions)
    present = grown(ctx, (past_key, past_value), (k, v), first, past_key.shape[2])
    blocks = _blocks(ctx, block_row_indices, block_col_indices)
    layouts, count = blocks.shape[:2]
    require.multiple_of(ctx, num_heads, layouts, "num_heads", "the number of layouts in block_row_indices")

    def counts(maps: IndexMap, c: list[Scalar]) -> Scalar:
        position = maps.source(positions).at([c[0], c[2]])
        row, column = (s.trunc_divide(x, sparse_block_size) for x in (position, c[3]))
        # An invalid position is negative: ``c[3] <= position`` excludes it.
        known = (c[3] <= position) & (row < maps.dim(count)) & (column < maps.dim(count))
        return maps.source(blocks).at([s.trunc_modulo(c[1], maps.dim(layouts)), row, column], known)

    keys, values = (part(ctx, x, 2, 0, total) for x in present)
    mask = gather_map(ctx, [batch, num_heads, rows, total], DType.BOOL, counts)
    output, _ = attend(ctx, q, keys, values, Variant(mask=mask, scale=scale or None))
    return merge_heads(ctx, output), *present


def _blocks(ctx: Lowering, starts: Tensor, columns: Tensor) -> Tensor:
    """Expand CSR block indices (row ``starts``, ``columns``) to flags [layouts, blocks, blocks]."""
    require.rank(2, block_row_indices=starts, block_col_indices=columns)
    layouts, count = starts.shape[0], starts.shape[1] - 1
    require.shape(ctx, (layouts, columns.shape[1]), block_col_indices=columns)

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        rows, listed, most = maps.source(starts), maps.source(columns), maps.dim(columns.shape[1])
        begin, end = (s.cast(rows.at([c[0], c[1] + next]), DType.INT64) for next in (0, 1))
        begin, end = s.maximum(begin, 0), s.minimum(end, most)

        def is_here(i: Scalar) -> Sequence[Scalar]:
            return [s.cast(s.equal(s.cast(listed.at([c[0], begin + i]), DType.INT64), c[2]), DType.INT32)]

        return maps.fold(MAX, s.maximum(end - begin, 0), is_here)[0] > 0

    return gather_map(ctx, [layouts, count, count], DType.BOOL, element)


# ---- a window and global tokens ----


@contrib_op("LongformerAttention", T=FLOAT_OR_HALF, G=INT32)
def longformer_attention(
    ctx: Lowering,
    x: T,
    weight: T,
    bias: T,
    mask: T,
    global_weight: T,
    global_bias: T,
    is_global: G,
    *,
    num_heads: int,
    window: int,
) -> Tensor:
    """Attend to tokens at most ``window`` positions away and to global tokens; a global token attends to all tokens.

    Global queries, and the keys and values that they read, have separate weights. The mask is added to scores.
    """
    require.rank(3, input=x)
    require.least(1, num_heads=num_heads)
    require.least(0, window=window)
    hidden = x.shape[2]

    def projection(weights: Tensor, added: Tensor) -> Tensor:
        require.shape(ctx, (hidden, 3 * hidden), weights=weights)
        return affine(ctx, x, weights, added)

    projected = projection(weight, bias), projection(global_weight, global_bias)
    return longformer_of_projections(ctx, projected, mask, is_global, num_heads, window)


def longformer_of_projections(
    ctx: Lowering, projected: tuple[Tensor, Tensor], mask: Tensor, is_global: Tensor, num_heads: int, window: int
) -> Tensor:
    """Compute LongformerAttention of packed Q/K/V; the second projection serves global queries."""
    batch, rows, columns = projected[0].shape
    require.shape(ctx, (batch, rows), mask=mask, **{"global": is_global})

    def heads(x: Tensor) -> list[Tensor]:
        parts = split_columns(ctx, x, [floordiv(columns, 3)] * 3, "weights of LongformerAttention")
        return [split_heads(ctx, y, num_heads) for y in parts]

    added, flags = unsqueeze(ctx, mask, (1, 2)), unsqueeze(ctx, is_global, (1, 2))
    positions = gather_map(ctx, [rows], DType.INT64, lambda maps, c: c[0])

    def nearby(bias: Scalar, flag: Scalar, row: Scalar, column: Scalar) -> Scalar:
        near = (column - row <= window) & (row - column <= window)
        return s.where(near | s.not_equal(flag, 0), s.widen(bias), -math.inf)

    near = elementwise(ctx, nearby, added, flags, reshape(ctx, positions, [rows, 1]), positions)
    q, k, v = heads(projected[0])
    local, _ = attend(ctx, q, k, v, Variant(mask=near))
    q, k, v = heads(projected[1])
    everywhere, _ = attend(ctx, q, k, v, Variant(mask=added))

    def chosen(flag: Scalar, a: Scalar, b: Scalar) -> Scalar:
        return s.where(s.not_equal(flag, 0), a, b)

    of_rows = reshape(ctx, is_global, [batch, 1, rows, 1])
    return merge_heads(ctx, elementwise(ctx, chosen, of_rows, everywhere, local))
