"""Det."""

from __future__ import annotations

from ort_cuda_plugin.kernels.determinant import determinants
from ort_cuda_plugin.model.ir import InvalidModel
from ort_cuda_plugin.ops.registry import FLOATS, op
from ort_cuda_plugin.program import scalar as s
from ort_cuda_plugin.program.elementwise import elementwise, elementwise_into
from ort_cuda_plugin.program.lowering import Lowering, Tensor
from ort_cuda_plugin.program.symbolic import eq


@op("Det", since=11, types={"T": FLOATS})
def det(ctx: Lowering, x: Tensor) -> Tensor:
    if x.rank < 2:
        raise InvalidModel(f"Det of rank {x.rank}")
    ctx.require(eq(x.shape[-1], x.shape[-2]), "Det of matrices that are not square")
    real = s.accumulation_type(x.dtype)
    matrices = ctx.empty(x.shape, real)
    elementwise_into(ctx, lambda a: s.cast(a, real), matrices, x)
    result = determinants(ctx, matrices)
    return result if real is x.dtype else elementwise(ctx, lambda a: s.cast(a, x.dtype), result)
