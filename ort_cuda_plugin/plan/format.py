"""The plan of one cluster variant as dataclasses, and its binary form.

``csrc_shim/plan/format.h`` defines the format and every field; ``csrc_shim/plan/check.c`` checks a plan when it is
loaded. The classes mirror the C structs with three differences: data that C stores in side arrays is nested (an output
has its dimensions, a record its parameters), strings are ``str``, and "no register" is None.

Registers are int64 values. The first ones hold the inputs' dimensions, input by input; the next ones hold the elements
of host inputs, in the same order. Each other register is defined once, by an expression or by a read-back (a copy from
the device). ``exprs``, ``asserts``, ``readbacks`` and ``records`` are ordered by segment.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..program.expressions.operations import ExprOp

magic = 0x4E4C504F
version = 5
no_register = 0xFFFFFFFF

header_layout = struct.Struct("<22I")
input_layout = struct.Struct("<6I")
output_layout = struct.Struct("<6I")
index_layout = struct.Struct("<I")
node_layout = struct.Struct("<2I")
expr_layout = struct.Struct("<6Iq2I")
assert_layout = struct.Struct("<4I")
readback_layout = struct.Struct("<8I")
buffer_layout = struct.Struct("<4I")
record_layout = struct.Struct("<16I")
param_layout = struct.Struct("<4Iq")
segment_layout = struct.Struct("<2I")
in_place_layout = struct.Struct("<4I")


class Header(NamedTuple):
    """The C struct ``ocp_plan_header``."""

    magic: int
    version: int
    num_registers: int
    num_inputs: int
    num_outputs: int
    num_weights: int
    num_kernels: int
    num_problems: int
    num_dims: int
    num_exprs: int
    num_guards: int
    num_asserts: int
    num_readbacks: int
    num_buffers: int
    num_records: int
    num_params: int
    num_segments: int
    num_nodes: int
    strings_bytes: int
    num_record_nodes: int = 0
    num_in_place: int = 0
    reserved: int = 0


class RefKind(enum.IntEnum):
    INPUT = 0
    OUTPUT = 1
    WEIGHT = 2
    BUFFER = 3


class RecordKind(enum.IntEnum):
    LAUNCH = 0
    COPY = 1
    MEMSET = 2
    LIBRARY = 3
    CALL = 4
    LOOP = 5
    UPLOAD = 6
    AWAIT = 7


class InPlaceKind(enum.IntEnum):
    ELEMENTS = 0
    KEPT = 1


class ParamKind(enum.IntEnum):
    POINTER = 0
    I32 = 1
    I64 = 2
    F32 = 3
    F64 = 4
    I8 = 5
    I16 = 6
    CONDITION = 7


def param_kind(signature_entry: str) -> ParamKind:
    """Return the kind of a kernel parameter from its entry in ``KernelSpec.signature``. Raises KeyError if unknown."""
    return ParamKind.POINTER if signature_entry.startswith("*") else ParamKind[signature_entry.upper()]


@dataclass(frozen=True, slots=True)
class Ref:
    """Reference to memory: the plan's input, output, weight or scratch buffer number ``index``."""

    kind: RefKind
    index: int


@dataclass(frozen=True, slots=True)
class PlanInput:
    """An input of the plan. ``dtype`` is an ONNXTensorElementDataType.

    The registers from ``first_register`` on hold its dimensions. Those from ``host_register`` on hold the
    ``host_count`` elements of a host input, an input that the host reads.
    """

    dtype: int
    rank: int
    first_register: int
    host_register: int | None = None
    host_count: int = 0


@dataclass(frozen=True, slots=True)
class PlanOutput:
    """An output of the plan, allocated at the start of ``segment``. ``dims`` are the registers with its dimensions.

    ``node`` computes the output; None: the output is an input of the cluster.
    """

    dtype: int
    dims: tuple[int, ...]
    segment: int = 0
    node: int | None = None


@dataclass(frozen=True, slots=True)
class PlanExpr:
    """Register ``dst`` = ``op`` of registers ``a``, ``b``, ``c`` (all smaller than dst), or ``imm`` for CONST.

    If the value overflows, the error names ``node``, the first node that needs the value.
    """

    op: ExprOp
    dst: int
    a: int = 0
    b: int = 0
    c: int = 0
    segment: int = 0
    imm: int = 0
    node: int | None = None


@dataclass(frozen=True, slots=True)
class PlanAssert:
    """A check that fails the Run if ``register`` is 0, with the label of ``node`` and ``message`` as the error."""

    register: int
    node: int
    message: str
    segment: int = 0


@dataclass(frozen=True, slots=True)
class PlanReadback:
    """A copy of ``count`` integers or booleans from the device to the registers from ``dst`` on, before ``segment``."""

    ref: Ref
    dtype: int
    count: int
    dst: int
    segment: int
    byte_offset_register: int | None = None


@dataclass(frozen=True, slots=True)
class PlanBuffer:
    """Scratch memory that the records ``first_record`` to ``last_record`` use; ``size_register`` has its byte count."""

    size_register: int
    first_record: int
    last_record: int
    segment: int = 0


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of a record: an address or a scalar.

    An address is that of ``ref``, plus ``imm`` bytes, plus the value of ``register`` in bytes. A scalar is the value of
    ``register``, or ``imm`` if ``register`` is None; for F32 and F64, ``imm`` has their bits. A CONDITION is the handle
    of the condition of the loop whose record has the index ``imm``.
    """

    kind: ParamKind
    ref: Ref | None = None
    register: int | None = None
    imm: int = 0

    @staticmethod
    def pointer(ref: Ref, register: int | None = None, offset: int = 0) -> Param:
        return Param(ParamKind.POINTER, ref, register, offset)

    @staticmethod
    def i32(register: int | None = None, value: int = 0) -> Param:
        return Param(ParamKind.I32, None, register, value)

    @staticmethod
    def i64(register: int | None = None, value: int = 0) -> Param:
        return Param(ParamKind.I64, None, register, value)

    @staticmethod
    def f32(value: float) -> Param:
        return Param(ParamKind.F32, imm=struct.unpack("<I", struct.pack("<f", value))[0])

    @staticmethod
    def f64(value: float) -> Param:
        return Param(ParamKind.F64, imm=struct.unpack("<q", struct.pack("<d", value))[0])


@dataclass(frozen=True, slots=True)
class Record:
    """One operation on the stream. Only a LAUNCH has a ``grid``, as registers, and a ``block``, in threads.

    ``index`` is the entry of ``Plan.kernels`` (LAUNCH), of ``Plan.problems`` (LIBRARY) or of the cluster's callbacks
    (CALL), or the position of the record of the awaited upload (AWAIT). A LOOP repeats the next ``index`` records.
    ``node`` is the entry of ``Plan.nodes`` that errors name; ``nodes`` are all nodes that the record computes.
    """

    kind: RecordKind
    node: int
    params: tuple[Param, ...]
    index: int = 0
    segment: int = 0
    grid: tuple[int, int, int] = (0, 0, 0)
    block: tuple[int, int, int] = (1, 1, 1)
    shared_register: int | None = None
    condition_register: int | None = None
    nodes: tuple[int, ...] = ()

    @staticmethod
    def copy(
        node: int,
        dst: Param,
        src: Param,
        nbytes: Param,
        segment: int = 0,
        condition: int | None = None,
        nodes: tuple[int, ...] = (),
    ) -> Record:
        """Return a record that copies ``nbytes`` (I64) bytes from ``src`` to ``dst``, both in device memory."""
        moved = (dst, src, nbytes)
        return Record(RecordKind.COPY, node, moved, segment=segment, condition_register=condition, nodes=nodes)

    @staticmethod
    def memset(
        node: int,
        dst: Param,
        byte: Param,
        nbytes: Param,
        segment: int = 0,
        condition: int | None = None,
        nodes: tuple[int, ...] = (),
    ) -> Record:
        """Return a record that sets ``nbytes`` (I64) bytes at pointer ``dst`` to ``byte`` (I32, 0..255)."""
        filled = (dst, byte, nbytes)
        return Record(RecordKind.MEMSET, node, filled, segment=segment, condition_register=condition, nodes=nodes)


@dataclass(frozen=True, order=True, slots=True)
class PlanInPlace:
    """An output that may share the memory of an input: the first record to write the output is the last to read the
    input.
    """

    output: int
    input: int
    kind: InPlaceKind


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of one variant. ``weights``, ``kernels`` and ``problems`` are indices into the tables of the cluster.

    ``nodes`` are the labels of nodes for errors and profiles; ``op_types`` are the operator types of the first
    ``len(op_types)`` of these. ``in_place`` is sorted.
    """

    num_registers: int
    inputs: tuple[PlanInput, ...]
    outputs: tuple[PlanOutput, ...]
    nodes: tuple[str, ...] = ()
    exprs: tuple[PlanExpr, ...] = ()
    guards: tuple[int, ...] = ()
    asserts: tuple[PlanAssert, ...] = ()
    readbacks: tuple[PlanReadback, ...] = ()
    buffers: tuple[PlanBuffer, ...] = ()
    records: tuple[Record, ...] = ()
    weights: tuple[int, ...] = ()
    kernels: tuple[int, ...] = ()
    problems: tuple[int, ...] = ()
    num_segments: int = 1
    op_types: tuple[str, ...] = ()
    in_place: tuple[PlanInPlace, ...] = ()


class Strings:
    """A table of NUL-terminated strings, in which equal strings are stored once."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.offsets: dict[str, int] = {}

    def add(self, text: str) -> int:
        if text not in self.offsets:
            if "\0" in text:
                raise ValueError(f"a string of the plan contains a NUL character: {text!r}")
            self.offsets[text] = len(self.data)
            self.data += text.encode() + b"\0"
        return self.offsets[text]


def encode(plan: Plan) -> bytes:
    """Encode the plan for ``ocp_cluster_add_plan``.

    Raises ValueError if a number does not fit its field or records are not ordered by segment. All other checks are in
    ``csrc_shim/plan/check.c``.
    """
    strings = Strings()
    dims = [register for output in plan.outputs for register in output.dims]
    params = [param for record in plan.records for param in record.params]
    types = (*plan.op_types, *[""] * (len(plan.nodes) - len(plan.op_types)))
    nodes = [(strings.add(label), strings.add(op_type)) for label, op_type in zip(plan.nodes, types, strict=True)]
    record_nodes = [node for record in plan.records for node in record.nodes]
    asserts = [(a.register, a.node, strings.add(a.message), a.segment) for a in plan.asserts]
    try:
        sections = [
            pack(input_layout, [input_fields(i) for i in plan.inputs]),
            pack(output_layout, output_fields(plan.outputs)),
            pack_indices(plan.weights),
            pack_indices(plan.kernels),
            pack_indices(plan.problems),
            pack_indices(dims),
            pack(expr_layout, [expr_fields(e) for e in plan.exprs]),
            pack_indices(plan.guards),
            pack(assert_layout, asserts),
            pack(readback_layout, [readback_fields(r) for r in plan.readbacks]),
            pack(buffer_layout, [(b.size_register, b.first_record, b.last_record, b.segment) for b in plan.buffers]),
            pack(record_layout, record_fields(plan.records)),
            pack(param_layout, [param_fields(p) for p in params]),
            pack(segment_layout, segment_fields(plan)),
            pack(node_layout, nodes),
            pack_indices(record_nodes),
            pack(in_place_layout, [(pair.input, pair.output, pair.kind, 0) for pair in plan.in_place]),
            aligned(bytes(strings.data)),
        ]
        header = header_layout.pack(
            *Header(
                magic=magic,
                version=version,
                num_registers=plan.num_registers,
                num_inputs=len(plan.inputs),
                num_outputs=len(plan.outputs),
                num_weights=len(plan.weights),
                num_kernels=len(plan.kernels),
                num_problems=len(plan.problems),
                num_dims=len(dims),
                num_exprs=len(plan.exprs),
                num_guards=len(plan.guards),
                num_asserts=len(asserts),
                num_readbacks=len(plan.readbacks),
                num_buffers=len(plan.buffers),
                num_records=len(plan.records),
                num_params=len(params),
                num_segments=plan.num_segments,
                num_nodes=len(nodes),
                strings_bytes=len(strings.data),
                num_record_nodes=len(record_nodes),
                num_in_place=len(plan.in_place),
            )
        )
    except struct.error as error:
        raise ValueError(
            f"internal error: a field of the plan does not fit its type in the plan format ({error}). Report the model"
        ) from error
    return header + b"".join(sections)


def aligned(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


def pack(layout: struct.Struct, rows: Sequence[tuple[int, ...]]) -> bytes:
    return aligned(b"".join(layout.pack(*row) for row in rows))


def pack_indices(values: Sequence[int]) -> bytes:
    return aligned(struct.pack(f"<{len(values)}I", *values))


def optional_field(index: int | None) -> int:
    """Return the binary field of an optional register or node: ``no_register`` for None, else its index."""
    return no_register if index is None else index


def input_fields(i: PlanInput) -> tuple[int, ...]:
    return i.dtype, i.rank, i.first_register, optional_field(i.host_register), i.host_count, 0


def output_fields(outputs: Sequence[PlanOutput]) -> list[tuple[int, ...]]:
    rows: list[tuple[int, ...]] = []
    first_dim = 0
    for output in outputs:
        node = optional_field(output.node)
        rows.append((output.dtype, len(output.dims), first_dim, output.segment, node, 0))
        first_dim += len(output.dims)
    return rows


def expr_fields(e: PlanExpr) -> tuple[int, ...]:
    return e.op, e.dst, e.a, e.b, e.c, e.segment, e.imm, optional_field(e.node), 0


def readback_fields(r: PlanReadback) -> tuple[int, ...]:
    return r.ref.kind, r.ref.index, optional_field(r.byte_offset_register), r.dtype, r.count, r.dst, r.segment, 0


def record_fields(records: Sequence[Record]) -> list[tuple[int, ...]]:
    rows: list[tuple[int, ...]] = []
    first_param = first_node = 0
    for r in records:
        registers = (optional_field(r.shared_register), optional_field(r.condition_register))
        tail = (*registers, first_node, len(r.nodes))
        rows.append((r.kind, r.node, r.index, r.segment, first_param, len(r.params), *r.grid, *r.block, *tail))
        first_param += len(r.params)
        first_node += len(r.nodes)
    return rows


def param_fields(p: Param) -> tuple[int, ...]:
    kind, index = (0, 0) if p.ref is None else (p.ref.kind, p.ref.index)
    return p.kind, kind, index, optional_field(p.register), p.imm


def segment_fields(plan: Plan) -> list[tuple[int, ...]]:
    rows: list[tuple[int, ...]] = []
    first = 0
    for segment in range(plan.num_segments):
        end = first
        while end < len(plan.records) and plan.records[end].segment == segment:
            end += 1
        rows.append((first, end - first))
        first = end
    if first != len(plan.records):
        segment = plan.records[first].segment
        raise ValueError(
            f"record {first}: segment {segment} is out of order, or not below the number of segments"
            f" ({plan.num_segments})"
        )
    return rows
