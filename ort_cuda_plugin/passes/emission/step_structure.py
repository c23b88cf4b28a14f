"""Structure of a step: a hashable key that two steps share if they differ only in nodes, buffers and expression leaves.

Networks repeat blocks of layers, so most steps have the structure, and need the kernels, of an earlier step.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from enum import Enum

from ...model.ir import Constant, DType
from ...program.expressions.scalar import Scalar, operands_first
from ...program.expressions.symbolic import Expr
from ...program.steps.row_program import Reduction, Row, Stage
from ...program.steps.steps import Map
from ...program.steps.tensor import Buffer, BufferKind, Tensor
from ...program.steps.tensor_fields import field_names

_PLAIN = (int, str, bytes, DType, Enum, Expr, type(None), Reduction)
"""Types whose equal values may replace each other in a key. Floats are excluded, because -0.0 equals 0.0."""
_PLAIN_TYPES = frozenset(_PLAIN)


class _HasNoStructureError(Exception):
    """The step refers to an object that a key cannot describe."""


@dataclass(frozen=True)
class Structure:
    """The ``key`` of a step, and the step's buffers. Steps with equal keys use their buffers in the same order."""

    key: Hashable
    buffers: tuple[Buffer, ...]


def structure_of(step: Map) -> Structure | None:
    """Return the structure of a step; None if its kernels may depend on anything that the key does not contain."""
    form = _Form()
    try:
        key = form.of(step)
    except _HasNoStructureError:
        return None
    op_types = tuple(node.op_type for node in step.nodes)  # the op types are part of the kernels' names
    return Structure((key, op_types, tuple(form.operations), tuple(form.kinds)), tuple(form.buffers))


class _Form:
    """Builds the key of one step. Buffers and expression nodes become numbers in the order of first use."""

    def __init__(self) -> None:
        self.buffers: dict[Buffer, int] = {}
        self.kinds: list[Hashable] = []
        self.operations: list[Hashable] = []
        self._scalars: dict[Scalar, int] = {}
        self._stages: dict[Stage, int] = {}

    def of(self, value: object) -> Hashable:
        if type(value) in _PLAIN_TYPES:
            return value
        if isinstance(value, tuple):
            return tuple([self.of(item) for item in value])
        if isinstance(value, Tensor):
            return value.dtype, value.shape, value.strides, value.offset, self._buffer(value.buffer)
        if isinstance(value, Scalar):
            return self._scalar(value)
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, float):
            return value.hex()
        if isinstance(value, frozenset):
            return value if all(isinstance(item, int) for item in value) else self._unknown()
        if isinstance(value, range):
            return value.start, value.stop, value.step
        if isinstance(value, Stage):
            return self._stage(value)
        if isinstance(value, Row):
            return self._scalar(value.index), self._scalar(value.count)
        if is_dataclass(value) and not isinstance(value, type):
            return type(value), tuple([self.of(getattr(value, name)) for name in field_names(type(value))])
        return self._unknown()

    def _buffer(self, buffer: Buffer) -> int:
        number = self.buffers.get(buffer)
        if number is None:
            if buffer.host is not None or buffer.deferred_host is not None:
                self._unknown()  # the kernels have this buffer's elements as parameters
            number = self.buffers[buffer] = len(self.buffers)
            self.kinds.append((buffer.kind, buffer.nbytes))
        return number

    def _scalar(self, x: Scalar) -> int:
        for each in operands_first([x], self._scalars):
            operands = tuple([self._scalars[operand] for operand in each.operands])
            value = None if each.value is None else (type(each.value), self.of(each.value))
            self.operations.append((each.op, each.dtype, operands, value))
            self._scalars[each] = len(self._scalars)
        return self._scalars[x]

    def _stage(self, stage: Stage) -> Hashable:
        if stage not in self._stages:
            self._stages[stage] = len(self._stages)
            return self._stages[stage], stage.reduction, self.of(stage.initial), self.of(stage.elements)
        return self._stages[stage]

    def _unknown(self) -> int:
        raise _HasNoStructureError


# ---- constants whose contents the kernels depend on ----


@dataclass
class Inspected:
    """The constants whose contents the kernels of a step depend on, by their index in the structure's ``buffers``."""

    constants: dict[int, Constant]

    def are_equal(self, buffers: Sequence[Buffer]) -> bool:
        """Return whether another step's ``buffers`` hold the same constants, or equal one-element constants."""
        return all(_is_equal(constant, buffers[number].data) for number, constant in self.constants.items())


def _is_equal(constant: Constant, other: Constant | None) -> bool:
    if constant is other:
        return True
    if other is None or constant.size != 1 or other.size != 1 or constant.dtype is not other.dtype:
        return False
    return constant.look().tobytes() == other.look().tobytes()


@contextmanager
def inspecting(buffers: Sequence[Buffer]) -> Iterator[Inspected]:
    """Collect those constants among ``buffers`` whose contents are read in the ``with`` block."""
    constants = {n: buffer.data for n, buffer in enumerate(buffers) if buffer.kind is BufferKind.WEIGHT and buffer.data}
    inspected = Inspected({})
    decided = [constant for constant in constants.values() if constant.decides]
    for constant in decided:
        constant.decides = False
    try:
        yield inspected
    finally:
        inspected.constants.update((n, constant) for n, constant in constants.items() if constant.decides)
        for constant in decided:
            constant.decides = True
