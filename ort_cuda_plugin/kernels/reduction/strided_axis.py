"""Reductions over a strided axis on a GPU: adjacent threads own adjacent rows, so that loads coalesce.

Threads with the same threadIdx.x share a row and split its columns. If the elements of adjacent rows form vectors, a
thread owns as many rows as a vector has elements, and loads a column of all its rows with one access.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...program.expressions.symbolic import Dim, ceildiv, divides, hint
from ...program.lowering.context import DeviceProperties, Tensor
from ..codegen.vectors import VECTOR_BYTES

WARP = 32
SIDE = 8
"""Threads along x if each has a vector of rows: with 16 bytes per thread they load a 128-byte cache line."""
PARTS, MOST_PARTS = 8, 16
"""PARTS: minimum threads per row, and number of accumulators of a thread with one row. MOST_PARTS: maximum number of
accumulators of a thread with several rows.

Several accumulators per row let a thread overlap loads.
"""
SHORT_COLUMNS = 64
"""Maximum columns for which one thread per row suffices, if the thread has one row."""
MANY_ROWS = 512
"""Rows per multiprocessor from which one thread per row keeps it busy."""
BLOCKS_PER_MULTIPROCESSOR = 4
"""Blocks per multiprocessor below which a row gets `WARP` threads instead of `PARTS`."""
BLOCKS_OF_SHORT_COLUMNS = 2
"""`BLOCKS_PER_MULTIPROCESSOR` for rows of at most `SHORT_COLUMNS` elements."""


@dataclass(frozen=True)
class StridedSchedule:
    """Schedule of a reduction over a strided axis: ``threads`` share a row, and each has ``width`` adjacent rows.

    A block has ``side`` threads along x and ``threads`` along y.
    """

    threads: int
    width: int = 1

    @property
    def side(self) -> int:
        """Threads of a block along x, which have adjacent rows."""
        return SIDE if self.width > 1 else WARP

    @property
    def rows(self) -> int:
        """Rows per block."""
        return self.side * self.width

    @property
    def parts(self) -> int:
        """Independent accumulators that a thread has per row; they take its columns in turn."""
        return PARTS if self.width == 1 else max(1, MOST_PARTS // self.width)

    @property
    def above(self) -> int:
        """Threads of one warp that share a row."""
        return WARP // self.side

    @property
    def shared(self) -> int:
        """Partial results per block in shared memory: one for each warp and row."""
        return self.threads // self.above * self.rows

    def shared_index(self, warp: str, row: int) -> str:
        """Return the source of the shared-memory index of a warp's partial result for the thread's row ``row``."""
        return f"{warp} * {self.rows} + {row * self.side} + cuda.threadIdx.x"


def row_vectors(dims: Sequence[Dim], inputs: Sequence[tuple[Tensor, Sequence[Dim], Sequence[Dim]]]) -> int:
    """Return how many adjacent rows form a vector in every input; 1 if they do not.

    ``dims`` are the sizes of the row dimensions. ``inputs`` are tensors, each with its strides along rows and columns.
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
    """Choose the schedule for the expected sizes; None if one thread per row suffices. ``width``: see `row_vectors`."""
    threads = WARP if hint(columns) > 64 * PARTS else PARTS
    if width > 1 and hint(rows) >= SIDE * width:
        # With few columns, more of them per thread cost less than a reduction across more threads.
        enough = BLOCKS_PER_MULTIPROCESSOR if hint(columns) > SHORT_COLUMNS else BLOCKS_OF_SHORT_COLUMNS
        is_few = hint(ceildiv(rows, SIDE * width)) < enough * device.multiprocessors
        return StridedSchedule(WARP if is_few else threads, width)
    if hint(columns) > SHORT_COLUMNS and hint(rows) < MANY_ROWS * device.multiprocessors:
        return StridedSchedule(threads)
    return None
