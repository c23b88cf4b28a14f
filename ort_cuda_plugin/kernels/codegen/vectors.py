"""Vectors of elements that a thread loads or stores by one access: where memory allows them, and how wide they are."""

from __future__ import annotations

from collections.abc import Sequence

from ...model.ir import DType
from ...program.expressions.scalar import Scalar, reachable
from ...program.expressions.symbolic import Dim, divides, hint, product
from ...program.lowering.context import DeviceProperties, Tensor
from ...program.steps.tensor import BufferKind, contiguous_strides

VECTOR_BYTES = 16
FEW_ELEMENTS = 1024
"""Fewer are not worth a longer kernel."""
MAX_WORK = 512
"""Operations in a thread's straight code, about: more take long to compile, and LLVM no longer unrolls its loop."""
CALL_WORK = 12
"""Operations that a function of the mathematical library stands for."""
cheap = frozenset({"leaf", "constant", "cast", "abs", "neg", "not", "min", "max", "where", "add", "sub", "mul"})
cheap |= {"lt", "le", "gt", "ge", "eq", "ne", "and", "or", "xor", "shl", "shr", "rint", "floor", "ceil"}
MOST_THREADS, LEAST_THREADS = 256, 64
BLOCKS_PER_MULTIPROCESSOR = 2
"""Smaller blocks come before fewer of them."""


def is_dense(strides: Sequence[Dim], dims: Sequence[Dim]) -> bool:
    """Whether elements lie as the index space does."""
    return tuple(strides) == contiguous_strides(dims)


def has_vectors(strides: Sequence[Dim], dims: Sequence[Dim], width: int) -> bool:
    """Whether the vectors of the index space are neighbours in memory, and begin where a vector may."""
    if is_dense(strides, dims):
        return True
    return divides(width, dims[-1]) and strides[-1] == 1 and all(divides(width, stride) for stride in strides[:-1])


def begins_at_vectors(x: Tensor, width: int) -> bool:
    """Whether x begins where a vector may, whatever a Run brings: memory of the application may be anywhere."""
    own = (BufferKind.SCRATCH, BufferKind.WEIGHT, BufferKind.STATE)
    return x.buffer.kind in own and divides(width, x.offset)


def vector_load(lanes: str, pointer: str, place: str, whole: str, width: int) -> list[str]:
    """Lines that load one vector into new ``lanes``; where it is not ``whole``, element by element."""
    last = f"{place} + {width - 1}"
    return [
        f"{lanes} = lanes_of({pointer}, {width})",
        f"load_lanes({lanes}, 0, {pointer}, {place}, 0, {last}, {whole}, {width}, 1)",
    ]


def vector_store(lanes: str, pointer: str, place: str, whole: str, width: int) -> str:
    """The line that stores one vector of lanes; where it is not ``whole``, element by element."""
    return f"store_lanes({lanes}, 0, {pointer}, {place}, 0, {place} + {width}, {whole}, {width}, 1)"


def work_of(expressions: Sequence[Scalar]) -> int:
    """Operations for one element, about."""
    return sum(1 if x.op in cheap else CALL_WORK for x in reachable(expressions) if x.operands)


def vector_threads(device: DeviceProperties, items: Dim, blocks: float = BLOCKS_PER_MULTIPROCESSOR) -> int:
    """Threads of a block, for so many in all: small blocks where large ones would leave multiprocessors idle.

    These have so many ``blocks`` each, if possible.
    """
    threads = MOST_THREADS
    while threads > LEAST_THREADS and hint(items) < threads * blocks * device.multiprocessors:
        threads //= 2
    return threads


def vector_width(dims: Sequence[Dim], types: Sequence[DType], work: int) -> int:
    """Elements of a vector along the last of ``dims``, which are whole vectors; 1 where these are not worth it."""
    if hint(product(dims)) < FEW_ELEMENTS:
        return 1
    width = VECTOR_BYTES // max(dtype.itemsize for dtype in types)
    while width > 1 and (width * work > MAX_WORK or not divides(width, dims[-1])):
        width //= 2
    return width
