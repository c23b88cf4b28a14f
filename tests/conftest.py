"""What all tests share; a run records the kernels that it asks for, for `ort-cuda-plugin kernels`."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

from ort_cuda_plugin.runtime.kernel_library import MANIFEST_VARIABLE

MANIFEST = Path(__file__).resolve().parent.parent / "build" / "kernels.jsonl"

# Test machines are shared and stall: how long one example takes says nothing.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


def pytest_configure() -> None:
    if MANIFEST_VARIABLE not in os.environ:
        MANIFEST.parent.mkdir(exist_ok=True)
        if "PYTEST_XDIST_WORKER" not in os.environ:
            MANIFEST.unlink(missing_ok=True)
        os.environ[MANIFEST_VARIABLE] = str(MANIFEST)
