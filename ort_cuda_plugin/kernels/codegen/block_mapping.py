"""Maps blocks of a launch to what they compute: a tile of a result, some columns of a row, elements of threads.

Blocks count columns first, so that neighbours share rows, then rows, and batches last; a GEMV counts rows first, so
that neighbours share columns of b. All give ``batch``, and the names from which epilogues count: ``row0`` or ``row``,
and ``column0``.
"""

from __future__ import annotations

from ...model.ir import DType
from ...program.expressions.symbolic import Dim, ceildiv
from .fragment import Fragment
from .launch_geometry import extent
from .simt_fragments import THREADS, Tile, log2
from .source import Parameters, register_type


def element_number(index: DType) -> str:
    """One thread per element in blocks of `THREADS`: ``number``, below ``count``, both of the index type."""
    kind = register_type(index)
    return f"""
    number = {kind}({kind}(cuda.blockIdx.x) * {THREADS} + cuda.threadIdx.x)
    if number >= count:
        return
    """


def tile_of_block(m: int, n: int, rows: str = "m", columns: str = "n") -> Fragment:
    """One tile of ``m`` x ``n`` elements of a result of ``rows`` x ``columns`` per block.

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
    """How many ``steps`` of ``depth`` elements k has."""
    return Fragment("steps_of", f"steps = int32((k_end + {depth - 1}) >> {log2(depth)})", "steps")


def columns_of_row(columns: int) -> Fragment:
    """``columns`` columns of one row per block, the ``rest`` of which divides by ``blocks_n``: `first_column` goes on.

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
    """One tile and one split of k per block: ``k0`` and ``steps`` of ``depth``, the number ``part`` of the split.

    ``outermost`` names the number of the batch; with ``is_alone`` it and the part are 0. `count_tiles` gives the
    parameters. Divisions are by what the host knows, since others take long on a GPU. The grid is (tiles along columns
    * tiles along rows * ``splits`` * batches, 1, 1).
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
    """Add the parameters of `split_tile_of_block`."""
    if not is_alone:
        extent(builder, ceildiv(rows, tile.m), DType.INT32, ("tiles_m", "by_tiles_m"))
    extent(builder, ceildiv(columns, tile.n), DType.INT32, ("tiles_n", "by_tiles_n"))


def batch_offsets(operands: str, name: str, rank: int, quotient: str = "int32(digits // batch{i})") -> Fragment:
    """Decodes ``batch`` of ``rank`` dimensions, last first, into an offset ``<operand>_<name>`` of each operand.

    ``quotient`` divides the number ``digits`` by the size of dimension i.
    """
    lines = [*(f"{x}_{name} = int64(0)" for x in operands), "digits = batch"]
    for i in reversed(range(1, rank)):
        lines += [f"quotient = {quotient.format(i=i)}", f"digit = int64(digits - quotient * batch{i})"]
        lines += [f"{x}_{name} += digit * {x}_batch{i}" for x in operands]
        lines.append("digits = quotient")
    lines += [f"{x}_{name} += int64(digits) * {x}_batch0" for x in operands]
    return Fragment("batch_offsets", "\n".join(lines), " ".join(f"{x}_{name}" for x in operands))
