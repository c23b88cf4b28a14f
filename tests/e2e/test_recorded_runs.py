"""Recorded Runs: the application captures its own stream, on which the session runs, into a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import ort_cuda_plugin
from device_models import add_and_double, model
from ort_cuda_plugin.abi.core import ffi
from ort_cuda_plugin.abi.device import Device, DeviceArray, Stream

SIZE = 100
GLOBAL, THREAD_LOCAL, RELAXED = range(3)


@pytest.fixture
def stream() -> Iterator[Stream]:
    ort_cuda_plugin.register(emulate=True)
    with Stream(Device.emulated()) as made:
        yield made
        gc.collect()  # tracebacks of expected errors may hold sessions, which must end before the stream


def session_on(stream: Stream, network: bytes, **options: str) -> ort.InferenceSession:
    address = str(int(ffi.cast("uintptr_t", stream.handle)))
    return ort_cuda_plugin.session(network, emulate=True, provider_options={"user_compute_stream": address, **options})


def bind(session: ort.InferenceSession, arrays: dict[str, DeviceArray]) -> ort.IOBinding:
    binding = session.io_binding()
    for value in session.get_inputs():
        ort_cuda_plugin.bind_input(binding, value.name, arrays[value.name])
    for value in session.get_outputs():
        ort_cuda_plugin.bind_output(binding, value.name, arrays[value.name])
    return binding


class Graph:
    """An executable CUDA graph. `captured` sets ``exec`` at the end of the capture."""

    exec: Any

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def launch(self) -> None:
        self.stream.device.call("GraphLaunch", self.exec, self.stream.handle)


@contextmanager
def captured(stream: Stream, mode: int = GLOBAL) -> Iterator[Graph]:
    """Capture the stream during the block into a `Graph`. Raises CudaError if the block invalidated the capture."""
    device, made = stream.device, Graph(stream)
    graph, exec_ = ffi.new("CUgraph *"), ffi.new("CUgraphExec *")
    device.call("StreamBeginCapture", stream.handle, mode)
    yield made
    device.call("StreamEndCapture", stream.handle, graph)
    device.call("GraphInstantiate", exec_, graph[0], 0)
    device.call("GraphDestroy", graph[0])
    made.exec = exec_[0]


def vectors(device: Device, *names: str, size: int = SIZE) -> dict[str, DeviceArray]:
    return {name: device.upload(np.zeros(size, np.float32)) for name in names}


def check_launch(graph: Graph, arrays: dict[str, DeviceArray], value: float) -> None:
    """Overwrite the inputs a and b, launch the graph, and check its result c."""
    stream = graph.stream
    arrays["a"].copy_from(np.full(SIZE, value, np.float32), stream)
    arrays["b"].copy_from(np.ones(SIZE, np.float32), stream)
    graph.launch()
    result = arrays["c"].copy_to(np.empty(SIZE, np.float32), stream)
    np.testing.assert_array_equal(result, 2 * (value + 1))


@pytest.mark.parametrize("warm", [1, 5], ids=["first run", "run with an automatic graph"])
@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_a_recorded_run_is_repeated_by_each_launch(stream: Stream, mode: int, warm: int) -> None:
    session = session_on(stream, add_and_double())
    arrays = vectors(stream.device, "a", "b", "c")
    binding = bind(session, arrays)
    for _ in range(warm):
        session.run_with_iobinding(binding)
    with captured(stream, mode) as graph:
        session.run_with_iobinding(binding)
    for value in (3, 4):
        check_launch(graph, arrays, value)
    stream.device.call("GraphExecDestroy", graph.exec)


@pytest.mark.parametrize("pool", ["0", "1"], ids=["arena", "mempool"])
def test_later_runs_use_other_memory_than_a_recorded_run(stream: Stream, pool: str) -> None:
    """A later Run must not get a recorded Run's memory, since a launch of the graph may overlap with it."""
    options = {"arena.use_cuda_mempool": pool}
    session = session_on(stream, add_and_double(), **options)
    device = stream.device
    arrays = vectors(device, "a", "b", "c")
    binding = bind(session, arrays)
    session.run_with_iobinding(binding)
    before = ort_cuda_plugin.counters()["device_bytes_in_use"]
    with captured(stream) as graph:
        session.run_with_iobinding(binding)
    assert ort_cuda_plugin.counters()["device_bytes_in_use"] > before  # kept for the graph until the session ends
    other = ort_cuda_plugin.session(add_and_double(), emulate=True, provider_options=options)
    x = np.full(SIZE, 50, np.float32)
    for value in (3, 4):
        graph.launch()
        for one in (other, session):
            np.testing.assert_array_equal(one.run(None, {"a": x, "b": x})[0], 4 * x)
        check_launch(graph, arrays, value)
    device.call("GraphExecDestroy", graph.exec)
    del binding, session, one
    assert ort_cuda_plugin.counters()["device_bytes_in_use"] <= before


def test_a_run_without_capture_is_not_recorded(stream: Stream) -> None:
    session = session_on(stream, add_and_double())
    binding = bind(session, vectors(stream.device, "a", "b", "c"))
    for _ in range(5):  # now the plugin replays an automatic graph, which holds memory
        session.run_with_iobinding(binding)
    before = ort_cuda_plugin.counters()["device_bytes_in_use"]
    for _ in range(3):
        session.run_with_iobinding(binding)
    assert ort_cuda_plugin.counters()["device_bytes_in_use"] == before


def test_a_run_that_must_compile_is_refused_and_the_capture_stays_valid(stream: Stream) -> None:
    session = session_on(stream, add_and_double())
    arrays = vectors(stream.device, "a", "b", "c")
    binding = bind(session, arrays)
    with (
        captured(stream),
        pytest.raises(Exception, match=r"a plan for these inputs must be compiled first.*before " r"the capture"),
    ):
        session.run_with_iobinding(binding)
    session.run_with_iobinding(binding)
    with captured(stream) as graph:
        session.run_with_iobinding(binding)
    check_launch(graph, arrays, 5)
    stream.device.call("GraphExecDestroy", graph.exec)


def test_copies_from_host_memory_are_refused_and_the_capture_stays_valid(stream: Stream) -> None:
    session = session_on(stream, add_and_double())
    x = np.ones(SIZE, np.float32)
    session.run(None, {"a": x, "b": x})
    with captured(stream), pytest.raises(Exception, match="bind inputs and outputs on the device"):
        session.run(None, {"a": x, "b": x})
    np.testing.assert_array_equal(session.run(None, {"a": x, "b": x})[0], 4 * x)


def test_sizes_that_the_device_computes_are_refused_and_the_capture_stays_valid(stream: Stream) -> None:
    nodes = [
        helper.make_node("Greater", ["a", "b"], ["flags"]),
        helper.make_node("Compress", ["a", "flags"], ["kept"], axis=0),
        helper.make_node("Add", ["kept", "kept"], ["twice"]),
        helper.make_node("ReduceSum", ["twice"], ["c"], keepdims=0),
    ]
    network = model(nodes, {"a": [SIZE], "b": [SIZE]}, {"c": []}, TensorProto.FLOAT)
    session = session_on(stream, network)
    arrays = vectors(stream.device, "a", "b") | {"c": stream.device.empty((), np.float32)}
    arrays["a"].copy_from(np.ones(SIZE, np.float32))
    binding = bind(session, arrays)
    session.run_with_iobinding(binding)
    with captured(stream), pytest.raises(Exception, match=r"read .*cannot capture that.*application's capture"):
        session.run_with_iobinding(binding)
    session.run_with_iobinding(binding)
    assert arrays["c"].copy_to(np.empty((), np.float32)) == 2 * SIZE
