"""Which tests a command line of pytest runs."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

import tiers

ROOT = tiers.SECOND_TIER.parent.parent
SUITE = """
import pytest

def test_first(): pass

@pytest.mark.full
def test_second(): pass

@pytest.mark.full
@pytest.mark.gpu
def test_gpu(): pass
"""
TABLE = """
import pytest

@pytest.mark.parametrize("n", range(40))
def test_sampled(n): pass

@pytest.mark.every_case
@pytest.mark.parametrize("n", range(40))
def test_whole(n): pass
"""
COLLECT = """
import sys
import pytest
import tiers

class Names:
    def pytest_itemcollected(self, item):
        print("made", item.name)

    def pytest_collection_finish(self, session):
        for item in session.items:
            print("collected", item.name)

for line in sys.stdin.read().splitlines():
    print("command", line)
    arguments = line.split(" ", 1)  # an expression of markers may have spaces
    pytest.main(["-q", "--collect-only", "-p", "no:cacheprovider", *arguments], plugins=[tiers, Names()])
"""
COMMANDS = {
    "tests": {"test_first"},
    "tests/tools": {"test_first"},
    "tests/tools/test_suite.py": {"test_first", "test_second", "test_gpu"},
    "tests/tools/test_suite.py::test_second": {"test_second"},
    "-m full": {"test_second", "test_gpu"},
    "-m gpu": {"test_gpu"},
    "-m full or not full": {"test_first", "test_second", "test_gpu"},
}


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return the names of the collected tests by command line; ``tests/ops`` collects the parametrized tests. The key
    ``made`` has the names of all items that pytest made for the last command line, ``tests/ops``.
    """
    root = tmp_path_factory.mktemp("suite")
    (root / "pytest.ini").write_text("[pytest]\ntestpaths = tests\nmarkers =\n  full: x\n  gpu: x\n  every_case: x\n")
    for folder, name, text in (("tools", "test_suite.py", SUITE), ("ops", "test_table.py", TABLE)):
        (root / "tests" / folder).mkdir(parents=True)
        (root / "tests" / folder / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", COLLECT],
        cwd=root,
        env={"PYTHONPATH": str(Path(tiers.__file__).parent), "PATH": ""},
        input="\n".join([*COMMANDS, "tests/ops"]),
        capture_output=True,
        text=True,
    )
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("command "):
            found[command := line.removeprefix("command ")] = []
            found["made"] = []
        elif line.startswith("made "):
            found["made"].append(line.removeprefix("made "))
        elif line.startswith("collected "):
            found[command].append(line.removeprefix("collected "))
    assert len(found) == len(COMMANDS) + 2, done.stderr
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_line_runs_these_tests(collected: dict[str, list[str]], command: str) -> None:
    assert {name for name in collected[command] if "[" not in name} == COMMANDS[command]


def test_the_first_tier_has_a_sample_of_a_table_that_may_be_sampled(collected: dict[str, list[str]]) -> None:
    names = collected["tests/ops"]
    assert len([name for name in names if name.startswith("test_sampled")]) == tiers.MOST_VALUES
    assert len([name for name in names if name.startswith("test_whole")]) == 40


def test_a_run_makes_no_items_for_cases_that_it_leaves_out(collected: dict[str, list[str]]) -> None:
    assert sorted(collected["made"]) == sorted(collected["tests/ops"])


def test_workers_and_processes_of_tests_write_bytecode() -> None:
    assert not sys.dont_write_bytecode
    assert "PYTHONDONTWRITEBYTECODE" not in os.environ


def test_a_sample_of_one_value_is_one_case() -> None:
    names = [f"{operator}-{dtype}" for operator in "abcdefg" for dtype in "xyz"]
    assert len(tiers.sample(names, 1)) == 1


def test_a_sample_has_values_of_each_parameter() -> None:
    names = [f"{operator}-{dtype}-{dynamic}" for operator in "abcdefg" for dtype in "xyz" for dynamic in "01"]
    chosen = tiers.sample(names)
    assert len(chosen) == tiers.MOST_VALUES
    assert {name.split("-")[1] for name in chosen} == set("xyz")
    assert {name.split("-")[2] for name in chosen} == set("01")


def test_a_sample_does_not_depend_on_the_order_of_its_cases() -> None:
    names = [f"{first}-{second}" for first in "abcdefg" for second in "0123"]
    assert tiers.sample(names) == tiers.sample(names[::-1])


def test_each_line_of_the_second_tier_is_a_test() -> None:
    defined: dict[str, set[str]] = {}
    for line in tiers.read_second_tier():
        file, _, name = line.removesuffix(tiers.FURTHER_CASES).partition("::")
        if file not in defined:
            tree = ast.parse((ROOT / file).read_text())
            defined[file] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert name in defined[file], f"tests/second_tier.txt: {line} is not a test. Remove the line, or rename it"


# ---- choice of the second tier by measured times ----


@pytest.fixture(scope="module")
def test_time() -> ModuleType:
    spec = spec_from_file_location("test_time", ROOT / "bench" / "test_time.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record(test: str, seconds: float, *subjects: str, **kernels: float) -> dict[str, object]:
    facts = {"compiled": {}, "requested": kernels, "subjects": list(subjects), "further": False, "whole": False}
    return {"test": f"tests/{test}", "seconds": seconds, **facts}


def test_dear_tests_keep_one_case_and_the_dearest_none(test_time: ModuleType) -> None:
    records = [record(f"a.py::test_one[{case}]", 1.0) for case in "abcdefg"]
    records += [record("a.py::test_dear", 9.0), record("a.py::test_light", 0.5)]
    choice = test_time.Tiers(records)
    limit = choice.largest(8.0)
    assert choice.moved(limit) == ["tests/a.py::test_dear", "tests/a.py::test_one[*]"]
    assert choice.seconds(limit) == 1.5


def test_a_table_of_many_cheap_cases_keeps_them(test_time: ModuleType) -> None:
    records = [record(f"a.py::test_table[{case}]", 0.09) for case in range(30)]
    records += [record(f"a.py::test_few[{case}]", 1.0) for case in range(3)]
    records += [record("a.py::test_light", 0.5)]
    assert test_time.Tiers(records).moved(1.0) == ["tests/a.py::test_few[*]"]


def test_marked_tests_and_the_cheapest_of_a_file_and_of_an_operator_stay(test_time: ModuleType) -> None:
    records = [record(f"a.py::test_{name}", 9.0 + n, "operator  Relu-14") for n, name in enumerate(["one", "two"])]
    records += [
        record("b.py::test_alone", 9.0),
        record("b.py::test_other", 10.0),
        record("b.py::test_tan", 10.0, "Tan"),
    ]
    records += [record("b.py::test_marked", 99.0) | {"whole": True}]
    assert test_time.Tiers(records).moved(0.0) == ["tests/a.py::test_two", "tests/b.py::test_other"]


def test_tests_that_share_a_kernel_share_its_compilation(test_time: ModuleType) -> None:
    records = [record(f"a.py::test_{name}", 1.0, kernel=4.0) for name in ("one", "two")]
    choice = test_time.Tiers(records)
    assert choice.costs.of(records[:1]) == 1.0 + 2.0 * test_time.SECONDS_PER_EXPECTED
    assert choice.costs.total(records) == 2.0 + 4.0 * test_time.SECONDS_PER_EXPECTED


def test_the_report_names_operators_that_no_test_lowers(test_time: ModuleType) -> None:
    missing = test_time.unlowered_operators([record("a.py::test_one", 1.0, "operator  Relu-14")])
    assert "Relu" not in missing
    assert {"Tan", "com.microsoft Gelu"} <= set(missing)
