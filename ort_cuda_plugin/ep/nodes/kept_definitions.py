"""Cache of kernel definitions on disk, so that the first session of a process need not import every operator."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...abi import host
from ...compiler.toolchain import joined_digest, sources_digest
from ...model.ir import DType
from ...ops.kernel_definitions import KernelDefinition
from ..device.open_device import kernel_library

PACKAGE = Path(__file__).parents[2]
SOURCES = ("model/ir.py", "model/ort/ort_schema.py", "ep/nodes/kept_definitions.py")
"""Modules other than ``ops`` on which kernel definitions depend."""


def kept() -> tuple[list[KernelDefinition], list[str]] | None:
    """Return the stored definitions for this ONNX Runtime and this plugin, and the mismatches between the operator
    table and ONNX Runtime's schemas.

    Return None if no definitions are stored, or if another version of the plugin stored them.
    """
    data = kernel_library().cache.read_file(_name())
    try:
        made_by, lists, rows, mismatches = json.loads(data or b"null")
        if made_by != _made_by():
            return None
        dtypes = [tuple(map(DType, numbers)) for numbers in lists]
        return [_definition(row, dtypes) for row in rows], list(map(str, mismatches))
    except (TypeError, ValueError, LookupError, RecursionError):
        return None


def keep(definitions: Sequence[KernelDefinition], mismatches: Sequence[str]) -> None:
    """Store definitions and mismatches for later processes."""
    lists = list(dict.fromkeys(dtypes for each in definitions for dtypes in each.types.values()))
    numbers = {dtypes: number for number, dtypes in enumerate(lists)}
    # `dataclasses.asdict` would copy each element type of each constraint, which takes 0.1 s in total.
    rows = [
        vars(each) | {"types": {name: numbers[dtypes] for name, dtypes in each.types.items()}} for each in definitions
    ]
    values = [[dtype.onnx for dtype in dtypes] for dtypes in lists]
    kernel_library().cache.write_file(_name(), json.dumps([_made_by(), values, rows, list(mismatches)]).encode())


def _definition(row: Any, lists: Sequence[tuple[DType, ...]]) -> KernelDefinition:
    """Decode a definition. ``lists`` are the element types of constraints; equal lists are stored once."""
    row["types"] = {name: lists[number] for name, number in row["types"].items()}
    row["host_inputs"], row["host_outputs"] = tuple(row["host_inputs"]), tuple(row["host_outputs"])
    return KernelDefinition(**row)


def _name() -> str:
    """Return the file's name: one for each build of ONNX Runtime. Another version of the plugin overwrites the file."""
    return f"definitions-{joined_digest(*_host())[:16]}.json"


def _made_by() -> str:
    return joined_digest(*_host(), sources_digest((*SOURCES, *operator_sources())))


def operator_sources() -> list[str]:
    """Return the modules of ``ops`` and of its subfolders, which declare the operators."""
    return sorted(path.relative_to(PACKAGE).as_posix() for path in (PACKAGE / "ops").rglob("*.py"))


def _host() -> tuple[str, str]:
    api = host.api()
    return f"{host.api_version()} {host.host_version()}", host.text(api.GetBuildInfoString())
