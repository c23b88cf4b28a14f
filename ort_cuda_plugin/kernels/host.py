"""Small integer tensors on the host: operators compute them symbolically and launch nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ort_cuda_plugin.graph.ir import DType
from ort_cuda_plugin.graph.lowering import MAX_HOST_ELEMENTS, Lowering, Tensor
from ort_cuda_plugin.kernels.fold import NotFoldable

HostArray: TypeAlias = npt.NDArray[np.object_]
"""Symbolic integers in an array: NumPy's functions that move elements apply to it."""


def host_array(x: Tensor) -> HostArray | None:
    """The contents of x with its shape where they are known, else None."""
    values = x.host
    return None if values is None else _shaped(values, [dim for dim in x.shape if isinstance(dim, int)])


def _shaped(values: Sequence[object], shape: Sequence[int]) -> HostArray:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array.reshape(tuple(shape))


def on_host(
    ctx: Lowering,
    compute: Callable[..., HostArray],
    inputs: Sequence[Tensor],
    shape: Sequence[object],
    dtype: DType,
    device: Callable[[], Tensor],
) -> Tensor:
    """``compute`` of the contents of ``inputs`` where they are known, else the result of ``device``.

    A device result whose inputs are themselves readable (graph inputs) can still give its contents to an operator that
    needs them on the host. ``compute`` may raise NotFoldable.
    """
    if not (dtype.is_integer or dtype is DType.BOOL) or not _is_small(shape):
        return device()
    if not all(_is_small(x.shape) and (x.dtype.is_integer or x.dtype is DType.BOOL) for x in inputs):
        return device()
    arrays = [host_array(x) for x in inputs]
    if all(array is not None for array in arrays):
        try:
            result = compute(*arrays)
        except (NotFoldable, ZeroDivisionError):
            return device()
        return ctx.host_tensor(result.reshape(-1).tolist(), result.shape, dtype)

    def values() -> tuple[object, ...]:
        read = [
            _shaped(ctx.host_values(x, "an input of shape arithmetic"), [d for d in x.shape if isinstance(d, int)])
            for x in inputs
        ]
        return tuple(compute(*read).reshape(-1).tolist())

    return ctx.defer_host(device(), values)  # type: ignore[arg-type]


def _is_small(shape: Sequence[object]) -> bool:
    size = 1
    for dim in shape:
        if not isinstance(dim, int):
            return False
        size *= dim
    return size <= MAX_HOST_ELEMENTS
