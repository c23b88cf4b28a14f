"""Rooms: the folders of docs/architecture.md, in its order, whose arrows point only downward."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "ort_cuda_plugin"
SOURCES = ROOT / "csrc_shim"


# ---- Python ----


def python_rooms() -> dict[str, int]:
    """The rooms of the package and the modules beside them, with the numbers of their lines from the top."""
    listing = (ROOT / "docs" / "architecture.md").read_text().split(f"\n {PACKAGE}/\n")[1].split("```")[0]
    rooms: dict[str, int] = {}
    for number, line in enumerate(listing.splitlines()):
        names = re.match(r" +((?:\w+(?:/|\.py)[ ,]+)+)", line)
        assert names, line
        rooms |= dict.fromkeys(re.findall(r"(\w+)(?:/|\.py)", names[1]), number)
    return rooms


@cache
def python_imports(source: str, module: tuple[str, ...]) -> list[tuple[int, tuple[str, ...]]]:
    """What a module imports of the package, wherever in it: the line, and the dotted name below the package.

    Strings that are the names of modules count: something imports them.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names, line = [alias.name for alias in node.names], node.lineno
        elif isinstance(node, ast.ImportFrom):
            above = [PACKAGE, *module][: -node.level] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            names, line = [f"{origin}.{alias.name}" for alias in node.names], node.lineno
        elif isinstance(node, ast.Constant) and re.fullmatch(rf"{PACKAGE}(\.\w+)+", str(node.value)):
            names, line = [str(node.value)], node.lineno
        else:
            continue
        found += [(line, tuple(name.split(".")[1:])) for name in names if name.split(".")[0] == PACKAGE]
    return found


def python_arrows(package: Path) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Where each import is, the module it is in and the one it is of, "__init__" for the package's own names."""
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package)
        module = place.with_suffix("").parts
        for line, imported in python_imports(path.read_text(), module):
            target: tuple[str, ...] = ()
            for name in imported:
                file = package.joinpath(*target, name)
                if not (file.is_dir() or file.with_suffix(".py").exists() or file.with_suffix(".pyi").exists()):
                    break
                target = *target, name
            if target != ("_bridge",):  # which build_plugin.py makes of C
                yield f"{place}:{line}", module, target or ("__init__",)


def python_faults(package: Path) -> list[str]:
    """Arrows that point up, modules outside of the rooms, and circles of folders, of which a line of modules is one."""
    rooms = python_rooms()
    faults = []
    folders: dict[str, set[str]] = {}
    for place, module, target in python_arrows(package):
        if missing := {module[0], target[0]} - rooms.keys():
            faults.append(f"{place}: {missing.pop()} is no room")
            continue
        if rooms[module[0]] > rooms[target[0]]:
            faults.append(f"{place}: {module[0]} imports {'.'.join(target)}, which is above it")
        here, there = (
            "/".join(m if package.joinpath(*m).is_dir() else m[:-1]) or f"line {rooms[m[0]]}" for m in (module, target)
        )
        if here != there:
            folders.setdefault(here, set()).add(there)
    try:
        TopologicalSorter(folders).prepare()
    except CycleError as error:
        faults.append(f"a circle: {' <- '.join(error.args[1])}")
    return faults


def test_python_imports_point_down() -> None:
    assert python_faults(ROOT / PACKAGE) == []


def test_python_rooms_are_those_that_there_are() -> None:
    there = {path.stem for path in (ROOT / PACKAGE).iterdir() if path.suffix == ".py" or list(path.glob("*.py"))}
    assert python_rooms().keys() == there


@pytest.mark.parametrize(
    ("file", "text", "fault"),
    [
        ("kernels/scan.py", f"from {PACKAGE}.ops.registry import op", "kernels imports ops.registry"),
        ("kernels/scan.py", f"import {PACKAGE}.clusters.claims as c", "kernels imports clusters.claims"),
        ("abi/core.py", "def f():\n    from .. import plan", "abi imports plan"),
        ("compiler/host/ir.py", "def f():\n    from ... import get_ep_name", "compiler imports __init__"),
        ("model/ir.py", "if TYPE_CHECKING:\n    from ..ep.factory import Factory", "model imports ep.factory"),
        ("program/tensor.py", f'import_module("{PACKAGE}.kernels.emit")', "program imports kernels.emit"),
        ("custom/registry.py", "from .plugin.node import Node", "a circle: "),
        ("misc/thing.py", "from ..abi import core", "misc is no room"),
    ],
)
def test_python_faults_are_found(tmp_path: Path, file: str, text: str, fault: str) -> None:
    copy = tmp_path / PACKAGE
    shutil.copytree(ROOT / PACKAGE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (copy / file).parent.mkdir(exist_ok=True)
    with (copy / file).open("a") as appended:
        appended.write(f"\n{text}\n")
    assert any(fault in found for found in python_faults(copy))


# ---- C ----


def c_rooms() -> dict[str, int]:
    """The folders of csrc_shim, with the numbers of their lines from the top."""
    listing = (ROOT / "docs" / "architecture.md").read_text().split("\n csrc_shim/ ->")[1].split("\n        ^")[0]
    return {name: number for number, name in enumerate(re.findall(r"^   (\w+)/", listing, flags=re.M))}


def c_plain(text: str) -> str:
    """The code of a C file without its comments."""
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def c_faults(sources: Path) -> list[str]:
    """Includes that point up or at no room, functions that the header of another room declares, and headers that
    include each other in a circle."""
    rooms = c_rooms()
    faults = []
    headers: dict[str, list[str]] = {}
    declared: list[tuple[str, str]] = []
    defined: dict[str, str] = {}
    for path in sorted(sources.rglob("*.[ch]")):
        place = str(path.relative_to(sources))
        room, text = path.parent.name, c_plain(path.read_text())
        included = re.findall(r'^ *# *include *"([^"]+)"', text, flags=re.MULTILINE)
        for target in included:
            other = target.split("/")[0]
            if missing := {room, other} - rooms.keys():
                faults.append(f"{place}: {missing.pop()} is no room")
            elif rooms[room] > rooms[other]:
                faults.append(f"{place}: {room} includes {target}, which is above it")
        if path.suffix == ".h":
            headers[place] = included
            declared += [(name, room) for name in re.findall(r"\b((?:ocp|emu)_\w+)\([^{}]*?\)[^{};]*;", text)]
        else:
            functions = re.findall(r"^(?!static)\w[\w *]*?\b((?:ocp|emu)_\w+)\([^;{}]*\) \{", text, flags=re.MULTILINE)
            defined |= dict.fromkeys(functions, room)
    for function, room in declared:
        if defined.get(function, room) != room:
            faults.append(f"{room} declares {function}, which {defined[function]} has")
    try:
        TopologicalSorter(headers).prepare()
    except CycleError as error:
        faults.append(f"a circle: {' <- '.join(error.args[1])}")
    return faults


def test_c_includes_point_down() -> None:
    assert c_faults(SOURCES) == []


def test_c_rooms_are_those_that_there_are() -> None:
    assert c_rooms().keys() == {path.name for path in SOURCES.iterdir() if path.is_dir()}
    assert not list(SOURCES.glob("*.[ch]"))


@pytest.mark.parametrize(
    ("file", "text", "fault"),
    [
        ("device/memory.c", '#include "ort/capture.h"', "device includes ort/capture.h"),
        (
            "driver/driver.h",
            '#  include "emulator/emulator.h" /* the other one */',
            "driver includes emulator/emulator.h",
        ),
        ("run/executor.c", '#include "python/host.h"', "run includes python/host.h"),
        ("device/stream.h", '#include "vendor/problem.h"', "device includes vendor/problem.h"),
        ("device/memory.c", '#include "misc/thing.h"', "misc is no room"),
        ("device/device.h", '#include "device/stream.h"', "a circle: "),
        ("base/error.h", "const ocp_core *ocp_core_table(\n    void);", "base declares ocp_core_table, which ort has"),
    ],
)
def test_c_faults_are_found(tmp_path: Path, file: str, text: str, fault: str) -> None:
    copy = tmp_path / "csrc_shim"
    shutil.copytree(SOURCES, copy)
    with (copy / file).open("a") as appended:
        appended.write(f"\n{text}\n")
    assert any(fault in found for found in c_faults(copy))
