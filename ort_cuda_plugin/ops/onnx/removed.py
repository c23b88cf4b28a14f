"""Removed ONNX operators, which ONNX Runtime still loads in models of old opsets."""

from __future__ import annotations

import numpy as np

from ...program.expressions import scalar as s
from ...program.lowering.context import Lowering, Tensor
from ...program.lowering.elementwise import elementwise
from ...program.lowering.views import unsqueeze
from .. import requirements as require
from ..registry import FLOATS, op
from .math.activation import softplus
from .math.elementwise import unary
from .nn.normalization import standardized
from .tensor.slicing import slice_axis

unary("Affine", 1, lambda x, alpha, beta: alpha * x + beta, until=9, alpha=1.0, beta=0.0)
unary("Scale", 1, lambda x, scale: scale * x, until=9, scale=1.0)
unary("ScaledTanh", 1, lambda x, alpha, beta: alpha * s.tanh(beta * x), until=9, alpha=1.0, beta=1.0)
unary("ParametricSoftplus", 1, lambda x, alpha, beta: alpha * softplus(beta * x), until=9, alpha=1.0, beta=1.0)


@op("ImageScaler", since=1, until=9, types={"T": FLOATS})
def image_scaler(ctx: Lowering, x: Tensor, *, bias: tuple[float, ...], scale: float = 1.0) -> Tensor:
    require.rank(4, input=x)
    require.dim(ctx, 1, len(bias), input=x)
    offsets = unsqueeze(ctx, ctx.constant(np.array(bias, np.float32)), (1, 2))
    return elementwise(ctx, lambda a, b: s.cast(s.cast(a, b.dtype) * scale + b, a.dtype), x, offsets)


@op("Crop", since=1, until=9, types={"T": FLOATS})
def crop(ctx: Lowering, x: Tensor, *, border: tuple[int, ...], scale: tuple[int, ...] = ()) -> Tensor:
    """Crop by ``border`` (left, top, right, bottom); ``scale`` (height, width) replaces right and bottom."""
    require.rank(4, input=x)
    require.that(len(border) == 4 and min(border) >= 0, "border", "be four non-negative sizes", list(border))
    valid = len(scale) in (0, 2) and min(scale, default=0) >= 0
    require.that(valid, "scale", "be two non-negative sizes or none", list(scale))
    left, top, right, bottom = border
    for axis, first, removed in ((2, top, bottom), (3, left, right)):
        last = first + scale[axis - 2] if scale else x.shape[axis] - removed
        require.least_dim(ctx, 0, **{"each dimension of the result": last - first})
        require.most_dim(ctx, x.shape[axis], **{"the end of the result": last})
        x = slice_axis(ctx, x, axis, first, last)
    return x


@op("MeanVarianceNormalization", since=1, until=8, types={"T": FLOATS})
def mean_variance_normalization_1(
    ctx: Lowering, x: Tensor, *, across_channels: int = 0, normalize_variance: int = 1
) -> Tensor:
    require.rank(4, input=x)
    return standardized(ctx, x, (0, 1, 2, 3) if across_channels else (0, 2, 3), scale=bool(normalize_variance))
