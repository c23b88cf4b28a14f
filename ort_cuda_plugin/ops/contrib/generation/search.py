"""Token search, shared part: logits processing, the choice of tokens, and the inputs of the next decoder step.

The functions work on batches of rows: scores [rows, vocabulary], and the sequences so far, whose first ``length``
tokens are valid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from ....kernels.elementwise.index_map import IndexMap, gather_map, scatter_map
from ....kernels.scan_sort.scan import scan
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import Dim, sym_max
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise, full
from ....program.lowering.reduce import reduce
from ....program.lowering.views import reshape, unsqueeze
from ....program.steps.row_program import MIN, SUM
from ... import requirements as require

LOWEST: Final = float(np.finfo(np.float32).min)
"""Score of a token that must not be chosen."""

Count: TypeAlias = "Dim | Tensor"
"""A number of tokens: a size, or a tensor of one integer, which only the device knows."""


def number_of(maps: IndexMap, count: Count) -> Scalar:
    """Return the number as int64."""
    return s.cast(maps.number(count), DType.INT64) if isinstance(count, Tensor) else maps.dim(count)


@dataclass(frozen=True)
class Rules:
    """Attributes of the logits processors that apply before a token is chosen."""

    end: int
    ngram: int = 0
    temperature: float = 1.0
    presence_penalty: float = 0.0


@dataclass(frozen=True)
class RuleInputs:
    """The optional inputs of a search that change scores; ``prefix_mask`` applies to the first token only."""

    min_length: Tensor | None = None
    penalty: Tensor | None = None
    mask: Tensor | None = None
    prefix_mask: Tensor | None = None
    presence: Tensor | None = None


def prompt_inputs(ctx: Lowering, ids: Tensor, pad: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mask of prompt tokens (1: not padding), their positions, and their number [rows, 1]; all int32."""
    counted = elementwise(ctx, lambda x: s.cast(s.not_equal(x, pad), DType.INT32), ids)
    before = scan(ctx, SUM, ctx.materialize(counted), 1, exclusive=True, reverse=False)
    positions = elementwise(ctx, lambda before, x: s.where(s.equal(x, 0), 0, before), before, counted)
    return counted, positions, reduce(ctx, lambda row, x: row.reduce(SUM, x), counted, [1])


def mask_of_leading_padding(ctx: Lowering, ids: Tensor, pad: int) -> Tensor:
    """Return [rows, length] int32: 0 for leading padding, 1 from the first other token on.

    Later pad tokens count as tokens, since the end token may equal the pad token.
    """
    counted = elementwise(ctx, lambda x: s.cast(s.not_equal(x, pad), DType.INT32), ids)
    so_far = scan(ctx, SUM, ctx.materialize(counted), 1, exclusive=False, reverse=False)
    return elementwise(ctx, lambda x: s.minimum(x, 1), so_far)


def last_scores(ctx: Lowering, logits: Tensor) -> Tensor:
    """Return the scores of the last position of each row, as float32."""
    batch, positions, vocabulary = logits.shape
    at_last = logits.offset + (positions - 1) * logits.strides[1]
    last = ctx.view(logits, (batch, vocabulary), (logits.strides[0], logits.strides[2]), at_last)
    return elementwise(ctx, lambda x: s.cast(x, DType.FLOAT32), last)


def _marked(
    ctx: Lowering,
    rows: Dim,
    vocabulary: Dim,
    count: Dim,
    token: Callable[[IndexMap, Scalar, Scalar], tuple[Scalar, Scalar | None]],
) -> Tensor:
    """Return flags [rows, vocabulary] of the tokens that ``token(maps, row, i)`` returns with a condition.

    ``i`` is less than ``count``. A condition of None counts as true. Tokens outside the vocabulary are ignored.
    """
    marks = full(ctx, (rows, vocabulary), False, DType.BOOL)

    def mark(maps: IndexMap, c: list[Scalar]) -> tuple[list[Scalar], Scalar, Scalar]:
        found, when = token(maps, c[0], c[1])
        known = (found >= 0) & (found < maps.dim(vocabulary))
        return [c[0], s.cast(found, DType.INT64)], s.constant(True, DType.BOOL), known if when is None else known & when

    scatter_map(ctx, (rows, count), marks, mark)
    return marks


def _seen(ctx: Lowering, sequences: Tensor, length: Count, vocabulary: Dim) -> Tensor:
    def token(maps: IndexMap, row: Scalar, i: Scalar) -> tuple[Scalar, Scalar | None]:
        found = s.cast(maps.source(sequences).at([row, i]), DType.INT64)
        return found, i < number_of(maps, length) if isinstance(length, Tensor) else None

    count = sequences.shape[1] if isinstance(length, Tensor) else length
    return _marked(ctx, sequences.shape[0], vocabulary, count, token)


def _after_repeated_ngram(ctx: Lowering, sequences: Tensor, length: Count, vocabulary: Dim, size: int) -> Tensor:
    """Return flags of the tokens that followed an earlier occurrence of the last ``size`` - 1 tokens."""

    def token(maps: IndexMap, row: Scalar, i: Scalar) -> tuple[Scalar, Scalar]:
        source, end = maps.source(sequences), number_of(maps, length)
        inside = i < end - (size - 1) if isinstance(length, Tensor) else None
        same = s.constant(True, DType.BOOL) if inside is None else inside
        for k in range(size - 1):
            earlier, recent = ([row, index] for index in (i + k, end - (size - 1 - k)))
            same = same & s.equal(source.at(earlier, inside), source.at(recent, inside))
        return s.cast(source.at([row, i + (size - 1)], inside), DType.INT64), same

    count = sequences.shape[1] if isinstance(length, Tensor) else sym_max(length - (size - 1), 0)
    return _marked(ctx, sequences.shape[0], vocabulary, count, token)


def ruled_scores(
    ctx: Lowering, scores: Tensor, sequences: Tensor, length: Count, rules: Rules, given: RuleInputs
) -> Tensor:
    """Apply the logits processors to ``scores`` [rows, vocabulary], in ONNX Runtime's order."""
    rows, vocabulary = scores.shape
    if given.penalty is not None:

        def penalized(x: Scalar, is_seen: Scalar, by: Scalar) -> Scalar:
            by = s.cast(by, DType.FLOAT32)
            return s.where(is_seen, s.where(x < 0, x * by, x / by), x)

        seen = _seen(ctx, sequences, length, vocabulary)
        scores = elementwise(ctx, penalized, scores, seen, reshape(ctx, given.penalty, (1, 1)))
    if rules.ngram > 0:
        blocked = _after_repeated_ngram(ctx, sequences, length, vocabulary, rules.ngram)
        scores = elementwise(ctx, lambda x, is_blocked: s.where(is_blocked, LOWEST, x), scores, blocked)
    require.shape(ctx, (vocabulary,), vocab_mask=given.mask)
    if given.prefix_mask is not None:
        require.shape(ctx, (given.prefix_mask.shape[0], vocabulary), prefix_vocab_mask=given.prefix_mask)
    for mask in (given.mask, given.prefix_mask):
        if mask is not None:
            scores = elementwise(ctx, lambda x, keep: s.where(s.equal(keep, 0), LOWEST, x), scores, mask)
    if given.min_length is not None:
        least = given.min_length

        def kept(maps: IndexMap, c: list[Scalar]) -> Scalar:
            is_early = number_of(maps, length) < s.cast(maps.number(least), DType.INT64)
            return s.where(is_early & s.equal(c[1], rules.end), LOWEST, maps.source(scores).at(c))

        scores = gather_map(ctx, (rows, vocabulary), DType.FLOAT32, kept)
    if rules.temperature > 0 and rules.temperature != 1:
        scores = elementwise(ctx, lambda x: x / rules.temperature, scores)
    if given.presence is not None and rules.presence_penalty:
        penalty_of = rules.presence_penalty
        require.shape(ctx, (rows, vocabulary), presence_mask=given.presence)
        scores = elementwise(ctx, lambda x, m: x - s.cast(m, DType.FLOAT32) * penalty_of, scores, given.presence)
    return scores


@dataclass(frozen=True)
class Found:
    """State after each row got a token: the flag "continue", all tokens, flags of finished rows, next input tokens."""

    goes_on: Tensor
    sequences: Tensor
    ended: Tensor
    tokens: Tensor


def append_tokens(
    ctx: Lowering, tokens: Tensor, sequences: Tensor, length: Count, ended: Tensor | None, end: int, pad: int
) -> Found:
    """Write ``tokens`` [rows] at index ``length`` of ``sequences``.

    Rows that finished before (flags ``ended``; None: no row) and rows whose token is ``end`` get padding instead.
    """
    rows, room = sequences.shape

    if ended is None:
        over = elementwise(ctx, lambda token: s.equal(token, end), tokens)
    else:
        over = elementwise(ctx, lambda token, before: before | s.equal(token, end), tokens, ended)
    chosen = elementwise(ctx, lambda token, x: s.where(x, pad, s.cast(token, DType.INT32)), tokens, over)

    def placed(maps: IndexMap, c: list[Scalar]) -> Scalar:
        new = maps.source(chosen).at([c[0]])
        return s.where(s.equal(c[1], number_of(maps, length)), new, maps.source(sequences).at(c))

    result = gather_map(ctx, (rows, room), DType.INT32, placed)
    return Found(goes_on(ctx, over, length, room), result, over, unsqueeze(ctx, chosen, (1,)))


def goes_on(ctx: Lowering, over: Tensor, length: Count, room: Dim) -> Tensor:
    """Return the flag "continue": there is room for another token, and not all flags in ``over`` are set."""
    all_over = reduce(ctx, lambda row, x: row.reduce(MIN, s.cast(x, DType.UINT8)), over, [0], keepdims=False)

    def more(maps: IndexMap, _: list[Scalar]) -> Scalar:
        return s.equal(maps.number(all_over), 0) & (number_of(maps, length) + 1 < maps.dim(room))

    return gather_map(ctx, (), DType.BOOL, more)


def padded(ctx: Lowering, x: Tensor, width: Dim, value: int) -> Tensor:
    """Return ``x`` [rows, length], each row padded with ``value`` to ``width`` elements, int32."""

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        return maps.source(x).at(c, c[1] < maps.dim(x.shape[1]), value)

    return gather_map(ctx, (x.shape[0], width), DType.INT32, element)


def repeated_rows(ctx: Lowering, x: Tensor, times: Dim) -> Tensor:
    """Return ``x`` [rows, ...] with each row repeated ``times`` in succession."""

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        return maps.source(x).at([s.trunc_divide(c[0], maps.dim(times)), *c[1:]])

    return gather_map(ctx, (x.shape[0] * times, *x.shape[1:]), x.dtype, element)
