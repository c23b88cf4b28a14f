"""The shape of the code: files without circles, small folders, predicates without effects, comments that stand alone.

`test_rooms` checks which folder may use which. The exceptions that stand here may only become fewer.
"""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from source_graph import (
    PACKAGE,
    ROOT,
    SOURCES,
    c_files,
    circles,
    folders,
    nodes,
    parsed,
    python_arrows,
    python_files,
)

MAX_SOURCES = 12  # of a folder; a C source and its header count once

LARGE_FOLDERS = {
    "ort_cuda_plugin/compiler": 23,
}
"""The folders that are larger, with the number of their sources."""

CIRCLES = [
    # `resource_usage` belongs into `compiler.targets`. The keys of cached kernels hash the text of both modules.
    {"compiler.compile", "compiler.foreign"},
]
"""The circles of Python files, by imports that are executed."""

TYPE_CIRCLES = [
    *CIRCLES,
    # What applications import from the package; its submodules read `get_ep_name` of it.
    {"__init__", "api", "arrays", "memory"},
    # A node's lowering gives itself to the bodies of control flow.
    {"clusters.nodes.control_flow", "clusters.nodes.node_lowering"},
    # A constant names the recipe that it is made by, which names the constants that it is made of.
    {"model.ir", "model.recipes"},
    # Mechanisms take the lowering context, which offers some of them as its methods.
    {
        f"program.lowering.{name}"
        for name in ("context", "elementwise", "host", "memory_order", "shapes", "tuning", "views")
    },
]
"""The circles with imports for types (``if TYPE_CHECKING:``) as well."""

RECORDING_PREDICATES: set[str] = set()
"""Predicates (``is_``, ``has_``, ``fits_``, ``wants_``) that record a step or add a guard to the plan."""

FRAGMENTS = {"compiler/host/matrices.py": 1}
"""The comments of constants that begin as `FRAGMENT` says, by file. They have to name quantity and unit.

The keys of cached kernels hash the text of the files that stand here: mend their comments with the next change.
"""

FRAGMENT = re.compile(r"(Of|That|So many|So few|Which|Whose)\b|\.\.\.")


def known(circle: list[str], exceptions: list[set[str]]) -> bool:
    return any(set(circle) <= exception for exception in exceptions)


# ---- circles ----


@pytest.mark.parametrize(("typing", "exceptions"), [(False, CIRCLES), (True, TYPE_CIRCLES)], ids=["run", "types"])
def test_python_files_import_each_other_in_no_circle(typing: bool, exceptions: list[set[str]]) -> None:
    found = circles(python_files(ROOT / PACKAGE, typing))
    assert [circle for circle in found if not known(circle, exceptions)] == []


def test_c_files_include_each_other_in_no_circle() -> None:
    """A source counts with its header; `test_rooms` checks that a header declares what its own source has."""
    assert circles(c_files(SOURCES)) == []


def test_folders_of_c_files_include_each_other_in_no_circle() -> None:
    assert circles(folders(c_files(SOURCES), "/")) == []


def test_circles_are_found() -> None:
    graph = {"a": ["b"], "b": ["c"], "c": ["a", "d"], "d": [], "e": ["f"], "f": ["e", "a"], "g": ["g"]}
    assert circles(graph) == [["a", "b", "c"], ["e", "f"]]


@pytest.mark.parametrize(
    ("file", "text", "circle"),
    [
        ("plan/registers.py", "def f():\n    from .planner import Planner", {"plan.planner", "plan.registers"}),
        ("abi/core.py", "from ..abi import device", {"abi.core", "abi.device"}),
    ],
)
def test_a_circle_of_python_files_is_found(tmp_path: Path, file: str, text: str, circle: set[str]) -> None:
    copy = tmp_path / PACKAGE
    shutil.copytree(ROOT / PACKAGE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    with (copy / file).open("a") as appended:
        appended.write(f"\n{text}\n")
    assert any(circle <= set(found) for found in circles(python_files(copy, False)))


def test_a_circle_of_a_source_with_another_files_header_is_found(tmp_path: Path) -> None:
    copy = tmp_path / "csrc_shim"
    shutil.copytree(SOURCES, copy)
    with (copy / "device" / "order.c").open("a") as appended:
        appended.write('#include "device/stream.h"\n')
    assert any({"device/order", "device/stream"} <= set(found) for found in circles(c_files(copy)))


# ---- folders ----


def sources_by_folder() -> Iterator[tuple[str, int]]:
    for top in (ROOT / PACKAGE, SOURCES):
        for folder in [top, *(path for path in top.rglob("*") if path.is_dir())]:
            files = {path.stem for path in folder.iterdir() if path.suffix in (".py", ".c", ".h")} - {"__init__"}
            yield str(folder.relative_to(ROOT)), len(files)


def test_folders_have_at_most_a_dozen_sources() -> None:
    found = {folder: count for folder, count in sources_by_folder() if count > LARGE_FOLDERS.get(folder, MAX_SOURCES)}
    assert found == {}


# ---- private members ----


def private_uses(package: Path) -> Iterator[str]:
    """Where a module uses a name of another module of the package that begins with an underscore."""
    for path in sorted(package.rglob("*.py")):
        every = nodes(path.read_text())
        place = path.relative_to(package)
        imported = {
            alias.asname or alias.name
            for node in every
            if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith(PACKAGE))
            for alias in node.names
        }
        for node in every:
            if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith(PACKAGE)):
                names = [alias.name for alias in node.names if alias.name != "_bridge"]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported:
                names = [node.attr]
            else:
                continue
            for name in names:
                if re.match(r"_(?!_)(?!value2member_map_)", name):
                    yield f"{place}:{node.lineno} uses {name}"


def test_no_module_uses_private_members_of_another() -> None:
    assert list(private_uses(ROOT / PACKAGE)) == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("from ..plan.decoder import _decode", "_decode"),
        ("from .. import plan\nplan._decode()", "_decode"),
        (f"from {PACKAGE}.plan import decoder as d\nx = d._decode", "_decode"),
    ],
)
def test_a_use_of_a_private_member_is_found(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / "ep").mkdir()
    (tmp_path / "ep" / "thing.py").write_text(text)
    assert [found.endswith(f"uses {name}") for found in private_uses(tmp_path)] == [True]


# ---- predicates ----

RECORDING = {
    *("call_back", "chosen", "copy", "guard", "index_dtype", "launch", "library", "memset", "read_back", "record"),
    *("require", "require_shape", "settled", "settled_size"),
}
"""The methods of `Lowering` that record a step or add a guard."""


def _uses_context(call: ast.Call) -> bool:
    return any(isinstance(argument, ast.Name) and argument.id == "ctx" for argument in call.args)


def recording_predicates(package: Path) -> set[str]:
    """The predicates that record or guard, by themselves or by a function to which they give their context."""
    direct: set[str] = set()
    calls: dict[str, set[str]] = {}
    for path in package.rglob("*.py"):
        source = path.read_text()
        for function in nodes(source) if "ctx" in source else ():
            if not isinstance(function, ast.FunctionDef) or function.args.args[:1] == []:
                continue
            if function.args.args[0].arg != "ctx" or function.decorator_list:  # an operator may be called is_inf
                continue
            for call in ast.walk(function):
                if not isinstance(call, ast.Call):
                    continue
                target = call.func
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                    if target.value.id == "ctx" and target.attr in RECORDING:
                        direct.add(function.name)
                    elif _uses_context(call):
                        calls.setdefault(function.name, set()).add(target.attr)
                elif isinstance(target, ast.Name) and _uses_context(call):
                    calls.setdefault(function.name, set()).add(target.id)
    recording = set(direct)
    while more := {name for name, called in calls.items() if called & recording} - recording:
        recording |= more
    return {name for name in recording if re.match(r"_?(is|has|fits|wants)_", name)}


def test_predicates_neither_record_nor_guard() -> None:
    assert recording_predicates(ROOT / PACKAGE) <= RECORDING_PREDICATES


def test_a_predicate_that_guards_is_found(tmp_path: Path) -> None:
    (tmp_path / "thing.py").write_text(
        "def is_small(ctx, x):\n    return holds(ctx, x)\n\n\n"
        "def holds(ctx, x):\n    return ctx.guard(x)\n\n\n"
        "def is_large(ctx, x):\n    return ctx.known(x)\n"
    )
    assert recording_predicates(tmp_path) == {"is_small"}


# ---- comments ----


def constant_comments(source: str) -> Iterator[tuple[int, str]]:
    """The comment of each constant of a module, with its line: behind it, before it (``#:``), or the string after."""
    body, lines = parsed(source).body, source.splitlines()
    for node, following in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        if trailing := re.search(r"  # (.*)$", lines[(node.end_lineno or node.lineno) - 1]):
            yield node.lineno, trailing[1]
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            yield node.lineno, str(following.value.value).strip()
        above = node.lineno - 2
        while above >= 0 and lines[above].startswith("#:"):
            above -= 1
        if above < node.lineno - 2:
            yield node.lineno, lines[above + 1].removeprefix("#:").strip()


def fragments(package: Path) -> list[str]:
    """The comments of constants that begin in the middle of a sentence."""
    return [
        f"{path.relative_to(package)}:{line}: {comment}"
        for path in sorted(package.rglob("*.py"))
        for line, comment in constant_comments(path.read_text())
        if FRAGMENT.match(comment)
    ]


def test_comments_of_constants_name_what_they_are() -> None:
    found = fragments(ROOT / PACKAGE)
    allowed = sum(1 for fragment in found if fragment.split(":")[0] in FRAGMENTS)
    assert len(found) == allowed <= sum(FRAGMENTS.values()), "\n".join(found)


def test_a_fragment_is_found(tmp_path: Path) -> None:
    (tmp_path / "thing.py").write_text(
        'A = 1  # Of a row.\nB = 2\n"""That a thread has."""\n#: ...bytes.\nC = 3\nD = 4  # Offset in bytes\n'
    )
    assert len(fragments(tmp_path)) == 3


# ---- the exceptions ----


def test_exceptions_are_of_things_that_there_are() -> None:
    assert [folder for folder in LARGE_FOLDERS if not (ROOT / folder).is_dir()] == []
    modules = {".".join(arrow.module) for arrow in python_arrows(ROOT / PACKAGE)}
    assert set().union(*TYPE_CIRCLES) <= modules
