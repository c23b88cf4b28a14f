"""Checks that folders ("rooms") import and include only from folders that docs/architecture.md lists below them."""

from __future__ import annotations

import re
from graphlib import CycleError, TopologicalSorter

import pytest

from source_graph import (
    PACKAGE,
    ROOT,
    SOURCES,
    Texts,
    c_declared,
    c_defined,
    c_includes,
    c_plain,
    c_texts,
    python_arrows,
    python_packages,
    python_texts,
    with_text,
)

# ---- Python ----


def python_rooms() -> dict[str, int]:
    """Return the folders and modules of the package, with their line numbers in the list of docs/architecture.md."""
    listing = (ROOT / "docs" / "architecture.md").read_text().split(f"\n {PACKAGE}/\n")[1].split("```")[0]
    rooms: dict[str, int] = {}
    for number, line in enumerate(listing.splitlines()):
        names = re.match(r" +((?:\w+(?:/|\.py)[ ,]+)+)", line)
        assert names, line
        rooms |= dict.fromkeys(re.findall(r"(\w+)(?:/|\.py)", names[1]), number)
    return rooms


def python_faults(files: Texts) -> list[str]:
    """Return imports from folders further up in the list, modules that the list lacks, and import cycles of folders;
    modules on the same line of the list count as one folder.
    """
    rooms, packages = python_rooms(), python_packages(files)
    faults = []
    folders: dict[str, set[str]] = {}
    for place, module, target in python_arrows(files):
        if missing := {module[0], target[0]} - rooms.keys():
            faults.append(f"{place}: {missing.pop()} is no room")
            continue
        if rooms[module[0]] > rooms[target[0]]:
            faults.append(f"{place}: {module[0]} imports {'.'.join(target)}, which is above it")
        here, there = ("/".join(m if m in packages else m[:-1]) or f"line {rooms[m[0]]}" for m in (module, target))
        if here != there:
            folders.setdefault(here, set()).add(there)
    try:
        TopologicalSorter(folders).prepare()
    except CycleError as error:
        faults.append(f"a circle: {' <- '.join(error.args[1])}")
    return faults


def test_python_imports_point_down() -> None:
    assert python_faults(python_texts()) == []


def test_python_rooms_are_those_that_there_are() -> None:
    there = {path.stem for path in (ROOT / PACKAGE).iterdir() if path.suffix == ".py" or list(path.glob("*.py"))}
    assert python_rooms().keys() == there


FAULTS = [
    ("kernels/scan_sort/scan.py", f"from {PACKAGE}.ops.registry import op", "kernels imports ops.registry"),
    ("kernels/scan_sort/scan.py", f"import {PACKAGE}.clusters.claims as c", "kernels imports clusters.claims"),
    ("abi/core.py", "def f():\n    from .. import plan", "abi imports plan"),
    ("compiler/host/ir.py", "def f():\n    from ... import get_ep_name", "compiler imports __init__"),
    ("model/ir.py", "if TYPE_CHECKING:\n    from ..ep.factory import Factory", "model imports ep.factory"),
    ("program/steps/tensor.py", f'import_module("{PACKAGE}.passes.table")', "program imports passes.table"),
    ("custom/registry.py", "from .plugin.node import Node", "a circle: "),
    ("misc/thing.py", "from ..abi import core", "misc is no room"),
]
"""A file, a text to append to it, and a part of the fault that this has to cause."""


def test_python_faults_are_found(subtests: pytest.Subtests) -> None:
    for file, text, fault in FAULTS:
        with subtests.test(file=file, text=text):
            assert any(fault in found for found in python_faults(with_text(python_texts(), file, text)))


# ---- C ----


def c_rooms() -> dict[str, int]:
    """Return the folders of csrc_shim, with their positions in the list of docs/architecture.md."""
    listing = (ROOT / "docs" / "architecture.md").read_text().split("\n csrc_shim/ ->")[1].split("\n        ^")[0]
    return {name: number for number, name in enumerate(re.findall(r"^   (\w+)/", listing, flags=re.M))}


def c_faults(files: Texts) -> list[str]:
    """Return includes from folders further up in the list or not in it, and functions that a header declares but
    another file's source defines.
    """
    rooms = c_rooms()
    faults = []
    declared: list[tuple[str, str]] = []
    defined: dict[str, str] = {}
    for place, source in files.items():
        room, text = place.split("/")[0], c_plain(source)
        for target in c_includes(text):
            other = target.split("/")[0]
            if missing := {room, other} - rooms.keys():
                faults.append(f"{place}: {missing.pop()} is no room")
            elif rooms[room] > rooms[other]:
                faults.append(f"{place}: {room} includes {target}, which is above it")
        if place.endswith(".h"):
            declared += [(name, place[:-2]) for name in c_declared(text)]
        else:
            defined |= dict.fromkeys(c_defined(text), place[:-2])
    for function, header in declared:
        if defined.get(function, header) != header:
            faults.append(f"{header}.h declares {function}, which {defined[function]}.c has")
    return faults


def test_c_includes_point_down() -> None:
    assert c_faults(c_texts()) == []


def test_c_rooms_are_those_that_there_are() -> None:
    assert c_rooms().keys() == {path.name for path in SOURCES.iterdir() if path.is_dir()}
    assert not list(SOURCES.glob("*.[ch]"))


C_FAULTS = [
    ("device/memory/memory.c", '#include "ort/data/capture.h"', "device includes ort/data/capture.h"),
    (
        "driver/driver.h",
        '#  include "emulator/calls/emulator.h" /* the other one */',
        "driver includes emulator/calls/emulator.h",
    ),
    ("run/executor.c", '#include "python/host.h"', "run includes python/host.h"),
    ("device/stream.h", '#include "vendor/problem.h"', "device includes vendor/problem.h"),
    ("device/memory/memory.c", '#include "misc/thing.h"', "misc is no room"),
    (
        "base/error.h",
        "const ocp_core *ocp_core_table(\n    void);",
        "base/error.h declares ocp_core_table, which ort/table.c has",
    ),
]
"""A file, a text to append to it, and a part of the fault that this has to cause."""


def test_c_faults_are_found(subtests: pytest.Subtests) -> None:
    for file, text, fault in C_FAULTS:
        with subtests.test(file=file, text=text):
            assert any(fault in found for found in c_faults(with_text(c_texts(), file, text)))
