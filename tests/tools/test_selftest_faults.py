"""`bench/selftest_faults.py`: faults of one check of each kind, and the table."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import selftest_faults  # noqa: E402
from selftest_faults import Outcome  # noqa: E402

CHECK = ["--sections", "gemm", "--checks", "product with bias and ReLU, float16"]


def campaign(folder: Path, *arguments: str) -> tuple[list[Outcome], str]:
    """Run a campaign whose cache, with the quarantine, is in ``folder``; return the outcomes and the output."""
    command = [sys.executable, str(ROOT / "bench" / "selftest_faults.py"), "--json", str(folder / "found.json")]
    environment = os.environ | {
        "ORT_CUDA_PLUGIN_CACHE_DIR": str(folder / "cache"),
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=600)
    assert (folder / "found.json").exists(), done.stdout + done.stderr
    return [Outcome(**each) for each in json.loads((folder / "found.json").read_text())], done.stdout


def test_each_fault_of_a_library_call_is_found_named_and_quarantined(tmp_path: Path) -> None:
    found, printed = campaign(tmp_path, "--kinds", "library", *CHECK)
    assert [outcome.fault.split(":")[0] for outcome in found] == list(selftest_faults.HOW), printed
    assert all(outcome.is_complete for outcome in found), printed
    quarantined = [outcome.quarantined for outcome in found]
    assert quarantined == [["the refused call"], ["the refused call"], ["gemm f16 library"], ["gemm f16 library"]]


@pytest.mark.full
def test_only_the_wrong_epilogue_of_a_library_is_quarantined(tmp_path: Path) -> None:
    checks = ["--sections", "gemm", "--checks", "product with *, float16", "--only", "wrong:*"]
    found, printed = campaign(tmp_path, "--kinds", "library", *checks)
    quarantined = {outcome.fault: outcome.quarantined for outcome in found}
    assert quarantined == {
        "wrong:product_bias_gelu_float16": ["gemm f16 library with epilogue bias, GELU"],
        "wrong:product_bias_relu_float16": ["gemm f16 library with epilogue bias, ReLU"],
        "wrong:product_relu_float16": ["gemm f16 library with epilogue ReLU"],
        "wrong:product_residual_float16": ["gemm f16 library with epilogue residual"],
    }, printed
    assert all(outcome.is_complete for outcome in found), printed


@pytest.mark.full
def test_a_wrong_kernel_is_found_named_and_quarantined(tmp_path: Path) -> None:
    found, printed = campaign(tmp_path, "--kinds", "kernel", *CHECK)
    assert len(found) >= 2, printed
    assert all(outcome.is_complete for outcome in found), printed


def test_the_table_names_what_is_missing() -> None:
    complete = Outcome("kernel", "wrong:matmul", "gemm", True, "operators MatMul f32", True, True)
    told = Outcome("driver", "unsupported=GraphLaunch", "driver", is_found=True, named="cuGraphLaunch", is_told=True)
    missed = Outcome("library", "slow:product", "gemm", True, "schedule gemm f32 library", why="still slow")
    lines = [*selftest_faults.table([complete, told, missed])]
    assert [re.split(r"  +", line) for line in lines[1:8]] == [
        ["kernel wrong gemm", "1", "1", "1", "1", "1"],
        ["driver unsupported driver", "1", "1", "1", "0", "0"],
        ["library slow gemm", "1", "1", "1", "0", "0"],
        ["kernel, all", "1", "1", "1", "1", "1"],
        ["library, all", "1", "1", "1", "0", "0"],
        ["driver, all", "1", "1", "1", "0", "0"],
        ["all", "3", "3", "3", "1", "1"],
    ]
    assert lines[8].endswith(": unsupported=GraphLaunch")
    assert lines[9:] == ["not quarantined, right: library slow:product: still slow"]


def test_kernels_are_spread_over_their_names() -> None:
    names = [f"kernel{number}" for number in range(10)]
    assert selftest_faults.spread(names, 3) == ["kernel0", "kernel3", "kernel6"]
    assert selftest_faults.spread(names, 0) == selftest_faults.spread(names, 20) == names


def test_a_share_of_the_faults_is_put_in() -> None:
    whole = [f"fault{number}" for number in range(7)]
    parts = [selftest_faults.Campaign([], "*", True, "fault*", number, 3) for number in (1, 2, 3)]
    found = [[fault for fault in whole if part.has(fault)] for part in parts]
    assert found == [["fault0", "fault3", "fault6"], ["fault1", "fault4"], ["fault2", "fault5"]]
