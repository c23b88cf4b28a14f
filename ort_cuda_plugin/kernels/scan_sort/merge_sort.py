"""Stable sorting of long rows on a GPU: blocks sort pieces of a row, and launches merge neighbouring runs of them.

In a merge each element has a thread, which finds the element's place by a binary search in the other run.
"""

from __future__ import annotations

from collections.abc import Callable

from ...model.ir import DType
from ...program.expressions.symbolic import ceildiv, hint, le
from ...program.lowering.context import Lowering, Tensor
from ..codegen.simt_fragments import indent
from ..codegen.source import KernelBuilder, load_text, register_type

THREADS = 256
PIECE = 1024
"""Elements that a block sorts; a power of four, so that an even number of passes does."""
MOST_MERGES = 16

_merge_step = """
            # An element's place in the merged run: its place in its own run, and those of the sibling before it.
            me = int64({orders}[source + i])
            pair = i & -(2 * width)
            middle = min(pair + width, n)
            is_left = i < middle
            low = middle if is_left else pair
            high = min(pair + 2 * width, n) if is_left else middle
            place = i if is_left else int64(i - middle + pair)
            first_of_sibling = low
            while low < high:
                half = (low + high) >> 1
                other = int64({orders}[source + half])
                first = other if is_left else me
                second = me if is_left else other
{compare}
                if less == is_left:
                    low = half + 1
                else:
                    high = half
            {orders}[target + place + low - first_of_sibling] = me
"""
_head = """
        less = True
        if i > 0:
            first = int64(orders[result + i - 1])
            second = int64(orders[result + i])
{compare}
        heads[result + i] = 1 if less else 0
"""


def merge_step(compare: str, orders: str = "orders") -> str:
    """Source that moves element ``i`` of runs of ``width``, from ``source`` to ``target`` of an array of numbers.

    ``compare`` is source that sets ``less`` by the elements ``first`` and ``second``.
    """
    return _merge_step.format(orders=orders, compare=indent(compare, 4)).strip("\n")


def head(compare: str) -> str:
    """Source that says whether element ``i`` of the sorted row at ``result`` differs from the one before."""
    return _head.format(compare=indent(compare, 3)).strip("\n")


# One axis of the grid for both: the others have 65,535 blocks at most.
_row_source = """
    block, blocks = int32(cuda.blockIdx.x), int32(row_blocks)
    row = int64(block // blocks)
    block -= int32(row) * blocks
"""
_piece_source = """
{row}
    lane = int64(cuda.threadIdx.x)
    start = int64(block) * {piece}
    n = min(n_all - start, int64({piece}))
    data = (row * n_all + start) * m
    local = array_pointer(cuda.shared.array({two_pieces}, int32))
    source, target = int64(0), int64({piece})
    for i in range(lane, n, {threads}):
        local[i] = int32(i)
{keep}
    cuda.syncthreads()
    width = int64(1)
    while width < {piece}:
        for i in range(lane, n, {threads}):
{place}
        cuda.syncthreads()
        source, target = target, source
        width *= 2
    for i in range(lane, n, {threads}):
        orders[(buffer * rows + row) * n_all + start + i] = start + local[i]
"""
_keep_source = """
    kept = array_pointer(cuda.shared.array({piece}, {kind}))
    q = int64(0)
    for i in range(lane, n, {threads}):
        kept[i] = {element}
"""
_merge_source = """
{row}
    source = (buffer * rows + row) * n
    target = ((1 - buffer) * rows + row) * n
    data = row * n * m
    i = int64(block) * {threads} + int64(cuda.threadIdx.x)
    if i < n:
        if True:
{place}
"""
_heads_source = """
{row}
    result = row * n
    data = result * m
    i = int64(block) * {threads} + int64(cuda.threadIdx.x)
    if i < n:
{head}
"""


def merges(ctx: Lowering, x: Tensor) -> int | None:
    """How many merges sort the rows of x [rows, n, m], or None where one block does."""
    n = x.shape[1]
    if ctx.device.emulated or hint(n) <= PIECE:
        return None
    count = (-(-hint(n) // PIECE) - 1).bit_length()
    return count if count <= MOST_MERGES and ctx.settled(le(n, PIECE << count)) else None


def item(dtype: DType, number: str) -> str:
    """Source of element ``q`` of an item of the row of x at ``data``."""
    return load_text("x", f"data + {number} * m + q", DType.UINT8 if dtype is DType.BOOL else dtype)


def merge_rows(
    ctx: Lowering, x: Tensor, orders: Tensor, heads: Tensor, compare: Callable[[str, str], str], count: int
) -> None:
    """Sorts the items of contiguous x by ``compare``.

    That gives source that sets ``less`` by the items ``first`` and ``second``, from the sources of their elements.
    ``orders`` [2, rows, n] get a row's item numbers in order, ``heads`` where one differs from the one before.
    """
    rows, n, m = x.shape
    name, buffer = x.dtype.short, count % 2
    builder = KernelBuilder()
    builder.tensor(orders, "orders", written=True)
    builder.tensor(x, "x")
    pieces, blocks = ceildiv(n, PIECE), ceildiv(n, THREADS)
    builder.integers(rows=rows, n_all=n, m=m, buffer=buffer, row_blocks=pieces)
    far = compare(item(x.dtype, "first"), item(x.dtype, "second"))
    keep, near = "", far
    if m == 1:  # a search looks at shared memory alone
        keep = _keep_source.format(
            piece=PIECE, kind=register_type(x.dtype) or "uint8", threads=THREADS, element=item(x.dtype, "i")
        ).strip("\n")
        near = compare("kept[first]", "kept[second]")
    place = merge_step(near, "local")
    row = _row_source.strip("\n")
    body = _piece_source.format(row=row, piece=PIECE, two_pieces=2 * PIECE, threads=THREADS, place=place, keep=keep)
    builder.launch(ctx, f"sort_pieces_{name}", (rows * pieces, 1, 1), (THREADS, 1, 1), body=body)
    grid = (rows * blocks, 1, 1)
    for number in range(count):
        builder = KernelBuilder()
        builder.tensor(orders, "orders", written=True)
        builder.tensor(x, "x")
        builder.integers(rows=rows, n=n, m=m, buffer=(buffer + number) % 2, width=PIECE << number, row_blocks=blocks)
        body = _merge_source.format(row=row, threads=THREADS, place=merge_step(far))
        builder.launch(ctx, f"merge_runs_{name}", grid, (THREADS, 1, 1), body=body)
    builder = KernelBuilder()
    builder.tensor(heads, "heads", written=True)
    builder.tensor(orders, "orders")
    builder.tensor(x, "x")
    builder.integers(n=n, m=m, row_blocks=blocks)
    body = _heads_source.format(row=row, threads=THREADS, head=head(far))
    builder.launch(ctx, f"sorted_heads_{name}", grid, (THREADS, 1, 1), body=body)
