"""Kernels on the emulated device: grids, blocks, barriers, shuffles, votes, parameters, loading."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator_harness import compile_kernels, configured
from kernel_objects import KERNEL_FLAGS, OTHER_CODE_MODELS
from ort_cuda_plugin.abi.device import CudaError, Device, DeviceArray, Module


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return compile_kernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(params=[0, 1], ids=["inline", "adversarial"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with configured(adversarial=request.param, seed=7, workers=2) as device:
        yield device


@pytest.fixture
def kernels(device: Device, image: bytes) -> Iterator[Module]:
    module = device.load(image)
    yield module
    module.unload()


def test_a_grid_covers_every_element_once(device: Device, kernels: Module) -> None:
    values = np.arange(100_003, dtype=np.float32)
    a, b, out = device.upload(values), device.upload(values * 2), device.empty(values.shape, np.float32)
    kernels.launch("add", -(-len(values) // 128), 128, [a, b, out, np.uint32(len(values))])
    np.testing.assert_array_equal(device.download(out), values * 3)


@pytest.mark.parametrize(
    ("grid", "block"), [((3, 2, 2), (4, 3, 2)), ((1,), (1024,)), ((2, 1, 3), (33, 1, 1)), ((1,), (1, 1, 64))]
)
def test_threads_see_their_indices(
    device: Device, kernels: Module, grid: tuple[int, ...], block: tuple[int, ...]
) -> None:
    grid, block = (*grid, 1, 1)[:3], (*block, 1, 1)[:3]
    shape = (*grid[::-1], *block[::-1])
    out = device.upload(np.full((*shape, 10), -1, np.int32))
    kernels.launch("indices", grid, block, [out], shared=16)
    expected = np.moveaxis(np.indices(shape)[[2, 1, 0, 5, 4, 3]], 0, -1)
    got = device.download(out)
    np.testing.assert_array_equal(got[..., :6], expected)
    linear = np.arange(np.prod(block)).reshape(block[::-1])
    np.testing.assert_array_equal(got[..., 6], np.broadcast_to(linear % 32, shape))
    assert (got[..., 7:] == [block[1], grid[2], 16]).all()


@settings(max_examples=25)
@given(threads=st.integers(1, 1024), blocks=st.integers(1, 9), rounds=st.integers(0, 5), dynamic=st.booleans())
def test_barriers_order_shared_memory(image: bytes, threads: int, blocks: int, rounds: int, dynamic: bool) -> None:
    with configured(adversarial=0, workers=2) as device:
        kernels = device.load(image)
        values = np.arange(blocks * threads, dtype=np.int32).reshape(blocks, threads)
        data = device.upload(values)
        name, shared = ("reverse_dynamic", threads * 4) if dynamic else ("reverse", 0)
        kernels.launch(name, blocks, threads, [data, np.int32(rounds)], shared=shared)
        np.testing.assert_array_equal(device.download(data), values[:, ::-1] if rounds % 2 else values)


def reference_shuffle(lanes: int, mask: int, mode: int, by: int, clamp: int) -> tuple[list[int], list[int]]:
    """Return the values and predicates of shfl.sync by the PTX ISA: lane i passes 100 + i; 0 outside of the mask."""
    out, inside = [0] * lanes, [0] * lanes
    segment, limit = clamp >> 8 & 31, clamp & 31
    for lane in range(lanes):
        if not mask >> lane & 1:
            continue
        lowest = lane & segment
        highest = lowest | (limit & ~segment)
        source = {0: lowest | (by & ~segment), 1: lane - by, 2: lane + by, 3: lane ^ by}[mode]
        predicate = source >= highest if mode == 1 else source <= highest
        out[lane], inside[lane] = 100 + (source if predicate else lane), int(predicate)
        if predicate and (source >= lanes or not mask >> source & 1):
            out[lane] = 100 + lane  # undefined by the PTX ISA; the emulator returns the lane's own value
    return out, inside


@settings(max_examples=60)
@given(
    lanes=st.integers(1, 32),
    mask=st.one_of(st.just(0xFFFFFFFF), st.integers(1, 0xFFFFFFFF)),
    mode=st.integers(0, 3),
    by=st.integers(0, 31),
    width=st.sampled_from([1, 2, 4, 8, 16, 32]),
)
def test_shuffles_follow_the_ptx_definition(
    image: bytes, lanes: int, mask: int, mode: int, by: int, width: int
) -> None:
    clamp = (32 - width) << 8 | (0 if mode == 1 else 31)
    with configured(adversarial=0) as device:
        kernels = device.load(image)
        out, inside = device.upload(np.zeros(lanes, np.uint32)), device.upload(np.zeros(lanes, np.uint32))
        arguments: list[DeviceArray | np.generic] = [out, inside, *(np.uint32(v) for v in (mask, mode, by, clamp))]
        kernels.launch("shuffle", 1, lanes, arguments)
        got = device.download(out).tolist(), device.download(inside).tolist()
    assert got == reference_shuffle(lanes, mask, mode, by, clamp)


@pytest.mark.parametrize("threads", [32, 256, 1024])
def test_a_block_reduces_through_shuffles_and_shared_memory(device: Device, kernels: Module, threads: int) -> None:
    values = np.random.default_rng(1).integers(0, 1000, (40, threads), dtype=np.uint32)
    out = device.empty(40, np.uint32)
    kernels.launch("block_sum", 40, threads, [device.upload(values), out])
    np.testing.assert_array_equal(device.download(out), values.sum(axis=1))


def test_parts_of_a_warp_shuffle_apart(device: Device, kernels: Module) -> None:
    out = device.empty(32, np.uint32)
    kernels.launch("halves", 1, 32, [out])
    lanes = np.arange(32)
    rounds = np.where(lanes < 16, 3, 7)
    np.testing.assert_array_equal(device.download(out), (lanes ^ (rounds & 1)) + rounds)


@pytest.mark.parametrize("threads", [5, 32, 40])
@pytest.mark.parametrize("positive", ["none", "some", "all"])
def test_votes_count_the_lanes_that_exist(device: Device, kernels: Module, threads: int, positive: str) -> None:
    values = {"none": np.zeros(threads), "some": np.arange(threads) % 3, "all": np.ones(threads)}[positive]
    out = device.empty((threads, 4), np.uint32)
    kernels.launch("vote", 1, threads, [device.upload(values.astype(np.int32)), out])
    expected = []
    for start in range(0, threads, 32):
        warp = values[start : start + 32] > 0
        ballot = sum(int(bit) << lane for lane, bit in enumerate(warp))
        expected += [[warp.all(), warp.any(), warp.all() or not warp.any(), ballot]] * len(warp)
    np.testing.assert_array_equal(device.download(out), np.array(expected, np.uint32))


@pytest.mark.parametrize(("threads", "arriving"), [(32, 7), (64, 32), (1024, 1023)])
def test_a_barrier_that_not_all_reach_fails_the_launch(image: bytes, threads: int, arriving: int) -> None:
    with configured(adversarial=0) as device:
        kernels = device.load(image)
        kernels.launch("divergent", 1, threads, [np.uint32(threads)])
        with pytest.raises(CudaError, match="CUDA_ERROR_LAUNCH_FAILED"):
            kernels.launch("divergent", 1, threads, [np.uint32(arriving)])
        with pytest.raises(CudaError, match="CUDA_ERROR_LAUNCH_FAILED"):
            device.synchronize()


def test_each_thread_has_its_own_stack(device: Device, kernels: Module) -> None:
    out = device.empty(200, np.uint32)
    kernels.launch("deep", 1, 200, [out])
    np.testing.assert_array_equal(device.download(out), (np.arange(200) & 255) * 157)


def test_kernels_call_libm(device: Device, kernels: Module) -> None:
    from math import erf, exp

    values = np.linspace(-3, 1, 256, dtype=np.float32)
    data = device.upload(values)
    kernels.launch("math", 1, 256, [data])
    np.testing.assert_allclose(device.download(data), [erf(exp(v)) for v in values], rtol=1e-6)


def test_parameters_of_every_size_arrive(device: Device, kernels: Module) -> None:
    out = device.empty(1, np.float64)
    arguments: list[np.number] = [
        np.int8(-3),
        np.int16(-300),
        np.int32(70_000),
        np.int64(1 << 40),
        np.float32(0.5),
        np.float64(0.25),
    ]
    kernels.launch("parameters", 1, 1, [out, *arguments])
    assert device.download(out)[0] == sum((float(a) for a in arguments), 0.0)


def test_parameters_are_read_when_the_launch_is_enqueued(device: Device, kernels: Module) -> None:
    from ort_cuda_plugin.abi.core import ffi
    from ort_cuda_plugin.abi.device import Params

    data = device.upload(np.zeros(8, np.int32))
    amount = ffi.new("int *", 5)
    pointer = ffi.new("CUdeviceptr *", data.address)
    params = ffi.new("void *[]", [pointer, amount])
    device.call("LaunchKernel", kernels.function("bump"), 1, 1, 1, 8, 1, 1, 0, ffi.NULL, params, ffi.NULL)
    amount[0], pointer[0] = 1000, 0
    assert (device.download(data) == 5).all()
    assert isinstance(Params([data]), Params)


@pytest.mark.parametrize(
    ("grid", "block", "shared"),
    [
        ((0, 1, 1), 32, 0),
        ((1, 65536, 1), 32, 0),
        ((1, 1, 65536), 32, 0),
        (1, (1025, 1, 1), 0),
        (1, (32, 33, 1), 0),
        (1, (1, 1, 65), 0),
        (1, 0, 0),
        (1, 32, (48 << 10) + 1),
    ],
)
def test_impossible_launches_are_refused(
    device: Device, kernels: Module, grid: object, block: object, shared: int
) -> None:
    from ort_cuda_plugin.abi.core import ffi
    from ort_cuda_plugin.abi.device import Params, dim3

    data = device.upload(np.zeros(8, np.int32))
    dims = (*dim3(grid), *dim3(block))  # type: ignore[arg-type]
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        device.call(
            "LaunchKernel",
            kernels.function("bump"),
            *dims,
            shared,
            ffi.NULL,
            Params([data, np.int32(1)]).pointers,
            ffi.NULL,
        )
    assert (device.download(data) == 0).all()


def test_dynamic_shared_memory_above_48_kib_must_be_asked_for(device: Device, kernels: Module) -> None:
    function = kernels.function("reverse_dynamic")
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        device.call("FuncSetAttribute", function, 8, (227 << 10) + 1)
    data = device.upload(np.arange(1024, dtype=np.int32))
    kernels.launch("reverse_dynamic", 1, 1024, [data, np.int32(1)], shared=227 << 10)
    np.testing.assert_array_equal(device.download(data), np.arange(1024)[::-1])


def test_a_host_pointer_is_no_kernel_argument(image: bytes) -> None:
    with configured(adversarial=0) as device:
        kernels = device.load(image)
        host = np.zeros(8, np.int32)
        stray = type("Stray", (), {})()
        stray = device.upload(host)
        address, stray.address = stray.address, host.ctypes.data
        with pytest.raises(CudaError, match=r"CUDA_ERROR_ILLEGAL_ADDRESS \(parameter 0 of kernel \"bump\""):
            kernels.launch("bump", 1, 8, [stray, np.int32(1)])
        stray.address = address


def test_launches_from_many_threads_do_not_disturb_each_other(device: Device, kernels: Module) -> None:
    def work(seed: int) -> None:
        values = np.random.default_rng(seed).integers(0, 1000, (60, 256), dtype=np.uint32)
        with device.stream() as stream:
            data, out = device.upload(values, stream), device.empty(60, np.uint32)
            for _ in range(10):
                kernels.launch("block_sum", 60, 256, [data, out], stream=stream)
                np.testing.assert_array_equal(device.download(out, stream), values.sum(axis=1))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(12)))


def test_hundreds_of_host_threads_need_few_mappings(image: bytes) -> None:
    """A process may have about 65,000 mappings. Each host thread that runs blocks maps 1024 stacks with guard pages."""
    started = Barrier(200)

    def work(emulated: Device, kernels: Module) -> None:
        started.wait(60)
        with emulated.entered(), emulated.stream() as stream:
            for _ in range(3):
                kernels.launch("divergent", 4, 1024, [np.uint32(1024)], stream=stream)
            stream.synchronize()

    with configured(adversarial=0, workers=4) as emulated:
        kernels = emulated.load(image)
        with ThreadPoolExecutor(200) as pool:
            list(pool.map(work, [emulated] * 200, [kernels] * 200))
        assert len(Path("/proc/self/maps").read_text().splitlines()) < 10000
        kernels.unload()


# ---- loading ----


def test_an_undefined_symbol_is_named(device: Device, tmp_path: Path) -> None:
    import subprocess

    import build_plugin

    (tmp_path / "k.c").write_text("void nobody_has_this(void); void k(void) { nobody_has_this(); }")
    command = [*build_plugin.compiler(), "-O1", *KERNEL_FLAGS, "-c", "k.c", "-o", "k.o"]
    subprocess.run(command, check=True, cwd=tmp_path)
    with pytest.raises(CudaError, match=r'CUDA_ERROR_INVALID_IMAGE.*"nobody_has_this"'):
        device.load((tmp_path / "k.o").read_bytes())


def test_every_symbol_of_the_table_is_found(device: Device, tmp_path: Path) -> None:
    import re
    import subprocess

    import build_plugin

    text = (build_plugin.SOURCES / "emulator" / "calls" / "symbols.c").read_text()
    names = re.findall(r"SAME\((\w+)\),", text)
    assert len(names) > 100
    uses = "\n".join(f'__asm__(".quad {name}");' for name in names)
    (tmp_path / "k.c").write_text(f"void k(void) {{}}\n{uses}\n")
    command = [*build_plugin.compiler(), "-O1", *KERNEL_FLAGS, "-c", "k.c", "-o", "k.o"]
    subprocess.run(command, check=True, cwd=tmp_path)
    device.load((tmp_path / "k.o").read_bytes()).unload()


def test_a_kernel_that_does_not_exist_is_not_found(kernels: Module) -> None:
    with pytest.raises(CudaError, match=r'CUDA_ERROR_NOT_FOUND.*"nothing"'):
        kernels.function("nothing")
    with pytest.raises(CudaError, match="CUDA_ERROR_NOT_FOUND"):
        kernels.function("add.meta")


@pytest.mark.parametrize("model", OTHER_CODE_MODELS)
def test_objects_of_other_code_models_load_or_say_why(device: Device, tmp_path: Path, model: str) -> None:
    import subprocess

    import build_plugin
    from emulator_harness import SOURCES

    source, target = SOURCES / "emulator_kernels.c", tmp_path / "k.o"
    command = [*build_plugin.compiler(), "-O2", *OTHER_CODE_MODELS[model], f"-I{build_plugin.SOURCES}", "-c"]
    subprocess.run([*command, str(source), "-o", str(target)], check=True)
    kernels = device.load(target.read_bytes())
    data = device.upload(np.zeros(256, np.float32))
    kernels.launch("math", 1, 256, [data])
    assert device.download(data)[0] == pytest.approx(0.8427008, rel=1e-6)


def test_cubins_are_refused(device: Device) -> None:
    cubin = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00\xbe\x00" + bytes(60)
    with pytest.raises(CudaError, match=r"CUDA_ERROR_NO_BINARY_FOR_GPU.*the image is a cubin.* Load the PTX"):
        device.load(cubin)
