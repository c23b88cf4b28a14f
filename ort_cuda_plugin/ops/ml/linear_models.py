"""Linear models and support vector machines of ai.onnx.ml."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...model.ir import DType
from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar
from ...program.lowering.context import Lowering, Tensor
from ...program.lowering.elementwise import elementwise
from ...program.lowering.multiply import multiply
from ...program.lowering.reduce import reduce
from ...program.lowering.views import permute, unsqueeze
from ...program.steps.row_program import SUM
from .. import requirements as require
from ..onnx.math.matmul import affine
from ..registry import T1, T, op
from .features import DOMAIN, NUMBERS, Floats, real
from .post_transform import POST_TRANSFORMS, binary_scores, label_of_best, regression_transform

Labels = Sequence[int]


def _matrix(ctx: Lowering, x: Tensor, features: int) -> Tensor:
    """Return x as float32 [rows, features]; a vector is one row."""
    require.rank((1, 2), X=x)
    x = unsqueeze(ctx, x, [0]) if x.rank == 1 else x
    require.dim(ctx, 1, features, X=x)
    return elementwise(ctx, lambda value: s.cast(real(value), DType.FLOAT32), x)


def _scores(ctx: Lowering, x: Tensor, coefficients: Floats, intercepts: Floats, targets: int) -> Tensor:
    """Return x @ coefficients + intercepts, [rows, targets]."""
    require.least(1, targets=targets)
    require.multiple_count(targets, coefficients=coefficients)
    require.count((0, targets), intercepts=intercepts)
    weights = ctx.constant(np.array(coefficients, np.float32).reshape(targets, -1))
    bias = ctx.constant(np.array(intercepts, np.float32)) if intercepts else None
    return affine(ctx, _matrix(ctx, x, weights.static_shape[1]), permute(ctx, weights, (1, 0)), bias)


@op("LinearRegressor", domain=DOMAIN, since=1, types={"T": NUMBERS})
def linear_regressor(
    ctx: Lowering,
    x: T,
    *,
    coefficients: tuple[float, ...] = (),
    intercepts: tuple[float, ...] = (),
    post_transform: str = "NONE",
    targets: int = 1,
) -> Tensor:
    require.one_of(POST_TRANSFORMS, post_transform=post_transform)
    scores = _scores(ctx, x, coefficients, intercepts, targets)
    return regression_transform(ctx, scores, post_transform, targets)


@op("LinearClassifier", domain=DOMAIN, since=1, types={"T1": NUMBERS})
def linear_classifier(
    ctx: Lowering,
    x: T1,
    *,
    classlabels_ints: tuple[int, ...] = (),
    classlabels_strings: tuple[str, ...] = (),
    coefficients: tuple[float, ...],
    intercepts: tuple[float, ...] = (),
    multi_class: int = 0,
    post_transform: str = "NONE",
) -> tuple[Tensor, ...]:
    require.supported(not classlabels_strings, "dtype", "classlabels_strings", "given", "classlabels_ints")
    require.one_of(POST_TRANSFORMS, post_transform=post_transform)
    targets = len(intercepts)
    scores = _scores(ctx, x, coefficients, intercepts, targets)
    if targets > 1:
        count = len(classlabels_ints)
        expected = f"have a label for each of {targets} intercepts"
        require.that(count >= targets, "classlabels_ints", expected, f"{count} labels")
        transformed = regression_transform(ctx, scores, post_transform, targets)
        return label_of_best(ctx, scores, classlabels_ints), transformed
    found = f"{len(classlabels_ints)} labels and {targets} intercepts"
    require.that(len(classlabels_ints) == 2, "classlabels_ints", "have two labels for at most one intercept", found)
    score = ctx.view(scores, scores.shape[:1])
    answers = [ctx.constant(np.array(label, np.int64)) for label in classlabels_ints]
    label = elementwise(ctx, lambda score, no, yes: s.where(score > 0, yes, no), score, *answers)
    always = ctx.constant(np.array(True))
    return label, binary_scores(ctx, score, score, always, post_transform, complement=True)


def _similarities(ctx: Lowering, x: Tensor, vectors: Floats, count: int, kernel: str, parameters: Floats) -> Tensor:
    """Return the kernel function of each row of x and each of ``count`` support vectors, float32 [rows, count]."""
    require.one_of(("LINEAR", "POLY", "RBF", "SIGMOID"), kernel_type=kernel)
    require.least(1, n_supports=count)
    require.multiple_count(count, support_vectors=vectors)
    expected = "have the 3 entries gamma, coef0 and degree, or no entry"
    require.that(len(parameters) in (0, 3), "kernel_params", expected, len(parameters))
    gamma, offset, degree = parameters or (0.0, 0.0, 0.0)
    table = ctx.constant(np.array(vectors, np.float32).reshape(count, -1))
    x = _matrix(ctx, x, table.static_shape[1])
    if kernel == "RBF":
        differences = elementwise(ctx, lambda a, b: a - b, unsqueeze(ctx, x, [1]), table)
        distances = reduce(ctx, lambda row, d: row.reduce(SUM, d * d), differences, [2], keepdims=False)
        return elementwise(ctx, lambda distance: s.exp(distance * -gamma), distances)

    def finish(total: Scalar) -> Scalar:
        if kernel == "LINEAR":
            return total
        inner = total * gamma + offset
        return s.power(inner, degree) if kernel == "POLY" else s.tanh(inner)

    return multiply(ctx, x, permute(ctx, table, (1, 0)), finish=finish)


@op("SVMRegressor", domain=DOMAIN, since=1, types={"T": NUMBERS})
def svm_regressor(
    ctx: Lowering,
    x: T,
    *,
    coefficients: tuple[float, ...] = (),
    kernel_params: tuple[float, ...] = (),
    kernel_type: str = "LINEAR",
    n_supports: int = 0,
    one_class: int = 0,
    post_transform: str = "NONE",
    rho: tuple[float, ...] = (),
    support_vectors: tuple[float, ...] = (),
) -> Tensor:
    """Compute regression scores; without support vectors the model is linear.

    ``post_transform`` does not change the score, as in ONNX Runtime.
    """
    require.one_of(POST_TRANSFORMS, post_transform=post_transform)
    require.that(len(rho) > 0, "rho", "be given", "none")
    if n_supports > 0:
        count = len(coefficients)
        require.that(count == n_supports, "coefficients", f"have n_supports = {n_supports} entries", count)
        x = _similarities(ctx, x, support_vectors, n_supports, kernel_type, kernel_params)
    scores = _scores(ctx, x, coefficients, rho[:1], 1)
    if one_class:
        return elementwise(ctx, lambda score: s.where(score > 0, s.constant(1, DType.FLOAT32), -1.0), scores)
    return scores
