"""Shape arithmetic: integer tensors of few elements that the host computes as symbolic integers, without launches."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ...model.ir import DType, Unsupported
from ..expressions.fold import NotFoldable
from ..expressions.symbolic import Dim
from ..steps.tensor import MAX_HOST_ELEMENTS, BufferKind, DeferredContents, Tensor
from .recorder import Recorder

MAX_HOST_WORK = 200_000
"""Maximum terms of symbolic integers that one lowering computes on the host; more would take minutes. Beyond the limit
the device computes the tensors, and the host reads back the sizes that it needs.
"""
MAX_SYMBOLIC_ELEMENTS = 64
"""Maximum elements of a host tensor with symbols. A larger tensor is hardly a shape, so the device computes it."""
HostArray: TypeAlias = npt.NDArray[np.object_]
"""NumPy array of symbolic integers, so that NumPy functions can move its elements."""


def host_array(x: Tensor) -> HostArray | None:
    """Return the contents of x as an array of its shape if the host knows them, else None."""
    values = x.host
    return None if values is None else _shaped(values, x.static_shape)


def _shaped(values: Sequence[Dim], shape: Sequence[int]) -> HostArray:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array.reshape(tuple(shape))


def on_host(
    ctx: Recorder,
    compute: Callable[..., HostArray],
    inputs: Sequence[Tensor],
    shape: Sequence[Dim],
    dtype: DType,
    device: Callable[[], Tensor],
) -> Tensor:
    """Return ``compute`` of the contents of ``inputs`` if the host knows them all, else the result of ``device``.

    ``device`` records steps that compute the result on the device. If the host needs the contents of such a result
    later, it computes them from inputs that it can read. ``compute`` may raise NotFoldable: the device then computes
    the result.
    """
    # Symbolic integers do not wrap around, as elements of 8- and 16-bit integer types must.
    if not (dtype is DType.BOOL or (dtype.is_integer and dtype.itemsize >= 4)) or not _is_small(shape):
        return device()
    if not all(_is_small(x.shape) and (x.dtype.is_integer or x.dtype is DType.BOOL) for x in inputs):
        return device()
    few = math.prod(operator.index(dim) for dim in shape) <= MAX_SYMBOLIC_ELEMENTS
    arrays = [host_array(x) for x in inputs]
    if all(array is not None for array in arrays):
        known = all(isinstance(value, int) for array in arrays if array is not None for value in array.reshape(-1))
        if not (few or known) or ctx.host_work >= MAX_HOST_WORK:
            return device()
        try:
            result = _fitting(ctx, compute(*arrays))
        except (NotFoldable, ZeroDivisionError):
            return device()
        return ctx.host_tensor(result.reshape(-1).tolist(), result.shape, dtype)

    node = ctx.node

    def values(*contents: Sequence[Dim]) -> tuple[Dim, ...]:
        if ctx.host_work >= MAX_HOST_WORK:
            reason = f"the shape arithmetic on the host has too many terms; supported: up to {MAX_HOST_WORK}"
            raise Unsupported("shape", reason)
        read = [_shaped(values, x.static_shape) for values, x in zip(contents, inputs, strict=True)]
        try:
            return tuple(_fitting(ctx, compute(*read)).reshape(-1).tolist())
        except (NotFoldable, ZeroDivisionError):
            computed = "a value" if node is None else f"the result of {node.label}"
            raise Unsupported(
                "shape",
                f"a shape depends on {computed}, which the host cannot compute; supported: + - * / %, min, max, abs, "
                "comparisons, Where and logical operations on integers and bools, and Gather with constant indices, "
                "without division by 0 and within 64 bits",
            ) from None

    on_device = device()
    # `values` returns elements in row-major order, so the device tensor must have this order in memory.
    return defer_host(ctx, on_device, inputs, values) if few and on_device.is_contiguous else on_device


def defer_host(ctx: Recorder, x: Tensor, sources: Sequence[Tensor], compute: Callable[..., tuple[Dim, ...]]) -> Tensor:
    """Return x, after setting ``compute`` as the function by which `Lowering.host_values` gets the contents of x.

    ``compute`` gets the contents of ``sources`` and returns those of x in row-major order. The host calls it only if it
    needs the contents; otherwise only the device computes x. If x is a view of a source, or not an intermediate, the
    function changes nothing.
    """
    if any(source.buffer is x.buffer for source in sources):
        return x
    if x.buffer.kind is BufferKind.SCRATCH and x.buffer.deferred_host is None:
        x.buffer.deferred_host = DeferredContents(ctx.node, tuple(sources), compute)
    return x


def _fitting(ctx: Recorder, array: HostArray) -> HostArray:
    """Return ``array``, and count its terms as host work.

    Raises NotFoldable for an integer beyond 64 bits, since symbolic integers do not wrap around.
    """
    work = 0
    for value in array.reshape(-1):
        numbers = (value,) if isinstance(value, int) else (value.const, *(number for _, number in value.terms))
        work += len(numbers)
        if not all(-(2**63) <= number < 2**63 for number in numbers):
            raise NotFoldable
    ctx.host_work += work
    return array


def _is_small(shape: Sequence[Dim]) -> bool:
    size = 1
    for dim in shape:
        if not isinstance(dim, int):
            return False
        size *= dim
    return size <= MAX_HOST_ELEMENTS


def integers(array: HostArray) -> npt.NDArray[np.int64]:
    """Return the elements as int64. Raises NotFoldable if an element is symbolic."""
    if not all(isinstance(value, int) for value in array.reshape(-1)):
        raise NotFoldable
    return array.astype(np.int64)
