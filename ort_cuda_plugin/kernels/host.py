"""Small integer tensors on the host: operators compute them symbolically and launch nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ort_cuda_plugin.graph.ir import DType, Unsupported
from ort_cuda_plugin.graph.lowering import MAX_HOST_ELEMENTS, Lowering, Tensor
from ort_cuda_plugin.graph.symbolic import Dim
from ort_cuda_plugin.kernels.fold import NotFoldable

HostArray: TypeAlias = npt.NDArray[np.object_]
"""Symbolic integers in an array: NumPy's functions that move elements apply to it."""


def host_array(x: Tensor) -> HostArray | None:
    """The contents of x with its shape where they are known, else None."""
    values = x.host
    return None if values is None else _shaped(values, x.static_shape)


def _shaped(values: Sequence[Dim], shape: Sequence[int]) -> HostArray:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array.reshape(tuple(shape))


def on_host(
    ctx: Lowering,
    compute: Callable[..., HostArray],
    inputs: Sequence[Tensor],
    shape: Sequence[Dim],
    dtype: DType,
    device: Callable[[], Tensor],
) -> Tensor:
    """``compute`` of the contents of ``inputs`` where they are known, else the result of ``device``.

    A device result whose inputs are themselves readable (graph inputs) can still give its contents to an operator that
    needs them on the host. ``compute`` may raise NotFoldable.
    """
    # Symbolic integers do not wrap around, which results of few bits have to.
    if not (dtype is DType.BOOL or (dtype.is_integer and dtype.itemsize >= 4)) or not _is_small(shape):
        return device()
    if not all(_is_small(x.shape) and (x.dtype.is_integer or x.dtype is DType.BOOL) for x in inputs):
        return device()
    arrays = [host_array(x) for x in inputs]
    if all(array is not None for array in arrays):
        try:
            result = _fitting(compute(*arrays))
        except (NotFoldable, ZeroDivisionError):
            return device()
        return ctx.host_tensor(result.reshape(-1).tolist(), result.shape, dtype)

    def values() -> tuple[Dim, ...]:
        read = [_shaped(ctx.host_values(x, "an input of shape arithmetic"), x.static_shape) for x in inputs]
        try:
            return tuple(_fitting(compute(*read)).reshape(-1).tolist())
        except (NotFoldable, ZeroDivisionError):
            raise Unsupported("shape", "shape arithmetic that has no symbolic form") from None

    return ctx.defer_host(device(), values)


def _fitting(array: HostArray) -> HostArray:
    """``array``. Raises NotFoldable where a number in it does not fit 64 bits: symbolic integers do not wrap around."""
    for value in array.reshape(-1):
        numbers = (value,) if isinstance(value, int) else (value.const, *(number for _, number in value.terms))
        if not all(-(2**63) <= number < 2**63 for number in numbers):
            raise NotFoldable
    return array


def _is_small(shape: Sequence[Dim]) -> bool:
    size = 1
    for dim in shape:
        if not isinstance(dim, int):
            return False
        size *= dim
    return size <= MAX_HOST_ELEMENTS


def integers(array: HostArray) -> npt.NDArray[np.int64]:
    """The elements as numbers. Raises NotFoldable where one is symbolic."""
    if not all(isinstance(value, int) for value in array.reshape(-1)):
        raise NotFoldable
    return array.astype(np.int64)
