"""Launches of repeated steps: a step with the structure of an earlier one gets copies of the earlier step's launches.

Generating a kernel takes a hundred times as long as copying its launch, and networks repeat blocks of layers.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeGuard

from ...program.lowering.context import Lowering
from ...program.steps.steps import Map
from ...program.steps.tensor import Buffer, BufferKind, Tensor
from ...program.steps.trace import Copy, InPlace, Launch, LibraryCall, Recordable
from .step_structure import Inspected, Structure

__all__ = ["Emissions", "copy_launches"]

_Copied: TypeAlias = Launch | LibraryCall | Copy


@dataclass(frozen=True)
class Emission:
    """The launches that one step was emitted as.

    ``buffers`` are the step's buffers. ``inspected`` are the constants whose contents the launches depend on.
    """

    launches: tuple[_Copied, ...]
    buffers: tuple[Buffer, ...]
    inspected: Inspected


class Emissions:
    """The `Emission` of each distinct step structure of one plan."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Emission] = {}

    def find(self, structure: Structure | None) -> Emission | None:
        """Return the launches of an earlier step with ``structure``, if they can be copied; else None."""
        found = None if structure is None else self._known.get(structure.key)
        return found if found is None or structure is None or found.inspected.are_equal(structure.buffers) else None

    def add(self, step: Map, structure: Structure, inspected: Inspected, launches: Sequence[Recordable]) -> None:
        """Record the launches that ``step`` was emitted as, unless they depend on more than its structure."""
        copied = tuple(launch for launch in launches if _may_be_copied(launch, step, structure))
        if len(copied) == len(launches):
            self._known[structure.key] = Emission(copied, structure.buffers, inspected)


def _may_be_copied(launch: Recordable, step: Map, structure: Structure) -> TypeGuard[_Copied]:
    """Return whether the launch uses only buffers of the step and intermediates that no other step uses."""
    if not isinstance(launch, _Copied) or launch.nodes != step.nodes:
        return False
    if isinstance(launch, Launch) and launch.remake is not None:
        return False
    return all(
        buffer in structure.buffers or (buffer.kind is BufferKind.SCRATCH and buffer.deferred_host is None)
        for buffer in (*launch.reads, *launch.writes)
    )


def copy_launches(ctx: Lowering, step: Map, emission: Emission, buffers: Sequence[Buffer]) -> None:
    """Record copies of the launches of ``emission`` for ``step``, a step of equal structure with these ``buffers``."""
    copies = _Copies(dict(zip(emission.buffers, buffers, strict=True)))
    ctx.trace.steps += [copies.launch(launch, step) for launch in emission.launches]


class _Copies:
    """Makes copies of launches with other buffers.

    ``substitutes`` maps the buffers of the original step to those of the copy; each intermediate gets a new buffer.
    """

    def __init__(self, substitutes: dict[Buffer, Buffer]) -> None:
        self._substitutes = substitutes
        self._tensors: dict[Tensor, Tensor] = {}

    def launch(self, launch: _Copied, step: Map) -> _Copied:
        reads, writes = self._buffers(launch.reads), self._buffers(launch.writes)
        if isinstance(launch, Copy):
            destination, source = self._tensor(launch.destination), self._tensor(launch.source)
            return Copy(step.nodes, reads, writes, destination, source)
        args = tuple([self._tensor(arg) if isinstance(arg, Tensor) else arg for arg in launch.args])
        if isinstance(launch, LibraryCall):
            return replace(launch, nodes=step.nodes, args=args, reads=reads, writes=writes)
        uses = {self._tensor(x): use for x, use in launch.uses.items()}
        in_place = tuple(
            InPlace(self._buffer(pair.read), self._buffer(pair.written), pair.kept) for pair in launch.in_place
        )
        return replace(launch, nodes=step.nodes, args=args, reads=reads, writes=writes, uses=uses, in_place=in_place)

    def _tensor(self, x: Tensor) -> Tensor:
        copy = self._tensors.get(x)
        if copy is None:
            buffer = self._buffer(x.buffer)
            copy = x if buffer is x.buffer else x.in_buffer(buffer)
            self._tensors[x] = copy
        return copy

    def _buffer(self, buffer: Buffer) -> Buffer:
        substitute = self._substitutes.get(buffer)
        if substitute is None:
            substitute = self._substitutes[buffer] = Buffer(BufferKind.SCRATCH, buffer.nbytes)
        return substitute

    def _buffers(self, buffers: Sequence[Buffer]) -> tuple[Buffer, ...]:
        return tuple(map(self._buffer, buffers))
