"""The command ``run-ptx``."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from foreign_compilers import FOLDER
from ort_cuda_plugin.cli import main

FILE = str(FOLDER / "kernels.ptx")


def test_it_lists_the_kernels_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run-ptx", FILE]) == 0
    out = capsys.readouterr().out
    assert "compact(.u64 compact_param_0, .u64 compact_param_1, .u64 compact_param_2, .u32 compact_param_3)" in out
    assert "by_struct(.b8 by_struct_param_0[48])" in out


def test_it_launches_a_kernel_and_saves_the_arrays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.arange(100, dtype=np.float32)
    np.save(tmp_path / "x.npy", x)
    words = [
        "--kernel",
        "sum_rows",
        "--grid",
        "2",
        "--block",
        "64",
        "--args",
        str(tmp_path / "x.npy"),
        "f32:2",
        "i32=50",
    ]
    assert main(["run-ptx", FILE, *words, "--save", str(tmp_path / "out")]) == 0
    assert "argument 1: float32 [2]: 1225.0, 3725.0" in capsys.readouterr().out
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "argument1.npy"), x.reshape(2, 50).sum(1))


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--kernel", "sum_rows", "--args", "f32:10", "f32:1", "i32=50"], 1, "out-of-bounds: kernel sum_rows"),
        (
            ["--kernel", "other"],
            4,
            "other: the module has no kernel of this name. Kernels of the module: reverse_in_shared, ",
        ),
        (["--kernel", "sum_rows", "--args", "f32:10"], 2, "sum_rows: got 1 arguments, expected 3"),
        (
            ["--kernel", "sum_rows", "--args", "f32:x", "f32:1", "i32=5"],
            2,
            "f32:x: .*expected a .npy file, a type and a shape",
        ),
        (["--kernel", "sum_rows", "--args", "none.npy", "f32:1", "i32=5"], 2, "none.npy: No such file"),
    ],
)
def test_faults_and_mistakes_are_named(
    words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run-ptx", FILE, *words]) == code
    assert re.search(message, capsys.readouterr().err)
