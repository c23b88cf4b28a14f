"""The executor on differently configured emulated devices, each in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from isolated import HARNESS, python

TESTS = Path(__file__).resolve().parent
PATHS = os.pathsep.join(map(str, (TESTS, HARNESS)))


@pytest.mark.full
@pytest.mark.parametrize("seed", ["1", "2"])
def test_runs_are_right_with_adversarial_streams(seed: str) -> None:
    environment = os.environ | {"ORT_CUDA_PLUGIN_EMULATE_STREAMS": "adversarial", "ORT_CUDA_PLUGIN_EMULATE_SEED": seed}
    files = [
        str(TESTS / name)
        for name in ("test_executor_run.py", "test_executor_segments.py", "test_executor_callbacks.py")
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_after_a_kernel_fault_the_device_is_lost_and_later_runs_say_so() -> None:
    code = """
        from executor_harness import FLOAT, IDLE, Registers, TestCluster, Wild, launch
        from ort_cuda_plugin.abi.core import PluginError
        from ort_cuda_plugin.plan.format import Param, Plan, PlanInput, Ref, RefKind

        r = Registers(1)
        one = r.const(1)
        record = launch(0, (one, one, one), [Param.pointer(Ref(RefKind.INPUT, 0)), Param.i64(one)])
        inputs = (PlanInput(FLOAT, 1, 0),)
        exprs = tuple(r.exprs)
        faulty = TestCluster(Plan(2, inputs, (), nodes=("culprit",), exprs=exprs, records=(record,), kernels=(IDLE,)))
        healthy = TestCluster(Plan(0, (), ()))
        healthy.run()
        for cluster, inputs in [(faulty, [Wild()]), (healthy, [])]:
            try:
                cluster.run(*inputs)
            except PluginError as error:
                print(error)
    """
    done = python(code, env={"PYTHONPATH": PATHS})
    first, second = done.stdout.splitlines()
    assert "node 'culprit': cuLaunchKernel of idle failed: CUDA_ERROR_ILLEGAL_ADDRESS" in first
    assert "lost" in second
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in second


def test_memory_that_does_not_suffice_is_an_error_and_nothing_is_lost() -> None:
    code = """
        import numpy as np
        from test_executor_run import affine_plan
        from executor_harness import OnHost, TestCluster
        from ort_cuda_plugin.abi.core import PluginError, counters

        cluster = TestCluster(affine_plan())
        small, large = OnHost(np.ones((10, 10), np.float32)), OnHost(np.ones((2000, 1000), np.float32))
        cluster.run(small)
        before = counters()["device_bytes_in_use"]
        try:
            cluster.run(large)
        except PluginError as error:
            print("memory" in str(error))
        print(counters()["device_bytes_in_use"] == before)
        print((cluster.run(small)[0] == 3).all())
    """
    done = python(code, env={"PYTHONPATH": PATHS, "ORT_CUDA_PLUGIN_EMULATE_MEMORY": "10M"})
    assert done.stdout.split() == ["True"] * 3
