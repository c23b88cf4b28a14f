"""Describes the contents of a context as plain data, for people and programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..model.ir import DType
from ..plan.decoder import decode
from ..plan.format import RecordKind
from ..plan.format import version as plan_version
from .guards import Guards
from .reader import Context
from .storage.container import Container
from .storage.errors import MALFORMED
from .storage.graph_data import decode_graph

MAX_GUARDS = 50
"""Maximum number of guards of a plan that are printed."""


def describe(container: Container) -> dict[str, Any]:
    """Return the contents of a context: kernels, and each cluster's plans with their guards and steps.

    Plans of a version that this plugin does not run are left out. Every array is compared with its hash.

    Raises:
        ContextError: the context is damaged.
    """
    context = Context(container)
    try:
        return {
            "made_by": str(container.index["made_by"]["plugin"]),
            "bytes": _bytes_by_kind(context),
            "kernels": [_kernel(context, row) for row in context.kernel_rows],
            "partitions": [_partition(context, name) for name in context.partitions],
        }
    except MALFORMED as error:
        raise container.damaged(repr(error)) from error


def counts_of(target: Mapping[str, Any]) -> str:
    """Return as text how many kernels and weights a cluster has for ``target``, an entry of `describe`'s result."""
    before = target["kernels_before_runs"]
    only = f" ({before} only for steps before the first Run)" if before else ""
    return f"{target['kernels']} kernels{only}, {target['weights']} weights"


def _kernel(context: Context, row: Any) -> dict[str, Any]:
    return {
        "name": str(row["entry"]),
        "arch": str(row["arch"]),
        "bytes": len(context.container.array(row["image"])),
        "registers": row["metadata"].get("registers"),
        "shared_bytes": row["metadata"].get("static_shared_bytes", 0),
    }


def _partition(context: Context, name: str) -> dict[str, Any]:
    row = context.partitions[name]
    names = [port["name"] for port in row["inputs"]]
    graph = decode_graph(context.graph_data(row["graph"]), context.constants.all)
    return {
        "name": name,
        "inputs": [_port(port) for port in row["inputs"]],
        "outputs": [_port(port) for port in row["outputs"]],
        "nodes": len(graph.nodes),
        "targets": [_target(context, target, names) for target in row["targets"]],
    }


def _port(row: Any) -> str:
    return f"{row['name']}: {DType(row['dtype']).name}"


def _target(context: Context, row: Any, inputs: list[str]) -> dict[str, Any]:
    in_runs = set(row["kernels"])
    preparing = {number for program in row["programs"] for number in program["kernels"]} - in_runs
    plans = []
    for number in row["plans"] if row["plan_version"] == plan_version else ():
        plan = decode(bytes(context.container.array(number)))
        steps = {kind.name.lower(): sum(record.kind is kind for record in plan.records) for kind in RecordKind}
        plans.append(
            {
                "steps": {kind: count for kind, count in steps.items() if count},
                "guards": Guards(plan, inputs).texts()[:MAX_GUARDS],
            }
        )
    return {
        "arch": row["arch"],
        "toolkit": str(row.get("toolkit", "")),
        "plan_version": int(row["plan_version"]),
        "libraries": row["libraries"],
        "kernels": len(in_runs | preparing),
        "kernels_before_runs": len(preparing),
        "weights": len(row["weights"]),
        "plans": plans,
        "schedules": [" ".join(filter(None, map(str, kind))) for kind in row.get("schedules", [])],
        "failures": row["failures"],
    }


def _bytes_by_kind(context: Context) -> dict[str, int]:
    """Return the total size in bytes of the arrays of each kind, such as "plans". An array counts only once."""
    container = context.container
    targets = [target for row in context.partitions.values() for target in row["targets"]]
    users = {
        "kernels": [row["image"] for row in context.kernel_rows],
        "plans": [
            number
            for target in targets
            for number in (*target["plans"], *(program["plan"] for program in target["programs"]))
        ],
        "graphs": [row["graph"] for row in context.partitions.values()],
        "weights": [row["array"] for row in container.index["constants"] if "array" in row],
    }
    counted: set[int] = set()
    found = {}
    for kind, numbers in users.items():
        found[kind] = sum(len(container.array(number)) for number in set(numbers) - counted)
        counted.update(numbers)
    return found
