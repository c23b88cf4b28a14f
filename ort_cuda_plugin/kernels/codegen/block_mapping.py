"""Block-to-tile mappings: fragments that compute from a block's index which tile, row or element it computes.

A block's index counts tiles along the columns first, then along the rows, then batches: consecutive blocks read the
same rows of a. In a GEMV consecutive blocks have consecutive rows, so that they read the same columns of b. A mapping
to tiles defines the coordinates ``row0`` and ``column0`` of the tile's first element, a mapping to a row defines
``row``; epilogues read these coordinates.
"""

from __future__ import annotations

from ...model.ir import DType
from ...program.expressions.symbolic import Dim, ceildiv
from .fragment import Fragment
from .launch_geometry import extent
from .simt_fragments import THREADS, Tile, log2
from .source import Parameters, register_type


def element_number(index: DType) -> str:
    """Return source that computes the thread's element ``number``, and returns from the kernel if it is >= ``count``.

    Both variables have type ``index``. A block has `THREADS` threads.
    """
    kind = register_type(index)
    return f"""
    number = {kind}({kind}(cuda.blockIdx.x) * {THREADS} + cuda.threadIdx.x)
    if number >= count:
        return
    """


def tile_of_block(m: int, n: int, rows: str = "m", columns: str = "n") -> Fragment:
    """Assign an ``m`` x ``n`` tile of a ``rows`` x ``columns`` result to each block.

    The grid is (tiles along columns * tiles along rows * batches, 1, 1).
    """
    text = f"""
        tiles_n = int32(({columns} + {n - 1}) >> {log2(n)})
        tiles_m = int32(({rows} + {m - 1}) >> {log2(m)})
        block = int32(cuda.blockIdx.x)
        rest = int32(block // tiles_n)
        column0 = int32((block - rest * tiles_n) * {n})
        batch = int32(rest // tiles_m)
        row0 = int32((rest - batch * tiles_m) * {m})
        """
    return Fragment("tile_of_block", text, "tiles_m row0 column0 batch")


def steps_of(depth: int) -> Fragment:
    """Define ``steps``, the number of k steps of ``depth`` elements each that cover ``k_end`` elements."""
    return Fragment("steps_of", f"steps = int32((k_end + {depth - 1}) >> {log2(depth)})", "steps")


def columns_of_row(columns: int) -> Fragment:
    """Assign ``columns`` columns of one row to each block. `GemvKernel.first_column` must follow this fragment.

    The grid is (rows * ceil(columns of the result / ``columns``) * batches, 1, 1).
    """
    text = f"""
        blocks_n = int32((n + {columns - 1}) // {columns})
        block = int32(cuda.blockIdx.x)
        rest = int32(block // m)
        row = int32(block - rest * m)
        batch = int32(rest // blocks_n)
        """
    return Fragment("columns_of_row", text, "blocks_n rest row batch")


def split_tile_of_block(tile: Tile, depth: int, splits: int, outermost: str, *, is_alone: bool = False) -> Fragment:
    """Assign one tile and one split of k to each block: ``part`` is the split, ``k0`` its start, ``steps`` its k steps.

    A k step has ``depth`` elements. ``outermost`` names the batch index; with ``is_alone`` there is one batch and one
    split, so that this index and ``part`` are 0. `count_tiles` adds the parameters: sizes and precomputed reciprocals
    to divide by them, since a GPU has no integer division instruction. The grid is (tiles along columns * tiles along
    rows * ``splits`` * batches, 1, 1).
    """
    rest = ("rest", "0") if is_alone else ("(rest - number * tiles_m)", "quotient_i32(rest, by_tiles_m)")
    text = f"""
        block = int32(cuda.blockIdx.x)
        rest = quotient_i32(block, by_tiles_n)
        column0 = int32((block - rest * tiles_n) * {tile.n})
        number = int32({rest[1]})
        row0 = int32({rest[0]} * {tile.m})
        {outermost} = int32(number >> {log2(splits)})
        part = int32(number & {splits - 1})
        every = int32(int32(k_end + {depth - 1}) >> {log2(depth)})
        share = int32(int32(every + {splits - 1}) >> {log2(splits)})
        steps = int32(min(share, int32(every - part * share)))
        k0 = int32(part * share * {depth})
        """
    return Fragment("split_tile_of_block", text, f"row0 column0 {outermost} part steps k0")


def count_tiles(builder: Parameters, tile: Tile, rows: Dim, columns: Dim, *, is_alone: bool = False) -> None:
    """Add the kernel parameters that `split_tile_of_block` reads."""
    if not is_alone:
        extent(builder, ceildiv(rows, tile.m), DType.INT32, ("tiles_m", "by_tiles_m"))
    extent(builder, ceildiv(columns, tile.n), DType.INT32, ("tiles_n", "by_tiles_n"))


def batch_offsets(operands: str, name: str, rank: int, quotient: str = "int32(digits // batch{i})") -> Fragment:
    """Split index ``batch`` into ``rank`` coordinates; from these compute an offset ``<operand>_<name>`` per operand.

    ``operands`` are one-letter names. ``quotient`` is the format string of the division of ``digits`` by the size of
    batch dimension {i}.
    """
    lines = [*(f"{x}_{name} = int64(0)" for x in operands), "digits = batch"]
    for i in reversed(range(1, rank)):
        lines += [f"quotient = {quotient.format(i=i)}", f"digit = int64(digits - quotient * batch{i})"]
        lines += [f"{x}_{name} += digit * {x}_batch{i}" for x in operands]
        lines.append("digits = quotient")
    lines += [f"{x}_{name} += int64(digits) * {x}_batch0" for x in operands]
    return Fragment("batch_offsets", "\n".join(lines), " ".join(f"{x}_{name}" for x in operands))
