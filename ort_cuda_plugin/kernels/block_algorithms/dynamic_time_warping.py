"""Dynamic time warping: the cheapest path between opposite corners of a cost matrix.

One block computes the costs of paths, an anti-diagonal at a time; elements of an anti-diagonal are independent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...model.ir import DType
from ...program.expressions.symbolic import Dim
from ...program.lowering.context import Lowering, Tensor
from ..codegen.plain_function import plain_kernel

if TYPE_CHECKING:
    from numba import cuda, float32, int8, int32, int64

    from ...compiler.intrinsics import Pointer

THREADS = 256  # threads per block


@plain_kernel
def _find_path(
    path: Pointer[int],
    count: Pointer[int],
    total: Pointer[float],
    ways: Pointer[int],
    cost: Pointer[float],
    rows: int,
    columns: int,
    row_stride: int,
    column_stride: int,
    *,
    threads: int,
) -> None:
    lane = int64(cuda.threadIdx.x)
    width = columns + 1
    # total[r, c] is the cost of the cheapest path to cost element (r - 1, c - 1). Row 0 and column 0 are a border that
    # no path may enter: its costs are the largest float32, except 0 at the start (0, 0).
    for t in range(lane, (rows + 1) * width, threads):
        if t < width or t % width == 0:
            total[t] = float32(0) if t == 0 else float32(3.4028234663852886e38)
    cuda.syncthreads()
    for diagonal in range(2, rows + columns + 1):
        for c in range(max(int64(1), diagonal - rows) + lane, min(columns, int64(diagonal - 1)) + 1, threads):
            at = (diagonal - c) * width + c
            both = total[at - width - 1]
            down = total[at - width]
            right = total[at - 1]
            way = int8(2)
            least = right
            if both < down and both < right:
                way = int8(0)
                least = both
            elif down < both and down < right:
                way = int8(1)
                least = down
            total[at] = float32(least + cost[(diagonal - c - 1) * row_stride + (c - 1) * column_stride])
            ways[at] = way
        cuda.syncthreads()
    if lane == 0:
        r = rows
        c = columns
        steps = int64(0)
        while r > 0 and c > 0:
            path[steps] = int32(r - 1)
            path[rows + columns + steps] = int32(c - 1)
            steps += 1
            way = ways[r * width + c]
            if way < 2:
                r -= 1
            if way != 1:
                c -= 1
        count[0] = steps


def warping_path(ctx: Lowering, cost: Tensor) -> tuple[Tensor, Tensor, Dim]:
    """Return the cheapest path through ``cost``, a float32 matrix; each step goes down, to the right, or diagonally.

    Returns:
        The path from its end to its start, int32 [2, rows + columns]; its number of elements, int64 [1]; an upper bound
        of this number.
    """
    rows, columns = cost.shape
    path, count = ctx.empty((2, rows + columns), DType.INT32), ctx.empty((1,), DType.INT64)
    _find_path.launch(
        ctx,
        "warping_path",
        1,
        THREADS,
        path=path,
        count=count,
        total=ctx.empty((rows + 1, columns + 1), DType.FLOAT32),
        ways=ctx.empty((rows + 1, columns + 1), DType.INT8),
        cost=cost,
        rows=rows,
        columns=columns,
        row_stride=cost.strides[0],
        column_stride=cost.strides[1],
    )
    return path, count, rows + columns - 1
