"""Alternating Runs of several providers in one process, and a report for each provider."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import ort_cuda_plugin
from ort_cuda_plugin import models
from ort_cuda_plugin.benchmark import sides
from ort_cuda_plugin.benchmark.sides import CPU, PLUGIN, Feeds, Runner
from ort_cuda_plugin.profiles.collect import is_of_device, windows_of_runs, within

TOLERANCES = {"float32": 1e-3, "float16": 2e-2, "int8": 1e-1}
"""Bounds of max|a-b|/max|b| against the CPU provider, by the model's element type.

In int8 models, another summation order moves some values by a quantization step.
"""


@dataclass(frozen=True)
class SideReport:
    """The figures of one provider. Times are in milliseconds. ``throughput`` is batch items per second.

    ``host_share`` is the fraction of a median Run in which the device is idle, None if the profile has no device
    events. ``ratio`` is the median, over the turns of `alternate`, of this side's time divided by the plugin's. It is
    NaN if the plugin is not measured. ``error`` is max|a-b|/max|b| against the CPU provider, None if the CPU provider
    cannot run the model. Three figures are measured in separate processes, and None if they are not measured:
    ``device_bytes``, the device memory that the session holds after its first Run, and ``cold_s`` and ``warm_s``, the
    seconds of session creation and first Run with an empty and with a filled kernel cache.
    """

    p50: float
    p90: float
    p99: float
    mean: float
    throughput: float
    ratio: float
    error: float | None
    host_share: float | None = None
    cold_s: float | None = None
    warm_s: float | None = None
    device_bytes: int | None = None


@dataclass
class ModelReport:
    """The figures of one model: those of the plugin, and a `SideReport` for each provider.

    ``launches``, ``library_calls`` and ``graph_replays`` are averages per Run of the plugin after the warm-up,
    ``python_calls`` is the total of these Runs.
    """

    model: str
    device: str
    emulated: bool
    batch: int
    dtype: str
    tolerance: float
    launches: float
    library_calls: float
    graph_replays: float
    python_calls: int
    sides: dict[str, SideReport] = field(default_factory=dict)
    not_compared: str = ""
    """The reason why the CPU provider cannot run the model; "" if it can."""
    estimate: dict[str, Any] | None = None
    """The performance model's estimate: the GPU's name, a sentence about the accuracy of estimates, the microseconds of
    a Run, their range as text, the microseconds of the Run's roofline, and the bytes of device memory traffic.
    None if nothing was estimated."""

    @property
    def is_right(self) -> bool:
        return all(side.error is None or side.error <= self.tolerance for side in self.sides.values())


@dataclass(frozen=True)
class Task:
    """A measurement: a model file, the inputs, the outputs to compare, and the numbers of Runs."""

    name: str
    source: str
    feeds: Feeds
    names: Sequence[str]
    batch: int
    dtype: str
    emulate: bool
    runs: int
    warmup: int
    operators: Sequence[str] = ()
    """Files that register the model's custom operators, for separate processes."""


def measure(
    task: Task,
    chosen: Sequence[str],
    progress: Callable[[Sequence[int]], Iterable[int]],
    may_lack: Collection[str] = (),
) -> ModelReport:
    """Compare the results of the sides ``chosen`` (see `sides`) with the CPU provider's, then time the sides in turn.

    Leaves out a side in ``may_lack`` that cannot run the model. Raises SideError for any other side that cannot.
    """
    runners = {}
    for side in chosen:
        try:
            runners[side] = _runner(task, side, sides.create_session(side, task.source, task.emulate))
        except sides.LackingSideError:
            if side not in may_lack:
                raise
    errors, not_compared = _errors(task, runners)
    for each in runners.values():
        for _ in range(task.warmup):
            each.run()
    before = ort_cuda_plugin.counters()
    times = alternate(list(runners.values()), progress(range(task.runs)))
    after = ort_cuda_plugin.counters()
    grown = {name: after[name] - before[name] for name in after}
    own = times.get(PLUGIN)
    report = ModelReport(
        model=task.name,
        device=next(device.name for device in ort_cuda_plugin.devices() if device.emulated == task.emulate),
        emulated=task.emulate,
        batch=task.batch,
        dtype=task.dtype,
        tolerance=TOLERANCES[task.dtype],
        launches=grown["launches"] / task.runs,
        library_calls=grown["library_calls"] / task.runs,
        graph_replays=grown["graph_replays"] / task.runs,
        python_calls=grown["python_calls"],
        not_compared=not_compared,
    )
    for side, seconds in times.items():
        ratio = statistics.median(a / b for a, b in zip(seconds, own, strict=True)) if own else float("nan")
        report.sides[side] = summary(seconds, task.batch, ratio, errors[side])
    return report


def alternate(runners: Sequence[Runner], turns: Iterable[int]) -> dict[str, list[float]]:
    """Return the seconds of each Run by side. Each turn runs all sides once, and starts with a different side."""
    times: dict[str, list[float]] = {each.side: [] for each in runners}
    for turn in turns:
        first = turn % len(runners)
        for each in (*runners[first:], *runners[:first]):
            times[each.side].append(each.seconds())
    return times


def summary(seconds: Sequence[float], batch: int, ratio: float, error: float | None) -> SideReport:
    p50, p90, p99 = (float(value) * 1e3 for value in np.percentile(seconds, [50, 90, 99]))
    return SideReport(p50, p90, p99, statistics.mean(seconds) * 1e3, batch / p50 * 1e3, ratio, error)


def device_milliseconds(task: Task, side: str) -> float | None:
    """Profile a new session; return the milliseconds of device work in a Run, None without device events."""
    with tempfile.TemporaryDirectory() as folder:
        session = sides.create_session(side, task.source, task.emulate, str(Path(folder, "profile")))
        runner = _runner(task, side, session)
        for _ in range(_PROFILED):
            runner.run()
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    return device_work(events, _PROFILED)


def device_work(events: Sequence[Mapping[str, Any]], runs: int) -> float | None:
    """Return the median milliseconds of device events in a Run, over the profile's last ``runs`` Runs.

    Return None if the profile has no device events.
    """
    work = [event for event in events if is_of_device(event) or event.get("cat") == "Kernel"]
    windows = windows_of_runs(events, runs)
    if not work or not windows:
        return None
    return float(statistics.median(sum(event["dur"] for event in within(work, window)) for window in windows)) / 1e3


_PROFILED = 6


def _runner(task: Task, side: str, session: Any) -> Runner:
    return sides.runner(side, session, task.emulate, task.feeds, task.names)


def _errors(task: Task, runners: Mapping[str, Runner]) -> tuple[Mapping[str, float | None], str]:
    """Return max|a-b|/max|b| of each side against the CPU provider, and "".

    If the CPU provider cannot run the model, return None for each side, and the reason.
    """
    reference = runners.get(CPU)
    if reference is None:
        try:
            session = sides.create_session(CPU, task.source, task.emulate)
        except sides.LackingSideError as error:
            return dict.fromkeys(runners), str(error)
        expected = session.run(list(task.names), dict(task.feeds))
    for each in runners.values():
        each.run()
    if reference is not None:
        expected = reference.results()
    errors = {
        side: max(
            models.relative_error(np.asarray(a), np.asarray(b)) for a, b in zip(each.results(), expected, strict=True)
        )
        for side, each in runners.items()
    }
    return errors, ""
