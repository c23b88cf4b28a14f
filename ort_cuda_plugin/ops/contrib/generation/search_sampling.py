"""Top-p sampling of com.microsoft: filters out the least likely tokens, then draws one.

The same seed draws the CPU provider's tokens: the generator is C++'s default engine on Linux, a linear congruential
generator (minstd).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ....kernels.elementwise.index_map import IndexMap, gather_map, scatter_map
from ....kernels.scan_sort.scan import scan
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.reduce import row_map
from ....program.lowering.views import reshape
from ....program.steps.row_program import SUM, Values
from ...folds import in_order
from ...onnx.math.random import drawn_classes
from ...onnx.nn.normalization import softmax_row
from ...onnx.tensor.indexing import elements_of_rows, order_of

_FACTOR: Final = 16807
_MODULUS: Final = 2**31 - 1


@dataclass(frozen=True)
class Filter:
    """Top-p filter: keeps the most probable tokens until their total reaches ``top_p``, sets other scores to ``value``.

    With ``from_best`` probabilities are summed from the most probable token on, which is always kept. Otherwise they
    are summed from the least probable token on, and the ``least`` most probable tokens are always kept.
    """

    top_p: float
    value: float
    least: int
    from_best: bool


def filtered_scores(ctx: Lowering, scores: Tensor, how: Filter) -> Tensor:
    """Apply the filter to float32 ``scores`` [rows, vocabulary]."""
    rows, vocabulary = scores.shape
    order = order_of(ctx, scores, descending=how.from_best)
    (probabilities,) = row_map(ctx, softmax_row, [1], elements_of_rows(ctx, scores, order, scores.shape))
    sums = scan(ctx, SUM, ctx.contiguous(probabilities), 1, exclusive=how.from_best, reverse=False)
    result = ctx.empty((rows, vocabulary), DType.FLOAT32)
    top_p = np.float32(how.top_p)

    def filtered(maps: IndexMap, c: list[Scalar]) -> tuple[list[Scalar], Scalar, None]:
        token, sum_ = maps.source(order).at(c), maps.source(sums).at(c)
        if how.from_best:
            is_out = (c[1] > 0) & (sum_ > float(top_p))
        else:
            is_out = (sum_ <= float(np.float32(1) - top_p)) & (c[1] < maps.dim(vocabulary) - how.least)
        score = maps.source(scores).at([c[0], token])
        return [c[0], token], s.where(is_out, how.value, score), None

    scatter_map(ctx, (rows, vocabulary), result, filtered)
    return result


def first_state(ctx: Lowering, seed: Tensor | None) -> Tensor:
    """Return the generator's int64 state after seeding with the int32 ``seed``, by default 0."""
    given = ctx.constant(np.array([0], np.int32)) if seed is None else seed

    def state(maps: IndexMap, _: list[Scalar]) -> Scalar:
        number = s.cast(maps.number(given), DType.INT64)
        number = s.floor_modulo(s.where(number < 0, number + 2**32, number), _MODULUS)
        return s.where(s.equal(number, 0), 1, number)

    return gather_map(ctx, (), DType.INT64, state)


def _after(maps: IndexMap, state: Scalar, count: Scalar) -> Scalar:
    """Return the generator's state after ``count`` draws from ``state``."""

    def step(totals: Values, _: Values) -> Values:
        return (s.floor_modulo(totals[0] * _FACTOR, _MODULUS),)

    return maps.fold(in_order((state,), step), count, lambda i: (i,))[0]


def drawn_tokens(ctx: Lowering, scores: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token per row; return tokens and the next state. Two draws make a float64, as in C++."""
    rows = scores.shape[0]

    def draw(maps: IndexMap, row: Scalar, _: Scalar) -> Scalar:
        low = _after(maps, maps.number(state), row * 2 + 1)
        high = s.floor_modulo(low * _FACTOR, _MODULUS)
        span = float(_MODULUS - 1)
        return (s.cast(low - 1, DType.FLOAT64) + s.cast(high - 1, DType.FLOAT64) * span) / (span * span)

    tokens = drawn_classes(ctx, scores, 1, DType.INT64, draw)

    def later(maps: IndexMap, _: list[Scalar]) -> Scalar:
        return _after(maps, maps.number(state), maps.dim(rows) * 2)

    return reshape(ctx, tokens, (rows,)), gather_map(ctx, (), DType.INT64, later)
