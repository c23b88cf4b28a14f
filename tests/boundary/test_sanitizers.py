"""The shim under sanitizers, driven by a host in C that has neither ONNX Runtime nor Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from c_programs import build_kernels, build_program, fake_library, run_program


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_kernels(tmp_path_factory.mktemp("kernels"))


@pytest.mark.full
@pytest.mark.parametrize(("streams", "seed"), [("inline", 1), ("adversarial", 1), ("adversarial", 2)])
@pytest.mark.parametrize("sanitize", ["address", "thread"])
def test_the_mock_host_passes_under(sanitize: str, streams: str, seed: int, kernels: Path) -> None:
    program = build_program("mock_host", ["mock_host.c", "mock_sessions.c", "mock_ort.c"], sanitize)
    done = run_program(program, kernels, streams, str(seed), "50")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
    assert done.stdout == "mock_host passed\n"


@pytest.mark.full
@pytest.mark.parametrize("sanitize", ["address", "thread"])
@pytest.mark.parametrize("name", ["memory_test", "arena_test"])
def test_the_memory_pool_passes_under(name: str, sanitize: str) -> None:
    done = run_program(build_program(name, [f"{name}.c", "fake_driver.c"], sanitize))
    assert done.returncode == 0, done.stderr[-8000:]


@pytest.mark.full
@pytest.mark.parametrize("sanitize", ["address", "thread"])
def test_threads_that_prepare_calls_of_libraries_pass_under(sanitize: str, tmp_path: Path) -> None:
    program = build_program("library_threads", ["library_threads.c"], sanitize)
    done = run_program(program, fake_library("cudnn", tmp_path), "30")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
    assert done.stdout == "library_threads passed\n"
