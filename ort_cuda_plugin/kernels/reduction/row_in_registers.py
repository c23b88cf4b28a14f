"""Rows in registers: on a GPU a thread of a row program has vectors of its row, which it reads and writes once.

The form is chosen by the sizes that are expected. It holds for rows of at most so many elements as the threads have
lanes, which a guard of the plan says.
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
"""For numbers of threads: the elements of a row that one has at most, and the 32-bit registers for what it reads."""
MAX_ROW_WORK = 1536
"""Operations in a thread's straight code, about; see `vector_map.MAX_WORK`."""
EXACT_LANES = 24
"""As in `SHARES` for a warp, where no lane is without an element."""
MANY_ROWS = 8
"""For each multiprocessor: then a warp may have several."""
FEW_ROWS, FEW_LANES = 2, 4
"""Rows for each multiprocessor that leave it mostly idle with a warp each, and the elements that a thread then has.

What one thread does takes longer than threads take to meet.
"""
FEW_ROWS_THREADS = (64, 96, 128, 192, 256, 384, 512)
MAX_HEIGHT = 4
"""Rows of a block, where each is a warp's."""


@dataclass(frozen=True)
class RowForm:
    """``threads`` have a row; each has ``count`` vectors of ``width`` elements."""

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
        """The column of a thread's lane."""
        shift, mask = self.width.bit_length() - 1, self.width - 1
        if self.width == 1:
            return f"lane + {lane} * {self.threads}"
        return f"lane * {self.width} + ({lane} >> {shift}) * {self.threads * self.width} + ({lane} & {mask})"

    def distance(self, lane: str, whole: bool) -> str:
        """How far a thread's lane is from its first one; with ``whole``, how far the lane's vector is."""
        shift, mask = self.width.bit_length() - 1, self.width - 1
        if self.width == 1:
            return f"{lane} * {self.threads}"
        vector = f"({lane} >> {shift}) * {self.threads * self.width}"
        return vector if whole else f"{vector} + ({lane} & {mask})"


def row_height(ctx: Lowering, rows: Dim, threads: int = WARP) -> int:
    """Rows of a block whose rows are warps', or parts of them: few where more would leave multiprocessors idle."""
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
    """None for rows that are too long, and for empty ones: a lane without an element reads the first of its row.

    ``inputs`` values of each element are read; ``itemsizes`` are those of all tensors that vectors move.
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
            # Few numbers of vectors, so that few kernels differ.
            count = count if count < 4 else -(-count // 2) * 2
            form = RowForm(threads, width, count)
            return form if ctx.settled(le(columns, form.capacity)) else None
    return None


def _wide_form(ctx: Lowering, columns: Dim, rows: Dim, width: int) -> RowForm | None:
    """For few rows, the form of the fewest threads that have no more than `FEW_LANES` elements each."""
    if hint(rows) > FEW_ROWS * ctx.device.multiprocessors or hint(columns) <= WARP * FEW_LANES:
        return None
    for threads in FEW_ROWS_THREADS:
        count = -(-hint(columns) // (threads * width))
        if count * width <= max(width, FEW_LANES):
            form = RowForm(threads, width, count)
            return form if ctx.settled(le(columns, form.capacity)) else None
    return None


def _exact_form(ctx: Lowering, columns: Dim, rows: Dim, width: int, most: int) -> RowForm | None:
    """A warp's form in which every lane has an element, where there is one: others cost as much.

    A part of a warp has a row where there are many rows.
    """
    many = hint(rows) >= MANY_ROWS * ctx.device.multiprocessors
    for threads in (WARP, WARP // 2, WARP // 4) if many else (WARP,):
        lanes = hint(columns) // threads
        if columns == threads * lanes and lanes % width == 0 and 0 < lanes <= min(most, EXACT_LANES):
            return RowForm(threads, width, lanes // width)
    return None


def _work(step: Rows, groups: Sequence[Sequence[Stage]]) -> int:
    """Operations for one element in all passes, about."""
    roots: list[Scalar] = [x for x, _ in step.outputs]
    roots += [x for group in groups for stage in group for x in stage.elements]
    return sum(1 if x.op in cheap else CALL_WORK for x in reachable(roots) if x.operands and x.op != "reduced")
