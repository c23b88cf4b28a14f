"""Runs tests and prints the share of lines and branches that they execute, by folder: Python by coverage.py, C by gcov.

The library in the package folder is built with coverage counters first, and built again without them at the end. Two
kinds of code are not counted: kernels, which Numba compiles, and code in processes that are killed.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "coverage"
WORK = ROOT / "build" / "shim-coverage"


@dataclass
class Count:
    """Lines and branches of a folder, and how many of them ran."""

    lines: int = 0
    lines_run: int = 0
    branches: int = 0
    branches_run: int = 0

    def add(self, other: Count) -> None:
        self.lines += other.lines
        self.lines_run += other.lines_run
        self.branches += other.branches
        self.branches_run += other.branches_run


def folder_of(file: str) -> str:
    """Return the folder by which a file counts: the first two folders of its path."""
    return "/".join(Path(file).parts[:-1][:2])


def python_counts(report: Mapping[str, Any]) -> dict[str, Count]:
    """Return the counts of each file in the report of ``coverage json``."""
    return {
        file: Count(
            entry["summary"]["num_statements"],
            entry["summary"]["covered_lines"],
            entry["summary"]["num_branches"],
            entry["summary"]["covered_branches"],
        )
        for file, entry in report["files"].items()
    }


def c_counts(reports: Iterable[Mapping[str, Any]]) -> dict[str, Count]:
    """Return the counts of each file in gcov's JSON reports; several objects may contain one header."""
    lines: dict[tuple[str, int], int] = defaultdict(int)
    branches: dict[tuple[str, int, int], int] = defaultdict(int)
    for report in reports:
        for file in report["files"]:
            path = Path(report["current_working_directory"], file["file"])
            if not path.is_relative_to(ROOT / "csrc_shim"):
                continue
            name = str(path.relative_to(ROOT))
            for line in file["lines"]:
                lines[name, line["line_number"]] += line["count"]
                for number, branch in enumerate(line["branches"]):
                    branches[name, line["line_number"], number] += branch["count"]
    counts: dict[str, Count] = defaultdict(Count)
    for (name, _), times in lines.items():
        counts[name].add(Count(lines=1, lines_run=times > 0))
    for (name, _, _), times in branches.items():
        counts[name].add(Count(branches=1, branches_run=times > 0))
    return dict(counts)


def table(counts: Mapping[str, Count]) -> str:
    """Return a Markdown table with a row for each folder, and a row of totals."""
    folders: dict[str, Count] = defaultdict(Count)
    for file, count in counts.items():
        folders[folder_of(file)].add(count)
        folders["all"].add(count)
    rows = sorted(folders, key=lambda folder: (folder == "all", folder))
    return "\n".join(
        [
            "| folder | lines | executed | branches | executed |",
            "|---|---|---|---|---|",
            *(f"| {folder} | {_shares(folders[folder])} |" for folder in rows),
        ]
    )


def _shares(count: Count) -> str:
    return f"{_share(count.lines, count.lines_run)} | {_share(count.branches, count.branches_run)}"


def _share(total: int, executed: int) -> str:
    return f"{total} | {100 * executed / total:.1f} %" if total else "0 | -"


def gcov_reports() -> Iterable[Mapping[str, Any]]:
    """Yield gcov's report of each object that a process has run."""
    output = FOLDER / "gcov"
    output.mkdir(exist_ok=True)
    for data in sorted(WORK.glob("*.gcda")):
        command = ["gcov", "--json-format", "--branch-probabilities", str(data)]
        subprocess.run(command, cwd=output, check=True, stdout=subprocess.DEVNULL)
        (written,) = output.glob("*.gcov.json.gz")
        yield json.loads(gzip.decompress(written.read_bytes()))
        written.unlink()


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    FOLDER.mkdir(parents=True, exist_ok=True)
    for former in [*FOLDER.glob("python*"), *WORK.glob("*.gcda")]:
        former.unlink()
    build = [sys.executable, str(ROOT / "build_plugin.py")]
    coverage = [sys.executable, "-m", "coverage"]
    environment = os.environ | {"COVERAGE_RCFILE": str(ROOT / "pyproject.toml")}
    subprocess.run([*build, "--coverage"], cwd=ROOT, check=True)
    try:
        tested = subprocess.run([*coverage, "run", "-m", "pytest", *arguments], cwd=ROOT, env=environment).returncode
    finally:
        subprocess.run(build, cwd=ROOT, check=True)
    subprocess.run([*coverage, "combine", "--quiet"], cwd=ROOT, check=True)
    report = FOLDER / "python.json"
    subprocess.run([*coverage, "json", "--quiet", "-o", str(report)], cwd=ROOT, check=True)
    print(table(python_counts(json.loads(report.read_text())) | c_counts(gcov_reports())))
    return tested


if __name__ == "__main__":
    sys.exit(main())
