"""Elementwise kernels from scalar expressions: broadcasting, any strides, several outputs, one launch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from ort_cuda_plugin.kernels.codegen import KernelBuilder, load_text, offset_text
from ort_cuda_plugin.kernels.layout import Plane, collapse
from ort_cuda_plugin.model.ir import DType
from ort_cuda_plugin.program import scalar as s
from ort_cuda_plugin.program.fold import fold
from ort_cuda_plugin.program.host import HostArray, on_host
from ort_cuda_plugin.program.lowering import Lowering, Tensor, broadcast_shapes, broadcast_strides
from ort_cuda_plugin.program.scalar import Scalar
from ort_cuda_plugin.program.steps import Input, Map, used_inputs
from ort_cuda_plugin.program.symbolic import Dim

__all__ = ["copy_into", "copy_of", "elementwise", "elementwise_into", "full", "launch_map", "loadable", "record"]

AnyMap = TypeVar("AnyMap", bound=Map)


def elementwise(ctx: Lowering, fn: Callable[..., Scalar], *tensors: Tensor) -> Tensor:
    """``fn`` of the elements of ``tensors``, broadcast to each other. The result has the type that ``fn`` returns.

    Small integer tensors whose contents are known are computed on the host. Raises TypeError where ``fn`` mixes types.
    """
    leaves = [Scalar(x.dtype, "leaf") for x in tensors]
    expression = fn(*leaves)
    shape = broadcast_shapes(ctx, *(x.shape for x in tensors))

    def on_device() -> Tensor:
        result = ctx.empty(shape, expression.dtype)
        _record(ctx, leaves, tensors, [expression], [result])
        return result

    def on_symbols(*arrays: HostArray) -> HostArray:
        function = np.frompyfunc(lambda *row: fold(expression, dict(zip(leaves, row, strict=True))), len(arrays), 1)
        return np.asarray(function(*arrays), dtype=object)

    return on_host(ctx, on_symbols, tensors, shape, expression.dtype, on_device)


def elementwise_into(ctx: Lowering, fn: Callable[..., Scalar], destination: Tensor, *tensors: Tensor) -> None:
    """As `elementwise`, into a view of any strides. ``tensors`` broadcast to the destination's shape."""
    leaves = [Scalar(x.dtype, "leaf") for x in tensors]
    expression = fn(*leaves)
    if expression.dtype is not destination.dtype:
        raise TypeError(f"cannot write {expression.dtype.name} into {destination!r}")
    _record(ctx, leaves, tensors, [expression], [destination])


def copy_into(ctx: Lowering, destination: Tensor, source: Tensor) -> None:
    """Copies the elements of ``source``, which broadcasts to the destination's shape; both may be views."""
    elementwise_into(ctx, lambda x: x, destination, source)


def copy_of(ctx: Lowering, x: Tensor) -> Tensor:
    result = ctx.empty(x.shape, x.dtype)
    copy_into(ctx, result, x)
    return result


def full(ctx: Lowering, shape: Sequence[Dim], value: int | float | bool, dtype: DType) -> Tensor:
    """A tensor of equal elements; a small one of integers is known on the host."""

    def on_device() -> Tensor:
        result = ctx.empty(shape, dtype)
        if value == 0 and math.copysign(1.0, value) > 0:
            ctx.memset(result, 0)
        elif dtype is DType.BOOL:
            ctx.memset(result, 1)
        else:
            # float64 holds every float16 and bfloat16, and the cast makes one parameter serve all types.
            number = ctx.constant(np.array(value, np.int64 if dtype.is_integer else np.float64))
            elementwise_into(ctx, lambda x: s.cast(x, dtype), result, number)
        return result

    def on_symbols() -> HostArray:
        return np.full([d for d in shape if isinstance(d, int)], int(value), dtype=object)

    return on_host(ctx, on_symbols, (), shape, dtype, on_device)


def _record(
    ctx: Lowering,
    leaves: Sequence[Scalar],
    tensors: Sequence[Tensor],
    expressions: Sequence[Scalar],
    results: Sequence[Tensor],
) -> None:
    inputs = used_inputs(zip(leaves, tensors, strict=True), expressions)
    outputs = tuple(zip(expressions, results, strict=True))
    record(ctx, Map(ctx.nodes, results[0].shape, loadable(ctx, inputs), outputs), launch_map)


def loadable(ctx: Lowering, inputs: Iterable[Input]) -> tuple[Input, ...]:
    """``inputs`` with their elements on the device, but for single known elements: those become parameters."""
    return tuple((leaf, x if x.size == 1 else ctx.materialize(x)) for leaf, x in inputs)


def record(ctx: Lowering, step: AnyMap, launch: Callable[[Lowering, AnyMap], None]) -> None:
    """Appends a step to the trace. A claim makes its kernel instead: that is where a step can be impossible."""
    if ctx.is_recording:
        ctx.trace.steps.append(step)
    else:
        launch(ctx, step)


def _is_plain_copy(step: Map) -> bool:
    if len(step.outputs) != 1 or len(step.inputs) != 1 or step.outputs[0][0] is not step.inputs[0][0]:
        return False
    source, result = step.inputs[0][1], step.outputs[0][1]
    return source.shape == result.shape and source.is_contiguous and result.is_contiguous


def launch_map(ctx: Lowering, step: Map) -> None:
    """Makes the kernel of a Map and launches it."""
    if _is_plain_copy(step):
        ctx.copy(step.outputs[0][1], step.inputs[0][1])
        return
    builder = KernelBuilder()
    emit = builder.emit
    loaded: list[Input] = []
    for leaf, x in step.inputs:
        element = builder.element(x)
        if element is None:
            loaded.append((leaf, x))
        else:
            emit.bind(leaf, element)
    placed = [broadcast_strides(x, step.shape) for _, x in loaded] + [y.strides for _, y in step.outputs]
    dims, strides = collapse(step.shape, placed)
    plane = Plane(ctx, builder, dims or [1])
    names = plane.names if dims else []

    def offset(axes: tuple[Dim, ...]) -> str:
        return offset_text([(name, builder.stride(s)) for name, s in zip(names, axes, strict=True)])

    pointers = [builder.tensor(x) for _, x in loaded] + [builder.tensor(y, written=True) for _, y in step.outputs]
    offsets = [offset(axes) for axes in strides]
    with emit.block(f"if {plane.inside}:"):
        for (leaf, x), pointer, at in zip(loaded, pointers, offsets, strict=False):
            emit.bind(leaf, emit.assign(load_text(pointer, at, x.dtype)))
        stores = zip(step.outputs, pointers[len(loaded) :], offsets[len(loaded) :], strict=True)
        for (expression, _), pointer, at in stores:
            emit.store(pointer, at, expression)
    builder.launch(ctx, kernel_name(ctx), plane.grid, plane.block)


_NAME_LENGTH = 40


def kernel_name(ctx: Lowering) -> str:
    """A readable name for the kernels of the nodes being lowered."""
    names = [node.op_type.lower() for node in ctx.nodes]
    return "_".join(names)[:_NAME_LENGTH] if names else "elementwise"
