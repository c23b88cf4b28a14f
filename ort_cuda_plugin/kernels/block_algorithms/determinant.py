"""Determinants by LU factorization with partial pivoting, one block per matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...program.expressions.symbolic import product
from ...program.lowering.context import Lowering, Tensor
from ..codegen.plain_function import plain_kernel
from ..codegen.source import register_type

if TYPE_CHECKING:
    from numba import cuda, int64

    from ...compiler.intrinsics import Pointer

THREADS = 64  # threads per block


@plain_kernel
def _factorize(out: Pointer[float], lu: Pointer[float], n: int, *, threads: int, real: Any) -> None:
    base = int64(cuda.blockIdx.x) * n * n
    lane = int64(cuda.threadIdx.x)
    determinant = real(1)
    for k in range(n):
        # Every thread searches the whole column, so that all find the same pivot without a reduction.
        row = int64(k)
        largest = real(-1)
        for i in range(k, n):
            size = abs(lu[base + i * n + k])
            if size > largest:
                largest = size
                row = int64(i)
        pivot = lu[base + row * n + k]
        determinant = real(determinant * pivot)
        cuda.syncthreads()
        if row != k:
            determinant = -determinant
            for j in range(k + lane, n, threads):
                held = lu[base + k * n + j]
                lu[base + k * n + j] = lu[base + row * n + j]
                lu[base + row * n + j] = held
        cuda.syncthreads()
        if pivot == real(0):
            break
        left = int64(n - k - 1)
        for t in range(lane, left * left, threads):
            i = base + int64(k + 1 + t // left) * n
            j = int64(k + 1 + t % left)
            factor = real(lu[i + k] / pivot)
            lu[i + j] = real(lu[i + j] - real(factor * lu[base + k * n + j]))
        cuda.syncthreads()
    if lane == 0:
        out[cuda.blockIdx.x] = determinant


def determinants(ctx: Lowering, matrices: Tensor) -> Tensor:
    """Return the determinants [...] of contiguous float32 or float64 ``matrices`` [..., n, n].

    The kernel overwrites ``matrices``.
    """
    *batch, n, _ = matrices.shape
    out = ctx.empty(batch, matrices.dtype)
    real, name = register_type(matrices.dtype), f"determinant_{matrices.dtype.short}"
    _factorize.launch(ctx, name, product(batch), THREADS, out=out, lu=matrices, n=n, real=real)
    return out
