"""The program that compares blocks of kernels from PTX with those from LLVM IR (bench/ptx_blocks.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "bench" / "ptx_blocks.py"


@pytest.mark.full
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_each_kernel_of_a_network_writes_the_same_from_ptx(arch: str) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--arch", arch, "--models", "light_squeezenet-1,mobilenet_v2-1-float16"],
        env=os.environ | {"PYTHONPATH": str(PROGRAM.parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 wrong" in done.stdout


@pytest.mark.full
def test_a_kernel_that_differs_is_named() -> None:
    """Other bytes over the result of one kernel's PTX stand for a wrong kernel."""
    script = (
        "import numpy as np, ptx_blocks; original = ptx_blocks.Blocks._launch\n"
        "def launch(self, step, module, arrays):\n"
        "    original(self, step, module, arrays)\n"
        "    self.times = getattr(self, 'times', 0) + 1\n"
        "    if self.times == 2:\n"
        "        region = step.writes[0].region\n"
        "        arrays[region].copy_from(np.full(arrays[region].nbytes, 0x3c, np.uint8))\n"
        "ptx_blocks.Blocks._launch = launch\n"
        "raise SystemExit(ptx_blocks.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "--models", "light_squeezenet-1"],
        env=os.environ | {"PYTHONPATH": f"{PROGRAM.parents[1]}{os.pathsep}{PROGRAM.parent}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 wrong" in done.stdout
