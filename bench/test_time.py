"""Measures the CPU time of the test suite by stage, and chooses which tests the first tier keeps.

    python bench/test_time.py [--keep FILE] [--rows 40] [pytest's arguments]
    python bench/test_time.py --report FILE [--rows 40]
    python bench/test_time.py --choose FILE --budget 700

Runs pytest with this file as a plugin. For each test it records the CPU seconds of the process and of its child
processes. The process's seconds are divided into stages: Numba's front end, the compilers for the emulated device and
for GPUs, session creation, Runs, and the rest. ``waiting`` is wall time without CPU time; it is meaningful only on an
idle machine.

A JSON object is appended to FILE as each test ends, so an interrupted run can be reported. It also has the kernels that
the test requested, with the CPU seconds of those that it compiled. Tests that share a kernel compile it once, so a
selection of tests takes less than the sum of their times alone.

``--choose`` adds lines to tests/second_tier.txt, such that the first tier takes ``--budget`` CPU seconds on an empty
kernel cache. The most expensive tests keep only one case; if this case is expensive too, the test moves to the second
tier. Tests with many cheap cases keep all of them. The cheapest test of each file, operator and command keeps a case,
and tests with the marker ``every_case`` keep all. Measure the first tier before; its kernels may be in the cache. To
choose from all tests, empty tests/second_tier.txt and measure.
"""

from __future__ import annotations

import argparse
import bisect
import functools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "harness"))
from tiers import FURTHER_CASE, FURTHER_CASES, SECOND_TIER, read_second_tier, sample

ROOT = Path(__file__).resolve().parent.parent
RESULTS_VARIABLE = "TEST_TIME_RESULTS"
COMPILER_STAGES = {
    "kernel_ir": "numba",
    "inline_into_kernel": "llvm: inline",
    "optimized_module": "llvm: optimize",
    "compile_emulated": "llvm: emit",
    "compile_cuda": "nvvm, nvJitLink",
    "compile_foreign": "nvrtc",
}
"""Stages by function of `ort_cuda_plugin.compiler.compile`. The time of a nested call counts for the inner stage only.
"""
Record = dict[str, Any]
"""The JSON object that `Recorder` writes for a test."""
COLUMNS = (*COMPILER_STAGES.values(), "create session", "run session", "other", "child processes")


class Stages:
    """CPU seconds of this process by stage; nested stages do not count twice."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.stack: list[str] = []
        self.since = time.process_time()

    def switch(self) -> None:
        now = time.process_time()
        self.seconds[self.stack[-1] if self.stack else "other"] += now - self.since
        self.since = now

    def wrap(self, owner: Any, name: str, stage: str) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def measured(*arguments: Any, **named: Any) -> Any:
            self.switch()
            self.stack.append(stage)
            try:
                return function(*arguments, **named)
            finally:
                self.switch()
                self.stack.pop()

        for method in ("cache_clear", "cache_info"):  # tests call them
            if hasattr(function, method):
                setattr(measured, method, getattr(function, method))
        setattr(owner, name, measured)

    def take(self) -> dict[str, float]:
        self.switch()
        seconds = {stage: round(value, 4) for stage, value in self.seconds.items() if value >= 0.0001}
        self.seconds.clear()
        return seconds


def child_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


class Recorder:
    """The pytest plugin: records each test in the process that runs it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stages = Stages()
        self.requested: dict[str, float] = {}
        self.compiled: dict[str, float] = {}
        self.subjects: set[str] = set()

    def write(self, record: dict[str, object]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def instrument(self) -> None:
        import onnxruntime

        from ort_cuda_plugin.compiler.library import kernel_library
        from ort_cuda_plugin.compiler.library.isolation import import_compiler

        compiler = import_compiler()
        for name, stage in COMPILER_STAGES.items():
            self.stages.wrap(compiler, name, stage)
        session = onnxruntime.InferenceSession
        self.stages.wrap(session, "__init__", "create session")
        for name in ("run", "run_with_iobinding", "run_with_ort_values", "run_async"):
            self.stages.wrap(session, name, "run session")
        self.note_kernels(kernel_library, compiler)
        self.note_subjects()

    def note_subjects(self) -> None:
        from ort_cuda_plugin import cli
        from ort_cuda_plugin.ops.registry import Operator

        lower, run_command = Operator.lower, cli._run

        def noted_lowering(operator: Any, *arguments: Any) -> Any:
            self.subjects.add(f"operator {operator.domain} {operator.name}-{operator.since}")
            return lower(operator, *arguments)

        def noted_command(words: list[str]) -> int:
            self.subjects.add(f"command {words[0] if words else ''}")
            return run_command(words)

        Operator.lower, cli._run = noted_lowering, noted_command  # type: ignore[method-assign,assignment]

    def note_kernels(self, kernel_library: Any, compiler: Any) -> None:
        key_of, compile_kernel = kernel_library.kernel_key, compiler.compile_kernel

        def noted_key(spec: Any, target: Any) -> str:
            key: str = key_of(spec, target)
            self.requested[key[:16]] = round(kernel_library.expected_seconds(spec), 4)
            return key

        def noted_compilation(spec: Any, target: Any, *rest: Any) -> Any:
            begun = time.thread_time()
            try:
                return compile_kernel(spec, target, *rest)
            finally:
                self.compiled[key_of(spec, target)[:16]] = round(time.thread_time() - begun, 4)

        kernel_library.kernel_key, compiler.compile_kernel = noted_key, noted_compilation

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.config.option.numprocesses and "PYTEST_XDIST_WORKER" not in os.environ:
            return
        self.write({"collected": len(session.items), "seconds": round(time.process_time(), 2)})
        self.instrument()
        self.stages.take()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.stages.take()
        self.requested, self.compiled, self.subjects = {}, {}, set()
        wall, own, children = time.perf_counter(), time.process_time(), child_seconds()
        try:
            return (yield)
        finally:
            spent, in_children = time.process_time() - own, child_seconds() - children
            stages = self.stages.take()
            stages["child processes"] = round(in_children, 4)
            self.write(
                {
                    "test": item.nodeid,
                    "seconds": round(spent + in_children, 4),
                    "waiting": round(max(0.0, time.perf_counter() - wall - spent - in_children), 4),
                    "stages": stages,
                    "requested": self.requested,
                    "compiled": self.compiled,
                    "subjects": sorted(self.subjects),
                    "further": any(mark.kwargs.get("reason") == FURTHER_CASE for mark in item.iter_markers("full")),
                    "whole": item.get_closest_marker("every_case") is not None,
                }
            )


def pytest_configure(config: pytest.Config) -> None:
    if path := os.environ.get(RESULTS_VARIABLE):
        config.pluginmanager.register(Recorder(Path(path)), "test_time_recorder")


# ---- report ----


def add(totals: dict[str, dict[str, float]], row: str, record: dict[str, Any]) -> None:
    for stage, seconds in record["stages"].items():
        totals[row][stage] += seconds
    totals[row]["all"] += record["seconds"]
    totals[row]["tests"] += 1


def table(title: str, totals: dict[str, dict[str, float]], rows: int) -> Iterator[str]:
    yield f"\n{title}"
    heads = ["CPU s", "tests", *COLUMNS]
    widths = [max(8, len(head) + 2) for head in heads]
    yield "".join(head.rjust(width) for head, width in zip(heads, widths, strict=True))
    for name, values in sorted(totals.items(), key=lambda entry: -entry[1]["all"])[:rows]:
        cells = [f"{values['all']:.1f}", f"{values['tests']:.0f}", *(f"{values[column]:.1f}" for column in COLUMNS)]
        yield "".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) + "  " + name


def unlowered_operators(records: Iterable[Record]) -> list[str]:
    """Return the operators that no test lowers."""
    from ort_cuda_plugin.ops import registry

    lowered = {subject.rpartition("-")[0] for record in records for subject in record["subjects"]}
    names = {f"operator {operator.domain} {operator.name}" for operator in registry.operators()}
    return sorted(name.removeprefix("operator ").strip() for name in names - lowered)


def report(path: Path, rows: int) -> Iterator[str]:
    def groups() -> dict[str, dict[str, float]]:
        return defaultdict(lambda: defaultdict(float))

    whole, files, tests = groups(), groups(), groups()
    records = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if "test" not in record:
            yield f"collected {record['collected']} tests in {record['seconds']} CPU s of one process"
            continue
        records.append(record)
        add(whole, "all", record)
        add(files, record["test"].partition("::")[0], record)
        add(tests, record["test"].partition("[")[0], record)
    yield from table("all", whole, 1)
    yield from table("files", files, rows)
    yield from table("tests, all their parameters", tests, rows)
    yield f"\noperators that no test lowers: {', '.join(unlowered_operators(records)) or 'none'}"


# ---- choice of the second tier ----

SECONDS_PER_EXPECTED = 0.9
"""CPU seconds of a compilation per second of its `expected_seconds`, for kernels that were in the cache."""
LIMIT_OF_ONE_CASE = 3.0
"""A test leaves the first tier if the one case that it would keep takes more than this multiple of the limit for all
cases of a test.
"""


SHARE_OF_A_CASE = 0.1
"""A test keeps all cases if their mean time is at most this fraction of the limit for all cases of a test: many cheap
cases find more mistakes than one expensive case.
"""


class Costs:
    """CPU seconds of tests with an empty kernel cache."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.compilation: dict[str, float] = {}
        """CPU seconds of the compilation of each kernel."""
        users: dict[str, set[str]] = defaultdict(set)
        for record in records:
            for key, expected in record["requested"].items():
                self.compilation.setdefault(key, SECONDS_PER_EXPECTED * expected)
                users[key].add(function_of(record))
        for record in records:
            self.compilation |= record["compiled"]
        self.users = {key: len(functions) for key, functions in users.items()}

    @staticmethod
    def own(cases: Iterable[Record]) -> float:
        return sum(float(case["seconds"] - sum(case["compiled"].values())) for case in cases)

    @staticmethod
    def kernels(cases: Iterable[Record]) -> set[str]:
        return {key for case in cases for key in case["requested"]}

    def of(self, cases: Sequence[Record]) -> float:
        """Return the seconds of one test's cases. A kernel's compilation is divided among the tests that request it."""
        return self.own(cases) + sum(self.compilation[key] / self.users[key] for key in self.kernels(cases))

    def total(self, cases: Sequence[Record]) -> float:
        """Return the seconds of all these cases, with each kernel compiled once."""
        return self.own(cases) + sum(self.compilation[key] for key in self.kernels(cases))


def function_of(record: Record) -> str:
    return str(record["test"]).partition("[")[0]


class Tiers:
    """Chooses a cheaper first tier from the tests of a measured one.

    The new tier has all cases of a test, one case, or none.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self.costs = Costs(records)
        self.tests: dict[str, list[Record]] = defaultdict(list)
        for record in records:
            if not record["further"]:
                self.tests[function_of(record)].append(record)
        self.alone = {test: one_case(cases) for test, cases in self.tests.items()}
        self.needed_alone, self.needed_whole = self._needed()

    def _needed(self) -> tuple[set[str], set[str]]:
        """Return the tests that must keep one case, and those that must keep all cases.

        The former are the cheapest test of each file and of each subject, the latter have the marker ``every_case``.
        """
        marked = {test for test, cases in self.tests.items() if any(case["whole"] for case in cases)}
        seen: set[str] = set()
        needed = []
        for choice in (self.alone, self.tests):
            kept = set()
            for test in sorted(choice, key=lambda test: self.costs.of(choice[test])):
                subjects = {f"file {test.partition('::')[0]}"}
                subjects.update(subject for case in choice[test] for subject in case["subjects"])
                if subjects - seen:
                    kept.add(test)
                    seen |= subjects
            needed.append(kept)
        return needed[0], needed[1] | marked

    def choose(self, limit: float) -> dict[str, list[Record]]:
        """Return the cases of each test in the first tier for a limit.

        A test keeps all cases if they take at most ``limit`` seconds together, or on average at most `SHARE_OF_A_CASE`
        of ``limit``.
        """
        tier = {}
        for test, cases in self.tests.items():
            alone = self.alone[test]
            most = limit * max(1, SHARE_OF_A_CASE * len(cases))
            if test in self.needed_whole or self.costs.of(cases) <= most:
                tier[test] = cases
            elif test in self.needed_alone or self.costs.of(alone) <= LIMIT_OF_ONE_CASE * limit:
                tier[test] = alone
        return tier

    def seconds(self, limit: float) -> float:
        return self.costs.total([case for cases in self.choose(limit).values() for case in cases])

    def largest(self, budget: float) -> float:
        """Return the largest limit for which the first tier takes at most ``budget`` seconds."""
        limits = sorted({self.costs.of(cases) for cases in self.tests.values()})
        return limits[max(0, bisect.bisect_right(limits, budget, key=self.seconds) - 1)]

    def moved(self, limit: float) -> list[str]:
        """Return the lines to add to tests/second_tier.txt."""
        tier = self.choose(limit)
        moved = [test for test in self.tests if test not in tier]
        return moved + [f"{test}{FURTHER_CASES}" for test, cases in tier.items() if len(cases) < len(self.tests[test])]


def one_case(cases: Sequence[Record]) -> list[Record]:
    """Return the records of the case that stays in the first tier for a line of second_tier.txt that ends with [*]."""
    names = [case["test"].partition("[")[2].removesuffix("]") for case in cases]
    one = sample(names, 1)
    return [case for case, name in zip(cases, names, strict=True) if name in one]


def write_second_tier(records: Sequence[Record], budget: float) -> str:
    """Move the tests that take longest to the second tier, so that the others fit into the budget; return a summary."""
    tiers = Tiers(records)
    limit = tiers.largest(budget)
    tier, moved = tiers.choose(limit), tiers.moved(limit)
    lines = {line.removesuffix(FURTHER_CASES): line for line in read_second_tier()}
    lines |= {line.removesuffix(FURTHER_CASES): line for line in moved}
    head = (
        "# Tests of the second tier, which `pytest` leaves out and `pytest -m full` runs: those that take longest.",
        "# [*]: one case stays in the first tier. `python bench/test_time.py --choose` adds lines to this file.",
    )
    SECOND_TIER.write_text("\n".join([*head, *sorted(lines.values())]) + "\n")
    chosen = [case for cases in tier.values() for case in cases]
    return (
        f"first tier: {tiers.costs.total(chosen):.0f} CPU s, {len(chosen)} cases of {len(tier)} tests, all cases of a "
        f"test at most {limit:.1f} s; moved: {len(tiers.tests) - len(tier)} tests, and the further cases of "
        f"{len(moved) - len(tiers.tests) + len(tier)}; measured: {tiers.costs.total(records):.0f} CPU s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--keep", type=Path, metavar="FILE", help="append the results to this file")
    parser.add_argument("--report", type=Path, metavar="FILE", help="report these results; run nothing")
    parser.add_argument(
        "--choose",
        type=Path,
        metavar="FILE",
        help="add slow tests to the second tier (pytest -m full) by these results; run nothing",
    )
    parser.add_argument(
        "--budget", type=float, default=700, help="limit of CPU seconds of the first tier (pytest without -m)"
    )
    parser.add_argument("--rows", type=int, default=40, help="rows of each table")
    options, arguments = parser.parse_known_args()
    if options.report:
        print("\n".join(report(options.report, options.rows)))
        return 0
    if options.choose:
        records = [json.loads(line) for line in options.choose.read_text().splitlines()]
        print(write_second_tier([record for record in records if "test" in record], options.budget))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = options.keep or Path(folder) / "results.jsonl"
        path = path.resolve()
        path.touch()
        environment = os.environ | {
            RESULTS_VARIABLE: str(path),
            "PYTHONPATH": os.pathsep.join([str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")]),
        }
        command = [sys.executable, "-m", "pytest", "-p", "test_time", *arguments]
        code = subprocess.run(command, cwd=ROOT, env=environment).returncode
        print("\n".join(report(path, options.rows)))
    return code


if __name__ == "__main__":
    sys.exit(main())
