"""Whisper's timestamp rules: the logits processor that a search applies last if its input logits_processor is 1.

Tokens from ``first`` on are timestamps. They come in pairs, the end of one segment and the start of the next one, and
do not decrease. A sequence's first timestamp is at most ``first`` + `MOST_INITIAL`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ....kernels.elementwise.index_map import IndexMap, gather_map
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import le, lt
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.reduce import reduce, row_map
from ....program.steps.row_program import MAX, MIN, SUM, Row
from ... import requirements as require
from .search import LOWEST, Count, number_of

MOST_INITIAL: Final = 50
"""Maximum of a sequence's first timestamp, counted from the token ``first``, as in ONNX Runtime."""
_NEVER: Final = 2**30  # above all indices of tokens


@dataclass(frozen=True)
class TimestampTokens:
    """Tokens that the rules name.

    Attributes:
        first: the first timestamp; all greater tokens are timestamps as well.
        end: the end of the text.
        never: tokens that are never chosen.
        after_first: tokens that are not chosen behind a sequence's first timestamp.
    """

    first: int
    end: int
    never: tuple[int, ...]
    after_first: tuple[int, ...]


def timestamp_scores(
    ctx: Lowering, scores: Tensor, sequences: Tensor, length: Count, tokens: TimestampTokens, processor: Tensor | None
) -> Tensor:
    """Apply the rules to log probabilities [rows, vocabulary]; the first ``length`` tokens of ``sequences`` are valid.

    ``processor`` is a tensor of one integer: the rules apply to a Run in which it is 1. None: they always apply.
    """
    vocabulary = scores.shape[1]
    first = "beginning_timestamp_token_id"
    require.holds(ctx, lt(tokens.first, vocabulary), first, "be less than the size of the vocabulary", tokens.first)
    if not isinstance(length, Tensor):
        require.holds(ctx, le(1, length), "a search with timestamps", "have at least one initial token", length)
    ruled = _more_probable(ctx, _without_forbidden(ctx, scores, sequences, length, tokens), tokens.first)
    if processor is None:
        return ruled
    is_on = processor

    def chosen(maps: IndexMap, c: list[Scalar]) -> Scalar:
        applies = s.equal(s.cast(maps.number(is_on), DType.INT64), 1)
        return s.where(applies, maps.source(ruled).at(c), maps.source(scores).at(c))

    return gather_map(ctx, scores.shape, DType.FLOAT32, chosen)


def _without_forbidden(
    ctx: Lowering, scores: Tensor, sequences: Tensor, length: Count, tokens: TimestampTokens
) -> Tensor:
    """Return the scores, with the lowest float32 for tokens that the rules forbid as the next token."""
    rows, room = sequences.shape

    def index_of_timestamp(otherwise: int) -> Tensor:
        """Return [rows, room]: the index where a timestamp is, ``otherwise`` elsewhere."""

        def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
            is_valid = c[1] < number_of(maps, length)
            token = maps.source(sequences).at(c, is_valid, -1)
            return s.where(token >= tokens.first, s.cast(c[1], DType.INT32), otherwise)

        return gather_map(ctx, (rows, room), DType.INT32, element)

    first = reduce(ctx, lambda row, x: row.reduce(MIN, x), index_of_timestamp(_NEVER), [1])
    last = reduce(ctx, lambda row, x: row.reduce(MAX, x), index_of_timestamp(-1), [1])

    def score(maps: IndexMap, c: list[Scalar]) -> Scalar:
        row, token = c
        end = number_of(maps, length) - 1
        zero = s.constant(0, DType.INT64)
        first_at = s.cast(maps.source(first).at([row, zero]), DType.INT64)
        last_at = s.cast(maps.source(last).at([row, zero]), DType.INT64)
        has_any, has_later = last_at >= 0, first_at < end
        was_last = s.equal(last_at, end)
        before = maps.source(sequences).at([row, s.maximum(end - 1, 0)], has_later, tokens.first)
        was_pair = ~has_later | (before >= tokens.first)
        value = s.cast(maps.source(sequences).at([row, s.maximum(last_at, 0)], has_any, 0), DType.INT64)
        least = s.where(was_last & ~was_pair, value, value + 1)
        is_timestamp = token >= tokens.first
        forbidden = s.constant(False, DType.BOOL)
        for one in tokens.never:
            forbidden = forbidden | s.equal(token, one)
        for one in tokens.after_first:
            forbidden = forbidden | (has_later & s.equal(token, one))
        forbidden = forbidden | (was_last & was_pair & is_timestamp)
        forbidden = forbidden | (was_last & ~was_pair & (token < tokens.end))
        forbidden = forbidden | (has_any & is_timestamp & (token < least))
        forbidden = forbidden | (~has_later & (token > tokens.first + MOST_INITIAL))
        return s.where(forbidden, LOWEST, maps.source(scores).at(c))

    return gather_map(ctx, scores.shape, DType.FLOAT32, score)


def _more_probable(ctx: Lowering, scores: Tensor, first: int) -> Tensor:
    """Return the scores, lowest for text tokens if all timestamps together are more probable than each of them."""

    def chosen(row: Row, x: Scalar) -> tuple[list[Scalar], list[Scalar]]:
        is_timestamp = row.index >= first
        largest = row.reduce(MAX, s.where(is_timestamp, x, LOWEST))
        is_counted = is_timestamp & (x > LOWEST)
        total = row.reduce(SUM, s.where(is_counted, s.exp(x - largest), 0.0))
        together = s.where(total > 0.0, s.log(total) + largest, LOWEST)
        text = row.reduce(MAX, s.where(is_timestamp, LOWEST, x))
        return [s.where(~is_timestamp & (together > text), LOWEST, x)], []

    return row_map(ctx, chosen, [1], scores)[0]
