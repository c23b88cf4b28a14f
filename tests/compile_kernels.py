"""Kernel factories for test_compile.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numba import cuda, float32

scale_of_module = 3


def twice(x: float) -> float:
    return x + x


def scaled(x: float) -> float:
    return twice(x) * float32(scale_of_module)


def affine(offset: float, mode: str) -> Any:
    def kernel(x: Any, y: Any, n: int) -> None:
        i = cuda.grid(1)
        if i < n:
            if mode == "scaled":
                y[i] = scaled(x[i]) + float32(offset)
            else:
                y[i] = x[i] + float32(offset)

    return kernel


def broken() -> Any:
    def kernel(x: Any) -> None:
        y = x[0]
        x[0] = missing_name(y)  # noqa: F821

    return kernel


def returns_no_function() -> int:
    return 3
