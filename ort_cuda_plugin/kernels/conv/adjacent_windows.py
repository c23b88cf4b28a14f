"""Sliding windows of adjacent output pixels: which elements of the image several windows of one thread read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

Row = TypeVar("Row")

LOADED = 9
"""Maximum vector loads that a thread has in flight (estimate); more would need too many registers."""
Reads: TypeAlias = dict[int, list[tuple[int, int]]]
"""By offset of an element from the first window's start, the pairs (window, index in the window) that read it."""


def reads_of(windows: int, taps: int, stride: int, dilation: int) -> Reads:
    """Return the elements that ``windows`` adjacent windows of ``taps`` elements each read along one dimension."""
    found: Reads = {}
    for window, tap in itertools.product(range(windows), range(taps)):
        found.setdefault(window * stride + tap * dilation, []).append((window, tap))
    return found


def batches_of(rows: Sequence[Row], columns: int) -> list[Sequence[Row]]:
    """Split rows of ``columns`` vectors into batches. A kernel issues all loads of a batch before it uses the first."""
    parts = -(-len(rows) // max(LOADED // columns, 1))
    size = -(-len(rows) // parts)
    return [rows[begin : begin + size] for begin in range(0, len(rows), size)]
