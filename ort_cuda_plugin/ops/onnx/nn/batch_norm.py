"""BatchNormalization: an affine map in inference, batch statistics in training."""

from __future__ import annotations

from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise
from ....program.lowering.reduce import row_map
from ....program.lowering.views import reshape, unsqueeze
from ....program.steps.row_program import Row
from ... import requirements as require
from ...registry import FLOATS, T1, T2, T, op
from ..math.elementwise import cast

Parameters = tuple[Tensor, Tensor, Tensor, Tensor]
"""(scale, bias, mean, variance)."""


def _folded_batch_norm(ctx: Lowering, parameters: Parameters, epsilon: float) -> tuple[Tensor, Tensor] | None:
    """Return factor and offset per channel, folded from constant parameters; None if they cannot be folded.

    All parameters must be constants of one type, float32 or float64, and of equal static shape.
    """
    scale = parameters[0]
    wide = (DType.FLOAT32, DType.FLOAT64)
    if not all(x.is_constant and x.dtype is scale.dtype and x.shape == scale.shape for x in parameters):
        return None
    if scale.dtype not in wide or not all(isinstance(dim, int) for dim in scale.shape):
        return None
    shape = scale.static_shape
    return (
        ctx.derived("batch_norm_factor", parameters, (epsilon,), shape),
        ctx.derived("batch_norm_offset", parameters, (epsilon,), shape),
    )


def _placed(ctx: Lowering, x: Tensor, y: Tensor, spatial: bool) -> Tensor:
    """Check the parameter y [C], or without ``spatial`` [C, ...], and view it so that it broadcasts to x."""
    shape = x.shape[1 : 2 if spatial else x.rank] or (1,)
    require.shape(ctx, shape, **{"each of scale, B, mean and var": y})
    return unsqueeze(ctx, y, range(y.rank, x.rank - 1))


def _compute_type(*tensors: Tensor) -> DType:
    return DType.FLOAT64 if any(x.dtype is DType.FLOAT64 for x in tensors) else DType.FLOAT32


def batch_norm(ctx: Lowering, x: Tensor, parameters: Parameters, epsilon: float, *, spatial: bool = True) -> Tensor:
    """Return (x - mean) / sqrt(variance + epsilon) * scale + bias, per channel or without ``spatial`` per element."""
    scale, _, mean, _ = parameters
    folded = _folded_batch_norm(ctx, parameters, epsilon)
    if folded is not None and x.dtype is scale.dtype:
        factor, offset = (_placed(ctx, x, value, spatial) for value in folded)
        return elementwise(ctx, lambda x, factor, offset: x * factor + offset, x, factor, offset)
    compute = _compute_type(x, scale, mean)

    def apply(x: Scalar, scale: Scalar, bias: Scalar, mean: Scalar, variance: Scalar) -> Scalar:
        value, scale, bias, mean, variance = (s.cast(a, compute) for a in (x, scale, bias, mean, variance))
        factor = scale / s.sqrt(variance + epsilon)
        return s.cast((value - mean) * factor + bias, x.dtype)

    return elementwise(ctx, apply, x, *(_placed(ctx, x, value, spatial) for value in parameters))


def batch_norm_training(
    ctx: Lowering, x: Tensor, parameters: Parameters, epsilon: float, momentum: float, *, spatial: bool = True
) -> tuple[Tensor, ...]:
    """Return x normalized by batch statistics, the running mean and variance, and the batch's mean and variance.

    Variances are population variances. Running statistics are old * momentum + new * (1 - momentum).
    """
    require.least_rank(2, X=x)
    scale, _, mean, variance = parameters
    compute = _compute_type(x, scale, mean)

    def program(row: Row, x: Scalar, scale: Scalar, bias: Scalar) -> tuple[list[Scalar], list[Scalar]]:
        value = s.cast(x, compute)
        center = row.mean(value)
        difference = value - center
        spread = row.mean(difference * difference)
        normalized = difference / s.sqrt(spread + epsilon) * s.cast(scale, compute) + s.cast(bias, compute)
        return [s.cast(normalized, x.dtype)], [center, spread]

    axes = [0, *range(2, x.rank)] if spatial else [0]
    affine = [_placed(ctx, x, value, spatial) for value in parameters][:2]
    result, *statistics = row_map(ctx, program, axes, x, *affine)
    batch = [reshape(ctx, value, old.shape) for value, old in zip(statistics, (mean, variance), strict=True)]

    def follow(old: Scalar, new: Scalar) -> Scalar:
        return s.cast(s.cast(old, compute) * momentum + new * (1 - momentum), old.dtype)

    running = [elementwise(ctx, follow, old, new) for old, new in zip((mean, variance), batch, strict=True)]
    return result, *running, *(cast(ctx, value, to=mean.dtype.onnx) for value in batch)


@op("BatchNormalization", since=1, types={"T": FLOATS})
def batch_normalization_1(
    ctx: Lowering,
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    *,
    epsilon: float = 1e-5,
    is_test: int = 0,
    momentum: float = 0.9,
    spatial: int = 1,
) -> tuple[Tensor, ...]:
    if is_test:
        return (batch_norm(ctx, x, (scale, bias, mean, variance), epsilon, spatial=bool(spatial)),)
    return batch_norm_training(ctx, x, (scale, bias, mean, variance), epsilon, momentum, spatial=bool(spatial))


@op("BatchNormalization", since=7, types={"T": FLOATS})
def batch_normalization_7(
    ctx: Lowering,
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    spatial: int = 1,
) -> tuple[Tensor, ...]:
    """Normalize a batch; more than one output means training. Version 9 removed the attribute ``spatial``."""
    training = ctx.node is not None and any(output is not None for output in ctx.node.outputs[1:])
    return batch_normalization_1(
        ctx, x, scale, bias, mean, variance,
        epsilon=epsilon, is_test=int(not training), momentum=momentum, spatial=spatial,
    )  # fmt: skip


@op("BatchNormalization", since=14, types={"T": FLOATS, "U": FLOATS}, names={"T1": "T", "T2": "U"})
@op("BatchNormalization", since=15, types={"T": FLOATS, "T1": FLOATS, "T2": FLOATS})
def batch_normalization_14(
    ctx: Lowering,
    x: T,
    scale: T1,
    bias: T1,
    mean: T2,
    variance: T2,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
) -> tuple[Tensor, ...]:
    parameters = (scale, bias, mean, variance)
    if training_mode:
        return batch_norm_training(ctx, x, parameters, epsilon, momentum)[:3]
    return (batch_norm(ctx, x, parameters, epsilon),)
