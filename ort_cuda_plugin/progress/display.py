"""Progress display: a bar that is redrawn in place on a terminal or in a notebook, and lines on other streams."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import IO, Protocol

from ..abi.flags import flag_variable
from .events import Progress, on_progress

VARIABLE = "ORT_CUDA_PLUGIN_PROGRESS"
LINE_SECONDS = 5.0
"""Minimum seconds between two lines about a task."""
FIRST_LINE_SECONDS = 1.0
"""Minimum expected seconds of a task for a line when it begins."""
REDRAW_SECONDS = 0.1
"""Minimum seconds between two drawings of a bar."""
_BAR = 20
"""Width of a bar, characters without the brackets."""
_LONGEST_NAME = 40
"""Maximum length of the name of an item in a text, characters."""


def requested() -> bool | None:
    """Return whether the variable `VARIABLE` requests progress (True: all, False: none); None: only that of commands.

    Raises: ValueError: the variable has another value than 1 or 0 (or a synonym such as "true").
    """
    return flag_variable(VARIABLE)


def text_of(event: Progress) -> str:
    """Return an event as text: ``compiling kernels: 3 of 12, about 8 s left, conv2d_64x64``."""
    parts = [f"{event.task}: {event.done} of {event.total}"]
    if event.seconds_left is not None and not event.is_end:
        parts.append(f"about {_duration(event.seconds_left)} left")
    if event.name:  # at the end, where a narrow terminal cuts the line
        parts.append(event.name if len(event.name) <= _LONGEST_NAME else f"{event.name[: _LONGEST_NAME - 3]}...")
    return ", ".join(parts)


def bar_of(event: Progress) -> str:
    """Return a bar of the fraction that is done, for example ``[#####---------------]``."""
    filled = _BAR * min(event.done, event.total) // max(event.total, 1)
    return f"[{'#' * filled}{'-' * (_BAR - filled)}]"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def is_live(stream: IO[str]) -> bool:
    """Return whether a line of the stream can be drawn again: the stream is a terminal, or belongs to a notebook."""
    if type(stream).__module__.startswith("ipykernel"):
        return True
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # a closed stream
        return False


class Bar:
    """Draws the latest event as one line of a live stream, and removes the line at the end."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._drawn = 0.0
        self._width = 0

    def __call__(self, event: Progress) -> None:
        now = time.monotonic()
        if now - self._drawn < REDRAW_SECONDS and not event.is_end:
            return
        self._drawn = now
        room = max(shutil.get_terminal_size().columns - 1, 20)
        text = f"{bar_of(event)} {text_of(event)}"
        self._write("".join(c if c.isascii() and c.isprintable() else "?" for c in text)[:room])

    def close(self) -> None:
        if self._width:
            self._write("")

    def _write(self, text: str) -> None:
        self._stream.write(f"\r{text.ljust(self._width)}\r" if not text else f"\r{text.ljust(self._width)}")
        self._stream.flush()
        self._width = len(text)


class Lines:
    """Prints a line when a long task begins, and every `LINE_SECONDS` until it ends."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._told: dict[str, float] = {}

    def __call__(self, event: Progress) -> None:
        now = time.monotonic()
        begins = event.done == 0
        if begins:
            self._told[event.task] = now
        is_due = now - self._told.setdefault(event.task, now) >= LINE_SECONDS
        is_long = begins and event.seconds_left is not None and event.seconds_left >= FIRST_LINE_SECONDS
        if (is_due and not event.is_end) or is_long:
            self._told[event.task] = now
            self._stream.write(text_of(event) + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Do nothing: lines stay."""


class Display(Protocol):
    """Shows events, until it is closed."""

    def __call__(self, event: Progress) -> None: ...

    def close(self) -> None: ...


def display_on(stream: IO[str]) -> Display:
    """Return the display for a stream."""
    return Bar(stream) if is_live(stream) else Lines(stream)


class _Shown:
    """The only display of the process. While it is open, further `shown` blocks open none, and it shows all events."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions = 0
        self._is_used = False
        self._block: AbstractContextManager[None] = nullcontext()

    @contextmanager
    def on(self, display: Display) -> Iterator[None]:
        with self._lock:
            is_first, self._is_used = not self._is_used, True
        try:
            with on_progress(display) if is_first else nullcontext():
                yield
        finally:
            if is_first:
                display.close()
                with self._lock:
                    self._is_used = False

    def begin_session(self) -> None:
        with self._lock:
            self._sessions += 1
            is_first = self._sessions == 1
        if is_first and sys.stderr is not None:
            self._block = self.on(display_on(sys.stderr))
            self._block.__enter__()

    def end_session(self) -> None:
        with self._lock:
            self._sessions -= 1
            is_last = not self._sessions
        if is_last:
            self._block.__exit__(None, None, None)
            self._block = nullcontext()


_shown = _Shown()


@contextmanager
def shown(display: Display | None = None) -> Iterator[None]:
    """Show progress on a display while the block runs, by default on a display for the standard error.

    With ``ORT_CUDA_PLUGIN_PROGRESS=0`` nothing is shown.
    """
    if display is None and sys.stderr is not None:
        display = display_on(sys.stderr)
    if display is None or requested() is False:
        yield
    else:
        with _shown.on(display):
            yield


@contextmanager
def shown_for_session(is_wanted: bool) -> Iterator[None]:
    """Show progress while a session lives, if its option or the environment asks for it; sessions share one display."""
    asked = requested()
    if asked is False or not (asked or is_wanted):
        yield
        return
    _shown.begin_session()
    try:
        yield
    finally:
        _shown.end_session()
