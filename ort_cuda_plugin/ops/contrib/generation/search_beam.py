"""Beam search: the choice of beams and hypotheses between two decoder steps.

The beams of a prompt are adjacent rows: row ``prompt * beams + beam``. Beams that reach the end become hypotheses.
Each prompt keeps its ``beams`` best hypotheses, best first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ....kernels.elementwise.index_map import IndexMap, gather_map
from ....kernels.scan_sort.scan import scan
from ....kernels.scan_sort.top_k import top_rows
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import Dim
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise, full
from ....program.lowering.reduce import row_map
from ....program.steps.row_program import SUM, Values
from ...folds import in_order
from ...onnx.nn.normalization import log_softmax_row
from ...onnx.tensor.indexing import elements_of_rows, order_of
from .search import LOWEST, Count, goes_on, number_of

_FAR_BEHIND: Final = -1e9
"""Initial log probability of all beams of a prompt but the first, so that the beams diverge."""


@dataclass(frozen=True)
class Beams:
    """State of a beam search: ``scores`` [prompts, beams] of the sequences so far; ``done`` flags finished prompts.

    Hypotheses have scores ``found``, lengths (0: none yet) and padded ``tokens`` [prompts, beams, room].
    """

    scores: Tensor
    done: Tensor
    found: Tensor
    lengths: Tensor
    tokens: Tensor

    @property
    def states(self) -> list[Tensor]:
        return [self.scores, self.done, self.found, self.lengths, self.tokens]


def no_beams(ctx: Lowering, prompts: Dim, beams: Dim, room: Dim, pad: int) -> Beams:
    """Return the beams before the first choice of tokens."""

    def score(_: IndexMap, c: list[Scalar]) -> Scalar:
        return s.where(s.equal(c[1], 0), s.constant(0.0, DType.FLOAT32), _FAR_BEHIND)

    return Beams(
        gather_map(ctx, (prompts, beams), DType.FLOAT32, score),
        full(ctx, (prompts,), False, DType.BOOL),
        full(ctx, (prompts, beams), 0.0, DType.FLOAT32),
        full(ctx, (prompts, beams), 0, DType.INT32),
        full(ctx, (prompts, beams, room), pad, DType.INT32),
    )


def log_probabilities(ctx: Lowering, scores: Tensor) -> Tensor:
    """Return the log-softmax of each row of ``scores``."""
    return row_map(ctx, log_softmax_row, [1], scores)[0]


@dataclass(frozen=True)
class Rules:
    """Attributes of the search. Scores of hypotheses are divided by length ** penalty; None stands for penalty 1."""

    end: int
    pad: int
    early: bool
    penalty: Tensor | None


def _by_length(maps: IndexMap, score: Scalar, length: Scalar, rules: Rules) -> Scalar:
    """Return the length-normalized score of a hypothesis, above -inf, which marks a missing hypothesis."""
    size = s.cast(length, DType.FLOAT32)
    if rules.penalty is not None:
        size = s.power(size, s.cast(maps.number(rules.penalty), DType.FLOAT32))
    return s.maximum(score / size, LOWEST)


@dataclass(frozen=True)
class _Candidates:
    """The best continuations [prompts, 2 * beams] of each prompt, best first.

    ``codes`` holds beam * vocabulary + token; columns after the first 2 * beams, if any, are ignored. ``before`` counts
    preceding candidates that do not end their sequence.
    """

    codes: Tensor
    scores: Tensor
    is_end: Tensor
    before: Tensor
    vocabulary: Dim

    def beam(self, maps: IndexMap, at: list[Scalar]) -> Scalar:
        return s.trunc_divide(maps.source(self.codes).at(at), maps.dim(self.vocabulary))

    def token(self, maps: IndexMap, at: list[Scalar]) -> Scalar:
        return s.cast(s.trunc_modulo(maps.source(self.codes).at(at), maps.dim(self.vocabulary)), DType.INT32)


def _candidates(ctx: Lowering, scores: Tensor, now: Beams, end: int) -> _Candidates:
    """Return the continuations with the best sum of a token's ``scores`` [rows, vocabulary] and its beam's score."""
    prompts, beams = now.scores.shape
    vocabulary = scores.shape[1]

    def total(maps: IndexMap, c: list[Scalar]) -> Scalar:
        size = maps.dim(vocabulary)
        beam, token = s.trunc_divide(c[1], size), s.trunc_modulo(c[1], size)
        row = c[0] * maps.dim(beams) + beam
        return maps.source(scores).at([row, token]) + maps.source(now.scores).at([c[0], beam])

    totals = gather_map(ctx, (prompts, beams * vocabulary), DType.FLOAT32, total)
    best = (prompts, beams * 2)
    if (top := top_rows(ctx, totals, beams * 2, largest=True)) is not None:
        _, codes = top
    else:
        codes = order_of(ctx, totals)

    def is_end(maps: IndexMap, c: list[Scalar]) -> Scalar:
        token = s.trunc_modulo(maps.source(codes).at(c), maps.dim(vocabulary))
        return s.where(s.equal(token, end), s.constant(1, DType.INT32), 0)

    ends = gather_map(ctx, best, DType.INT32, is_end)
    goes_on = elementwise(ctx, lambda x: 1 - x, ends)
    before = scan(ctx, SUM, ctx.materialize(goes_on), 1, exclusive=True, reverse=False)
    return _Candidates(codes, elements_of_rows(ctx, totals, codes, best), ends, before, vocabulary)


def _merged(
    ctx: Lowering, now: Beams, sequences: Tensor, others: Tensor, rows: Tensor, length: Count, pad: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Merge new hypotheses into the current ones; return scores, lengths and tokens of each prompt's best hypotheses.

    ``others`` [prompts, beams] are the scores of new hypotheses, -inf for none; their tokens are the first ``length``
    tokens of the ``rows`` of ``sequences``.
    """
    prompts, beams = now.scores.shape
    room = sequences.shape[1]

    def key(maps: IndexMap, c: list[Scalar]) -> Scalar:
        count = maps.dim(beams)
        is_old = c[1] < count
        is_there = maps.source(now.lengths).at(c, is_old, 0) > 0
        old = s.where(is_there, maps.source(now.found).at(c, is_old, 0.0), -np.inf)
        return s.where(is_old, old, maps.source(others).at([c[0], c[1] - count], c[1] >= count, 0.0))

    keys = gather_map(ctx, (prompts, beams * 2), DType.FLOAT32, key)
    best = order_of(ctx, keys)

    def size(maps: IndexMap, c: list[Scalar]) -> Scalar:
        which, count = maps.source(best).at(c), maps.dim(beams)
        old = maps.source(now.lengths).at([c[0], which], which < count, 0)
        is_new = (which >= count) & (maps.source(keys).at([c[0], which]) >= LOWEST)
        return s.where(is_new, s.cast(number_of(maps, length), DType.INT32), old)

    def token(maps: IndexMap, c: list[Scalar]) -> Scalar:
        which, count = maps.source(best).at(c[:2]), maps.dim(beams)
        is_old = which < count
        old = maps.source(now.tokens).at([c[0], which, c[2]], is_old, pad)
        is_new = (which >= count) & (c[2] < number_of(maps, length))
        row = maps.source(rows).at([c[0], which - count], is_new, 0)
        return s.where(is_old, old, maps.source(sequences).at([row, c[2]], is_new, pad))

    return (
        elements_of_rows(ctx, keys, best, (prompts, beams)),
        gather_map(ctx, (prompts, beams), DType.INT32, size),
        gather_map(ctx, (prompts, beams, room), DType.INT32, token),
    )


@dataclass(frozen=True)
class Step:
    """State after a choice of beams; ``rows`` are the rows that the new beams continue, ``tokens`` the next inputs."""

    goes_on: Tensor
    sequences: Tensor
    tokens: Tensor
    rows: Tensor
    beams: Beams


def best_beams(ctx: Lowering, scores: Tensor, sequences: Tensor, length: Count, now: Beams, rules: Rules) -> Step:
    """Choose the next beams and update the hypotheses; the first ``length`` tokens of ``sequences`` are valid."""
    prompts, beams = now.scores.shape
    room, pad = sequences.shape[1], rules.pad
    candidates = _candidates(ctx, scores, now, rules.end)

    def ended_score(maps: IndexMap, c: list[Scalar]) -> Scalar:
        counts = maps.source(candidates.before).at(c) < s.cast(maps.dim(beams), DType.INT32)
        is_new = s.equal(maps.source(candidates.is_end).at(c), 1) & counts
        is_new = is_new & s.equal(s.cast(maps.source(now.done).at([c[0]]), DType.INT32), 0)
        score = _by_length(maps, maps.source(candidates.scores).at(c), number_of(maps, length), rules)
        return s.where(is_new, score, -np.inf)

    others = gather_map(ctx, (prompts, beams), DType.FLOAT32, ended_score)
    beam = candidates.beam
    rows = gather_map(ctx, (prompts, beams), DType.INT64, lambda maps, c: c[0] * maps.dim(beams) + beam(maps, c))
    found, lengths, tokens = _merged(ctx, now, sequences, others, rows, length, pad)
    done = _done(ctx, now, found, lengths, candidates.scores, length, rules)
    chosen = _chosen(ctx, candidates, now)

    def source(maps: IndexMap, c: list[Scalar]) -> Scalar:
        prompt, beam = s.trunc_divide(c[0], maps.dim(beams)), s.trunc_modulo(c[0], maps.dim(beams))
        which = maps.source(chosen).at([prompt, beam])
        return prompt * maps.dim(beams) + candidates.beam(maps, [prompt, which])

    def next_token(maps: IndexMap, c: list[Scalar]) -> Scalar:
        prompt, beam = s.trunc_divide(c[0], maps.dim(beams)), s.trunc_modulo(c[0], maps.dim(beams))
        token = candidates.token(maps, [prompt, maps.source(chosen).at([prompt, beam])])
        return s.where(maps.source(now.done).at([prompt]), pad, token)

    def next_score(maps: IndexMap, c: list[Scalar]) -> Scalar:
        score = maps.source(candidates.scores).at([c[0], maps.source(chosen).at(c)])
        return s.where(maps.source(now.done).at([c[0]]), 0.0, score)

    sources = gather_map(ctx, (prompts * beams,), DType.INT64, source)
    new = gather_map(ctx, (prompts * beams, 1), DType.INT32, next_token)

    def longer(maps: IndexMap, c: list[Scalar]) -> Scalar:
        old = maps.source(sequences).at([maps.source(sources).at([c[0]]), c[1]])
        return s.where(s.equal(c[1], number_of(maps, length)), maps.source(new).at([c[0], c[1] * 0]), old)

    return Step(
        goes_on(ctx, done, length, room),
        gather_map(ctx, (prompts * beams, room), DType.INT32, longer),
        new,
        sources,
        Beams(gather_map(ctx, (prompts, beams), DType.FLOAT32, next_score), done, found, lengths, tokens),
    )


def _chosen(ctx: Lowering, candidates: _Candidates, now: Beams) -> Tensor:
    """Return [prompts, beams] int64: the indices of the candidates that do not end their sequence, best first."""

    def candidate(maps: IndexMap, c: list[Scalar]) -> Scalar:
        ends, before = maps.source(candidates.is_end), maps.source(candidates.before)
        wanted = s.cast(c[1], DType.INT32)

        def step(totals: Values, elements: Values) -> Values:
            (j,) = elements
            is_it = s.equal(ends.at([c[0], j]), 0) & s.equal(before.at([c[0], j]), wanted)
            return (s.where(is_it, j, totals[0]),)

        search = in_order((s.constant(0, DType.INT64),), step)
        return maps.fold(search, maps.dim(candidates.before.shape[1]), lambda j: (j,))[0]

    return gather_map(ctx, now.scores.shape, DType.INT64, candidate)


def _done(
    ctx: Lowering, now: Beams, found: Tensor, lengths: Tensor, scores: Tensor, length: Count, rules: Rules
) -> Tensor:
    """Return flags of finished prompts.

    A prompt is finished if it has as many hypotheses as beams and, unless ``rules.early``, can get no better ones.

    ONNX Runtime's CPU provider compares with candidates of earlier prompts, and so stops too late or too early.
    """
    beams = now.scores.shape[1]

    def is_done(maps: IndexMap, c: list[Scalar]) -> Scalar:
        last = [c[0], maps.dim(beams) - 1]
        is_full = maps.source(lengths).at(last) > 0
        if not rules.early:
            best = _by_length(maps, maps.source(scores).at([c[0], c[0] * 0]), number_of(maps, length), rules)
            is_full = is_full & (maps.source(found).at(last) >= best)
        return maps.source(now.done).at(c) | is_full

    return gather_map(ctx, now.done.shape, DType.BOOL, is_done)


def results(
    ctx: Lowering, now: Beams, sequences: Tensor, count: Dim, rules: Rules, score_type: DType
) -> tuple[Tensor, Tensor]:
    """Return the best ``count`` hypotheses of each prompt, [prompts, count, room], and their scores.

    The beams of unfinished prompts count as hypotheses of full length.
    """
    prompts, beams = now.scores.shape
    room = sequences.shape[1]

    def score(maps: IndexMap, c: list[Scalar]) -> Scalar:
        own = _by_length(maps, maps.source(now.scores).at(c), maps.dim(room), rules)
        return s.where(maps.source(now.done).at([c[0]]), -np.inf, own)

    others = gather_map(ctx, (prompts, beams), DType.FLOAT32, score)
    rows = gather_map(ctx, (prompts, beams), DType.INT64, lambda maps, c: c[0] * maps.dim(beams) + c[1])
    found, _, tokens = _merged(ctx, now, sequences, others, rows, room, rules.pad)
    shape = (prompts, count)
    best = gather_map(ctx, (*shape, room), DType.INT32, lambda maps, c: maps.source(tokens).at(c))
    scores = gather_map(ctx, shape, score_type, lambda maps, c: s.cast(maps.source(found).at(c), score_type))
    return best, scores
