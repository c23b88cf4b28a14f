"""Common fixtures; a run records the kernels that it requests, for `ort-cuda-plugin kernels`."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import tiers
from ort_cuda_plugin.compiler.library import kernel_library
from ort_cuda_plugin.compiler.library.kernel_library import MANIFEST_VARIABLE
from ort_cuda_plugin.ep.device.devices import LOWERING_VARIABLE
from ort_cuda_plugin.program.analysis.verify import VERIFY_VARIABLE

# Without bytecode, each worker would rewrite the asserts of all test files (12 s of CPU), and each process that a test
# starts would compile the plugin's sources.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

MANIFEST = Path(__file__).resolve().parent.parent / "build" / "kernels.jsonl"

# Test machines are shared and stall, so the duration of one example is not checked.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Make SIGINT raise KeyboardInterrupt, also in a process that was started in the background and ignores it."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.fixture
def collected() -> None:
    """Free the sessions, arrays and streams that earlier tests left in reference cycles, so that they are not freed
    during a test that compares usage before and after.
    """
    gc.collect()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--lowering", metavar="GPU", help="the emulated device runs kernels lowered for a GPU, as sm_90:132"
    )

    parser.addoption(
        "--interpret",
        action="store_true",
        help="interpret all models of operator tests, not a sample",
    )
    parser.addoption("--engines", action="store_true", help="ask an installed cuDNN about everything, not a sample")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from visiting collected tests and imported modules, which stay until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--engines"):
        kept = [item for item in items if item.get_closest_marker("engines") is None]
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("engines")])
        items[:] = kept


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(tiers, "tiers")
    if lowering := config.getoption("--lowering"):
        os.environ[LOWERING_VARIABLE] = lowering  # inherited by workers and by the processes of tests
    os.environ[VERIFY_VARIABLE] = "1"
    if config.getoption("--interpret"):
        os.environ["ORT_CUDA_PLUGIN_TEST_INTERPRET"] = "1"
    if "PYTEST_XDIST_WORKER" in os.environ:
        # Every core has a worker already: helper processes would only import Numba again.
        kernel_library.max_workers = 0
    if MANIFEST_VARIABLE not in os.environ:
        MANIFEST.parent.mkdir(exist_ok=True)
        if "PYTEST_XDIST_WORKER" not in os.environ:
            MANIFEST.unlink(missing_ok=True)
        os.environ[MANIFEST_VARIABLE] = str(MANIFEST)
