"""Mutants of expressions, which `bench/line_mutants.py` makes as it imports modules."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "bench"
SOURCE = """
LIMIT = 4

def larger(x: int, y: int = 1) -> bool:
    match x:
        case 7:
            return not y
    return x > LIMIT and y + 2 < x, f"{x + y}"
"""
CHANGES = [
    ("not y", "y"),
    ("x > LIMIT", "x >= LIMIT"),
    ("2", "3"),
    ("y + 2", "y - 2"),
    ("y + 2 < x", "y + 2 <= x"),
    ("x > LIMIT and y + 2 < x", "x > LIMIT or y + 2 < x"),
]


@pytest.fixture(scope="module")
def line_mutants() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        return importlib.import_module("line_mutants")


def test_mutants_are_expressions_of_functions(line_mutants: ModuleType) -> None:
    expressions = line_mutants.Expressions()
    expressions.visit(ast.parse(SOURCE))
    assert [(before, after) for _, before, after in expressions.found] == CHANGES


@pytest.mark.parametrize(("active", "result"), [(None, False), (1, True), (2, False), (5, True)])
def test_the_active_mutant_is_evaluated(line_mutants: ModuleType, active: int | None, result: bool) -> None:
    tree = line_mutants.Expressions({index: index for index in range(len(CHANGES))}).visit(ast.parse(SOURCE))
    evaluated: list[int] = []

    def switch(number: int) -> bool:
        evaluated.append(number)
        return number == active

    names: dict[str, Any] = {"line_mutant": switch}
    exec(compile(tree, "source", "exec"), names)
    assert names["larger"](4)[0] is result
    assert set(evaluated) >= {1, 5}
