"""Progress events of long work: how many items of a task are done, which was the last, and how many seconds are left.

A `Task` reports its progress. The functions that `on_progress` has subscribed get a `Progress` for each report. Without
a subscriber, a report costs almost nothing. Any thread may report.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

_Item = TypeVar("_Item")
logger = logging.getLogger("ort_cuda_plugin")


@dataclass(frozen=True)
class Progress:
    """The state of a task: ``done`` of ``total`` items are done.

    Attributes:
        task: what is done to the items, such as "compiling kernels".
        name: the item that was done last; "" before the first.
        done: number of items that are done.
        total: number of items; it may grow.
        seconds: seconds since the task began.
        seconds_left: expected seconds until the end of the task; None if unknown.

    Examples:
        >>> state = ort_cuda_plugin.Progress("compiling", "gemm", done=3, total=4, seconds=6.0, seconds_left=2.0)
        >>> state.is_end
        False
    """

    task: str
    name: str
    done: int
    total: int
    seconds: float
    seconds_left: float | None

    @property
    def is_end(self) -> bool:
        """Return whether all items are done."""
        return self.done >= self.total


Subscriber = Callable[[Progress], None]
_lock = threading.RLock()
_subscribers: list[Subscriber] = []


@contextmanager
def on_progress(callback: Subscriber) -> Iterator[None]:
    """Call ``callback`` in the block for each event of long work of this process, such as compilation or autotuning.

    The callback gets a `Progress` when a task begins, and after each item of the task. It runs in the thread that does
    the work, one call at a time: it must return soon, and must not create or run sessions. If it raises an exception,
    the exception is logged, and the callback is not called again.

    Examples:
        >>> with ort_cuda_plugin.on_progress(lambda state: None):
        ...     session = ort_cuda_plugin.session("model.onnx")
    """

    def call(event: Progress) -> None:  # an object of its own, since one callback may be subscribed twice
        callback(event)

    with _lock:
        _subscribers.append(call)
    try:
        yield
    finally:
        with _lock:
            if call in _subscribers:
                _subscribers.remove(call)


def is_watched() -> bool:
    """Return whether a callback is subscribed."""
    return bool(_subscribers)


def reported(name: str, items: Sequence[_Item], item_name: Callable[[_Item], str]) -> Iterator[_Item]:
    """Yield the items, and report a `Task` of this name: an item is done when the next one is requested."""
    task = Task(name, len(items))
    for item in items:
        yield item
        task.advance(item_name(item))


class Task:
    """A task whose items are done one after the other, or in several threads.

    ``weight`` is the expected work of all items, in the unit of the weights that `advance` gets; by default the number
    of items. The remaining weight at the pace so far gives the seconds that are left. ``seconds`` are the expected
    seconds of the whole task, which count until the first item is done.
    """

    def __init__(self, name: str, total: int, weight: float | None = None, seconds: float | None = None) -> None:
        self._name = name
        self._total, self._weight = total, float(total) if weight is None else weight
        self._seconds = seconds
        self._done, self._done_weight = 0, 0.0
        self._begun = time.monotonic()
        self._report("")

    def advance(self, name: str, weight: float = 1.0) -> None:
        """Report that the item ``name`` is done."""
        with _lock:
            self._done += 1
            self._done_weight += weight
            self._report(name)

    def _report(self, name: str) -> None:
        if not _subscribers or not self._total:
            return
        took = time.monotonic() - self._begun
        left = self._seconds
        if self._done_weight > 0:
            left = took / self._done_weight * max(self._weight - self._done_weight, 0.0)
        event = Progress(self._name, name, self._done, self._total, took, left)
        with _lock:
            for subscriber in list(_subscribers):
                try:
                    subscriber(event)
                except Exception:
                    logger.warning("a callback of on_progress failed and is not called again", exc_info=True)
                    if subscriber in _subscribers:
                        _subscribers.remove(subscriber)
