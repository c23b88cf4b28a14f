"""Several devices at once: sessions on each, streams and memory that belong to one of them."""

from __future__ import annotations

import textwrap

import pytest

from device_models import add_and_double
from isolated import python

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
    python(PREAMBLE + textwrap.dedent(code), add_and_double().hex(), env=environment)


def test_a_stream_of_another_device_is_an_error_that_names_the_option() -> None:
    code = """
    stream = Stream(Device.emulated(1))
    address = int(ffi.cast("uintptr_t", stream.handle))
    refused(lambda: session(0, user_compute_stream=address), "user_compute_stream", "another CUDA context", "device 0")
    made = session(1, user_compute_stream=address)
    a = np.ones(5, np.float32)
    np.testing.assert_array_equal(made.run(None, {"a": a, "b": a})[0], 4 * a)
    """
    python(PREAMBLE + textwrap.dedent(code), add_and_double().hex(), env=TWO)


def test_the_default_streams_of_two_devices_are_two() -> None:
    code = """
    sessions = [session(ordinal, user_compute_stream=0) for ordinal in (0, 1)]
    for length in (3, 7):
        a = np.arange(length, dtype=np.float32)
        for made in sessions:
            np.testing.assert_array_equal(made.run(None, {"a": a, "b": a})[0], 4 * a)
    assert plugin.counters()["streams_live"] == 2
    """
    python(PREAMBLE + textwrap.dedent(code), add_and_double().hex(), env=TWO)


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
    python(PREAMBLE + textwrap.dedent(code), add_and_double().hex(), env=TWO)


def test_a_device_that_does_not_exist_is_named_with_those_that_do() -> None:
    code = """
    refused(lambda: session(2), "there is no device 2", "0 (", "1 (")
    """
    python(PREAMBLE + textwrap.dedent(code), add_and_double().hex(), env=TWO)
