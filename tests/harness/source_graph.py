"""The dependency graph of files of the package and of the C library, parsed from their text."""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar, cast

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "ort_cuda_plugin"
SOURCES = ROOT / "csrc_shim"

Node = TypeVar("Node", bound=ast.AST)
Texts: TypeAlias = Mapping[str, str]
"""The text of each file of a folder, by its path below the folder."""


@cache
def texts_below(folder: Path, suffixes: tuple[str, ...]) -> Texts:
    paths = sorted(path for path in folder.rglob("*") if path.suffix in suffixes)
    return {path.relative_to(folder).as_posix(): path.read_text() for path in paths}


def python_texts() -> Texts:
    """The modules of the package."""
    return texts_below(ROOT / PACKAGE, (".py", ".pyi"))


def c_texts() -> Texts:
    """The sources and headers of the C library."""
    return texts_below(SOURCES, (".c", ".h"))


def with_text(files: Texts, file: str, text: str) -> Texts:
    """Return the files with more text at the end of one of them, which is new if there is none of its name."""
    return {**files, file: f"{files.get(file, '')}\n{text}\n"}


# ---- Python ----


class Import(NamedTuple):
    """An import of the package by itself: the line, and the dotted name below the package."""

    line: int
    name: tuple[str, ...]


def parsed(source: str) -> ast.Module:
    (module,) = nodes(source, ast.Module)
    return module


@cache
def _nodes_by_kind(source: str) -> Mapping[type[ast.AST], list[ast.AST]]:
    """Return the nodes of a module. The collector never visits them: they stay, and are most objects of the process."""
    was_enabled = gc.isenabled()
    gc.disable()
    found: dict[type[ast.AST], list[ast.AST]] = {}
    for node in ast.walk(ast.parse(source)):
        found.setdefault(type(node), []).append(node)
    gc.freeze()
    if was_enabled:
        gc.enable()
    return found


def nodes(source: str, kind: type[Node]) -> list[Node]:
    """All nodes of one kind of a module."""
    return cast("list[Node]", _nodes_by_kind(source).get(kind, []))


@cache
def python_imports(source: str, module: tuple[str, ...]) -> list[Import]:
    """What a module imports of the package, wherever in it.

    Strings that are the names of modules count: something imports them.
    """
    names: list[tuple[ast.Import | ast.ImportFrom | ast.Constant, list[str]]] = []
    for plain in nodes(source, ast.Import):
        names.append((plain, [alias.name for alias in plain.names]))
    for node in nodes(source, ast.ImportFrom):
        above = [PACKAGE, *module][: -node.level] if node.level else []
        origin = ".".join([*above, *([node.module] if node.module else [])])
        names.append((node, [f"{origin}.{alias.name}" for alias in node.names]))
    for constant in nodes(source, ast.Constant):
        if isinstance(constant.value, str) and re.fullmatch(rf"{PACKAGE}(\.\w+)+", constant.value):
            names.append((constant, [constant.value]))
    return [
        Import(node.lineno, tuple(name.split(".")[1:]))
        for node, imported in names
        for name in imported
        if name.split(".")[0] == PACKAGE
    ]


class Arrow(NamedTuple):
    """An import: where it is, the module it is in, and the module it is of."""

    place: str
    module: tuple[str, ...]
    target: tuple[str, ...]


def python_packages(files: Texts) -> set[tuple[str, ...]]:
    """The folders of modules, as parts of their dotted names."""
    folders = {file.rpartition("/")[0] for file in files}
    return {tuple(folder.split("/"))[:depth] for folder in folders for depth in range(folder.count("/") + 2)} - {("",)}


def python_arrows(files: Texts) -> Iterator[Arrow]:
    """The imports of the package by itself; a target is "__init__" for the package's own names."""
    known = python_packages(files) | {tuple(file.rpartition(".")[0].split("/")) for file in files}
    for file, text in files.items():
        if not file.endswith(".py"):
            continue
        module = tuple(file.removesuffix(".py").split("/"))
        for line, imported in python_imports(text, module):
            target = imported
            while target not in known:
                target = target[:-1]
            if target != ("_bridge",):  # which build_plugin.py makes of C
                yield Arrow(f"{file}:{line}", module, target or ("__init__",))


def python_files(files: Texts) -> dict[str, set[str]]:
    """The modules that each module of the package imports, wherever and for whatever."""
    graph: dict[str, set[str]] = {}
    packages = python_packages(files)
    for _, module, target in python_arrows(files):
        if target in packages:
            target = *target, "__init__"
        if module != target:
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


def c_files(files: Texts) -> dict[str, set[str]]:
    """Which others a source and its header use; a pair of both is one file, named without its suffix."""
    graph: dict[str, set[str]] = {}
    for file, text in files.items():
        own = file[:-2]
        used = {target.removesuffix(".h") for target in c_includes(c_plain(text))}
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
