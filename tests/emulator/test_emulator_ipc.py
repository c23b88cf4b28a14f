"""CUDA IPC of the emulated device, at the driver table: what one process can do. tests/streams/test_ipc.py has two."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from emulator_harness import configured
from isolated import python
from ort_cuda_plugin.abi.core import ffi
from ort_cuda_plugin.abi.device import CudaError, Device, DeviceArray, Stream
from ort_cuda_plugin.abi.emulation import findings
from timelines import descriptors

MODES = {"inline": (0, 0), "adversarial": (1, 0), "inline-check": (0, 1), "adversarial-check": (1, 1)}
INTERPROCESS = 4 | 2
"""Flags of events: CU_EVENT_INTERPROCESS and CU_EVENT_DISABLE_TIMING."""


@pytest.fixture(params=MODES.values(), ids=list(MODES))
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    adversarial, check = request.param
    with configured(adversarial=adversarial, check=check, seed=5) as device:
        yield device
        assert findings() == []


def export(device: Device, address: int) -> bytes:
    handle = ffi.new("CUipcMemHandle *")
    device.call("IpcGetMemHandle", handle, address)
    return bytes(ffi.buffer(handle))


def test_an_export_changes_no_contents(device: Device) -> None:
    """Small allocations share pages, also with allocations that are not exported; they come and go in any order."""
    random, before = np.random.default_rng(3), descriptors()
    arrays: list[tuple[DeviceArray, np.ndarray[Any, Any]]] = []
    for step in range(120):
        if arrays and step % 3 == 2:
            array, expected = arrays.pop(int(random.integers(len(arrays))))
            np.testing.assert_array_equal(device.download(array), expected)
            array.free()
            continue
        expected = random.integers(0, 255, int(random.choice([1, 300, 4096, 9000])), np.uint8)
        arrays.append((device.upload(expected), expected))
        if step % 4 != 3:
            export(device, arrays[int(random.integers(len(arrays)))][0].address)
    for array, expected in arrays:
        np.testing.assert_array_equal(device.download(array), expected)
        array.free()
    assert len(descriptors()) <= len(before) + 1  # the file that holds the pages of all exports


def test_an_export_loses_no_write_of_another_thread() -> None:
    with configured(adversarial=0, check=0) as device:
        written, exported = device.upload(np.zeros(5000, np.uint8)), device.upload(np.zeros(100, np.uint8))
        stop, problems = threading.Event(), []

        def write() -> None:
            stream, value = Stream(device), 0
            while not stop.is_set():
                value = value % 250 + 1
                device.call("MemsetD8Async", written.address, value, 5000, stream.handle)
                if (device.download(written, stream) != value).any():
                    problems.append(value)

        writer = threading.Thread(target=write)
        writer.start()
        for _ in range(60):  # both allocations have bytes in the same page
            export(device, exported.address)
            export(device, written.address)
            exported.free()
            exported = device.upload(np.zeros(100, np.uint8))
        stop.set()
        writer.join()
        assert problems == []


def test_a_handle_names_an_allocation(device: Device) -> None:
    array = device.upload(np.zeros(5000, np.uint8))
    first = export(device, array.address)
    assert export(device, array.address) == first
    array.free()
    array = device.upload(np.zeros(5000, np.uint8))
    assert export(device, array.address) != first
    base, size = ffi.new("CUdeviceptr *"), ffi.new("size_t *")
    device.call("MemGetAddressRange", base, size, array.address + 4999)
    assert (base[0], size[0]) == (array.address, 5000)
    with pytest.raises(CudaError, match="CUDA_ERROR_NOT_FOUND"):
        device.call("MemGetAddressRange", base, size, 4096)
    for address in (array.address + 256, 0, 4096):
        with pytest.raises(CudaError, match=r"INVALID_VALUE .*no allocation starts at"):
            export(device, address)
    with pytest.raises(CudaError, match=r"INVALID_VALUE .*no opened handle has the address"):
        device.call("IpcCloseMemHandle", array.address)


def test_memory_of_a_pool_has_no_handle(device: Device) -> None:
    props = ffi.new("CUmemPoolProps *", {"allocType": 1, "location": {"type": 1, "id": 0}})
    pool, address, stream = ffi.new("CUmemoryPool *"), ffi.new("CUdeviceptr *"), Stream(device)
    device.call("MemPoolCreate", pool, props)
    device.call("MemAllocFromPoolAsync", address, 4096, pool[0], stream.handle)
    with pytest.raises(CudaError, match=r"CUDA_ERROR_INVALID_VALUE .*is of a memory pool, expected cuMemAlloc's"):
        export(device, address[0])
    device.call("MemFreeAsync", address[0], stream.handle)
    stream.synchronize()
    device.call("MemPoolDestroy", pool[0])


def make_event(device: Device, flags: int) -> Any:
    event = ffi.new("CUevent *")
    device.call("EventCreate", event, flags)
    return event[0]


def test_an_interprocess_event_orders_streams_of_one_process(device: Device) -> None:
    event, first, second = make_event(device, INTERPROCESS), Stream(device), Stream(device)
    array, copy = device.upload(np.zeros(512, np.uint8)), device.upload(np.zeros(512, np.uint8))
    device.call("StreamWaitEvent", second.handle, event, 0)  # not recorded: no wait
    device.call("EventSynchronize", event)
    for step in range(1, 8):
        device.call("MemsetD8Async", array.address, step, 512, first.handle)
        device.call("EventRecord", event, first.handle)
        device.call("StreamWaitEvent", second.handle, event, 0)
        device.call("MemcpyDtoDAsync", copy.address, array.address, 512, second.handle)
        device.call("EventRecord", event, second.handle)
        device.call("StreamWaitEvent", first.handle, event, 0)
    device.call("EventSynchronize", event)
    device.call("EventQuery", event)
    device.synchronize()
    assert (device.download(copy) == 7).all()
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_HANDLE"):
        device.call("EventElapsedTime", ffi.new("float *"), event, event)
    device.call("EventDestroy", event)


def test_wrong_events_are_refused(device: Device) -> None:
    handle, opened, before = ffi.new("CUipcEventHandle *"), ffi.new("CUevent *"), descriptors()
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        make_event(device, 4)  # without CU_EVENT_DISABLE_TIMING
    local, shared, stream = make_event(device, 2), make_event(device, INTERPROCESS), Stream(device)
    with pytest.raises(CudaError, match=r"INVALID_HANDLE .*has created with CU_EVENT_INTERPROCESS"):
        device.call("IpcGetEventHandle", handle, local)
    device.call("IpcGetEventHandle", handle, shared)
    with pytest.raises(CudaError, match=r"CUDA_ERROR_INVALID_CONTEXT .*this process exported the handle"):
        device.call("IpcOpenEventHandle", opened, handle[0])
    uses: dict[str, tuple[Any, ...]] = {
        "EventRecord": (shared, stream.handle),
        "StreamWaitEvent": (stream.handle, shared, 0),
    }
    for member, arguments in uses.items():
        device.call("StreamBeginCapture", stream.handle, 2)
        with pytest.raises(CudaError, match="CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"):
            device.call(member, *arguments)
        with pytest.raises(CudaError, match="CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"):
            device.call("StreamEndCapture", stream.handle, ffi.new("CUgraph *"))
    for event in (local, shared):
        device.call("EventDestroy", event)
    assert descriptors() == before


def test_a_device_has_one_uuid() -> None:
    code = """
from ort_cuda_plugin.abi.core import ffi
from ort_cuda_plugin.abi.device import Device
for ordinal in range(2):
    uuid, device = ffi.new("CUuuid *"), Device.emulated(ordinal)
    device.call("DeviceGetUuid", uuid, device.handle)
    assert bytes(ffi.buffer(uuid)) == b"emulated-device" + bytes([ordinal])
"""
    python(code, env={"ORT_CUDA_PLUGIN_EMULATE_DEVICES": "2"}, preloaded=True)
