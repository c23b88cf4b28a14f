"""Counts calls of Python functions: a measure of work that is deterministic, unlike times."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType


def counted_calls(work: Callable[[], object], is_counted: Callable[[FrameType, str], bool]) -> int:
    """Return the number of profiler events for which ``is_counted`` is true, while ``work`` runs.

    Events of this thread and of threads that ``work`` starts count. ``is_counted`` gets the frame and the event, such
    as "call" (of a Python function), "c_call" (of a function in C) or "return".
    """
    count = 0

    def profiler(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += is_counted(frame, event)

    before = sys.getprofile()
    threading.setprofile(profiler)
    sys.setprofile(profiler)
    try:
        work()
    finally:
        sys.setprofile(before)
        threading.setprofile(before)
    return count
