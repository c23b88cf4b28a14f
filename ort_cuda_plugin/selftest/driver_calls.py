"""Checks of driver calls that some drivers or modes do not support: pools, captures, graph nodes, queries.

If such a call fails, most sessions work without it and do not report it. These checks name the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..abi.core import ffi, lib
from ..compiler.kernel import KernelSpec
from .device import Device
from .driver_table import Driver, Wrong, driver_of, expect_same

COUNT = 1000
"""Bytes of the checks' allocations; elements (int32) of the kernel node's array."""
THREADS = 128
ADDING = KernelSpec(
    "selftest_add",
    ("*i32", "i32", "i32"),
    """
def kernel(x, count, addend):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < count:
        x[i] = x[i] + addend
""",
    THREADS,
)
"""The kernel that graphs launch: x[i] += addend."""

COUNTING = KernelSpec(
    "selftest_count",
    ("*i32", "i64"),
    """
def kernel(x, handle):
    x[0] = x[0] + 1
    set_conditional(handle, int32(1) if x[0] < 5 else int32(0))
""",
    1,
)
"""The kernel that the WHILE node repeats until x[0] is 5."""


def _pool(device: Device) -> None:
    """Allocate from a pool, use the memory, and return it."""
    with driver_of(device) as driver:
        props = ffi.new("CUmemPoolProps *")
        props.allocType, props.location.type = lib.CU_MEM_ALLOCATION_TYPE_PINNED, lib.CU_MEM_LOCATION_TYPE_DEVICE
        props.location.id = device.ordinal
        pool = driver.made("CUmemoryPool", "MemPoolCreate", "MemPoolDestroy", props)
        number, address, stream = ffi.new("uint64_t *", 1 << 20), ffi.new("CUdeviceptr *"), driver.stream()
        driver.MemPoolSetAttribute(pool, lib.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, number)
        driver.MemAllocFromPoolAsync(address, COUNT, pool, stream)
        data = np.arange(COUNT, dtype=np.uint32).astype(np.uint8)
        driver.upload(address[0], data, stream)
        expect_same(driver.download(address[0], COUNT, stream), data, "memory of a pool")
        driver.MemPoolGetAttribute(pool, lib.CU_MEMPOOL_ATTR_USED_MEM_CURRENT, number)
        if number[0] < COUNT:
            raise Wrong(f"cuMemPoolGetAttribute: got {number[0]} bytes in use, expected {COUNT} or more")
        driver.MemFreeAsync(address[0], stream)
        driver.StreamSynchronize(stream)
        driver.MemPoolTrimTo(pool, 0)


def _queries(device: Device) -> None:
    """Query memory, streams and events whose state is known, and check the answers."""
    with driver_of(device) as driver:
        address, stream = driver.memory(COUNT), driver.stream()
        ordinal, context = ffi.new("int *"), ffi.new("CUcontext *")
        driver.PointerGetAttribute(ordinal, lib.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)
        if ordinal[0] != device.ordinal:
            raise Wrong(f"cuPointerGetAttribute: got device {ordinal[0]}, expected {device.ordinal}")
        driver.StreamGetCtx(stream, context)
        event = driver.made("CUevent", "EventCreate", "EventDestroy", 0)
        driver.EventRecord(event, stream)
        driver.EventSynchronize(event)
        driver.EventQuery(event)
        driver.StreamSynchronize(stream)
        driver.StreamQuery(stream)
        driver.CtxSynchronize()
        free, total = ffi.new("size_t *"), ffi.new("size_t *")
        driver.MemGetInfo(free, total)
        if not 0 < free[0] <= total[0]:
            raise Wrong(f"cuMemGetInfo: got {free[0]} free bytes, expected 1 to {total[0]} (the total)")


def _launched(driver: Driver, graph: Any) -> Any:
    """Instantiate a graph, launch it, and wait for it. Return the executable graph."""
    executable, stream = driver.made("CUgraphExec", "GraphInstantiate", "GraphExecDestroy", graph, 0), driver.stream()
    driver.GraphLaunch(executable, stream)
    driver.StreamSynchronize(stream)
    return executable


def _capture(device: Device) -> None:
    """Capture a memset into a graph, and launch it."""
    with driver_of(device) as driver:
        address, stream = driver.memory(COUNT), driver.stream()
        driver.MemsetD8Async(address, 1, COUNT, stream)
        driver.StreamSynchronize(stream)
        driver.StreamBeginCapture(stream, lib.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        graph, status, count = ffi.new("CUgraph *"), ffi.new("int *"), ffi.new("size_t *", 1)
        try:
            driver.MemsetD8Async(address, 7, COUNT, stream)
            driver.StreamIsCapturing(stream, status)
        finally:
            driver.StreamEndCapture(stream, graph)
        driver.destroyed_at_end("GraphDestroy", graph[0])
        if status[0] != lib.CU_STREAM_CAPTURE_STATUS_ACTIVE:
            raise Wrong(
                f"cuStreamIsCapturing: got status {status[0]} during a capture, expected "
                f"{int(lib.CU_STREAM_CAPTURE_STATUS_ACTIVE)} (active)"
            )
        driver.GraphGetNodes(graph[0], ffi.NULL, count)
        node, kind = ffi.new("CUgraphNode *"), ffi.new("int *")
        driver.GraphGetNodes(graph[0], node, count)
        driver.GraphNodeGetType(node[0], kind)
        if (count[0], kind[0]) != (1, lib.CU_GRAPH_NODE_TYPE_MEMSET):
            raise Wrong(
                f"a captured memset: got {count[0]} nodes, the first of type {kind[0]}, expected one node of type "
                f"{int(lib.CU_GRAPH_NODE_TYPE_MEMSET)} (memset)"
            )
        expect_same(driver.download(address, COUNT), np.full(COUNT, 1, np.uint8), "memory before the graph's launch")
        _launched(driver, graph[0])
        expect_same(driver.download(address, COUNT), np.full(COUNT, 7, np.uint8), "memory after the graph's launch")


def _memset(address: int, value: int) -> Any:
    return ffi.new(
        "CUDA_MEMSET_NODE_PARAMS *", {"dst": address, "value": value, "elementSize": 1, "width": COUNT, "height": 1}
    )


def _copy(target: int, source: int) -> Any:
    copy = ffi.new("CUDA_MEMCPY3D *")
    copy.srcMemoryType = copy.dstMemoryType = lib.CU_MEMORYTYPE_DEVICE
    copy.dstDevice, copy.srcDevice = target, source
    copy.WidthInBytes, copy.Height, copy.Depth = COUNT, 1, 1
    return copy


def _memory_nodes(device: Device) -> None:
    """Build a graph of a memset, a copy and a child graph, launch it, change its nodes, and launch it again."""
    with driver_of(device) as driver:
        context = driver.context
        first, second, third = (driver.memory(COUNT) for _ in range(3))
        graph, child = (driver.made("CUgraph", "GraphCreate", "GraphDestroy", 0) for _ in range(2))
        inner, set_node, copy_node, child_node = (ffi.new("CUgraphNode *") for _ in range(4))
        driver.GraphAddMemsetNode(inner, child, ffi.NULL, 0, _memset(third, 5), context)
        driver.GraphAddMemsetNode(set_node, graph, ffi.NULL, 0, _memset(first, 3), context)
        driver.GraphAddMemcpyNode(copy_node, graph, set_node, 1, _copy(second, first), context)
        driver.GraphAddChildGraphNode(child_node, graph, copy_node, 1, child)
        executable = _launched(driver, graph)
        for address, value in ((second, 3), (third, 5)):
            expect_same(driver.download(address, COUNT), np.full(COUNT, value, np.uint8), "a graph of memory nodes")
        other = driver.made("CUgraph", "GraphCreate", "GraphDestroy", 0)
        driver.GraphAddMemsetNode(inner, other, ffi.NULL, 0, _memset(first, 9), context)
        driver.GraphExecMemsetNodeSetParams(executable, set_node[0], _memset(first, 8), context)
        driver.GraphExecMemcpyNodeSetParams(executable, copy_node[0], _copy(third, first), context)
        driver.GraphExecChildGraphNodeSetParams(executable, child_node[0], other)
        stream = driver.stream()
        driver.GraphLaunch(executable, stream)
        driver.StreamSynchronize(stream)
        for address, value in ((first, 9), (second, 3), (third, 8)):
            expect_same(driver.download(address, COUNT), np.full(COUNT, value, np.uint8), "a graph with changed nodes")


def _conditional_node(device: Device) -> None:
    """Build a graph of a WHILE node whose body is a kernel that counts to 5, and launch it."""
    (kernel,) = kernels = device.opened.acquire_kernels([COUNTING])
    try:
        with driver_of(device) as driver:
            address = driver.memory(4)
            driver.MemsetD8Async(address, 0, 4, ffi.NULL)
            graph, node = driver.made("CUgraph", "GraphCreate", "GraphDestroy", 0), ffi.new("CUgraphNode *")
            handle, inner = ffi.new("CUgraphConditionalHandle *"), ffi.new("CUgraphNode *")
            flags = lib.CU_GRAPH_COND_ASSIGN_DEFAULT
            driver.GraphConditionalHandleCreate(handle, graph, driver.context, 1, flags)
            repeated = ffi.new("CUgraphNodeParams *")
            repeated.type = lib.CU_GRAPH_NODE_TYPE_CONDITIONAL
            own = repeated.conditional.node
            own.handle, own.type, own.size, own.ctx = handle[0], lib.CU_GRAPH_COND_TYPE_WHILE, 1, driver.context
            driver.GraphAddNode(node, graph, ffi.NULL, ffi.NULL, 0, repeated)
            values = [ffi.new("uint64_t *", address), ffi.new("uint64_t *", handle[0])]
            pointers = ffi.new("void *[]", [ffi.cast("void *", value) for value in values])
            params = ffi.new("CUDA_KERNEL_NODE_PARAMS *", {"func": kernel.function, "kernelParams": pointers})
            params.gridDimX = params.gridDimY = params.gridDimZ = 1
            params.blockDimX = params.blockDimY = params.blockDimZ = 1
            driver.GraphAddKernelNode(inner, own.phGraph_out[0], ffi.NULL, 0, params)
            _launched(driver, graph)
            found = driver.download(address, 4).view(np.int32)
            expect_same(found, np.full(1, 5, np.int32), "a WHILE node that counts to 5")
    finally:
        device.opened.release_kernels(kernels)


def _kernel_node(device: Device) -> None:
    """Build a graph of a kernel, launch it, change its parameters, and launch it again."""
    (kernel,) = kernels = device.opened.acquire_kernels([ADDING])
    try:
        with driver_of(device) as driver:
            address = driver.memory(4 * COUNT)
            driver.MemsetD8Async(address, 0, 4 * COUNT, ffi.NULL)
            driver.FuncSetAttribute(kernel.function, lib.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 1024)
            graph, node = driver.made("CUgraph", "GraphCreate", "GraphDestroy", 0), ffi.new("CUgraphNode *")
            params, kept = _kernel(kernel.function, address, 3)
            driver.GraphAddKernelNode(node, graph, ffi.NULL, 0, params)
            executable = _launched(driver, graph)
            found = driver.download(address, 4 * COUNT).view(np.int32)
            expect_same(found, np.full(COUNT, 3, np.int32), "a graph of a kernel")
            params, kept = _kernel(kernel.function, address, 40)
            driver.GraphExecKernelNodeSetParams(executable, node[0], params)
            stream = driver.stream()
            driver.GraphLaunch(executable, stream)
            found = driver.download(address, 4 * COUNT, stream).view(np.int32)
            expect_same(found, np.full(COUNT, 43, np.int32), "a graph with another addend")
            del kept
    finally:
        device.opened.release_kernels(kernels)


def _kernel(function: Any, address: int, addend: int) -> tuple[Any, Any]:
    """Return the parameters of a kernel node, and the memory to which they point."""
    values = [ffi.new("uint64_t *", address), ffi.new("int32_t *", COUNT), ffi.new("int32_t *", addend)]
    pointers = ffi.new("void *[]", [ffi.cast("void *", value) for value in values])
    params = ffi.new("CUDA_KERNEL_NODE_PARAMS *")
    params.func = function
    params.gridDimX, params.gridDimY, params.gridDimZ = -(-COUNT // THREADS), 1, 1
    params.blockDimX, params.blockDimY, params.blockDimZ = THREADS, 1, 1
    params.kernelParams = pointers
    return params, (values, pointers)


CALL_CHECKS: dict[str, Callable[[Device], None]] = {
    "a memory pool": _pool,
    "queries of memory, streams and events": _queries,
    "a captured graph": _capture,
    "nodes of memory in a graph": _memory_nodes,
    "a loop in a graph": _conditional_node,
    "a kernel in a graph": _kernel_node,
}
