"""Stable sorting of rows, and prefix counts for compaction, with one block per row.

`merge_sort` and `block_scan` have the kernels for long rows on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...model.ir import DType
from ...program.expressions.scalar import cast
from ...program.expressions.symbolic import hint, product
from ...program.lowering.context import Lowering, Tensor
from ...program.lowering.elementwise import elementwise
from ...program.lowering.reduce import reduce
from ...program.steps.row_program import SUM
from ..codegen.plain_function import Lines, plain_kernel
from .merge_sort import head, item, merge_rows, merge_step, merges
from .scan import scan

if TYPE_CHECKING:
    from numba import cuda, int64

    from ...compiler.intrinsics import Pointer

THREADS = 256  # threads per block
MANY = 4096
"""Number of flags above which a GPU counts them with `scan`, by several blocks."""


@plain_kernel
def _sort(
    orders: Pointer[int],
    heads: Pointer[int],
    x: Pointer[float],
    rows: int,
    n: int,
    m: int,
    *,
    threads: int,
    merge: Lines,
    find_head: Lines,
) -> None:
    row = int64(cuda.blockIdx.x)
    lane = int64(cuda.threadIdx.x)
    result = row * n
    data = result * m
    # Passes alternate between the two buffers of ``orders``. Start in the buffer from which the last pass ends in the
    # first buffer.
    source = result
    target = result + rows * n
    width = int64(1)
    while width < n:
        width *= 2
        source, target = target, source
    for i in range(lane, n, threads):
        orders[source + i] = i
    cuda.syncthreads()
    width = int64(1)
    while width < n:
        for i in range(lane, n, threads):
            merge(data, i)
        cuda.syncthreads()
        source, target = target, source
        width *= 2
    for i in range(lane, n, threads):
        find_head(result, i)


_compare = """
for q in range({count}):
    a = {a}
    b = {b}
    if {a_less}:
        less = True
        break
    if {b_less}:
        break
"""


def _less(a: str, b: str, dtype: DType, descending: bool) -> str:
    """Return the source of the test that a precedes b. NaN is larger than all numbers, so that the order is total."""
    if descending:
        a, b = b, a
    return f"{a} < {b} or ({a} == {a} and {b} != {b})" if dtype.is_float else f"{a} < {b}"


def sort_rows(ctx: Lowering, x: Tensor, *, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Sort the n items of each row of x [rows, n, m] by their m elements, lexicographically and stably.

    Return the items' indices in sorted order, int64 [rows, n], and whether each item differs from the one before, bool
    [rows, n]. NaN is larger than every number and equal to itself. The kernel merge-sorts indices, for any n, without
    padding.
    """
    rows, n, m = x.shape
    orders, heads = ctx.empty((2, rows, n), DType.INT64), ctx.empty((rows, n), DType.BOOL)

    def compare(a: str, b: str) -> str:
        less = _less("a", "b", x.dtype, descending), _less("b", "a", x.dtype, descending)
        return _compare.format(count=1 if m == 1 else "m", a=a, b=b, a_less=less[0], b_less=less[1])

    count = merges(ctx, x)
    if count is not None:
        merge_rows(ctx, ctx.contiguous(x), orders, heads, compare, count)
        return ctx.view(orders, (rows, n)), heads
    text = compare(item(x.dtype, "first"), item(x.dtype, "second"))
    merge = merge_step.lines(numbers="orders", compare=text)
    find = head.lines(compare=text)
    _sort.launch(
        ctx,
        f"sort_rows_{x.dtype.short}",
        rows,
        THREADS,
        orders=orders,
        heads=heads,
        x=ctx.contiguous(x),
        rows=rows,
        n=n,
        m=m,
        merge=merge,
        find_head=find,
    )
    return ctx.view(orders, (rows, n)), heads


@plain_kernel
def _count(before: Pointer[int], total: Pointer[int], flags: Pointer[int], n: int, *, threads: int) -> None:
    lane = int64(cuda.threadIdx.x)
    counts = cuda.shared.array(threads, int64)
    # Each thread counts its share of consecutive flags, and after one barrier goes over them again.
    share = (n + threads - 1) // threads
    start = min(lane * share, n)
    end = min(start + share, n)
    count = int64(0)
    for i in range(start, end):
        count += int64(flags[i])
    counts[lane] = count
    cuda.syncthreads()
    count = int64(0)
    for other in range(lane):
        count += counts[other]
    for i in range(start, end):
        before[i] = count
        count += int64(flags[i])
    if lane == threads - 1:
        total[0] = count


def count_prefixes(ctx: Lowering, flags: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of set ``flags`` (bool, n elements) before each flag, int64 [n], and their total, int64 [1]."""
    n = product(flags.shape)
    if not ctx.device.emulated and hint(n) > MANY:
        flags = ctx.contiguous(flags)
        flat = ctx.view(flags, (n,), None, flags.offset)
        counted = elementwise(ctx, lambda flag: cast(flag, DType.INT64), flat)
        total = reduce(ctx, lambda row, flag: row.reduce(SUM, flag), counted, [0])
        return scan(ctx, SUM, counted, 0, exclusive=True, reverse=False), total
    before, total = ctx.empty((n,), DType.INT64), ctx.empty((1,), DType.INT64)
    flags = ctx.contiguous(flags)
    _count.launch(ctx, "count_prefixes", 1, THREADS, before=before, total=total, flags=flags, n=n)
    return before, total
