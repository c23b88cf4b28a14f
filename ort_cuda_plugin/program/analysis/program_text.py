"""Formats a program, or the changes that a pass makes to it: kind, nodes, reads and writes of each step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from typing import TypeAlias

from ..steps.steps import Attend, Contract, Map, Rows, Sums
from ..steps.tensor import Buffer, BufferKind, Tensor
from ..steps.trace import Copy, DeviceLoop, HostCall, Launch, LibraryCall, Memset, ReadBack, Step
from .formulas import formulas
from .step_tensors import tensors_of
from .traffic import Access, accesses, traffic

Block: TypeAlias = tuple[str, ...]
"""The lines of text that describe a step."""


class ProgramText:
    """Formats the programs of one plan, with one name for a buffer in all of them, and with expected sizes.

    With ``formulas``, the text includes the expressions that a step computes, and the strides of non-contiguous
    tensors.
    """

    def __init__(self, inputs: Sequence[str], outputs: Sequence[str], formulas: bool = False) -> None:
        self._inputs, self._outputs, self._has_formulas = inputs, outputs, formulas
        self._names: dict[Buffer, str] = {}
        self._known: dict[Step, Block] = {}

    def program(self, name: str, steps: Sequence[Step]) -> str:
        """Format the numbered steps of the program after the pass ``name``."""
        lines = [f"after {name}: {_totals(steps)}"]
        for number, block in enumerate(self.blocks(steps)):
            first, *others = block
            lines += [f"{number:4}  {first}", *(f"      {line}" for line in others)]
        return "\n".join([*lines, ""])

    def change(self, name: str, before: Sequence[Block], steps: Sequence[Step]) -> str:
        """Format the changes of the pass ``name`` as a unified diff of steps with one step of context."""
        after = self.blocks(steps)
        lines = [f"changed by {name}: {_totals(steps)}"]
        matcher = SequenceMatcher(None, before, after, autojunk=False)
        for group in matcher.get_grouped_opcodes(1):
            (_, start, _, other, _), (_, _, end, _, other_end) = group[0], group[-1]
            lines.append(f"@@ -{start},{end - start} +{other},{other_end - other} @@")
            for kind, i, j, k, m in group:
                if kind == "equal":
                    lines += [f"  {line}" for block in before[i:j] for line in block]
                else:
                    lines += [f"- {line}" for block in before[i:j] for line in block]
                    lines += [f"+ {line}" for block in after[k:m] for line in block]
        return "\n".join([*lines, ""])

    def blocks(self, steps: Sequence[Step]) -> list[Block]:
        """Return the lines of each step: its kind, what it writes and reads, its nodes, its note and its formulas."""
        return [self._block(step) for step in steps]

    def _block(self, step: Step) -> Block:
        if not isinstance(step, Map):
            return tuple(self._lines(step))  # not cached: later passes may set a launch's note
        if step not in self._known:
            self._known[step] = tuple(self._lines(step))
        return self._known[step]

    def _lines(self, step: Step) -> Iterator[str]:
        reads, writes = accesses(step)
        if isinstance(step, DeviceLoop):  # the lines of its inner steps show the tensors that only the loop uses
            reads = [x for x in reads if x.tensor.buffer in step.reads]
            writes = [x for x in writes if x.tensor.buffer in step.writes]
        yield f"{step_kind(step):28} {self._list(writes)} <- {self._list(reads)}"
        yield f"{'':28} " + (", ".join(f"{node.op_type} {node.name}".strip() for node in step.nodes) or "(inputs)")
        if isinstance(step, (Launch, LibraryCall)) and step.note:
            yield f"{'':28} {step.note}"
        if isinstance(step, DeviceLoop):
            for title, steps in (("first:", step.first), ("in each iteration:", step.body)):
                yield f"{'':28} {title}"
                yield from (f"{'':28}   {line}" for each in steps for line in self._lines(each))
        if isinstance(step, HostCall):
            yield f"{'':28} {step.callback.name}"
        if self._has_formulas and isinstance(step, Map):
            yield from (f"{'':28} {line}" for line in self._formulas(step))

    def _formulas(self, step: Map) -> Iterator[str]:
        """Yield the formulas of a step: operand prologues, attention scores, and results."""
        leaves = {leaf: self._name(x.buffer) for leaf, x in step.inputs}
        if isinstance(step, Sums):
            leaves[step.total] = "accumulator"
            for x, conversion in zip(step.operands, step.conversions, strict=False):
                if conversion is not None:
                    own = {leaf: self._name(y.buffer) for leaf, y in conversion.inputs}
                    name = self._name(x.buffer)
                    yield from formulas([(f"operand {name}", conversion.value)], {**own, conversion.leaf: name})
        if isinstance(step, Attend):
            scores = {leaf: self._name(x.buffer) for leaf, x in step.score_inputs}
            yield from formulas([("weight", step.weight)], {**scores, step.score: "score"})
        yield from formulas([(self._name(y.buffer), value) for value, y in step.all_outputs], leaves)

    def details(self, step: Step) -> list[str]:
        """Return lines about a step: a launch's grid and block, and each tensor's shape, strides and buffer size."""
        lines = []
        if isinstance(step, Launch):
            grid = " x ".join(map(repr, step.grid))
            lines.append(f"{grid} blocks of {' x '.join(map(str, step.block))} threads")
        for verb, buffers in (("writes", step.writes), ("reads", step.reads)):
            for x in (x for x in dict.fromkeys(tensors_of(step)) if x.buffer in buffers):
                shape = f"{self._name(x.buffer)} {x.dtype.short}[{', '.join(map(repr, x.shape))}]"
                lines.append(f"{verb} {shape}{_place(x)}, of {x.buffer.nbytes!r} bytes")
        return lines

    def _list(self, accesses: Iterable[Access]) -> str:
        parts = []
        for access in accesses:
            x = access.tensor
            shape = ", ".join(map(repr, x.shape))
            times = f" x {access.times}" if access.times > 1 else ""
            place = _place(x) if self._has_formulas and not x.is_contiguous else ""
            parts.append(f"{self._name(x.buffer)} {x.dtype.short}[{shape}]{place} {_size(access.bytes)}{times}")
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


class ProgramHistory:
    """Shows the effect of each pass on one program: the observer (`Watch`) of ``explain --program``.

    ``text`` names the buffers. ``show`` gets the whole program before the first pass and after each pass named in
    ``whole``, and a diff after every other pass that changes the program. `finish` groups the names of all ``passes``
    by effect.
    """

    def __init__(
        self, text: ProgramText, show: Callable[[str], None], passes: Sequence[str], whole: Collection[str] = ()
    ) -> None:
        self.text = text
        self._show, self._passes, self._whole = show, passes, whole
        self._last: list[Block] | None = None
        self._changed: dict[str, bool] = {}

    def __call__(self, name: str, steps: Sequence[Step]) -> None:
        before, self._last = self._last, self.text.blocks(steps)
        self._changed[name] = before != self._last
        if before is None or name in self._whole:
            self._show(self.text.program(name, steps))
        elif before != self._last:
            self._show(self.text.change(name, before, steps))

    def finish(self) -> None:
        """Show the names of all passes, grouped by their effect."""
        kinds: dict[str, list[str]] = {"changed the program": [], "changed nothing": [], "did not run here": []}
        for name in self._passes:
            if name not in self._changed:
                kinds["did not run here"].append(name)
            else:
                kinds["changed the program" if self._changed[name] else "changed nothing"].append(name)
        self._show("".join(f"passes that {kind}: {', '.join(names) or 'none'}\n" for kind, names in kinds.items()))


def step_kind(step: Step) -> str:
    """Return the kind of a step, such as "product"; for a launch, the name of its kernel."""
    match step:
        case Contract():
            return "product" if step.low_rank is None else "product with low rank"
        case Attend():
            return "attention"
        case Sums():
            return "convolution"
        case Rows():
            return (
                f"reduction over {'axis' if len(step.axes) == 1 else 'axes'} {', '.join(map(str, sorted(step.axes)))}"
            )
        case Launch():
            return step.kernel.name[:28]
        case _:
            return _KINDS[type(step)]


_KINDS: dict[type, str] = {
    Map: "map",
    LibraryCall: "library call",
    Copy: "copy",
    Memset: "memset",
    ReadBack: "read-back",
    HostCall: "Python, in each Run",
    DeviceLoop: "loop on the device",
}


def _place(x: Tensor) -> str:
    offset = f" from {x.offset!r} on" if x.offset != 0 else ""
    return f" with strides ({', '.join(map(repr, x.strides))}){offset}"


def _totals(steps: Sequence[Step]) -> str:
    total = traffic(steps)
    return f"{len(steps)} steps, {_size(total.read)} read, {_size(total.written)} written"


def _size(count: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count} B"
