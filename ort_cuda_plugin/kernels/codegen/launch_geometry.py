"""Launch geometry of generated kernels: block sizes, index types, and coordinates from thread indices."""

from __future__ import annotations

from collections.abc import Sequence

from ...model.ir import DType
from ...program.expressions.symbolic import Dim, ceildiv, hint, product, sym_max
from ...program.lowering.context import Lowering
from .source import Emitter, KernelBuilder, Parameters, register_type

SERIAL_THREADS = 64
"""Threads per block of kernels with much work per thread; blocks are small, so that there are many of them."""


def no_wider(threads: int, dim: Dim) -> int:
    """Return ``threads``, but if ``dim`` is known, at most the smallest power of two >= ``dim`` and >= 32."""
    return min(threads, max(32, 1 << (dim - 1).bit_length())) if isinstance(dim, int) and dim > 0 else threads


def index_type(ctx: Lowering, *sizes: Dim) -> DType:
    """Return INT32 if a guard can ensure that all ``sizes`` fit in an int32, and add the guard; else INT64."""
    return DType.INT32 if ctx.index_dtype(*sizes) == "i32" else DType.INT64


def reach(shape: Sequence[Dim], strides: Sequence[Dim]) -> Dim:
    """Return an upper bound of the distance, in elements, from a strided tensor's first element to its last."""
    total: Dim = 0
    for dim, stride in zip(shape, strides, strict=True):
        total = total + dim * stride
    return total


Extent = tuple[str, str]
"""Kernel parameters of a dimension: its size, and the divisor argument of ``quotient_i32`` or ``quotient_i64``."""


def extent(builder: Parameters, dim: Dim, dtype: DType, names: tuple[str, str] = ("", "")) -> Extent:
    """Add the size and divisor parameters of ``dim`` for index type ``dtype``. The dimension may be 0."""
    positive = sym_max(dim, 1)
    divisor = (2**63 - 1) // positive if dtype is DType.INT32 else positive
    return builder.integer(dim, dtype, names[0]), builder.integer(divisor, name=names[1])


def coordinates(emit: Emitter, flat: str, inner: Sequence[Extent], dtype: DType) -> list[str]:
    """Emit the int64 coordinates of row-major index ``flat``. ``inner`` are the dimensions after the first."""
    index = register_type(dtype)
    names = []
    rest = flat
    for size, divisor in reversed(inner):
        quotient = emit.assign(f"quotient_{dtype.short}({rest}, {divisor})")
        names.append(emit.assign(f"int64({index}({rest} - {quotient} * {size}))"))
        rest = quotient
    if dtype is DType.INT32:
        rest = emit.assign(f"int64({rest})")
    return [rest, *reversed(names)]


class Plane:
    """Mapping of threads to indices: the last dimension along threadIdx.x, the others flattened to rows.

    Adjacent threads access adjacent elements, and only the row needs divisions. The constructor emits the coordinates,
    int64 variables ``names``, one for each dimension; the kernel must test the condition ``inside``. Launch the kernel
    with ``grid`` and ``block``.
    """

    def __init__(self, ctx: Lowering, builder: KernelBuilder, dims: Sequence[Dim], threads: int = 0) -> None:
        *outer, columns = dims
        # Each block costs time on the emulated device.
        threads = threads or (1024 if ctx.device.emulated else 256)
        emit = builder.emit
        n_columns = builder.integer(columns)
        if not outer:
            threads = no_wider(threads, columns)
            emit.line("column = int64(cuda.blockIdx.x) * int64(cuda.blockDim.x) + int64(cuda.threadIdx.x)")
            self.names = ["column"]
            self.inside = f"column < {n_columns}"
            self.grid: tuple[Dim, Dim, Dim] = (ceildiv(columns, threads), 1, 1)
            self.block = (threads, 1, 1)
            return
        rows = product(outer)
        width = 4  # a power of two, just large enough for the expected columns
        while width < threads and width < hint(columns):
            width *= 2
        height = threads // width
        tiles = ceildiv(columns, width)
        blocks = tiles * ceildiv(rows, height)
        dtype = index_type(ctx, rows, blocks)
        index = register_type(dtype)
        n_rows = builder.integer(rows, dtype)
        n_tiles, by_tiles = extent(builder, tiles, dtype)
        inner = [extent(builder, dim, dtype) for dim in outer[1:]]
        emit.line(f"block = {index}(cuda.blockIdx.x)")
        emit.line(f"tile_row = quotient_{dtype.short}(block, {by_tiles})")
        emit.line(f"row = {index}(tile_row * {index}(cuda.blockDim.y) + {index}(cuda.threadIdx.y))")
        # 64-bit arithmetic cannot wrap: LLVM proves that addresses are linear in threadIdx.x, and vectorizes the loop
        # over threads that the emulated device runs.
        emit.line(f"tile = int64(block) - int64(tile_row) * int64({n_tiles})")
        emit.line("column = tile * int64(cuda.blockDim.x) + int64(cuda.threadIdx.x)")
        self.names = [*coordinates(emit, "row", inner, dtype), "column"]
        self.inside = f"(row < {n_rows}) & (column < {n_columns})"
        self.grid = (blocks, 1, 1)
        self.block = (width, height, 1)
