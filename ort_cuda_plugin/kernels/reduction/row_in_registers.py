"""Layout of rows in registers: on a GPU the threads of a row load its vectors once, for all passes of a row program.

The expected sizes determine the layout (`RowForm`). A guard limits rows to the capacity of the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...program.expressions.scalar import Scalar, reachable
from ...program.expressions.symbolic import Dim, hint, le
from ...program.lowering.context import Lowering
from ...program.steps.row_program import Stage
from ...program.steps.steps import Rows
from ..codegen.vectors import CALL_WORK, VECTOR_BYTES, cheap

WARP = 32
SHARES = {WARP: (16, 96), 128: (16, 96), 256: (32, 96), 512: (32, 64)}
"""Maximum elements per thread, and maximum 32-bit registers per thread for all inputs, by threads per row."""
MAX_ROW_WORK = 1536
"""Maximum operations in a thread's unrolled code (estimate); see `vectors.MAX_WORK`."""
EXACT_LANES = 24
"""Maximum elements per thread in an exact layout, one warp or less per row (`_exact_form`)."""
MANY_ROWS = 8
"""Rows per multiprocessor from which several rows may share a warp."""
FEW_ROWS, FEW_LANES = 2, 4
"""Maximum rows per multiprocessor for which a row gets more than a warp, and maximum elements per thread for such rows.

With so few rows, reducing across more threads takes less time than more serial work per thread.
"""
FEW_ROWS_THREADS = (64, 96, 128, 192, 256, 384, 512)  # threads per row to choose from for few rows
MAX_HEIGHT = 4
"""Maximum rows per block if a row has one warp."""


@dataclass(frozen=True)
class RowForm:
    """Layout of a row in registers: ``threads`` share the row; each holds ``count`` vectors of ``width`` elements.

    Vector i of thread t begins at column (i * ``threads`` + t) * ``width``.
    """

    threads: int
    width: int
    count: int

    @property
    def lanes(self) -> int:
        return self.width * self.count

    @property
    def capacity(self) -> int:
        return self.threads * self.lanes

    def column(self, lane: str) -> str:
        """Return the source of the column of the thread's element ``lane`` (< ``lanes``)."""
        shift, mask = self.width.bit_length() - 1, self.width - 1
        if self.width == 1:
            return f"lane + {lane} * {self.threads}"
        return f"lane * {self.width} + ({lane} >> {shift}) * {self.threads * self.width} + ({lane} & {mask})"

    def distance(self, lane: str, whole: bool) -> str:
        """Return an expression for the columns between the thread's first element and its element ``lane``.

        With ``whole``, the distance to the first element of the vector that contains element ``lane``.
        """
        shift, mask = self.width.bit_length() - 1, self.width - 1
        if self.width == 1:
            return f"{lane} * {self.threads}"
        vector = f"({lane} >> {shift}) * {self.threads * self.width}"
        return vector if whole else f"{vector} + ({lane} & {mask})"


def row_height(ctx: Lowering, rows: Dim, threads: int = WARP) -> int:
    """Return the rows per block for rows of at most a warp: few if larger blocks would leave multiprocessors idle."""
    height = MAX_HEIGHT * WARP // threads
    while height > WARP // threads and hint(rows) < 2 * height * ctx.device.multiprocessors:
        height //= 2
    return height


def choose_row_form(
    ctx: Lowering,
    step: Rows,
    groups: Sequence[Sequence[Stage]],
    columns: Dim,
    rows: Dim,
    inputs: int,
    itemsizes: Sequence[int],
) -> RowForm | None:
    """Choose the layout of rows in registers; None for rows that are too long, or that may be empty.

    Registers without an element load column 0, which an empty row lacks. ``inputs`` is the number of inputs that are
    held in registers; ``itemsizes`` are those of all tensors with vectorized accesses, in bytes.
    """
    if not ctx.settled(le(1, columns)):
        return None
    expected = hint(columns)
    width = VECTOR_BYTES // max(itemsizes) if itemsizes else 1
    while width > 1 and WARP * width >= 2 * expected:
        width //= 2
    words = max(inputs, 1) * max(1, max(itemsizes, default=4) // 4)
    by_work = MAX_ROW_WORK // max(_work(step, groups), 1)
    if (wide := _wide_form(ctx, columns, rows, width)) is not None:
        return wide
    if (exact := _exact_form(ctx, columns, rows, width, min(by_work, SHARES[WARP][1] // words))) is not None:
        return exact
    for threads, (lanes, registers) in SHARES.items():
        most = max(min(lanes, by_work, registers // words), width)
        count = -(-expected // (threads * width))
        if count * width <= most:
            # Round 4 or more vectors up to an even number, so that rows of similar lengths share a kernel.
            count = count if count < 4 else -(-count // 2) * 2
            form = RowForm(threads, width, count)
            return form if ctx.settled(le(columns, form.capacity)) else None
    return None


def _wide_form(ctx: Lowering, columns: Dim, rows: Dim, width: int) -> RowForm | None:
    """Return the layout for few rows: the fewest threads with one vector or `FEW_LANES` elements each; None: no fit."""
    if hint(rows) > FEW_ROWS * ctx.device.multiprocessors or hint(columns) <= WARP * FEW_LANES:
        return None
    for threads in FEW_ROWS_THREADS:
        count = -(-hint(columns) // (threads * width))
        if count * width <= max(width, FEW_LANES):
            form = RowForm(threads, width, count)
            return form if ctx.settled(le(columns, form.capacity)) else None
    return None


def _exact_form(ctx: Lowering, columns: Dim, rows: Dim, width: int, most: int) -> RowForm | None:
    """Return a layout whose capacity is exactly ``columns``, so that no bounds checks are needed. None: there is none.

    A row has one warp, or with many rows half or a quarter of one.
    """
    many = hint(rows) >= MANY_ROWS * ctx.device.multiprocessors
    for threads in (WARP, WARP // 2, WARP // 4) if many else (WARP,):
        lanes = hint(columns) // threads
        if columns == threads * lanes and lanes % width == 0 and 0 < lanes <= min(most, EXACT_LANES):
            return RowForm(threads, width, lanes // width)
    return None


def _work(step: Rows, groups: Sequence[Sequence[Stage]]) -> int:
    """Estimate the operations per element in all passes."""
    roots: list[Scalar] = [x for x, _ in step.outputs]
    roots += [x for group in groups for stage in group for x in stage.elements]
    return sum(1 if x.op in cheap else CALL_WORK for x in reachable(roots) if x.operands and x.op != "reduced")
