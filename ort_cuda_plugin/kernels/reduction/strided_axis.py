"""Reductions over a strided axis on a GPU: adjacent threads own adjacent rows, so that loads coalesce.

Threads with the same threadIdx.x share the columns of their rows. If adjacent rows form vectors, a thread owns the rows
of one vector, and loads a column of all of them by one access.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...program.expressions.symbolic import Dim, ceildiv, divides, hint
from ...program.lowering.context import DeviceProperties, Tensor
from ..codegen.vectors import VECTOR_BYTES

WARP = 32
SIDE = 8
"""Adjacent threads with vectors of rows: with 16 bytes each they load a 128-byte cache line."""
PARTS, MOST_PARTS = 8, 16
"""PARTS: minimum threads per row, and accumulators of a thread with one row. MOST_PARTS: accumulators of any thread.

Several accumulators let a thread overlap loads.
"""
SHORT_COLUMNS = 64
"""Maximum columns for which one thread per row suffices, if the thread has one row."""
MANY_ROWS = 512
"""Rows per multiprocessor that keep it busy with one thread each."""
BLOCKS_PER_MULTIPROCESSOR = 4
"""Blocks per multiprocessor below which a row gets several threads, in spite of the reduction across threads."""
BLOCKS_OF_SHORT_COLUMNS = 2
"""`BLOCKS_PER_MULTIPROCESSOR` for rows of at most `SHORT_COLUMNS` elements."""


@dataclass(frozen=True)
class StridedSchedule:
    """Schedule of a reduction over a strided axis: ``threads`` share a row; a thread has ``width`` adjacent rows."""

    threads: int
    width: int = 1

    @property
    def side(self) -> int:
        """Threads of a block along x: adjacent rows."""
        return SIDE if self.width > 1 else WARP

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.side * self.width

    @property
    def parts(self) -> int:
        """Independent accumulators per row of a thread, for columns in turn."""
        return PARTS if self.width == 1 else max(1, MOST_PARTS // self.width)

    @property
    def above(self) -> int:
        """Threads of a row in one warp."""
        return WARP // self.side

    @property
    def shared(self) -> int:
        """Partial results of a block: one for each warp and row."""
        return self.threads // self.above * self.rows

    def shared_index(self, warp: str, row: int) -> str:
        """Return the index in shared memory of a warp's partial result for one of the thread's rows."""
        return f"{warp} * {self.rows} + {row * self.side} + cuda.threadIdx.x"


def row_vectors(dims: Sequence[Dim], inputs: Sequence[tuple[Tensor, Sequence[Dim], Sequence[Dim]]]) -> int:
    """Return the adjacent rows per vector of every input; 1 if they do not form vectors.

    ``dims`` are the dimensions of the rows. An input has its strides along rows and along columns.
    """
    moved = [(x, [*rows[:-1], *columns]) for x, rows, columns in inputs if rows[-1] != 0]
    if not moved or any(rows[-1] not in (0, 1) for _, rows, _ in inputs):
        return 1
    width = VECTOR_BYTES // max(x.dtype.itemsize for x, _ in moved)
    while width > 1 and not all(
        divides(width, number) for number in (dims[-1], *(s for _, other in moved for s in other))
    ):
        width //= 2
    return width


def choose_strided(device: DeviceProperties, columns: Dim, rows: Dim, width: int) -> StridedSchedule | None:
    """Choose the schedule; None if one thread per row suffices."""
    threads = WARP if hint(columns) > 64 * PARTS else PARTS
    if width > 1 and hint(rows) >= SIDE * width:
        # With few columns per thread, further columns cost less than a reduction across more threads.
        enough = BLOCKS_PER_MULTIPROCESSOR if hint(columns) > SHORT_COLUMNS else BLOCKS_OF_SHORT_COLUMNS
        is_few = hint(ceildiv(rows, SIDE * width)) < enough * device.multiprocessors
        return StridedSchedule(WARP if is_few else threads, width)
    if hint(columns) > SHORT_COLUMNS and hint(rows) < MANY_ROWS * device.multiprocessors:
        return StridedSchedule(threads)
    return None
