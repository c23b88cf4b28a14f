"""Updates of loop-carried values in place: the kernel that computes the next state writes it into the state's memory.

::

    append rows: past = state, present = x        append rows: past = present = state
    attention:   reads x                     ->   attention:   reads state
    copy:        state <- x                       (no copy)

A kernel that reads the state permits this by an `InPlace` (program/steps/trace.py), as elementwise kernels and appends
to K/V caches do. A kernel that does not read the state may write it, if no later step of the iteration reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ...program.steps.tensor import Buffer, BufferKind, Tensor
from ...program.steps.trace import Copy, Launch, LibraryCall, Memset, Recordable

__all__ = ["update_in_place"]


def update_in_place(steps: Sequence[Recordable], states: Collection[Buffer]) -> list[Recordable]:
    """Return the steps of an iteration without the copies to ``states`` that in-place updates make unnecessary."""
    found = list(steps)
    for copy in [step for step in steps if isinstance(step, Copy) and step.destination.buffer in states]:
        # Earlier iterations of this `for` have replaced steps, perhaps also this copy.
        position = next((i for i, step in enumerate(found) if _is_copy_to(step, copy.destination.buffer)), None)
        if position is not None:
            found = _updated(found, position, states)
    return found


def _is_copy_to(step: Recordable, state: Buffer) -> bool:
    return isinstance(step, Copy) and step.destination.buffer is state


def _updated(steps: list[Recordable], position: int, states: Collection[Buffer]) -> list[Recordable]:
    """Return the steps without the copy at ``position``, if the writer of its source may update the state itself."""
    copy = steps[position]
    assert isinstance(copy, Copy)
    state, value = copy.destination.buffer, copy.source.buffer
    writers = [i for i, step in enumerate(steps) if value in step.writes]
    is_whole = copy.source.offset == copy.destination.offset == 0 and value.nbytes == state.nbytes
    if not is_whole or len(writers) != 1 or value.kind is not BufferKind.SCRATCH or value in states:
        return steps
    (writer,) = writers
    launch = steps[writer]
    if not isinstance(launch, Launch) or not _may_write(launch, value, state):
        return steps
    # No step after the launch may read the old state, and no step before the launch may read the new value.
    others = [step for i, step in enumerate(steps) if i not in (writer, position)]
    is_needed = any(state in step.reads for step in steps[writer + 1 :]) or any(
        value in step.reads for step in steps[:writer]
    )
    is_known = all(
        isinstance(step, Launch | LibraryCall | Copy | Memset) or {state, value}.isdisjoint((*step.reads, *step.writes))
        for step in others
    )
    if is_needed or not is_known or any(state in step.writes for step in others):
        return steps
    return [_renamed(step, value, state) for i, step in enumerate(steps) if i != position]


def _may_write(launch: Launch, value: Buffer, state: Buffer) -> bool:
    """Return whether ``launch`` itself works if it writes its result ``value`` to ``state``; ignores other steps."""
    return state not in launch.reads or any(pair.read is state and pair.written is value for pair in launch.in_place)


def _renamed(step: Recordable, value: Buffer, state: Buffer) -> Recordable:
    """Return the step with ``state`` instead of ``value``."""
    if value not in step.reads and value not in step.writes:
        return step

    def tensor(x: Tensor) -> Tensor:
        return x.in_buffer(state) if x.buffer is value else x

    def buffers(used: Sequence[Buffer]) -> tuple[Buffer, ...]:
        return tuple(dict.fromkeys(state if buffer is value else buffer for buffer in used))

    reads, writes = buffers(step.reads), buffers(step.writes)
    match step:
        case Launch() | LibraryCall():
            args = tuple(tensor(arg) if isinstance(arg, Tensor) else arg for arg in step.args)
            if isinstance(step, LibraryCall):
                return replace(step, args=args, reads=reads, writes=writes)
            pairs = tuple(pair for pair in step.in_place if value not in (pair.read, pair.written))
            uses = {tensor(x): use for x, use in step.uses.items()}
            return replace(step, args=args, reads=reads, writes=writes, uses=uses, in_place=pairs, remake=None)
        case Copy():
            source, destination = tensor(step.source), tensor(step.destination)
            return replace(step, source=source, destination=destination, reads=reads, writes=writes)
        case Memset():
            return replace(step, destination=tensor(step.destination), reads=reads, writes=writes)
    raise TypeError(f"step: got {type(step).__name__}, expected a launch, a library call, a copy or a memset")
