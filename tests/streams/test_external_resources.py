"""Memory and timeline semaphores that hosts import through ONNX Runtime's interop API, on the emulated device."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from emulator_harness import configured
from interop import OPAQUE_FD, TIMELINE_FD, BoundSession, Interop
from isolated import HARNESS, add_model, python
from ort_cuda_plugin.abi.core import ffi
from ort_cuda_plugin.abi.device import Device
from ort_cuda_plugin.abi.emulation import findings
from ort_cuda_plugin.abi.host import OrtError, api
from timelines import SharedFile, Timeline, descriptors, mappings

SIZE = 1000
BYTES = SIZE * 4


@pytest.fixture(params=[(0, 0), (1, 0), (1, 1)], ids=["inline", "adversarial", "adversarial-check"])
def streams(request: pytest.FixtureRequest) -> Iterator[None]:
    adversarial, check = request.param
    with configured(adversarial=adversarial, check=check, seed=3):
        yield
        assert findings() == []


@pytest.fixture
def interop() -> Iterator[Interop]:
    made = Interop()
    yield made
    made.close()


class Pipeline:
    """c = a + b on the device; a and b are in one file, c in another, each at an offset."""

    OFFSET = 4096 + 64

    def __init__(self, interop: Interop, ready: Timeline, done: Timeline) -> None:
        self.interop = interop
        self.inputs, self.outputs = SharedFile(self.OFFSET + 2 * BYTES), SharedFile(64 + BYTES)
        self.memories = [
            interop.memory(self.inputs, self.OFFSET + 2 * BYTES, self.OFFSET),
            interop.memory(self.outputs, 64 + BYTES),
        ]
        self.semaphores = [interop.semaphore(ready), interop.semaphore(done)]
        self.stream = interop.stream()
        self.tensors = {
            "a": interop.tensor(self.memories[0], [SIZE]),
            "b": interop.tensor(self.memories[0], [SIZE], BYTES),
            "c": interop.tensor(self.memories[1], [SIZE], 64),
        }
        feeds = {name: self.tensors[name] for name in "ab"}
        self.session = BoundSession(interop, add_model(dims=(SIZE,)), self.stream, feeds, {"c": self.tensors["c"]})

    def enqueue(self, step: int) -> None:
        self.interop.wait(self.semaphores[0], self.stream, step)
        self.session.run()
        self.interop.signal(self.semaphores[1], self.stream, step)

    def close(self) -> None:
        self.session.close()
        for tensor in self.tensors.values():
            api().ReleaseValue(tensor)
        for memory in self.memories:
            self.interop.release_memory(memory)
        for semaphore in self.semaphores:
            self.interop.release_semaphore(semaphore)
        api().ReleaseSyncStream(self.stream)
        self.inputs.close()
        self.outputs.close()


def produce_and_check(pipeline: Pipeline, ready: Timeline, done: Timeline, steps: int, problems: list[str]) -> None:
    """The other side of a pipeline: writes inputs, waits for results, compares them."""
    a = pipeline.inputs.array(np.float32, Pipeline.OFFSET, SIZE)
    b = pipeline.inputs.array(np.float32, Pipeline.OFFSET + BYTES, SIZE)
    c = pipeline.outputs.array(np.float32, 64, SIZE)
    for step in range(1, steps + 1):
        time.sleep(0.002)
        a[:], b[:] = step, np.arange(SIZE)
        ready.signal(step)
        done.wait(step)
        if not np.array_equal(c, step + np.arange(SIZE)):
            problems.append(f"step {step}: {c[:3]}")


@pytest.mark.every_case
def test_a_session_works_in_turn_with_another_thread(streams: None, interop: Interop) -> None:
    """Steps 3 and later replay a CUDA graph."""
    steps = 8
    ready, done = Timeline(), Timeline()
    pipeline = Pipeline(interop, ready, done)
    problems: list[str] = []
    pipeline.enqueue(1)
    time.sleep(0.02)
    assert done.value == 0  # the Run waits for its inputs, and the host does not
    assert not pipeline.outputs.array(np.float32).any()
    peer = threading.Thread(target=produce_and_check, args=(pipeline, ready, done, steps, problems))
    peer.start()
    for step in range(2, steps + 1):
        done.wait(step - 1)  # reads the semaphore on the host, without a driver call
        pipeline.enqueue(step)
    peer.join()
    assert problems == []
    pipeline.close()


def test_several_runs_are_enqueued_before_the_first_input_exists(streams: None, interop: Interop) -> None:
    ready, done = Timeline(), Timeline()
    pipeline = Pipeline(interop, ready, done)
    problems: list[str] = []
    for step in range(1, 5):
        pipeline.enqueue(step)
    produce_and_check(pipeline, ready, done, 4, problems)
    assert problems == []
    pipeline.close()


PEER = """
import sys
import numpy as np
from mmap import mmap
import ctypes, time
inputs, outputs, ready, done, offset, size, steps = map(int, sys.argv[1:])
a, b = np.frombuffer(mmap(inputs, 0), np.float32, 2 * size, offset).reshape(2, size)
c = np.frombuffer(mmap(outputs, 0), np.float32, size, 64)
ready, done = (ctypes.c_uint64.from_buffer(mmap(fd, 0), 8) for fd in (ready, done))
for step in range(1, steps + 1):
    a[:], b[:] = step, np.arange(size)
    ready.value = step
    while done.value < step:
        time.sleep(0.0005)
    np.testing.assert_array_equal(c, step + np.arange(size))
print("end")
"""


def test_a_session_works_in_turn_with_another_process(interop: Interop) -> None:
    """The process has only the file descriptors."""
    ready, done = Timeline(), Timeline()
    pipeline = Pipeline(interop, ready, done)
    files = [pipeline.inputs.fd, pipeline.outputs.fd, ready.fd, done.fd]
    numbers = map(str, [*files, Pipeline.OFFSET, SIZE, 5])
    command = [sys.executable, "-c", PEER, *numbers]
    peer = subprocess.Popen(command, pass_fds=files, stdout=subprocess.PIPE, text=True)
    for step in range(1, 6):
        pipeline.enqueue(step)
    assert peer.communicate(timeout=120)[0] == "end\n"
    pipeline.close()


@pytest.mark.usefixtures("collected")
def test_nothing_is_left_after_the_release(interop: Interop) -> None:
    device = Device.emulated()
    ready, done = Timeline(1), Timeline()
    for round in range(3):
        pipeline = Pipeline(interop, ready, done)
        pipeline.enqueue(round + 1)
        ready.signal(round + 2)
        done.wait(round + 1)
        pipeline.close()
        device.synchronize()
        Interop().close()  # frees resources whose release had to wait for work
        del pipeline
        found = (len(descriptors()), mappings(), device.memory[0])
        if round == 1:
            before = found
        elif round == 2:
            assert found == before


# ---- lifetimes ----


def test_memory_lives_as_long_as_its_tensors(interop: Interop) -> None:
    file, maps = SharedFile(4096), mappings()
    memory = interop.memory(file, 4096)
    first, second = interop.tensor(memory, [4]), interop.tensor(memory, [4], 16)
    interop.release_memory(memory)
    api().ReleaseValue(first)
    assert mappings() == maps + 1
    with pytest.raises(OrtError, match="is not a handle of CudaPluginExecutionProvider, or it was released"):
        interop.tensor(memory, [4])
    api().ReleaseValue(second)
    assert mappings() == maps
    file.close()


@pytest.mark.parametrize("adversarial", [0, 1])
def test_handles_may_be_released_while_work_uses_them(adversarial: int, interop: Interop) -> None:
    """The resources are released after the work, at the next use of an importer, without a wait."""
    with configured(adversarial=adversarial, check=0):
        ready, done = Timeline(), Timeline()
        pipeline = Pipeline(interop, ready, done)
        before, maps = descriptors(), mappings()
        pipeline.enqueue(1)
        outputs = pipeline.outputs
        inputs = pipeline.inputs.array(np.float32, Pipeline.OFFSET)
        for tensor in pipeline.tensors.values():
            api().ReleaseValue(tensor)
        pipeline.tensors.clear()
        for memory in pipeline.memories:
            interop.release_memory(memory)
        for semaphore in pipeline.semaphores:
            interop.release_semaphore(semaphore)
        api().ReleaseIoBinding(pipeline.session.binding[0])
        pipeline.session.binding[0] = ffi.NULL
        assert (descriptors(), mappings()) == (before, maps)  # the stream still waits, so the imports stay open
        inputs[:] = 1
        ready.signal(1)
        done.wait(1)
        assert (outputs.array(np.float32, 64) == 2).all()
        Device.emulated().synchronize()
        Interop().close()
        assert len(descriptors()) == len(before) - 4
        assert mappings() == maps - 4
        pipeline.memories.clear()
        pipeline.semaphores.clear()
        pipeline.close()


def test_a_second_release_is_an_error_in_the_log(interop: Interop, capfd: pytest.CaptureFixture[str]) -> None:
    file, timeline = SharedFile(4096), Timeline()
    memory, semaphore = interop.memory(file, 4096), interop.semaphore(timeline)
    for release, handle, name in (
        (interop.release_memory, memory, "external memory"),
        (interop.release_semaphore, semaphore, "external semaphore"),
    ):
        release(handle)
        assert "released before" not in capfd.readouterr().err
        release(handle)
        assert f"{name}: the handle" in (log := capfd.readouterr().err)
        assert "was released before. Release each handle once" in log
    stream = interop.stream()
    for call in (interop.wait, interop.signal):
        with pytest.raises(OrtError, match=r"external semaphore: 0x[0-9a-f]+ is not a handle of"):
            call(semaphore, stream, 1)
    api().ReleaseSyncStream(stream)
    file.close()
    timeline.close()


def test_many_handles_are_used_again(interop: Interop) -> None:
    file = SharedFile(4096)
    addresses = set()
    for _ in range(300):
        memory = interop.memory(file, 4096)
        addresses.add(int(ffi.cast("uintptr_t", memory)))
        interop.release_memory(memory)
    assert len(addresses) < 100
    file.close()


# ---- wrong input ----


def test_only_file_descriptors_can_be_imported(interop: Interop) -> None:
    assert [interop.can_import("CanImportMemory", kind) for kind in range(6)] == [
        kind == OPAQUE_FD for kind in range(6)
    ]
    supported = [interop.can_import("CanImportSemaphore", kind) for kind in range(5)]
    assert supported == [kind == TIMELINE_FD for kind in range(5)]
    file, timeline = SharedFile(4096), Timeline()
    for kind in (0, 1, 2, 4):
        with pytest.raises(OrtError, match=rf"external memory: handle type {kind} is not supported") as caught:
            interop.memory(file, 4096, handle_type=kind)
        assert caught.value.code == 9
    for kind in (0, 1, 3):
        with pytest.raises(OrtError, match=rf"external semaphore: type {kind} is not supported") as caught:
            interop.semaphore(timeline, type=kind)
        assert caught.value.code == 9
    file.close()
    timeline.close()


MEMORY_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"nbytes": 5000}, "descriptor .* has 4096 bytes, expected 5000 or more"),
    ({"nbytes": 4096, "offset": 4096}, "offset_bytes is 4096 and size_bytes is 4096"),
    ({"nbytes": 0}, "offset_bytes is 0 and size_bytes is 0"),
    ({"nbytes": 4096, "version": 0}, "external memory: version is 0, expected ORT_API_VERSION"),
]


@pytest.mark.parametrize(("arguments", "message"), MEMORY_FAULTS)
def test_wrong_memory_is_refused(arguments: dict[str, Any], message: str, interop: Interop) -> None:
    file = SharedFile(4096)
    before = descriptors()
    with pytest.raises(OrtError, match=message):
        interop.memory(file, **arguments)
    assert descriptors() == before
    file.close()


@pytest.mark.parametrize(
    ("fd", "message"),
    [
        (0, "native_handle is not set"),
        (-1, "native_handle is 0xf+, expected a file descriptor"),
        (1 << 40, "native_handle is 0x10000000000, expected a file descriptor"),
        (999999, "file descriptor 999999 cannot be duplicated: Bad file descriptor"),
    ],
)
def test_wrong_descriptors_are_refused(fd: int, message: str, interop: Interop) -> None:
    with pytest.raises(OrtError, match=f"external memory: {message}") as caught:
        interop.memory(fd, 4096)
    assert caught.value.code == 2
    with pytest.raises(OrtError, match=f"external semaphore: {message}") as caught:
        interop.semaphore(fd)
    assert caught.value.code == 2


def test_other_kinds_of_files_are_refused_and_stay_open(interop: Interop) -> None:
    read, write = os.pipe()
    with pytest.raises(OrtError, match=r"cuImportExternalMemory failed: .*is not a file in memory"):
        interop.memory(read, 4096)
    with pytest.raises(OrtError, match=r"cuImportExternalSemaphore failed: .*is not a file in memory"):
        interop.semaphore(read)
    os.write(write, b"x")
    assert os.read(read, 1) == b"x"
    os.close(read)
    os.close(write)


def test_an_import_owns_the_descriptor(interop: Interop) -> None:
    file = SharedFile(4096)
    fd = file.exported()
    memory = interop.memory(fd, 4096)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.close(fd)
    interop.release_memory(memory)
    file.close()


TENSOR_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"shape": [1000]}, "4000 bytes at offset_bytes 0 do not fit into the imported memory, which has 3998 bytes"),
    ({"shape": [4], "offset": 3983}, "16 bytes at offset_bytes 3983 do not fit into .* has 3998 bytes"),
    ({"shape": [0], "offset": 4000}, "0 bytes at offset_bytes 4000 do not fit"),
    ({"shape": [1], "offset": 0}, "offset_bytes 0 of the tensor and 98 of .* element size, 4 bytes"),
    ({"shape": [2], "offset": 4, "dtype": 7}, "element size, 8 bytes"),
    ({"shape": [-1]}, "dimension 0 of the shape is -1, expected 0 or more"),
    ({"shape": [1 << 32, 1 << 32]}, r"the elements of the shape have 2\^64 bits or more"),
    ({"shape": [1 << 62]}, r"the elements of the shape have 2\^64 bits or more"),
    ({"shape": [1 << 58, 0, 1 << 58], "dtype": 8}, "element type 8 has no fixed size"),
    ({"shape": [1], "dtype": 0}, "element type 0 has no fixed size"),
    ({"shape": [1], "dtype": 1234}, "element type 1234 has no fixed size"),
    ({"shape": [], "rank": 2}, "shape is NULL, expected 2 dimensions"),
    ({"shape": [1], "version": 3}, "external tensor: version is 3, expected ORT_API_VERSION"),
]


@pytest.mark.parametrize(("arguments", "message"), TENSOR_FAULTS)
def test_wrong_tensors_are_refused(arguments: dict[str, Any], message: str, interop: Interop) -> None:
    file = SharedFile(4096)
    memory = interop.memory(file, 4096, 98)
    with pytest.raises(OrtError, match=message) as caught:
        interop.tensor(memory, **arguments)
    assert caught.value.code == 2
    api().ReleaseValue(interop.tensor(memory, [3], 2))
    api().ReleaseValue(interop.tensor(memory, [], 2))
    api().ReleaseValue(interop.tensor(memory, [3, 0], 2))
    api().ReleaseValue(interop.tensor(memory, [7], 1, dtype=22))  # int4
    interop.release_memory(memory)
    file.close()


def test_signals_and_streams_that_do_not_fit_are_refused(interop: Interop) -> None:
    timeline = Timeline(4)
    semaphore, stream = interop.semaphore(timeline), interop.stream()
    with pytest.raises(OrtError, match="sets the value 4 of a timeline semaphore whose value is 4 already"):
        interop.signal(semaphore, stream, 4)
    file = SharedFile(4096)
    memory = interop.memory(file, 4096)
    with pytest.raises(OrtError, match=r"external semaphore: 0x[0-9a-f]+ is not a handle of"):
        interop.wait(ffi.cast("OrtExternalSemaphoreHandle *", memory), stream, 1)
    device = Device.emulated()
    device.call("StreamBeginCapture", ffi.cast("CUstream", api().SyncStream_GetHandle(stream)), 2)
    for call in (interop.wait, interop.signal):
        with pytest.raises(OrtError, match="the stream is being captured"):
            call(semaphore, stream, 9)
    graph = ffi.new("CUgraph *")
    device.call("StreamEndCapture", ffi.cast("CUstream", api().SyncStream_GetHandle(stream)), graph)
    device.call("GraphDestroy", graph[0])
    interop.release_memory(memory)
    interop.release_semaphore(semaphore)
    api().ReleaseSyncStream(stream)
    file.close()
    timeline.close()


def test_graphics_interop_needs_no_context(interop: Interop) -> None:
    config = ffi.new("OrtGraphicsInteropConfig *", {"version": 25, "graphics_api": 2})
    status = interop.table.InitGraphicsInteropForEpDevice(interop.device, config)
    assert b"Importing memory and semaphores needs no such context" in ffi.string(api().GetErrorMessage(status))
    assert api().GetErrorCode(status) == 9
    api().ReleaseStatus(status)
    assert interop.table.DeinitGraphicsInteropForEpDevice(interop.device) == ffi.NULL


DEVICES = """
import pytest
from interop import Interop, api, OrtError
from timelines import SharedFile, Timeline
from ort_cuda_plugin.abi.core import ffi
first, second = Interop(0), Interop(1)
file, timeline = SharedFile(4096), Timeline()
memory, semaphore = first.memory(file, 4096), first.semaphore(timeline)
stream, other = first.stream(), second.stream()
wrong = "the handle belongs to emulated device 0, and the importer to emulated device 1"
with pytest.raises(OrtError, match=f"external memory: {wrong}"):
    second.tensor(memory, [1])
with pytest.raises(OrtError, match=f"external semaphore: {wrong}"):
    second.wait(semaphore, other, 1)
for call in (first.wait, first.signal):
    with pytest.raises(OrtError, match="the stream belongs to device 1, and the importer to device 0"):
        call(semaphore, other, 1)
again = second.semaphore(timeline)  # one semaphore, imported for both devices
first.wait(semaphore, stream, 1)
first.signal(semaphore, stream, 2)
second.signal(again, other, 1)
timeline.wait(2)
for release, handle in ((first.release_semaphore, semaphore), (second.release_semaphore, again)):
    release(handle)
first.release_memory(memory)
print("end")
"""


def test_resources_of_another_device_are_refused() -> None:
    environment = {"ORT_CUDA_PLUGIN_EMULATE_DEVICES": "2", "PYTHONPATH": str(HARNESS)}
    assert python(DEVICES, env=environment).stdout == "end\n"


TIMEOUT = """
from interop import Interop, OrtError, api, check_status, BoundSession
from timelines import Timeline
from ort_cuda_plugin.abi.core import ffi
interop = Interop()
timeline = Timeline(3)
semaphore, stream = interop.semaphore(timeline), interop.stream()
interop.wait(semaphore, stream, 7)
from ort_cuda_plugin.abi.device import Device
try:
    Device.emulated().synchronize()
except Exception as error:
    print(error)
try:
    interop.wait(semaphore, stream, 8)
except OrtError as error:
    print(error)
interop.release_semaphore(semaphore)
api().ReleaseSyncStream(stream)
interop.close()
print(timeline.value)
"""


def test_a_peer_that_dies_does_not_hang_the_host() -> None:
    environment = {"ORT_CUDA_PLUGIN_EMULATE_SEMAPHORE_SECONDS": "1", "PYTHONPATH": str(HARNESS)}
    first, second, value = python(TIMEOUT, env=environment).stdout.splitlines()
    for line in (first, second):
        assert "CUDA_ERROR_LAUNCH_TIMEOUT" in line
    assert "waits for value 7 of a timeline semaphore, whose value is still 3 after 1 seconds" in first
    assert value == "3"
