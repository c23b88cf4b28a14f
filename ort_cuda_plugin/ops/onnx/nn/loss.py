"""Classification losses: negative log likelihood and softmax cross entropy."""

from __future__ import annotations

from ....kernels.elementwise.index_map import IndexMap, gather_map
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.reduce import reduce, row_map
from ....program.steps.row_program import SUM, Row
from ... import requirements as require
from ...registry import FLOATS, INDICES, T, Tind, op
from ..math.elementwise import cast
from .normalization import Outputs, log_softmax_row


def _class_losses(
    ctx: Lowering, x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int | None, *, weights: bool
) -> Tensor:
    """Return -x[n, target, ...] times the weight of the target's class, or with ``weights`` the weight alone.

    Ignored and invalid targets yield 0. 16-bit types yield float32.
    """
    dtype = s.widen(Scalar(x.dtype, "leaf")).dtype

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        scores = maps.source(x)
        label = s.cast(maps.source(target).at(c), DType.INT64)
        counts = (label >= 0) & (label < scores.dim(1))
        if ignore_index is not None:
            counts = counts & s.not_equal(label, ignore_index)
        factor = s.where(counts, s.constant(1.0, dtype), 0.0)
        if weight is not None:
            factor = s.cast(maps.source(weight).at([label], counts), dtype)
        if weights:
            return factor
        return -s.cast(scores.at([c[0], label, *c[1:]], counts), dtype) * factor

    return gather_map(ctx, target.shape, dtype, element)


def class_loss(
    ctx: Lowering, x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int | None, reduction: str
) -> Tensor:
    """Return the negative log likelihood of ``target`` [N, ...] under log probabilities x [N, C, ...].

    ``weight`` [C] defaults to 1. ``reduction`` "mean" divides by the sum of the targets' weights.
    """
    require.least_rank(2, scores=x)
    require.shape(ctx, (x.shape[0], *x.shape[2:]), target=target)
    require.one_of(("none", "sum", "mean"), reduction=reduction)
    require.shape(ctx, x.shape[1:2], weight=weight)
    losses = _class_losses(ctx, x, target, weight, ignore_index, weights=False)
    axes = range(target.rank)
    if reduction == "none":
        return cast(ctx, losses, to=x.dtype.onnx)
    if reduction == "sum":
        return reduce(ctx, lambda row, loss: s.cast(row.reduce(SUM, loss), x.dtype), losses, axes, keepdims=False)
    if weight is None and ignore_index is None:
        return reduce(ctx, lambda row, loss: s.cast(row.mean(loss), x.dtype), losses, axes, keepdims=False)
    weights = _class_losses(ctx, x, target, weight, ignore_index, weights=True)

    def mean(row: Row, loss: Scalar, factor: Scalar) -> Outputs:
        return [], [s.cast(row.reduce(SUM, loss) / row.reduce(SUM, factor), x.dtype)]

    return ctx.view(row_map(ctx, mean, axes, losses, weights)[0], ())


@op("NegativeLogLikelihoodLoss", since=12, types={"T": FLOATS, "Tind": INDICES})
def negative_log_likelihood_loss(
    ctx: Lowering,
    x: T,
    target: Tind,
    weight: T | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> Tensor:
    return class_loss(ctx, x, target, weight, ignore_index, reduction)


@op("SoftmaxCrossEntropyLoss", since=12, types={"T": FLOATS, "Tind": INDICES})
def softmax_cross_entropy_loss(
    ctx: Lowering,
    scores: T,
    labels: Tind,
    weights: T | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> tuple[Tensor, ...]:
    require.least_rank(2, scores=scores)
    log_prob = row_map(ctx, log_softmax_row, [1], scores)[0]
    return class_loss(ctx, log_prob, labels, weights, ignore_index, reduction), log_prob
