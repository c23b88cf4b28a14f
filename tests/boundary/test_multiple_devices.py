"""Several devices at once: sessions on each, streams and memory that belong to one of them."""

from __future__ import annotations

import textwrap
from pathlib import Path

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


def test_a_session_runs_on_the_devices_that_onnx_runtime_was_given() -> None:
    code = """
from ort_cuda_plugin.ep.provider import last_provider
def on(given, options={}):
    settings = ort.SessionOptions()
    settings.add_provider_for_devices(given, options)
    made = session(settings)
    np.testing.assert_array_equal(made.run(None, {"a": x, "b": x})[0], x + x)
    return last_provider().session.devices.ordinals
assert on(devices) == [0, 1]
assert on(devices[::-1]) == [1, 0]
assert on(devices, {"device_ids": "0,1"}) == [0, 1]
assert on(devices[:1], {"device_ids": "0,1"}) == [0, 1]
assert on([devices[1], devices[1]]) == [1]
named = ort.InferenceSession(
    model, providers=[(plugin.get_ep_name(), {"device_id": "1", "device_ids": "1,0"})], enable_fallback=0
)
assert last_provider().session.devices.ordinals == [1, 0]
def one_after_the_other():
    options = ort.SessionOptions()
    options.add_provider_for_devices(devices[:1], {})
    options.add_provider_for_devices(devices[1:], {})
    return session(options)
for make, said in [
    (lambda: on(devices, {"device_ids": "1,0"}), "device_ids=1,0: the session was given the device 0"),
    (lambda: on(devices, {"device_ids": "0"}), "device_ids=0: add_provider_for_devices also got the device 1"),
    (one_after_the_other, "device_id=1: the session was given the device 0 (Emulated CUDA device). Pass device 1"),
]:
    try:
        make()
    except Exception as error:
        assert said in str(error), error
    else:
        raise AssertionError(said)
"""
    python(SELECTION + code, add_model().hex(), env=TWO, preloaded=True)


def test_devices_that_cannot_be_used_are_named() -> None:
    code = """
from ort_cuda_plugin.ep.device.devices import emulated_devices
from ort_cuda_plugin.ep.options.options import parse
from ort_cuda_plugin.ep.session.session_devices import chosen_devices
def of(**options):
    return lambda: plugin.session(model, emulate=True, provider_options=options)
for make, said in [
    (of(device_ids="0,2"), "device_ids=0,2: device 2 does not exist. Choose from 0 (Emulated CUDA device), 1 ("),
    (of(device_ids="0,1,0"), "device_ids='0,1,0': device 0 is named twice; name each device once"),
    (of(device_ids="0;1"), "device_ids='0;1': use CUDA ordinals with a comma between two of them: 0,1"),
    (of(device_ids="5,0"), "there is no device 5. Choose one of 0 (Emulated CUDA device), 1 (Emulated"),
    (of(device_of="add:1"), "device_of: the session has one device. Name several in device_ids"),
    (of(device_ids="0,1", device_of="add:2"), "device_of=add:2: device 2 is not a device of the session"),
    (of(device_ids="0,1", device_of="add"), "device_of='add': use rules PATTERN:ORDINAL"),
    (lambda: chosen_devices(emulated_devices(), parse({})[0], 26), "before 1.27 accepts one device for a session, and "
     "was given the devices 0 (Emulated CUDA device), 1 (Emulated CUDA device). Pass the first one"),
]:
    try:
        make()
    except Exception as error:
        assert said in str(error), error
    else:
        raise AssertionError(said)
"""
    python(SELECTION + code, add_model().hex(), env=TWO, preloaded=True)


def test_settings_that_several_devices_do_not_support_are_named(tmp_path: Path) -> None:
    code = """
from ort_cuda_plugin.ep.provider import last_provider
folder = sys.argv[2]
def of(given=model, entries={}, **options):
    settings = ort.SessionOptions()
    settings.log_severity_level = 4
    for key, value in entries.items():
        settings.add_session_config_entry(key, value)
    if optimized := options.pop("optimized", None):
        settings.optimized_model_filepath = optimized
    many = {"device_ids": "0,1"} | options
    return plugin.session(given, emulate=True, provider_options=many, sess_options=settings)
compiled = {"ep.context_enable": "1", "ep.context_file_path": folder + "/ctx.onnx"}
of(entries=compiled, device_ids="0")
context = open(folder + "/ctx.onnx", "rb").read()
for make, said in [
    (lambda: of(entries=compiled), "ep.context_enable=1 (a compiled model has code for one device)"),
    (lambda: of(folder + "/ctx.onnx"), "a model that is compiled already (EPContext nodes)"),
    (lambda: of(enable_cuda_graph=1), "enable_cuda_graph=1 (each stage has automatic CUDA graphs)"),
    (lambda: of(single_nodes=1), "single_nodes=1"),
    (lambda: of(optimized=folder + "/optimized.onnx"), "optimized_model_filepath"),
    (lambda: of(entries={"session.resource_cuda_partitioning_settings": "2048,"}), "session.resource_cuda_"),
    (lambda: of(entries={"session.layer_assignment_settings": "gpu:1(add)"}), "layering rules for gpu:1"),
]:
    try:
        make()
    except Exception as error:
        assert "device_ids=0,1: a session on several devices does not support " + said in str(error), error
    else:
        raise AssertionError(said)
"""
    python(SELECTION + code, add_model().hex(), str(tmp_path), env=TWO, preloaded=True)


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
