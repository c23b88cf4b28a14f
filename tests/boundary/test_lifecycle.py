"""Repeated registrations leak nothing."""

from __future__ import annotations

import pytest

from isolated import add_model, python

ROUNDS = """
import gc, sys
import numpy as np, onnxruntime as ort, psutil, ort_cuda_plugin as plugin
model = bytes.fromhex(sys.argv[1])
process = psutil.Process()

def one_round(n):
    plugin.register(emulate=True)
    session = plugin.session(model, emulate=True)
    x = np.arange(n, dtype=np.float32)
    np.testing.assert_array_equal(session.run(None, {"a": x, "b": x})[0], x + x)
    del session
    gc.collect()
    plugin.unregister()

def in_use():
    kept = ("_in_use", "_live", "weight_bytes")
    return {name: value for name, value in plugin.counters().items() if name.endswith(kept)}

before = in_use()
assert set(before) == {"device_bytes_in_use", "pinned_bytes_in_use", "weight_bytes", "host_weight_bytes",
                       "streams_live", "graphs_live"}
resident = []
for index in range(50):
    one_round(1000 + index)
    assert in_use() == before, (index, in_use())
    resident.append(process.memory_full_info().uss)
print((resident[-1] - resident[10]) / 1024 / (len(resident) - 11))
"""


@pytest.mark.parametrize("streams", ["inline", "adversarial"])
def test_fifty_registrations_keep_no_device_bytes_and_no_host_memory(streams: str) -> None:
    done = python(
        ROUNDS,
        add_model(dims=["n"]).hex(),
        env={"ORT_CUDA_PLUGIN_EMULATE_STREAMS": streams, "CUDA_VISIBLE_DEVICES": ""},
        preloaded=True,
    )
    assert float(done.stdout) < 50  # KiB per round


def test_a_session_that_is_made_again_and_again_keeps_no_host_memory() -> None:
    code = """
import gc, sys
import numpy as np, psutil, ort_cuda_plugin as plugin
model = bytes.fromhex(sys.argv[1])
x = np.arange(8, dtype=np.float32)
process = psutil.Process()
resident = []
for _ in range(60):
    session = plugin.session(model, emulate=True)
    session.run(None, {"a": x, "b": x})
    del session
    gc.collect()
    resident.append(process.memory_full_info().uss)
print((resident[-1] - resident[10]) / 1024 / (len(resident) - 11))
"""
    assert float(python(code, add_model(dims=["n"]).hex(), preloaded=True).stdout) < 50


def test_a_run_that_does_not_fit_fails_with_a_reason_and_the_next_one_runs() -> None:
    code = """
import sys
import numpy as np, onnxruntime as ort, ort_cuda_plugin as plugin
session = plugin.session(bytes.fromhex(sys.argv[1]), emulate=True)
def run(n):
    x = np.arange(n, dtype=np.float32)
    np.testing.assert_array_equal(session.run(None, {"a": x, "b": x})[0], x + x)
run(1000)
before = plugin.counters()["device_bytes_in_use"]
# 16 MiB hold three arrays of 10^6; two but no output of 1.6 * 10^6; not even the inputs of 3 * 10^6.
run(10**6)
for n, wanted in ((1_600_000, 6400000), (3 * 10**6, 12000000)):
    for attempt in range(2):
        try:
            run(n)
        except Exception as error:
            assert f"out of memory on emulated CUDA device 0: {wanted} bytes" in str(error), error
        else:
            raise AssertionError(n)
        run(1000)
        assert plugin.counters()["device_bytes_in_use"] == before
"""
    done = python(code, add_model(dims=["n"]).hex(), env={"ORT_CUDA_PLUGIN_EMULATE_MEMORY": "16M"}, preloaded=True)
    assert "out of memory on emulated CUDA device 0: 12000000 bytes" in done.stderr  # also logged


def test_values_that_outlive_their_session_and_stream_are_freed() -> None:
    code = """
import gc, sys
import numpy as np, onnxruntime as ort, ort_cuda_plugin as plugin
[device] = [d for d in plugin.register(emulate=True) if d.ep_metadata["emulated"] == "1"]
memory = device.memory_info(ort.OrtDeviceMemoryType.DEFAULT)
session = plugin.session(bytes.fromhex(sys.argv[1]), emulate=True)
x = np.arange(100, dtype=np.float32)
value = ort.OrtValue.ortvalue_from_numpy(x, "gpu", 0, memory.device_vendor_id)
binding = session.io_binding()
binding.bind_ortvalue_input("a", value)
binding.bind_ortvalue_input("b", value)
binding._iobinding.bind_output("c", ort.OrtDevice.make("gpu", 0, memory.device_vendor_id)._get_c_device())
session.run_with_iobinding(binding)
[result] = binding.get_outputs()
del binding, session, value
gc.collect()
np.testing.assert_array_equal(result.numpy(), x + x)
del result
assert plugin.counters()["device_bytes_in_use"] == 0
"""
    python(code, add_model(dims=["n"]).hex(), preloaded=True)


@pytest.mark.parametrize("streams", ["inline", "adversarial"])
def test_a_fault_on_the_device_fails_its_run_and_every_later_one(streams: str) -> None:
    code = """
import sys
import numpy as np, onnxruntime as ort, ort_cuda_plugin as plugin
session = plugin.session(bytes.fromhex(sys.argv[1]), emulate=True)
x = np.arange(100, dtype=np.float32)
feeds = {"a": x, "b": x}
session.run(None, feeds)
[device] = [d for d in plugin.register(emulate=True) if d.ep_metadata["emulated"] == "1"]
vendor = device.memory_info(ort.OrtDeviceMemoryType.DEFAULT).device_vendor_id
binding = session.io_binding()
binding.bind_cpu_input("a", x)
binding.bind_cpu_input("b", x)
# An address that no device memory has: the kernel faults, with adversarial streams long after its launch.
place = ort.OrtDevice.make("gpu", 0, vendor)._get_c_device()
binding._iobinding.bind_output("c", place, np.float32, [100], 4096)
for attempt, words in [(lambda: session.run_with_iobinding(binding), "ILLEGAL_ADDRESS"),
                       (lambda: session.run(None, feeds), "is lost"), (lambda: session.run(None, feeds), "is lost")]:
    try:
        attempt()
    except Exception as error:
        assert words in str(error), error
    else:
        raise AssertionError("no error: " + words)
print("end")
"""
    environment = {"ORT_CUDA_PLUGIN_EMULATE_STREAMS": streams}
    assert python(code, add_model(dims=["n"]).hex(), env=environment, preloaded=True).stdout == "end\n"
