"""External memory and semaphores of the emulated device, at the driver table."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from c_programs import build_program, run_program
from emulator_harness import configured
from ort_cuda_plugin.abi.core import ffi
from ort_cuda_plugin.abi.device import CudaError, Device, DeviceArray, Stream
from ort_cuda_plugin.abi.emulation import clear_findings, findings
from timelines import ImportedTimeline, SharedFile, Timeline, descriptors, mappings

OPAQUE_FD = 1


MODES = {"inline": (0, 0), "adversarial": (1, 0), "inline-check": (0, 1), "adversarial-check": (1, 1)}


@pytest.fixture(params=MODES.values(), ids=list(MODES))
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    adversarial, check = request.param
    with configured(adversarial=adversarial, check=check, seed=5) as device:
        yield device
        assert findings() == []


def import_memory(device: Device, file: SharedFile, nbytes: int) -> Any:
    desc = ffi.new("CUDA_EXTERNAL_MEMORY_HANDLE_DESC *", {"type": OPAQUE_FD, "size": nbytes})
    desc.handle.fd = file.exported()
    memory = ffi.new("CUexternalMemory *")
    try:
        device.call("ImportExternalMemory", memory, desc)
    except CudaError:
        os.close(desc.handle.fd)
        raise
    return memory[0]


def map_buffer(device: Device, memory: Any, offset: int, nbytes: int) -> int:
    desc = ffi.new("CUDA_EXTERNAL_MEMORY_BUFFER_DESC *", {"offset": offset, "size": nbytes})
    address = ffi.new("CUdeviceptr *")
    device.call("ExternalMemoryGetMappedBuffer", address, memory, desc)
    return int(address[0])


def fill(device: Device, stream: Stream, address: int, value: int, nbytes: int) -> None:
    device.call("MemsetD8Async", address, value, nbytes, stream.handle)


@pytest.mark.parametrize("offset", [0, 100, 4096, 5000])
def test_a_buffer_is_the_files_memory(device: Device, offset: int) -> None:
    file = SharedFile(10000)
    before, free, maps = descriptors(), device.memory[0], mappings()
    memory = import_memory(device, file, 10000)
    address = map_buffer(device, memory, offset, 10000 - offset)
    file.array(np.uint8)[:] = np.arange(10000) % 251
    array = DeviceArray(device, address, (10000 - offset,), np.dtype(np.uint8))
    np.testing.assert_array_equal(device.download(array), (np.arange(10000) % 251)[offset:])
    stream = Stream(device)
    fill(device, stream, address + 7, 200, 20)
    stream.synchronize()
    assert (file.array(np.uint8)[offset + 7 : offset + 27] == 200).all()
    device.call("MemFree", address)
    array.address = 0
    assert mappings() == maps
    device.call("DestroyExternalMemory", memory)
    with pytest.raises(CudaError, match=r"MemFree: CUDA_ERROR_INVALID_VALUE .*no allocation starts at"):
        device.call("MemFree", address)
    with pytest.raises(CudaError, match=r"CUDA_ERROR_INVALID_HANDLE .*is not external memory"):
        device.call("DestroyExternalMemory", memory)
    assert (file.array(np.uint8)[offset + 7 : offset + 27] == 200).all()
    assert descriptors() == before
    assert device.memory[0] == free
    file.close()


def test_memory_that_was_freed_does_not_write_the_file(device: Device) -> None:
    """New memory at the addresses of a freed buffer is no longer the file's."""
    file = SharedFile(1 << 16)
    for _ in range(3):
        memory = import_memory(device, file, 1 << 16)
        address = map_buffer(device, memory, 0, 1 << 16)
        device.call("MemFree", address)
        device.call("DestroyExternalMemory", memory)
        array = device.upload(np.full(1 << 17, 9, np.uint8))
        assert not file.array(np.uint8).any()
        array.free()
    file.close()


def test_two_imports_share_the_bytes(device: Device) -> None:
    file = SharedFile(4096)
    memories = [import_memory(device, file, 4096) for _ in range(2)]
    first, second = (map_buffer(device, memory, 0, 4096) for memory in memories)
    assert first != second
    stream = Stream(device)
    fill(device, stream, first, 3, 4096)
    stream.synchronize()
    for memory in memories:
        device.call("DestroyExternalMemory", memory)  # buffers stay valid
    array = DeviceArray(device, second, (4096,), np.dtype(np.uint8))
    assert (device.download(array) == 3).all()
    array.address = 0
    device.call("MemFree", first)
    device.call("MemFree", second)
    file.close()


def test_wrong_memory_is_refused(device: Device) -> None:
    file, unsealable = SharedFile(5000), SharedFile(4096, os.MFD_CLOEXEC)
    before = descriptors()
    with pytest.raises(CudaError, match=r"INVALID_VALUE .*descriptor \d+ has 5000 bytes, expected 5001 or more"):
        import_memory(device, file, 5001)
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        import_memory(device, file, 0)
    memory = import_memory(device, file, 5000)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(file.fd, 100)  # the import has sealed the file
    for offset, nbytes in ((5000, 1), (0, 5001), (1, (1 << 64) - 1), ((1 << 64) - 1, 2)):
        with pytest.raises(CudaError, match=r"INVALID_VALUE .*does not fit into 5000 bytes"):
            map_buffer(device, memory, offset, nbytes)
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        map_buffer(device, memory, 0, 0)
    device.call("DestroyExternalMemory", memory)
    with pytest.raises(CudaError, match=r"CUDA_ERROR_INVALID_HANDLE .*is not external memory"):
        map_buffer(device, memory, 0, 1)
    with pytest.raises(CudaError, match=r"INVALID_HANDLE .*may shrink. Create it with MFD_ALLOW_SEALING"):
        import_memory(device, unsealable, 4096)
    desc = ffi.new("CUDA_EXTERNAL_MEMORY_HANDLE_DESC *", {"type": OPAQUE_FD, "size": 1})
    out = ffi.new("CUexternalMemory *")
    read, write = os.pipe()
    for desc.handle.fd, reason in ((read, "is not a file in memory"), (-1, "is not open"), (999999, "is not open")):
        with pytest.raises(CudaError, match=f"CUDA_ERROR_INVALID_HANDLE .*{reason}"):
            device.call("ImportExternalMemory", out, desc)
    desc.type = 2
    with pytest.raises(CudaError, match=r"CUDA_ERROR_NOT_SUPPORTED .*handle type 2"):
        device.call("ImportExternalMemory", out, desc)
    for fd in (read, write):
        os.close(fd)
    assert descriptors() == before
    file.close()
    unsealable.close()


def test_work_runs_in_the_order_of_waits_and_signals(device: Device) -> None:
    """A wait holds up its stream, not the host and no other stream; a signal comes after the work before it."""
    timeline = Timeline()
    semaphore = ImportedTimeline(device, timeline)
    first, second = Stream(device), Stream(device)
    array, other = device.upload(np.zeros(8, np.uint8)), device.upload(np.zeros(8, np.uint8))
    pinned = device.pinned(8, np.uint8)
    semaphore.wait(first, 1)
    fill(device, first, array.address, 7, 8)
    device.call("MemcpyDtoHAsync", ffi.cast("void *", pinned.array.ctypes.data), array.address, 8, first.handle)
    semaphore.signal(first, 2)
    fill(device, second, other.address, 5, 8)
    second.synchronize()
    assert (device.download(other, second) == 5).all()
    time.sleep(0.02)
    assert not first.query()
    assert not pinned.array.any()
    assert timeline.value == 0
    timeline.signal(1)
    timeline.wait(2)  # without a driver call
    assert (pinned.array == 7).all()
    first.synchronize()
    semaphore.destroy()
    timeline.close()


def test_events_and_other_streams_wait_behind_a_semaphore(device: Device) -> None:
    timeline = Timeline()
    semaphore = ImportedTimeline(device, timeline)
    first, second = Stream(device), Stream(device)
    array = device.upload(np.zeros(8, np.uint8))
    event = device.event()
    semaphore.wait(first, 3)
    fill(device, first, array.address, 1, 8)
    event.record(first)
    second.wait(event)
    fill(device, second, array.address, 2, 8)
    assert not event.query()
    assert not second.query()
    timer = threading.Timer(0.05, timeline.signal, [3])
    timer.start()
    event.synchronize()
    assert timeline.value == 3
    second.synchronize()
    assert (device.download(array, second) == 2).all()
    timer.join()
    semaphore.destroy()
    timeline.close()


def test_a_stream_signals_another_through_a_semaphore(device: Device) -> None:
    """The wait is enqueued before the signal, and nothing else orders the two streams."""
    timeline = Timeline()
    semaphore, again = ImportedTimeline(device, timeline), ImportedTimeline(device, timeline)
    first, second = Stream(device), Stream(device)
    array, copy = device.upload(np.zeros(512, np.uint8)), device.upload(np.zeros(512, np.uint8))
    device.synchronize()
    for step in range(1, 20):
        semaphore.wait(second, 2 * step - 1)
        device.call("MemcpyDtoDAsync", copy.address, array.address, 512, second.handle)
        semaphore.signal(second, 2 * step)
        fill(device, first, array.address, step, 512)
        again.signal(first, 2 * step - 1)
        again.wait(first, 2 * step)
    first.synchronize()
    second.synchronize()
    assert (device.download(copy, second) == 19).all()
    semaphore.destroy()
    again.destroy()
    timeline.close()


def test_the_device_and_pageable_copies_wait(device: Device) -> None:
    timeline = Timeline()
    semaphore = ImportedTimeline(device, timeline)
    stream = Stream(device)
    array = device.upload(np.zeros(8, np.uint8))
    semaphore.wait(stream, 1)
    fill(device, stream, array.address, 4, 8)
    timer = threading.Timer(0.05, timeline.signal, [1])
    timer.start()
    assert (device.download(array, stream) == 4).all()
    timer.join()
    semaphore.wait(stream, 2)
    timer = threading.Timer(0.05, timeline.signal, [2])
    timer.start()
    device.synchronize()
    assert timeline.value == 2
    timer.join()
    semaphore.destroy()
    timeline.close()


def test_wrong_semaphores_are_refused(device: Device) -> None:
    wrong = (
        (Timeline(magic=b"whatever"), 'does not begin with "ocp-time"'),
        (SharedFile(15), "has 15 bytes, expected 16 or more"),
    )
    timeline = Timeline(value=5)
    before = descriptors()
    for file, reason in wrong:
        with pytest.raises(CudaError, match=reason):
            ImportedTimeline(device, file)
    semaphore, stream = ImportedTimeline(device, timeline), Stream(device)
    with pytest.raises(CudaError, match=r"INVALID_VALUE .*sets the value 5 .* whose value is 5 already"):
        semaphore.signal(stream, 5)
    semaphore.wait(stream, 5)
    semaphore.wait(stream, 6)
    with pytest.raises(CudaError, match=r"ILLEGAL_STATE .*although enqueued work still waits"):
        semaphore.destroy()
    timeline.signal(6)
    stream.synchronize()
    for call in (semaphore.destroy, lambda: semaphore.wait(stream, 1), lambda: semaphore.signal(stream, 9)):
        with pytest.raises(CudaError, match=r"CUDA_ERROR_INVALID_HANDLE .*is not an external semaphore"):
            call()
    assert descriptors() == before
    for file in (*(file for file, _ in wrong), timeline):
        file.close()


def test_a_capture_takes_no_waits_and_no_signals(device: Device) -> None:
    timeline = Timeline()
    semaphore, stream = ImportedTimeline(device, timeline), Stream(device)
    for call in (semaphore.wait, semaphore.signal):
        device.call("StreamBeginCapture", stream.handle, 2)
        with pytest.raises(CudaError, match="CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"):
            call(stream, 1)
        graph = ffi.new("CUgraph *")
        with pytest.raises(CudaError, match="CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"):
            device.call("StreamEndCapture", stream.handle, graph)
    semaphore.destroy()
    timeline.close()


@pytest.mark.parametrize("adversarial", [0, 1])
def test_a_peer_that_never_signals_loses_the_device(adversarial: int) -> None:
    with configured(adversarial=adversarial, check=0, semaphore_seconds=1) as device:
        timeline = Timeline(value=3)
        semaphore, stream, other = ImportedTimeline(device, timeline), Stream(device), Stream(device)
        semaphore.wait(stream, 7)
        semaphore.signal(stream, 8)
        start = time.monotonic()
        with pytest.raises(CudaError) as caught:
            stream.synchronize()
        assert time.monotonic() - start < 30
        assert caught.value.name == "CUDA_ERROR_LAUNCH_TIMEOUT"
        assert "waits for value 7 of a timeline semaphore, whose value is still 3 after 1 seconds" in str(caught.value)
        assert "ORT_CUDA_PLUGIN_EMULATE_SEMAPHORE_SECONDS" in str(caught.value)
        with pytest.raises(CudaError, match=r"CUDA_ERROR_LAUNCH_TIMEOUT .*value 7"):
            fill(device, other, 4096, 0, 1)
        assert timeline.value == 3  # a lost device signals nothing
        with pytest.raises(CudaError, match=r"CUDA_ERROR_LAUNCH_TIMEOUT .*value 7"):
            semaphore.destroy()
        timeline.close()


@pytest.mark.full
@pytest.mark.parametrize("streams", ["inline", "adversarial"])
@pytest.mark.parametrize("sanitize", ["address", "thread"])
def test_threads_pass_under(sanitize: str, streams: str) -> None:
    done = run_program(build_program("external_test", ["external_test.c"], sanitize), streams, "1", "40")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
    assert done.stdout == "external_test passed\n"


def test_semaphores_do_not_hide_a_missing_wait() -> None:
    """After streams have met at a semaphore, a later access without an order is still found."""
    with configured(adversarial=1, check=1, seed=5) as device:
        timeline = Timeline()
        semaphore, first, second = ImportedTimeline(device, timeline), Stream(device), Stream(device)
        array = device.upload(np.zeros(8, np.uint8))
        fill(device, first, array.address, 1, 8)
        semaphore.signal(first, 1)
        semaphore.wait(second, 1)
        fill(device, second, array.address, 2, 8)
        device.synchronize()
        assert findings() == []
        fill(device, first, array.address, 3, 8)
        fill(device, second, array.address, 4, 8)
        with suppress(CudaError):
            device.synchronize()
        (found,) = findings()
        assert "missing-wait" in found
        clear_findings()
        semaphore.destroy()
        timeline.close()
