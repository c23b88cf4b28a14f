"""Library calls that are refused, fail in a search or fail in execution: a kernel of the plugin replaces them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from c_programs import fake_library
from isolated import HARNESS, ROOT
from library_refusals import FUNCTIONS
from ort_cuda_plugin.clusters.library_substitute import SUBSTITUTES


def run(*arguments: str) -> Any:
    command = [sys.executable, str(HARNESS / "library_refusals.py"), *arguments]
    env = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def refused(tmp_path: Path, seed: str) -> list[dict[str, Any]]:
    stand_ins = [str(fake_library(name, tmp_path)) for name in ("cublaslt", "cudnn")]
    results: list[dict[str, Any]] = run(*stand_ins, str(tmp_path / "refusals"), seed)
    return results


def check(results: list[dict[str, Any]]) -> None:
    for result in results:
        is_half = "float32" not in result["case"] and "False" not in result["case"]
        assert result["error"] <= (2e-2 if is_half else 1e-5), result
        assert result["refusals"] >= 1, result
        assert result["computed"] == 0, result
        assert result["warnings"] <= result["refusals"], result
    assert any(result["warnings"] for result in results)


def test_a_kernel_replaces_each_call_that_a_library_refuses(tmp_path: Path) -> None:
    check(refused(tmp_path, "7"))


@pytest.mark.full
def test_a_kernel_replaces_each_call_whichever_function_fails(tmp_path: Path) -> None:
    check(refused(tmp_path, "all"))


def test_a_refusal_is_remembered_for_device_and_version_unless_the_device_is_lost(tmp_path: Path) -> None:
    result = run("remembered", str(fake_library("cublaslt", tmp_path)), str(tmp_path / "refusals"))
    assert result["refused"] == [1, 1, 0]  # refusals, searches, calls into Python after the first Run
    assert result["same process"] == result["next process"] == [0, 0, 0]
    assert result["new version"] == [0, 1, 0]
    assert result["captured"] == [1, 0, 0]  # a library that cannot start now may start in a later process
    assert result["before loss"][1] == 1
    assert "CUDA_ERROR_LAUNCH_FAILED" in result["lost"], result


def test_each_kind_of_problem_has_a_substitute() -> None:
    text = (ROOT / "csrc_shim" / "vendor" / "spec.h").read_text()
    kinds = dict(re.findall(r"^  (OCP_PROBLEM_\w+) = (\d+),?$", text.split("} ocp_problem_kind;")[0], re.MULTILINE))
    assert {int(number) for number in kinds.values()} == SUBSTITUTES.keys()


def test_each_function_of_a_library_that_returns_a_status_may_fail() -> None:
    for library, file in (("cublaslt", "cublaslt.c"), ("cudnn", "cudnn.c")):
        text = (ROOT / "csrc_shim" / "vendor" / file).read_text()
        names = re.findall(r'^    "(\w+)",$', text, re.MULTILINE)
        assert FUNCTIONS[library] == [name for name in names if name in FUNCTIONS[library]]
        others = [name for name in names if name not in FUNCTIONS[library]]
        assert all(re.search(r"Destroy|GetVersion|String$", name) for name in others), others
