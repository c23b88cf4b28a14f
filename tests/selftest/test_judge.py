"""What the selftest measures and compares: new memory, truth values, and times of library calls."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import onnxruntime as ort
import pytest

from ort_cuda_plugin.selftest import judge
from ort_cuda_plugin.selftest.device import Device
from ort_cuda_plugin.selftest.judge import FILL, ROUNDS, SLOW_RATIO, why_slow
from ort_cuda_plugin.selftest.sections.case import difference


def test_new_memory_of_the_device_is_filled_in_the_block_only() -> None:
    device = Device(is_emulated=True)
    device.opened.synchronize()

    def new(count: int) -> set[int]:
        value = ort.OrtValue.ortvalue_from_shape_and_type([count], np.uint8, "cuda", 0)
        return set(value.numpy().tolist())

    with device.opened.filling_new_memory(FILL):
        assert new(5000) == {FILL}
    kept = ort.OrtValue.ortvalue_from_numpy(np.full(5000, 1, np.uint8), "cuda", 0)
    assert set(kept.numpy()) == {1}
    del kept
    assert FILL not in new(5000)  # the allocation reuses the chunk of ``kept``
    with device.opened.filling_new_memory(FILL):
        assert new(5000) == {FILL}


def test_a_byte_that_is_not_a_truth_value_is_wrong() -> None:
    found = np.array([1, FILL, 0], np.uint8).view(np.bool_)
    assert difference(found, np.array([True, True, False]), True).startswith("1 of 3 elements are wrong; element [1]")


class Clock:
    """Times of Runs, which take as long as given, without waiting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        assert judge.time is time  # type: ignore[attr-defined]

    def run(self, *seconds: float) -> Callable[[], None]:
        """Return a function that stands for a Run: calls take these seconds in turn, further calls the last ones."""
        left = list(seconds)

        def taken() -> None:
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return taken


def test_a_slow_call_is_slow_on_a_fast_and_on_a_loaded_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    for load in (1e-5, 1e-3, 1.0):
        reason = why_slow(clock.run(2 * SLOW_RATIO * load), clock.run(load))
        assert f"{2 * SLOW_RATIO:.0f} times as long as with the plugin's kernel" in reason, reason


@pytest.mark.parametrize("load", [1.0, 100.0, 10_000.0])
def test_a_loaded_machine_makes_no_call_slow(load: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert why_slow(clock.run(3e-3 * load), clock.run(1e-3 * load)) == ""


def test_a_burst_of_other_work_makes_no_call_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    burst = [1.0] * (ROUNDS - 1)
    assert why_slow(clock.run(*burst, 1e-3), clock.run(1e-3)) == ""
    assert why_slow(clock.run(*burst, 1.0), clock.run(1e-3)) != ""


def test_a_burst_of_other_work_hides_no_slow_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert why_slow(clock.run(0.1), clock.run(*[1.0] * (ROUNDS - 1), 1e-3)) != ""
