"""Counts what a steady Run of Add of eight floats costs the host: driver calls, locks, allocations and copies.

A time says little on a busy machine. Each of these numbers was measured; one that grows makes each Run of each model
slower, so a change has to say why it needs more. ``bench/host_overhead.py`` measures the time.
"""

from __future__ import annotations

import json

import pytest

from isolated import python

RUNS = 10
COUNT = f"""
import json, sys
sys.path.insert(0, "tests/harness")
import numpy as np, onnxruntime as ort, ort_cuda_plugin as plugin
from faults import Faults
from isolated import add_model
from ort_cuda_plugin.benchmark.sides import plugin_place
faults = Faults()
plugin.register(emulate=True)
session = plugin.session(add_model(), emulate=True)
x = np.arange(8, dtype=np.float32)

def run():
    return session.run(None, {{"a": x, "b": x}})[0]

values = {{name: ort.OrtValue.ortvalue_from_numpy(x, *plugin_place(True)) for name in "abc"}}
binding = session.io_binding()
binding.bind_ortvalue_input("a", values["a"])
binding.bind_ortvalue_input("b", values["b"])
binding.bind_ortvalue_output("c", values["c"])

def bound():
    session.run_with_iobinding(binding)
    return values["c"].numpy() if checks else None

found = {{}}
for name, step in (("run", run), ("bound", bound)):
    checks = True
    for _ in range(20):
        np.testing.assert_array_equal(step(), x + x)
    checks = False
    counters = plugin.counters()
    faults.arm(None)
    for _ in range({RUNS}):
        step()
    calls, locks = faults.calls(), faults.locks
    after = plugin.counters()
    found[name] = {{"locks": locks, **calls}}
    found[name] |= {{key: after[key] - counters[key] for key in after if after[key] != counters[key]}}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def costs() -> dict[str, dict[str, float]]:
    """Return the counts per Run: "run" with NumPy arrays, "bound" with bindings to device memory."""
    environment = {"CUDA_VISIBLE_DEVICES": "", "ORT_CUDA_PLUGIN_EMULATE_STREAMS": "inline"}
    found = json.loads(python(COUNT, env=environment, preloaded=True).stdout.splitlines()[-1])
    return {kind: {name: count / RUNS for name, count in counts.items()} for kind, counts in found.items()}


def without(costs: dict[str, float], *names: str) -> dict[str, float]:
    return {name: count for name, count in costs.items() if name not in names}


def test_a_run_calls_the_driver_for_its_copies_its_launch_and_one_wait(costs: dict[str, dict[str, float]]) -> None:
    copies = {"MemcpyHtoDAsync": 2, "MemcpyDtoHAsync": 1, "copies_h2d": 2, "copies_d2h": 1}
    always = {"LaunchKernel": 1, "StreamSynchronize": 1, "runs": 1, "launches": 1, "plan_hits": 1}
    stay = ("CtxGetCurrent", "CtxSetCurrent", "ThreadExchangeStreamCaptureMode")
    assert without(costs["run"], "locks", *stay) == copies | always
    assert without(costs["bound"], "locks", *stay) == always  # and a bound Run allocates no host memory


def test_a_run_enters_the_device_once_in_each_callback(costs: dict[str, dict[str, float]]) -> None:
    contexts = {kind: (counts["CtxGetCurrent"], counts["CtxSetCurrent"]) for kind, counts in costs.items()}
    # Four callbacks (copies to the device, launch, copy back, wait) each set and restore the context.
    assert contexts == {"run": (4, 8), "bound": (2, 4)}
    modes = {kind: counts["ThreadExchangeStreamCaptureMode"] for kind, counts in costs.items()}
    assert modes == {"run": 8, "bound": 4}  # set and restored in each callback


def test_a_run_takes_few_locks(costs: dict[str, dict[str, float]]) -> None:
    """Each launch, and each end of a Run, locks its stream and the record of the stream's progress.

    A Run with NumPy arrays also has three copies, which lock the stream and the emulator's heap, and allocations, which
    lock the pool.
    """
    assert {kind: counts["locks"] for kind, counts in costs.items()} == {"run": 19, "bound": 5}
