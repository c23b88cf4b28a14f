"""Counts calls of functions: a measure of Python work that no clock decides."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType


def counted_calls(work: Callable[[], object], is_counted: Callable[[FrameType, str], bool]) -> int:
    """Return how many events of the profiler count while ``work`` runs, in this thread and in new ones.

    ``is_counted`` gets the frame and the event: "call" of a Python function, "c_call" of another one, and returns.
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
