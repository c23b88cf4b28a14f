"""The benchmark of the host's time per Run works; its numbers need a quiet machine, so no test checks them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).resolve().parents[2] / "bench" / "host_overhead.py"


def test_the_benchmark_compares_the_plugin_and_an_empty_one_with_the_cpu_provider() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--json", "--batches", "2"],
        env=os.environ | {"ORT_CUDA_PLUGIN_EMULATE_STREAMS": "inline", "PYTHONPATH": str(BENCHMARK.parent.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    results = json.loads(done.stdout)
    assert all(results[path][ep]["ratio"] > 0 for path in ("run", "bound") for ep in ("plugin", "null"))
