"""Fault injection into driver calls: the injector, a sample of each scenario, and the guarantees after a failure.

``python tests/harness/fault_campaign.py`` runs the whole campaign.
"""

from __future__ import annotations

import re

import pytest

from fault_campaign import describe, run_scenario
from fault_scenarios import SCENARIOS
from faults import Fault
from isolated import python

START = """
import gc, sys
sys.path.insert(0, "tests/harness")
import numpy as np, onnxruntime as ort, ort_cuda_plugin as plugin
from fault_scenarios import SCENARIOS, numbers, on_device, plugin_device, session
from device_models import add_and_double
from faults import Fault, Faults, Usage
ort.set_default_logger_severity(4)
faults = Faults()
plugin.register(emulate=True)
def error_of(action):
    try:
        action()
    except Exception as error:
        return str(error)
    return ""
"""
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "ORT_CUDA_PLUGIN_EMULATE_WORKERS": "1"}


def run(code: str) -> None:
    python(START + code, env=ENVIRONMENT, preloaded=True)


# ---- the injector ----


def test_a_fault_is_written_as_it_is_read() -> None:
    for fault in (Fault("MemAlloc", 3, 2, "once"), Fault("StreamDestroy", 1, 999, "end", effect=True)):
        assert Fault.parse(str(fault)) == fault


def test_the_call_that_is_armed_fails_and_no_other() -> None:
    run(
        """
plain = SCENARIOS["plain"]()
plain.create()
run = plain.steps()[0]
run()
faults.arm(None)
run()
calls = faults.calls()
assert calls["MemcpyHtoDAsync"] == 2 and calls["MemcpyDtoHAsync"] == 1 and calls["StreamSynchronize"] == 1, calls
faults.arm(Fault("MemcpyHtoDAsync", 3, 999, "once"))
run()
assert faults.fired == 0
assert "cuMemcpyHtoDAsync failed: CUDA_ERROR_UNKNOWN" in error_of(run) and faults.fired == 1
assert any(place.startswith("enqueue_copy (ort/data/memory.c:") for place in faults.places(faults.frames()))
run()
faults.arm(Fault("MemcpyHtoDAsync", 2, 999, "on"))
assert error_of(run) and error_of(run) and faults.fired == 2
faults.disarm()
run()
plain.run(77)
faults.arm(Fault("calloc", 1, 1, "once"))
assert "out of host memory: an allocation in this process failed" in error_of(lambda: plain.run(78))
assert faults.fired == 1
plain.run(78)
"""
    )


# ---- a sample of the campaign ----


@pytest.mark.parametrize("scenario", [name for name, kind in SCENARIOS.items() if not kind.fresh_process])
def test_a_call_of_each_function_fails_and_is_told_of(scenario: str) -> None:
    position = list(SCENARIOS).index(scenario)
    report = run_scenario(scenario, 1, position, ("inline", "adversarial")[position % 2])
    assert not report.wrong, describe(report, verbose=False)
    assert len(report.outcomes) == len(report.calls) > 8
    assert any(outcome.errors for outcome in report.outcomes)


def test_the_first_use_of_a_device_fails_and_the_second_works() -> None:
    opening = re.compile(r"Init|Device\w+|mmap")
    report = run_scenario("first-use", 1, 1, "inline", lambda fault: opening.fullmatch(fault.function))
    assert not report.wrong, describe(report, verbose=False)
    assert {"Init", "DeviceGetCount", "DevicePrimaryCtxRetain"} <= report.calls.keys()
    assert len(report.outcomes) > 6


# ---- guarantees after a failure ----


@pytest.mark.parametrize("scenario", ["graphs", "captured", "mempool", "cpu-nodes"])
def test_everything_on_a_lost_device_is_given_back(scenario: str) -> None:
    run(
        f"""
for _ in range(2):  # the second time everything is warm
    use = SCENARIOS[{scenario!r}]()
    use.create()
    for step in use.steps():
        step()
    if _ == 0:
        use.close()
faults.arm(Fault("LaunchKernel" if {scenario!r} == "mempool" else "MemcpyHtoDAsync", 1, 719, "lost"))
if {scenario!r} == "mempool":
    error = error_of(lambda: use.run(1111))
else:
    error = error_of(use.steps()[-1])
assert "CUDA_ERROR_LAUNCH_FAILED" in error, error
assert "is lost, restart the process" in error_of(use.steps()[0])
use.close()
plugin.trim()
alive = {{name: n for name, n in plugin.counters().items() if name.endswith(("_live", "_in_use", "weight_bytes"))}}
assert set(alive.values()) == {{0}}, alive
usage = faults.usage(plugin_device())
assert (usage.objects, usage.device_bytes) == (0, 0), usage
plugin.unregister()
"""
    )


@pytest.mark.parametrize("mode", ["once", "on"])
@pytest.mark.parametrize("effect", [True, False], ids=["ended", "left open"])
def test_a_capture_that_cannot_be_ended_fails_its_run_only(mode: str, effect: bool) -> None:
    run(
        f"""
made = session(add_and_double(), enable_cuda_graph=1)
a, b, c = on_device(numbers(16, 1)), on_device(numbers(16, 2)), on_device(numbers(16, 3))
binding = made.io_binding()
binding.bind_ortvalue_input("a", a)
binding.bind_ortvalue_input("b", b)
binding.bind_ortvalue_output("c", c)
def run():
    made.run_with_iobinding(binding)
faults.arm(Fault("StreamEndCapture", 1, 999, {mode!r}, {effect}))
assert "cuStreamEndCapture failed: CUDA_ERROR_UNKNOWN" in error_of(run)
if {mode!r} == "on":
    assert "cuStreamEndCapture failed: CUDA_ERROR_UNKNOWN" in error_of(run)
    faults.disarm()
for _ in range(4):
    run()
    np.testing.assert_allclose(c.numpy(), 2 * (numbers(16, 1) + numbers(16, 2)), rtol=1e-6)
assert plugin.counters()["graph_replays"] > 0
"""
    )


def test_a_release_that_fails_is_logged_once_by_name() -> None:
    """The plugin goes on after the failure: the resource stays allocated, and nothing else is wrong."""
    calls = {
        "graphs": ("MemFree", "StreamDestroy", "GraphExecDestroy", "GraphDestroy", "ModuleUnload"),
        "mempool": ("MemFreeAsync",),
    }
    done = python(
        START
        + f"""
ort.set_default_logger_severity(2)
for scenario, calls in {calls!r}.items():
    for call in calls:
        for _ in range(2):
            use = SCENARIOS[scenario]()
            faults.arm(Fault(call, 1, 999, "on", True))
            use.create()
            for step in use.steps():
                step()
            use.close()
            gc.collect()
            plugin.trim()
            assert faults.fired, call
            faults.disarm()
""",
        env=ENVIRONMENT,
        preloaded=True,
    )
    lines = (done.stdout + done.stderr).splitlines()
    for call in [call for group in calls.values() for call in group]:
        assert sum(f"cu{call} failed: CUDA_ERROR_UNKNOWN" in line for line in lines) == 1, (call, lines)
