"""Vectorized loads and stores: the conditions on alignment and strides, the vector width, the block size."""

from __future__ import annotations

from collections.abc import Sequence

from ...model.ir import DType
from ...program.expressions.scalar import Scalar, reachable
from ...program.expressions.symbolic import Dim, divides, hint, product
from ...program.lowering.context import DeviceProperties, Tensor
from ...program.steps.tensor import BufferKind, contiguous_strides

VECTOR_BYTES = 16  # maximum bytes of one vectorized access
FEW_ELEMENTS = 1024
"""Minimum elements of a tensor for which a vectorized kernel is worth its longer compilation."""
MAX_WORK = 512
"""Maximum operations per thread in unrolled code (estimate); with more, LLVM compiles long and stops unrolling."""
CALL_WORK = 12
"""Cost of one call of a math library function in estimates of a thread's work, in operations."""
cheap = frozenset({"leaf", "constant", "cast", "abs", "neg", "not", "min", "max", "where", "add", "sub", "mul"})
cheap |= {"lt", "le", "gt", "ge", "eq", "ne", "and", "or", "xor", "shl", "shr", "rint", "floor", "ceil"}
MOST_THREADS, LEAST_THREADS = 256, 64  # maximum and minimum threads per block
BLOCKS_PER_MULTIPROCESSOR = 2
"""Blocks per multiprocessor that a launch should have at least; otherwise its blocks get fewer threads."""


def is_dense(strides: Sequence[Dim], dims: Sequence[Dim]) -> bool:
    """Tell whether the strides are those of a contiguous row-major tensor."""
    return tuple(strides) == contiguous_strides(dims)


def has_vectors(strides: Sequence[Dim], dims: Sequence[Dim], width: int) -> bool:
    """Tell whether ``width`` adjacent elements along the last dimension are contiguous and aligned in memory.

    ``strides`` are those of a tensor over the index space ``dims``. The tensor's first element must be aligned.
    """
    if is_dense(strides, dims):
        return True
    return divides(width, dims[-1]) and strides[-1] == 1 and all(divides(width, stride) for stride in strides[:-1])


def begins_at_vectors(x: Tensor, width: int) -> bool:
    """Tell whether x's first element is aligned for vectors of ``width`` elements in every Run.

    The plugin aligns the buffers that it allocates; inputs and outputs of a cluster may have any address.
    """
    own = (BufferKind.SCRATCH, BufferKind.WEIGHT, BufferKind.STATE)
    return x.buffer.kind in own and divides(width, x.offset)


def vector_load(lanes: str, pointer: str, offset: str, whole: str, width: int) -> list[str]:
    """Return lines that load one vector into new ``lanes``: with one access if ``whole``, else element by element."""
    last = f"{offset} + {width - 1}"
    return [
        f"{lanes} = lanes_of({pointer}, {width})",
        f"load_lanes({lanes}, 0, {pointer}, {offset}, 0, {last}, {whole}, {width}, 1)",
    ]


def vector_store(lanes: str, pointer: str, offset: str, whole: str, width: int) -> str:
    """Return the line that stores the vector ``lanes``: with one access if ``whole``, else element by element."""
    return f"store_lanes({lanes}, 0, {pointer}, {offset}, 0, {offset} + {width}, {whole}, {width}, 1)"


def work_of(expressions: Sequence[Scalar]) -> int:
    """Estimate the operations per element of ``expressions``."""
    return sum(1 if x.op in cheap else CALL_WORK for x in reachable(expressions) if x.operands)


def vector_threads(device: DeviceProperties, items: Dim, blocks: float = BLOCKS_PER_MULTIPROCESSOR) -> int:
    """Return the threads per block for a launch of ``items`` threads.

    Blocks are small if large ones would be fewer than ``blocks`` per multiprocessor.
    """
    threads = MOST_THREADS
    while threads > LEAST_THREADS and hint(items) < threads * blocks * device.multiprocessors:
        threads //= 2
    return threads


def vector_width(dims: Sequence[Dim], types: Sequence[DType], work: int) -> int:
    """Return the elements per vectorized access, a divisor of the last of ``dims``; 1 if vectors do not pay off."""
    if hint(product(dims)) < FEW_ELEMENTS:
        return 1
    width = VECTOR_BYTES // max(dtype.itemsize for dtype in types)
    while width > 1 and (width * work > MAX_WORK or not divides(width, dims[-1])):
        width //= 2
    return width
