"""Calls that a signal handler cannot interrupt."""

from __future__ import annotations

import signal
import threading
from types import FrameType

import pytest

from ort_cuda_plugin import uninterrupted


class Alarm(Exception):
    pass


def ring(number: int, frame: FrameType | None) -> None:
    raise Alarm


def test_results_and_errors_come_through() -> None:
    assert uninterrupted.call(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        uninterrupted.call(lambda: 1 // 0)


def test_a_handler_that_raises_ends_the_wait_and_not_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, ended = threading.Event(), threading.Event()
    said = []

    def function() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        assert go_on.wait(60)
        ended.set()

    before = signal.signal(signal.SIGUSR1, ring)
    try:
        with pytest.raises(Alarm):
            uninterrupted.call(function, lambda: said.append("abandoned"))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert said == ["abandoned"]
    assert not ended.is_set()
    go_on.set()
    assert ended.wait(60)


def test_without_a_thread_to_be_had_the_caller_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert uninterrupted.call(threading.current_thread) is threading.current_thread()


def test_a_module_that_is_there_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uninterrupted, "call", None)
    assert uninterrupted.imported("threading") is threading
