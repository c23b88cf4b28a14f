"""Several devices at once: sessions on each, streams and memory that belong to one of them."""

from __future__ import annotations

import textwrap

import pytest

from device_models import add_and_double
from isolated import add_model, python

TWO = {"ORT_CUDA_PLUGIN_EMULATE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": ""}

PREAMBLE = """
import sys, threading, numpy as np, onnxruntime as ort, ort_cuda_plugin as plugin
from ort_cuda_plugin.abi.core import ffi
from ort_cuda_plugin.abi.device import Device, Stream
model = bytes.fromhex(sys.argv[1])
def session(ordinal, **options):
    return plugin.session(model, emulate=True, provider_options={"device_id": ordinal, **options})
def refused(action, *words):
    try:
        action()
    except Exception as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError("accepted")
"""


@pytest.mark.parametrize("streams", ["inline", "adversarial"])
def test_sessions_on_two_devices_run_at_once(streams: str) -> None:
    code = """
    sessions = [session(0), session(1)]
    def work(index):
        rng = np.random.default_rng(index)
        for _ in range(30):
            a, b = rng.standard_normal((2, rng.integers(1, 500))).astype(np.float32)
            np.testing.assert_array_equal(sessions[index % 2].run(None, {"a": a, "b": b})[0], 2 * (a + b))
    failures = []
    def guarded(index):
        try:
            work(index)
        except BaseException as error:
            failures.append(error)
    threads = [threading.Thread(target=guarded, args=(index,)) for index in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failures, failures
    sessions.clear()
    assert plugin.counters()["device_bytes_in_use"] == 0
    """
    environment = TWO | {"ORT_CUDA_PLUGIN_EMULATE_STREAMS": streams}
    python(PREAMBLE + textwrap.dedent(code), add_and_double().hex(), env=environment, preloaded=True)


def test_a_stream_of_another_device_is_an_error_that_names_the_option() -> None:
    code = """
    stream = Stream(Device.emulated(1))
    address = int(ffi.cast("uintptr_t", stream.handle))
    refused(lambda: session(0, user_compute_stream=address), "user_compute_stream", "another CUDA context", "device 0")
    made = session(1, user_compute_stream=address)
    a = np.ones(5, np.float32)
    np.testing.assert_array_equal(made.run(None, {"a": a, "b": a})[0], 4 * a)
    """
    python(PREAMBLE + textwrap.dedent(code), add_and_double().hex(), env=TWO, preloaded=True)


def test_the_default_streams_of_two_devices_are_two() -> None:
    code = """
    sessions = [session(ordinal, user_compute_stream=0) for ordinal in (0, 1)]
    for length in (3, 7):
        a = np.arange(length, dtype=np.float32)
        for made in sessions:
            np.testing.assert_array_equal(made.run(None, {"a": a, "b": a})[0], 4 * a)
    assert plugin.counters()["streams_live"] == 2
    """
    python(PREAMBLE + textwrap.dedent(code), add_and_double().hex(), env=TWO, preloaded=True)


def test_an_array_of_another_device_is_not_taken_for_one_of_the_session_s() -> None:
    code = """
    made = session(1)
    near, far = (Device.emulated(ordinal).upload(np.full(6, ordinal, np.float32)) for ordinal in (1, 0))
    binding = made.io_binding()
    plugin.bind_input(binding, "a", near)
    plugin.bind_input(binding, "b", far)  # ONNX Runtime copies it over
    binding.bind_output("c")
    made.run_with_iobinding(binding)
    np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[0], np.full(6, 2.0))
    """
    python(PREAMBLE + textwrap.dedent(code), add_and_double().hex(), env=TWO, preloaded=True)


def test_a_device_that_does_not_exist_is_named_with_those_that_do() -> None:
    code = """
    refused(lambda: session(2), "there is no device 2", "0 (", "1 (")
    """
    python(PREAMBLE + textwrap.dedent(code), add_and_double().hex(), env=TWO, preloaded=True)


# ---- what ONNX Runtime selects ----

SELECTION = """
import sys, numpy as np, onnxruntime as ort, ort_cuda_plugin as plugin
from onnxruntime.capi import _pybind_state as capi
model, x = bytes.fromhex(sys.argv[1]), np.ones(8, np.float32)
devices = plugin.register(emulate=True)
def session(options):
    return ort.InferenceSession(model, options, enable_fallback=0)
"""


def test_policies_that_want_a_gpu_select_one_device() -> None:
    code = """
policies = {"PREFER_GPU": True, "MAX_PERFORMANCE": True, "PREFER_CPU": False, "MIN_OVERALL_POWER": False}
for policy, ours in policies.items():
    options = ort.SessionOptions()
    options.set_provider_selection_policy(getattr(ort.OrtExecutionProviderDevicePolicy, policy))
    made = session(options)
    assert (plugin.get_ep_name() in made.get_providers()) == ours, policy
    np.testing.assert_array_equal(made.run(None, {"a": x, "b": x})[0], x + x)
assert plugin.counters()["runs"] == 2
"""
    python(SELECTION + code, add_model().hex(), env=TWO, preloaded=True)


def test_a_session_of_several_devices_is_an_error() -> None:
    code = """
def together():
    options = ort.SessionOptions()
    options.add_provider_for_devices(devices, {})
    return session(options)
def one_after_the_other():
    options = ort.SessionOptions()
    options.add_provider_for_devices(devices[:1], {})
    options.add_provider_for_devices(devices[1:], {})
    return session(options)
for make, said in [
    (together, "runs on one device, and was given the devices 0 (Emulated CUDA device), 1 (Emulated CUDA device)"),
    (one_after_the_other, "device_id=1: the session was given the device 0 (Emulated CUDA device); a session runs"),
]:
    try:
        make()
    except Exception as error:
        assert said in str(error), error
    else:
        raise AssertionError(make)
options = ort.SessionOptions()
options.add_provider_for_devices([devices[1], devices[1]], {})
made = session(options)
np.testing.assert_array_equal(made.run(None, {"a": x, "b": x})[0], x + x)
"""
    python(SELECTION + code, add_model().hex(), env=TWO, preloaded=True)


def test_the_vendor_has_its_id() -> None:
    code = """
for device in devices:
    assert (device.ep_vendor, device.device.vendor, device.device.vendor_id) == ("NVIDIA", "NVIDIA", 0x10DE)
"""
    python(SELECTION + code, add_model().hex(), env=TWO, preloaded=True)


def test_it_says_why_a_hardware_device_is_not_offered() -> None:
    code = """
def details(device):
    return capi.get_hardware_device_ep_incompatibility_details(plugin.get_ep_name(), device)
(cpu,) = [known.device for known in ort.get_ep_devices() if known.ep_name == "CPUExecutionProvider"]
found = details(cpu)
assert found["reasons_bitmask"] == 2 and found["notes"] == "the device is not a GPU", found
for device in devices:
    assert details(device.device)["reasons_bitmask"] == 0
"""
    python(SELECTION + code, add_model().hex(), env=TWO, preloaded=True)


def test_a_gpu_that_the_driver_does_not_show_is_a_matter_of_the_driver() -> None:
    """A second registration finds the first one's device among ONNX Runtime's, as if ONNX Runtime had enumerated it."""
    code = """
from ort_cuda_plugin.abi.core import lib
plugin.register(as_="CUDAExecutionProvider", emulate=False)
found = capi.get_hardware_device_ep_incompatibility_details("CUDAExecutionProvider", devices[0].device)
assert found["reasons_bitmask"] == lib.OrtDeviceEpIncompatibility_DRIVER_INCOMPATIBLE, found
assert "libcuda.so.1" in found["notes"], found
"""
    python(SELECTION + code, add_model().hex(), env=TWO, preloaded=True)
