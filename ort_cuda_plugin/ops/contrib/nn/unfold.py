"""UnfoldTensor of com.microsoft."""

from __future__ import annotations

from ort_cuda_plugin.ops import requirements as require
from ort_cuda_plugin.ops.axes import normalize_axis
from ort_cuda_plugin.ops.registry import ARITHMETIC, BOOL, contrib_op
from ort_cuda_plugin.program.expressions.symbolic import floordiv
from ort_cuda_plugin.program.lowering.context import Lowering, Tensor


@contrib_op("UnfoldTensor", T=ARITHMETIC | BOOL)
def unfold_tensor(ctx: Lowering, x: Tensor, *, dim: int = -1, size: int, step: int = 1) -> Tensor:
    """Return a view of all windows of ``size`` along ``dim`` with stride ``step``; a new last axis holds a window."""
    require.least(1, size=size, step=step)
    axis = normalize_axis(dim, x.rank)
    require.most_dim(ctx, x.shape[axis], size=size)
    shape, strides = [*x.shape, size], [*x.strides, x.strides[axis]]
    shape[axis] = floordiv(x.shape[axis] - size, step) + 1
    strides[axis] = x.strides[axis] * step
    return ctx.view(x, shape, strides, x.offset)
