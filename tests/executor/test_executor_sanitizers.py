"""The executor in C programs with sanitizers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from c_programs import build_program, run_program
from executor_harness import kernel_image
from ort_cuda_plugin.plan.format import encode
from test_executor_plan_checks import valid
from test_executor_run import affine_plan
from test_executor_weights import precomputation


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 2])
def test_damaged_plans_never_leave_their_memory(seed: int, tmp_path: Path) -> None:
    program = build_program("plan_fuzz", ["plan_fuzz.c"], "address")
    (tmp_path / "image").write_bytes(kernel_image())
    (tmp_path / "plan").write_bytes(encode(valid))
    done = run_program(program, tmp_path / "image", tmp_path / "plan", str(seed), "4000")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
    words = done.stdout.split()
    outcome = {name: int(number) for name, number in zip(words[::2], words[1::2], strict=True)}
    assert sum(outcome.values()) == 4000
    assert all(number >= 20 for number in outcome.values()), outcome


@pytest.mark.full
@pytest.mark.parametrize("sanitize", ["address", "thread"])
def test_threads_share_a_cluster_while_plans_are_added(sanitize: str, tmp_path: Path) -> None:
    program = build_program("executor_threads", ["executor_threads.c"], sanitize)
    (tmp_path / "image").write_bytes(kernel_image())
    (tmp_path / "plan").write_bytes(encode(replace(affine_plan(), kernels=(0,))))
    (tmp_path / "once").write_bytes(encode(precomputation(60)))
    done = run_program(program, tmp_path / "image", tmp_path / "plan", tmp_path / "once", "500")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
    assert done.stdout == "executor_threads passed\n"
