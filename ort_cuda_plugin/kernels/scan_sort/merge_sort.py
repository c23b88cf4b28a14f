"""Stable merge sort of long rows on a GPU: blocks sort chunks of a row, then launches merge adjacent sorted runs.

In a merge, each thread finds the target index of one element by a binary search in the other run of the pair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...model.ir import DType
from ...program.expressions.symbolic import ceildiv, hint, le
from ...program.lowering.context import Lowering, Tensor
from ..codegen.plain_function import Expression, Lines, plain_kernel
from ..codegen.source import load_text, register_type

if TYPE_CHECKING:
    from numba import cuda, int32, int64

    from ...compiler.intrinsics import Pointer, array_pointer

THREADS = 256  # threads per block
PIECE = 1024
"""Elements that a block sorts. A power of four: after an even number of passes, the result is in the first buffer."""
MOST_MERGES = 16  # maximum merge launches; a single block sorts longer rows


@plain_kernel
def merge_step(i: int, n: int, width: int, source: int, target: int, *, numbers: Pointer[int], compare: Lines) -> None:
    """Move element ``i`` of sorted runs of ``width`` to its index in the merged run.

    ``source`` and ``target`` are the offsets of the runs and of the merged runs in ``numbers``.
    """
    # The element's index in the merged run is its index in its own run, plus the number of elements in the other run
    # that precede it.
    me = int64(numbers[source + i])
    pair = i & -(2 * width)
    middle = min(pair + width, n)
    is_left = i < middle
    low = middle if is_left else pair
    high = min(pair + 2 * width, n) if is_left else middle
    place = i if is_left else int64(i - middle + pair)
    first_of_sibling = low
    while low < high:
        half = (low + high) >> 1
        other = int64(numbers[source + half])
        first = other if is_left else me
        second = me if is_left else other
        less = False
        compare(first, second)
        if less == is_left:
            low = half + 1
        else:
            high = half
    numbers[target + place + low - first_of_sibling] = me


@plain_kernel
def head(i: int, orders: Pointer[int], heads: Pointer[int], result: int, *, compare: Lines) -> None:
    """Store in ``heads`` whether element ``i`` of the sorted row at offset ``result`` differs from the one before."""
    less = True
    if i > 0:
        first = int64(orders[result + i - 1])
        second = int64(orders[result + i])
        less = False
        compare(first, second)
    heads[result + i] = 1 if less else 0


# gridDim.x is rows * blocks per row, because the other grid dimensions are limited to 65,535 blocks.
@plain_kernel
def _sort_pieces(
    orders: Pointer[int],
    x: Pointer[float],
    rows: int,
    n_all: int,
    m: int,
    buffer: int,
    row_blocks: int,
    *,
    threads: int,
    piece: int,
    keep: Lines,
    merge: Lines,
) -> None:
    block, blocks = int32(cuda.blockIdx.x), int32(row_blocks)
    row = int64(block // blocks)
    block -= int32(row) * blocks
    lane = int64(cuda.threadIdx.x)
    start = int64(block) * piece
    n = min(n_all - start, int64(piece))
    data = (row * n_all + start) * m
    local = array_pointer(cuda.shared.array(2 * piece, int32))
    source, target = int64(0), int64(piece)
    for i in range(lane, n, threads):
        local[i] = int32(i)
    keep(data)
    cuda.syncthreads()
    width = int64(1)
    while width < piece:
        for i in range(lane, n, threads):
            merge(i, width)
        cuda.syncthreads()
        source, target = target, source
        width *= 2
    for i in range(lane, n, threads):
        orders[(buffer * rows + row) * n_all + start + i] = start + local[i]


@plain_kernel
def _keep(n: int, lane: int, *, threads: int, piece: int, kind: Any, element: Expression) -> None:
    """Copy the elements that the block sorts to shared memory, for the searches."""
    kept = array_pointer(cuda.shared.array(piece, kind))
    q = int64(0)
    for i in range(lane, n, threads):
        kept[i] = element(i, q)


@plain_kernel
def _merge_runs(
    orders: Pointer[int],
    x: Pointer[float],
    rows: int,
    n: int,
    m: int,
    buffer: int,
    width: int,
    row_blocks: int,
    *,
    threads: int,
    merge: Lines,
) -> None:
    block, blocks = int32(cuda.blockIdx.x), int32(row_blocks)
    row = int64(block // blocks)
    block -= int32(row) * blocks
    source = (buffer * rows + row) * n
    target = ((1 - buffer) * rows + row) * n
    data = row * n * m
    i = int64(block) * threads + int64(cuda.threadIdx.x)
    if i < n:
        merge(data, source, target)


@plain_kernel
def _find_heads(
    heads: Pointer[int],
    orders: Pointer[int],
    x: Pointer[float],
    n: int,
    m: int,
    row_blocks: int,
    *,
    threads: int,
    find: Lines,
) -> None:
    block, blocks = int32(cuda.blockIdx.x), int32(row_blocks)
    row = int64(block // blocks)
    block -= int32(row) * blocks
    result = row * n
    data = result * m
    i = int64(block) * threads + int64(cuda.threadIdx.x)
    if i < n:
        find(data)


def merges(ctx: Lowering, x: Tensor) -> int | None:
    """Return the number of merge launches for rows of x [rows, n, m]; None if one block sorts a row."""
    n = x.shape[1]
    if ctx.device.emulated or hint(n) <= PIECE:
        return None
    count = (-(-hint(n) // PIECE) - 1).bit_length()
    return count if count <= MOST_MERGES and ctx.settled(le(n, PIECE << count)) else None


def item(dtype: DType, number: str) -> str:
    """Return the source of element ``q`` of item ``number`` of the row of x at offset ``data``."""
    return load_text("x", f"data + {number} * m + q", DType.UINT8 if dtype is DType.BOOL else dtype)


def merge_rows(
    ctx: Lowering, x: Tensor, orders: Tensor, heads: Tensor, compare: Callable[[str, str], str], count: int
) -> None:
    """Sort the n items of each row of contiguous x [rows, n, m], with ``count`` merge launches.

    ``compare(a, b)`` returns source that sets ``less`` if item ``first`` precedes item ``second``; a and b are the
    sources of their elements. ``orders`` [2, rows, n] receives the items' indices in order (in its first half),
    ``heads`` [rows, n] whether an item differs from the one before.
    """
    rows, n, m = x.shape
    name, buffer = x.dtype.short, count % 2
    far = compare(item(x.dtype, "first"), item(x.dtype, "second"))
    keep, near = "", far
    if m == 1:
        kind = register_type(x.dtype) or "uint8"
        keep = _keep.lines(threads=THREADS, piece=PIECE, kind=kind, element=item(x.dtype, "i"))
        near = compare("kept[first]", "kept[second]")
    merge = merge_step.lines(numbers="local", compare=near)
    _sort_pieces.launch(
        ctx,
        f"sort_pieces_{name}",
        rows * ceildiv(n, PIECE),
        THREADS,
        orders=orders,
        x=x,
        rows=rows,
        n_all=n,
        m=m,
        buffer=buffer,
        row_blocks=ceildiv(n, PIECE),
        piece=PIECE,
        keep=keep,
        merge=merge,
    )
    blocks = ceildiv(n, THREADS)
    merge_far = merge_step.lines(numbers="orders", compare=far)
    sizes = {"orders": orders, "x": x, "n": n, "m": m, "row_blocks": blocks}
    for number in range(count):
        half = (buffer + number) % 2
        more = {"rows": rows, "buffer": half, "width": PIECE << number, "merge": merge_far}
        _merge_runs.launch(ctx, f"merge_runs_{name}", rows * blocks, THREADS, **sizes, **more)
    find = head.lines(compare=far)
    _find_heads.launch(ctx, f"sorted_heads_{name}", rows * blocks, THREADS, heads=heads, find=find, **sizes)
