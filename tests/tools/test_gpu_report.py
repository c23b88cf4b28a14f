"""`bench/gpu_report.py`: what it makes of its sections. The commands that it calls have tests of their own."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import gpu_measurements  # noqa: E402
import gpu_report  # noqa: E402
from gpu_report import Clock, Section  # noqa: E402

from ort_cuda_plugin.estimate import fit  # noqa: E402


def test_a_section_that_fails_does_not_stop_the_next_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: str, clock: Clock) -> Section:
        raise OSError("no such thing")

    sections = {"a": broken, "b": lambda device, clock: Section({"n": 1}, [f"on {device}"])}
    monkeypatch.setattr(gpu_report, "SECTIONS", sections)
    target = tmp_path / "new" / "report"
    monkeypatch.setattr(sys, "argv", ["gpu_report.py", "--device", "emulated", "--output", str(target), "--sections"])
    sys.argv += ["a", "b"]
    assert gpu_report.main() == 1
    text, data = target.with_suffix(".md").read_text(), json.loads(target.with_suffix(".json").read_text())
    assert "**Failed:** OSError: no such thing" in text
    assert "A rehearsal on the emulated device" in text
    assert text.index("## a") < text.index("on emulated")
    assert data["b"]["n"] == 1
    assert data["a"]["failure"] == "OSError: no such thing"


def test_commands_end_in_time_and_say_how() -> None:
    slow = gpu_report.checked([sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"], 2)
    assert slow.failure == "no end within 2 s"
    assert "begun" in slow.lines
    assert gpu_report.checked([sys.executable, "-c", "raise SystemExit(3)"], 30).failure == "exit code 3"
    assert gpu_report.checked([sys.executable, "-c", "print('right')"], 30).lines == ["```", "right", "```"]
    assert Clock(time.monotonic() + 5).left(100) <= 5
    assert Clock(time.monotonic() - 5).left(100) == 1


def test_measurements_of_kernels_are_fitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [one for one in gpu_measurements.kernels() if one.op_type in ("Add", "Softmax")]
    small = [dataclasses.replace(one, shapes=tuple((4, 32) for _ in one.shapes)) for one in chosen[:3]]
    monkeypatch.setattr(gpu_measurements, "kernels", lambda largest: iter(small))
    file = tmp_path / "m.json"
    assert gpu_measurements.main(["--device", "emulated", "--output", str(file), "--runs", "1", "--models"]) == 0
    device, found = fit.read_measurements(file.read_text())
    assert device == "h100"
    assert [(one.name, len(one.work.steps)) for one in found] == [(one.name, 1) for one in small]
    assert all(one.seconds > 0 for one in found)


def test_there_are_a_hundred_kernels_of_all_families() -> None:
    kernels = list(gpu_measurements.kernels())
    assert len({kernel.name for kernel in kernels}) == len(kernels) >= 100
    assert {"Add", "Softmax", "ReduceSum", "Transpose", "MatMul", "Conv"} <= {kernel.op_type for kernel in kernels}
    assert list(gpu_measurements.kernels(16)) == []


def test_a_kernel_that_the_host_outlasts_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_measurements, "measured", lambda *arguments: (1e-5, 0.9e-5))
    model = next(gpu_measurements.kernels()).model()
    assert gpu_measurements.measure("short", model, {}, 1, False) is None
