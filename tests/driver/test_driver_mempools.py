"""Memory pools of the driver, on the emulated device and, if there is one, on a GPU: the same tests hold for both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from driver_harness import DEVICES, driver_device
from emulator_harness import configured
from ort_cuda_plugin.abi.core import ffi, lib
from ort_cuda_plugin.abi.device import CudaError, Device, Stream

MIB = 1 << 20


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with driver_device(request.param, seed=3) as device:
        yield device


class Pool:
    def __init__(self, device: Device) -> None:
        self.device = device
        props, handle = ffi.new("CUmemPoolProps *"), ffi.new("CUmemoryPool *")
        props.allocType = lib.CU_MEM_ALLOCATION_TYPE_PINNED
        props.location.type = lib.CU_MEM_LOCATION_TYPE_DEVICE
        device.call("MemPoolCreate", handle, props)
        self.handle: Any = handle[0]

    def get(self, attribute: int) -> int:
        value = ffi.new("uint64_t *")
        self.device.call("MemPoolGetAttribute", self.handle, attribute, value)
        return int(value[0])

    @property
    def reserved(self) -> int:
        return self.get(lib.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)

    @property
    def used(self) -> int:
        return self.get(lib.CU_MEMPOOL_ATTR_USED_MEM_CURRENT)

    def set_threshold(self, nbytes: int) -> None:
        value = ffi.new("uint64_t *", nbytes)
        self.device.call("MemPoolSetAttribute", self.handle, lib.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, value)

    def alloc(self, nbytes: int, stream: Stream) -> int:
        address = ffi.new("CUdeviceptr *")
        self.device.call("MemAllocFromPoolAsync", address, nbytes, self.handle, stream.handle)
        return int(address[0])

    def free(self, address: int, stream: Stream) -> None:
        self.device.call("MemFreeAsync", address, stream.handle)

    def destroy(self) -> None:
        self.device.call("MemPoolDestroy", self.handle)


@pytest.fixture
def pool(device: Device) -> Iterator[Pool]:
    pool = Pool(device)
    yield pool
    pool.destroy()


def write(device: Device, address: int, data: np.ndarray, stream: Stream) -> None:
    device.call("MemcpyHtoDAsync", address, ffi.from_buffer(data), data.nbytes, stream.handle)


def read(device: Device, address: int, like: np.ndarray, stream: Stream) -> np.ndarray:
    out = np.zeros_like(like)
    device.call("MemcpyDtoHAsync", ffi.from_buffer(out), address, out.nbytes, stream.handle)
    stream.synchronize()
    return out


def refuses(call: Callable[[], object], error: str) -> None:
    with pytest.raises(CudaError, match=error):
        call()


def test_memory_of_a_pool_holds_what_was_written_until_it_is_freed(device: Device, pool: Pool) -> None:
    stream = device.stream()
    data = [np.arange(1000, dtype=np.float32) + i for i in range(5)]
    addresses = [pool.alloc(4000, stream) for _ in data]
    assert len({*addresses}) == 5
    assert all(address % 256 == 0 for address in addresses)
    for address, array in zip(addresses, data, strict=True):
        write(device, address, array, stream)
    for address, array in zip(addresses, data, strict=True):
        np.testing.assert_array_equal(read(device, address, array, stream), array)
    for address in addresses:
        pool.free(address, stream)
    stream.synchronize()
    assert pool.used == 0


def test_freed_memory_serves_the_next_allocation(device: Device, pool: Pool) -> None:
    stream = device.stream()
    pool.set_threshold(1 << 30)
    first = pool.alloc(MIB, stream)
    pool.free(first, stream)
    stream.synchronize()
    reserved = pool.reserved
    assert reserved >= MIB
    assert pool.used == 0
    second = pool.alloc(MIB, stream)
    assert pool.reserved == reserved
    assert pool.used >= MIB
    pool.free(second, stream)
    stream.synchronize()


def test_what_exceeds_the_threshold_goes_back_when_somebody_waits(device: Device, pool: Pool) -> None:
    stream = device.stream()
    address = pool.alloc(64 * MIB, stream)
    assert pool.reserved >= 64 * MIB
    pool.free(address, stream)
    stream.synchronize()
    assert pool.reserved == 0
    pool.set_threshold(1 << 30)
    pool.free(pool.alloc(64 * MIB, stream), stream)
    stream.synchronize()
    assert pool.reserved >= 64 * MIB


def test_a_trim_keeps_what_it_is_told_to_and_what_is_used(device: Device, pool: Pool) -> None:
    stream = device.stream()
    pool.set_threshold(1 << 30)
    kept = pool.alloc(64 * MIB, stream)
    freed = [pool.alloc(64 * MIB, stream) for _ in range(3)]
    for address in freed:
        pool.free(address, stream)
    stream.synchronize()
    assert pool.reserved >= 256 * MIB
    device.call("MemPoolTrimTo", pool.handle, 128 * MIB)
    assert 128 * MIB <= pool.reserved < 256 * MIB
    device.call("MemPoolTrimTo", pool.handle, 0)
    assert 64 * MIB <= pool.reserved < 128 * MIB
    pool.free(kept, stream)
    stream.synchronize()


def test_only_live_memory_can_be_freed(device: Device, pool: Pool) -> None:
    stream = device.stream()
    address = pool.alloc(1000, stream)
    pool.free(address, stream)
    refuses(lambda: pool.free(address + (1 << 40), stream), "INVALID_VALUE")
    stream.synchronize()


@pytest.fixture(params=[0, 1], ids=["inline", "adversarial"])
def emulated(request: pytest.FixtureRequest) -> Iterator[Device]:
    with configured(adversarial=request.param, check=0, seed=9) as device:
        yield device


def test_a_second_free_is_refused(emulated: Device) -> None:
    pool, stream = Pool(emulated), emulated.stream()
    address = pool.alloc(1000, stream)
    pool.free(address, stream)
    refuses(lambda: pool.free(address, stream), "no allocation of a memory pool starts at")
    stream.synchronize()
    pool.destroy()


def test_frees_that_are_still_to_come_make_room(emulated: Device) -> None:
    pool, stream = Pool(emulated), emulated.stream()
    free_before = emulated.memory[0]
    most = free_before * 5 // 8 // MIB * MIB  # two blocks of this size do not fit; nothing accesses them
    for _ in range(10):
        pool.free(pool.alloc(most, stream), stream)
    address = pool.alloc(most, stream)
    refuses(lambda: pool.alloc(most, stream), f"no room for {most} bytes on emulated device 0")
    pool.destroy()  # the allocation stays valid until it is freed
    assert emulated.memory[0] < free_before
    pool.free(address, stream)
    stream.synchronize()
    assert emulated.memory[0] == free_before


def test_a_capture_takes_no_memory_of_a_pool(emulated: Device) -> None:
    pool, stream = Pool(emulated), emulated.stream()
    address = pool.alloc(1000, stream)
    emulated.call("StreamBeginCapture", stream.handle, lib.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    refuses(lambda: pool.alloc(1000, stream), "STREAM_CAPTURE_UNSUPPORTED")
    refuses(lambda: emulated.call("StreamEndCapture", stream.handle, ffi.new("CUgraph *")), "INVALIDATED")
    pool.free(address, stream)
    stream.synchronize()
    pool.destroy()


def test_a_use_after_the_free_is_found_by_the_checking_mode() -> None:
    with configured(adversarial=0, check=1, seed=1) as device:
        pool, stream = Pool(device), device.stream()
        source, target = pool.alloc(4096, stream), pool.alloc(4096, stream)
        write(device, source, np.zeros(1024, np.float32), stream)
        pool.free(source, stream)
        stream.synchronize()
        refuses(lambda: device.call("MemcpyDtoDAsync", target, source, 4096, stream.handle), "INVALID_VALUE|ILLEGAL")
        pool.free(target, stream)
        stream.synchronize()
        pool.destroy()


def test_properties_and_attributes_are_checked(emulated: Device) -> None:
    pool, stream = Pool(emulated), emulated.stream()
    props = ffi.new("CUmemPoolProps *")
    refuses(lambda: emulated.call("MemPoolCreate", ffi.new("CUmemoryPool *"), props), "hold pinned allocations of one")
    refuses(lambda: pool.get(1), "memory pool attribute 1 is not emulated")
    refuses(lambda: pool.alloc(0, stream), "INVALID_VALUE")
    handle = pool.handle
    pool.destroy()
    refuses(lambda: emulated.call("MemPoolTrimTo", handle, 0), "INVALID_VALUE")
