"""Fourier transforms of real signals: Rfft and Irfft of com.microsoft."""

from __future__ import annotations

from ort_cuda_plugin.ops import requirements as require
from ort_cuda_plugin.ops.onnx.math.signal import discrete_transform
from ort_cuda_plugin.ops.registry import NO_BFLOAT16, contrib_op
from ort_cuda_plugin.program.lowering.context import Lowering, Tensor
from ort_cuda_plugin.program.lowering.views import squeeze, unsqueeze


def _check(rank: int, signal_ndim: int, onesided: int, normalized: int) -> None:
    """Check the attributes; ``rank`` is the rank of the real signal."""
    if onesided != 1 or normalized != 0:
        raise require.unsupported("attribute", "(onesided, normalized)", (onesided, normalized), "(1, 0)")
    require.that(1 <= signal_ndim <= rank, "signal_ndim", f"be in [1, {rank}]", signal_ndim)


@contrib_op("Rfft", T=NO_BFLOAT16)
def rfft(ctx: Lowering, x: Tensor, *, normalized: int = 0, onesided: int = 1, signal_ndim: int = 1) -> Tensor:
    """Transform the last ``signal_ndim`` dimensions; the last one keeps its non-negative frequencies."""
    _check(x.rank, signal_ndim, onesided, normalized)
    result = discrete_transform(ctx, unsqueeze(ctx, x, [x.rank]), None, x.rank - 1, inverse=0, onesided=1)
    for axis in range(x.rank - signal_ndim, x.rank - 1):
        result = discrete_transform(ctx, result, None, axis, inverse=0, onesided=0)
    return result


@contrib_op("Irfft", T=NO_BFLOAT16)
def irfft(ctx: Lowering, x: Tensor, *, normalized: int = 0, onesided: int = 1, signal_ndim: int) -> Tensor:
    """Invert Rfft; the last dimension of the result has an even size."""
    rank = x.rank - 1
    _check(rank, signal_ndim, onesided, normalized)
    require.dim(ctx, -1, 2, X=x)
    for axis in range(rank - signal_ndim, rank - 1):
        x = discrete_transform(ctx, x, None, axis, inverse=1, onesided=0)
    return squeeze(ctx, discrete_transform(ctx, x, None, rank - 1, inverse=1, onesided=1), [rank])
