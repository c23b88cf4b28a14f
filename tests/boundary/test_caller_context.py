"""Every call of the plugin leaves the CUDA context and the capture mode of the calling thread unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from device_models import add_and_double
from isolated import HARNESS, python

CODE = """
import sys, numpy as np, onnxruntime as ort, ort_cuda_plugin as plugin
from ort_cuda_plugin.abi.core import ffi
from ort_cuda_plugin.abi.device import Device
from copy_paths import on_device
from profiles import profiled_session
from pathlib import Path

model, has_context, folder = bytes.fromhex(sys.argv[1]), sys.argv[2] == "1", Path(sys.argv[3])
other = Device.emulated(1)
own = other.context if has_context else ffi.NULL
def current():
    context = ffi.new("CUcontext *")
    assert other.driver.CtxGetCurrent(context) == 0
    return context[0]
def exchanged(mode):
    modes = ffi.new("int *", mode)
    assert other.driver.ThreadExchangeStreamCaptureMode(modes) == 0
    return modes[0]
assert other.driver.CtxSetCurrent(own) == 0
own_mode = 2 if has_context else 0
exchanged(own_mode)
did = []
def step(name, action):
    try:
        result = action()
    finally:
        assert current() == own, name
        assert exchanged(own_mode) == own_mode, name
        did.append(name)
    return result
def fails(name, action):
    try:
        step(name, action)
    except Exception:
        return
    raise AssertionError(name)

feeds = {"a": np.ones(8, np.float32), "b": np.ones(8, np.float32)}
session = step("session", lambda: plugin.session(model, emulate=True))
for _ in range(5):
    step("Run", lambda: session.run(None, feeds))
assert plugin.counters()["graph_replays"] > 0
step("new sizes", lambda: session.run(None, {name: np.ones(99, np.float32) for name in feeds}))
fails("a Run that fails", lambda: session.run(None, {"a": feeds["a"], "b": np.ones(3, np.float32)}))
values = step("values", lambda: {name: on_device(np.ones(8, np.float32)) for name in "abc"})
def bind(session):
    binding = session.io_binding()
    for name in "ab":
        binding.bind_ortvalue_input(name, values[name])
    binding.bind_ortvalue_output("c", values["c"])
    return binding
binding = bind(session)
for _ in range(5):
    step("bound Run", lambda: session.run_with_iobinding(binding))
step("synchronize inputs", binding.synchronize_inputs)
step("synchronize outputs", binding.synchronize_outputs)
capture = {"enable_cuda_graph": "1"}
captured = step("capturing session", lambda: plugin.session(model, emulate=True, provider_options=capture))
again = bind(captured)
captures = plugin.counters()["graph_captures"]
for _ in range(6):
    step("captured Run", lambda: captured.run_with_iobinding(again))
assert plugin.counters()["graph_captures"] > captures
cold = plugin.session(model, emulate=True, provider_options=capture)
fails("a Run that cannot be captured", lambda: [cold.run(None, feeds) for _ in range(5)])
np.testing.assert_array_equal(step("numpy", values["c"].numpy), 4)
step("update", lambda: values["a"].update_inplace(np.full(8, 2, np.float32)))
step("copy", lambda: ort.copy_tensors([values["a"]], [values["b"]]))
profiled = step("profiled session", lambda: profiled_session(model, folder))
step("profiled Run", lambda: profiled.run(None, feeds))
step("end of a profile", profiled.end_profiling)
array = step("array", lambda: Device.emulated(0).upload(feeds["a"]))
step("array freed", array.free)
step("trim", plugin.trim)
step("statistics", plugin.memory_stats)
limited = plugin.session(model, emulate=True, provider_options={"gpu_mem_limit": str(1 << 20)})
fails("out of memory", lambda: limited.run(None, {name: np.ones(1 << 22, np.float32) for name in feeds}))
step("capturing session released", lambda: globals().update(captured=None, again=None, cold=None))
step("session released", lambda: globals().update(session=None, binding=None, profiled=None, limited=None))
step("values released", lambda: globals().update(values=None))
step("unregister", plugin.unregister)
print(len(did))
"""


@pytest.mark.parametrize("has_context", [False, True], ids=["none", "other"])
def test_the_context_of_the_caller_stays_current(has_context: bool, tmp_path: Path) -> None:
    environment = {"ORT_CUDA_PLUGIN_EMULATE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(HARNESS)}
    done = python(CODE, add_and_double().hex(), str(int(has_context)), str(tmp_path), env=environment, preloaded=True)
    assert int(done.stdout) > 30
