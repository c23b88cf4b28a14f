"""Conditional nodes of CUDA graphs, on the emulated device and, if there is one, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from driver_harness import DEVICES, Kernels, driver_device, load_kernels
from emulator_harness import configured
from ort_cuda_plugin.abi.core import ffi
from ort_cuda_plugin.abi.device import CudaError, Device, DeviceArray, Params
from ort_cuda_plugin.abi.emulation import findings

IF, WHILE = range(2)
CONDITIONAL = 13
ASSIGN_DEFAULT = 1


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with driver_device(request.param, seed=5) as device:
        yield device


@pytest.fixture
def kernels(device: Device) -> Iterator[Kernels]:
    with load_kernels(device) as kernels:
        yield kernels


class Builder:
    """Builds a graph whose nodes depend on each other in the order in which they are added."""

    def __init__(self, device: Device, kernels: Kernels, handle: Any = None) -> None:
        self.device, self.kernels = device, kernels
        self.is_body = handle is not None
        self.last: Any = ffi.NULL
        if handle is None:
            made = ffi.new("CUgraph *")
            device.call("GraphCreate", made, 0)
            handle = made[0]
        self.graph = handle

    def _added(self, call: str, *arguments: Any) -> Any:
        node, before = ffi.new("CUgraphNode *"), ffi.new("CUgraphNode *", self.last)
        self.device.call(call, node, self.graph, before, *arguments)
        self.last = node[0]
        return node[0]

    def kernel(self, name: str, *arguments: Any) -> Any:
        values, node = Params(list(arguments)), ffi.new("CUDA_KERNEL_NODE_PARAMS *")
        node.func = self.kernels.function(name)
        node.gridDimX = node.gridDimY = node.gridDimZ = node.blockDimX = node.blockDimY = node.blockDimZ = 1
        node.kernelParams = values.pointers
        return self._added("GraphAddKernelNode", 0 if self.last == ffi.NULL else 1, node)

    def handle(self, initial: int = 0, flags: int = 0) -> int:
        made = ffi.new("CUgraphConditionalHandle *")
        self.device.call("GraphConditionalHandleCreate", made, self.graph, context(self.device), initial, flags)
        return int(made[0])

    def conditional(self, handle: int, kind: int, size: int = 1) -> list[Builder]:
        """Add a conditional node; return builders of its bodies."""
        params = ffi.new("CUgraphNodeParams *")
        params.type = CONDITIONAL
        node = params.conditional.node
        node.handle, node.type, node.size, node.ctx = handle, kind, size, context(self.device)
        self._added("GraphAddNode", ffi.NULL, 0 if self.last == ffi.NULL else 1, params)
        return [Builder(self.device, self.kernels, node.phGraph_out[i]) for i in range(size)]

    def instantiated(self) -> Any:
        made = ffi.new("CUgraphExec *")
        self.device.call("GraphInstantiate", made, self.graph, 0)
        return made[0]

    def run(self, times: int = 1) -> None:
        """Launch the graph, and destroy it."""
        executable = self.instantiated()
        stream = self.device.stream()
        for _ in range(times):
            self.device.call("GraphLaunch", executable, stream.handle)
        stream.synchronize()
        self.device.call("GraphExecDestroy", executable)
        self.device.call("GraphDestroy", self.graph)


def context(device: Device) -> Any:
    found = ffi.new("CUcontext *")
    device.call("CtxGetCurrent", found)
    return found[0]


def counter(device: Device, value: int = 0) -> DeviceArray:
    return device.upload(np.array([value], np.int32))


@pytest.mark.parametrize("bound", [1, 2, 5])
def test_a_while_node_runs_its_body_until_a_kernel_clears_the_condition(
    device: Device, kernels: Kernels, bound: int
) -> None:
    steps, sums = counter(device), counter(device, 1)
    graph = Builder(device, kernels)
    handle = graph.handle()
    graph.kernel("count", steps, np.int32(bound), np.int64(handle))  # counts to 1; condition: 1 < bound
    (body,) = graph.conditional(handle, WHILE)
    body.kernel("affine", sums, np.int32(3), np.int32(0))
    body.kernel("count", steps, np.int32(bound), np.int64(handle))
    graph.kernel("affine", sums, np.int32(1), np.int32(1000))
    graph.run()
    assert device.download(steps)[0] == bound
    assert device.download(sums)[0] == 3 ** (bound - 1) + 1000


def test_each_launch_assigns_the_default_of_a_handle(device: Device, kernels: Kernels) -> None:
    steps = counter(device)
    graph = Builder(device, kernels)
    handle = graph.handle(1, ASSIGN_DEFAULT)
    (body,) = graph.conditional(handle, WHILE)
    body.kernel("count", steps, np.int32(3), np.int64(handle))
    graph.run(times=3)
    assert device.download(steps)[0] == 3 + 2  # the second and the third launch run the body once


@pytest.mark.parametrize(("bound", "expected"), [(0, 500), (9, 70)])
def test_an_if_node_runs_one_of_its_bodies_once(device: Device, kernels: Kernels, bound: int, expected: int) -> None:
    steps, result = counter(device), counter(device, 10)
    graph = Builder(device, kernels)
    handle = graph.handle()
    graph.kernel("count", steps, np.int32(bound), np.int64(handle))
    then, otherwise = graph.conditional(handle, IF, 2)
    then.kernel("affine", result, np.int32(7), np.int32(0))
    otherwise.kernel("affine", result, np.int32(50), np.int32(0))
    graph.run()
    assert device.download(result)[0] == expected


def test_nodes_nest(device: Device, kernels: Kernels) -> None:
    outer, inner, sums = counter(device), counter(device), counter(device)
    graph = Builder(device, kernels)
    handle = graph.handle(1, ASSIGN_DEFAULT)
    (body,) = graph.conditional(handle, WHILE)
    nested = body.handle()
    body.kernel("affine", inner, np.int32(0), np.int32(-1))
    body.kernel("count", inner, np.int32(4), np.int64(nested))
    (innermost,) = body.conditional(nested, WHILE)
    innermost.kernel("affine", sums, np.int32(1), np.int32(1))
    innermost.kernel("count", inner, np.int32(4), np.int64(nested))
    body.kernel("count", outer, np.int32(3), np.int64(handle))
    graph.run()
    assert device.download(sums)[0] == 3 * 4


# ---- restrictions, on the emulated device ----


@pytest.fixture
def builder() -> Iterator[Builder]:
    with configured() as device, load_kernels(device) as kernels:
        yield Builder(device, kernels)


def test_a_handle_belongs_to_one_node_of_its_graph(builder: Builder) -> None:
    handle = builder.handle()
    other = Builder(builder.device, builder.kernels)
    with pytest.raises(CudaError, match="was not created for this graph"):
        other.conditional(handle, WHILE)
    builder.conditional(handle, WHILE)
    with pytest.raises(CudaError, match="another conditional node uses the handle"):
        builder.conditional(handle, WHILE)
    for graph in (builder, other):
        graph.device.call("GraphDestroy", graph.graph)


def test_a_graph_with_a_handle_that_no_node_uses_cannot_be_instantiated(builder: Builder) -> None:
    builder.handle()
    with pytest.raises(CudaError, match="no conditional node uses a handle"):
        builder.instantiated()
    builder.device.call("GraphDestroy", builder.graph)


@pytest.mark.parametrize(("kind", "size"), [(WHILE, 2), (IF, 3), (IF, 0), (2, 1)])
def test_types_and_numbers_of_bodies_are_checked(builder: Builder, kind: int, size: int) -> None:
    with pytest.raises(CudaError, match=r"has 1 to \d bodies|are not emulated"):
        builder.conditional(builder.handle(), kind, size)
    builder.device.call("GraphDestroy", builder.graph)


def test_a_graph_with_conditional_nodes_has_one_executable_graph_and_is_no_child(builder: Builder) -> None:
    (body,) = builder.conditional(builder.handle(), WHILE)
    executable = builder.instantiated()
    with pytest.raises(CudaError, match="two executable graphs"):
        builder.instantiated()
    builder.device.call("GraphExecDestroy", executable)
    builder.device.call("GraphExecDestroy", builder.instantiated())
    around, node = Builder(builder.device, builder.kernels), ffi.new("CUgraphNode *")
    with pytest.raises(CudaError, match="cannot be a child graph"):
        around.device.call("GraphAddChildGraphNode", node, around.graph, ffi.NULL, 0, builder.graph)
    for call, arguments in (("GraphDestroy", ()), ("GraphInstantiate", (0,))):
        first = () if call == "GraphDestroy" else (ffi.new("CUgraphExec *"),)
        with pytest.raises(CudaError, match="belongs to a conditional node"):
            builder.device.call(call, *first, body.graph, *arguments)
    for graph in (builder, around):
        graph.device.call("GraphDestroy", graph.graph)


def test_nodes_of_a_body_cannot_change_in_an_executable_graph(builder: Builder) -> None:
    handle = builder.handle()
    (body,) = builder.conditional(handle, WHILE)
    steps = counter(builder.device)
    node = body.kernel("count", steps, np.int32(3), np.int64(handle))
    executable = builder.instantiated()
    with pytest.raises(CudaError, match="not a kernel node of the graph that was instantiated"):
        builder.device.call("GraphExecKernelNodeSetParams", executable, node, ffi.new("CUDA_KERNEL_NODE_PARAMS *"))
    builder.device.call("GraphExecDestroy", executable)
    builder.device.call("GraphDestroy", builder.graph)


def test_a_kernel_that_sets_an_unknown_handle_is_a_finding(builder: Builder) -> None:
    builder.kernel("count", counter(builder.device), np.int32(3), np.int64(123456789))
    builder.run()
    assert any("no graph has the handle 123456789" in text for text in findings())
