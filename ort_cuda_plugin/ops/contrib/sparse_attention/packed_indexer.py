"""PackedSparseAttentionIndexer: top-k selection of keys for packed variable-length sequences.

A sequence has a state of fixed capacity: entries, the pooled keys of complete blocks, and a buffer of the tokens after
the last complete block. The device reads and checks the lengths. A sequence whose new entries exceed the capacity, or
whose state contradicts its lengths, keeps its state and selects nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....kernels.attention.kv_cache import carry_over
from ....kernels.elementwise.index_map import IndexMap, gather_map, scatter_map, walk_map
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import Dim, floordiv
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.views import reshape
from ....program.steps.row_program import SUM
from ... import requirements as require
from ...onnx.tensor.indexing import order_of
from ...outputs import is_used
from ...registry import INT32, INT64, UP_TO_FLOAT32, I, M, T, contrib_op
from ..attention.multi_head import split_columns
from ..packed_tokens import PackedTokens, check_capture, int64
from . import indexer_parts as parts

# ---- PackedSparseAttentionIndexer ----


def _check_policy_inputs(policy_mode: str, head_weight_scale: float | None, **inputs: Tensor | None) -> None:
    """Check that policy_mode 'csa' has all ``inputs``, and that 'qsa' has neither inputs nor ``head_weight_scale``."""
    by_tokens = policy_mode == "qsa"
    if all((x is None) == by_tokens for x in inputs.values()) and not (by_tokens and head_weight_scale is not None):
        return
    given = require.named(**inputs, head_weight_scale=head_weight_scale)
    wanted = "be given if policy_mode is 'csa'; with 'qsa' they and head_weight_scale must be left out"
    what = "gate, position_bias, head_weights, position_ids and past_gate_buffer"
    raise require.violation(what, wanted, f"policy_mode = {policy_mode!r} and {given}")


@contrib_op("PackedSparseAttentionIndexer", T=UP_TO_FLOAT32, I=INT64, M=INT32)
def packed_sparse_attention_indexer(
    ctx: Lowering,
    query: T,
    key: T | None,
    query_norm_weight: T,
    key_norm_weight: T,
    cos_cache: T,
    sin_cache: T,
    cumulative_sequence_lengths: M,
    past_sequence_lengths: M,
    gate: T | None,
    position_bias: T | None,
    head_weights: T | None,
    position_ids: I | None,
    past_key_state: T,
    past_kv_buffer: T,
    past_gate_buffer: T | None,
    past_state_lengths: M,
    state_update_capture_count: M | None = None,
    state_update_active: M | None = None,
    *,
    compress_ratio: int,
    epsilon: float = 1e-6,
    head_weight_scale: float | None = None,
    index_topk: int | None = None,
    indexshare_state_policy: str = "default",
    max_output_entries: int = 0,
    policy_mode: str,
    scale: float | None = None,
    state_capacity: int,
    state_update_capacity: int = 0,
    token_budget: int | None = None,
) -> tuple[Tensor, ...]:
    """Return selected indices, padded by -1, their counts, the present states, and perhaps the captured keys.

    The last output exists only if the node uses it and has ``state_update_capture_count``. Buffers keep the past's
    contents behind a sequence's tokens. An invalid sequence captures nothing.
    """
    require.one_type(query=query, past_key_state=past_key_state)
    parts.check_policy(policy_mode, compress_ratio, token_budget, index_topk)
    by_tokens, ratio = policy_mode == "qsa", compress_ratio
    _check_policy_inputs(
        policy_mode, head_weight_scale, gate=gate, position_bias=position_bias, head_weights=head_weights,
        position_ids=position_ids, past_gate_buffer=past_gate_buffer,
    )  # fmt: skip
    require.one_of(("default",), indexshare_state_policy=indexshare_state_policy)
    require.one_of((0,), max_output_entries=max_output_entries)
    check_capture(state_update_capacity, state_update_capture_count)
    require.least(1, state_capacity=state_capacity)
    if not by_tokens:
        require.one_of((0,), state_update_capacity=state_update_capacity)
        require.that(key is not None, "key", "be given if policy_mode is 'csa'", "none")
    if by_tokens and is_used(ctx, 4):
        raise require.violation("the output present_gate_buffer", "be left out if policy_mode is 'qsa'", "an output")
    require.rank(2, query=query)
    require.rank(1, query_norm_weight=query_norm_weight)
    size = query_norm_weight.shape[0]
    if key is None:
        query, key = split_columns(ctx, query, [query.shape[1] - size, size], "the packed query")
    count, heads, columns = query.shape[0], floordiv(query.shape[1], size), size if by_tokens else 2 * size
    require.multiple_of(ctx, query.shape[1], size, "the last dimension of query", "the size of query_norm_weight")
    tokens = PackedTokens(ctx, cumulative_sequence_lengths, count, empty=True)
    room = 2 * ratio - 1
    shapes = [
        (key, (count, columns), "key"),
        (key_norm_weight, (size,), "key_norm_weight"),
        (past_sequence_lengths, (tokens.count,), "past_sequence_lengths"),
        (past_key_state, (tokens.count, state_capacity, size), "past_key_state"),
        (past_kv_buffer, (tokens.count, room, columns), "past_kv_buffer"),
        (past_state_lengths, (tokens.count, 2), "past_state_lengths"),
        (gate, (count, columns), "gate"),
        (position_bias, (ratio, columns), "position_bias"),
        (head_weights, (count, heads), "head_weights"),
        (position_ids, (count,), "position_ids"),
        (past_gate_buffer, (tokens.count, room, columns), "past_gate_buffer"),
        (state_update_capture_count, (tokens.count,), "state_update_capture_count"),
    ]
    for x, shape, what in shapes:
        require.shape(ctx, shape, **{what: x})
    steps = _Steps(ctx, tokens, past_sequence_lengths, past_state_lengths, ratio, state_capacity, by_tokens)
    rotary = parts.Rotary(ctx, cos_cache, sin_cache, tokens.count, leading=by_tokens)
    keys = _Series(past_kv_buffer, key)
    gates = None if gate is None or past_gate_buffer is None else _Series(past_gate_buffer, gate)

    def sequence(maps: IndexMap, c: list[Scalar]) -> Scalar:
        return tokens.locate(maps, c[0])[0]

    def position(maps: IndexMap, c: list[Scalar]) -> Scalar:
        if position_ids is not None:
            return maps.source(position_ids).at(c[:1])
        before = int64(maps.source(past_sequence_lengths).at([sequence(maps, c)]))
        return before + steps.of_token(maps, c[0]).row

    fresh = _pooled(ctx, steps, keys, gates, position_bias, size)
    fresh = parts.normalized(ctx, fresh, key_norm_weight, epsilon)
    fresh = rotary(fresh, lambda maps, c: steps.closes(maps, steps.of_token(maps, c[0]))[1] * ratio, sequence)
    update = None
    if state_update_capture_count is not None and is_used(ctx, 6):
        update = _update(ctx, steps, key, fresh, state_update_capture_count, state_update_active, state_update_capacity)
    state = _with_new(ctx, steps, past_key_state, fresh)
    q = parts.normalized(ctx, reshape(ctx, query, [count, heads, size]), query_norm_weight, epsilon)
    q = rotary(q, position, sequence)
    seen = _seen(ctx, steps, count, position)
    order = order_of(ctx, _scores(ctx, steps, seen, q, state, head_weights, scale, head_weight_scale))
    picked = (token_budget or 0) // ratio if by_tokens else index_topk or 0
    chosen = _chosen(ctx, steps, seen, order, picked)
    # Write present buffers after all reads of past buffers: the caller may bind past and present to one buffer.
    buffers = [_buffer(ctx, steps, x, room) for x in (keys, gates) if x is not None]
    results = [*chosen, state, buffers[0], buffers[-1], steps.lengths()]
    return tuple(results if update is None else [*results, update])


# ---- states ----


@dataclass(frozen=True)
class _Series:
    """Keys or gates of buffered tokens, [sequences, room, columns], and of ``new`` tokens, [tokens, columns]."""

    buffer: Tensor
    new: Tensor


@dataclass(frozen=True)
class _Row:
    """New token number ``row`` of a sequence whose first new token is ``begin``.

    ``counts`` is true if the sequence is valid and has such a token.
    """

    sequence: Scalar
    begin: Scalar
    row: Scalar
    counts: Scalar


class _Steps:
    """Computes how a Run updates the state of each sequence.

    The tokens of a sequence are the buffered ones followed by the new ones, with indices from the buffer's start. In
    mode "csa" the buffer may begin with the last complete block.
    """

    def __init__(
        self, ctx: Lowering, tokens: PackedTokens, past: Tensor, lengths: Tensor, ratio: int, capacity: int, qsa: bool
    ) -> None:
        self.tokens, self.ratio, self.by_tokens = tokens, ratio, qsa

        def before(maps: IndexMap, c: list[Scalar]) -> Scalar:
            given, length = maps.source(lengths), int64(maps.source(past).at([c[0]]))
            entries, waiting = (int64(given.at([c[0], s.constant(i, DType.INT64)])) for i in (0, 1))
            fits = entries + s.trunc_divide(self._pending(maps, c[0], waiting), ratio) <= capacity
            valid = tokens.are_whole(maps) & tokens.are_in_order(maps, c[0]) & (length >= 0) & fits
            valid = valid & (entries >= 0) & (waiting >= 0) & (waiting < (ratio if qsa else 2 * ratio))
            if qsa:
                valid = valid & s.equal(entries * ratio + waiting, length)
            state = s.where(s.equal(c[1], 0), entries, waiting)
            return s.where(s.equal(c[1], 2), int64(valid), state)

        self._before, self._ctx = gather_map(ctx, [tokens.count, 3], DType.INT64, before), ctx

    def _state(self, maps: IndexMap, sequence: Scalar) -> tuple[Scalar, Scalar, Scalar]:
        """Return the numbers of past entries and buffered tokens, and whether the sequence is valid."""
        source = maps.source(self._before)
        entries, waiting, changes = (source.at([sequence, s.constant(i, DType.INT64)]) for i in range(3))
        return entries, waiting, changes > 0

    def _overlap(self, waiting: Scalar) -> Scalar:
        none = s.constant(0, DType.INT64)
        return none if self.by_tokens else s.where(waiting >= self.ratio, self.ratio, none)

    def _pending(self, maps: IndexMap, sequence: Scalar, waiting: Scalar) -> Scalar:
        return waiting - self._overlap(waiting) + self.tokens.range(maps, sequence)[1]

    def of_token(self, maps: IndexMap, token: Scalar) -> _Row:
        sequence, row, _ = self.tokens.row(maps, token)
        return self.row(maps, sequence, row)

    def row(self, maps: IndexMap, sequence: Scalar, row: Scalar) -> _Row:
        begin, count = self.tokens.range(maps, sequence)
        return _Row(sequence, begin, row, self._state(maps, sequence)[2] & (row >= 0) & (row < count))

    def closes(self, maps: IndexMap, row: _Row) -> tuple[Scalar, Scalar]:
        """Return whether a new token completes a block, and the index of the block's entry."""
        entries, waiting, _ = self._state(maps, row.sequence)
        end = waiting - self._overlap(waiting) + row.row + 1
        is_last = row.counts & s.equal(s.trunc_modulo(end, self.ratio), 0)
        return is_last, entries + s.trunc_divide(end, self.ratio) - 1

    def end(self, maps: IndexMap, row: _Row) -> Scalar:
        """Return a new token's index among its sequence's buffered and new tokens, plus 1."""
        return self._state(maps, row.sequence)[1] + row.row + 1

    def at(self, maps: IndexMap, x: _Series, row: _Row, token: Scalar, column: Scalar, when: Scalar) -> Scalar:
        """Return element ``column`` of the row's sequence in ``x`` at index ``token``; 0 unless ``when``."""
        waiting = self._state(maps, row.sequence)[1]
        old = maps.source(x.buffer).at([row.sequence, token, column], when & (token < waiting))
        new = maps.source(x.new).at([row.begin + token - waiting, column], when & (token >= waiting))
        return s.where(token < waiting, old, new)

    def after(self, maps: IndexMap, sequence: Scalar) -> tuple[Scalar, Scalar, Scalar]:
        """Return a sequence's counts of entries and buffered tokens after the Run, and its first buffered token."""
        entries, waiting, changes = self._state(maps, sequence)
        pending = self._pending(maps, sequence, waiting)
        new = s.trunc_divide(pending, self.ratio)
        kept, start = s.trunc_modulo(pending, self.ratio), new * self.ratio
        if not self.by_tokens:
            overlap = self._overlap(waiting)
            kept = s.where(new > 0, kept + self.ratio, pending + overlap)
            start = s.where(new > 0, start + overlap - self.ratio, 0)
        return s.where(changes, entries + new, entries), s.where(changes, kept, waiting), s.where(changes, start, 0)

    def lengths(self) -> Tensor:
        """Return each sequence's present numbers of entries and of buffered tokens: int32 [sequences, 2]."""

        def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
            entries, waiting, _ = self.after(maps, c[0])
            return s.cast(s.where(s.equal(c[1], 0), entries, waiting), DType.INT32)

        return gather_map(self._ctx, [self.tokens.count, 2], DType.INT32, element)


def _pooled(
    ctx: Lowering, steps: _Steps, keys: _Series, gates: _Series | None, bias: Tensor | None, size: Dim
) -> Tensor:
    """Return the pooled key of the block that a token completes, float32 [tokens, size]; other rows are unused."""
    ratio = steps.ratio

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        row = steps.of_token(maps, c[0])
        closes, end = steps.closes(maps, row)[0], steps.end(maps, row)
        if gates is not None and bias is not None:
            series, slots = (keys, gates), s.where(closes, s.constant(2 * ratio, DType.INT64), 0)

            def at(plane: int, token: Scalar, column: Scalar, when: Scalar) -> Scalar:
                return steps.at(maps, series[plane], row, token, column, when)

            return parts.pooled_by_gates(maps, at, bias, end - 2 * ratio, c[1], size, ratio, slots)

        def key(i: Scalar) -> list[Scalar]:
            return [s.widen(steps.at(maps, keys, row, end - ratio + i, c[1], closes))]

        slots = s.where(closes, s.constant(ratio, DType.INT64), 0)
        return maps.fold(SUM, slots, key)[0] / float(ratio)

    return gather_map(ctx, [keys.new.shape[0], size], DType.FLOAT32, element)


def _with_new(ctx: Lowering, steps: _Steps, past: Tensor, fresh: Tensor) -> Tensor:
    """Write new entries into the state; in place if past and present share a buffer."""
    present = ctx.empty(past.shape, past.dtype)
    carry_over(ctx, past, present)

    def move(maps: IndexMap, c: list[Scalar]) -> tuple[list[Scalar], Scalar, Scalar]:
        row = steps.of_token(maps, c[0])
        closes, entry = steps.closes(maps, row)
        return [row.sequence, entry, c[1]], s.cast(maps.source(fresh).at(c), past.dtype), closes

    scatter_map(ctx, fresh.shape, present, move)
    return present


def _buffer(ctx: Lowering, steps: _Steps, x: _Series, room: int) -> Tensor:
    """Return the present buffer, which may share memory with the past: elements only move towards the front."""

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        sequence, slot, column = c
        _, kept, start = steps.after(maps, sequence)
        row = steps.row(maps, sequence, s.constant(0, DType.INT64))
        token = s.where(slot < kept, start + slot, slot)
        waiting = steps.end(maps, row) - 1
        is_new = (slot < kept) & (token >= waiting)
        old = maps.source(x.buffer).at([sequence, token, column], ~is_new)
        new = maps.source(x.new).at([row.begin + token - waiting, column], is_new)
        return s.where(is_new, new, old)

    shape = [x.buffer.shape[0], room, x.buffer.shape[2]]
    return walk_map(ctx, shape, x.buffer.dtype, element, axis=1, over=x.buffer)


def _update(
    ctx: Lowering, steps: _Steps, key: Tensor, fresh: Tensor, wanted: Tensor, active: Tensor | None, capacity: int
) -> Tensor:
    """Capture the first tokens of each sequence: the entry that a token completes, otherwise the token's key.

    ``wanted`` [sequences] is the number of tokens to capture. If ``active`` is given and 0, no token is captured.
    """

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        row = steps.row(maps, c[0], c[1])
        inside = row.counts & (c[1] < int64(maps.source(wanted).at([c[0]])))
        if active is not None:
            inside = inside & s.not_equal(maps.number(active), 0)
        closes, at = steps.closes(maps, row)[0], [row.begin + c[1], c[2]]
        block = s.cast(maps.source(fresh).at(at, inside & closes), key.dtype)
        return s.where(closes, block, maps.source(key).at(at, inside & ~closes))

    return gather_map(ctx, [steps.tokens.count, capacity, key.shape[1]], key.dtype, element)


# ---- selection ----


def _seen(ctx: Lowering, steps: _Steps, count: Dim, position: parts.PositionOf) -> Tensor:
    """Return how many keys each token may attend to: tokens in mode "qsa", compressed entries in mode "csa"."""

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        row, at = steps.of_token(maps, c[0]), position(maps, c)
        if steps.by_tokens:
            return s.where(row.counts, at + 1, 0)
        entries, _, _ = steps.after(maps, row.sequence)
        return s.where(row.counts, s.minimum(parts.complete(at, steps.ratio), entries), 0)

    return gather_map(ctx, [count], DType.INT64, element)


def _scores(
    ctx: Lowering,
    steps: _Steps,
    seen: Tensor,
    q: Tensor,
    keys: Tensor,
    weights: Tensor | None,
    scale: float | None,
    weight_scale: float | None,
) -> Tensor:
    """Return the sum over heads of weight * max(q . k, 0), scaled as in `scores_of_heads`, [tokens, entries].

    The score is -inf for an entry that the token may not attend to.
    """
    count, heads, size = q.shape

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        number = maps.source(seen).at(c[:1])
        is_seen = c[1] < (s.trunc_divide(number, steps.ratio) if steps.by_tokens else number)
        sequence = steps.tokens.locate(maps, c[0])[0]

        def head(h: Scalar) -> list[Scalar]:
            def products(d: Scalar) -> list[Scalar]:
                return [maps.source(q).at([c[0], h, d]) * s.widen(maps.source(keys).at([sequence, c[1], d]))]

            score = s.maximum(maps.fold(SUM, maps.dim(size), products)[0], 0.0)
            return [score if weights is None else score * s.widen(maps.source(weights).at([c[0], h]))]

        total = maps.fold(SUM, s.where(is_seen, maps.dim(heads), 0), head)[0]
        for factor, dim in [(scale, size), (weight_scale, heads)][: 1 if weights is None else 2]:
            total = total / s.sqrt(s.cast(maps.dim(dim), DType.FLOAT32)) if factor is None else total * factor
        return parts.ranked(total, is_seen)

    return gather_map(ctx, [count, keys.shape[1]], DType.FLOAT32, element)


def _chosen(ctx: Lowering, steps: _Steps, seen: Tensor, order: Tensor, picked: int) -> tuple[Tensor, Tensor]:
    """Return each token's selected indices, int32 [tokens, room], padded by -1, and their number, int32 [tokens].

    In mode "csa" they are the ``picked`` best entries. In mode "qsa" they are the tokens of the ``picked`` best blocks,
    followed by the tokens of the incomplete block.
    """
    ratio, count = steps.ratio, order.shape[0]
    room = picked * ratio + ratio - 1 if steps.by_tokens else picked

    def lengths(maps: IndexMap, token: Scalar) -> tuple[Scalar, Scalar, Scalar]:
        """Return (number of ranked indices, number of all indices, first index of the incomplete block)."""
        number = maps.source(seen).at([token])
        if not steps.by_tokens:
            best = s.minimum(number, picked)
            return best, best, number
        whole = s.trunc_divide(number, ratio)
        best = s.minimum(whole, picked) * ratio
        return best, best + s.trunc_modulo(number, ratio), whole * ratio

    def index(maps: IndexMap, c: list[Scalar]) -> Scalar:
        best, total, behind = lengths(maps, c[0])
        each = ratio if steps.by_tokens else 1
        block = maps.source(order).at([c[0], s.trunc_divide(c[1], each)], c[1] < best)
        number = s.where(c[1] < best, block * each + s.trunc_modulo(c[1], each), behind + c[1] - best)
        return s.cast(s.where(c[1] < total, number, -1), DType.INT32)

    def how_many(maps: IndexMap, c: list[Scalar]) -> Scalar:
        return s.cast(lengths(maps, c[0])[1], DType.INT32)

    return gather_map(ctx, [count, room], DType.INT32, index), gather_map(ctx, [count], DType.INT32, how_many)
