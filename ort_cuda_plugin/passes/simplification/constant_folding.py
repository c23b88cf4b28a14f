"""Constant folding: the device executes launches that depend on nothing but weights once, not in each Run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from ...program.expressions.symbolic import Dim
from ...program.lowering.context import Lowering
from ...program.steps.steps import Map
from ...program.steps.tensor import Buffer, BufferKind, Tensor, known_bytes
from ...program.steps.trace import Copy, Int32, Int64, Launch, Memset, ReadBack, Recordable, Step
from ...program.termination import Measure

MAX_GROWTH = 8
"""Maximum bytes of a folded result per byte of its weights. With 8, 4-bit codes may become float32."""
SMALL_BYTES = 1 << 16
"""Results of at most this many bytes are folded regardless of `MAX_GROWTH`, for example tables and masks."""

_MANY = 1 << 62
Fixed: TypeAlias = Mapping[Buffer, int]
"""The intermediates that depend on weights only, each with the bytes of these weights; weights used twice may count
twice.
"""


def fixed_buffers(steps: Sequence[Step]) -> Fixed:
    """Return the intermediates that depend on weights only.

    All steps that write such an intermediate have fixed sizes, and read only weights and other such intermediates. The
    host does not read it back. Results that are much larger than their weights are excluded, since they would occupy
    memory between Runs. Results of library calls are excluded, since a GEMM of two weights is rare.
    """
    refused = {buffer for step in steps if not _is_static(step) for buffer in (*step.writes, *_read_back(step))}
    measure = Measure("fixed")
    while True:
        measure.fall(-len(refused))  # terminates: buffers are only added to ``refused``, and their number is bounded
        found: dict[Buffer, int] = {}
        for step in steps:
            if refused.isdisjoint(step.writes):
                beneath = _bytes_beneath(step.reads, found)
                if beneath is None:
                    refused.update(step.writes)
                else:
                    found.update({buffer: min(found.get(buffer, 0) + beneath, _MANY) for buffer in step.writes})
            else:
                refused.update(step.writes)
        large = [buffer for buffer, beneath in found.items() if buffer not in refused and _is_large(buffer, beneath)]
        refused.update(large)
        if not large and refused.isdisjoint(found):
            return found


def is_fixed(step: Step, fixed: Fixed) -> bool:
    """Return whether all results of a step depend on weights only."""
    return bool(step.writes) and all(buffer in fixed for buffer in step.writes)


def fold_constants(ctx: Lowering, steps: Sequence[Step]) -> list[Step]:
    """Move the launches that depend on weights only out of the plan; the device executes them once, for all Runs.

    Assumes: every step is a launch, a copy or a fill.
    Guarantees: ``ctx.trace.folded`` has these launches, in groups that share no intermediate. The plan keeps their
        results as weights. A launch whose result is much larger than its weights stays in each Run.
    Example: ``w2 = transpose(w); y = gemm(x, w2)`` -> once ``w2 = transpose(w)``, each Run ``y = gemm(x, w2)``.
    """
    launches = [step for step in steps if not isinstance(step, Map)]
    ctx.trace.folded, rest = split_constants(launches)
    return list[Step](rest)


def split_constants(launches: Sequence[Recordable]) -> tuple[list[list[Recordable]], list[Recordable]]:
    """Return (groups of launches that depend on weights only, all other launches). The groups share no intermediate."""
    fixed = fixed_buffers(launches)
    parents = {buffer: buffer for buffer in fixed}

    def root(buffer: Buffer) -> Buffer:
        while parents[buffer] is not buffer:
            parents[buffer] = parents[parents[buffer]]
            buffer = parents[buffer]
        return buffer

    for launch in launches:
        if is_fixed(launch, fixed):
            first, *others = (buffer for buffer in (*launch.writes, *launch.reads) if buffer in fixed)
            parents.update((root(buffer), root(first)) for buffer in others)
    groups: dict[Buffer, list[Recordable]] = {}
    rest: list[Recordable] = []
    for launch in launches:
        group = groups.setdefault(root(launch.writes[0]), []) if is_fixed(launch, fixed) else rest
        group.append(launch)
    return list(groups.values()), rest


def _bytes_beneath(reads: Iterable[Buffer], found: Fixed) -> int | None:
    """Return the bytes of the weights that the buffers ``reads`` depend on; None if a buffer depends on other data."""
    beneath = 0
    for buffer in reads:
        if buffer.kind is BufferKind.WEIGHT:
            beneath += known_bytes(buffer)
        elif buffer in found:
            beneath += found[buffer]
        else:
            return None
    return beneath


def _is_large(buffer: Buffer, beneath: int) -> bool:
    return known_bytes(buffer) > max(MAX_GROWTH * beneath, SMALL_BYTES)


def _read_back(step: Step) -> tuple[Buffer, ...]:
    return step.reads if isinstance(step, ReadBack) else ()


def _is_static(step: Step) -> bool:
    """Return whether the step writes only intermediates, and its work does not depend on a Run's sizes."""
    for buffer in step.writes:
        if buffer.kind is not BufferKind.SCRATCH or not isinstance(buffer.nbytes, int) or buffer.nbytes == 0:
            return False
    match step:
        case Map():
            return _are_known(step.shape) and all(x.buffer.kind is not BufferKind.HOST for x in step.tensors_read)
        case Launch():
            numbers = [*step.grid, step.shared_bytes]
            for arg in step.args:
                if isinstance(arg, Tensor):
                    numbers += _numbers(arg)
                elif isinstance(arg, (Int32, Int64)):
                    numbers.append(arg.value)
            return _are_known(numbers)
        case Copy():
            return _are_known([*_numbers(step.source), *_numbers(step.destination)])
        case Memset():
            return _are_known(_numbers(step.destination))
    return False


def _numbers(x: Tensor) -> list[Dim]:
    return [*x.shape, x.offset]


def _are_known(numbers: Iterable[Dim]) -> bool:
    return all(isinstance(number, int) for number in numbers)
