"""PTX of other compilers on the emulated device: NVRTC's and Triton's kernels give NumPy's results."""

from __future__ import annotations

import importlib.util
from functools import lru_cache

import pytest

import foreign_compilers
from foreign_compilers import CUDA, FOLDER, TRITON
from foreign_kernels import CHECKS
from ort_cuda_plugin import emulator

STORED = {"kernels": CUDA["kernels"], "softmax": ("softmax",), "matmul_fp16": ("matmul_fp16",)}
compiled = lru_cache(maxsize=8)(foreign_compilers.nvrtc_ptx)


@pytest.mark.parametrize(("source", "kernel"), [(source, name) for source, names in STORED.items() for name in names])
def test_stored_ptx_gives_numpys_results(source: str, kernel: str) -> None:
    CHECKS[kernel](emulator.load(FOLDER / f"{source}.ptx"))


@pytest.mark.full
@pytest.mark.parametrize("arch", ["80", "90", "120"])
@pytest.mark.parametrize(("source", "kernel"), [(source, name) for source, names in CUDA.items() for name in names])
def test_kernels_of_nvrtc_give_numpys_results(arch: str, source: str, kernel: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")
    if source != "kernels" and foreign_compilers.cccl() is None:
        pytest.skip("the headers of nvidia-cuda-cccl are not installed")
    CHECKS[kernel](emulator.load(compiled(source, arch)))


@pytest.mark.full
@pytest.mark.parametrize("kernel", TRITON)
def test_kernels_of_triton_give_numpys_results(kernel: str) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    CHECKS[kernel](emulator.load(foreign_compilers.triton_ptx(kernel)))
