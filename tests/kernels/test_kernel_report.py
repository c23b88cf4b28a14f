"""The report of kernels' registers, stack, spills and shared memory on GPU architectures."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from kernel_launch import kernel
from ort_cuda_plugin.cli.models import kernel_report
from ort_cuda_plugin.cli.models.kernel_report import ARCHITECTURES, report, sample_specs
from ort_cuda_plugin.compiler.cache import KernelCache
from ort_cuda_plugin.compiler.library.kernel_library import KernelLibrary

plain = kernel("plain", ("*f32",), "def kernel(x):\n    x[cuda.threadIdx.x] += float32(1)\n", launch_bounds=64)


live = [f"a{i}" for i in range(100)]
spilling = kernel(
    "spilling",
    ("*f32", "*f32", "i32"),
    "def kernel(x, y, n):\n    i = cuda.grid(1)\n"
    + "".join(f"    {name} = x[i + {number}]\n" for number, name in enumerate(live))
    + "    for j in range(n):\n        b = x[j]\n"
    + "".join(f"        {name} += b * {after}\n" for name, after in pairwise(live))
    + f"    y[i] = {' + '.join(live)}\n",
    launch_bounds=1024,
)
"""A kernel with 100 live values per thread; in a block of 1024 threads each has 64 registers."""


def uncounted(folder: Path) -> KernelLibrary:
    return KernelLibrary(KernelCache(folder), lambda name, by: None)


def test_the_sample_spills_nowhere() -> None:
    library = KernelLibrary(count=lambda name, by: None)
    specs = sample_specs()
    usages = report(specs, library=library)
    assert len(usages) == len(specs) * len(ARCHITECTURES)
    assert not [usage for usage in usages if usage.is_failure]
    assert all(0 < usage.registers <= 255 for usage in usages)


def test_a_spill_fails_unless_a_reason_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [plain, spilling]
    done: list[int] = []
    usages = report(specs, library=uncounted(tmp_path), progress=done.append)
    assert sum(done) == len(usages) == 2 * len(ARCHITECTURES) == 12
    assert [usage.arch for usage in usages[:4]] == ["sm_80", "sm_86", "sm_89", "sm_90"]
    assert [usage.is_failure for usage in usages] == [False] * 6 + [True] * 6
    assert all(usage.spill_stores > 0 and usage.stack > 0 for usage in usages[6:])
    monkeypatch.setitem(kernel_report.ALLOWED_SPILLS, ("spilling", "sm_90"), "a test")
    usages = report(specs, library=uncounted(tmp_path))
    assert [usage.is_failure for usage in usages[6:]] == [True, True, True, False, True, True]
    assert usages[9].reason == "a test"


def test_shared_memory_is_reported(tmp_path: Path) -> None:
    source = """
def kernel(x):
    s = cuda.shared.array(1000, float32)
    t = cuda.threadIdx.x
    s[t] = x[t]
    cuda.syncthreads()
    x[t] = s[999 - t]
"""
    (usage,) = report([kernel("shared", ("*f32",), source)], [ARCHITECTURES[0]], uncounted(tmp_path))
    assert usage.static_shared == 4000
