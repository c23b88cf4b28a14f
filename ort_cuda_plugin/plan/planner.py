"""Planner: converts launches to a plan: records, registers, lifetimes of buffers, entries of the cluster's tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..model.ir import InvalidModel, Node, NodeError
from ..program.expressions.operations import ExprOp
from ..program.expressions.symbolic import Dim, Expr, Monomial, eq, select
from ..program.steps.tensor import Buffer, BufferKind, Tensor
from ..program.steps.trace import (
    Arg,
    Copy,
    DeviceLoop,
    Float32,
    Float64,
    HostCall,
    InPlace,
    Int32,
    Int64,
    Launch,
    LibraryCall,
    LoopCondition,
    Memset,
    ReadBack,
    Recordable,
    Trace,
)
from .format import (
    InPlaceKind,
    Param,
    ParamKind,
    Plan,
    PlanAssert,
    PlanBuffer,
    PlanInPlace,
    PlanInput,
    PlanOutput,
    PlanReadback,
    Record,
    RecordKind,
    Ref,
    RefKind,
)
from .registers import Registers
from .tables import Tables


def make_plan(
    trace: Trace,
    launches: Sequence[Recordable],
    inputs: Sequence[PlanInput],
    outputs: Sequence[tuple[Tensor, Node | None]],
    input_guards: Iterable[Dim],
    tables: Tables,
    num_symbols: int,
) -> Plan:
    """Return the plan of ``launches`` under the guards and requirements of ``trace``.

    ``outputs`` are tensors in OUTPUT buffers, each with the node that computes it. ``input_guards`` are conditions on
    the inputs' sizes besides the guards of ``trace``. Symbols 0 to ``num_symbols`` - 1 are the registers of ``inputs``.
    Raises NodeError if a node needs a constant beyond 64 bits.
    """
    writer = _Writer(trace, num_symbols, tables, launches)
    try:
        return writer.plan(inputs, outputs, input_guards)
    except InvalidModel as error:
        if writer.registers.node is None:
            raise
        raise NodeError(writer.registers.node, error.reason, invalid_input=True) from error


@dataclass(eq=False)
class _Repeat:
    """The record of a loop, before the records of its body. ``size`` is the number of records that the loop repeats."""

    loop: DeviceLoop
    size: int = 0
    writes: tuple[Buffer, ...] = ()

    @property
    def node(self) -> Node | None:
        return self.loop.node

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.loop.nodes

    @property
    def reads(self) -> tuple[Buffer, ...]:
        return (self.loop.flag.buffer,)


_Work: TypeAlias = Launch | LibraryCall | Copy | Memset | HostCall | _Repeat


class _NodeNames:
    """Table of the nodes that errors and profiles of a plan refer to by index."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.op_types: list[str] = []

    def number(self, node: Node | None) -> int:
        label = ("(inputs)" if node is None else node.label).replace("\0", "")
        if label not in self.numbers:
            self.numbers[label] = len(self.numbers)
            self.op_types.append("" if node is None else node.op_type.replace("\0", ""))
        return self.numbers[label]


class _Writer:
    def __init__(self, trace: Trace, num_symbols: int, tables: Tables, steps: Sequence[Recordable]) -> None:
        self.trace = trace
        self.nodes = _NodeNames()
        self.registers = registers = Registers(num_symbols, trace.origins, self.nodes.number)
        self.tables = tables
        # Each step with the index of its segment. A read-back, or several in a row, begin a new segment.
        self.steps: list[tuple[_Work, int]] = []
        self.loops: dict[LoopCondition, int] = {}  # the positions of the loops' `_Repeat` in `steps`
        self.read_backs: list[tuple[ReadBack, int, int]] = []
        self.num_segments = 1
        ended = False
        for step in steps:
            if isinstance(step, ReadBack):
                self.num_segments += not ended
                ended = True
                segment = self.num_segments - 1
                first = registers.read_back(step.first_symbol, step.count, segment)
                self.read_backs.append((step, first, segment))
            else:
                self._add(step)
                ended = False
        self.scratch: dict[Buffer, int] = {}
        self.lifetimes: list[tuple[int, int]] = []

    def _add(self, step: Recordable) -> None:
        """Add a step to the current segment. A loop becomes its first steps, a `_Repeat`, and the steps of its body."""
        if isinstance(step, DeviceLoop):
            for each in step.first:
                self._add(each)
            repeat, position = _Repeat(step), len(self.steps)
            self.loops[step.condition] = position
            self.steps.append((repeat, self.num_segments - 1))
            for each in step.body:
                self._add(each)
            repeat.size = len(self.steps) - position - 1
        elif not isinstance(step, ReadBack):
            self.steps.append((step, self.num_segments - 1))

    def plan(
        self,
        inputs: Sequence[PlanInput],
        outputs: Sequence[tuple[Tensor, Node | None]],
        input_guards: Iterable[Dim],
    ) -> Plan:
        registers = self.registers
        # Compile guards first, so that the runtime can reject a plan before it evaluates the other expressions.
        conditions = dict.fromkeys([*input_guards, *_strongest(self.trace.guards)])
        guards = tuple(registers.of(condition) for condition in conditions if not isinstance(condition, int))
        first_to_require = {r.condition: r for r in reversed(self.trace.requirements)}
        asserts = [
            PlanAssert(register, self.nodes.number(r.node), r.message, registers.segment(register))
            for r in reversed(first_to_require.values())
            for register in (registers.of(r.condition),)
        ]
        plan_outputs = tuple(self._output(*output) for output in outputs)
        records = tuple(self._record(position, step, segment) for position, (step, segment) in enumerate(self.steps))
        read_backs = tuple(self._read_back(*read_back) for read_back in self.read_backs)
        self._keep_through_loops()
        buffers = tuple(
            PlanBuffer(registers.of(buffer.nbytes), first, last, self.steps[first][1])
            for buffer, (first, last) in zip(self.scratch, self.lifetimes, strict=True)
        )
        return Plan(
            num_registers=registers.count,
            inputs=tuple(inputs),
            outputs=plan_outputs,
            nodes=tuple(self.nodes.numbers),
            op_types=tuple(self.nodes.op_types),
            exprs=tuple(sorted(registers.exprs, key=lambda expr: expr.segment)),
            guards=guards,
            asserts=tuple(sorted(asserts, key=lambda check: check.segment)),
            readbacks=read_backs,
            buffers=buffers,
            records=records,
            weights=tuple(self.tables.weights.used),
            kernels=tuple(self.tables.kernels.used),
            problems=tuple(self.tables.problems.used),
            num_segments=self.num_segments,
            in_place=self._in_place(records, read_backs),
        )

    def _output(self, output: Tensor, node: Node | None) -> PlanOutput:
        self.registers.node = node
        dims = tuple(self.registers.of(dim) for dim in output.shape)
        number = None if node is None else self.nodes.number(node)
        return PlanOutput(output.dtype.ort, dims, max(map(self.registers.segment, dims), default=0), number)

    def _read_back(self, step: ReadBack, first: int, segment: int) -> PlanReadback:
        self.registers.node = step.node
        offset = step.source.offset * step.source.dtype.itemsize
        return PlanReadback(
            self._ref(step.source.buffer),
            step.source.dtype.ort,
            step.count,
            first,
            segment,
            None if offset == 0 else self.registers.of(offset),
        )

    def _record(self, position: int, step: _Work, segment: int) -> Record:
        for buffer in (*step.reads, *step.writes):
            if buffer.kind is BufferKind.SCRATCH:
                self._use(buffer, position)
        node = self.nodes.number(step.node)
        nodes = tuple(dict.fromkeys(self.nodes.number(each) for each in step.nodes))
        self.registers.node = step.node
        if isinstance(step, Launch):
            gx, gy, gz = (self.registers.of(dim) for dim in step.grid)
            return Record(
                RecordKind.LAUNCH,
                node,
                tuple(self._param(arg) for arg in step.args),
                index=self.tables.kernels.use(step.kernel, step.kernel),
                segment=segment,
                grid=(gx, gy, gz),
                block=step.block,
                shared_register=None if step.shared_bytes == 0 else self.registers.of(step.shared_bytes),
                nodes=nodes,
            )
        if isinstance(step, LibraryCall):
            problem = self.tables.problems.use(step.problem, step.problem)
            params = tuple(self._param(arg) for arg in step.args)
            return Record(RecordKind.LIBRARY, node, params, index=problem, segment=segment, nodes=nodes)
        if isinstance(step, HostCall):
            callback = self.tables.callbacks.number(step.callback, step.callback)
            numbers = [*(dim for x in step.tensors for dim in x.shape), *step.numbers]
            params = (*map(self._param, step.tensors), *(self._param(Int64(number)) for number in numbers))
            return Record(RecordKind.CALL, node, params, index=callback, segment=segment, nodes=nodes)
        if isinstance(step, _Repeat):
            flag, count = self._param(step.loop.flag), step.loop.count
            params = (flag,) if count is None else (flag, self._param(Int64(count)))
            return Record(RecordKind.LOOP, node, params, index=step.size, segment=segment, nodes=nodes)
        nbytes = self._param(Int64(step.destination.nbytes))
        destination = self._param(step.destination)
        if isinstance(step, Copy):
            return Record.copy(node, destination, self._param(step.source), nbytes, segment, nodes=nodes)
        return Record.memset(node, destination, Param.i32(value=step.byte), nbytes, segment, nodes=nodes)

    def _in_place(self, records: Sequence[Record], read_backs: Sequence[PlanReadback]) -> tuple[PlanInPlace, ...]:
        """Return the pairs of an input and an output that may share memory.

        The same record must read the input and write the output, and its step must permit that both share memory. No
        later record may read the input, and no earlier record may write the output.
        """
        end: dict[int, int] = {}
        begin: dict[int, int] = {}
        for position, record in enumerate(records):
            first, last = self._around(position)
            for ref in (param.ref for param in record.params if param.ref is not None):
                if ref.kind is RefKind.INPUT:
                    end[ref.index] = last + 1
                elif ref.kind is RefKind.OUTPUT:
                    begin.setdefault(ref.index, first)
        for read_back in read_backs:
            if read_back.ref.kind is RefKind.INPUT:
                before = sum(record.segment < read_back.segment for record in records)
                end[read_back.ref.index] = max(before, end.get(read_back.ref.index, 0))
        return tuple(
            sorted(
                PlanInPlace(pair.written.index, pair.read.index, InPlaceKind(pair.kept))
                for position, (step, _) in enumerate(self.steps)
                for pair in dict.fromkeys(_in_place_of(step))
                if pair.read.kind is BufferKind.INPUT
                and pair.written.kind is BufferKind.OUTPUT
                and begin.get(pair.written.index) == position
                and end.get(pair.read.index) == position + 1
            )
        )

    def _use(self, buffer: Buffer, position: int) -> None:
        index = self.scratch.get(buffer)
        if index is None:
            self.scratch[buffer] = len(self.lifetimes)
            self.lifetimes.append((position, position))
        else:
            self.lifetimes[index] = self.lifetimes[index][0], position

    def _ranges(self) -> list[tuple[int, int]]:
        """Return the first and last record of each loop, outer loops before the loops in them."""
        sizes = {position: step.size for position, (step, _) in enumerate(self.steps) if isinstance(step, _Repeat)}
        return [(position, position + size) for position, size in sizes.items()]

    def _around(self, position: int) -> tuple[int, int]:
        """Return the first and last record of the outermost loop that contains a record; else the record itself."""
        ranges = (each for each in self._ranges() if each[0] <= position <= each[1])
        return next(ranges, (position, position))

    def _keep_through_loops(self) -> None:
        """Extend, to all iterations of a loop, the lifetimes of buffers that steps inside and outside of it use."""
        for start, end in reversed(self._ranges()):
            for index, (first, last) in enumerate(self.lifetimes):
                if first < start <= last < end:
                    self.lifetimes[index] = first, end
                elif start <= first <= end < last:
                    self.lifetimes[index] = start, last

    def _param(self, arg: Arg) -> Param:
        if isinstance(arg, Tensor):
            # An empty view may begin outside its buffer, and a launch may still receive it: use offset 0 for it.
            offset = select(eq(arg.size, 0), 0, arg.offset * arg.dtype.itemsize)
            if isinstance(offset, int):
                return Param.pointer(self._ref(arg.buffer), offset=offset)
            return Param.pointer(self._ref(arg.buffer), register=self.registers.of(offset))
        if isinstance(arg, Float32):
            return Param.f32(arg.value)
        if isinstance(arg, Float64):
            return Param.f64(arg.value)
        if isinstance(arg, LoopCondition):
            return Param(ParamKind.CONDITION, imm=self.loops[arg])
        make = Param.i32 if isinstance(arg, Int32) else Param.i64
        if isinstance(arg.value, int):
            # A uint64 constant from 2**63 on is stored as the negative int64 with the same bits.
            return make(value=arg.value - 2**64 if arg.value >= 2**63 else arg.value)
        return make(register=self.registers.of(arg.value))

    def _ref(self, buffer: Buffer) -> Ref:
        if buffer.kind in (BufferKind.WEIGHT, BufferKind.STATE):
            return Ref(RefKind.WEIGHT, self.tables.weight(buffer))
        if buffer.kind is BufferKind.SCRATCH:
            return Ref(RefKind.BUFFER, self.scratch[buffer])
        return Ref(RefKind(int(buffer.kind)), buffer.index)


def _in_place_of(step: _Work) -> tuple[InPlace, ...]:
    """Return the pairs of buffers that a step permits to share memory. A copy permits it if its data would not move."""
    if isinstance(step, Launch):
        return tuple(pair for pair in step.in_place if pair.read in step.reads and pair.written in step.writes)
    if isinstance(step, Copy) and step.source.offset == step.destination.offset:
        return (InPlace(step.source.buffer, step.destination.buffer),)
    return ()


def _strongest(guards: Iterable[Expr]) -> list[Dim]:
    """Drop guards that another one implies: among ``le(c * x, limit)`` with equal x and limit keep the largest c."""
    kept: list[Dim] = []
    limits: dict[tuple[Monomial, int], tuple[int, Expr]] = {}
    for guard in guards:
        limit = _monomial_limit(guard)
        if limit is None:
            kept.append(guard)
            continue
        monomial, coefficient, bound = limit
        if (monomial, bound) not in limits or limits[monomial, bound][0] < coefficient:
            limits[monomial, bound] = coefficient, guard
    return kept + [guard for _, guard in limits.values()]


def _monomial_limit(guard: Expr) -> tuple[Monomial, int, int] | None:
    """Return (x, c, limit) of a guard ``le(c * x, limit)`` with positive c; None for any other guard."""
    (monomial, factor), *more = guard.terms
    if more or guard.const or factor != 1 or len(monomial) != 1 or monomial[0].op is not ExprOp.LE:
        return None
    value, bound = monomial[0].args
    if not isinstance(value, Expr) or not isinstance(bound, int) or value.const or len(value.terms) != 1:
        return None
    product, coefficient = value.terms[0]
    return (product, coefficient, bound) if coefficient > 0 else None
