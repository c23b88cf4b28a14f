"""CUPTI records in a profile: with a fake of cupti-python, and on a GPU with the real one."""

from __future__ import annotations

import enum
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import ort_cuda_plugin
from encoder import encoder, encoder_inputs
from isolated import add_model
from ort_cuda_plugin.abi.core import ffi
from ort_cuda_plugin.abi.device import Device
from ort_cuda_plugin.ep.device import tracing
from ort_cuda_plugin.ep.device.tracing import NoTracing, Tracing
from profiles import Event, Profile, profiled_session
from streamed_weights import LAYER_BYTES, feeds, layers

FEEDS = encoder_inputs(2, 16)
STREAM = 7


class ActivityKind(enum.IntEnum):
    MEMCPY = 1
    MEMSET = 2
    CONCURRENT_KERNEL = 10
    EXTERNAL_CORRELATION = 39


class ExternalCorrelationKind(enum.IntEnum):
    CUSTOM2 = 5


class ActivityMemcpyKind(enum.IntEnum):
    HTOD = 1
    DTOH = 2
    DTOD = 8


class Cupti:
    """A fake of the module cupti.cupti with what `Tracing` uses. ``report`` adds the records of one driver call."""

    ActivityKind = ActivityKind
    ExternalCorrelationKind = ExternalCorrelationKind
    ActivityMemcpyKind = ActivityMemcpyKind

    def __init__(self) -> None:
        self.enabled: list[int] = []
        self.stack: list[int] = []
        self.leaves: list[int] = []
        """Correlation numbers that were popped right after their push: those of driver calls."""
        self.refused: int | None = None
        self._pending: list[Any] = []
        self._launches = 0
        self._inner = False
        self._completed: Callable[[list[Any]], object] = list
        self._push = ffi.callback("int(int, uint64_t)", self._pushed)
        self._pop = ffi.callback("int(int, uint64_t *)", self._popped)
        self.addresses = tuple(int(ffi.cast("uintptr_t", function)) for function in (self._push, self._pop))

    def _pushed(self, kind: int, number: int) -> int:
        assert kind == ExternalCorrelationKind.CUSTOM2
        self.stack.append(number)
        self._inner = True
        return 0

    def _popped(self, kind: int, number: Any) -> int:
        number[0] = self.stack.pop()
        if self._inner:
            self.leaves.append(number[0])
        self._inner = False
        return 0

    def activity_enable(self, kind: int) -> None:
        if kind == self.refused:
            raise RuntimeError("another tool profiles")
        self.enabled.append(kind)

    def activity_disable(self, kind: int) -> None:
        self.enabled.remove(kind)

    def activity_register_callbacks(
        self, requested: Callable[[], tuple[int, int]], completed: Callable[[list[Any]], None]
    ) -> None:
        assert requested()[0] > 0
        self._completed = completed

    def activity_flush_all(self, flag: int) -> None:
        assert flag == 1
        pending, self._pending = self._pending, []
        self._completed(pending)

    @staticmethod
    def get_timestamp() -> int:
        return time.monotonic_ns() - 10**9

    def report(self, number: int, *records: dict[str, Any], in_graph: bool = False) -> None:
        self._launches += 1
        common = {"correlation_id": self._launches, "device_id": 0, "stream_id": STREAM, "graph_id": int(in_graph)}
        external = {"external_id": number, "external_kind": ExternalCorrelationKind.CUSTOM2}
        # CUPTI delivers records in any order. Here the record with the external number comes last.
        for record in records:
            start = self.get_timestamp()
            self._pending.append(SimpleNamespace(**common, **record, start=start, end=start + 1000))
        kind = ActivityKind.EXTERNAL_CORRELATION
        self._pending.append(SimpleNamespace(kind=kind, correlation_id=self._launches, **external))


def kernel(name: str) -> dict[str, Any]:
    sizes = {f"{what}_{axis}": 1 + number for what in ("grid", "block") for number, axis in enumerate("xyz")}
    return {"kind": ActivityKind.CONCURRENT_KERNEL, "name": name, "dynamic_shared_memory": 64, **sizes}


def copied(kind: ActivityMemcpyKind, nbytes: int) -> dict[str, Any]:
    return {"kind": ActivityKind.MEMCPY, "copy_kind": kind, "bytes": nbytes}


@pytest.fixture
def cupti(monkeypatch: pytest.MonkeyPatch) -> Cupti:
    stand_in = Cupti()
    monkeypatch.setattr(tracing, "correlation_functions", lambda: stand_in.addresses)
    return stand_in


@pytest.fixture
def traced(cupti: Cupti) -> Iterator[Tracing]:
    made = Tracing(cupti)  # type: ignore[arg-type]
    made.begin()
    yield made
    made.end()
    assert cupti.enabled == []
    assert cupti.stack == []


@functools.lru_cache
def small_encoder() -> bytes:
    return bytes(encoder(layers=1, hidden=64, heads=4).SerializeToString())


def split(profile: Profile) -> tuple[list[Event], list[Event]]:
    """Return the kernels that the emulated device reported itself, and the activities from CUPTI's records."""
    ours = [e for e in profile.device if e.args["stream"] == f"0x{STREAM:x}"]
    return [e for e in profile.kernels if e not in ours], ours


def nodes(event: Event) -> tuple[str, list[str], list[str]]:
    return event.name, event.args["nodes"], event.args["op_types"]


def test_a_launch_gets_the_nodes_of_its_record(cupti: Cupti, traced: Tracing, tmp_path: Path) -> None:
    session = profiled_session(small_encoder(), tmp_path, {"automatic_cuda_graphs": "0"})
    session.run(None, FEEDS)  # only the first Run also has launches that precompute values
    cupti.leaves.clear()
    session.run(None, FEEDS)
    launches = list(cupti.leaves)
    for number in launches:
        cupti.report(number, kernel(f"kernel_{number}"))
    traced.collect()
    theirs, ours = split(Profile(session.end_profiling()))
    own = [e for e in theirs if e.args["ort_event_id"] == theirs[-1].args["ort_event_id"]]
    assert len(ours) == len(own) > 5
    for event, expected, number in zip(ours, own, launches, strict=True):
        assert event.name == f"kernel_{number}"
        for key in ("nodes", "op_types", "ort_event", "ort_event_id", "cluster"):
            assert event.args[key] == expected.args[key]
        assert (event.args["grid"], event.args["dynamic_shared_bytes"]) == ([1, 2, 3], "64")
        assert (event.args["graph"], event.args["duration_ns"], event.thread) == ("0", "1000", STREAM)
        assert theirs[0].begin < event.begin


def test_nodes_of_a_graph_are_found_by_their_order(cupti: Cupti, traced: Tracing, tmp_path: Path) -> None:
    session = profiled_session(small_encoder(), tmp_path)
    for _ in range(6):
        cupti.leaves.clear()
        before = ort_cuda_plugin.counters()["graph_replays"]
        session.run(None, FEEDS)
    assert ort_cuda_plugin.counters()["graph_replays"] == before + 1
    (launch,) = cupti.leaves
    probe = profiled_session(small_encoder(), tmp_path / "probe", {"automatic_cuda_graphs": "0"})
    probe.run(None, FEEDS)
    own, _ = split(Profile(probe.end_profiling()))
    own = [e for e in own if e.args["ort_event_id"] == own[-1].args["ort_event_id"]]
    cupti.report(launch, *(kernel(e.name) for e in own), in_graph=True)
    traced.collect()
    _, ours = split(Profile(session.end_profiling()))
    assert [nodes(e) for e in ours] == [nodes(e) for e in own]
    assert {e.args["graph"] for e in ours} == {"1"}


def test_an_update_of_a_graph_has_no_correlation_number(cupti: Cupti, traced: Tracing, tmp_path: Path) -> None:
    """The driver enqueues nothing when a node gets a new address: the launch is the only call with records."""
    session = profiled_session(small_encoder(), tmp_path)
    expected = session.run(None, FEEDS)
    device = Device.emulated()
    binding = session.io_binding()
    for name, array in FEEDS.items():
        binding.bind_cpu_input(name, array)
    places = [[device.empty(array.shape, array.dtype) for array in expected] for _ in range(2)]
    for results in (*[places[0]] * 5, places[1]):
        for output, result in zip(session.get_outputs(), results, strict=True):
            ort_cuda_plugin.bind_output(binding, output.name, result)
        cupti.leaves.clear()
        before = ort_cuda_plugin.counters()
        session.run_with_iobinding(binding)
    after = ort_cuda_plugin.counters()
    changed = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert changed.get("graph_replays") == 1, changed
    assert changed.get("graph_updates", 0) > 0, changed
    assert len(cupti.leaves) == 1, changed
    for result, array in zip(places[1], expected, strict=True):
        np.testing.assert_array_equal(device.download(result), array)


def test_uploads_of_a_graph_are_found_among_its_kernels(cupti: Cupti, traced: Tracing, tmp_path: Path) -> None:
    source, x = layers(4, batch=2).SerializeToString(), feeds(2)
    probe = profiled_session(source, tmp_path, {"weight_budget": "3M"})
    probe.run(None, x)
    name = next(e.name for e in split(Profile(probe.end_profiling()))[0])
    session = profiled_session(source, tmp_path, {"weight_budget": "3M"})
    for _ in range(6):
        cupti.leaves.clear()
        before = ort_cuda_plugin.counters()
        session.run(None, x)
    after = ort_cuda_plugin.counters()
    changed = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert changed.get("graph_replays") == 1, changed
    (launch,) = cupti.leaves
    upload = copied(ActivityMemcpyKind.HTOD, LAYER_BYTES)
    layer = kernel(name)
    cupti.report(launch, layer, upload, upload, layer, layer, upload, layer, in_graph=True)
    traced.collect()
    _, ours = split(Profile(session.end_profiling()))
    assert [e.args["nodes"][-1] for e in ours] == [f"tanh{i}" for i in (0, 1, 2, 1, 2, 3, 3)]


def test_copies_belong_to_the_event_that_they_are_in(cupti: Cupti, traced: Tracing, tmp_path: Path) -> None:
    session = profiled_session(add_model(), tmp_path)
    cupti.leaves.clear()
    session.run(None, {name: np.ones(8, np.float32) for name in "ab"})
    run = cupti.leaves[0] - 3  # model_run, the executor and the node come before the launch
    cupti.report(run, copied(ActivityMemcpyKind.HTOD, 32))
    cupti.report(run, copied(ActivityMemcpyKind.DTOH, 16))
    cupti.report(cupti.leaves[0] + 10**6, kernel("nobody's"))
    traced.collect()
    _, ours = split(Profile(session.end_profiling()))
    assert [(e.name, e.args["bytes"], e.args["ort_event"]) for e in ours] == [
        ("memcpy_host_to_device", "32", "model_run"),
        ("memcpy_device_to_host", "16", "model_run"),
    ]


def test_a_cupti_that_refuses_is_left_as_it_was(cupti: Cupti) -> None:
    cupti.refused = ActivityKind.MEMSET
    with pytest.raises(NoTracing, match="another tool profiles"):
        Tracing(cupti).begin()  # type: ignore[arg-type]
    assert cupti.enabled == []


def test_where_cupti_python_is_missing_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_tracing", None)
    monkeypatch.setitem(__import__("sys").modules, "cupti", None)
    with pytest.raises(NoTracing, match=r"pip install ort-cuda-plugin\[profiling\]"):
        tracing.tracing()


@pytest.mark.gpu
def test_a_gpu_profile_names_the_nodes_of_each_kernel(tmp_path: Path) -> None:
    try:
        Device.cuda(0)
    except RuntimeError as error:
        pytest.skip(str(error))
    pytest.importorskip("cupti.cupti")
    options = ort.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    session = ort_cuda_plugin.session(small_encoder(), sess_options=options)
    for _ in range(6):
        session.run(None, FEEDS)
    profile = Profile(session.end_profiling())
    assert {e.args["graph"] for e in profile.kernels} == {"0", "1"}
    runs: dict[str, list[Event]] = {}
    for event in profile.kernels:
        if event.args.get("ort_event", "").endswith("_kernel_time"):
            runs.setdefault(event.args["ort_event_id"], []).append(event)
    first, *_, last = runs.values()
    assert [nodes(e) for e in first] == [nodes(e) for e in last]
    assert all(e.args["nodes"] for e in first)
