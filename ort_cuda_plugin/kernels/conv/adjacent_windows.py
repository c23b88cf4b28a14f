"""What kernels have in common whose threads have several places of windows side by side."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

from ...model.ir import DType
from ...program.expressions.symbolic import Dim
from ..codegen.source import KernelBuilder

Line = TypeVar("Line")

LOADED = 9
"""Vectors that a thread has on their way at once, about: more take registers from other threads."""
Reads: TypeAlias = dict[int, list[tuple[int, int]]]
"""By offset from where the first window begins: which windows have it, as which of their elements."""


def reads_of(places: int, taps: int, stride: int, dilation: int) -> Reads:
    """What ``places`` neighbouring windows of so many ``taps`` read along a dimension."""
    found: Reads = {}
    for place, tap in itertools.product(range(places), range(taps)):
        found.setdefault(place * stride + tap * dilation, []).append((place, tap))
    return found


def batches_of(lines: Sequence[Line], columns: int) -> list[Sequence[Line]]:
    """The lines of so many ``columns`` in parts. All of a part is on its way before the first of it is used."""
    parts = -(-len(lines) // max(LOADED // columns, 1))
    size = -(-len(lines) // parts)
    return [lines[begin : begin + size] for begin in range(0, len(lines), size)]


def size_text(builder: KernelBuilder, dtype: DType, value: Dim) -> str:
    """A parameter; "0" and "1" are part of the structure."""
    return str(value) if isinstance(value, int) and value in (0, 1) else builder.integer(value, dtype)
