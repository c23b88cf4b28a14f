"""Kernel definitions that an earlier process worked out, so that a first session need not import every operator."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from ..abi import host
from ..compiler.cache import joined_digest, tools_digest
from ..model.ir import DType
from ..ops.kernel_definitions import KernelDefinition
from .open_device import kernel_library

PACKAGE = Path(__file__).parent.parent
SOURCES = ("model/ir.py", "model/ort_schema.py", "ep/kept_definitions.py")
"""Modules on which definitions depend, besides those of ``ops``."""


def kept() -> tuple[list[KernelDefinition], list[str]] | None:
    """The definitions for this ONNX Runtime and this version of the plugin, and what in the operator table is wrong.

    None where nobody has kept any.
    """
    data = kernel_library().cache.read_file(_name())
    try:
        made_by, rows, mismatches = json.loads(data or b"null")
        found = [_definition(row) for row in rows] if made_by == _made_by() else None
        return None if found is None else (found, list(map(str, mismatches)))
    except (TypeError, ValueError, LookupError, RecursionError):
        return None


def keep(definitions: Sequence[KernelDefinition], mismatches: Sequence[str]) -> None:
    """Keeps definitions, and what is wrong, for later processes."""
    rows = [
        asdict(each) | {"types": {name: [dtype.onnx for dtype in dtypes] for name, dtypes in each.types.items()}}
        for each in definitions
    ]
    kernel_library().cache.write_file(_name(), json.dumps([_made_by(), rows, list(mismatches)]).encode())


def _definition(row: Any) -> KernelDefinition:
    types = {name: _dtypes(tuple(numbers)) for name, numbers in row["types"].items()}
    places = {key: tuple(row[key]) for key in ("host_inputs", "host_outputs")}
    return KernelDefinition(**row | places | {"types": types})


@cache
def _dtypes(numbers: tuple[int, ...]) -> tuple[DType, ...]:
    return tuple(map(DType, numbers))


def _name() -> str:
    """One file for each ONNX Runtime: what another version of the plugin kept there is replaced."""
    return f"definitions-{joined_digest(*_host())[:16]}.json"


def _made_by() -> str:
    operators = sorted(path.relative_to(PACKAGE).as_posix() for path in _modules())
    return joined_digest(*_host(), tools_digest([], [*SOURCES, *operators]))


def _modules() -> Iterable[Path]:
    return (PACKAGE / "ops").glob("*.py")


def _host() -> tuple[str, str]:
    api = host.api()
    return f"{host.api_version()} {host.host_version()}", host.text(api.GetBuildInfoString())
