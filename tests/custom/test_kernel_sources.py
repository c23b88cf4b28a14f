"""Names that a Numba kernel may use from its module and from enclosing functions."""

from __future__ import annotations

import enum
import math as mathematics
from math import cos as cosine
from typing import Any

import numba
import numba.cuda as devices
import numpy as np
import pytest
from numba import cuda
from numba import float32 as f4

from custom_models import in_place_of, launches, model, random_rows
from custom_operators import stock_session
from ort_cuda_plugin.compiler.compile import compile_kernel
from ort_cuda_plugin.compiler.targets import Target
from ort_cuda_plugin.custom.kernels.kernel_source import KernelSourceError, kernel_source
from ort_cuda_plugin.custom.kernels.kernels import numba_kernel

SHIFT = 3
FACTORS = (1.5, (2, 4))
INFINITE = float("inf")
HALF = np.float64(0.5)
SINGLE = np.float32(2)
SMALL = np.uint8(7)
size = "not what x.size is"


class Wave(enum.IntEnum):
    LONG = 5


WAVE = Wave.LONG


@cuda.jit(device=True)  # type: ignore[untyped-decorator]
def shifted(x: Any) -> Any:
    return x + SHIFT


def shifted_twice(x: Any) -> Any:
    return shifted(shifted(x))


def made_of_everything(x: Any, y: Any, n: int, factor: float) -> None:
    part = cuda.shared.array(64, dtype=numba.float32)
    i = devices.grid(1)
    if i < n:
        part[cuda.threadIdx.x] = x[i]
        value = shifted_twice(part[cuda.threadIdx.x]) * f4(factor) + np.float32(FACTORS[1][0]) + SMALL
        y[i] = min(value * HALF * SINGLE * cosine(0.0) + mathematics.floor(1.5) + WAVE, INFINITE)


def test_what_comes_from_outside_means_the_same_in_a_kernel() -> None:
    kernel = numba_kernel(made_of_everything)
    with in_place_of("Sign", launches(kernel)):
        session = stock_session(model())
        x = random_rows(20)
        expected = (np.exp(x) + 2 * SHIFT) * 2 + 2 + 7 + 1 + 5
        np.testing.assert_allclose(session.run(None, {"x": x})[0], -expected, rtol=1e-6)
    image = compile_kernel(kernel.spec(("*f32", "*f32", "i64", "f32"), 64), Target.cuda(9, 0))
    assert image.data[:4] == b"\x7fELF"


def test_numbers_from_outside_become_constants_of_the_text() -> None:
    inner = 2.5

    @cuda.jit  # type: ignore[untyped-decorator]
    def kernel(x: Any, n: int) -> None:
        x[0] = n + inner + SHIFT

    text, parameters = kernel_source(kernel)
    assert text == "SHIFT = 3\ninner = 2.5\ndef kernel(x, n):\n    x[0] = n + inner + SHIFT\n"
    assert parameters == ("x", "n")


def test_an_attribute_is_no_name_of_the_module() -> None:
    def measured(x: Any) -> None:
        x[0] = x.size

    assert kernel_source(measured)[0] == "def kernel(x):\n    x[0] = x.size\n"


def uses_an_object(x: Any) -> None:
    x[0] = Wave.LONG


def kernel(x: Any) -> Any:
    return x


def uses_kernel(x: Any) -> None:
    x[0] = kernel(x[0])


def has_a_default(x: Any, n: int = 3) -> None:
    x[0] = n


def two_shifts() -> Any:
    SHIFT = 4

    def uses_two_shifts(x: Any) -> None:
        x[0] = shifted(x[0]) + SHIFT

    return uses_two_shifts


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            uses_an_object,
            "kernel uses_an_object uses the global or captured name 'Wave' of type EnumType: only numbers, tuples of "
            "numbers, func",
        ),
        (uses_kernel, "kernel uses_kernel uses the name 'kernel', which the generated code defines too. Rename it"),
        (two_shifts(), "uses_two_shifts and the functions that it calls use 'SHIFT' for different objects: rename one"),
        (has_a_default, "keyword-only parameters or defaults: use positional"),
        (lambda x: None, "not a function with a name|cannot be read"),
        (3, "3 is not a Python function"),
    ],
)
def test_a_function_that_is_no_kernel_is_refused(function: Any, message: str) -> None:
    with pytest.raises(KernelSourceError, match=message):
        numba_kernel(function)
