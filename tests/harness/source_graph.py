"""Parses the imports of the package's modules and the includes of the C library's files into dependency graphs."""

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
"""The text of each file of a folder, by path relative to the folder."""


@cache
def texts_below(folder: Path, suffixes: tuple[str, ...]) -> Texts:
    paths = sorted(path for path in folder.rglob("*") if path.suffix in suffixes)
    return {path.relative_to(folder).as_posix(): path.read_text() for path in paths}


def python_texts() -> Texts:
    """Return the text of each module of the package."""
    return texts_below(ROOT / PACKAGE, (".py", ".pyi"))


def c_texts() -> Texts:
    """Return the text of each source and header of the C library."""
    return texts_below(SOURCES, (".c", ".h"))


def with_text(files: Texts, file: str, text: str) -> Texts:
    """Return ``files`` with ``text`` appended to ``file``, which is created if it does not exist."""
    return {**files, file: f"{files.get(file, '')}\n{text}\n"}


# ---- Python ----


class Import(NamedTuple):
    """An import of a module of the package in the package: line, and dotted name without the package's."""

    line: int
    name: tuple[str, ...]


def parsed(source: str) -> ast.Module:
    (module,) = nodes(source, ast.Module)
    return module


@cache
def _nodes_by_kind(source: str) -> Mapping[type[ast.AST], list[ast.AST]]:
    """Return the syntax nodes of a module by type. They are frozen for the garbage collector, because there are many
    and they stay until the process exits.
    """
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
    """Return all syntax nodes of one type in a module."""
    return cast("list[Node]", _nodes_by_kind(source).get(kind, []))


@cache
def python_imports(source: str, module: tuple[str, ...]) -> list[Import]:
    """Return the imports of the package's modules in a module, also those inside functions.

    String constants that are names of modules count too, because they are used for dynamic imports.
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
    """An import: its location as "file:line", the importing module, and the imported module."""

    place: str
    module: tuple[str, ...]
    target: tuple[str, ...]


def python_packages(files: Texts) -> set[tuple[str, ...]]:
    """Return the package's folders, as the parts of their dotted names."""
    folders = {file.rpartition("/")[0] for file in files}
    return {tuple(folder.split("/"))[:depth] for folder in folders for depth in range(folder.count("/") + 2)} - {("",)}


def python_arrows(files: Texts) -> Iterator[Arrow]:
    """Yield the package's imports of its own modules. The target is "__init__" for names of the package itself."""
    known = python_packages(files) | {tuple(file.rpartition(".")[0].split("/")) for file in files}
    for file, text in files.items():
        if not file.endswith(".py"):
            continue
        module = tuple(file.removesuffix(".py").split("/"))
        for line, imported in python_imports(text, module):
            target = imported
            while target not in known:
                target = target[:-1]
            if target != ("_bridge",):  # an extension module, which build_plugin.py compiles from C
                yield Arrow(f"{file}:{line}", module, target or ("__init__",))


def python_files(files: Texts) -> dict[str, set[str]]:
    """Return for each module of the package the modules that it imports, anywhere and also only for types."""
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
    """Return the text of a C file without comments."""
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def c_includes(text: str) -> list[str]:
    """Return the library's headers that a C file includes; ``text`` has no comments."""
    return re.findall(r'^ *# *include *"([^"]+)"', text, flags=re.MULTILINE)


def c_declared(text: str) -> list[str]:
    """Return the functions that a header declares."""
    return re.findall(r"\b((?:ocp|emu)_\w+)\([^{}]*?\)[^{};]*;", text)


def c_defined(text: str) -> list[str]:
    """Return the functions with external linkage that a source defines."""
    return re.findall(r"^(?!static)\w[\w *]*?\b((?:ocp|emu)_\w+)\([^;{}]*\) \{", text, flags=re.MULTILINE)


def c_files(files: Texts) -> dict[str, set[str]]:
    """Return for each C file the files that it includes. A source and its header count as one file without suffix."""
    graph: dict[str, set[str]] = {}
    for file, text in files.items():
        own = file[:-2]
        used = {target.removesuffix(".h") for target in c_includes(c_plain(text))}
        graph.setdefault(own, set()).update(used - {own})
    return graph


# ---- graphs ----


def circles(graph: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one node, each sorted (Tarjan's algorithm)."""
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
    """Return for each folder the other folders that its files use."""
    above: dict[str, set[str]] = {}
    for node, targets in graph.items():
        own = node.rpartition(separator)[0]
        above.setdefault(own, set()).update({target.rpartition(separator)[0] for target in targets} - {own})
    return above
