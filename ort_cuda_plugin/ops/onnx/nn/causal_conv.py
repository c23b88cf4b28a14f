"""Causal depthwise convolution with a state: the last inputs of the previous Run."""

from __future__ import annotations

from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import Dim
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise, full
from ....program.lowering.reduce import row_map
from ....program.lowering.views import part, squeeze, unsqueeze
from ....program.steps.row_program import SUM
from ... import requirements as require
from ...registry import FLOATS, T, op
from ..tensor.slicing import concat


@op("CausalConvWithState", since=27, types={"T": FLOATS})
def causal_conv_with_state(
    ctx: Lowering, x: T, weight: T, bias: T | None = None, past_state: T | None = None, *, activation: str = "none"
) -> tuple[Tensor, ...]:
    """Return output and present state, the last elements of past and input."""
    output, padded = causal_convolution(ctx, x, weight, bias, past_state, activation, 1)
    length = x.shape[2]
    return output, part(ctx, padded, 2, length, padded.shape[2] - length)


def check_convolution(activation: str, dilation: int) -> None:
    """Check the attributes of a causal convolution."""
    require.one_of(("none", "silu", "swish"), activation=activation)
    require.least(1, dilation=dilation)


def filter_length(ctx: Lowering, weight: Tensor, bias: Tensor | None, channels: Dim) -> Dim:
    """Check ``weight`` [channels, 1, k] and ``bias`` [channels]; return k."""
    require.rank(3, weight=weight)
    require.least_dim(ctx, 1, **{"the length of a filter": weight.shape[2]})
    require.shape(ctx, (channels, 1, weight.shape[2]), weight=weight)
    require.shape(ctx, (channels,), bias=bias)
    return weight.shape[2]


def causal_convolution(
    ctx: Lowering, x: Tensor, weight: Tensor, bias: Tensor | None, past: Tensor | None, activation: str, dilation: int
) -> tuple[Tensor, Tensor]:
    """Return the depthwise convolution of x [batch, channels, length], and the concatenation of past and x.

    ``weight`` is [channels, 1, k]. The past has (k - 1) * ``dilation`` elements per channel, by default zeros.
    """
    check_convolution(activation, dilation)
    require.rank(3, input=x)
    batch, channels, length = x.shape
    width = filter_length(ctx, weight, bias, channels)
    reach = (width - 1) * dilation
    if past is None:
        past = full(ctx, (batch, channels, reach), 0.0, x.dtype)
    require.shape(ctx, (batch, channels, reach), past_state=past)
    padded = concat(ctx, past, x, axis=2)
    outer, inner, step = padded.strides
    windows = ctx.view(padded, (batch, channels, length, width), (outer, inner, step, step * dilation), padded.offset)
    total = row_map(ctx, lambda row, x, w: ([], [row.reduce(SUM, s.widen(x) * s.widen(w))]), [3], windows, weight)[0]

    def finish(total: Scalar, *bias: Scalar) -> Scalar:
        value = total + s.cast(bias[0], total.dtype) if bias else total
        return s.cast(value if activation == "none" else value * s.sigmoid(value), x.dtype)

    biases = [] if bias is None else [unsqueeze(ctx, bias, [1])]
    return elementwise(ctx, finish, squeeze(ctx, total, [3]), *biases), padded
