"""Verifies programs between passes. Errors name the violated invariant by its number in docs/invariants.md."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from ...abi.errors import Error
from ...abi.flags import flag_variable
from ..expressions.scalar import reachable
from ..expressions.symbolic import Dim, eq, hint, le, product, truth
from ..steps.steps import Attend, Contract, Map, Rows, Sums
from ..steps.tensor import Buffer, BufferKind, Tensor
from ..steps.trace import DeviceLoop, Launch, Step
from .program_text import step_kind
from .step_tensors import tensors_of

VERIFY_VARIABLE = "ORT_CUDA_PLUGIN_VERIFY"
CHECK_VARIABLE = "ORT_CUDA_PLUGIN_EMULATE_CHECK"
"""Environment variables that turn verification on. `CHECK_VARIABLE` also turns on the emulator's checking mode."""
MAX_MASKED = 1 << 16
"""Maximum elements of a buffer for the exact check that its slices cover it. For a larger buffer, the check only adds
up the sizes of the slices.
"""
_written_first = frozenset({BufferKind.SCRATCH, BufferKind.OUTPUT})


class InvalidProgramError(Error, RuntimeError):
    """A pass left a program that violates an invariant: a bug of the plugin."""


def is_wanted() -> bool:
    """Return whether an environment variable turns verification of programs on."""
    return any(flag_variable(name) for name in (VERIFY_VARIABLE, CHECK_VARIABLE))


class Verifier:
    """Verifies the programs of one plan, as an observer of the passes (`Watch`).

    The invariants of a single step are checked once. No step writes the buffers ``stand_ins`` (see
    `Lowering.stand_ins`), so the verifier expects no writer for them.
    """

    def __init__(self, stand_ins: Collection[Buffer] = ()) -> None:
        self._known: set[Step] = set()
        self._stand_ins = stand_ins

    def __call__(self, name: str, steps: Sequence[Step]) -> None:
        """Raise InvalidProgramError if the steps after the pass ``name`` violate an invariant."""
        for number, step in enumerate(steps):
            for reason in _violations(step) if step not in self._known else ():
                raise InvalidProgramError(_message(name, number, step, reason))
            self._known.add(step)
        check_writers(name, steps, self._stand_ins)
        for number, step, x in _gaps(steps):
            if x.buffer in self._stand_ins:
                continue
            reason = f"4: {_text(x)} is written in parts that do not cover its buffer"
            raise InvalidProgramError(_message(name, number, step, reason))


def check_writers(name: str, steps: Sequence[Step], stand_ins: Collection[Buffer] = ()) -> None:
    """Raise InvalidProgramError if a step after the pass ``name`` reads an intermediate that no earlier step writes.

    Every program gets this check after its last pass, because a kernel that reads memory before a step writes it gives
    wrong results without an error. `Verifier` checks all invariants after each pass, on request.
    """
    written = set(stand_ins)
    for number, step in enumerate(steps):
        # A launch or another recorded step may read a buffer that it writes itself; a `Map` may not.
        own = () if isinstance(step, Map) else step.writes
        for buffer in step.reads:
            is_known = buffer in written or buffer in own or buffer.nbytes == 0
            if not is_known and buffer.kind in _written_first:
                reason = f"3: {_described(step, buffer)} is read, but no earlier step writes it"
                raise InvalidProgramError(_message(name, number, step, reason))
        written.update(step.writes)


def _message(name: str, number: int, step: Step, reason: str) -> str:
    label = f", node {step.node.label}" if step.node is not None else ""
    return (
        f"pass {name}, step {number}: {step_kind(step)}{label}: invariant {reason}. Report the model;"
        " the session option fusion=0 disables most passes"
    )


def _text(x: Tensor) -> str:
    buffer = x.buffer
    number = f" {buffer.index}" if buffer.kind in (BufferKind.INPUT, BufferKind.OUTPUT) else ""
    return f"tensor {x!r} of {buffer.kind.name}{number}"


def _described(step: Step, buffer: Buffer) -> str:
    return next((_text(x) for x in tensors_of(step) if x.buffer is buffer), f"a buffer of {buffer.kind.name}")


def _violations(step: Step) -> Iterator[str]:
    used = {*step.reads, *step.writes}
    # The strides of packed operands count quantized codes, not elements, so they cannot show whether such an operand
    # exceeds its buffer. Arguments of a launch are not checked either, since they may be packed.
    conversions = zip(step.operands, step.conversions, strict=False) if isinstance(step, Sums) else ()
    packed = {x for x, conversion in conversions if conversion is not None and conversion.bits}
    for x in tensors_of(step):
        if x.buffer.kind is BufferKind.HOST:
            if not isinstance(step, Map) or x.size != 1:
                yield f"2: {_text(x)} is on the host, but the step reads it on the device"
        elif x.buffer not in used:
            yield f"1: {_text(x)} is missing in the step's reads and writes"
        elif x not in packed and not isinstance(step, Launch | DeviceLoop) and not _is_inside(x):
            yield f"5: {_text(x)} exceeds its buffer"
    if isinstance(step, Map):
        yield from _shapes(step)
        yield from _leaves(step)
    if isinstance(step, Attend):
        inner = {buffer for part in step.parts for buffer in part.writes}
        for part in step.parts:
            if not used.union(inner).issuperset(part.reads):
                yield f"1: a part of the step, a {step_kind(part)}, reads a buffer that is not among the step's reads"


def _is_inside(x: Tensor) -> bool:
    """Return False if a part of x is provably outside of its buffer, else True."""
    if x.dtype.is_packed or 0 in x.shape:
        return True
    first, end = x.offset, x.offset + 1
    for dim, stride in zip(x.shape, x.strides, strict=True):
        is_forward = truth(le(0, stride))
        if is_forward is None:
            return True
        if is_forward:
            end = end + (dim - 1) * stride
        else:
            first = first + (dim - 1) * stride
    ends_behind = truth(le(end * x.dtype.itemsize, x.buffer.nbytes)) is False
    return not ends_behind and truth(le(0, first)) is not False


def _shapes(step: Map) -> Iterator[str]:
    outputs = [] if isinstance(step, Sums) and step.column_parts else step.outputs
    rows = [(y, step.row_shape) for _, y in step.row_outputs] if isinstance(step, Rows) else []
    pairs = [(x, step.shape) for _, x in (*step.inputs, *outputs)] + rows
    if isinstance(step, Attend):
        pairs += [(x, step.score_shape) for _, x in step.score_inputs]
    if isinstance(step, Sums):
        for x, conversion in zip(step.operands, step.conversions, strict=False):
            if conversion is not None and not conversion.bits:
                pairs += [(y, x.shape) for _, y in conversion.inputs]
    for x, shape in pairs:
        if not _broadcasts(x.shape, shape):
            yield f"6: {_text(x)} does not broadcast to {list(shape)}"
    if isinstance(step, Contract):
        rows_end = len(step.shape) - step.column_axes
        m, n = product(step.shape[rows_end - step.row_axes : rows_end]), product(step.shape[rows_end:])
        sizes = [(step.a, -2, m), (step.b, -1, n), (step.b, -2, step.a.shape[-1])]
        if step.low_rank is not None:
            low = step.low_rank
            sizes += [(low.a, -2, m), (low.b, -1, n), (low.b, -2, low.a.shape[-1])]
        for x, axis, size in sizes:
            if truth(eq(x.shape[axis], size)) is False:
                yield f"6: {_text(x)}: dimension {axis} of a GEMM operand: got {x.shape[axis]!r}, expected {size!r}"


def _broadcasts(shape: Sequence[Dim], target: Sequence[Dim]) -> bool:
    """Return False if the shape provably does not broadcast to the target, else True.

    The shape may have a higher rank than the target if its extra leading sizes are 1.
    """
    lead = max(len(shape) - len(target), 0)
    pairs = zip(reversed(shape[lead:]), reversed(target), strict=False)
    return all(dim == 1 for dim in shape[:lead]) and all(
        dim == 1 or truth(eq(dim, size)) is not False or truth(eq(dim, 1)) is not False for dim, size in pairs
    )


def _leaves(step: Map) -> Iterator[str]:
    own = [step.total] if isinstance(step, Sums) else []
    expressions = [([value for value, _ in step.all_outputs], own, step.inputs)]
    if isinstance(step, Sums):
        expressions += [([c.value], [c.leaf], c.inputs) for c in step.conversions if c is not None]
    if isinstance(step, Attend):
        expressions.append(([step.weight], [step.score], step.score_inputs))
    for values, known, inputs in expressions:
        inner = {*known, *(leaf for leaf, _ in inputs)}
        if any(x.op == "leaf" and x not in inner for x in reachable(values)):
            yield "7: a leaf of an expression is not an input of the step"


def _gaps(steps: Sequence[Step]) -> Iterator[tuple[int, Step, Tensor]]:
    """Yield the last writer (index, step, written tensor) of each buffer with a part that no step writes.

    Only buffers whose writers are all of type `Map` are checked.
    """
    parts: dict[Buffer, list[tuple[int, Step, Tensor]]] = {}
    others: set[Buffer] = set()
    for number, step in enumerate(steps):
        if isinstance(step, Map):
            for _, y in step.all_outputs:
                parts.setdefault(y.buffer, []).append((number, step, y))
        else:
            others.update(step.writes)
    for buffer, found in parts.items():
        if buffer not in others and not _covers([y for _, _, y in found], buffer):
            yield found[-1]


def _covers(views: Sequence[Tensor], buffer: Buffer) -> bool:
    """Return False if the views provably leave a part of the buffer uncovered, else True."""
    itemsize = views[0].dtype.itemsize
    if any(y.dtype.is_packed or y.dtype.itemsize != itemsize for y in views):
        return True
    if any(y.nbytes == buffer.nbytes for y in views):
        return True
    static = all(isinstance(number, int) for y in views for number in (*y.shape, *y.strides, y.offset))
    if isinstance(buffer.nbytes, int) and static and buffer.nbytes <= MAX_MASKED * itemsize:
        mask = np.zeros(buffer.nbytes // itemsize, np.bool_)
        for y in views:
            where = np.array(y.offset)
            for dim, stride in zip(y.shape, y.strides, strict=True):
                where = np.add.outer(where, np.arange(hint(dim)) * hint(stride))
            mask[where] = True
        return bool(mask.all())
    total = sum((y.nbytes for y in views), start=0)
    return truth(le(buffer.nbytes, total)) is not False
