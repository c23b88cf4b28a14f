"""Checks of the driver: copies, pinned memory, streams, events, pools, graphs, other contexts, several devices."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from onnx import numpy_helper

from .. import counters
from ..abi.core import ffi
from ..conformance.verdict import run_session
from ..ep.device.devices import cuda_devices, emulated_devices
from .device import Device, Skipped
from .driver_calls import CALL_CHECKS
from .driver_table import Wrong, driver_of, expect_same
from .judge import Begins, judge
from .sections.case import Case, Result, Verdict, difference

SIZES = (1, 3, 4097, 1 << 20)
"""Sizes of copies in bytes: odd, more than a page, large."""
RUNS = 12
"""Runs of a session with CUDA graphs: the first Runs end with a capture, the others replay the graph."""
CHAIN = "({T}[n, 33] x) => ({T}[n, 20] y) { p = MatMul(x, w) r = Relu(p) y = MatMul(r, v) }"
"""A model of two launches in ONNX's text format: y = relu(x w) v."""


def _noise(nbytes: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes).astype(np.uint8)


def _copies(device: Device) -> None:
    with driver_of(device) as driver:
        for nbytes in SIZES:
            data, first, second = _noise(nbytes), driver.memory(nbytes), driver.memory(nbytes)
            driver.upload(first, data)
            driver.MemcpyDtoDAsync(second, first, nbytes, ffi.NULL)
            expect_same(driver.download(second, nbytes), data, f"{nbytes} bytes, to the device, on the device and back")
            driver.MemsetD8Async(second, 7, nbytes, ffi.NULL)
            expect_same(driver.download(second, nbytes), np.full(nbytes, 7, np.uint8), f"{nbytes} bytes, filled")


def _pinned_memory(device: Device) -> None:
    nbytes = SIZES[-1]
    with driver_of(device) as driver:
        host = driver.made("void *", "MemHostAlloc", "MemFreeHost", nbytes, 0)
        view = np.frombuffer(ffi.buffer(host, nbytes), np.uint8)
        view[:] = data = _noise(nbytes)
        address, stream = driver.memory(nbytes), driver.stream()
        driver.MemcpyHtoDAsync(address, host, nbytes, stream)
        driver.StreamSynchronize(stream)
        view[:] = 0
        driver.MemcpyDtoHAsync(host, address, nbytes, stream)
        driver.StreamSynchronize(stream)
        expect_same(view, data, "pinned memory")


def _streams_and_events(device: Device) -> None:
    nbytes = SIZES[-1]
    with driver_of(device) as driver:
        data, first, second = _noise(nbytes), driver.memory(nbytes), driver.memory(nbytes)
        one, other = driver.stream(), driver.stream()
        events = [driver.made("CUevent", "EventCreate", "EventDestroy", 0) for _ in range(2)]
        driver.EventRecord(events[0], one)
        driver.upload(first, data, one)
        driver.EventRecord(events[1], one)
        driver.StreamWaitEvent(other, events[1], 0)
        driver.MemcpyDtoDAsync(second, first, nbytes, other)
        expect_same(driver.download(second, nbytes, other), data, "a copy after an event of another stream")
        driver.EventSynchronize(events[1])
        milliseconds = ffi.new("float *")
        driver.EventElapsedTime(milliseconds, *events)
        if not 0 <= milliseconds[0] < 60_000:
            raise Wrong(f"the time between two events is {milliseconds[0]} ms, expected 0 to 60000")


def _memory_pools(device: Device) -> None:
    """Check that Runs return their memory, and that it is reused."""
    held = []
    case = _chain("n = 8", 8)
    session = device.session(case.model())
    feeds = [*case.feeds(case.model()).values()]
    for _ in range(6):
        run_session(session, feeds)
        held.append(counters()["device_bytes_in_use"])
    if held[-1] > held[2]:
        raise Wrong(f"Runs of one size hold more and more device memory: {held} bytes after successive Runs")


def _graphs(moves: bool, **options: str) -> Callable[[Device], None]:
    """Return a check of Runs that replay graphs: each has new input contents, with ``moves`` also new addresses."""

    def check(device: Device) -> None:
        import onnxruntime as ort

        before = counters()["graph_replays"]
        model = _chain("graph", 8).model()
        session = device.session(model, options=options)
        binding = session.io_binding()
        values = [ort.OrtValue.ortvalue_from_numpy(np.zeros((8, 33), np.float32), *device.memory) for _ in range(2)]
        results = [ort.OrtValue.ortvalue_from_numpy(np.zeros((8, 20), np.float32), *device.memory) for _ in range(2)]
        for run in range(RUNS):
            (x,) = _chain(f"run {run}", 8).feeds(model).values()
            value, result = values[moves and run % 2], results[moves and run % 2]
            value.update_inplace(x)
            binding.bind_ortvalue_input("x", value)
            binding.bind_ortvalue_output("y", result)
            session.run_with_iobinding(binding)
            expect_same(result.numpy(), _expected(model, x), f"Run {run}")
        if counters()["graph_replays"] == before:
            known = {name: count for name, count in counters().items() if name.startswith("graph_fallbacks_") and count}
            raise Wrong(f"no Run was the replay of a graph: {known or 'no reason is known'}")

    return check


def _expected(model: Any, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the result of `CHAIN`, computed in float64; its integers are exact in float32 as well."""
    first, second = (numpy_helper.to_array(weight).astype(np.float64) for weight in model.graph.initializer)
    return (np.maximum(x @ first, 0) @ second).astype(np.float32)


def _chain(name: str, rows: int) -> Case:
    return Case(f"driver, {name}", CHAIN.replace("[n, ", f"[{rows}, "), "float", {"w": (33, 24), "v": (24, 20)})


def _threads(device: Device) -> None:
    """Check concurrent Runs of one session."""
    case = _chain("threads", 65)
    model = case.model()
    session, wrong = device.session(model), list[str]()

    def work(number: int) -> None:
        (x,) = _chain(f"thread {number}", 65).feeds(model).values()
        expected = _expected(model, x)
        for _ in range(RUNS):
            (found,) = run_session(session, [x])
            wrong.extend(filter(None, [difference(found, expected, True)]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        raise Wrong(f"{len(wrong)} of {4 * RUNS} concurrent Runs have wrong results; the first: {wrong[0]}")


def _other_context(device: Device) -> None:
    """Check Runs while another library retains the device's primary context, and makes it current."""
    if device.is_emulated:
        raise Skipped("no other library can share a context of the emulated device")
    try:
        from cuda.bindings import driver as cuda
    except ImportError:
        raise Skipped("cuda-bindings is not installed") from None
    error, context = cuda.cuDevicePrimaryCtxRetain(cuda.cuDeviceGet(device.ordinal)[1])
    if int(error):
        raise Wrong(f"cuDevicePrimaryCtxRetain failed: {error}")
    try:
        cuda.cuCtxSetCurrent(context)
        _expect_right(_chain("another context", 17), device)
        current = cuda.cuCtxGetCurrent()[1]
        if int(current) != int(context):
            raise Wrong("a Run changed the thread's current CUDA context")
    finally:
        cuda.cuDevicePrimaryCtxRelease(cuda.cuDeviceGet(device.ordinal)[1])


def _two_devices(device: Device) -> None:
    """Check sessions on two devices of the machine in turn."""
    infos = emulated_devices() if device.is_emulated else cuda_devices()[0]
    others = [info.ordinal for info in infos if info.ordinal != device.ordinal]
    if not others:
        raise Skipped("the machine has one device")
    for ordinal in (others[0], device.ordinal, others[0]):
        _expect_right(_chain("two devices", 19), Device(device.is_emulated, ordinal))


def _expect_right(case: Case, device: Device) -> None:
    for result in judge(case, device):
        if result.verdict is not Verdict.PASS:
            raise Wrong(result.reason)


CHECKS: dict[str, Callable[[Device], None]] = {
    "copies between host and device": _copies,
    "pinned memory": _pinned_memory,
    "streams and events": _streams_and_events,
    "memory of Runs": _memory_pools,
    "automatic graphs": _graphs(True, min_num_runs_before_cuda_graph_capture="2"),
    "graphs of whole Runs": _graphs(False, enable_cuda_graph="1"),
    "concurrent Runs": _threads,
    "context of another library": _other_context,
    "two devices": _two_devices,
    **CALL_CHECKS,
}


def driver_checks(device: Device, is_quick: bool) -> Iterator[tuple[str, Callable[[Begins], Iterator[Result]]]]:
    """Yield the checks of the driver."""
    for name, check in CHECKS.items():
        yield name, partial(_results, name, check, device)


def _results(name: str, check: Callable[[Device], None], device: Device, begins: Begins) -> Iterator[Result]:
    begun, verdict, reason = time.process_time(), Verdict.PASS, ""
    try:
        check(device)
    except Skipped as skipped:
        verdict, reason = Verdict.SKIPPED, str(skipped)
    except Wrong as wrong:
        verdict, reason = Verdict.FAIL, str(wrong)
    except Exception as error:
        verdict, reason = Verdict.FAIL, " ".join(f"{type(error).__name__}: {error}".split())[:400]
    yield Result(name, verdict, reason=reason, seconds=time.process_time() - begun, case=name)
