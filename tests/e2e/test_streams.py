"""Streams of sessions: a stream that the application passes, and streams that the session creates."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import onnxruntime as ort
import pytest

import ort_cuda_plugin
from device_models import add_and_double
from ort_cuda_plugin.abi.core import ffi
from ort_cuda_plugin.abi.device import Device, DeviceArray, Stream

SIZE = 1000
THREADS = 4


@pytest.fixture
def device() -> Device:
    return Device.emulated()


@pytest.fixture
def stream(device: Device) -> Iterator[Stream]:
    with Stream(device) as made:
        yield made


def handle_of(stream: Stream | None) -> int:
    """Return the stream's handle as an integer, 0 for the default stream, as the option user_compute_stream expects."""
    return 0 if stream is None else int(ffi.cast("uintptr_t", stream.handle))


def session_with(**options: object) -> ort.InferenceSession:
    return ort_cuda_plugin.session(add_and_double(), emulate=True, provider_options=options)


def bind(session: ort.InferenceSession, a: DeviceArray, b: DeviceArray, c: DeviceArray) -> ort.IOBinding:
    binding = session.io_binding()
    ort_cuda_plugin.bind_input(binding, "a", a)
    ort_cuda_plugin.bind_input(binding, "b", b)
    ort_cuda_plugin.bind_output(binding, "c", c)
    return binding


def streams_live() -> int:
    return ort_cuda_plugin.counters()["streams_live"]


def check_order(device: Device, stream: Stream | None, session: ort.InferenceSession) -> None:
    """Check that Runs are ordered with copies of inputs and results that the application enqueues on its stream."""
    host = device.pinned(SIZE, np.float32)
    a, b, c = (device.empty(SIZE, np.float32) for _ in range(3))
    b.copy_from(np.ones(SIZE, np.float32))
    binding = bind(session, a, b, c)
    no_wait = ort.RunOptions()
    no_wait.add_run_config_entry("disable_synchronize_execution_providers", "1")
    for step in range(5):
        host.array[:] = step
        a.copy_from(host.array, stream) if stream else device.call(
            "MemcpyHtoDAsync", a.address, ffi.cast("void *", host.array.ctypes.data), a.nbytes, ffi.NULL
        )
        session.run_with_iobinding(binding, no_wait)
        result = c.copy_to(np.empty(SIZE, np.float32), stream)
        np.testing.assert_array_equal(result, 2 * (step + 1))


@pytest.mark.usefixtures("collected")
def test_runs_follow_the_work_of_the_stream_that_the_application_brings(device: Device, stream: Stream) -> None:
    before = streams_live()
    session = session_with(user_compute_stream=handle_of(stream), has_user_compute_stream=1)
    check_order(device, stream, session)
    assert streams_live() == before + 1
    del session
    assert streams_live() == before
    assert stream.query()  # the end of the session did not destroy the stream


def test_the_default_stream_is_a_stream_that_an_application_can_bring(device: Device) -> None:
    check_order(device, None, session_with(user_compute_stream=0))


@pytest.mark.usefixtures("collected")
def test_sessions_share_the_application_s_stream(device: Device, stream: Stream) -> None:
    before = streams_live()
    sessions = [session_with(user_compute_stream=handle_of(stream)) for _ in range(3)]
    for session in sessions:
        check_order(device, stream, session)
    assert streams_live() == before + 1


def test_a_stream_that_the_driver_does_not_know_is_an_error_that_names_the_option() -> None:
    with pytest.raises(Exception, match=r"user_compute_stream=0xdead0: .*is not a stream"):
        session_with(user_compute_stream="0xdead0")


def run_on_threads(session: ort.InferenceSession) -> None:
    start = Barrier(THREADS)

    def work(index: int) -> None:
        start.wait()
        for length in range(1, 20):
            a, b = np.full(length, index, np.float32), np.arange(length, dtype=np.float32)
            np.testing.assert_array_equal(session.run(None, {"a": a, "b": b})[0], 2 * (a + b))

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(work, index) for index in range(THREADS)]:
            done.result()


@pytest.mark.usefixtures("collected")
def test_each_thread_of_a_session_has_a_stream_of_its_own_unless_one_is_to_be_shared() -> None:
    run_on_threads(session_with())  # leaves idle streams in the device's pool
    before = streams_live()
    session = session_with()
    run_on_threads(session)
    assert streams_live() >= before + THREADS
    del session
    before = streams_live()
    unified = session_with(use_ep_level_unified_stream=1)
    run_on_threads(unified)
    assert streams_live() == before + 1


def test_the_application_s_stream_serves_threads_one_after_the_other(stream: Stream) -> None:
    run_on_threads(session_with(user_compute_stream=handle_of(stream)))
