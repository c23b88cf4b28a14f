"""Stream captures by other code in mode GLOBAL, the default of torch.cuda.graph, while sessions run.

In this mode, CUDA forbids calls that may synchronize, such as cuMemAlloc, in every thread. A forbidden call fails and
invalidates the capture. A thread may select another mode for itself (cuThreadExchangeStreamCaptureMode).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import onnxruntime as ort
import pytest

import ort_cuda_plugin
from device_models import add_and_double
from ort_cuda_plugin.abi.core import ffi
from ort_cuda_plugin.abi.device import Device, Stream

GLOBAL = 0
BYTES = 64


@contextmanager
def captured_globally(device: Device) -> Iterator[None]:
    """Capture a memset in mode GLOBAL around the block. Afterwards check that the captured graph can be launched."""
    target = device.upload(np.zeros(BYTES, np.uint8))
    graph, exec_ = ffi.new("CUgraph *"), ffi.new("CUgraphExec *")
    with Stream(device) as stream:
        device.call("StreamBeginCapture", stream.handle, GLOBAL)
        device.call("MemsetD8Async", target.address, 7, BYTES, stream.handle)
        try:
            yield
        finally:
            device.call("StreamEndCapture", stream.handle, graph)
        device.call("GraphInstantiate", exec_, graph[0], 0)
        device.call("GraphLaunch", exec_[0], stream.handle)
        stream.synchronize()
        np.testing.assert_array_equal(target.copy_to(np.empty(BYTES, np.uint8)), 7)
        device.call("GraphExecDestroy", exec_[0])
        device.call("GraphDestroy", graph[0])


class Buffers:
    """Device memory that the test allocates before a capture begins, and frees after it."""

    def __init__(self, device: Device) -> None:
        ort_cuda_plugin.register(emulate=True)
        self.x = np.ones(50, np.float32)
        self.result = np.empty(50, np.float32)
        self.a, self.c = device.upload(self.x), device.empty(50, np.float32)

    def bind(self, session: ort.InferenceSession) -> ort.IOBinding:
        binding = session.io_binding()
        for name in "ab":
            ort_cuda_plugin.bind_input(binding, name, self.a)
        ort_cuda_plugin.bind_output(binding, "c", self.c)
        return binding


def use_session(options: dict[str, str], buffers: Buffers) -> None:
    """Create a session, run it with inputs in host memory and in device memory, and delete it."""
    session = ort_cuda_plugin.session(add_and_double(), emulate=True, provider_options=options)
    if "enable_cuda_graph" not in options:
        for n in (100, 100, 100, 100, 10_000, 3_000_000):
            x = np.full(n, n, np.float32)
            np.testing.assert_array_equal(session.run(None, {"a": x, "b": x})[0], 4 * x)
    binding = buffers.bind(session)
    for _ in range(4):
        session.run_with_iobinding(binding)
    del binding, session
    gc.collect()
    ort_cuda_plugin.trim()


OPTIONS: dict[str, dict[str, str]] = {
    "arena": {},
    "mempool": {"arena.use_cuda_mempool": "1"},
    "captured runs": {"enable_cuda_graph": "1"},
}


@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_session_works_while_another_thread_captures_in_global_mode(options: dict[str, str]) -> None:
    device = Device.emulated()
    buffers = Buffers(device)
    ort_cuda_plugin.trim()
    with ThreadPoolExecutor(1) as pool, captured_globally(device):
        pool.submit(use_session, options, buffers).result()
    np.testing.assert_array_equal(buffers.c.copy_to(buffers.result), 4 * buffers.x)


@pytest.mark.usefixtures("collected")
def test_a_thread_can_drop_a_session_while_it_captures() -> None:
    """Python's garbage collector may delete a session at any time, also during the thread's own capture."""
    device = Device.emulated()
    buffers = Buffers(device)
    sessions = [ort_cuda_plugin.session(add_and_double(), emulate=True) for _ in range(2)]
    bindings = [buffers.bind(session) for session in sessions]
    for session, binding in zip(sessions, bindings, strict=True):
        for _ in range(4):
            session.run_with_iobinding(binding)
    with captured_globally(device):
        del session, binding
        sessions.clear()
        bindings.clear()
        gc.collect()
        ort_cuda_plugin.trim()
    np.testing.assert_array_equal(buffers.c.copy_to(buffers.result), 4 * buffers.x)
