"""Scans (prefix sums and other running reductions) along an axis."""

from __future__ import annotations

from ...program.expressions.scalar import Scalar
from ...program.lowering.context import Lowering, Tensor
from ...program.lowering.shapes import collapse
from ...program.steps.row_program import Reduction
from ..codegen.launch_geometry import SERIAL_THREADS, Plane
from ..codegen.source import KernelBuilder, kernel_name, load_text, offset_text
from .block_scan import block_scan, has_block_scan


def scan(ctx: Lowering, reduction: Reduction, x: Tensor, axis: int, *, exclusive: bool, reverse: bool) -> Tensor:
    """Return the scan of x along ``axis``: element i is the reduction of elements 0..i, with ``exclusive`` of 0..i-1.

    With ``reverse`` the scan starts at the end of the axis. A thread scans a row; on a GPU, one or several blocks scan
    a long row.
    """
    result = ctx.empty(x.shape, x.dtype)
    if has_block_scan(ctx, x, axis):
        block_scan(ctx, reduction, x, result, axis, exclusive=exclusive, reverse=reverse)
        return result
    builder = KernelBuilder()
    emit = builder.emit
    kept = [other for other in range(x.rank) if other != axis]
    placed = [tuple(t.strides[other] for other in kept) for t in (x, result)]
    dims, strides = collapse([x.shape[other] for other in kept], placed)
    plane = Plane(ctx, builder, dims or [1], SERIAL_THREADS)
    count = builder.integer(x.shape[axis])
    pointers = [builder.tensor(x), builder.tensor(result, written=True)]
    offsets = []
    for t, by_row in zip((x, result), strides, strict=True):
        terms = [(name, builder.stride(stride)) for name, stride in zip(plane.names, by_row, strict=False)]
        terms.append(("j", builder.stride(t.strides[axis])))
        offsets.append(offset_text(terms))
    total = Scalar(x.dtype, "accumulator")
    (initial,) = reduction.initial((x.dtype,))
    with emit.block(f"if {plane.inside}:"):
        emit.line(f"total = {emit.value(initial)}")
        with emit.block(f"for step in range({count}):"):
            emit.line(f"j = {count} - 1 - step" if reverse else "j = step")
            element = Scalar(x.dtype, "leaf")
            emit.bind(element, emit.assign(load_text(pointers[0], offsets[0], x.dtype)))
            emit.bind(total, "total")
            (after,) = reduction.step((total,), (element,))
            value = emit.value(after)
            if exclusive:
                emit.store(pointers[1], offsets[1], total)
                emit.line(f"total = {value}")
            else:
                emit.line(f"total = {value}")
                emit.store(pointers[1], offsets[1], total)
    builder.launch(ctx, kernel_name(ctx), plane.grid, plane.block)
    return result
