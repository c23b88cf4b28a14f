"""Computes the profile of a typical Run from the events of ONNX Runtime's profile of many equal Runs.

Device times are medians over these Runs, host times of nodes are means.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ..abi.result_table import Table
from ..estimate.libraries import peak_kind
from ..gpus import Gpu, gpu, names
from ..program.analysis.plan_record import read_plans

Event: TypeAlias = "Mapping[str, Any]"
View: TypeAlias = Literal["nodes", "steps", "kernels", "host"]
"""A list of records in a `Profile`."""
_KERNEL_TIME = "_kernel_time"
COMPUTING = ("kernel", "library")
"""Kinds of steps that compute. Other steps move bytes, some of them between host and device."""


@dataclass(frozen=True)
class Step:
    """A kernel, copy or memset of a Run on the device; ``microseconds`` is its median time, ``share`` its fraction of
    the time of all steps.

    ``bytes`` and ``flops`` are its traffic and arithmetic, None if unknown. ``peak`` is the larger of two fractions:
    achieved bytes/s of the GPU's peak bytes/s, and achieved flop/s of its peak flop/s; None if the GPU's peaks are
    unknown. ``begin`` is the time from the start of the Run, microseconds. ``estimated`` is this step's fraction of the
    estimated time of its nodes, microseconds; None without an estimate.
    """

    name: str
    kind: str
    nodes: tuple[str, ...]
    op_types: tuple[str, ...]
    cluster: str
    begin: float
    microseconds: float
    share: float
    bytes: int | None = None
    flops: float | None = None
    peak: float | None = None
    estimated: float | None = None


@dataclass(frozen=True)
class NodeTime:
    """Device time of a node: its part (`parts`) of the times of the steps that compute it.

    ``share`` is the fraction of the time of all steps, ``steps`` the number of steps that compute the node, and
    ``estimated`` the node's time in the estimate, microseconds; None without an estimate.
    """

    name: str
    op_type: str
    microseconds: float
    share: float
    steps: int
    estimated: float | None = None


@dataclass(frozen=True)
class KernelTime:
    """The total time and bytes of all launches of a kernel, or of all copies of one kind."""

    name: str
    kind: str
    launches: int
    microseconds: float
    share: float
    bytes: int | None


@dataclass(frozen=True)
class HostTime:
    """Mean host time per Run of a fused node or of another provider's node.

    Work that the emulated device does on the calling thread is subtracted.
    """

    name: str
    op_type: str
    provider: str
    microseconds: float


@dataclass(frozen=True)
class Profile:
    """The profile of a Run.

    Times are microseconds. ``run`` is the time for which the application waits, ``host_alone`` the time during ``run``
    in which the device is idle, ``device`` the time of all work on the device. ``accounted`` is the fraction of
    ``device`` that ``nodes`` account for: the rest are copies that belong to no node. ``gpu``: the GPU of the estimate.
    ``is_emulated``: the times are those of the emulated device, which say nothing about a GPU.

    Examples:
        >>> profile = ort_cuda_plugin.profile("model.onnx", {"x": array})
        >>> [step.kind for step in profile.steps if step.nodes]
        ['kernel']
    """

    model: str
    device_name: str
    run: float
    device: float
    host_alone: float
    accounted: float
    steps: tuple[Step, ...]
    nodes: tuple[NodeTime, ...]
    kernels: tuple[KernelTime, ...]
    host: tuple[HostTime, ...]
    gpu: str = ""
    is_emulated: bool = False

    def table(self, by: View = "steps") -> Table[Any]:
        """Return the records of one kind: ``nodes``, ``steps``, ``kernels`` or ``host``.

        Raises:
            ValueError: there is no such kind.
        """
        row_types = {"nodes": NodeTime, "steps": Step, "kernels": KernelTime, "host": HostTime}
        if by not in row_types:
            raise ValueError(f"by={by!r}: expected one of {', '.join(map(repr, row_types))}")
        return Table(row_types[by], getattr(self, by))

    def to_dict(self, by: View = "steps") -> dict[str, list[Any]]:
        """Return the columns of `table`, for ``pandas.DataFrame``."""
        return self.table(by).to_dict()

    def _repr_html_(self) -> str:
        note = " Times of the emulated device say nothing about a GPU." if self.is_emulated else ""
        line = f"{self.model} on {self.device_name}: a Run takes {self.run:.1f} us, the device {self.device:.1f} us."
        return f"<p>{escape(line)}{note}</p>{self.table()._repr_html_()}"


@dataclass(frozen=True)
class Plans:
    """The last plan of each cluster, from `program.analysis.plan_record`.

    ``steps`` are the plan's steps, by the name of the cluster; ``costs`` the arithmetic and bytes, by the node's name.
    """

    steps: Mapping[str, Sequence[Mapping[str, Any]]]
    costs: Mapping[str, Mapping[str, float]]

    @classmethod
    def read(cls, folder: Path) -> Plans:
        """Read the plans that the option ``program_folder`` wrote."""
        plans = read_plans(folder)
        steps = {name: plan["steps"] for name, plan in plans.items()}
        costs = {node: cost for plan in plans.values() for node, cost in plan["nodes"].items()}
        return cls(steps, costs)

    def step(self, event: Event) -> Mapping[str, Any] | None:
        """Return the plan's step that an event belongs to; None if there is none, or the event is of another plan."""
        arguments = event["args"]
        steps = self.steps.get(arguments.get("cluster", ""), ())
        number = int(arguments.get("step", -1))
        if not 0 <= number < len(steps) or list(steps[number]["nodes"]) != list(arguments["nodes"]):
            return None
        return steps[number]


def collect(events: Sequence[Event], runs: int, plans: Plans, model: str, device_name: str) -> Profile:
    """Collect the profile of the last ``runs`` Runs."""
    windows = windows_of_runs(events, runs)
    gpu_here = known_gpu(device_name)
    balance = gpu_here or gpu("h100")
    by_run = [_device_events(events, window) for window in windows]
    length = statistics.mode(map(len, by_run)) if by_run else 0
    complete = [number for number, found in enumerate(by_run) if len(found) == length]
    columns = list(zip(*(by_run[number] for number in complete), strict=True))
    starts = [windows[number][0] for number in complete]
    total = sum(statistics.median(_duration(event) for event in column) for column in columns) or 1.0
    steps = [_step(column, starts, total, plans) for column in columns]
    steps = _with_arithmetic(_sharing_bytes(steps, [column[0] for column in columns]), plans, gpu_here)
    nodes = _by_node(steps, plans, balance)
    return Profile(
        model,
        device_name,
        run=statistics.median(end - start for start, end in windows) if windows else 0.0,
        host_alone=statistics.median(map(_host_alone, windows, by_run)) if windows else 0.0,
        device=sum(step.microseconds for step in steps),
        accounted=sum(node.share for node in nodes),
        steps=tuple(steps),
        nodes=tuple(nodes),
        kernels=tuple(_by_kernel(steps)),
        host=tuple(_host(events, windows)),
    )


def known_gpu(device_name: str) -> Gpu | None:
    """Return the described GPU that the driver calls ``device_name``; None if no description has that name."""
    words = device_name.upper().replace("RTX ", "RTX").replace("-", " ").split()
    return next((gpu(key) for key in names() if key.upper() in words), None)


def arithmetic_seconds(cost: Mapping[str, float], device: Gpu) -> float:
    """Return the seconds of a node's arithmetic at the peak rate for its type; float32 counts as TF32."""
    return cost.get("flops", 0.0) / device.flops[peak_kind(int(cost.get("type", 1)), tf32=True)]


def windows_of_runs(events: Iterable[Event], runs: int) -> list[tuple[float, float]]:
    """Return the begin and end of each of the last ``runs`` Runs, microseconds."""
    found = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == "model_run")
    return found[-runs:]


def is_of_device(event: Event) -> bool:
    """Return whether an event is work of one of the plugin's devices."""
    return "ort_event_id" in event.get("args", {})


def within(events: Iterable[Event], window: tuple[float, float]) -> list[Event]:
    """Return the events of the Run that lasted for ``window``, in the order of their begin.

    ORT rounds times down, so an event may seem to begin a microsecond before its Run.
    """
    start, end = window
    return sorted((e for e in events if start - 1 <= e["ts"] <= end), key=lambda e: float(e["ts"]))


def _device_events(events: Iterable[Event], window: tuple[float, float]) -> list[Event]:
    return within(filter(is_of_device, events), window)


def _duration(event: Event) -> float:
    return int(event["args"]["duration_ns"]) / 1000


def _host_alone(window: tuple[float, float], events: Iterable[Event]) -> float:
    """Return the time of a Run during which none of its device ``events`` (sorted by begin) is in progress."""
    alone, until = 0.0, window[0]
    for event in events:
        alone += max(0.0, event["ts"] - until)
        until = max(until, event["ts"] + _duration(event))
    return alone + max(0.0, window[1] - until)


def _step(column: Sequence[Event], starts: Sequence[float], total: float, plans: Plans) -> Step:
    arguments = column[0]["args"]
    time = statistics.median(map(_duration, column))
    planned = plans.step(column[0])
    moved = int(arguments["bytes"]) if "bytes" in arguments else None
    if planned is not None:
        moved = int(planned["read"] + planned["written"])
    return Step(
        column[0]["name"],
        arguments["kind"],
        tuple(arguments["nodes"]),
        tuple(arguments["op_types"]),
        arguments.get("cluster", ""),
        statistics.median(float(event["ts"]) - start for event, start in zip(column, starts, strict=True)),
        time,
        time / total,
        moved,
    )


def _sharing_bytes(steps: Sequence[Step], events: Sequence[Event]) -> list[Step]:
    """Divide the bytes of each library call equally among its kernels.

    The plan has one step, with the bytes of the whole call; the profile has an event for each kernel of the library.
    """

    def call(number: int) -> tuple[str, str] | None:
        arguments = events[number]["args"]
        return (steps[number].cluster, arguments["step"]) if arguments["kind"] == "library" else None

    found: list[Step] = []
    for _, group in groupby(range(len(steps)), key=lambda number: call(number) or number):
        numbers = list(group)
        parts_of = [steps[number] for number in numbers]
        found += [step if step.bytes is None else replace(step, bytes=step.bytes // len(numbers)) for step in parts_of]
    return found


def _with_arithmetic(steps: Sequence[Step], plans: Plans, device: Gpu | None) -> list[Step]:
    """Assign the arithmetic of each node to the kernel that takes longest among those that compute the node."""
    longest: dict[str, int] = {}
    for number, step in enumerate(steps):
        for node in step.nodes if step.kind in COMPUTING else ():
            if node not in longest or step.microseconds > steps[longest[node]].microseconds:
                longest[node] = number
    found = []
    for number, step in enumerate(steps):
        costs = [plans.costs[node] for node in step.nodes if longest.get(node) == number and node in plans.costs]
        if step.kind in COMPUTING and step.bytes is not None:
            peak = None
            if device is not None and step.microseconds:
                arithmetic = sum(arithmetic_seconds(cost, device) for cost in costs)
                peak = max(step.bytes / device.dram, arithmetic) * 1e6 / step.microseconds
            step = replace(step, flops=sum(cost["flops"] for cost in costs), peak=peak)
        found.append(step)
    return found


def _by_node(steps: Iterable[Step], plans: Plans, balance: Gpu) -> list[NodeTime]:
    """Return the device time of each node, the longest first; for ``balance`` see `parts`."""
    times: dict[str, float] = {}
    counts: dict[str, int] = {}
    types: dict[str, str] = {}
    total = 0.0
    for step in steps:
        total += step.microseconds
        types.update(zip(step.nodes, step.op_types, strict=True))
        for node, part in parts(step.nodes, plans, balance).items():
            times[node] = times.get(node, 0.0) + part * step.microseconds
            counts[node] = counts.get(node, 0) + 1
    order = sorted(times, key=lambda node: -times[node])
    return [NodeTime(node, types[node], times[node], times[node] / (total or 1.0), counts[node]) for node in order]


def parts(nodes: Sequence[str], plans: Plans, balance: Gpu) -> dict[str, float]:
    """Return the fraction of a step's time that each of its ``nodes`` accounts for.

    If the step has GEMMs or convolutions, these divide the time by their arithmetic at the rates of the GPU
    ``balance``. Otherwise each node's fraction is proportional to the bytes that it would move alone.
    """
    costs = {node: plans.costs.get(node, {}) for node in nodes}
    weights = {node: arithmetic_seconds(cost, balance) for node, cost in costs.items()}
    if not any(weights.values()):
        weights = {node: cost.get("bytes", 0.0) for node, cost in costs.items()}
    total = sum(weights.values())
    return {node: weight / total if total else 1 / len(weights) for node, weight in weights.items()}


def _by_kernel(steps: Sequence[Step]) -> list[KernelTime]:
    groups: dict[tuple[str, str], list[Step]] = {}
    for step in steps:
        groups.setdefault((step.name, step.kind), []).append(step)
    found = [
        KernelTime(
            name,
            kind,
            len(group),
            sum(step.microseconds for step in group),
            sum(step.share for step in group),
            sum(step.bytes for step in group if step.bytes is not None) if group[0].bytes is not None else None,
        )
        for (name, kind), group in groups.items()
    ]
    return sorted(found, key=lambda kernel: -kernel.microseconds)


def _host(events: Sequence[Event], windows: Sequence[tuple[float, float]]) -> list[HostTime]:
    """Return the mean host time of each fused node, and of each node of other providers."""
    device = [e for e in events if is_of_device(e)]
    times: dict[str, list[float]] = {}
    kinds: dict[str, tuple[str, str]] = {}
    for event in events:
        if event.get("cat") != "Node" or not event["name"].endswith(_KERNEL_TIME):
            continue
        begin, end = event["ts"], event["ts"] + event["dur"]
        if not any(start <= begin < stop for start, stop in windows):
            continue
        inside = sum(_duration(e) for e in device if e["tid"] == event["tid"] and begin - 1 <= e["ts"] <= end)
        name = event["name"].removesuffix(_KERNEL_TIME)
        times.setdefault(name, []).append(max(event["dur"] - inside, 0.0))
        arguments = event["args"]
        kinds[name] = (arguments.get("op_name", ""), arguments.get("provider", ""))
    found = [HostTime(name, *kinds[name], sum(each) / len(windows)) for name, each in times.items()]
    return sorted(found, key=lambda time: -time.microseconds)
