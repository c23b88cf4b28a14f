"""Matrix inversion by Gauss-Jordan elimination with partial pivoting, one block per matrix."""

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
def _eliminate(out: Pointer[float], a: Pointer[float], n: int, *, threads: int, real: Any) -> None:
    base = int64(cuda.blockIdx.x) * n * n
    lane = int64(cuda.threadIdx.x)
    for t in range(lane, n * n, threads):
        out[base + t] = real(1) if t // n == t % n else real(0)
    for k in range(n):
        cuda.syncthreads()
        # Every thread searches the whole column, so that all find the same pivot without a reduction.
        row = int64(k)
        largest = real(-1)
        for i in range(k, n):
            size = abs(a[base + i * n + k])
            if size > largest:
                largest = size
                row = int64(i)
        pivot = a[base + row * n + k]
        cuda.syncthreads()
        # Swap row k and the pivot row, and divide the new row k by the pivot.
        for j in range(lane, n, threads):
            held = a[base + k * n + j]
            a[base + k * n + j] = real(a[base + row * n + j] / pivot)
            if row != k:
                a[base + row * n + j] = held
            held = out[base + k * n + j]
            out[base + k * n + j] = real(out[base + row * n + j] / pivot)
            if row != k:
                out[base + row * n + j] = held
        cuda.syncthreads()
        # The loop does not update column k of ``a``: it reads each row's factor there, and later k do not read it.
        for t in range(lane, n * n, threads):
            i = t // n
            j = t % n
            if i != k:
                factor = a[base + i * n + k]
                if j > k:
                    a[base + t] = real(a[base + t] - real(factor * a[base + k * n + j]))
                out[base + t] = real(out[base + t] - real(factor * out[base + k * n + j]))


def inverses(ctx: Lowering, matrices: Tensor) -> Tensor:
    """Return the inverses of contiguous float32 or float64 ``matrices`` [..., n, n].

    The kernel overwrites ``matrices``. The inverse of a singular matrix has infinite or NaN elements.
    """
    *batch, n, _ = matrices.shape
    out = ctx.empty(matrices.shape, matrices.dtype)
    real, name = register_type(matrices.dtype), f"inverse_{matrices.dtype.short}"
    _eliminate.launch(ctx, name, product(batch), THREADS, out=out, a=matrices, n=n, real=real)
    return out
