"""The weight store."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_harness import DeviceBlock, Registers, TestCluster, acquire, device, driver, succeed
from ort_cuda_plugin.abi.core import PluginError, check, core, counters, ffi, new_error
from ort_cuda_plugin.plan.format import Plan, PlanBuffer, PlanOutput
from ort_cuda_plugin.program.expressions.operations import ExprOp
from test_executor_run import affine, ref_buffer, ref_output, ref_weight

UINT8 = 2


def precomputation(nbytes: int) -> Plan:
    """Return a plan of 2 w + 1 for weight 0, w, which has ``nbytes`` of float32; an intermediate buffer holds 2 w."""
    r = Registers(0)
    size = r.const(nbytes // 4)
    length = r.op(ExprOp.MUL, size, r.const(4))
    return Plan(
        inputs=(),
        outputs=(PlanOutput(UINT8, (length,)),),
        nodes=("scale", "shift"),
        buffers=(PlanBuffer(length, 0, 1),),
        records=(
            affine(r, ref_weight(), ref_buffer(), size, 2, 0),
            affine(r, ref_buffer(), ref_output(), size, 1, 1),
        ),
        kernels=(0,),
        weights=(0,),
        exprs=tuple(r.exprs),
        num_registers=r.count,
    )


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


def new_weight(nbytes: int) -> object:
    out = ffi.new("ocp_weight **")
    succeed(core().weight_create_state(device(), ffi.NULL, nbytes, out, new_error()))
    return out[0]


@pytest.mark.usefixtures("collected")
def test_a_weight_is_computed_from_another() -> None:
    before = counters()
    x = np.random.default_rng(0).standard_normal(1000, dtype=np.float32)
    result = new_weight(x.nbytes)
    with TestCluster(precomputation(x.nbytes), weights=[x]) as cluster:
        error = new_error()
        core().cluster_precompute(cluster.pointer, ffi.new("ocp_weight *[]", [result]), 1, error)
        check(error)
    assert contents(result, x.nbytes) == (2 * x + 1).tobytes()
    assert counters()["weight_bytes"] - before["weight_bytes"] == x.nbytes
    core().weight_release(result)
    assert counters()["weight_bytes"] == before["weight_bytes"]
    assert counters()["device_bytes_in_use"] == before["device_bytes_in_use"]


@pytest.mark.parametrize("sizes", [[], [396], [404]])
def test_results_without_a_weight_of_their_size_are_refused(sizes: list[int]) -> None:
    results = [new_weight(nbytes) for nbytes in sizes]
    with TestCluster(precomputation(400), weights=[np.ones(100, np.float32)]) as cluster:
        error = new_error()
        core().cluster_precompute(cluster.pointer, ffi.new("ocp_weight *[]", results), len(results), error)
        with pytest.raises(PluginError, match="output 0 of the constant-folding plan is not the"):
            check(error)
    for weight in results:
        core().weight_release(weight)
