"""The checking mode of the emulated device finds each seeded bug, and nothing in correct programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from emulator_harness import compile_kernels, configured
from isolated import python
from ort_cuda_plugin.abi.core import core, ffi
from ort_cuda_plugin.abi.device import CudaError, Device, DeviceArray, Module, Stream
from ort_cuda_plugin.abi.emulation import findings
from ort_cuda_plugin.compiler.compile import compile_kernel
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.targets import Target


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return compile_kernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(params=[0, 1], ids=["inline", "adversarial"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with configured(adversarial=request.param, seed=3, check=1, workers=2) as device:
        yield device


@pytest.fixture
def kernels(device: Device, image: bytes) -> Iterator[Module]:
    module = device.load(image)
    yield module
    core().emu_clear_findings()
    module.unload()


def copy(
    kernels: Module, source: DeviceArray, target: DeviceArray, shifts: tuple[int, int] = (0, 0), stream: object = None
) -> None:
    arguments = [source, np.int32(shifts[0]), target, np.int32(shifts[1])]
    kernels.launch("checked_copy", 4, 32, arguments, stream=stream)  # type: ignore[arg-type]


def fails(device: Device, action: Callable[[], object], error: str) -> str:
    """Run the action and wait; return the text of the one finding that made it fail with ``error``."""
    with pytest.raises(CudaError, match=error):
        both(action, device.synchronize)
    (finding,) = findings()
    return finding


def both(first: Callable[[], object], second: Callable[[], object]) -> None:
    first()
    second()


@pytest.mark.parametrize("is_default", [True, False])
def test_memory_is_used_again_on_any_stream(device: Device, is_default: bool) -> None:
    """The stream may be the legacy default stream, whose handle is the number 1 and not a pointer."""
    array, own = device.empty(64, np.uint8), device.stream()
    with device.entered():
        device.driver.ReuseMemory(array.address, 48, 64, ffi.cast("CUstream", 1) if is_default else own.handle)
    device.synchronize()
    assert findings() == []


def test_a_correct_program_has_no_findings(device: Device, kernels: Module) -> None:
    source, target = device.upload(np.arange(128, dtype=np.int32)), device.empty(128, np.int32)
    total = device.upload(np.zeros(1, np.int32))
    copy(kernels, source, target)
    kernels.launch("checked_shared", 4, 32, [target, total, np.int32(0)])
    np.testing.assert_array_equal(device.download(target), np.arange(128))
    assert device.download(total)[0] == 4 * np.arange(32).sum()
    with device.stream() as first, device.stream() as second:
        event, ready = device.event(), device.event()
        ready.record()
        first.wait(ready)
        copy(kernels, source, target, stream=first)
        event.record(first)
        second.wait(event)
        copy(kernels, target, source, stream=second)
        second.synchronize()
        copy(kernels, source, target, stream=first)
        first.synchronize()
    assert findings() == []


@pytest.mark.parametrize(("shifts", "verb", "element"), [((1, 0), "reads", 128), ((0, 1), "writes", 128)])
def test_an_access_beyond_an_allocation_is_found(
    device: Device, kernels: Module, shifts: tuple[int, int], verb: str, element: int
) -> None:
    source, target = device.upload(np.zeros(128, np.int32)), device.upload(np.zeros(128, np.int32))
    finding = fails(device, lambda: copy(kernels, source, target, shifts), "CUDA_ERROR_ILLEGAL_ADDRESS")
    assert finding.startswith("out-of-bounds: kernel checked_copy, block (3,0,0), thread (31,0,0)")
    assert f"{verb} 4 bytes" in finding
    number = 0 if verb == "reads" else 1
    assert finding.endswith(
        f"outside of all tensors; the nearest one is tensor {number} of the launch's arguments (counted from 0), 512 "
        f"bytes: this is its byte {4 * element}"
    )


def test_an_access_before_an_allocation_is_found(device: Device, kernels: Module) -> None:
    arrays = [device.upload(np.zeros(128, np.int32)) for _ in range(2)]
    finding = fails(device, lambda: copy(kernels, arrays[1], arrays[0], (-1, 0)), "CUDA_ERROR_ILLEGAL_ADDRESS")
    assert finding.startswith("out-of-bounds: kernel checked_copy, block (0,0,0), thread (0,0,0) reads 4 bytes")
    assert "the nearest one is tensor " in finding


def test_an_access_beyond_shared_memory_is_found(device: Device, kernels: Module) -> None:
    data, total = device.upload(np.zeros(32, np.int32)), device.upload(np.zeros(1, np.int32))
    launch = lambda: kernels.launch("checked_shared", 1, 32, [data, total, np.int32(1)])  # noqa: E731
    finding = fails(device, launch, "CUDA_ERROR_ILLEGAL_ADDRESS")
    assert finding.startswith("out-of-bounds: kernel checked_shared, block (0,0,0), thread (31,0,0) reads 4 bytes")
    assert "byte 128 of 128 bytes of shared memory" in finding


def test_use_after_free_is_found_though_the_memory_could_be_used_again(device: Device, kernels: Module) -> None:
    source, target = device.upload(np.zeros(128, np.int32)), device.upload(np.zeros(128, np.int32))
    address = target.address
    target.free()
    others = [device.upload(np.zeros(128, np.int32)) for _ in range(4)]
    assert address not in [other.address for other in others]
    target.address = address
    finding = fails(device, lambda: copy(kernels, source, target), "CUDA_ERROR_ILLEGAL_ADDRESS")
    target.address = 0
    assert finding.startswith("use-after-free: kernel checked_copy")


def test_memory_freed_before_a_deferred_kernel_runs_is_found(image: bytes) -> None:
    with configured(adversarial=1, check=1) as device:
        kernels = device.load(image)
        source, target = device.upload(np.zeros(128, np.int32)), device.upload(np.zeros(128, np.int32))
        stream = device.stream()
        copy(kernels, source, target, stream=stream)
        address, target.address = target.address, 0
        device.call("MemFree", address)
        with pytest.raises(CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            stream.synchronize()
        assert findings()[0].startswith("use-after-free: kernel checked_copy")


TWO_DEVICES = """
import sys
from pathlib import Path
import numpy as np
from ort_cuda_plugin.abi.device import CudaError, Device, DeviceArray
first, second = Device.emulated(0), Device.emulated(1)

def error(call, *arguments):
    try:
        call(*arguments)
    except CudaError as error:
        return str(error)
"""
IN_QUARANTINE = """
array = first.upload(np.zeros(128, np.int32))
address = array.address
array.free()
for _ in range(8):  # more than may stay in the quarantine of the second device
    second.alloc(second.memory[1] // 8).free()
kernels = first.load(Path(sys.argv[1]).read_bytes())
source = first.upload(np.zeros(128, np.int32))
target = DeviceArray(first, address, (128,), np.dtype(np.int32))
arguments = [source, np.int32(0), target, np.int32(0)]
print(error(lambda: (kernels.launch("checked_copy", 4, 32, arguments), first.synchronize())))
target.address = 0
"""


def on_two_devices(script: str, image: bytes, folder: Path) -> str:
    """Return what a script prints in a process of its own, with the kernels of ``image`` and two checked devices."""
    (folder / "kernels.o").write_bytes(image)
    variables = {"CHECK": "1", "DEVICES": "2", "MEMORY": "64M", "STREAMS": "inline"}
    environment = {f"ORT_CUDA_PLUGIN_EMULATE_{name}": value for name, value in variables.items()}
    return python(TWO_DEVICES + script, str(folder / "kernels.o"), env=environment, preloaded=True).stdout


def test_the_memory_of_one_device_stays_in_quarantine_while_another_frees_more(image: bytes, tmp_path: Path) -> None:
    assert "use-after-free: kernel checked_copy" in on_two_devices(IN_QUARANTINE, image, tmp_path)


def test_a_second_free_is_refused(device: Device) -> None:
    array = device.upload(np.zeros(128, np.int32))
    address = array.address
    array.free()
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        device.call("MemFree", address)


def test_a_kernel_that_reads_what_nothing_wrote_is_found(device: Device, kernels: Module) -> None:
    source, target = device.empty(128, np.int32), device.empty(128, np.int32)
    device.call("MemcpyHtoDAsync", source.address, ffi.new("int[]", 120), 480, ffi.NULL)
    finding = fails(device, lambda: copy(kernels, source, target), "CUDA_ERROR_LAUNCH_FAILED")
    assert finding.startswith("uninitialized-read: kernel checked_copy, block (3,0,0), thread (24,0,0) reads 4 bytes")
    assert "byte 480 of 512" in finding


def test_a_launch_of_one_block_fails_for_a_finding_that_does_not_end_it(device: Device, kernels: Module) -> None:
    source, total = device.empty(32, np.int32), device.upload(np.zeros(1, np.int32))
    launch = lambda: kernels.launch("checked_shared", 1, 32, [source, total, np.int32(0)])  # noqa: E731
    finding = fails(device, launch, "CUDA_ERROR_LAUNCH_FAILED")
    assert finding.startswith("uninitialized-read: kernel checked_shared, block (0,0,0), thread (0,0,0) reads 4 bytes")


def test_a_copy_of_what_nothing_wrote_is_found_at_the_host(device: Device) -> None:
    source, target = device.empty(128, np.int32), device.upload(np.zeros(128, np.int32))
    device.call("MemcpyDtoDAsync", target.address, source.address, 512, ffi.NULL)
    finding = fails(device, lambda: device.download(target), "CUDA_ERROR_ILLEGAL_ADDRESS")
    assert finding.startswith("uninitialized-read: copy to the host of 512 bytes")


def test_memory_that_a_fill_or_an_unchecked_kernel_wrote_counts_as_written(device: Device, kernels: Module) -> None:
    filled, bumped, target = (device.empty(128, np.int32) for _ in range(3))
    filled.fill(0)
    kernels.launch("bump", 4, 32, [bumped, np.int32(1)])
    copy(kernels, filled, target)
    copy(kernels, bumped, target)
    device.download(target)
    assert findings() == []


def test_a_divergent_barrier_is_found(device: Device, kernels: Module) -> None:
    launch = lambda: kernels.launch("divergent", 1, 64, [np.uint32(40)])  # noqa: E731
    finding = fails(device, launch, "CUDA_ERROR_LAUNCH_FAILED")
    assert finding.startswith("divergent-barrier: kernel divergent, block (")
    assert (
        "thread (0,0,0) waits for ever; of 64 threads 40 wait at a barrier, 0 in a warp operation, 24 have" in finding
    )


# ---- missing waits ----


def two_streams(device: Device, kernels: Module, wait: str, second: str) -> None:
    """One stream writes an array, another one reads or writes it, with or without a wait between them."""
    source, target, other = (device.upload(np.zeros(128, np.int32)) for _ in range(3))
    device.synchronize()
    writer, reader, event = device.stream(), device.stream(), device.event()
    if wait == "recorded too early":
        event.record(writer)
    copy(kernels, source, target, stream=writer)
    if wait == "event":
        event.record(writer)
    if wait == "host":
        writer.synchronize()
    if wait in ("event", "recorded too early"):
        reader.wait(event)
    match second:
        case "kernel reads":
            copy(kernels, target, other, stream=reader)
        case "kernel writes":
            copy(kernels, other, target, stream=reader)
        case "kernel writes what is read":
            copy(kernels, other, source, stream=reader)
        case "copy to the host":
            device.download(target, reader)
        case "fill":
            target.fill(1, reader)
    reader.synchronize()
    writer.synchronize()


SECOND = ["kernel reads", "kernel writes", "kernel writes what is read", "copy to the host", "fill"]


@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("wait", ["none", "recorded too early"])
def test_a_missing_wait_is_found(device: Device, kernels: Module, wait: str, second: str) -> None:
    with pytest.raises(CudaError):
        two_streams(device, kernels, wait, second)
    finding = findings()[0]
    assert finding.startswith("missing-wait: ")
    assert "no event, stream order or wait orders this after " in finding


@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("wait", ["event", "host"])
def test_a_wait_that_is_there_is_seen(device: Device, kernels: Module, wait: str, second: str) -> None:
    two_streams(device, kernels, wait, second)
    assert findings() == []


def test_readers_need_no_order_among_themselves(device: Device, kernels: Module) -> None:
    source = device.upload(np.zeros(128, np.int32))
    device.synchronize()
    streams = [device.stream() for _ in range(3)]
    targets = [device.empty(128, np.int32) for _ in streams]
    for stream, target in zip(streams, targets, strict=True):
        copy(kernels, source, target, stream=stream)
    device.synchronize()
    assert findings() == []


def add_up(kernels: Module, source: DeviceArray, total: DeviceArray, stream: Stream) -> None:
    kernels.launch("checked_shared", 1, 32, [source, total, np.int32(0)], stream=stream)


def test_atomic_updates_need_no_order_among_themselves(device: Device, kernels: Module) -> None:
    source, total = device.upload(np.ones(32, np.int32)), device.upload(np.zeros(1, np.int32))
    device.synchronize()
    streams = [device.stream() for _ in range(3)]
    for stream in streams:
        add_up(kernels, source, total, stream)
    device.synchronize()
    assert findings() == []
    np.testing.assert_array_equal(device.download(total), 96)


@pytest.mark.parametrize("update_first", [False, True])
@pytest.mark.parametrize("write", [False, True])
def test_an_atomic_update_and_a_plain_access_need_an_order(
    device: Device, kernels: Module, update_first: bool, write: bool
) -> None:
    source, total, other = (device.upload(np.ones(n, np.int32)) for n in (32, 1, 1))
    device.synchronize()
    streams = [device.stream() for _ in range(2)]
    written, read = (total, other) if write else (other, total)
    works: list[Callable[[Stream], object]] = [
        lambda stream: add_up(kernels, source, total, stream),
        lambda stream: device.call("MemcpyDtoDAsync", written.address, read.address, 4, stream.handle),
    ]
    first, second = works if update_first else works[::-1]
    first(streams[0])
    with pytest.raises(CudaError):
        both(lambda: second(streams[1]), device.synchronize)
    assert findings()[0].startswith("missing-wait: ")


def test_streams_may_use_neighboring_bytes(device: Device, kernels: Module) -> None:
    data = device.upload(np.zeros(64, np.int32))
    device.synchronize()
    first, second = device.stream(), device.stream()
    for stream, offset in ((first, 0), (second, 128)):
        device.call("MemsetD8Async", data.address + offset, 1, 128, stream.handle)
    device.synchronize()
    assert findings() == []
    device.call("MemsetD8Async", data.address, 1, 130, first.handle)
    fill = lambda: device.call("MemsetD8Async", data.address + 128, 1, 128, second.handle)  # noqa: E731
    assert "missing-wait: fill of 1" in fails(device, fill, "CUDA_ERROR")


# ---- kernels from the compile pipeline ----

SHIFTED = KernelSpec(
    "shifted",
    ("*f32", "*f32", "i32"),
    source="""
def kernel(a, out, shift):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    out[i] = a[i + shift]
""",
)


def test_compiled_kernels_carry_the_checks(device: Device) -> None:
    image = compile_kernel(SHIFTED, Target.emulated(check=True))
    module = device.load(image.data)
    a, out = device.upload(np.arange(256, dtype=np.float32)), device.empty(256, np.float32)
    module.launch(image.entry, 4, 64, [a, out, np.int32(0)])
    np.testing.assert_array_equal(device.download(out), np.arange(256))
    launch = lambda: module.launch(image.entry, 4, 64, [a, out, np.int32(1)])  # noqa: E731
    finding = fails(device, launch, "CUDA_ERROR_ILLEGAL_ADDRESS")
    assert finding.startswith("out-of-bounds: kernel shifted_")
    assert "block (3,0,0), thread (63,0,0) reads 4 bytes" in finding


SCRATCH = KernelSpec(
    "scratch",
    ("*f32", "i32", "i32"),
    source="""
def kernel(out, shared_written, shared_read):
    i = int32(cuda.threadIdx.x)
    shared = cuda.shared.array(64, float32)
    own = cuda.local.array(4, float32)
    if i < shared_written:
        shared[i] = float32(i)
    own[i & 1] = float32(1)
    cuda.syncthreads()
    out[i] = shared[i] if i < shared_read else own[i & 3]
""",
)


@pytest.mark.parametrize("shared_read", [40, 41])
def test_a_read_of_shared_memory_that_the_block_has_not_written_is_found(device: Device, shared_read: int) -> None:
    """The launch before has written these bytes, but each block starts with unwritten shared memory.

    Unwritten elements are NaN, also in local arrays.
    """
    image = compile_kernel(SCRATCH, Target.emulated(check=True))
    module, out = device.load(image.data), device.upload(np.zeros(64, np.float32))
    module.launch(image.entry, 1, 64, [out, np.int32(64), np.int32(64)])
    launch = partial(module.launch, image.entry, 1, 64, [out, np.int32(40), np.int32(shared_read)])
    if shared_read == 40:
        launch()
        result = device.download(out)
        np.testing.assert_array_equal(result[:40], np.arange(40))
        np.testing.assert_array_equal(result[40:].reshape(-1, 4), [[1, 1, np.nan, np.nan]] * 6)
        return
    finding = fails(device, launch, "CUDA_ERROR_LAUNCH_FAILED")
    assert finding.startswith("uninitialized-read: kernel scratch_")
    assert "block (0,0,0), thread (40,0,0) reads 4 bytes" in finding
    assert finding.endswith("byte 160 of 256 bytes of shared memory")


def test_memory_that_nothing_has_written_is_nan(device: Device, kernels: Module) -> None:
    """The kernel is compiled without checks, so its read is not reported. It adds 1 to each word, 0xffffffff."""
    bumped = device.empty(128, np.int32)
    kernels.launch("bump", 4, 32, [bumped, np.int32(1)])
    np.testing.assert_array_equal(device.download(bumped), 0)


# ---- memory that the plugin's allocator reuses ----


@contextmanager
def pooled(device: Device, elements: int, stream: object) -> Iterator[DeviceArray]:
    """Yield an int32 array in memory of the plugin's allocator; free the memory at the end."""
    error, address = ffi.new("ocp_error *"), ffi.new("CUdeviceptr *")
    ours = core().device_open(1, 0, error)
    assert core().device_alloc(ours, 4 * elements, stream, address, error) == 0
    array = DeviceArray(device, int(address[0]), (elements,), np.dtype(np.int32))
    try:
        yield array
    finally:
        array.address = 0  # so that the array does not free the memory
        core().device_free(ours, address[0], stream)


def test_memory_of_a_pool_is_unwritten_again_when_it_gets_a_new_use(device: Device, kernels: Module) -> None:
    source, target = device.upload(np.zeros(128, np.int32)), device.upload(np.zeros(128, np.int32))
    error = ffi.new("ocp_error *")
    core().device_trim(core().device_open(1, 0, error))  # the allocator learns which streams are idle
    finding = ""
    written: set[int] = set()
    while not finding and len(written) < 100:  # the allocator may return any free chunk: wait until one comes again
        with pooled(device, 128, ffi.NULL) as array:
            if array.address in written:
                finding = fails(device, partial(copy, kernels, array, target), "CUDA_ERROR_LAUNCH_FAILED")
                continue
            copy(kernels, source, array)
            copy(kernels, array, target)
            device.synchronize()
            written.add(array.address)
    assert finding.startswith("uninitialized-read: kernel checked_copy, block (0,0,0), thread (0,0,0)")


def test_an_access_beyond_what_was_asked_of_a_pool_is_found(device: Device, kernels: Module) -> None:
    source = device.upload(np.zeros(128, np.int32))
    with pooled(device, 127, ffi.NULL) as array:
        finding = fails(device, lambda: copy(kernels, source, array), "CUDA_ERROR_ILLEGAL_ADDRESS")
    assert finding.startswith("out-of-bounds: kernel checked_copy, block (3,0,0), thread (31,0,0) writes 4 bytes")
