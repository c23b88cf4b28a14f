"""Attribute post_transform of ai.onnx.ml: softmax, logistic and probit of scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...kernels.elementwise.index_map import IndexMap, gather_map
from ...model.ir import DType
from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar
from ...program.lowering.context import Lowering, Tensor
from ...program.lowering.elementwise import elementwise, elementwise_into
from ...program.lowering.reduce import row_map
from ...program.steps.row_program import MAX, SUM, Row
from .. import requirements as require
from ..layouts import column_of
from ..onnx.math.reduction import argmax
from ..onnx.nn.normalization import softmax_row

POST_TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")
"""Names of post-transforms; TreeEnsemble uses their indices."""
_NEARLY_ZERO = 1e-7  # SOFTMAX_ZERO leaves scores up to this magnitude out of the softmax


def logistic(x: Scalar) -> Scalar:
    """Return 1 / (1 + exp(-x)) without overflow."""
    value = 1 / (1 + s.exp(-s.absolute(x)))
    return s.where(x < 0, 1 - value, value)


def _probit(x: Scalar) -> Scalar:
    """Return ONNX Runtime's approximation of the inverse normal distribution, NaN outside of [0, 1]."""
    x = x * 2 - 1
    logarithm = s.log((1 - x) * (1 + x))
    half = 0.5 * logarithm + 2 / (3.14159 * 0.147)
    root = s.sqrt(s.sqrt(half * half - logarithm * (1 / 0.147)) - half)
    return s.where(x < 0, -root, root) * 1.41421356


def _softmax_zero(row: Row, x: Scalar) -> tuple[list[Scalar], list[Scalar]]:
    """Compute softmax over scores that are not nearly 0, as ONNX's SOFTMAX_ZERO.

    A score near 0 stays near 0: it is multiplied by exp(-largest score) and divided by the softmax's sum.
    """
    largest = row.reduce(MAX, x)
    counts = (x > _NEARLY_ZERO) | (x < -_NEARLY_ZERO)
    zero = s.constant(0, x.dtype)
    e = s.where(counts, s.exp(x - largest), zero)
    total = row.reduce(SUM, e)
    return [s.where(counts, e, x * s.exp(-largest)) / total], []


def post_transform(ctx: Lowering, scores: Tensor, name: str) -> Tensor:
    """Transform float scores [rows, columns]. Raises InvalidModel for an unknown ``name``."""
    require.one_of(POST_TRANSFORMS, post_transform=name)
    if name == "NONE":
        return scores
    if name in ("SOFTMAX", "SOFTMAX_ZERO"):
        return row_map(ctx, softmax_row if name == "SOFTMAX" else _softmax_zero, [1], scores)[0]
    return elementwise(ctx, logistic if name == "LOGISTIC" else _probit, scores)


def regression_transform(ctx: Lowering, scores: Tensor, name: str, targets: int) -> Tensor:
    """Transform scores as ONNX Runtime does: a single score only by PROBIT."""
    return post_transform(ctx, scores, name) if targets > 1 or name == "PROBIT" else scores


def binary_scores(
    ctx: Lowering, first: Tensor, second: Tensor, spread: Tensor | None, transform: str, *, complement: bool
) -> Tensor:
    """Return the transformed scores [rows, 2] of two classes.

    Rows whose flag in ``spread`` is true have only the score ``first``: it belongs to class 1; class 0 gets 1 - first
    with ``complement``, else -first. Only LOGISTIC transforms the scores of these rows.
    """
    is_served, what = spread is None or transform != "PROBIT", "post_transform for one score of two classes"
    require.supported(is_served, "attribute", what, transform, "all but PROBIT")
    columns = ctx.empty((first.shape[0], 2), first.dtype)
    for column, x in enumerate((first, second)):
        elementwise_into(ctx, lambda x: x, column_of(ctx, columns, column), x)
    result = post_transform(ctx, columns, transform)
    if spread is None:
        return result

    def left(both: Scalar, score: Scalar, single: Scalar) -> Scalar:
        if transform == "LOGISTIC":
            return s.where(single, logistic(-score), both)
        return s.where(single, 1 - score if complement else -score, both)

    def right(both: Scalar, score: Scalar, single: Scalar) -> Scalar:
        return s.where(single, logistic(score) if transform == "LOGISTIC" else score, both)

    chosen = ctx.empty(result.shape, result.dtype)
    for column, function in ((0, left), (1, right)):
        target, both = (column_of(ctx, x, column) for x in (chosen, result))
        elementwise_into(ctx, function, target, both, first, spread)
    return chosen


def label_of_best(ctx: Lowering, scores: Tensor, labels: Sequence[int]) -> Tensor:
    """Return the label of the largest score of each row, the first of equal scores."""
    winner, table = argmax(ctx, scores, axis=1), ctx.constant(np.array(labels, np.int64))

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        zero = s.constant(0, DType.INT64)
        return maps.source(table).at([s.maximum(maps.source(winner).at([*c, zero]), zero)])

    return gather_map(ctx, winner.shape[:1], DType.INT64, element)
