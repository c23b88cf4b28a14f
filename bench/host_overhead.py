"""Compares the host time of one Add of eight floats: this plugin on its emulated device, a C plugin that does nothing,
and the CPU provider.

    python bench/host_overhead.py [--batches N] [--json]

Batches of Runs alternate between the three sessions of one process. The table shows the median time of a Run, and the
median ratio to the CPU provider's batch in the same turn. "run" is session.run with NumPy arrays, "bound" is
run_with_iobinding with inputs and output that stay on the session's device. Times are CPU times of the calling thread,
so other load on the machine does not count. With inline streams this thread also runs the emulated device's kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

import ort_cuda_plugin
from ort_cuda_plugin.benchmark.sides import plugin_place

RUNS_PER_BATCH = 200
NULL_VENDOR = 0x10DE0F
ROOT = Path(__file__).resolve().parent.parent
x = np.arange(8, dtype=np.float32)
feeds = {"a": x, "b": x}


def add_model() -> bytes:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [8]) for name in "abc"]
    graph = helper.make_graph([helper.make_node("Add", ["a", "b"], ["c"])], "add", values[:2], values[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def null_session(model: bytes, folder: Path) -> ort.InferenceSession:
    """Build bench/null_ep.c and return a session on it."""
    library = folder / "libnull_ep.so"
    command = [os.environ.get("CC", "cc"), "-O2", "-fPIC", "-shared", f"-I{ROOT / 'csrc_shim'}"]
    subprocess.run([*command, ROOT / "bench" / "null_ep.c", "-o", library], check=True)
    ort.register_execution_provider_library("null", str(library))
    options = ort.SessionOptions()
    devices = [device for device in ort.get_ep_devices() if device.ep_name == "NullExecutionProvider"]
    options.add_provider_for_devices(devices, {})
    return ort.InferenceSession(model, options)


def bound_run(session: ort.InferenceSession, place: tuple[Any, ...]) -> Callable[[], object]:
    """Return a function that calls run_with_iobinding with bound values.

    The second argument has what `ortvalue_from_numpy` needs to choose the values' device; () is the CPU.
    """
    values = {name: ort.OrtValue.ortvalue_from_numpy(x, *place) for name in "abc"}
    binding = session.io_binding()
    binding.bind_ortvalue_input("a", values["a"])
    binding.bind_ortvalue_input("b", values["b"])
    binding.bind_ortvalue_output("c", values["c"])

    def run() -> object:
        session.run_with_iobinding(binding)
        return values["c"]

    return run


def microseconds(run: Callable[[], object]) -> float:
    started = time.thread_time_ns()
    for _ in range(RUNS_PER_BATCH):
        run()
    return (time.thread_time_ns() - started) / RUNS_PER_BATCH / 1000


def measure(runs: dict[str, Callable[[], object]], batches: int) -> dict[str, dict[str, float]]:
    for run in runs.values():
        microseconds(run)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(batches):
        for name, run in runs.items():
            times[name].append(microseconds(run))
    return {
        name: {
            "microseconds": statistics.median(values),
            "ratio": statistics.median(value / cpu for value, cpu in zip(values, times["cpu"], strict=True)),
        }
        for name, values in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    model = add_model()
    with tempfile.TemporaryDirectory() as folder:
        plugin = ort_cuda_plugin.session(model, emulate=True)
        null = null_session(model, Path(folder))
        cpu = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
        results = {
            "run": measure(
                {
                    "plugin": lambda: plugin.run(None, feeds),
                    "null": lambda: null.run(None, feeds),
                    "cpu": lambda: cpu.run(None, feeds),
                },
                arguments.batches,
            ),
            "bound": measure(
                {
                    "plugin": bound_run(plugin, plugin_place(True)),
                    "null": bound_run(null, ("gpu", 0, NULL_VENDOR)),
                    "cpu": bound_run(cpu, ()),
                },
                arguments.batches,
            ),
        }
        np.testing.assert_array_equal(plugin.run(None, feeds)[0], x + x)
    if arguments.json:
        print(json.dumps(results))
        return
    print(f"{'':8}{'plugin':>18}{'null plugin':>18}{'CPU provider':>18}")
    for kind, row in results.items():
        cells = [
            f"{row[name]['microseconds']:8.2f} us {row[name]['ratio']:5.2f}x" for name in ("plugin", "null", "cpu")
        ]
        print(f"{kind:8}" + "".join(f"{cell:>18}" for cell in cells))


if __name__ == "__main__":
    main()
