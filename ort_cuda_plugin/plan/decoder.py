"""Decoder of binary plans into the dataclasses of `plan.format`."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ..program.expressions.operations import ExprOp
from .format import (
    Header,
    InPlaceKind,
    Param,
    ParamKind,
    Plan,
    PlanAssert,
    PlanBuffer,
    PlanExpr,
    PlanInPlace,
    PlanInput,
    PlanOutput,
    PlanReadback,
    Record,
    RecordKind,
    Ref,
    RefKind,
    assert_layout,
    buffer_layout,
    expr_layout,
    header_layout,
    in_place_layout,
    index_layout,
    input_layout,
    magic,
    no_register,
    node_layout,
    output_layout,
    param_layout,
    readback_layout,
    record_layout,
    segment_layout,
    version,
)


def decode(blob: bytes) -> Plan:
    """Decode the result of `encode`. Raises ValueError for a malformed blob."""
    try:
        return Reader(blob).plan()
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise ValueError(f"not a plan: {error}") from error


def element_types(blob: bytes) -> tuple[list[int], list[int]]:
    """Return the ONNXTensorElementDataTypes of a plan's inputs and outputs. Raises ValueError for a malformed blob."""
    try:
        reader = Reader(blob)
        inputs = [row[0] for row in reader.rows(input_layout, reader.header.num_inputs)]
        return inputs, [row[0] for row in reader.rows(output_layout, reader.header.num_outputs)]
    except struct.error as error:
        raise ValueError(f"not a plan: {error}") from error


class Reader:
    """Reads the sections of a binary plan in order."""

    def __init__(self, blob: bytes) -> None:
        self.blob = blob
        self.position = header_layout.size
        fields = header_layout.unpack_from(blob)
        if fields[:2] != (magic, version):
            raise ValueError(
                f"not a plan: got magic {fields[0]:#x} and version {fields[1]}, expected {magic:#x} and {version}"
            )
        self.header = Header(*fields)

    def take(self, nbytes: int) -> bytes:
        if nbytes > len(self.blob) - self.position:
            raise ValueError(f"the plan is truncated at byte {len(self.blob)}")
        taken = self.blob[self.position : self.position + nbytes]
        self.position += -(-nbytes // 8) * 8
        return taken

    def rows(self, layout: struct.Struct, count: int) -> list[tuple[int, ...]]:
        return list(layout.iter_unpack(self.take(layout.size * count)))

    def indices(self, count: int) -> tuple[int, ...]:
        return tuple(row[0] for row in self.rows(index_layout, count))

    def plan(self) -> Plan:
        h = self.header
        inputs = self.rows(input_layout, h.num_inputs)
        outputs = self.rows(output_layout, h.num_outputs)
        weights, kernels, problems = (self.indices(n) for n in (h.num_weights, h.num_kernels, h.num_problems))
        dims = self.indices(h.num_dims)
        exprs = self.rows(expr_layout, h.num_exprs)
        guards = self.indices(h.num_guards)
        asserts = self.rows(assert_layout, h.num_asserts)
        readbacks = self.rows(readback_layout, h.num_readbacks)
        buffers = self.rows(buffer_layout, h.num_buffers)
        records = self.rows(record_layout, h.num_records)
        params = [param_of(row) for row in self.rows(param_layout, h.num_params)]
        self.rows(segment_layout, h.num_segments)
        nodes = self.rows(node_layout, h.num_nodes)
        record_nodes = self.indices(h.num_record_nodes)
        in_place = self.rows(in_place_layout, h.num_in_place)
        strings = self.take(h.strings_bytes)

        def text(offset: int) -> str:
            return strings[offset : strings.index(0, offset)].decode()

        return Plan(
            num_registers=h.num_registers,
            inputs=tuple(PlanInput(d, rank, first, optional(host), count) for d, rank, first, host, count, _ in inputs),
            outputs=tuple(
                PlanOutput(d, dims[first : first + rank], segment, optional(node))
                for d, rank, first, segment, node, _ in outputs
            ),
            nodes=tuple(text(label) for label, _ in nodes),
            op_types=tuple(text(op_type) for _, op_type in nodes),
            exprs=tuple(
                PlanExpr(ExprOp(op), dst, a, b, c, segment, imm, optional(node))
                for op, dst, a, b, c, segment, imm, node, _ in exprs
            ),
            guards=guards,
            asserts=tuple(PlanAssert(register, node, text(message), seg) for register, node, message, seg in asserts),
            readbacks=tuple(
                PlanReadback(Ref(RefKind(row[0]), row[1]), row[3], row[4], row[5], row[6], optional(row[2]))
                for row in readbacks
            ),
            buffers=tuple(PlanBuffer(*row) for row in buffers),
            records=tuple(record_of(row, params, record_nodes) for row in records),
            weights=weights,
            kernels=kernels,
            problems=problems,
            num_segments=h.num_segments,
            in_place=tuple(PlanInPlace(output, number, InPlaceKind(kind)) for number, output, kind, _ in in_place),
        )


def optional(field: int) -> int | None:
    return None if field == no_register else field


def param_of(row: tuple[int, ...]) -> Param:
    kind, ref_kind, ref_index, register, imm = row
    ref = Ref(RefKind(ref_kind), ref_index) if kind == ParamKind.POINTER else None
    return Param(ParamKind(kind), ref, optional(register), imm)


def record_of(row: tuple[int, ...], params: Sequence[Param], nodes: Sequence[int]) -> Record:
    kind, node, index, segment, first, count, gx, gy, gz, bx, by, bz, shared, condition, first_node, num_nodes = row
    return Record(
        kind=RecordKind(kind),
        node=node,
        params=tuple(params[first : first + count]),
        index=index,
        segment=segment,
        grid=(gx, gy, gz),
        block=(bx, by, bz),
        shared_register=optional(shared),
        condition_register=optional(condition),
        nodes=tuple(nodes[first_node : first_node + num_nodes]),
    )
