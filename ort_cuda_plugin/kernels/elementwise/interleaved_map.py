"""Elementwise kernels that interleave 2 to 4 planes on a GPU, for example the channels of an image.

A thread loads a vector of each plane, interleaves their elements, and stores vectors.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import Dim, ceildiv, divides, hint, product
from ...program.lowering.context import Lowering
from ...program.steps.steps import Input, Map
from ..codegen.launch_geometry import coordinates, extent, index_type
from ..codegen.source import KernelBuilder, kernel_name, load_text, offset_text, register_type
from ..codegen.vectors import FEW_ELEMENTS, MAX_WORK, VECTOR_BYTES, is_dense, vector_threads, work_of

MOST_PLANES = 4  # maximum planes (channels) that are interleaved

Placed = tuple[Input, Sequence[Dim]]
"""An input of a Map, and its strides over the kernel's dimensions."""


def plane_vectors(step: Map, dims: Sequence[Dim], inputs: Sequence[Placed], outputs: Sequence[Sequence[Dim]]) -> int:
    """Return the elements per vector; 1 if this kernel does not suit the Map.

    It suits results that are contiguous over ``dims``, and inputs that are contiguous along the second-to-last of
    ``dims``, while the last one enumerates 2 to 4 planes.
    """
    if len(dims) < 2 or hint(product(dims)) < FEW_ELEMENTS:
        return 1
    planes = dims[-1]
    if not isinstance(planes, int) or not 1 < planes <= MOST_PLANES or not all(is_dense(y, dims) for y in outputs):
        return 1
    moved = [(x, strides) for (_, x), strides in inputs if any(stride != 0 for stride in strides)]
    if not moved or any(strides[-2] != 1 or strides[-1] in (0, 1) for _, strides in moved):
        return 1
    width = VECTOR_BYTES // max(x.dtype.itemsize for x in (*(x for x, _ in moved), *(y for _, y in step.outputs)))
    numbers = [
        dims[-2],
        *(stride for _, strides in moved for axis, stride in enumerate(strides[:-2]) if dims[axis] != 1),
    ]
    numbers += [strides[-1] for _, strides in moved]
    while width > 1 and not all(divides(width, number) for number in numbers):
        width //= 2
    work = max(work_of([value for value, _ in step.outputs]), 1)
    return width if width * planes * work <= MAX_WORK else 1


def launch_interleaved_map(
    ctx: Lowering, builder: KernelBuilder, step: Map, dims: Sequence[Dim], width: int, inputs: Sequence[Placed]
) -> None:
    """Generate and launch the kernel of a Map; a thread loads a vector of ``width`` elements of each plane."""
    emit, planes = builder.emit, dims[-1]
    assert isinstance(planes, int)
    strips = [*dims[:-2], dims[-2] // width]
    items = product(strips)
    dtype = index_type(ctx, product(dims))
    extents = [extent(builder, dim, dtype) for dim in strips[1:]]
    count, end = builder.integer(items), builder.integer(product(dims))
    emit.line("number = first_element(1, 1)")
    with emit.block(f"if number < {count}:"):
        *outer, strip = coordinates(emit, emit.assign(f"{register_type(dtype)}(number)"), extents, dtype)
        pixel = emit.assign(f"{strip} * {width}")
        pointers = [builder.tensor(x) for (_, x), _ in inputs]
        written = [builder.tensor(y, written=True) for _, y in step.outputs]
        seen: dict[Scalar, str] = {}
        vectors = list(written)
        for ((leaf, x), strides), pointer in zip(inputs, pointers, strict=True):
            if all(stride == 0 for stride in strides):
                emit.bind(leaf, emit.assign(load_text(pointer, "0", x.dtype)))
            else:
                seen[leaf] = emit.fresh("r")
                vectors.append(pointer)
        whole = emit.assign(" & ".join(f"is_aligned({pointer}, {width})" for pointer in vectors))
        for ((leaf, _), strides), pointer in zip(inputs, pointers, strict=True):
            if leaf in seen:
                emit.line(f"{seen[leaf]} = lanes_of({pointer}, {width * planes})")
                terms = list(zip(outer, [builder.stride(stride) for stride in strides[:-2]], strict=True))
                at, apart = emit.assign(f"{pixel} + {offset_text(terms)}"), builder.stride(strides[-1])
                last = emit.assign(f"{at} + {planes - 1} * {apart} + {width - 1}")
                emit.line(f"load_lanes({seen[leaf]}, 0, {pointer}, {at}, {apart}, {last}, {whole}, {width}, {planes})")
        results = [emit.lanes(pointer, width * planes) for pointer in written]
        with emit.block(f"for e in range({width}):"):
            for plane in range(planes):
                with emit.scope():
                    for (leaf, x), _ in inputs:
                        if leaf in seen:
                            emit.bind(leaf, emit.assign(load_text(seen[leaf], f"{plane * width} + e", x.dtype)))
                    for name, (value, _) in zip(results, step.outputs, strict=True):
                        emit.store(name, f"e * {planes} + {plane}", value)
        to = emit.assign(f"number * {width * planes}")
        for name, pointer in zip(results, written, strict=True):
            emit.line(f"store_lanes({name}, 0, {pointer}, {to}, {width}, {end}, {whole}, {width}, {planes})")
    threads = vector_threads(ctx.device, items)
    builder.launch(ctx, kernel_name(ctx), (ceildiv(items, threads), 1, 1), (threads, 1, 1))
