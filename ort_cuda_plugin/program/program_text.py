"""Steps as text, for people: what each computes, for which nodes, and the bytes that it reads and writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .steps import Attend, Contract, Map, Rows, Sums
from .tensor import Buffer, BufferKind
from .trace import Copy, HostCall, Launch, LibraryCall, Memset, ReadBack, Step
from .traffic import Access, accesses, traffic


class ProgramText:
    """Writes the programs of one plan; a buffer has one name in all of them. Sizes are those that are expected."""

    def __init__(self, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        self._inputs, self._outputs = inputs, outputs
        self._names: dict[Buffer, str] = {}

    def program(self, name: str, steps: Sequence[Step]) -> str:
        """The steps after the pass ``name``."""
        lines = []
        for number, step in enumerate(steps):
            reads, writes = accesses(step)
            nodes = ", ".join(f"{node.op_type} {node.name}".strip() for node in step.nodes) or "(inputs)"
            lines.append(f"{number:4}  {step_kind(step):28} {self._list(writes)} <- {self._list(reads)}")
            lines.append(f"      {'':28} {nodes}")
            if isinstance(step, (Launch, LibraryCall)) and step.note:
                lines.append(f"      {'':28} {step.note}")
            if isinstance(step, HostCall):
                lines.append(f"      {'':28} {step.callback.name}")
        total = traffic(steps)
        header = f"after {name}: {len(steps)} steps, {_size(total.read)} read, {_size(total.written)} written"
        return "\n".join([header, *lines, ""])

    def _list(self, accesses: Iterable[Access]) -> str:
        parts = []
        for access in accesses:
            x = access.tensor
            shape = ", ".join(map(repr, x.shape))
            times = f" x {access.times}" if access.times > 1 else ""
            parts.append(f"{self._name(x.buffer)} {x.dtype.short}[{shape}] {_size(access.bytes)}{times}")
        return "; ".join(parts) or "-"

    def _name(self, buffer: Buffer) -> str:
        if buffer not in self._names:
            if buffer.kind is BufferKind.INPUT:
                name = self._inputs[buffer.index]
            elif buffer.kind is BufferKind.OUTPUT:
                name = self._outputs[buffer.index]
            else:
                prefix = {BufferKind.WEIGHT: "weight", BufferKind.STATE: "state", BufferKind.HOST: "sizes"}
                name = f"{prefix.get(buffer.kind, '%')}{len(self._names)}"
            self._names[buffer] = name
        return self._names[buffer]


def step_kind(step: Step) -> str:
    """What a step does, in few words."""
    match step:
        case Contract():
            return "product"
        case Attend():
            return "attention"
        case Sums():
            return "convolution"
        case Rows():
            return f"rows along {', '.join(map(str, sorted(step.axes)))}"
        case Map():
            return "map"
        case Launch():
            return step.kernel.name[:28]
        case LibraryCall():
            return "library call"
        case Copy():
            return "copy"
        case Memset():
            return "memset"
        case ReadBack():
            return "read-back"
        case HostCall():
            return "Python, in each Run"


def _size(count: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count} B"
