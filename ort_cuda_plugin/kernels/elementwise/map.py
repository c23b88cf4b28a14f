"""Elementwise kernels for any strides and several outputs."""

from __future__ import annotations

from collections.abc import Sequence

from ...program.expressions.symbolic import Dim, hint
from ...program.lowering.context import Lowering
from ...program.lowering.shapes import Strides, broadcast_strides, collapse
from ...program.steps.steps import Input, Map
from ...program.steps.tensor import BufferKind
from ..codegen.launch_geometry import Plane
from ..codegen.source import KernelBuilder, kernel_name, load_text, offset_text
from .interleaved_map import launch_interleaved_map, plane_vectors
from .transposed_map import launch_transposed_map, transposed_axis
from .vector_map import VectorMap, choose_vectors


def _is_plain_copy(step: Map) -> bool:
    if len(step.outputs) != 1 or len(step.inputs) != 1 or step.outputs[0][0] is not step.inputs[0][0]:
        return False
    source, result = step.inputs[0][1], step.outputs[0][1]
    # A value in a HOST buffer becomes a kernel parameter: it is in no device memory that a copy could read.
    is_in_memory = source.buffer.kind is not BufferKind.HOST
    return is_in_memory and source.shape == result.shape and source.is_contiguous and result.is_contiguous


def launch_map(ctx: Lowering, step: Map) -> None:
    """Launch a Map: a copy if it only copies, else the elementwise kernel that suits its strides."""
    if _is_plain_copy(step):
        ctx.copy(step.outputs[0][1], step.inputs[0][1])
        return
    builder = KernelBuilder()
    emit = builder.emit
    loaded = builder.to_load(step.inputs)
    placed = [broadcast_strides(x, step.shape) for _, x in loaded] + [y.strides for _, y in step.outputs]
    shape = step.shape
    if not ctx.device.emulated:
        # Order the axes by descending stride of the first result, so that adjacent threads store adjacent elements.
        order = sorted(range(len(shape)), key=lambda axis: hint(step.outputs[0][1].strides[axis]), reverse=True)
        shape = tuple(shape[axis] for axis in order)
        placed = [tuple(strides[axis] for axis in order) for strides in placed]
    dims, strides = collapse(shape, placed)
    if not ctx.device.emulated and _launch_for_gpu(ctx, builder, step, dims, loaded, strides):
        return
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


def _launch_for_gpu(
    ctx: Lowering,
    builder: KernelBuilder,
    step: Map,
    dims: Sequence[Dim],
    loaded: Sequence[Input],
    strides: Sequence[Strides],
) -> bool:
    """Launch a kernel that transposes, interleaves or loads vectors; return False if none of them pays off."""
    of_inputs, of_outputs = strides[: len(loaded)], strides[len(loaded) :]
    inputs = list(zip(loaded, of_inputs, strict=True))
    axis = transposed_axis(dims, of_inputs, of_outputs)
    if axis >= 0:
        launch_transposed_map(ctx, builder, step, dims, axis, inputs, of_outputs)
        return True
    if (width := plane_vectors(step, dims, inputs, of_outputs)) > 1:
        launch_interleaved_map(ctx, builder, step, dims, width, inputs)
        return True
    form = choose_vectors(step, dims, [(x, s) for (_, x), s in inputs], of_outputs)
    if form is not None:
        VectorMap(ctx, builder, dims, form).launch(step, inputs, of_outputs)
    return form is not None
