"""A plan as JSON data: the memory traffic of each step, and traffic and arithmetic of each ONNX node before fusion."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ...compiler.kernel import KernelSpec
from ..steps.schedule import schedule_data
from ..steps.steps import Contract, Convolve
from ..steps.trace import Copy, DeviceLoop, HostCall, Launch, LibraryCall, Memset, ReadBack, Recordable, Step
from .program_text import ProgramText
from .traffic import arithmetic, traffic


def plan_record(
    shapes: Sequence[Sequence[int] | None],
    lowered: Iterable[Step],
    once: Iterable[Recordable],
    launches: Iterable[Recordable],
    text: ProgramText,
    history: Sequence[str],
) -> dict[str, Any]:
    """Return the record of a plan, as data for JSON.

    ``shapes`` are the input shapes that the plan was built for, None for a guessed shape. ``launches`` are the steps of
    a Run in order, ``once`` those that run before the first Run. ``text`` names their tensors, and ``history`` is the
    output of a `ProgramHistory` with these names. The record's ``nodes`` holds bytes and operations of each node,
    counted from its unfused steps in ``lowered``, and the operand type of a GEMM or a convolution as a number of ONNX's
    DataType.
    """
    nodes: dict[str, dict[str, float]] = {}
    for step in lowered:
        moved, flops = traffic([step]).total, arithmetic(step)
        for node in step.nodes:
            cost = nodes.setdefault(node.own_name, {"bytes": 0, "flops": 0.0})
            cost["bytes"] += moved // len(step.nodes)
            cost["flops"] += flops / len(step.nodes)
            if isinstance(step, Contract | Convolve):
                cost["type"] = step.operands[0].dtype.onnx
    return {
        "shapes": [None if shape is None else list(shape) for shape in shapes],
        "steps": [_step(step, text) for step in launches if not isinstance(step, ReadBack)],
        "once": [_step(step, text) for step in once if not isinstance(step, ReadBack)],
        "nodes": nodes,
        "history": list(history),
    }


def read_plans(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the most recent plan of each cluster from ``folder``, which the option ``program_folder`` names."""
    found = {}
    for path in sorted(folder.glob("*.jsonl")):
        if lines := path.read_text(encoding="utf-8").splitlines():
            plan = json.loads(lines[-1])
            found[plan["cluster"]] = plan
    return found


def _step(step: Recordable, text: ProgramText) -> dict[str, Any]:
    moved = traffic([step])
    return {
        "kind": _KINDS[type(step)],
        "name": step.kernel.name if isinstance(step, Launch) else "",
        "nodes": [node.own_name for node in step.nodes],
        "op_types": [node.op_type for node in step.nodes],
        "read": moved.read,
        "written": moved.written,
        "note": step.note if isinstance(step, Launch | LibraryCall) else "",
        **({"schedule": schedule_data(step.schedule)} if isinstance(step, Launch) and step.schedule else {}),
        "lines": text.details(step),
        "kernel": _kernel(step.kernel) if isinstance(step, Launch) else None,
    }


def _kernel(spec: KernelSpec) -> dict[str, Any] | None:
    """Return the fields of the spec of a kernel; None for a kernel that has no Python source for Numba."""
    if type(spec) is not KernelSpec:
        return None
    return {name: getattr(spec, name) for name in ("name", "signature", "source", "launch_bounds", "resident")}


_KINDS: dict[type, str] = {
    Launch: "kernel",
    LibraryCall: "library",
    Copy: "copy",
    Memset: "memset",
    HostCall: "call of Python",
    DeviceLoop: "loop",
}
