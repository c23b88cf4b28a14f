"""Writes Runs as a timeline in Chrome's trace format, for Perfetto and ``chrome://tracing``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..estimate.model import Estimate
from ..gpus.accuracy import error_text, range_text, step_range
from .collect import Event, Plans, is_of_device

_HOST, _DEVICE, _ESTIMATED = 1, 2, 3


def timeline(events: Sequence[Event], plans: Plans, device_name: str, estimate: Estimate | None) -> dict[str, Any]:
    """Return the trace of all Runs of a profile, with separate processes for host and device.

    An estimate is a third process with the steps of one Run, end to end.
    """
    return {"traceEvents": [*_host_and_device(events, plans, device_name), *_estimated(estimate)]}


def _host_and_device(events: Sequence[Event], plans: Plans, device_name: str) -> Iterator[dict[str, Any]]:
    yield _named(_HOST, 0, "process_name", "host: ONNX Runtime")
    yield _named(_DEVICE, 0, "process_name", f"device: {device_name}")
    rows: dict[str, int] = {}
    for event in events:
        if event.get("ph") != "X":
            continue
        if not is_of_device(event):
            texts = {key: value for key, value in event.get("args", {}).items() if isinstance(value, str)}
            yield _event(event["name"], event.get("cat", ""), _HOST, event["tid"], event["ts"], event["dur"], texts)
            continue
        arguments: dict[str, Any] = dict(event["args"])
        stream = str(arguments.get("stream", ""))
        if stream not in rows:
            rows[stream] = len(rows) + 1
            yield _named(_DEVICE, rows[stream], "thread_name", f"stream {stream}")
        microseconds = int(arguments["duration_ns"]) / 1000
        if (planned := plans.step(event)) is not None:
            moved = planned["read"] + planned["written"]
            arguments |= {"read": planned["read"], "written": planned["written"]}
            arguments["GB/s"] = round(moved / microseconds / 1e3, 2) if microseconds else 0.0
        yield _event(event["name"], arguments["kind"], _DEVICE, rows[stream], event["ts"], microseconds, arguments)


def _estimated(estimate: Estimate | None) -> Iterator[dict[str, Any]]:
    if estimate is None:
        return
    yield _named(_ESTIMATED, 0, "process_name", f"estimate: {estimate.label}. {error_text()}")
    begin = 0.0
    for step in estimate.steps:
        arguments = {"nodes": list(step.nodes), "bound": step.bound, "of peak": step.share}
        arguments["us"] = range_text(step_range(step.seconds))
        yield _event(step.name, step.kind, _ESTIMATED, 1, begin, step.seconds * 1e6, arguments)
        begin += step.seconds * 1e6


def _named(process: int, thread: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": {"name": name}}


def _event(
    name: str, category: str, process: int, thread: int, begin: float, duration: float, arguments: dict[str, Any]
) -> dict[str, Any]:
    shared = {"pid": process, "tid": thread, "ts": begin, "dur": duration}
    return {"ph": "X", "name": name, "cat": category or "host", **shared, "args": arguments}
