"""SparseAttentionIndexer: top-k selection of keys by block of tokens ("qsa") or by compressed entry ("csa").

All computation is in float32. Equal scores are ordered by index.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ....kernels.elementwise.index_map import IndexMap, gather_map, scatter_map
from ....kernels.scan_sort.scan import scan
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import Dim, floordiv, le, lt, mod, select
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise
from ....program.lowering.multiply import multiply
from ....program.lowering.reduce import reduce
from ....program.lowering.views import part, permute, reshape, unsqueeze
from ....program.steps.row_program import SUM
from ... import requirements as require
from ...onnx.tensor.slicing import concat
from ...registry import INT32, INT64, TB, UP_TO_FLOAT32, HostTensor, I, T, contrib_op
from ..attention.decoder import grown
from ..attention.multi_head import split_columns
from . import indexer_parts as parts


def scores_of_heads(
    ctx: Lowering, q: Tensor, keys: Tensor, weights: Tensor | None, scale: float | None, weight_scale: float | None
) -> Tensor:
    """Return the sum over heads of weight * max(q . k, 0), times ``scale`` and ``weight_scale``, [batch, rows, n].

    q is [batch, rows, heads, size], ``keys`` is [batch, n, size], ``weights`` is [batch, rows, heads]. A ``scale`` of
    None means 1 / sqrt(size). A ``weight_scale`` of None means 1 / sqrt(heads) with ``weights``, and 1 without.
    """
    batch, rows, heads, size = q.shape
    products = multiply(ctx, reshape(ctx, q, [batch, rows * heads, size]), permute(ctx, keys, (0, 2, 1)))
    by_head = reshape(ctx, products, [batch, rows, heads, keys.shape[1]])
    if weights is None:
        by_head = elementwise(ctx, lambda x: s.maximum(x, 0.0), by_head)
    else:
        require.shape(ctx, (batch, rows, heads), head_weights=weights)
        factors_of_heads = unsqueeze(ctx, weights, (3,))
        by_head = elementwise(ctx, lambda x, w: s.maximum(x, 0.0) * s.widen(w), by_head, factors_of_heads)
    total = reduce(ctx, lambda row, x: row.reduce(SUM, x), by_head, [2], keepdims=False)
    factors = [factor for factor in (scale, weight_scale) if factor is not None]
    known = math.prod(factors)
    missing = [dim for dim, given in ((size, scale), (heads, weight_scale)) if given is None]
    if weights is None:
        missing = missing[:1] if scale is None else []
    sizes = ctx.host_tensor(list(missing) or [1], (max(len(missing), 1), 1, 1, 1), DType.INT64)
    for number in range(len(missing)):
        one = part(ctx, sizes, 0, number, 1)
        total = elementwise(ctx, lambda x, n: x / s.sqrt(s.cast(n, DType.FLOAT32)), total, reshape(ctx, one, []))
    return total if known == 1.0 else elementwise(ctx, lambda x: x * known, total)


# ---- SparseAttentionIndexer ----


@contrib_op("SparseAttentionIndexer", T=UP_TO_FLOAT32, TB=INT64, I=INT64, M=INT32)
def sparse_attention_indexer(
    ctx: Lowering,
    query: T,
    key: T | None,
    query_norm_weight: T,
    key_norm_weight: T,
    cos_cache: T,
    sin_cache: T,
    mask: TB | None,
    past_key: T,
    gate: T | None = None,
    position_bias: T | None = None,
    head_weights: T | None = None,
    position_ids: I | None = None,
    past_sequence_length: HostTensor | None = None,
    past_proj_buffer: T | None = None,
    *,
    compress_ratio: int,
    epsilon: float = 1e-6,
    head_weight_scale: float | None = None,
    index_topk: int | None = None,
    policy_mode: str,
    scale: float | None = None,
    token_budget: int | None = None,
) -> tuple[Tensor, ...]:
    """Return selected indices, padded by -1; past and new keys; in mode "csa" also projections not compressed yet."""
    parts.check_policy(policy_mode, compress_ratio, token_budget, index_topk)
    require.rank(3, query=query, past_key=past_key)
    require.rank(1, query_norm_weight=query_norm_weight)
    size = query_norm_weight.shape[0]
    if key is None:
        hidden = query.shape[2] - size
        query, key = split_columns(ctx, query, [hidden, size], "the packed query")
    batch, rows = query.shape[:2]
    heads = floordiv(query.shape[2], size)
    require.multiple_of(ctx, query.shape[2], size, "the last dimension of query", "the size of query_norm_weight")
    require.shape(ctx, (batch, past_key.shape[1], size), past_key=past_key)
    before = past_key.shape[1]
    if past_sequence_length is not None:
        before = ctx.host_number(past_sequence_length, "past_sequence_length")
        require.least_dim(ctx, 0, past_sequence_length=before)
    q = parts.normalized(ctx, reshape(ctx, query, [batch, rows, heads, size]), query_norm_weight, epsilon)

    def appended(new: Tensor) -> Tensor:
        """Append new rows to the state: in place with ``past_sequence_length``, otherwise by concatenation."""
        if past_sequence_length is None:
            return concat(ctx, past_key, new, axis=1)
        require.most_dim(ctx, past_key.shape[1], **{"the number of past and new keys": before + new.shape[1]})
        first = gather_map(ctx, [batch], DType.INT64, lambda maps, c: maps.dim(before))
        past, added = (unsqueeze(ctx, x, (1,)) for x in (past_key, new))
        return reshape(ctx, grown(ctx, [past], [added], first, past_key.shape[1])[0], past_key.shape)

    if policy_mode == "qsa":
        others = {"gate": gate, "position_bias": position_bias, "head_weights": head_weights}
        others |= {"position_ids": position_ids, "past_proj_buffer": past_proj_buffer}
        if unfit := [name for name, x in others.items() if x is not None]:
            raise require.violation(" and ".join(unfit), "be left out if policy_mode is 'qsa'", "tensors")
        assert token_budget is not None
        require.shape(ctx, (batch, rows, size), key=key)
        present = appended(key)
        rotary = parts.Rotary(ctx, cos_cache, sin_cache, batch, leading=True)
        q = rotary(q, lambda maps, c: maps.dim(before) + c[1])
        visible = _Visible(ctx, mask, batch, before, rows)
        pooled = _pooled(ctx, present, visible, compress_ratio)
        pooled = parts.normalized(ctx, pooled, key_norm_weight, epsilon)
        pooled = rotary(pooled, lambda maps, c: visible.token(maps, c[0], c[1] * compress_ratio))
        scores = scores_of_heads(ctx, q, pooled, None, scale, None)
        return _chosen_tokens(ctx, scores, visible, compress_ratio, token_budget), present
    if gate is None or position_bias is None or head_weights is None or position_ids is None or mask is not None:
        given = require.named(
            gate=gate, position_bias=position_bias, head_weights=head_weights, position_ids=position_ids, mask=mask
        )
        wanted = "be given, and mask be left out, if policy_mode is 'csa'"
        raise require.violation("gate, position_bias, head_weights and position_ids", wanted, given)
    assert index_topk is not None
    ids = position_ids
    require.shape(ctx, (batch, rows), position_ids=ids)
    rotary = parts.Rotary(ctx, cos_cache, sin_cache, batch, leading=False)
    q = rotary(q, lambda maps, c: maps.source(ids).at(c[:2]))
    windows = _Windows(ctx, past_proj_buffer, key, gate, position_bias, size, compress_ratio)
    fresh = parts.normalized(ctx, windows.pooled(), key_norm_weight, epsilon)
    fresh = rotary(fresh, lambda maps, c: (maps.dim(before) + c[1]) * compress_ratio)
    present = appended(elementwise(ctx, lambda x: s.cast(x, past_key.dtype), fresh))
    old = elementwise(ctx, s.widen, part(ctx, past_key, 1, 0, before))
    keys = concat(ctx, old, fresh, axis=1)
    scores = scores_of_heads(ctx, q, keys, head_weights, scale, head_weight_scale)

    def limit(maps: IndexMap, c: list[Scalar]) -> Scalar:
        return parts.complete(maps.source(ids).at(c[:2]), compress_ratio)

    order = parts.best_first(ctx, scores, lambda maps, c: c[2] < limit(maps, c))

    def entry(maps: IndexMap, c: list[Scalar]) -> Scalar:
        number = maps.source(order).at(c, c[2] < maps.dim(keys.shape[1]), -1)
        return s.cast(s.where(number < limit(maps, c), number, -1), DType.INT32)

    return gather_map(ctx, [batch, rows, index_topk], DType.INT32, entry), present, windows.left()


# ---- tokens in blocks ----


class _Visible:
    """Finds the tokens that a query may attend to: those up to its own token, except tokens that the mask excludes."""

    def __init__(self, ctx: Lowering, mask: Tensor | None, batch: Dim, before: Dim, rows: Dim) -> None:
        self.before, self.total, self.rows = before, before + rows, rows
        self._order: Tensor | None = None
        self._counts: Tensor | None = None
        if mask is None:
            return
        require.shape(ctx, (batch, self.total), mask=mask)
        flags = elementwise(ctx, lambda x: s.cast(s.not_equal(x, 0), DType.INT64), mask)
        counts = scan(ctx, SUM, flags, 1, exclusive=False, reverse=False)
        order = ctx.empty((batch, self.total), DType.INT64)
        ctx.memset(order, 0)

        def move(maps: IndexMap, c: list[Scalar]) -> tuple[list[Scalar], Scalar, Scalar]:
            return [c[0], maps.source(counts).at(c) - 1], c[1], maps.source(flags).at(c) > 0

        scatter_map(ctx, (batch, self.total), order, move)
        self._order, self._counts = order, counts

    def count(self, maps: IndexMap, batch: Scalar, row: Scalar) -> Scalar:
        """Return the number of tokens that a query may attend to."""
        if self._counts is None:
            return maps.dim(self.before) + row + 1
        return maps.source(self._counts).at([batch, maps.dim(self.before) + row])

    def token(self, maps: IndexMap, batch: Scalar, number: Scalar) -> Scalar:
        """Return the position of the ``number``-th token that queries may attend to."""
        if self._order is None:
            return number
        return maps.source(self._order).at([batch, number], number < maps.dim(self.total))


def _pooled(ctx: Lowering, keys: Tensor, visible: _Visible, ratio: int) -> Tensor:
    """Return the mean key of each block, float32 [batch, blocks, size]."""

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        source = maps.source(keys)

        def key(i: Scalar) -> Sequence[Scalar]:
            token = visible.token(maps, c[0], c[1] * ratio + i)
            return [s.widen(source.at([c[0], token, c[2]]))]

        return maps.fold(SUM, s.constant(ratio, DType.INT64), key)[0] / float(ratio)

    return gather_map(ctx, [keys.shape[0], floordiv(visible.total, ratio), keys.shape[2]], DType.FLOAT32, element)


def _chosen_tokens(ctx: Lowering, scores: Tensor, visible: _Visible, ratio: int, budget: int) -> Tensor:
    """Return each query's selected tokens, int32 [batch, rows, budget + ratio - 1], padded by -1.

    They are the tokens of the best complete blocks, followed by the tokens of the incomplete block.
    """
    batch, rows = scores.shape[:2]

    def complete(maps: IndexMap, c: list[Scalar]) -> Scalar:
        return s.trunc_divide(visible.count(maps, c[0], c[1]), ratio)

    order = parts.best_first(ctx, scores, lambda maps, c: c[2] < complete(maps, c))

    def token(maps: IndexMap, c: list[Scalar]) -> Scalar:
        count, whole = visible.count(maps, c[0], c[1]), complete(maps, c)
        chosen = s.minimum(whole, budget // ratio) * ratio
        is_chosen = c[2] < chosen
        block = maps.source(order).at([c[0], c[1], s.trunc_divide(c[2], ratio)], is_chosen)
        behind = whole * ratio + c[2] - chosen
        number = s.where(is_chosen, block * ratio + s.trunc_modulo(c[2], ratio), behind)
        known = number < count
        return s.cast(s.where(known, visible.token(maps, c[0], number), -1), DType.INT32)

    return gather_map(ctx, [batch, rows, budget + ratio - 1], DType.INT32, token)


# ---- compressed entries ----


class _Windows:
    """Pools windows of ``ratio`` tokens; the tokens are the buffered ones followed by the new ones.

    The buffer may begin with the last complete window, since the next entry pools it together with the next window.
    """

    def __init__(
        self, ctx: Lowering, buffer: Tensor | None, key: Tensor, gate: Tensor, bias: Tensor, size: Dim, ratio: int
    ) -> None:
        batch, rows = key.shape[:2]
        require.shape(ctx, (batch, rows, 2 * size), key=key, gate=gate)
        require.shape(ctx, (ratio, 2 * size), position_bias=bias)
        self._ctx, self._buffer, self._new, self._bias = ctx, buffer, (key, gate), bias
        self._batch, self._size, self._ratio = batch, size, ratio
        self._waiting: Dim = 0
        if buffer is not None:
            self._waiting = buffer.shape[2] if buffer.rank == 4 else 0
            require.shape(ctx, (2, batch, self._waiting, 2 * size), past_proj_buffer=buffer)
            require.most_dim(ctx, 2 * ratio - 1, **{"the number of tokens in past_proj_buffer": self._waiting})
        self._overlap = select(le(ratio, self._waiting), ratio, 0)
        pending = self._waiting - self._overlap + rows
        self.count = floordiv(pending, ratio)
        closes = lt(0, self.count)
        self._kept = select(closes, mod(pending, ratio) + ratio, self._waiting + rows)
        self._start = select(closes, self._overlap + (self.count - 1) * ratio, 0)

    def _at(self, maps: IndexMap, plane: int, batch: Scalar, token: Scalar, at: Scalar, when: Scalar) -> Scalar:
        """Return element ``at`` of the key (plane 0) or gate (1) of ``token``; tokens count from the buffer's start."""
        waiting = maps.dim(self._waiting)
        new = maps.source(self._new[plane]).at([batch, token - waiting, at], when & (token >= waiting))
        if self._buffer is None:
            return new
        old = maps.source(self._buffer)
        in_buffer = when & (token < waiting)
        return s.where(token < waiting, old.at([s.constant(plane, DType.INT64), batch, token, at], in_buffer), new)

    def pooled(self) -> Tensor:
        """Return, per window, the softmax(gate)-weighted mean of its keys and the previous window's keys."""
        ratio, size = self._ratio, self._size

        def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
            begin = maps.dim(self._overlap) + (c[1] - 1) * ratio

            def at(plane: int, token: Scalar, column: Scalar, when: Scalar) -> Scalar:
                return self._at(maps, plane, c[0], token, column, when)

            slots = s.constant(2 * ratio, DType.INT64)
            return parts.pooled_by_gates(maps, at, self._bias, begin, c[2], size, ratio, slots)

        return gather_map(self._ctx, [self._batch, self.count, size], DType.FLOAT32, element)

    def left(self) -> Tensor:
        """Return the projections that are buffered for the next Run, as ``past_proj_buffer``."""

        def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
            token, always = maps.dim(self._start) + c[2], s.constant(True, DType.BOOL)
            key, gate = (self._at(maps, plane, c[1], token, c[3], always) for plane in (0, 1))
            return s.where(s.equal(c[0], 0), key, gate)

        return gather_map(self._ctx, [2, self._batch, self._kept, 2 * self._size], self._new[0].dtype, element)
