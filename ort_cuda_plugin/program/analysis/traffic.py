"""Memory traffic: the bytes of device memory that steps read and write.

A step that is not yet a launch counts each input element and each result once. A launch counts every pass that it makes
over a tensor. Data shared by threads and blocks of a launch (sliding windows, GEMM tiles, broadcast elements) counts
once, since a cache serves it. Calls of vendor libraries count like steps. A loop counts one iteration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..expressions.symbolic import hint, product
from ..steps.steps import Contract, Convolve, Map
from ..steps.tensor import Buffer, BufferKind, Tensor
from ..steps.trace import Copy, DeviceLoop, HostCall, Launch, LibraryCall, Memset, ReadBack, Step, Use
from .step_tensors import tensors_of


@dataclass(frozen=True)
class Traffic:
    """Bytes that steps read and write, for the sizes of the Run that the plan is built for."""

    read: int = 0
    written: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.read + other.read, self.written + other.written)

    @property
    def total(self) -> int:
        return self.read + self.written


@dataclass(frozen=True)
class ProgramTraffic:
    """Traffic of a program. ``compulsory``: each fused step accesses each of its tensors once. ``asked``: launches may
    pass over a tensor several times.
    """

    compulsory: Traffic
    asked: Traffic


@dataclass(frozen=True)
class Access:
    """The reads of a tensor by a step, or the writes: the step accesses ``bytes`` of the tensor ``times`` times."""

    tensor: Tensor
    bytes: int
    times: int = 1


def traffic(steps: Iterable[Step]) -> Traffic:
    """Return the bytes of device memory that the steps read and write."""
    total = Traffic()
    for step in steps:
        reads, writes = accesses(step)
        total += Traffic(_sum(reads), _sum(writes))
    return total


def accesses(step: Step) -> tuple[list[Access], list[Access]]:
    """Return (reads, writes) of a step. Broadcast elements count once in ``bytes``."""
    match step:
        case Map():
            return _accesses(step.tensors_read), _accesses(y for _, y in step.all_outputs)
        case Launch():
            if any(hint(dim) == 0 for dim in step.grid):
                return [], []
            return _of_arguments(step)
        case LibraryCall():
            reads, writes = _of_arguments(step)
            return reads, writes[:-1]  # the workspace, the last argument, is not counted
        case Copy():
            return _accesses([step.source]), _accesses([step.destination])
        case Memset():
            return [], _accesses([step.destination])
        case ReadBack():
            return _accesses([step.source]), []
        case DeviceLoop():
            parts = [accesses(each) for each in (*step.first, *step.body)]
            return [x for reads, _ in parts for x in reads], [x for _, writes in parts for x in writes]
        case HostCall():
            return _of_arguments(step)


def arithmetic(step: Step) -> float:
    """Return the number of multiplications plus additions of a GEMM or a convolution; 0 for other steps."""
    if isinstance(step, Contract):
        depth = step.a.shape[-1] + (0 if step.low_rank is None else step.low_rank.a.shape[-1])
        return 2.0 * hint(product(step.shape)) * hint(depth)
    if isinstance(step, Convolve):
        x, weights = step.operands
        many = x.size if step.transposed else product(step.shape)
        return 2.0 * hint(many) * hint(product(weights.shape[1:]))
    return 0.0


def _of_arguments(step: Launch | LibraryCall | HostCall) -> tuple[list[Access], list[Access]]:
    tensors = tensors_of(step)
    reads = _accesses(x for x in tensors if x.buffer not in step.writes)
    writes = _accesses(x for x in tensors if x.buffer in step.writes)
    if isinstance(step, Launch):
        reads, writes = ([_used(access, step.uses) for access in accesses] for accesses in (reads, writes))
    return reads, writes


def _used(access: Access, uses: Mapping[Tensor, Use]) -> Access:
    use = uses.get(access.tensor)
    if use is None:
        return access
    most = access.bytes if use.elements is None else hint(use.elements) * access.tensor.dtype.itemsize
    return Access(access.tensor, min(access.bytes, most), hint(use.times))


def _accesses(tensors: Iterable[Tensor]) -> list[Access]:
    views = {(x.buffer, x.offset, x.strides, x.shape): x for x in tensors if x.buffer.kind is not BufferKind.HOST}
    return [Access(x, min(hint(x.distinct_bytes), hint(x.buffer.nbytes))) for x in views.values()]


def _sum(accesses: Iterable[Access]) -> int:
    """Return the bytes of all accesses.

    Views of one buffer may overlap, so their first passes together count at most the buffer's size. Repeated passes
    (``times``) count in full.
    """
    once: dict[Buffer, int] = {}
    total = 0
    for access in accesses:
        buffer = access.tensor.buffer
        room = hint(buffer.nbytes) - once.get(buffer, 0)
        once[buffer] = once.get(buffer, 0) + min(access.bytes, room)
        total += min(access.bytes, room) + (access.times - 1) * access.bytes
    return total
