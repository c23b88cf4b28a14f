"""Vectorized loads and stores of rows that are held in registers, with run-time alignment tests if necessary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ...model.ir import DType
from ...program.expressions.symbolic import Dim, divides
from ...program.lowering.context import Tensor
from ..codegen.source import Emitter
from ..codegen.vectors import begins_at_vectors
from .row_in_registers import RowForm

AHEAD_REGISTERS = 24
"""Maximum registers per thread for inputs of later passes that are prefetched before the first pass."""


class RowMoves:
    """Emitter of loads and stores for rows of ``n`` columns with layout ``form``.

    A thread's elements are in an array of registers, which intrinsic ``lanes_of`` declares. ``column0`` is
    `RowColumns.column0`.
    """

    def __init__(self, emit: Emitter, form: RowForm, n: str, column0: str) -> None:
        self._emit, self._form, self._n, self._column0 = emit, form, n, column0
        self._whole: dict[str, str] = {}
        self._ahead: list[str] = []
        self._registers_left = AHEAD_REGISTERS

    def find_whole(self, pointer: str, x: Tensor, by_row: Sequence[Dim]) -> None:
        """Let x be accessed by vectors after one alignment test, if its row strides keep all rows aligned.

        Every register must have an element (`RowColumns.is_exact`).
        """
        width = self._form.width
        if all(divides(width, stride) for stride in by_row):
            known = begins_at_vectors(x, width)
            self._whole[pointer] = "True" if known else self._emit.assign(f"is_aligned({pointer}, {width})")

    @contextmanager
    def loads_ahead(self) -> Iterator[None]:
        """Emit the passes in the ``with`` block after the prefetches that `load` collects: their latencies overlap."""
        with self._emit.detached() as passes:
            yield
        for line in self._ahead:
            self._emit.line(line)
        self._emit.lines += passes

    def load(self, lanes: str, pointer: str, base: str, dtype: DType, *, is_later: bool) -> None:
        """Emit the load of a thread's elements of the row at offset ``base``.

        For a later pass (``is_later``) the load precedes the first pass, if registers suffice.
        """
        lines = [f"{lanes} = lanes_of({pointer}, {self._form.lanes})", self.text("load", lanes, pointer, base)]
        registers = self._form.lanes * dtype.itemsize // 4
        if is_later and registers <= self._registers_left:
            self._registers_left -= registers
            self._ahead += lines
            return
        for line in lines:
            self._emit.line(line)

    def text(self, how: str, lanes: str, pointer: str, base: str) -> str:
        """Return the line that loads or stores (``how``) a thread's elements of the row at offset ``base``."""
        form, end = self._form, f"{base} + {self._n}"
        places = f"{pointer}, {base} + {self._column0}lane * {form.width}, {form.threads * form.width}"
        size = f"{form.width}, {form.count}"
        if pointer not in self._whole:
            return f"{how}_row({lanes}, {places}, {end}, {size})"
        limit = f"{end} - 1" if how == "load" else end
        return f"{how}_lanes({lanes}, 0, {places}, {limit}, {self._whole[pointer]}, {size})"
