"""Mutation testing: changes random expressions of the package, and reports which changes make no test fail.

    python bench/line_mutants.py [--count 200] [--seed 0] [--folders passes schedule] [--tests 40] [-- tests/graph]

A mutant changes an expression in a function: a comparison, `and` or `or`, `not`, an arithmetic operator, or an integer.
A first run of pytest records which tests evaluate which of the chosen expressions. Then each mutant is active while
pytest runs the tests that evaluate it, at most ``--tests`` of them, until one fails.

The mutants are made as modules are imported, with this file as a plugin of pytest: no file changes. Child processes of
tests have no mutants. Arguments after ``--`` are those of the first run; they select tests, such as a folder.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ort_cuda_plugin"
SETTINGS_VARIABLE = "LINE_MUTANTS"
"""Environment variable: `Settings` as JSON, for the process that runs the tests."""
FOLDERS = ("clusters", "passes", "plan", "schedule")
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}
"""For each operator, the operator that replaces it."""


@dataclass(frozen=True)
class Settings:
    folders: Sequence[str]
    count: int
    seed: int
    records: str
    """Path of a file to which each test appends a line: the numbers of the mutants that the test evaluates."""
    active: int = -1


@dataclass(frozen=True)
class Mutant:
    path: Path
    index: int
    """Index of the expression among the mutable expressions of its file."""
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.before} -> {self.after}"


# ---- mutants ----


def changed(node: ast.expr) -> ast.expr | None:
    """Return a mutated copy of the expression, or None if no mutation applies to it."""
    made = copy.deepcopy(node)
    match made:
        case ast.Compare(ops=[operator]) if type(operator) in SWAPS:
            made.ops = [SWAPS[type(operator)]()]  # type: ignore[list-item]
        case ast.BoolOp(op=operator) | ast.BinOp(op=operator) if type(operator) in SWAPS:
            made.op = SWAPS[type(operator)]()  # type: ignore[assignment]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.Constant(value=int(value)) if type(value) is int:
            made.value = value + 1
        case _:
            return None
    return made


class Expressions(ast.NodeTransformer):
    """Numbers the mutable expressions of functions, in order. Each expression whose number is in ``chosen`` is replaced
    by a switch between itself and its mutant.
    """

    def __init__(self, chosen: dict[int, int] | None = None) -> None:
        self.chosen = chosen or {}
        self.in_function = False
        self.found: list[tuple[int, str, str]] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        outer, self.in_function = self.in_function, True
        node.body = [self.visit(each) for each in node.body]  # not annotations, defaults and decorators
        self.in_function = outer
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.value = self.visit(node.value) if node.value is not None else None
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node  # f-strings are mostly error messages, which are not mutated

    def visit_MatchValue(self, node: ast.MatchValue) -> ast.AST:
        return node  # a match pattern cannot contain a call, so no switch is possible

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        made = changed(node) if self.in_function and isinstance(node, ast.expr) else None
        if made is None:
            return node
        assert isinstance(node, ast.expr)
        self.found.append((node.lineno, ast.unparse(node), ast.unparse(made)))
        number = self.chosen.get(len(self.found) - 1)
        if number is None:
            return node
        switch = ast.Call(ast.Name("line_mutant", ast.Load()), [ast.Constant(number)], [])
        return ast.fix_missing_locations(ast.copy_location(ast.IfExp(switch, made, node), node))


def mutants(settings: Settings) -> list[Mutant]:
    every = []
    for path in sorted(path for folder in settings.folders for path in (PACKAGE / folder).rglob("*.py")):
        expressions = Expressions()
        expressions.visit(ast.parse(path.read_text()))
        every += [Mutant(path, index, *found) for index, found in enumerate(expressions.found)]
    return random.Random(settings.seed).sample(every, min(settings.count, len(every)))


# ---- the plugin of pytest ----


class Loader(importlib.machinery.SourceFileLoader):
    """Import loader that compiles a module with the switches of its mutants."""

    chosen: dict[int, int]

    def get_code(self, fullname: str) -> CodeType:
        tree = Expressions(self.chosen).visit(ast.parse(self.get_data(self.path)))
        code: CodeType = compile(tree, self.path, "exec")
        return code


class Finder(importlib.abc.MetaPathFinder):
    def __init__(self, settings: Settings) -> None:
        self.chosen: dict[str, dict[int, int]] = defaultdict(dict)
        for number, mutant in enumerate(mutants(settings)):
            self.chosen[str(mutant.path)][mutant.index] = number

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin not in self.chosen:
            return None
        loader = Loader(fullname, spec.origin)
        loader.chosen = self.chosen[spec.origin]
        return importlib.util.spec_from_file_location(fullname, spec.origin, loader=loader)


class Recorder:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.evaluated: set[int] = set()

    def switch(self, number: int) -> bool:
        self.evaluated.add(number)
        return number == self.settings.active

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.when == "call":
            record = {"test": item.nodeid, "passed": report.passed, "seconds": report.duration}
            with Path(self.settings.records).open("a") as file:
                file.write(json.dumps(record | {"mutants": sorted(self.evaluated)}) + "\n")
        return report

    def pytest_runtest_setup(self) -> None:
        self.evaluated.clear()


if SETTINGS_VARIABLE in os.environ:  # pytest imports this plugin before conftest.py imports the package
    RECORDER = Recorder(Settings(**json.loads(os.environ[SETTINGS_VARIABLE])))
    builtins.line_mutant = RECORDER.switch  # type: ignore[attr-defined]
    sys.meta_path.insert(0, Finder(RECORDER.settings))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(RECORDER, "line_mutants_recorder")


# ---- the runs ----


def run(settings: Settings, arguments: Sequence[str], timeout: float | None = None) -> list[dict[str, Any]]:
    """Run pytest and return its records. Raises TimeoutExpired."""
    Path(settings.records).write_text("")
    environment = os.environ | {
        SETTINGS_VARIABLE: json.dumps(asdict(settings)),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "pytest", "-p", "line_mutants", "-p", "no:cacheprovider", "-q", "-n", "0"]
    subprocess.run([*command, *arguments], cwd=ROOT, env=environment, timeout=timeout, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in Path(settings.records).read_text().splitlines()]


def verdict(settings: Settings, tests: Sequence[str], seconds: float) -> str:
    if not tests:
        return "not evaluated"
    try:
        records = run(settings, ["-x", *tests], timeout=60 + 10 * seconds)
    except subprocess.TimeoutExpired:
        return "noticed: the tests hang"
    failed = [record["test"] for record in records if not record["passed"]]
    if failed:
        return f"noticed: {failed[0]}"
    return "survived" if len(records) == len(tests) else "noticed: the process ended"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=200, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choice of mutants")
    parser.add_argument(
        "--folders", nargs="+", default=FOLDERS, help="folders of ort_cuda_plugin whose lines are mutated"
    )
    parser.add_argument(
        "--tests", type=int, default=40, help="number of tests that run for each mutant; the shortest are chosen"
    )
    parser.add_argument("arguments", nargs="*", help="further arguments of pytest")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(options.folders, options.count, options.seed, str(Path(folder) / "records"))
        records = [record for record in run(settings, options.arguments) if record["passed"]]
        records.sort(key=lambda record: float(record["seconds"]))
        counts: Counter[str] = Counter()
        for number, mutant in enumerate(mutants(settings)):
            evaluating = [record for record in records if number in record["mutants"]][: options.tests]
            seconds = sum(record["seconds"] for record in evaluating)
            said = verdict(replace(settings, active=number), [record["test"] for record in evaluating], seconds)
            counts[said.partition(":")[0]] += 1
            print(f"{said}\n    {mutant}", flush=True)
        print(", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())) + f" of {counts.total()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
