"""CUDA graphs in C programs, one of which counts driver calls, with sanitizers and in both stream modes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from c_programs import build_program, run_program
from executor_harness import kernel_image
from ort_cuda_plugin.plan.format import encode
from test_executor_run import affine_plan


@pytest.mark.full
@pytest.mark.parametrize("streams", ["inline", "adversarial"])
@pytest.mark.parametrize("sanitize", ["address", "thread"])
@pytest.mark.parametrize("name", ["graph_test", "capture_test"])
def test_graphs_pass_under(name: str, sanitize: str, streams: str, tmp_path: Path) -> None:
    program = build_program(name, [f"{name}.c", "affine_cluster.c"], sanitize)
    (tmp_path / "image").write_bytes(kernel_image())
    (tmp_path / "plan").write_bytes(encode(replace(affine_plan(), kernels=(0,))))
    done = run_program(program, tmp_path / "image", tmp_path / "plan", streams, "7", "300")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
    assert done.stdout == f"{name} passed\n"
