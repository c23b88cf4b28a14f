"""A short run of bench/stress.py: right results under load, and all memory is freed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "bench" / "stress.py"


@pytest.mark.full
@pytest.mark.parametrize("streams", ["inline", "adversarial"])
def test_eight_threads_on_four_sessions_get_right_results_and_leave_nothing(streams: str) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--json", "--replace", "--seconds", "12", "--streams", streams],
        env=os.environ | {"PYTHONPATH": str(BENCHMARK.parent.parent)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    report = json.loads(done.stdout)
    assert report["failures"] == []
    assert report["runs"] > 0
    assert report["out_of_memory"] > 0
    assert report["device_bytes_in_use"] == report["pinned_bytes_in_use"] == report["weight_bytes"] == 0
