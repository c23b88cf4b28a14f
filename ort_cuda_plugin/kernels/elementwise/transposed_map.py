"""Elementwise kernels with transposed inputs, on a GPU: a tiled transpose through shared memory.

A block loads a square tile along the input's contiguous axis into shared memory, and reads it there along the
contiguous axis of the results: so both global loads and stores coalesce. Rows of a tile are padded by one element
against bank conflicts.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...model.ir import NARROW_FLOATS, DType
from ...program.expressions.symbolic import Dim, ceildiv, hint, product
from ...program.lowering.context import Lowering
from ...program.steps.steps import Input, Map
from ..codegen.launch_geometry import coordinates, extent, index_type
from ..codegen.source import KernelBuilder, kernel_name, load_text, offset_text, register_type
from ..codegen.vectors import FEW_ELEMENTS

SIDE = 32
"""Elements along each side of a tile."""
ROWS = 8
"""Block size along threadIdx.y; each of the `SIDE` x `ROWS` threads processes `SIDE` / `ROWS` elements of a tile."""
LEAST = 16
"""Minimum elements along both axes of a tile. For shorter axes plain strided loads suffice, which hit the cache."""
MAX_TILES = 4  # maximum inputs that go through shared memory


def memory_type(dtype: DType) -> str:
    """Return the Numba type with which shared memory stores an element of ``dtype``, unconverted."""
    if dtype in NARROW_FLOATS or dtype is DType.BOOL:
        return f"uint{8 * dtype.itemsize}"
    return dtype.numpy.name


def transposed_axis(dims: Sequence[Dim], inputs: Sequence[Sequence[Dim]], outputs: Sequence[Sequence[Dim]]) -> int:
    """Return the axis along which the first transposed input is contiguous; -1 if shared-memory tiles do not pay off.

    ``inputs`` and ``outputs`` are strides over ``dims``. An input is transposed if this axis is not the last one.
    """
    if len(dims) < 2 or hint(product(dims)) < FEW_ELEMENTS or hint(dims[-1]) < LEAST:
        return -1
    if any(strides[-1] != 1 for strides in outputs):
        return -1
    for strides in inputs:
        if strides[-1] not in (0, 1) and 1 in strides[:-1]:
            axis = strides.index(1)
            return axis if hint(dims[axis]) >= LEAST else -1
    return -1


def launch_transposed_map(
    ctx: Lowering,
    builder: KernelBuilder,
    step: Map,
    dims: Sequence[Dim],
    axis: int,
    inputs: Sequence[tuple[Input, Sequence[Dim]]],
    outputs: Sequence[Sequence[Dim]],
) -> None:
    """Generate and launch the kernel of a Map that transposes tiles of ``axis`` and the last axis."""
    emit, last = builder.emit, len(dims) - 1
    outer = [number for number in range(last) if number != axis]
    tiles = [ceildiv(dims[axis], SIDE), ceildiv(dims[last], SIDE)]
    blocks = [*(dims[number] for number in outer), *tiles]
    dtype = index_type(ctx, product(blocks))
    extents = [extent(builder, dim, dtype) for dim in blocks[1:]]
    n_rows, n_columns = builder.integer(dims[axis]), builder.integer(dims[last])
    *names, tile_row, tile_column = coordinates(
        emit, emit.assign(f"{register_type(dtype)}(cuda.blockIdx.x)"), extents, dtype
    )
    x, y = emit.assign("int64(cuda.threadIdx.x)"), emit.assign("int64(cuda.threadIdx.y)")
    row0, column0 = emit.assign(f"{tile_row} * {SIDE}"), emit.assign(f"{tile_column} * {SIDE}")
    at = dict(zip(outer, names, strict=True))

    def offset(strides: Sequence[Dim], row: str, column: str) -> str:
        indices = {**at, axis: row, last: column}
        return offset_text([(indices[number], builder.stride(stride)) for number, stride in enumerate(strides)])

    pointers = [builder.tensor(tensor) for (_, tensor), _ in inputs]
    written = [builder.tensor(y, written=True) for _, y in step.outputs]
    crossed = [
        number for number, (_, strides) in enumerate(inputs) if strides[axis] == 1 and strides[last] not in (0, 1)
    ][:MAX_TILES]
    share = SIDE // ROWS
    shared: dict[int, str] = {}
    for number in crossed:
        (_, tensor), strides = inputs[number]
        shared[number], lanes = emit.fresh("tile"), emit.fresh("r")
        emit.line(
            f"{shared[number]} = array_pointer(cuda.shared.array({SIDE * (SIDE + 1)}, {memory_type(tensor.dtype)}))"
        )
        emit.line(f"{lanes} = lanes_of({pointers[number]}, {share})")
        row = emit.assign(f"choose({row0} + {x} < {n_rows}, {row0} + {x}, int64(0))")
        with emit.block(f"for i in range({share}):"):
            line = emit.assign(f"{column0} + {y} + i * {ROWS}")
            column = emit.assign(f"choose({line} < {n_columns}, {line}, int64(0))")
            emit.line(f"{lanes}[i] = {pointers[number]}[{offset(strides, row, column)}]")
        with emit.block(f"for i in range({share}):"):
            emit.line(f"{shared[number]}[({y} + i * {ROWS}) * {SIDE + 1} + {x}] = {lanes}[i]")
    emit.line("cuda.syncthreads()")
    with emit.block(f"for i in range({share}):"):
        line = emit.assign(f"{y} + i * {ROWS}")
        row, column = emit.assign(f"{row0} + {line}"), emit.assign(f"{column0} + {x}")
        with emit.block(f"if ({row} < {n_rows}) & ({column} < {n_columns}):"):
            for number, ((leaf, tensor), strides) in enumerate(inputs):
                if number in shared:
                    text = load_text(shared[number], f"{x} * {SIDE + 1} + {line}", tensor.dtype)
                else:
                    text = load_text(pointers[number], offset(strides, row, column), tensor.dtype)
                emit.bind(leaf, emit.assign(text))
            for (expression, _), pointer, strides in zip(step.outputs, written, outputs, strict=True):
                emit.store(pointer, offset(strides, row, column), expression)
    builder.launch(ctx, kernel_name(ctx), (product(blocks), 1, 1), (SIDE, ROWS, 1))
