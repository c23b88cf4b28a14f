"""Causal convolution of sequences that come in pieces."""

from __future__ import annotations

from ort_cuda_plugin.model.ir import InvalidModel
from ort_cuda_plugin.ops.registry import FLOATS, T, op
from ort_cuda_plugin.ops.slicing import concat
from ort_cuda_plugin.program import scalar as s
from ort_cuda_plugin.program.elementwise import elementwise, full
from ort_cuda_plugin.program.lowering import Lowering, Tensor
from ort_cuda_plugin.program.reduce import row_map
from ort_cuda_plugin.program.row_program import SUM
from ort_cuda_plugin.program.scalar import Scalar
from ort_cuda_plugin.program.symbolic import eq
from ort_cuda_plugin.program.views import squeeze


@op("CausalConvWithState", since=27, types={"T": FLOATS})
def causal_conv_with_state(
    ctx: Lowering, x: T, weight: T, bias: T | None = None, past_state: T | None = None, *, activation: str = "none"
) -> tuple[Tensor, ...]:
    """x [batch, channels, length] after ``past_state`` (zeros without one), each channel with its own filter.

    The filters are windows times ``weight`` [channels, 1, k], summed; the present state is the last k - 1 elements.
    """
    if x.rank != 3 or weight.rank != 3:
        raise InvalidModel(f"CausalConvWithState of ranks {x.rank} and {weight.rank}")
    if activation not in ("none", "silu", "swish"):
        raise InvalidModel(f"CausalConvWithState with the activation {activation!r}")
    batch, channels, length = x.shape
    width = weight.shape[2]
    ctx.require(eq(weight.shape[0], channels), "CausalConvWithState: the filters are not one per channel")
    ctx.require(eq(weight.shape[1], 1), "CausalConvWithState: a filter is of one channel")
    past = full(ctx, (batch, channels, width - 1), 0.0, x.dtype) if past_state is None else past_state
    ctx.require_shape(past, (batch, channels, width - 1), "past of CausalConvWithState")
    padded = concat(ctx, past, x, axis=2)
    outer, inner, step = padded.strides
    windows = ctx.view(padded, (batch, channels, length, width), (outer, inner, step, step), padded.offset)
    total = row_map(ctx, lambda row, x, w: ([], [row.reduce(SUM, s.widen(x) * s.widen(w))]), [3], windows, weight)[0]

    def finish(total: Scalar, *bias: Scalar) -> Scalar:
        value = total + s.cast(bias[0], total.dtype) if bias else total
        return s.cast(value if activation == "none" else value * s.sigmoid(value), x.dtype)

    biases = [] if bias is None else [ctx.view(bias, (*bias.shape, 1), (*bias.strides, 0), bias.offset)]
    output = elementwise(ctx, finish, squeeze(ctx, total, [3]), *biases)
    state = ctx.view(padded, (batch, channels, width - 1), padded.strides, padded.offset + length * step)
    return output, state
