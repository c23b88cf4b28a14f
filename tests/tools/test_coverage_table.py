"""The table of executed lines and branches counts each line once, whatever objects contain it."""

from __future__ import annotations

from typing import Any

import coverage_table
from coverage_table import ROOT, Count


def gcov(file: str, *lines: tuple[int, int, list[int]]) -> dict[str, Any]:
    """Return gcov's report of an object with lines (number, executions, executions of the branches)."""
    entries = [
        {"line_number": number, "count": times, "branches": [{"count": each} for each in branches]}
        for number, times, branches in lines
    ]
    return {"current_working_directory": str(ROOT), "files": [{"file": file, "lines": entries}]}


def test_a_line_of_a_header_ran_if_any_object_ran_it() -> None:
    header = "csrc_shim/base/error.h"
    reports = [gcov(header, (3, 0, []), (4, 0, [0, 0])), gcov(header, (3, 2, []), (4, 1, [1, 0]), (9, 0, []))]
    assert coverage_table.c_counts(reports) == {header: Count(3, 2, 2, 1)}


def test_system_headers_do_not_count() -> None:
    assert coverage_table.c_counts([gcov("/usr/include/stdio.h", (1, 1, []))]) == {}


def test_files_add_up_by_folder() -> None:
    report = {
        "files": {
            f"ort_cuda_plugin/{name}": {
                "summary": {"num_statements": 4, "covered_lines": 3, "num_branches": 2, "covered_branches": branches}
            }
            for name, branches in [("plan/a.py", 1), ("plan/deep/b.py", 2), ("c.py", 0)]
        }
    }
    assert coverage_table.table(coverage_table.python_counts(report)).splitlines()[2:] == [
        "| ort_cuda_plugin | 4 | 75.0 % | 2 | 0.0 % |",
        "| ort_cuda_plugin/plan | 8 | 75.0 % | 4 | 75.0 % |",
        "| all | 12 | 75.0 % | 6 | 50.0 % |",
    ]


def test_a_folder_without_branches_has_no_share() -> None:
    assert "| a | 1 | 100.0 % | 0 | - |" in coverage_table.table({"a/b.c": Count(1, 1)})
