"""Session creation and Runs of the onnx wheel's light models: cold and warm kernel cache, steady Runs against the CPU
provider.

    python bench/light_models.py [MODEL ...] [--runs N] [--device emulated|cuda]

Cold and warm are fresh processes, imports included, from the start of the interpreter to the first result. Steady
Runs are medians of Runs that alternate with the CPU provider's in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CHILD = """
import sys, time, json
import onnxruntime as ort, ort_cuda_plugin
from ort_cuda_plugin import models
path, output, emulate = sys.argv[1], sys.argv[2], sys.argv[3] == "emulated"
session = ort_cuda_plugin.session(path, emulate=emulate)
import numpy as np
feeds = dict(np.load(sys.argv[4]))
session.run([output], feeds)
counters = ort_cuda_plugin.counters()
print(json.dumps({"numba": "numba" in sys.modules, "llvmlite": "llvmlite" in sys.modules, "compiled":
counters["kernels_compiled"]}))
"""


def first_result(model: Path, output: str, device: str, feeds: Path, cache: str) -> tuple[float, dict[str, Any]]:
    """Seconds of a fresh process to its first result, and what it says of itself."""
    environment = os.environ | {"ORT_CUDA_PLUGIN_CACHE_DIR": cache}
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(model), output, device, str(feeds)],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return time.perf_counter() - started, json.loads(done.stdout.splitlines()[-1])


def measure(name: str, device: str, runs: int) -> dict[str, Any]:
    import numpy as np
    import onnx
    import onnxruntime as ort

    import ort_cuda_plugin
    from ort_cuda_plugin import models

    with tempfile.TemporaryDirectory() as folder:
        model, output = models.before_softmax(onnx.load(models.wheel_models()[name]))
        model = models.with_noise_weights(model)
        path, feeds_path = Path(folder, "model.onnx"), Path(folder, "feeds.npz")
        onnx.save(model, path)
        feeds = models.random_inputs(model)
        np.savez(feeds_path, allow_pickle=False, **feeds)
        own_cache = str(Path(folder, "cache"))
        cold, _ = first_result(path, output, device, feeds_path, own_cache)
        warm, warm_state = first_result(path, output, device, feeds_path, own_cache)
        session = ort_cuda_plugin.session(path, emulate=device == "emulated")
        cpu = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        sides = {"plugin": session, "cpu": cpu}
        for side in sides.values():
            side.run([output], feeds)
        times: dict[str, list[float]] = {side: [] for side in sides}
        before = ort_cuda_plugin.counters()
        for _ in range(runs):
            for side, runner in sides.items():
                begun = time.perf_counter()
                runner.run([output], feeds)
                times[side].append(time.perf_counter() - begun)
        after = ort_cuda_plugin.counters()
    return {
        "model": name,
        "cold_s": cold,
        "warm_s": warm,
        "warm_process": warm_state,
        "plugin_ms": statistics.median(times["plugin"]) * 1e3,
        "cpu_ms": statistics.median(times["cpu"]) * 1e3,
        "launches": (after["launches"] - before["launches"]) / runs,
        "python_calls": after["python_calls"] - before["python_calls"],
    }


def main() -> None:
    from ort_cuda_plugin import models

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=sorted(models.wheel_models()))
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--device", choices=["emulated", "cuda"], default="emulated")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["ORT_CUDA_PLUGIN_CACHE_DIR"] = cache
        for name in arguments.models:
            print(json.dumps(measure(name, arguments.device, arguments.runs)), flush=True)


if __name__ == "__main__":
    main()
