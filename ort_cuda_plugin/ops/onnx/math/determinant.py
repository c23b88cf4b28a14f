"""Det and Inverse."""

from __future__ import annotations

from ort_cuda_plugin.kernels.block_algorithms.determinant import determinants
from ort_cuda_plugin.kernels.block_algorithms.inverse import inverses
from ort_cuda_plugin.model.ir import DType
from ort_cuda_plugin.ops import requirements as require
from ort_cuda_plugin.ops.registry import FLOATS, NO_BFLOAT16, contrib_op, op
from ort_cuda_plugin.program.expressions import scalar as s
from ort_cuda_plugin.program.expressions.symbolic import eq
from ort_cuda_plugin.program.lowering.context import Lowering, Tensor
from ort_cuda_plugin.program.lowering.elementwise import elementwise, elementwise_into


def _matrices(ctx: Lowering, x: Tensor) -> Tensor:
    """Return a copy of x in the accumulation type, which a kernel may overwrite."""
    require.least_rank(2, X=x)
    require.holds(ctx, eq(x.shape[-1], x.shape[-2]), "X", "be square matrices", list(x.shape))
    matrices = ctx.empty(x.shape, s.accumulation_type(x.dtype))
    elementwise_into(ctx, lambda a: s.cast(a, matrices.dtype), matrices, x)
    return matrices


def _rounded(ctx: Lowering, result: Tensor, dtype: DType) -> Tensor:
    return result if result.dtype is dtype else elementwise(ctx, lambda a: s.cast(a, dtype), result)


@op("Det", since=11, types={"T": FLOATS})
def det(ctx: Lowering, x: Tensor) -> Tensor:
    return _rounded(ctx, determinants(ctx, _matrices(ctx, x)), x.dtype)


@contrib_op("Inverse", T=NO_BFLOAT16)
def inverse(ctx: Lowering, x: Tensor) -> Tensor:
    return _rounded(ctx, inverses(ctx, _matrices(ctx, x)), x.dtype)
