"""`bench/gpu_report.py`: what it makes of its sections. The commands that it calls have tests of their own."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import gpu_report  # noqa: E402
from gpu_report import Clock, Section  # noqa: E402


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


def test_work_of_a_profile_meets_the_steps_of_an_estimate() -> None:
    steps = [
        {"nodes": ["a (Add)", "b (Relu)"], "seconds": 2e-6, "bound": "dram"},
        {"nodes": ["c (MatMul)"], "seconds": 3e-6, "bound": "tensor"},
        {"nodes": ["c (MatMul)"], "seconds": 1e-6, "bound": "dram"},
        {"nodes": ["gone (Abs)"], "seconds": 1e-6, "bound": "dram"},
    ]
    work = [
        {"nodes": ["b", "a"], "microseconds": 4.0},
        {"nodes": ["c"], "microseconds": 5.0},
        {"nodes": [], "microseconds": 9.0},
    ]
    assert [
        (pair["nodes"], round(pair["estimated_us"], 3), pair["measured_us"])
        for pair in gpu_report.paired("m", steps, work)
    ] == [(["a", "b"], 2.0, 4.0), (["c"], 4.0, 5.0)]


def test_the_error_is_that_of_every_third_pair() -> None:
    pairs = [{"estimated_us": 1.0, "measured_us": 100.0}] * 12
    for index, (estimated, measured) in {2: (1.0, 2.0), 5: (2.0, 2.5), 8: (3.0, 3.0), 11: (4.0, 5.0)}.items():
        pairs[index] = {"estimated_us": estimated, "measured_us": measured}
    (line,) = gpu_report.summary_of_pairs(pairs)
    assert line == "12 steps were timed. Of the 4 held out, the median error is 20% and the rank correlation 1.00."
    assert gpu_report.correlation([1, 2, 3], [9, 5, 1]) == pytest.approx(-1)
    assert "too few" in gpu_report.summary_of_pairs(pairs[:4])[0]
