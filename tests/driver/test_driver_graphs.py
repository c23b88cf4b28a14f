"""Stream capture and graphs, on the emulated device and, if there is one, on a GPU: the same tests hold for both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from driver_harness import DEVICES, Kernels, blocking_stream, driver_device, load_kernels
from ort_cuda_plugin.abi.core import ffi
from ort_cuda_plugin.abi.device import CudaError, Device, DeviceArray, Params, Stream

GLOBAL, THREAD_LOCAL, RELAXED = range(3)
KERNEL, MEMCPY, MEMSET = range(3)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with driver_device(request.param, seed=11) as device:
        yield device


@pytest.fixture
def kernels(device: Device) -> Iterator[Kernels]:
    with load_kernels(device) as kernels:
        yield kernels


class Graph:
    """A graph and an executable graph made from it; `destroy` frees both."""

    def __init__(self, device: Device, handle: Any) -> None:
        self.device = device
        self.handle = handle
        exec_ = ffi.new("CUgraphExec *")
        device.call("GraphInstantiate", exec_, handle, 0)
        self.exec = exec_[0]

    def nodes(self) -> list[Any]:
        count = ffi.new("size_t *")
        self.device.call("GraphGetNodes", self.handle, ffi.NULL, count)
        nodes = ffi.new("CUgraphNode[]", count[0])
        self.device.call("GraphGetNodes", self.handle, nodes, count)
        return list(nodes)

    def types(self) -> list[int]:
        kind = ffi.new("int *")
        out = []
        for node in self.nodes():
            self.device.call("GraphNodeGetType", node, kind)
            out.append(int(kind[0]))
        return out

    def launch(self, stream: Stream) -> None:
        self.device.call("GraphLaunch", self.exec, stream.handle)

    def destroy(self) -> None:
        self.device.call("GraphExecDestroy", self.exec)
        self.device.call("GraphDestroy", self.handle)


def begin(device: Device, stream: Stream, mode: int = THREAD_LOCAL) -> None:
    device.call("StreamBeginCapture", stream.handle, mode)


def end(device: Device, stream: Stream) -> Graph:
    graph = ffi.new("CUgraph *")
    device.call("StreamEndCapture", stream.handle, graph)
    return Graph(device, graph[0])


def status(device: Device, stream: Stream) -> int:
    out = ffi.new("int *")
    device.call("StreamIsCapturing", stream.handle, out)
    return int(out[0])


def affine(kernels: Kernels, data: DeviceArray, factor: int, addend: int, stream: Stream) -> None:
    kernels.launch("affine", 1, 8, [data, np.int32(factor), np.int32(addend)], stream=stream)


def test_a_capture_runs_nothing_and_each_launch_runs_all(device: Device, kernels: Kernels) -> None:
    stream = device.stream()
    data, copy = device.upload(np.ones(8, np.int32)), device.upload(np.zeros(8, np.int32))
    assert status(device, stream) == 0
    begin(device, stream)
    assert status(device, stream) == 1
    affine(kernels, data, 2, 1, stream)
    device.call("MemcpyDtoDAsync", copy.address, data.address, 32, stream.handle)
    device.call("MemsetD8Async", data.address, 0, 4, stream.handle)
    graph = end(device, stream)
    assert status(device, stream) == 0
    assert graph.types() == [KERNEL, MEMCPY, MEMSET]
    assert (device.download(data) == 1).all()
    for _ in range(3):
        graph.launch(stream)
    stream.synchronize()
    np.testing.assert_array_equal(device.download(copy), [1, *[15] * 7])
    np.testing.assert_array_equal(device.download(data), [0, *[15] * 7])
    graph.destroy()


def test_parameters_of_a_kernel_node_can_change_and_launches_on_their_way_keep_theirs(
    device: Device, kernels: Kernels
) -> None:
    stream = device.stream()
    data, other = device.upload(np.ones(8, np.int32)), device.upload(np.ones(8, np.int32))
    begin(device, stream)
    affine(kernels, data, 2, 1, stream)
    affine(kernels, data, 1, 10, stream)
    graph = end(device, stream)
    graph.launch(stream)
    values = Params([other, np.int32(5), np.int32(2)])
    change = ffi.new("CUDA_KERNEL_NODE_PARAMS *")
    change.func = kernels.function("affine")
    change.gridDimX = change.gridDimY = change.gridDimZ = change.blockDimY = change.blockDimZ = 1
    change.blockDimX, change.kernelParams = 8, values.pointers
    device.call("GraphExecKernelNodeSetParams", graph.exec, graph.nodes()[0], change)
    graph.launch(stream)
    stream.synchronize()
    assert (device.download(data) == 23).all()
    assert (device.download(other) == 7).all()
    change.blockDimX = 2000
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        device.call("GraphExecKernelNodeSetParams", graph.exec, graph.nodes()[0], change)
    graph.destroy()


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("seed", range(5))
def test_an_executable_graph_runs_once_at_a_time_whatever_the_streams(name: str, seed: int) -> None:
    with driver_device(name, seed=seed) as device, load_kernels(device) as kernels:
        streams = [device.stream() for _ in range(3)]
        data = device.upload(np.ones(8, np.int32))
        begin(device, streams[0])
        affine(kernels, data, 2, 1, streams[0])
        affine(kernels, data, 1, 10, streams[0])
        graph = end(device, streams[0])
        expected = 1
        for stream in streams * 2:
            graph.launch(stream)
            expected = 2 * expected + 11
        for stream in streams:
            stream.synchronize()
        assert (device.download(data) == expected).all()
        graph.destroy()


def test_only_kernel_nodes_of_the_same_graph_can_change(device: Device, kernels: Kernels) -> None:
    stream = device.stream()
    data = device.upload(np.ones(8, np.int32))
    graphs = []
    for _ in range(2):
        begin(device, stream)
        affine(kernels, data, 2, 1, stream)
        device.call("MemsetD8Async", data.address, 0, 4, stream.handle)
        graphs.append(end(device, stream))
    change = ffi.new("CUDA_KERNEL_NODE_PARAMS *")
    for node in (graphs[0].nodes()[1], graphs[1].nodes()[0]):
        with pytest.raises(CudaError, match="is not a kernel node of the graph"):
            device.call("GraphExecKernelNodeSetParams", graphs[0].exec, node, change)
    for graph in graphs:
        graph.destroy()


def fork_and_join(device: Device, kernels: Kernels, joined: bool = True) -> tuple[Stream, Stream, list[DeviceArray]]:
    """Capture a = a + 1; then b = a * 2 on one stream and c = a * 3 on another; then a = b + c."""
    first, second = device.stream(), device.stream()
    forked, back = device.event(), device.event()
    a, b, c = (device.upload(np.full(8, value, np.float32)) for value in (1, 0, 0))
    n = np.uint32(8)
    begin(device, first)
    kernels.launch("add", 1, 8, [a, a, a, n], stream=first)
    forked.record(first)
    second.wait(forked)
    assert status(device, second) == 1
    kernels.launch("add", 1, 8, [a, a, b, n], stream=first)
    kernels.launch("add", 1, 8, [a, a, c, n], stream=second)
    kernels.launch("add", 1, 8, [c, a, c, n], stream=second)
    if joined:
        back.record(second)
        first.wait(back)
        kernels.launch("add", 1, 8, [b, c, a, n], stream=first)
    return first, second, [a, b, c]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", DEVICES)
def test_a_capture_follows_events_into_other_streams(name: str, seed: int) -> None:
    with driver_device(name, seed=seed) as device, load_kernels(device) as kernels:
        first, second, arrays = fork_and_join(device, kernels)
        graph = end(device, first)
        assert status(device, second) == 0
        assert graph.types() == [KERNEL] * 5
        graph.launch(second)
        graph.launch(second)
        second.synchronize()
        assert (device.download(arrays[0]) == 100).all()
        graph.destroy()


def test_a_stream_that_was_not_joined_back_fails_the_capture(device: Device, kernels: Kernels) -> None:
    first, second, _arrays = fork_and_join(device, kernels, joined=False)
    with pytest.raises(CudaError, match="CUDA_ERROR_STREAM_CAPTURE_UNJOINED"):
        end(device, first)
    assert status(device, first) == status(device, second) == 0


def test_a_capture_ends_in_the_stream_where_it_began(device: Device, kernels: Kernels) -> None:
    first, second, _arrays = fork_and_join(device, kernels)
    with pytest.raises(CudaError, match="CUDA_ERROR_STREAM_CAPTURE_UNMATCHED"):
        end(device, second)
    with pytest.raises(CudaError, match="CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"):
        end(device, first)


FORBIDDEN: dict[str, tuple[Callable[[Device, Stream], object], str]] = {
    "synchronize the stream": (lambda device, stream: stream.synchronize(), "CAPTURE_UNSUPPORTED"),
    "query the stream": (lambda device, stream: stream.query(), "CAPTURE_UNSUPPORTED"),
    "synchronize the device": (lambda device, stream: device.synchronize(), "CAPTURE_UNSUPPORTED"),
    "allocate": (lambda device, stream: device.alloc(1), "CAPTURE_UNSUPPORTED"),
    "allocate host memory": (lambda device, stream: device.pinned(1, np.int8), "CAPTURE_UNSUPPORTED"),
    "use the null stream beside a blocking one": (
        lambda device, stream: device.event().record(),
        "CAPTURE_IMPLICIT",
    ),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_cuda_forbids_in_a_capture_fails_and_invalidates_it(device: Device, kernels: Kernels, name: str) -> None:
    stream = blocking_stream(device)
    data = device.upload(np.ones(8, np.int32))
    action, error = FORBIDDEN[name]
    begin(device, stream)
    affine(kernels, data, 2, 1, stream)
    with pytest.raises(CudaError, match=error):
        action(device, stream)
    assert status(device, stream) == 2
    with pytest.raises(CudaError, match="CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"):
        affine(kernels, data, 2, 1, stream)
    with pytest.raises(CudaError, match="CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"):
        end(device, stream)
    assert status(device, stream) == 0
    assert (device.download(data) == 1).all()
    stream.destroy()


def test_captured_events_cannot_be_waited_for_by_the_host(device: Device, kernels: Kernels) -> None:
    stream, event = device.stream(), device.event()
    data = device.upload(np.ones(8, np.int32))
    for wait in (event.synchronize, event.query):
        begin(device, stream)
        affine(kernels, data, 2, 1, stream)
        event.record(stream)
        with pytest.raises(CudaError, match="CUDA_ERROR_CAPTURED_EVENT"):
            wait()
        with pytest.raises(CudaError, match="CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"):
            end(device, stream)


def test_a_capture_may_not_depend_on_work_outside_of_it(device: Device, kernels: Kernels) -> None:
    stream, other, event = device.stream(), device.stream(), device.event()
    data = device.upload(np.ones(8, np.int32))
    affine(kernels, data, 2, 1, other)
    event.record(other)
    begin(device, stream)
    with pytest.raises(CudaError, match="CUDA_ERROR_STREAM_CAPTURE_ISOLATION"):
        stream.wait(event)
    with pytest.raises(CudaError, match="CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"):
        end(device, stream)


def test_two_captures_cannot_become_one(device: Device) -> None:
    first, second, event = device.stream(), device.stream(), device.event()
    begin(device, first)
    begin(device, second)
    event.record(first)
    with pytest.raises(CudaError, match="CUDA_ERROR_STREAM_CAPTURE_MERGE"):
        second.wait(event)
    for stream in (first, second):
        with pytest.raises(CudaError, match="CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"):
            end(device, stream)


@pytest.mark.parametrize(("mode", "allowed"), [(GLOBAL, False), (THREAD_LOCAL, True), (RELAXED, True)])
def test_the_mode_says_whether_other_threads_may_allocate(device: Device, mode: int, allowed: bool) -> None:
    stream = device.stream()
    begin(device, stream, mode)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(lambda: device.driver.CtxSetCurrent(device.context) or allocate(device)).result()
    if not allowed:
        assert done == "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
        with pytest.raises(CudaError, match="CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"):
            end(device, stream)
        return
    assert done == ""
    if mode == RELAXED:
        assert allocate(device) == ""
    end(device, stream).destroy()


def exchange(device: Device, mode: int) -> int:
    """Set the calling thread's capture mode; return the mode that it had."""
    out = ffi.new("int *", mode)
    device.call("ThreadExchangeStreamCaptureMode", out)
    return int(out[0])


ALLOWED = {  # (thread's mode, capture's mode): (may another thread allocate?, may the capturing thread allocate?)
    (GLOBAL, GLOBAL): (False, False),
    (GLOBAL, THREAD_LOCAL): (True, False),
    (GLOBAL, RELAXED): (True, True),
    (THREAD_LOCAL, GLOBAL): (True, False),
    (THREAD_LOCAL, THREAD_LOCAL): (True, False),
    (THREAD_LOCAL, RELAXED): (True, True),
    (RELAXED, GLOBAL): (True, True),
    (RELAXED, THREAD_LOCAL): (True, True),
    (RELAXED, RELAXED): (True, True),
}


@pytest.mark.parametrize("same", [False, True], ids=["other thread", "same thread"])
@pytest.mark.parametrize(("thread", "mode"), ALLOWED)
def test_a_thread_can_choose_which_captures_forbid_its_allocations(
    device: Device, thread: int, mode: int, same: bool
) -> None:
    def work() -> str:
        device.enter()
        before = exchange(device, thread)
        name = allocate(device)
        assert exchange(device, before) == thread
        return name

    stream = device.stream()
    begin(device, stream, mode)
    with ThreadPoolExecutor(1) as pool:
        name = work() if same else pool.submit(work).result()
    if ALLOWED[thread, mode][same]:
        assert name == ""
        end(device, stream).destroy()
        return
    assert name == "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
    with pytest.raises(CudaError, match="CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"):
        end(device, stream)


def test_the_mode_of_a_thread_is_not_that_of_another_one(device: Device) -> None:
    assert exchange(device, RELAXED) == GLOBAL
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(exchange, device, GLOBAL).result() == GLOBAL
    assert exchange(device, GLOBAL) == RELAXED
    for wrong in (-1, 3):
        with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
            exchange(device, wrong)


def allocate(device: Device) -> str:
    """Allocate and free device memory; return the name of the error, or ``""``."""
    address = ffi.new("CUdeviceptr *")
    try:
        device.call("MemAlloc", address, 100)
        device.call("MemFree", address[0])
    except CudaError as error:
        return error.name
    return ""


def test_a_thread_local_capture_ends_in_the_thread_that_began_it(device: Device) -> None:
    stream = device.stream()
    begin(device, stream)
    with ThreadPoolExecutor(1) as pool, pytest.raises(CudaError, match="CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"):
        pool.submit(end, device, stream).result()
    end(device, stream).destroy()


def test_a_graph_outlives_its_streams_and_an_executable_its_graph(device: Device, kernels: Kernels) -> None:
    stream, other = device.stream(), device.stream()
    data = device.upload(np.ones(8, np.int32))
    begin(device, stream)
    affine(kernels, data, 3, 0, stream)
    graph = end(device, stream)
    stream.destroy()
    device.call("GraphDestroy", graph.handle)
    graph.launch(other)
    device.call("GraphExecDestroy", graph.exec)
    other.synchronize()
    assert (device.download(data) == 3).all()


def test_destroying_a_capturing_stream_leaves_nothing_behind(device: Device, kernels: Kernels) -> None:
    data = device.upload(np.ones(8, np.int32))
    stream = device.stream()
    begin(device, stream, GLOBAL)
    affine(kernels, data, 3, 0, stream)
    stream.destroy()
    assert allocate(device) == ""


def test_a_stream_captures_once_at_a_time_and_the_null_stream_never(device: Device) -> None:
    stream = device.stream()
    begin(device, stream)
    with pytest.raises(CudaError, match="CUDA_ERROR_ILLEGAL_STATE"):
        begin(device, stream)
    end(device, stream).destroy()
    with pytest.raises(CudaError, match="CUDA_ERROR_ILLEGAL_STATE"):
        end(device, stream)
    with pytest.raises(CudaError, match="CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"):
        device.call("StreamBeginCapture", ffi.NULL, RELAXED)


# ---- graphs that are built node by node ----


def kernel_node(kernels: Kernels, values: Params) -> Any:
    """Return parameters of a node that launches the kernel ``affine`` over 8 elements; ``values`` must outlive them."""
    params = ffi.new("CUDA_KERNEL_NODE_PARAMS *")
    params.func = kernels.function("affine")
    params.gridDimX = params.gridDimY = params.gridDimZ = params.blockDimY = params.blockDimZ = 1
    params.blockDimX, params.kernelParams = 8, values.pointers
    return params


def copy_node(target: DeviceArray, source: DeviceArray) -> Any:
    params = ffi.new("CUDA_MEMCPY3D *")
    params.srcMemoryType = params.dstMemoryType = 2
    params.srcDevice, params.dstDevice = source.address, target.address
    params.WidthInBytes, params.Height, params.Depth = 32, 1, 1
    return params


def memset_node(target: DeviceArray, value: int) -> Any:
    params = ffi.new("CUDA_MEMSET_NODE_PARAMS *")
    params.dst, params.value, params.elementSize, params.width, params.height = target.address, value, 1, 4, 1
    return params


class Chain:
    """A graph in which each node depends on the one before it."""

    def __init__(self, device: Device) -> None:
        self.device = device
        out = ffi.new("CUgraph *")
        device.call("GraphCreate", out, 0)
        self.handle = out[0]
        context = ffi.new("CUcontext *")
        device.call("CtxGetCurrent", context)
        self.context = context[0]
        self.nodes: list[Any] = []

    def add(self, kind: str, params: Any) -> Any:
        out = ffi.new("CUgraphNode *")
        before = self.nodes[-1:]
        context = (self.context,) if kind in ("Memcpy", "Memset") else ()
        self.device.call(f"GraphAdd{kind}Node", out, self.handle, before, len(before), params, *context)
        self.nodes.append(out[0])
        return out[0]

    def change(self, graph: Graph, kind: str, node: Any, params: Any) -> None:
        context = (self.context,) if kind in ("Memcpy", "Memset") else ()
        self.device.call(f"GraphExec{kind}NodeSetParams", graph.exec, node, params, *context)


def test_nodes_of_every_kind_run_in_order_and_can_change(device: Device, kernels: Kernels) -> None:
    stream = device.stream()
    data, copy, other = (device.upload(np.full(8, n, np.int32)) for n in (1, 0, 7))
    values, inner = Params([data, np.int32(2), np.int32(1)]), Params([data, np.int32(1), np.int32(10)])
    child = Chain(device)
    child.add("Kernel", kernel_node(kernels, inner))
    child.add("Kernel", kernel_node(kernels, inner))
    chain = Chain(device)
    kernel = chain.add("Kernel", kernel_node(kernels, values))
    nested = chain.add("ChildGraph", child.handle)
    memcpy = chain.add("Memcpy", copy_node(copy, data))
    memset = chain.add("Memset", memset_node(data, 0))
    graph = Graph(device, chain.handle)
    assert sorted(graph.types()) == [KERNEL, MEMCPY, MEMSET, 4]
    graph.launch(stream)
    stream.synchronize()
    np.testing.assert_array_equal(device.download(copy), [23] * 8)
    np.testing.assert_array_equal(device.download(data), [0, *[23] * 7])

    values, inner = Params([other, np.int32(3), np.int32(0)]), Params([other, np.int32(1), np.int32(1)])
    second = Chain(device)
    second.add("Kernel", kernel_node(kernels, inner))
    second.add("Kernel", kernel_node(kernels, inner))
    chain.change(graph, "Kernel", kernel, kernel_node(kernels, values))
    chain.change(graph, "ChildGraph", nested, second.handle)
    chain.change(graph, "Memcpy", memcpy, copy_node(copy, other))
    chain.change(graph, "Memset", memset, memset_node(other, 1))
    graph.launch(stream)
    stream.synchronize()
    np.testing.assert_array_equal(device.download(copy), [23] * 8)
    np.testing.assert_array_equal(device.download(other), [0x01010101, *[23] * 7])
    np.testing.assert_array_equal(device.download(data), [0, *[23] * 7])
    for made in (child, second):
        device.call("GraphDestroy", made.handle)
    graph.destroy()


def test_a_child_graph_of_another_shape_is_refused(device: Device, kernels: Kernels) -> None:
    data = device.upload(np.ones(8, np.int32))
    values = Params([data, np.int32(2), np.int32(1)])
    one, two, chain = Chain(device), Chain(device), Chain(device)
    for child in (one, two, two):
        child.add("Kernel", kernel_node(kernels, values))
    node = chain.add("ChildGraph", one.handle)
    graph = Graph(device, chain.handle)
    with pytest.raises(CudaError, match="CUDA_ERROR_"):
        chain.change(graph, "ChildGraph", node, two.handle)
    for made in (one, two):
        device.call("GraphDestroy", made.handle)
    graph.destroy()


def test_what_makes_no_node_is_refused(device: Device, kernels: Kernels) -> None:
    data = device.upload(np.ones(8, np.int32))
    chain, other = Chain(device), Chain(device)
    foreign = other.add("Memset", memset_node(data, 0))
    wide = memset_node(data, 0)
    wide.width = 1 << 40
    if device.is_emulated:  # CUDA may report this only when the node runs
        with pytest.raises(CudaError, match="outside of a device allocation"):
            chain.add("Memset", wide)
    chain.nodes = [foreign]
    with pytest.raises(CudaError, match="CUDA_ERROR_"):
        chain.add("Memset", memset_node(data, 0))
    for made in (chain, other):
        device.call("GraphDestroy", made.handle)
