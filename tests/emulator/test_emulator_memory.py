"""Memory of the emulated device: the allocator, page-locked memory, copies, and accesses that the host may not make."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator_harness import apply, configured, current
from isolated import python
from ort_cuda_plugin.abi.core import core, ffi
from ort_cuda_plugin.abi.device import CudaError, Device

MIB = 1 << 20


@pytest.fixture(params=[0, 1], ids=["inline", "adversarial"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with configured(adversarial=request.param, check=0, seed=5) as device:
        yield device


def allocate(device: Device, nbytes: int) -> int:
    address = ffi.new("CUdeviceptr *")
    device.call("MemAlloc", address, nbytes)
    return int(address[0])


sizes = st.one_of(st.integers(1, 5000), st.integers(1, 40 * MIB), st.sampled_from([255, 256, 257, MIB, MIB + 1]))


@settings(max_examples=60)
@given(steps=st.lists(st.tuples(sizes, st.integers(0, 1 << 30)), max_size=80))
def test_live_blocks_are_aligned_and_never_overlap(steps: list[tuple[int, int]]) -> None:
    with configured(check=0) as device:
        free_before = device.memory[0]
        live: dict[int, int] = {}
        for nbytes, choice in steps:
            if live and choice % 3 == 0:
                address = sorted(live)[choice % len(live)]
                device.call("MemFree", address)
                del live[address]
            else:
                live[allocate(device, nbytes)] = nbytes
            ends = sorted((address, address + size) for address, size in live.items())
            assert all(end <= start for (_, end), (start, _) in pairwise(ends))
            assert all(address % 256 == 0 for address in live)
            assert free_before - device.memory[0] == sum(-(-size // 256) * 256 for size in live.values())
        for address in live:
            device.call("MemFree", address)
        assert device.memory[0] == free_before


def test_free_neighbors_become_one_block_again() -> None:
    code = """
    from ort_cuda_plugin.abi.device import CudaError, Device
    device = Device.emulated()
    arrays = [device.alloc(1 << 20) for _ in range(64)]
    for array in arrays[::2] + arrays[1::2]:
        array.free()
    device.alloc(64 << 20).free()
    try:
        device.alloc((64 << 20) + 1)
    except CudaError as error:
        print(error)
    """
    done = python(code, env={"ORT_CUDA_PLUGIN_EMULATE_MEMORY": "64M"}, preloaded=True)
    assert "CUDA_ERROR_OUT_OF_MEMORY (no room for 67108865 bytes on emulated device 0)" in done.stdout


def test_memory_runs_out_at_the_configured_size_and_comes_back() -> None:
    code = """
    from ort_cuda_plugin.abi.device import CudaError, Device
    device = Device.emulated()
    kept, full = [], False
    while not full:
        try:
            kept.append(device.alloc(100_000))
        except CudaError as error:
            full = error.name == "CUDA_ERROR_OUT_OF_MEMORY"
    print(len(kept), device.memory[1])
    del kept
    print(device.memory[0] == device.memory[1])
    """
    expected = (8 << 20) // (-(-100_000 // 256) * 256)
    for check in "01":
        done = python(
            code, env={"ORT_CUDA_PLUGIN_EMULATE_MEMORY": "8M", "ORT_CUDA_PLUGIN_EMULATE_CHECK": check}, preloaded=True
        )
        count, total, freed = done.stdout.split()
        assert int(total) == 8 << 20
        assert freed == "True"
        assert int(count) == expected if check == "0" else expected - 8 < int(count) <= expected


def test_large_freed_blocks_return_their_pages(device: Device) -> None:
    import psutil

    process = psutil.Process()
    array = device.alloc(256 * MIB)
    before = process.memory_info().rss
    array.fill(1)
    device.synchronize()
    filled = process.memory_info().rss
    array.free()
    after = process.memory_info().rss
    assert filled - before > 200 * MIB
    assert after - before < 20 * MIB


def test_the_host_cannot_touch_device_memory() -> None:
    code = """
    import ctypes
    from ort_cuda_plugin.abi.device import Device
    array = Device.emulated().alloc(16)
    print("before", flush=True)
    ctypes.string_at(array.address, 1)
    print("after")
    """
    done = python(code, check=False, preloaded=True)
    assert done.returncode == -11, done
    assert done.stdout == "before\n"


@pytest.mark.parametrize("address", ["inside", "host", "twice"])
def test_only_addresses_of_blocks_can_be_freed(device: Device, address: str) -> None:
    block = allocate(device, 1000)
    other = ffi.new("char[512]")
    wrong = {"inside": block + 256, "host": int(ffi.cast("uintptr_t", other)), "twice": block}[address]
    if address == "twice":
        device.call("MemFree", block)
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        device.call("MemFree", wrong)
    if address != "twice":
        device.call("MemFree", block)
    device.call("MemFree", 0)


def test_copies_outside_of_a_block_are_refused(device: Device) -> None:
    array, host = device.alloc(1000), np.zeros(2000, np.uint8)
    pointer = ffi.cast("void *", host.ctypes.data)
    for offset, nbytes in ((0, 1001), (999, 2), (1001, 1), (-1, 2)):
        address = array.address + offset
        for member, arguments in (
            ("MemcpyHtoDAsync", (address, pointer, nbytes)),
            ("MemcpyDtoHAsync", (pointer, address, nbytes)),
            ("MemcpyDtoDAsync", (address, array.address, nbytes)),
            ("MemcpyDtoDAsync", (array.address, address, nbytes)),
            ("MemsetD8Async", (address, 0, nbytes)),
        ):
            with pytest.raises(CudaError, match=r"CUDA_ERROR_INVALID_VALUE .*is not inside one device allocation"):
                device.call(member, *arguments, ffi.NULL)
    device.call("MemsetD8Async", array.address, 0, 1000, ffi.NULL)


def test_host_and_device_pointers_are_told_apart(device: Device) -> None:
    array = device.alloc(64)
    with pytest.raises(CudaError, match="the source is not host memory"):
        device.call("MemcpyHtoDAsync", array.address, ffi.cast("void *", array.address), 64, ffi.NULL)
    with pytest.raises(CudaError, match="the destination is not host memory"):
        device.call("MemcpyDtoHAsync", ffi.cast("void *", array.address), array.address, 64, ffi.NULL)
    assert core().emu_owns(array.address)
    assert not core().emu_owns(int(ffi.cast("uintptr_t", ffi.new("char *"))))
    assert core().emu_host_pointer(array.address + 60, 5) == ffi.NULL
    assert core().emu_host_pointer(array.address + 60, 4) != ffi.NULL


def test_copies_carry_bytes_in_every_direction(device: Device) -> None:
    values = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8)
    first, second = device.upload(values), device.alloc(100_000)
    device.call("MemcpyDtoDAsync", second.address + 1, first.address, 99_999, ffi.NULL)
    device.call("MemsetD8Async", second.address, 7, 1, ffi.NULL)
    np.testing.assert_array_equal(device.download(second), np.concatenate([[7], values[:-1]]))


def test_pageable_sources_may_change_at_once_and_pageable_destinations_are_there_at_once(device: Device) -> None:
    stream = device.stream()
    source, array = np.full(1000, 3, np.int32), device.empty(1000, np.int32)
    array.copy_from(source, stream)
    source[:] = 9
    out = np.zeros(1000, np.int32)
    array.enqueue_copy_to(out, stream)
    assert (out == 3).all()


def test_pinned_copies_run_later_in_adversarial_mode() -> None:
    with configured(adversarial=1, check=0) as device:
        stream = device.stream()
        source, out = device.pinned(1000, np.int32), device.pinned(1000, np.int32)
        source.array[:], out.array[:] = 3, 0
        array = device.empty(1000, np.int32)
        array.copy_from(source.array, stream)
        array.enqueue_copy_to(out.array, stream)
        assert (out.array == 0).all()
        source.array[:] = 9
        stream.synchronize()
        assert (out.array == 9).all()
        source.free()
        out.free()


def test_devices_have_memory_of_their_own() -> None:
    code = """
    import numpy as np
    from ort_cuda_plugin.abi.device import CudaError, Device
    devices = [Device.emulated(i) for i in range(3)]
    values = [device.upload(np.full(100, i)) for i, device in enumerate(devices)]
    assert [device.memory[1] for device in devices] == [1 << 30] * 3
    assert [int(device.download(value)[0]) for device, value in zip(devices, values)] == [0, 1, 2]
    assert len({device.attribute(16) for device in devices}) == 1
    try:
        Device.emulated(3)
    except CudaError as error:
        print(error)
    """
    done = python(
        code, env={"ORT_CUDA_PLUGIN_EMULATE_DEVICES": "3", "ORT_CUDA_PLUGIN_EMULATE_MEMORY": "1G"}, preloaded=True
    )
    assert done.stdout == "DeviceGet: CUDA_ERROR_INVALID_DEVICE\n"


@pytest.mark.parametrize(
    ("name", "value"),
    [("MEMORY", "lots"), ("MEMORY", "1T"), ("DEVICES", "9"), ("DEVICES", "0"), ("STREAMS", "random"), ("SEED", "-1")],
)
def test_settings_that_cannot_be_read_are_named(name: str, value: str) -> None:
    code = "from ort_cuda_plugin.abi.device import Device; Device.emulated()"
    done = python(code, env={f"ORT_CUDA_PLUGIN_EMULATE_{name}": value}, check=False, preloaded=True)
    assert f'ORT_CUDA_PLUGIN_EMULATE_{name}="{value}"' in done.stderr


def test_the_size_of_a_device_is_fixed_while_its_memory_is_in_use(device: Device) -> None:
    array = device.alloc(1)
    with pytest.raises(ValueError, match="cannot change while memory"):
        apply(replace(current(), device_bytes=current().device_bytes // 2))
    assert array.address


def test_a_forked_child_gets_an_error(device: Device) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            device.alloc(1)
            os.write(write, b"no error")
        except BaseException as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert b"CUDA_ERROR_NOT_INITIALIZED" in os.read(read, 1000)
    os.close(read)
    os.close(write)
    device.alloc(1)


def test_calls_need_a_context() -> None:
    with configured() as device:
        device.driver.CtxSetCurrent(ffi.NULL)
        assert device.driver.MemAlloc(ffi.new("CUdeviceptr *"), 1) == 201
        current = ffi.new("CUcontext *")
        device.enter()
        assert device.driver.CtxGetCurrent(current) == 0
        assert current[0] == device.context


def test_memory_is_copied_between_devices() -> None:
    code = """
import numpy as np
from ort_cuda_plugin.abi.core import ffi
from ort_cuda_plugin.abi.device import CudaError, Device
first, second = Device.emulated(0), Device.emulated(1)
def fails(name, member, *arguments):
    try:
        first.call(member, *arguments)
    except CudaError as error:
        assert name in str(error), error
    else:
        raise AssertionError("accepted")
source, target = first.upload(np.arange(9, dtype=np.int32)), second.upload(np.zeros(9, np.int32))
stream = ffi.NULL
second.call("MemcpyPeerAsync", target.address, second.context, source.address, first.context, 36, stream)
assert target.copy_to(np.zeros(9, np.int32)).tolist() == list(range(9))
pair = (target.address, second.context, source.address, first.context)
fails("INVALID_VALUE", "MemcpyPeerAsync", target.address, first.context, source.address, first.context, 36, stream)
fails("INVALID_VALUE", "MemcpyPeerAsync", target.address, second.context, source.address, second.context, 36, stream)
fails("INVALID_VALUE", "MemcpyPeerAsync", *pair, 4096, stream)
fails("INVALID_VALUE", "MemcpyPeerAsync", 4096, second.context, source.address, first.context, 36, stream)
first.call("MemcpyPeerAsync", *pair, 0, stream)
can = ffi.new("int *")
for one, other, expected in ((0, 1, 1), (1, 0, 1), (0, 0, 0)):
    first.call("DeviceCanAccessPeer", can, one, other)
    assert can[0] == expected
fails("INVALID_DEVICE", "DeviceCanAccessPeer", can, 0, 2)
first.call("CtxEnablePeerAccess", second.context, 0)
fails("PEER_ACCESS_ALREADY_ENABLED", "CtxEnablePeerAccess", second.context, 0)
fails("INVALID_VALUE", "CtxEnablePeerAccess", second.context, 1)
fails("INVALID_DEVICE", "CtxEnablePeerAccess", first.context, 0)
fails("INVALID_CONTEXT", "CtxEnablePeerAccess", ffi.NULL, 0)
"""
    python(code, env={"ORT_CUDA_PLUGIN_EMULATE_DEVICES": "2"}, preloaded=True)
