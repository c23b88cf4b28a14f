"""Measures how long a new process takes to its first result, and how much device memory it then holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ort_cuda_plugin.benchmark.measure import Task
from ort_cuda_plugin.benchmark.sides import PLUGIN

from ..abi.errors import Error

_CHILD = """
import json, sys, time
import numpy as np, onnxruntime, ort_cuda_plugin
from ort_cuda_plugin.benchmark.creation import device_bytes
from ort_cuda_plugin.benchmark.sides import create_session
from ort_cuda_plugin.custom.files import load_operators
side, source, feeds, names, emulate, operators = json.loads(sys.argv[1])
for file in operators:
    load_operators(file)
feeds = dict(np.load(feeds))
if side == "plugin":
    ort_cuda_plugin.register(emulate=emulate)
free = device_bytes(side, emulate)
begun = time.perf_counter()
session = create_session(side, source, emulate)
session.run(names, feeds)
seconds = time.perf_counter() - begun
print(json.dumps([seconds, device_bytes(side, emulate) - free]))
"""


@dataclass(frozen=True)
class Creation:
    """Seconds of session creation and first Run, without imports, and bytes of device memory held after the Run.

    The kernel cache is empty for ``cold_s`` and filled for ``warm_s``.
    """

    cold_s: float
    warm_s: float
    device_bytes: int


class ChildError(Error, RuntimeError):
    """A call of the CUDA driver failed, or a child process failed while it measured the creation of a session."""


def measure_creation(task: Task, side: str) -> Creation:
    """Measure session creation in two processes. The first fills an empty kernel cache, the second uses this cache."""
    with tempfile.TemporaryDirectory() as folder:
        feeds = Path(folder, "feeds.npz")
        np.savez(feeds, allow_pickle=False, **{name: np.asarray(array) for name, array in task.feeds.items()})
        request = json.dumps([side, task.source, str(feeds), list(task.names), task.emulate, list(task.operators)])
        (cold, _), (warm, held) = (_child(request, str(Path(folder, "cache"))) for _ in range(2))
    return Creation(cold, warm, held)


def device_bytes(side: str, emulate: bool) -> int:
    """Return the bytes of device memory that all processes use on the GPU.

    If ``emulate``, return the bytes that the plugin uses in this process, 0 for another side.
    """
    import ort_cuda_plugin

    if emulate:
        return int(ort_cuda_plugin.memory_stats()["device"]["TotalAllocated"]) if side == PLUGIN else 0
    from cuda.bindings import driver

    def call(name: str, *arguments: Any) -> Any:
        result, *values = getattr(driver, name)(*arguments)
        if int(result):
            raise ChildError(f"{name} failed with CUresult {int(result)}")
        return values[0] if len(values) == 1 else values

    call("cuInit", 0)
    device = call("cuDeviceGet", 0)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", device))
    free, total = call("cuMemGetInfo")
    return int(total - free)


def _child(request: str, cache: str) -> tuple[float, int]:
    environment = os.environ | {"ORT_CUDA_PLUGIN_CACHE_DIR": cache}
    done = subprocess.run([sys.executable, "-c", _CHILD, request], env=environment, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        raise ChildError(f"the process that creates the session ended with exit code {done.returncode}: {last}")
    seconds, held = json.loads(done.stdout.splitlines()[-1])
    return float(seconds), int(held)
