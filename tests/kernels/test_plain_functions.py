"""Kernels written as Python functions: compile-time parameters, generated statements, and which arrays they write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kernel_harness import run_op
from ort_cuda_plugin.kernels.block_algorithms import determinant
from ort_cuda_plugin.kernels.codegen.plain_function import Expression, Lines, PlainKernel, plain_kernel, written_names

if TYPE_CHECKING:
    from numba import cuda

    from ort_cuda_plugin.compiler.intrinsics import Pointer, atomic_add_i32


@plain_kernel
def scale(
    y: Pointer[float],
    counter: Pointer[int],
    x: Pointer[float],
    n: int,
    *,
    threads: int,
    real: Any,
    finish: Lines,
    factor: Expression,
) -> None:
    """Is no part of the text."""
    # A comment that is.
    for i in range(cuda.threadIdx.x, n, threads):
        total = real(x[i]) * factor(i)
        finish(i, total)
    y[0] = real(n)
    atomic_add_i32(counter, 0, 1)


def test_values_and_generated_texts_stand_in_place_of_parameters() -> None:
    text = scale.lines(threads=64, real="float32", finish="if total > 0:\n    y[i] = total\n", factor="(1 + i)")
    assert text.splitlines()[:6] == [
        "# A comment that is.",
        "for i in range(cuda.threadIdx.x, n, 64):",
        "    total = float32(x[i]) * (1 + i)",
        "    if total > 0:",
        "        y[i] = total",
        "y[0] = float32(n)",
    ]


def test_a_kernel_writes_what_its_text_writes() -> None:
    text = scale.lines(threads=64, real="float32", finish="z[i] = total", factor="1")
    assert written_names(text) == {"y", "z", "counter"}


def test_a_compile_time_parameter_is_missing() -> None:
    with pytest.raises(
        TypeError, match=r"kernel scale: wrong compile-time parameters: got threads, expected threads, real"
    ):
        scale.lines(threads=64)


def test_a_name_that_nothing_gives_is_found_when_the_kernel_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def misspelled(out: Pointer[float], lu: Pointer[float], n: int, *, threads: int, real: Any) -> None:
        out[0] = lu[m]  # type: ignore[name-defined] # noqa: F821

    monkeypatch.setattr(determinant, "_factorize", PlainKernel(misspelled))
    with pytest.raises(ValueError, match=r"kernel determinant_f32: fragment body: 'm' is undefined"):
        run_op("Det", [np.eye(3, dtype=np.float32)])
