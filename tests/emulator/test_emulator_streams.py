"""Streams and events of the emulated device, inline and adversarial."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driver_harness import blocking_stream
from emulator_harness import compile_kernels, configured
from ort_cuda_plugin.abi.core import ffi
from ort_cuda_plugin.abi.device import CudaError, Device, DeviceArray, Event, Module, Stream


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return compile_kernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(params=[0, 1], ids=["inline", "adversarial"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with configured(adversarial=request.param, seed=11) as device:
        yield device


def affine(kernels: Module, data: DeviceArray, factor: int, addend: int, stream: Stream | None) -> None:
    kernels.launch("affine", 1, 8, [data, np.int32(factor), np.int32(addend)], stream=stream)


operation = st.tuples(st.sampled_from(["affine", "record", "wait", "synchronize", "query"]), st.integers(0, 1 << 20))


@settings(max_examples=60)
@given(operations=st.lists(operation, max_size=60), adversarial=st.booleans(), seed=st.integers(0, 1 << 30))
def test_each_stream_keeps_its_order(
    image: bytes, operations: list[tuple[str, int]], adversarial: bool, seed: int
) -> None:
    with configured(adversarial=int(adversarial), seed=seed) as device:
        kernels = device.load(image)
        streams, events = [device.stream() for _ in range(3)], [device.event() for _ in range(2)]
        arrays, expected = [device.upload(np.ones(8, np.int32)) for _ in streams], [1, 1, 1]
        for name, choice in operations:
            index = choice % 3
            match name:
                case "affine":
                    factor, addend = choice % 5, choice % 7
                    affine(kernels, arrays[index], factor, addend, streams[index])
                    expected[index] = (expected[index] * factor + addend + 2**31) % 2**32 - 2**31
                case "record":
                    events[choice % 2].record(streams[index])
                case "wait":
                    streams[index].wait(events[choice % 2])
                case "synchronize":
                    streams[index].synchronize()
                case "query":
                    streams[index].query()
        device.synchronize()
        assert all(stream.query() for stream in streams)
        assert all(event.query() for event in events)
        for array, value in zip(arrays, expected, strict=True):
            np.testing.assert_array_equal(device.download(array), np.full(8, value, np.int64).astype(np.int32))


@pytest.mark.parametrize("seed", range(8))
def test_an_event_orders_two_streams_for_every_seed(image: bytes, seed: int) -> None:
    with configured(adversarial=1, seed=seed) as device:
        kernels = device.load(image)
        first, second, event = device.stream(), device.stream(), device.event()
        data = device.upload(np.ones(8, np.int32))
        for _ in range(10):
            affine(kernels, data, 2, 1, first)
        event.record(first)
        second.wait(event)
        affine(kernels, data, 0, 5, second)
        second.synchronize()
        assert (device.download(data) == 5).all()


def test_without_a_wait_some_seed_gives_a_wrong_result(image: bytes) -> None:
    results = set()
    for seed in range(20):
        with configured(adversarial=1, seed=seed) as device:
            kernels = device.load(image)
            first, second = device.stream(), device.stream()
            data = device.upload(np.ones(8, np.int32))
            affine(kernels, data, 1, 1, first)
            affine(kernels, data, 10, 0, second)
            device.synchronize()
            results.add(int(device.download(data)[0]))
    assert results == {20, 11}


def test_the_same_seed_interleaves_the_same_way(image: bytes) -> None:
    def run(seed: int) -> int:
        with configured(adversarial=1, seed=seed) as device:
            kernels = device.load(image)
            streams = [device.stream() for _ in range(3)]
            data = device.upload(np.ones(8, np.int32))
            for step in range(12):
                affine(kernels, data, 3, step, streams[step % 3])
            device.synchronize()
            return int(device.download(data)[0])

    assert [run(seed) for seed in range(6)] == [run(seed) for seed in range(6)]
    assert len({run(seed) for seed in range(6)}) > 1


def test_nothing_deferred_runs_until_somebody_waits(image: bytes) -> None:
    with configured(adversarial=1, seed=1) as device:
        kernels = device.load(image)
        stream, event = device.stream(), device.event()
        data, out = device.upload(np.ones(8, np.int32)), device.pinned(8, np.int32)
        out.array[:] = -1
        affine(kernels, data, 1, 1, stream)
        data.enqueue_copy_to(out.array, stream)
        event.record(stream)
        assert (out.array == -1).all()
        event.synchronize()
        assert (out.array == 2).all()
        out.free()


def test_polling_gets_there(image: bytes) -> None:
    with configured(adversarial=1, seed=1) as device:
        kernels = device.load(image)
        stream, event = device.stream(), device.event()
        data = device.upload(np.ones(8, np.int32))
        for _ in range(20):
            affine(kernels, data, 1, 1, stream)
        event.record(stream)
        assert not stream.query()
        polls = 0
        while not event.query():
            polls += 1
        assert polls > 5
        assert stream.query()


def test_a_wait_is_for_the_record_that_was_there_when_it_was_enqueued(image: bytes) -> None:
    with configured(adversarial=1, seed=1) as device:
        kernels = device.load(image)
        first, second, third, event = device.stream(), device.stream(), device.stream(), device.event()
        data = device.upload(np.ones(8, np.int32))
        event.record(first)
        second.wait(event)
        affine(kernels, data, 1, 1, third)
        event.record(third)
        second.synchronize()
        assert not event.query() or third.query()
        third.wait(event)
        third.synchronize()
        assert event.query()


def test_a_destroyed_event_still_orders_what_waits_for_it(device: Device, image: bytes) -> None:
    kernels = device.load(image)
    first, second, event = device.stream(), device.stream(), device.event()
    data = device.upload(np.ones(8, np.int32))
    affine(kernels, data, 1, 1, first)
    event.record(first)
    second.wait(event)
    event.destroy()
    affine(kernels, data, 10, 0, second)
    second.synchronize()
    assert (device.download(data) == 20).all()


def test_a_destroyed_stream_finishes_its_work(device: Device, image: bytes) -> None:
    kernels = device.load(image)
    stream = device.stream()
    data = device.upload(np.ones(8, np.int32))
    affine(kernels, data, 7, 0, stream)
    stream.destroy()
    device.synchronize()
    assert (device.download(data) == 7).all()


def test_an_event_that_was_never_recorded_is_done(device: Device) -> None:
    event, stream = device.event(), device.stream()
    assert event.query()
    event.synchronize()
    stream.wait(event)
    stream.synchronize()


@pytest.mark.parametrize("seed", range(6))
def test_the_null_stream_orders_with_blocking_streams(image: bytes, seed: int) -> None:
    with configured(adversarial=1, seed=seed) as device:
        kernels = device.load(image)
        streams = [blocking_stream(device) for _ in range(2)]
        data = device.upload(np.ones(8, np.int32))
        affine(kernels, data, 1, 1, streams[0])
        affine(kernels, data, 10, 0, None)
        affine(kernels, data, 1, 3, streams[1])
        streams[1].synchronize()
        assert (device.download(data) == 23).all()


def test_elapsed_time_is_that_of_the_host(device: Device) -> None:
    stream, start, end = device.stream(), device.event(), device.event()
    before = time.perf_counter()
    start.record(stream)
    stream.synchronize()
    time.sleep(0.02)
    end.record(stream)
    stream.synchronize()
    passed = 1000 * (time.perf_counter() - before)
    assert 20 <= end.milliseconds_since(start) <= passed * (1 + 1e-6)  # rounded to float32
    untimed = ffi.new("CUevent *")
    device.call("EventCreate", untimed, 2)
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_HANDLE"):
        device.call("EventElapsedTime", ffi.new("float *"), untimed[0], end.handle)
    device.call("EventDestroy", untimed[0])


def test_elapsed_time_of_what_is_not_done_is_not_ready() -> None:
    with configured(adversarial=1, seed=1) as device:
        stream, start, end = device.stream(), device.event(), device.event()
        start.record(stream)
        with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_HANDLE"):
            end.milliseconds_since(start)
        end.record(stream)
        with pytest.raises(CudaError, match="CUDA_ERROR_NOT_READY"):
            end.milliseconds_since(start)


def test_after_an_error_the_device_is_lost_until_its_context_is_reset(image: bytes) -> None:
    for adversarial in (0, 1):
        with configured(adversarial=adversarial) as device:
            kernels = device.load(image)
            event, stream = Event(device), device.stream()
            with pytest.raises(CudaError, match="CUDA_ERROR_LAUNCH_FAILED"):
                fail(kernels, stream, event)
            with pytest.raises(CudaError, match="CUDA_ERROR_LAUNCH_FAILED"):
                device.alloc(1)


def fail(kernels: Module, stream: Stream, event: Event) -> None:
    kernels.launch("divergent", 1, 64, [np.uint32(40)], stream=stream)
    event.record(stream)
    event.synchronize()
