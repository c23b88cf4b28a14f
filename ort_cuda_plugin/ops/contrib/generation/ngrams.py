"""N-gram operators of com.microsoft: hashes of token ids, and blocking of repeated n-grams."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ....kernels.elementwise.index_map import IndexMap, gather_map, scatter_map, walk_map
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import copy_of
from ....program.steps.row_program import Reduction, Values
from ... import requirements as require
from ...folds import in_order
from ...outputs import is_used
from ...registry import FLOAT32, INDICES, INT32, INT64, Int32, M, S, T, Tid, attributes_of, contrib_op
from ..packed_tokens import PackedTokens, check_capture


@contrib_op("NGramRepeatBlock", Tid=INT64, T=FLOAT32)
def ngram_repeat_block(ctx: Lowering, input_ids: Tid, scores: T, *, ngram_size: int) -> Tensor:
    """Return the scores, with -inf for each token that would repeat an n-gram of its sequence.

    Token ids outside the vocabulary are ignored.
    """
    require.least(1, ngram_size=ngram_size)
    require.rank(2, input_ids=input_ids, scores=scores)
    batch, length = input_ids.shape
    require.shape(ctx, (batch, scores.shape[1]), scores=scores)
    result = copy_of(ctx, scores)

    def block(maps: IndexMap, c: list[Scalar]) -> tuple[list[Scalar], Scalar, Scalar]:
        ids, row, last = maps.source(input_ids), c[0], c[1]
        before, end = maps.dim(ngram_size - 1), maps.dim(length)
        fits = last >= before

        def differs(k: Scalar) -> list[Scalar]:
            seen = ids.at([row, last - before + k], fits)
            newest = ids.at([row, end - before + k], fits)
            return [s.cast(s.not_equal(seen, newest), DType.INT64)]

        (differences,) = maps.fold(_ANY, before, differs)
        token = ids.at([row, last])
        blocked = fits & s.equal(differences, 0) & (token >= 0) & (token < maps.dim(scores.shape[1]))
        return [row, token], s.constant(-math.inf, DType.FLOAT32), blocked

    scatter_map(ctx, (batch, length), result, block)
    return result


_ANY = Reduction(lambda dtypes: (s.constant(0, DType.INT64),), lambda a, b: (a[0] | b[0],), lambda a, b: (a[0] | b[0],))

Token = Callable[[Scalar], tuple[Scalar, Scalar]]
"""Maps a distance back from the current token to the token there, and whether it belongs to an earlier text."""


class _Hashes:
    """Attributes, checked tables and hash function of NGramHashMapping and VarlenNGramHashMapping."""

    def __init__(
        self, ctx: Lowering, multipliers: Tensor, vocab_sizes: Tensor, head_offsets: Tensor | None,
        eos_token_id: Tensor | None, *, max_ngram_size: int, n_head_per_ngram: int, pad_id: int, reset_on_eos: int = 0,
    ) -> None:  # fmt: skip
        require.least(2, max_ngram_size=max_ngram_size)
        require.least(1, n_head_per_ngram=n_head_per_ngram)
        self.dtype = multipliers.dtype
        limit = 1 << (8 * self.dtype.itemsize - 1)
        require.that(-limit <= pad_id < limit, "pad_id", f"fit {self.dtype.short}", pad_id)
        self.window = max_ngram_size - 1
        """Number of tokens before the current one in the longest n-gram."""
        self.heads = self.window * n_head_per_ngram
        self._heads_each, self._pad = n_head_per_ngram, pad_id
        self._multipliers, self._vocabularies = multipliers, vocab_sizes
        self._offsets, self._end_of_text = head_offsets, eos_token_id
        self._resets = bool(reset_on_eos) and eos_token_id is not None
        require.rank(1, multipliers=multipliers)
        require.least_dim(ctx, max_ngram_size, **{"the number of multipliers": multipliers.shape[0]})
        require.shape(ctx, (self.heads,), vocab_sizes=vocab_sizes, head_offsets=head_offsets)

    def pad(self) -> Scalar:
        return s.constant(self._pad, self.dtype)

    def missing(self, maps: IndexMap) -> Scalar:
        """Return the id that stands for tokens before the start of a text."""
        return self.pad() if self._end_of_text is None else maps.number(self._end_of_text)

    def history(self, maps: IndexMap, past: Tensor | None, row: Scalar, t: Scalar, when: Scalar) -> Scalar:
        """Return the id at position t < 0 of the past; `missing` without a past, or if ``when`` is false."""
        missing = self.missing(maps)
        return missing if past is None else maps.source(past).at([row, t + self.window], when, missing)

    def hash(self, maps: IndexMap, head: Scalar, token: Token) -> Scalar:
        """Return the hash of the n-gram that ends at the current token."""
        missing = self.missing(maps)

        def element(back: Scalar) -> list[Scalar]:
            value, ends = token(back)
            if self._resets:
                ends = ends | ((back > 0) & s.equal(value, missing))
            return [value, ends, maps.source(self._multipliers).at([back])]

        def step(totals: Values, elements: Values) -> Values:
            (mix, ended), (value, ends, multiplier) = totals, elements
            ended = ended | ends
            return mix ^ (s.where(ended, missing, value) * multiplier), ended

        start = (s.constant(0, self.dtype), s.constant(False, DType.BOOL))
        count = s.trunc_divide(head, maps.dim(self._heads_each)) + 2
        mix, _ = maps.fold(in_order(start, step), count, element)
        size = maps.source(self._vocabularies).at([head])
        result = s.where(size > 0, s.floor_modulo(mix, size), 0)
        return result if self._offsets is None else result + maps.source(self._offsets).at([head])


@contrib_op("NGramHashMapping", M=INDICES)
@attributes_of(_Hashes)
def ngram_hash_mapping(
    ctx: Lowering,
    input_ids: M,
    multipliers: M,
    vocab_sizes: M,
    past_ids: M | None = None,
    head_offsets: M | None = None,
    eos_token_id: M | None = None,
    segment_ids: Int32 | None = None,
    **attributes: Any,
) -> tuple[Tensor, ...]:
    """Return hashes [batch, length, heads] and the last max_ngram_size - 1 ids. An empty vocabulary hashes to 0."""
    hashes = _Hashes(ctx, multipliers, vocab_sizes, head_offsets, eos_token_id, **attributes)
    require.rank(2, input_ids=input_ids)
    batch, length = input_ids.shape
    require.shape(ctx, (batch, hashes.window), past_ids=past_ids)
    require.shape(ctx, input_ids.shape, segment_ids=segment_ids)

    def id_at(maps: IndexMap, row: Scalar, t: Scalar) -> Scalar:
        """Return the id at position t, which is negative in the past."""
        past = hashes.history(maps, past_ids, row, t, t < 0)
        return s.where(t < 0, past, maps.source(input_ids).at([row, t], t >= 0))

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        row, at, head = c

        def token(back: Scalar) -> tuple[Scalar, Scalar]:
            t = at - back
            ends = s.constant(False, DType.BOOL)
            if segment_ids is not None:
                ids, inside = maps.source(segment_ids), (back > 0) & (t >= 0)
                ends = inside & s.not_equal(ids.at([row, t], inside), ids.at([row, t + 1], inside))
            return id_at(maps, row, t), ends

        return hashes.hash(maps, head, token)

    result = gather_map(ctx, [batch, length, hashes.heads], hashes.dtype, element)

    def newest(maps: IndexMap, c: list[Scalar]) -> Scalar:
        return id_at(maps, c[0], maps.dim(length) - hashes.window + c[1])

    # Write the present ids after the last read of the past ids: both may share a buffer.
    return result, walk_map(ctx, [batch, hashes.window], hashes.dtype, newest, over=past_ids)


@contrib_op("VarlenNGramHashMapping", M=INDICES, S=INT32)
@attributes_of(_Hashes)
def varlen_ngram_hash_mapping(
    ctx: Lowering,
    input_ids: M,
    multipliers: M,
    vocab_sizes: M,
    cumulative_sequence_length: S,
    past_ids: M | None = None,
    head_offsets: M | None = None,
    eos_token_id: M | None = None,
    segment_ids: Int32 | None = None,
    past_segment_ids: S | None = None,
    capture_count: S | None = None,
    *,
    state_update_capacity: int = 0,
    **attributes: Any,
) -> tuple[Tensor, ...]:
    """Return hashes [tokens, heads], present_ids, and if requested present_segment_ids and state_update."""
    hashes = _Hashes(ctx, multipliers, vocab_sizes, head_offsets, eos_token_id, **attributes)
    check_capture(state_update_capacity, capture_count)
    require.rank(1, input_ids=input_ids)
    if past_segment_ids is not None or is_used(ctx, 2):
        require.given(segment_ids, "segment_ids", "be given if the node has past_segment_ids or present_segment_ids")
    packed = PackedTokens(ctx, cumulative_sequence_length, input_ids.shape[0])
    window = hashes.window
    require.shape(ctx, (packed.count, window), past_ids=past_ids, past_segment_ids=past_segment_ids)
    require.shape(ctx, input_ids.shape, segment_ids=segment_ids)
    require.shape(ctx, (packed.count,), capture_count=capture_count)

    def id_at(maps: IndexMap, row: Scalar, begin: Scalar, t: Scalar) -> Scalar:
        """Return the id at position t of a sequence that begins at ``begin``; t is negative in the past."""
        past = hashes.history(maps, past_ids, row, t, t < 0)
        return s.where(t < 0, past, maps.source(input_ids).at([begin + t], t >= 0))

    def segment_at(maps: IndexMap, row: Scalar, begin: Scalar, t: Scalar, when: Scalar) -> Scalar:
        """Return the segment at position t if ``when``; without past segments, t < 0 has the first token's segment."""
        assert segment_ids is not None
        now = maps.source(segment_ids)
        if past_segment_ids is None:
            return now.at([begin + s.maximum(t, 0)], when)
        past = maps.source(past_segment_ids).at([row, t + window], when & (t < 0))
        return s.where(t < 0, past, now.at([begin + t], when & (t >= 0)))

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        row, begin, at = packed.locate(maps, c[0])

        def token(back: Scalar) -> tuple[Scalar, Scalar]:
            t = at - back
            ends = s.constant(False, DType.BOOL)
            if segment_ids is not None:
                behind = back > 0
                here, after = (segment_at(maps, row, begin, p, behind) for p in (t, t + 1))
                ends = behind & s.not_equal(here, after)
            return id_at(maps, row, begin, t), ends

        return hashes.hash(maps, c[1], token)

    result = gather_map(ctx, [input_ids.shape[0], hashes.heads], hashes.dtype, element)

    update = None
    if capture_count is not None:

        def captured(maps: IndexMap, c: list[Scalar]) -> Scalar:
            row, slot, column = c
            begin, count = packed.range(maps, row)
            inside = (slot < count) & (slot < s.cast(maps.source(capture_count).at([row]), DType.INT64))
            t = slot + 1 - window + column
            past = hashes.history(maps, past_ids, row, t, inside & (t < 0))
            value = s.where(t < 0, past, maps.source(input_ids).at([begin + t], inside & (t >= 0)))
            return s.where(inside, value, hashes.pad())

        update = gather_map(ctx, [packed.count, state_update_capacity, window], hashes.dtype, captured)

    def newest(maps: IndexMap, c: list[Scalar]) -> Scalar:
        begin, count = packed.range(maps, c[0])
        return id_at(maps, c[0], begin, count - window + c[1])

    # Write the present ids after the last read of the past ids: both may share a buffer.
    results = [result, walk_map(ctx, [packed.count, window], hashes.dtype, newest, over=past_ids)]
    if segment_ids is not None:

        def newest_segment(maps: IndexMap, c: list[Scalar]) -> Scalar:
            begin, count = packed.range(maps, c[0])
            return segment_at(maps, c[0], begin, count - window + c[1], count > 0)

        results.append(walk_map(ctx, [packed.count, window], DType.INT32, newest_segment, over=past_segment_ids))
    elif update is not None:
        results.append(results[-1])  # placeholder for the unused output before state_update
    return tuple(results if update is None else [*results, update])
