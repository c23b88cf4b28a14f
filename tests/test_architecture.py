"""The structure of the code: no cycles of files, small folders, predicates without effects, comments that stand alone.

`test_rooms` checks which folder may use which. The sets of exceptions here may only become smaller.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from source_graph import (
    PACKAGE,
    SOURCES,
    Texts,
    c_files,
    c_texts,
    circles,
    folders,
    nodes,
    parsed,
    python_files,
    python_texts,
    with_text,
)

MAX_SOURCES = 12  # per folder; a C source and its header count once
MAX_CLASS_LINES = 300
MAX_FUNCTION_LINES = 80  # without the signature, which an operator's inputs and attributes make long
MAX_CONTEXT_MANAGERS = 8  # of one with statement

RECORDING_PREDICATES: set[str] = set()
"""Exceptions: predicates (``is_``, ``has_``, ``fits_``, ``wants_``) that record a step or add a guard to the plan."""

FRAGMENT = re.compile(r"(Of|That|So many|So few|Which|Whose)\b|\.\.\.")


# ---- cycles ----


def test_python_files_import_each_other_in_no_circle() -> None:
    """Imports for types (``if TYPE_CHECKING:``) count as well."""
    assert circles(python_files(python_texts())) == []


def test_c_files_include_each_other_in_no_circle() -> None:
    """A source and its header are one file here; `test_rooms` checks that a header declares its source's functions."""
    assert circles(c_files(c_texts())) == []


def test_folders_of_c_files_include_each_other_in_no_circle() -> None:
    assert circles(folders(c_files(c_texts()), "/")) == []


def test_circles_are_found() -> None:
    graph = {"a": ["b"], "b": ["c"], "c": ["a", "d"], "d": [], "e": ["f"], "f": ["e", "a"], "g": ["g"]}
    assert circles(graph) == [["a", "b", "c"], ["e", "f"]]


def test_a_circle_of_python_files_is_found(subtests: pytest.Subtests) -> None:
    for file, text, circle in (
        ("plan/registers.py", "def f():\n    from .planner import Planner", {"plan.planner", "plan.registers"}),
        ("abi/core.py", "from ..abi import device", {"abi.core", "abi.device"}),
        ("arrays.py", "from . import get_ep_name", {"__init__", "arrays"}),
    ):
        with subtests.test(file=file):
            found = circles(python_files(with_text(python_texts(), file, text)))
            assert any(circle <= set(each) for each in found)


def test_a_circle_of_a_source_with_another_files_header_is_found() -> None:
    files = with_text(c_texts(), "device/order.c", '#include "device/stream.h"')
    assert any({"device/order", "device/stream"} <= set(found) for found in circles(c_files(files)))


# ---- folders ----


def sources_by_folder() -> Counter[str]:
    files = [f"{PACKAGE}/{file}" for file in python_texts()] + [f"{SOURCES.name}/{file}" for file in c_texts()]
    pairs = {file.rpartition(".")[0] for file in files}
    return Counter(pair.rpartition("/")[0] for pair in pairs if not pair.endswith("/__init__"))


def test_folders_have_at_most_a_dozen_sources() -> None:
    assert {folder: count for folder, count in sources_by_folder().items() if count > MAX_SOURCES} == {}


# ---- lengths ----


def long_definitions(files: Texts) -> dict[str, int]:
    """Return the classes and functions that are too long, as ``file: name``, and their lines without the signature."""
    found: dict[str, int] = {}
    for place, text in files.items():
        for cls in nodes(text, ast.ClassDef):
            if (lines := _lines(cls.lineno, cls)) > MAX_CLASS_LINES:
                found[f"{place}: {cls.name}"] = lines
        for function in nodes(text, ast.FunctionDef):
            if (lines := _lines(function.body[0].lineno, function)) > MAX_FUNCTION_LINES:
                found[f"{place}: {function.name}"] = lines
    return found


def _lines(first: int, node: ast.ClassDef | ast.FunctionDef) -> int:
    return (node.end_lineno or first) - first + 1


def test_classes_and_functions_are_short() -> None:
    assert long_definitions(python_texts()) == {}


def test_long_classes_and_functions_are_found() -> None:
    signature, lines = "x,\n" * 50, "    pass\n" * 81
    text = f"def f(\n{signature}):\n{lines[9:]}def g():\n{lines}" + "class A:\n" + lines * 4
    assert long_definitions({"thing.py": text}) == {"thing.py: g": 81, "thing.py: A": 325}


def long_with_statements(files: Texts) -> list[str]:
    found = []
    for file, text in files.items():
        statements: list[ast.With | ast.AsyncWith] = [*nodes(text, ast.With), *nodes(text, ast.AsyncWith)]
        found += [f"{file}:{each.lineno}" for each in statements if len(each.items) > MAX_CONTEXT_MANAGERS]
    return found


def test_with_statements_have_few_context_managers() -> None:
    """The compilers of Python 3.12.0 and 3.12.1 crash at 20 context managers of one with statement, which ends pip."""
    assert long_with_statements(python_texts()) == []


def test_a_long_with_statement_is_found() -> None:
    text = f"with {', '.join(9 * ['a()'])}:\n    pass\nwith {', '.join(8 * ['a()'])}:\n    pass\n"
    assert long_with_statements({"thing.py": text}) == ["thing.py:1"]


# ---- private members ----


def private_uses(files: Texts) -> Iterator[str]:
    """Yield each use of a name that begins with an underscore and belongs to another module of the package."""
    for place, text in files.items():
        imports = [x for x in nodes(text, ast.ImportFrom) if x.level or (x.module or "").startswith(PACKAGE)]
        imported = {alias.asname or alias.name for node in imports for alias in node.names}
        used = [(node.lineno, alias.name) for node in imports for alias in node.names if alias.name != "_bridge"]
        for node in nodes(text, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id in imported:
                used.append((node.lineno, node.attr))
        for line, name in used:
            if re.match(r"_(?!_)(?!value2member_map_)", name):
                yield f"{place}:{line} uses {name}"


def test_no_module_uses_private_members_of_another() -> None:
    assert list(private_uses(python_texts())) == []


def test_a_use_of_a_private_member_is_found(subtests: pytest.Subtests) -> None:
    for text in (
        "from ..plan.decoder import _decode",
        "from .. import plan\nplan._decode()",
        f"from {PACKAGE}.plan import decoder as d\nx = d._decode",
    ):
        with subtests.test(text=text):
            assert [found.endswith("uses _decode") for found in private_uses({"ep/thing.py": text})] == [True]


# ---- predicates ----

RECORDING = {
    *("call_back", "chosen", "copy", "guard", "index_dtype", "launch", "library", "memset", "read_back", "record"),
    *("require", "settled", "settled_size"),
}
"""Methods of `Lowering` that record a step or add a guard."""


def _uses_context(call: ast.Call) -> bool:
    return any(isinstance(argument, ast.Name) and argument.id == "ctx" for argument in call.args)


def recording_predicates(files: Texts) -> set[str]:
    """Return the predicates that record a step or add a guard, directly or by a function that gets their context."""
    direct: set[str] = set()
    calls: dict[str, set[str]] = {}
    for source in files.values():
        for function in nodes(source, ast.FunctionDef):
            takes_context = [argument.arg for argument in function.args.args[:1]] == ["ctx"]
            if not takes_context or function.decorator_list:  # an operator may be called is_inf
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
    assert recording_predicates(python_texts()) <= RECORDING_PREDICATES


def test_a_predicate_that_guards_is_found() -> None:
    text = (
        "def is_small(ctx, x):\n    return holds(ctx, x)\n\n\n"
        "def holds(ctx, x):\n    return ctx.guard(x)\n\n\n"
        "def is_large(ctx, x):\n    return ctx.known(x)\n"
    )
    assert recording_predicates({"thing.py": text}) == {"is_small"}


# ---- comments ----


def constant_comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the comment of each constant of a module: behind it, before it (``#:``), or the string after
    it.
    """
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


def fragments(files: Texts) -> list[str]:
    """Return the comments of constants that begin in the middle of a sentence."""
    return [
        f"{file}:{line}: {comment}"
        for file, text in files.items()
        for line, comment in constant_comments(text)
        if FRAGMENT.match(comment)
    ]


def test_comments_of_constants_name_what_they_are() -> None:
    assert fragments(python_texts()) == []


def test_a_fragment_is_found() -> None:
    text = 'A = 1  # Of a row.\nB = 2\n"""That a thread has."""\n#: ...bytes.\nC = 3\nD = 4  # Offset in bytes\n'
    assert len(fragments({"thing.py": text})) == 3
