"""The weight store."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_harness import DeviceBlock, acquire, device, driver, succeed
from ort_cuda_plugin.abi.core import core, counters, ffi, new_error


def address(weight: object) -> int:
    return int(core().weight_address(weight))


def contents(weight: object, nbytes: int) -> bytes:
    out = bytearray(nbytes)
    if nbytes:
        succeed(driver().MemcpyDtoHAsync(ffi.from_buffer(out), address(weight), nbytes, ffi.NULL))
        succeed(driver().CtxSynchronize())
    return bytes(out)


@pytest.mark.usefixtures("collected")
def test_equal_contents_are_stored_once_and_freed_with_the_last_user() -> None:
    before = counters()
    first, second = (acquire(np.arange(1000, dtype=np.int64)) for _ in range(2))
    assert address(first) == address(second)
    assert counters()["weight_bytes"] - before["weight_bytes"] == 8000
    assert counters()["copies_h2d"] - before["copies_h2d"] == 1
    core().weight_release(first)
    assert contents(second, 8000) == np.arange(1000, dtype=np.int64).tobytes()
    core().weight_release(second)
    assert counters()["weight_bytes"] == before["weight_bytes"]
    assert counters()["device_bytes_in_use"] == before["device_bytes_in_use"]


@given(st.lists(st.binary(max_size=20), min_size=2, max_size=6))
def test_different_contents_are_different_weights(texts: list[bytes]) -> None:
    weights = [acquire(np.frombuffer(text, np.uint8)) for text in texts]
    assert [contents(weight, len(text)) for weight, text in zip(weights, texts, strict=True)] == texts
    assert len({address(weight) for weight in weights}) == len(set(texts))
    for weight in weights:
        core().weight_release(weight)


@pytest.mark.usefixtures("collected")
def test_threads_that_acquire_the_same_contents_upload_them_once() -> None:
    before = counters()
    array = np.random.default_rng(0).standard_normal(1 << 18)
    weights: list[object] = []
    threads = [threading.Thread(target=lambda: weights.append(acquire(array))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({address(weight) for weight in weights}) == 1
    assert counters()["copies_h2d"] - before["copies_h2d"] == 1
    for weight in weights:
        core().weight_release(weight)
    assert counters()["weight_bytes"] == before["weight_bytes"]


def test_a_weight_is_not_host_memory() -> None:
    weight = acquire(np.ones(4))
    block = DeviceBlock(32)
    assert address(weight) != block.address
    assert core().emu_owns(address(weight))
    core().weight_release(weight)


@pytest.mark.usefixtures("collected")
def test_a_state_is_shared_with_nobody() -> None:
    before = counters()
    array = np.arange(2, dtype=np.uint64)
    out = ffi.new("ocp_weight **")
    succeed(core().weight_create_state(device(), ffi.from_buffer(array), array.nbytes, out, new_error()))
    weights = [acquire(array), out[0], acquire(array)]
    assert address(weights[0]) == address(weights[2]) != address(weights[1])
    assert contents(weights[1], array.nbytes) == array.tobytes()
    assert counters()["weight_bytes"] - before["weight_bytes"] == 2 * array.nbytes
    for weight in weights:
        core().weight_release(weight)
    assert counters()["weight_bytes"] == before["weight_bytes"]
    assert counters()["device_bytes_in_use"] == before["device_bytes_in_use"]
