"""Recording of elementwise steps from scalar functions, with broadcasting and arbitrary strides."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ...model.ir import DType
from ..expressions import scalar as s
from ..expressions.fold import fold
from ..expressions.scalar import Scalar
from ..expressions.symbolic import Dim
from ..steps.steps import Input, Map, used_inputs
from ..steps.tensor import Tensor
from .host import HostArray, on_host
from .memory_order import empty_in_order, in_memory_order, is_channels_first
from .recorder import Recorder
from .recorder import copy_of as copy_of
from .shapes import aligned, broadcast_shapes


def elementwise(ctx: Recorder, fn: Callable[..., Scalar], *tensors: Tensor) -> Tensor:
    """Return ``fn`` of the elements of ``tensors``, which broadcast; the result has the type that ``fn`` returns.

    If the host knows the contents of all ``tensors``, and they and the result are small integer tensors, the host
    computes the result. Raises TypeError if ``fn`` mixes types.
    """
    leaves = leaves_of(tensors)
    expression = s.expression(fn(*leaves))
    shape = broadcast_shapes(ctx, *(x.shape for x in tensors))

    def on_device() -> Tensor:
        result = empty_in_order(ctx, shape, expression.dtype, tensors)
        _record(ctx, leaves, tensors, expression, result)
        return result

    def on_symbols(*arrays: HostArray) -> HostArray:
        function = np.frompyfunc(lambda *row: fold(expression, dict(zip(leaves, row, strict=True))), len(arrays), 1)
        return np.asarray(function(*arrays), dtype=object)

    return on_host(ctx, on_symbols, tensors, shape, expression.dtype, on_device)


def leaves_of(tensors: Sequence[Tensor]) -> list[Scalar]:
    """Return a leaf expression per tensor. Raises TypeError for other objects."""
    for x in tensors:
        if not isinstance(x, Tensor):
            raise TypeError(f"input: got {type(x).__name__}, expected a tensor. Convert arrays by ctx.constant")
    return [Scalar(x.dtype, "leaf") for x in tensors]


def elementwise_into(ctx: Recorder, fn: Callable[..., Scalar], destination: Tensor, *tensors: Tensor) -> None:
    """Write ``fn`` of the elements of ``tensors``, which broadcast, to ``destination``, of any strides."""
    leaves = leaves_of(tensors)
    expression = s.expression(fn(*leaves))
    if expression.dtype is not destination.dtype:
        raise TypeError(f"{destination!r}: got elements of {expression.dtype.name}. Cast them to the tensor's type")
    _record(ctx, leaves, tensors, expression, destination)


def copy_into(ctx: Recorder, destination: Tensor, source: Tensor) -> None:
    """Copy the elements of ``source``, which broadcasts to the shape of ``destination``; both may be strided views."""
    elementwise_into(ctx, lambda x: x, destination, source)


def rearranged(ctx: Recorder, weights: Tensor) -> Tensor:
    """Return contiguous weights: the argument itself, or a copy that the device makes once, by constant folding.

    With the option fusion=0, which turns constant folding off, the host makes the copy.
    """
    return copy_of(ctx, weights) if ctx.options.fusion and not weights.is_contiguous else ctx.contiguous(weights)


def full(ctx: Recorder, shape: Sequence[Dim], value: int | float | bool, dtype: DType) -> Tensor:
    """Return a tensor whose elements are all ``value``. A small integer tensor stays on the host."""

    def on_device() -> Tensor:
        result = ctx.empty(shape, dtype)
        if value == 0 and math.copysign(1.0, value) > 0:
            ctx.memset(result, 0)
        elif dtype is DType.BOOL:
            ctx.memset(result, 1)
        else:
            # The kernel gets ``value`` as float64, which represents the values of all float types, and casts it.
            number = ctx.constant(np.array(value, np.int64 if dtype.is_integer else np.float64))
            elementwise_into(ctx, lambda x: s.cast(x, dtype), result, number)
        return result

    def on_symbols() -> HostArray:
        return np.full([d for d in shape if isinstance(d, int)], int(value), dtype=object)

    return on_host(ctx, on_symbols, (), shape, dtype, on_device)


def _record(
    ctx: Recorder, leaves: Sequence[Scalar], tensors: Sequence[Tensor], expression: Scalar, result: Tensor
) -> None:
    placed = [aligned(ctx, x, result.shape) for x in tensors]
    if ctx.options.prefer_nhwc and is_channels_first(result):
        # Iterate in memory order (NCHW) like the other steps of such a session, so that they can fuse.
        placed = [in_memory_order(ctx, x, result.rank) for x in placed]
        result = in_memory_order(ctx, result, result.rank)
    inputs = used_inputs(zip(leaves, placed, strict=True), [expression])
    ctx.record(Map(ctx.nodes, result.shape, loadable(ctx, inputs), ((expression, result),)))


def loadable(ctx: Recorder, inputs: Iterable[Input]) -> tuple[Input, ...]:
    """Return ``inputs`` with host tensors copied to the device, except single elements, which are kernel parameters."""
    return tuple((leaf, x if x.size == 1 else ctx.materialize(x)) for leaf, x in inputs)
