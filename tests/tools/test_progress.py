"""Progress of long work: events, callbacks, bars and lines, and silence on request."""

from __future__ import annotations

import io
import logging
import threading
from types import SimpleNamespace

import pytest

import ort_cuda_plugin
from ort_cuda_plugin.progress import display, events
from ort_cuda_plugin.progress.display import Bar, Lines, bar_of, is_live, shown, shown_for_session, text_of
from ort_cuda_plugin.progress.events import Progress, Task, is_watched, on_progress


class Clock:
    """Time that only the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        for module in (events, display):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_task_reports_n_of_m_names_and_the_time_left(clock: Clock) -> None:
    found: list[Progress] = []
    with on_progress(found.append):
        task = Task("compiling kernels", 3, weight=8.0, seconds=20.0)
        clock.now += 3
        task.advance("conv", weight=2.0)
        clock.now += 3
        task.advance("softmax", weight=2.0)
        task.advance("relu", weight=4.0)
    assert found == [
        Progress("compiling kernels", "", 0, 3, 0.0, 20.0),
        Progress("compiling kernels", "conv", 1, 3, 3.0, 9.0),
        Progress("compiling kernels", "softmax", 2, 3, 6.0, 6.0),
        Progress("compiling kernels", "relu", 3, 3, 6.0, 0.0),
    ]
    assert [event.is_end for event in found] == [False, False, False, True]
    Task("more", 1).advance("unseen")
    assert len(found) == 4


def test_a_callback_that_fails_is_logged_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    found: list[Progress] = []

    def fail(event: Progress) -> None:
        raise ValueError("it")

    with on_progress(fail), on_progress(found.append), caplog.at_level(logging.WARNING, "ort_cuda_plugin"):
        task = Task("work", 2)
        task.advance("one")
    assert len(found) == 2
    assert [record.getMessage() for record in caplog.records] == [
        "a callback of on_progress failed and is not called again"
    ]
    assert not is_watched()


def test_threads_report_one_after_the_other() -> None:
    found: list[int] = []
    with on_progress(lambda event: found.append(event.done)):
        task = Task("work", 200)

        def work() -> None:
            for _ in range(50):
                task.advance("x")

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == list(range(201))


def test_a_bar_is_one_line_that_disappears(clock: Clock) -> None:
    stream = Terminal()
    bar = Bar(stream)
    bar(Progress("compiling kernels", "softmax", 1, 4, 3.0, 9.0))
    bar(Progress("compiling kernels", "relu", 2, 4, 3.0, 9.0))  # too soon to be drawn
    clock.now += 1
    bar(Progress("compiling kernels", "add\nline", 4, 4, 3.0, 0.0))
    bar.close()
    first, second, *end = stream.getvalue().split("\r")[1:]
    assert first == "[#####---------------] compiling kernels: 1 of 4, about 9 s left, softmax"
    assert second.rstrip() == "[####################] compiling kernels: 4 of 4, add?line"
    assert "\n" not in stream.getvalue()
    assert [part.strip() for part in end] == ["", ""]


def test_lines_are_few(clock: Clock) -> None:
    stream = io.StringIO()
    lines = Lines(stream)
    for second in range(13):
        lines(Progress("compiling kernels", f"k{second}" if second else "", second, 12, second, 12.0 - second))
        clock.now += 1
    assert stream.getvalue().splitlines() == [
        "compiling kernels: 0 of 12, about 12 s left",
        "compiling kernels: 5 of 12, about 7 s left, k5",
        "compiling kernels: 10 of 12, about 2 s left, k10",
    ]
    short = io.StringIO()
    Lines(short)(Progress("compiling kernels", "", 0, 12, 0.0, 0.5))
    assert short.getvalue() == ""


def test_texts_are_bounded() -> None:
    event = Progress("work", "n" * 99, 150, 100, 1.0, 600.0)
    assert text_of(event) == f"work: 150 of 100, {'n' * 37}..."
    assert bar_of(event) == f"[{'#' * 20}]"
    assert "about 10 min left" in text_of(Progress("work", "", 1, 2, 1.0, 600.0))


def test_notebooks_and_terminals_have_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    assert is_live(notebook)
    assert is_live(Terminal())
    assert not is_live(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not is_live(Terminal())
    closed = Terminal()
    monkeypatch.setattr(closed, "isatty", io.StringIO().isatty)
    assert not is_live(closed)


@pytest.mark.parametrize(("value", "option", "expected"), [
    ("", False, False), ("", True, True), ("1", False, True), ("0", True, False),
])  # fmt: skip
def test_sessions_show_progress_on_request_only(
    monkeypatch: pytest.MonkeyPatch, value: str, option: bool, expected: bool
) -> None:
    monkeypatch.setenv(display.VARIABLE, value)
    with shown_for_session(option), shown_for_session(option):
        assert is_watched() == expected
    assert not is_watched()


def test_there_is_one_display_and_none_on_request(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    outer, inner = io.StringIO(), io.StringIO()
    with shown(Lines(outer)), shown(Lines(inner)), shown_for_session(True):
        Task("work", 2, seconds=9.0)
    assert (outer.getvalue(), inner.getvalue()) == ("work: 0 of 2, about 9 s left\n", "")
    monkeypatch.setenv(display.VARIABLE, "0")
    silent = io.StringIO()
    with shown(Lines(silent)):
        Task("work", 2, seconds=9.0)
    assert silent.getvalue() == ""


def test_applications_have_the_events() -> None:
    assert ort_cuda_plugin.on_progress is on_progress
    assert ort_cuda_plugin.Progress is Progress
