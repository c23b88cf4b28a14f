"""The dependency graph of files of the package and of the C library, parsed from their text."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "ort_cuda_plugin"
SOURCES = ROOT / "csrc_shim"


# ---- Python ----


class Import(NamedTuple):
    """An import of the package by itself: the line, the dotted name below the package, and whether it is for types."""

    line: int
    name: tuple[str, ...]
    is_typing: bool


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@cache
def nodes(source: str) -> list[ast.AST]:
    """All nodes of a module."""
    return list(ast.walk(parsed(source)))


def _typing_nodes(source: str) -> set[int]:
    """The ids of the nodes below ``if TYPE_CHECKING:``."""
    if "TYPE_CHECKING" not in source:
        return set()
    return {
        id(node)
        for test in nodes(source)
        if isinstance(test, ast.If) and isinstance(test.test, ast.Name) and test.test.id == "TYPE_CHECKING"
        for statement in test.body
        for node in ast.walk(statement)
    }


@cache
def python_imports(source: str, module: tuple[str, ...]) -> list[Import]:
    """What a module imports of the package, wherever in it.

    Strings that are the names of modules count: something imports them.
    """
    found = []
    typing = _typing_nodes(source)
    for node in nodes(source):
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
        found += [
            Import(line, tuple(name.split(".")[1:]), id(node) in typing)
            for name in names
            if name.split(".")[0] == PACKAGE
        ]
    return found


class Arrow(NamedTuple):
    """An import: where it is, the module it is in, the module it is of, and whether it is for types only."""

    place: str
    module: tuple[str, ...]
    target: tuple[str, ...]
    is_typing: bool


def python_arrows(package: Path) -> Iterator[Arrow]:
    """The imports of the package by itself; a target is "__init__" for the package's own names."""
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package)
        module = place.with_suffix("").parts
        for line, imported, is_typing in python_imports(path.read_text(), module):
            target: tuple[str, ...] = ()
            for name in imported:
                file = package.joinpath(*target, name)
                if not (file.is_dir() or file.with_suffix(".py").exists() or file.with_suffix(".pyi").exists()):
                    break
                target = *target, name
            if target != ("_bridge",):  # which build_plugin.py makes of C
                yield Arrow(f"{place}:{line}", module, target or ("__init__",), is_typing)


def python_files(package: Path, typing: bool) -> dict[str, set[str]]:
    """The modules that each module of the package imports, with those for types if ``typing``."""
    graph: dict[str, set[str]] = {}
    for _, module, target, is_typing in python_arrows(package):
        if package.joinpath(*target).is_dir():
            target = *target, "__init__"
        if (typing or not is_typing) and module != target:
            graph.setdefault(".".join(module), set()).add(".".join(target))
    return graph


# ---- C ----


def c_plain(text: str) -> str:
    """The code of a C file without its comments."""
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def c_includes(text: str) -> list[str]:
    """What a C file includes of the library; ``text`` is without comments."""
    return re.findall(r'^ *# *include *"([^"]+)"', text, flags=re.MULTILINE)


def c_declared(text: str) -> list[str]:
    """The functions of the library that a header declares."""
    return re.findall(r"\b((?:ocp|emu)_\w+)\([^{}]*?\)[^{};]*;", text)


def c_defined(text: str) -> list[str]:
    """The functions of the library that a source defines for others."""
    return re.findall(r"^(?!static)\w[\w *]*?\b((?:ocp|emu)_\w+)\([^;{}]*\) \{", text, flags=re.MULTILINE)


def c_files(sources: Path) -> dict[str, set[str]]:
    """Which others a source and its header use; a pair of both is one file, named without its suffix."""
    graph: dict[str, set[str]] = {}
    for path in sorted(sources.rglob("*.[ch]")):
        own = str(path.relative_to(sources).with_suffix(""))
        used = {target.removesuffix(".h") for target in c_includes(c_plain(path.read_text()))}
        graph.setdefault(own, set()).update(used - {own})
    return graph


# ---- graphs ----


def circles(graph: Mapping[str, Collection[str]]) -> list[list[str]]:
    """The largest sets of nodes that reach each other, each sorted: Tarjan's strongly connected components."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        number[node] = lowest[node] = len(number)
        stack.append(node)
        for target in graph.get(node, ()):
            if target not in number:
                visit(target)
                lowest[node] = min(lowest[node], lowest[target])
            elif target in stack:
                lowest[node] = min(lowest[node], number[target])
        if lowest[node] == number[node]:
            start = stack.index(node)
            if len(stack) - start > 1:
                found.append(sorted(stack[start:]))
            del stack[start:]

    for node in graph:
        if node not in number:
            visit(node)
    return sorted(found)


def folders(graph: Mapping[str, Collection[str]], separator: str) -> dict[str, set[str]]:
    """The folders that the files of each folder use."""
    above: dict[str, set[str]] = {}
    for node, targets in graph.items():
        own = node.rpartition(separator)[0]
        above.setdefault(own, set()).update({target.rpartition(separator)[0] for target in targets} - {own})
    return above
