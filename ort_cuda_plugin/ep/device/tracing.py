"""CUPTI through NVIDIA's cupti-python: traces the GPU's work for profiles.

C pushes a correlation number before it enqueues work (``csrc_shim/driver/tracer.h``), with CUPTI's own function; Python
is not called. CUPTI delivers its records in buffers, which are read when a profile ends.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from ...abi.core import core, ffi, lib
from ...abi.errors import Error

_BUFFER_BYTES = 8 << 20
_KINDS = ("CONCURRENT_KERNEL", "MEMCPY", "MEMSET", "EXTERNAL_CORRELATION")
#: Flag of cuptiActivityFlushAll that also flushes buffers that are not full.
_FORCED = 1


class NoTracing(Error, RuntimeError):
    """CUPTI cannot be used; the message says why, and what to do."""


class Tracing:
    """CUPTI's activity records of this process. Thread safe."""

    def __init__(self, cupti: ModuleType) -> None:
        self._cupti = cupti
        self._lock = threading.Lock()
        self._users = 0
        self._registered = False
        self._records: list[Any] = []

    def begin(self) -> None:
        """Add a user, such as a profile. The first user starts the recording.

        Raises: NoTracing: CUPTI refuses, for example because another profiler uses it.
        """
        with self._lock:
            if self._users == 0:
                self._start()
            self._users += 1

    def end(self) -> None:
        """Remove a user that `begin` added. The last user stops the recording."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                core().tracer_stop()
                self._disable(_KINDS)
                self._records.clear()

    def collect(self) -> None:
        """Pass the recorded activities to C, which finds the owner of each by its correlation number."""
        with self._lock:
            self._cupti.activity_flush_all(_FORCED)
            records, self._records = self._records, []
            self._deliver(records)

    def _start(self) -> None:
        kinds = self._cupti.ActivityKind
        enabled: list[str] = []
        try:
            if not self._registered:
                self._cupti.activity_register_callbacks(lambda: (_BUFFER_BYTES, 0), self._completed)
                self._registered = True
            for kind in _KINDS:
                self._cupti.activity_enable(getattr(kinds, kind))
                enabled.append(kind)
            functions = ffi.new("ocp_tracer_functions *")
            functions.push, functions.pop = (
                ffi.cast(ffi.typeof(getattr(functions, name)), address)
                for name, address in zip(("push", "pop"), correlation_functions(), strict=True)
            )
            functions.kind = int(self._cupti.ExternalCorrelationKind.CUSTOM2)
        except Exception as error:
            self._disable(enabled)
            raise NoTracing(f"the profile has no GPU activities: CUPTI cannot record them: {error}") from error
        core().tracer_start(functions)

    def _disable(self, kinds: Iterable[str]) -> None:
        for kind in kinds:
            self._cupti.activity_disable(getattr(self._cupti.ActivityKind, kind))

    def _completed(self, activities: list[Any]) -> None:
        self._records.extend(activities)  # CUPTI may call this while the lock is held, on any thread; extend is atomic

    def _deliver(self, records: list[Any]) -> None:
        kinds = self._cupti.ActivityKind
        ours = int(self._cupti.ExternalCorrelationKind.CUSTOM2)
        numbers = {
            record.correlation_id: record.external_id
            for record in records
            if record.kind == kinds.EXTERNAL_CORRELATION and record.external_kind == ours
        }
        offset = clock_offset(self._cupti)
        for record in records:
            number = None if record.kind == kinds.EXTERNAL_CORRELATION else numbers.get(record.correlation_id)
            if number is None:
                continue
            trace = ffi.new("ocp_trace_record *")
            trace.id, trace.launch = number, record.correlation_id
            trace.begin, trace.end = record.start + offset, record.end + offset
            trace.stream, trace.device = record.stream_id, record.device_id
            trace.in_graph = record.graph_id != 0
            name = self._describe(record, trace)
            core().tracer_deliver(trace)
            del name

    def _describe(self, record: Any, trace: Any) -> Any:
        """Set the fields of ``trace`` that depend on ``record.kind``. Return the memory that ``trace`` points to."""
        if record.kind == self._cupti.ActivityKind.MEMCPY:
            copies = self._cupti.ActivityMemcpyKind
            directions = {copies.HTOD: lib.OCP_ACTIVITY_H2D, copies.DTOH: lib.OCP_ACTIVITY_D2H}
            trace.kind, trace.bytes = lib.OCP_ACTIVITY_COPY, record.bytes
            trace.direction = directions.get(record.copy_kind, lib.OCP_ACTIVITY_D2D)
            return None
        if record.kind == self._cupti.ActivityKind.MEMSET:
            trace.kind, trace.bytes = lib.OCP_ACTIVITY_SET, record.bytes
            return None
        trace.kind, trace.dynamic = lib.OCP_ACTIVITY_KERNEL, record.dynamic_shared_memory
        trace.grid = (record.grid_x, record.grid_y, record.grid_z)
        trace.block = (record.block_x, record.block_y, record.block_z)
        trace.kernel = name = ffi.new("char[]", record.name.encode())
        return name


def clock_offset(cupti: ModuleType) -> int:
    """Return the nanoseconds to add to CUPTI's clock to get the monotonic clock."""
    best: tuple[int, int] | None = None
    for _ in range(5):
        before = time.monotonic_ns()
        there = cupti.get_timestamp()
        after = time.monotonic_ns()
        if best is None or after - before < best[0]:
            best = after - before, (before + after) // 2 - there
    assert best is not None
    return best[1]


def correlation_functions() -> tuple[int, int]:
    """Return the addresses of CUPTI's functions that push and pop a correlation number, in the library that
    cupti-python loaded.

    Raises: NoTracing: cupti-python has loaded no library.
    """
    mapped = (line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines())
    path = next((path for path in mapped if Path(path).name.startswith("libcupti.so")), None)
    if path is None:
        raise NoTracing("cupti-python has loaded no libcupti.so")
    library = ctypes.CDLL(path)
    functions = library.cuptiActivityPushExternalCorrelationId, library.cuptiActivityPopExternalCorrelationId
    push, pop = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
    return push, pop


_tracing: Tracing | None = None
_tracing_lock = threading.Lock()


def tracing() -> Tracing:
    """Return the only `Tracing` of the process; the first call makes it.

    Raises:
        NoTracing: cupti-python is not installed, or does not work.
    """
    global _tracing
    with _tracing_lock:
        if _tracing is None:
            try:
                _tracing = Tracing(importlib.import_module("cupti.cupti"))
            except Exception as error:
                raise NoTracing(
                    "the profile has no GPU activities, which need CUPTI (pip install ort-cuda-plugin[profiling]): "
                    f"{error}"
                ) from error
        return _tracing
