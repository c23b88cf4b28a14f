"""Elementwise kernels: any strides, several outputs, one launch."""

from __future__ import annotations

from ort_cuda_plugin.kernels.codegen import KernelBuilder, kernel_name, load_text, offset_text
from ort_cuda_plugin.kernels.layout import Plane
from ort_cuda_plugin.kernels.vector_map import VectorMap, choose_vectors
from ort_cuda_plugin.program.lowering import Lowering
from ort_cuda_plugin.program.shapes import broadcast_strides, collapse
from ort_cuda_plugin.program.steps import Map
from ort_cuda_plugin.program.symbolic import Dim

__all__ = ["launch_map"]


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
    loaded = builder.to_load(step.inputs)
    placed = [broadcast_strides(x, step.shape) for _, x in loaded] + [y.strides for _, y in step.outputs]
    dims, strides = collapse(step.shape, placed)
    if not ctx.device.emulated:
        inputs = list(zip((x for _, x in loaded), strides, strict=False))
        form = choose_vectors(step, dims, inputs, strides[len(loaded) :])
        if form is not None:
            placed_inputs = list(zip(loaded, strides, strict=False))
            VectorMap(ctx, builder, dims, form).launch(step, placed_inputs, strides[len(loaded) :])
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
