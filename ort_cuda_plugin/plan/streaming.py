"""Weight streaming: a plan that copies weights from host memory into a ring of device memory, ahead of their use.

::

    records     r0        r1        r2        r3
    reads       w0        w1        w2        w3
                 |         |         |         |
    uploads   w0 w1   ->  w2   ->   w3                  an upload follows the last record that reads what it overwrites
    ring      [w0|w1]   [w2|w1]   [w2|w3]

The ring is a buffer of the plan, so that each Run and each CUDA graph has its own. Each streamed weight has a fixed
offset in the ring, and is uploaded once in a Run. An upload is issued as early as the ring permits, and awaited before
the first record that reads the weight.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..program.expressions.operations import ExprOp
from .format import Param, ParamKind, Plan, PlanBuffer, PlanExpr, Record, RecordKind, Ref, RefKind

ALIGNMENT = 256
"""Alignment of weights in the ring, bytes; the same as that of other device memory."""


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class WeightUse:
    """The weight ``number`` of a cluster, which records ``first`` to ``last`` of a plan read.

    A loop and the records that it repeats count as one record: the loop's. The weight stays in the ring for all
    iterations.
    """

    number: int
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Upload:
    """The copy of a streamed weight to ``offset`` in the ring, issued before record ``issue`` of the original plan."""

    use: WeightUse
    offset: int
    issue: int


def weight_uses(plan: Plan, nbytes: Mapping[int, int]) -> list[WeightUse]:
    """Return the weights that records of ``plan`` read, by first use. ``nbytes`` has the bytes of each weight."""
    spans: dict[int, tuple[int, int]] = {}
    loop = (-1, -1)  # the first and last record of the outermost loop
    for position, record in enumerate(plan.records):
        if record.kind is RecordKind.LOOP and position > loop[1]:
            loop = position, position + record.index
        first, last = loop if position <= loop[1] else (position, position)
        for param in record.params:
            if param.ref is not None and param.ref.kind is RefKind.WEIGHT:
                number = plan.weights[param.ref.index]
                spans[number] = spans.get(number, (first, 0))[0], last
    uses = [WeightUse(number, nbytes[number], first, last) for number, (first, last) in spans.items()]
    return sorted(uses, key=lambda use: (use.first, use.last, use.number))


def read_by_host(plan: Plan) -> set[int]:
    """Return the numbers of the weights that the host reads back during a Run."""
    return {plan.weights[each.ref.index] for each in plan.readbacks if each.ref.kind is RefKind.WEIGHT}


def largest_need(uses: Iterable[WeightUse]) -> tuple[int, int]:
    """Return the maximum bytes of weights that are in use at once, and the first record where that happens."""
    changes: list[tuple[int, int]] = []
    for use in uses:
        changes += [(use.first, aligned(use.nbytes)), (use.last + 1, -aligned(use.nbytes))]
    most = now = where = 0
    for position, change in sorted(changes):
        now += change
        if now > most:
            most, where = now, position
    return most, where


class _Ring:
    """The ring while its uploads are placed: adjacent intervals with the record from which each may be overwritten."""

    def __init__(self, nbytes: int) -> None:
        self._ends = [nbytes]
        self._starts = [0]
        self._free_from = [0]

    def allocate(self, nbytes: int, first: int, last: int) -> tuple[int, int] | None:
        """Return an offset for a weight, and the earliest record from which its upload may overwrite that memory.

        Return None if no memory is free before record ``first``. The weight occupies its memory up to record ``last``.
        """
        size = aligned(nbytes)
        best: tuple[int, int] | None = None
        for index, start in enumerate(self._starts):
            end, covered = start + size, index
            if end > self._ends[-1]:
                break
            free_from = self._free_from[index]
            while self._ends[covered] < end:
                covered += 1
                free_from = max(free_from, self._free_from[covered])
            if free_from <= first and (best is None or free_from < best[0]):
                best = free_from, start
        if best is None:
            return None
        self._occupy(best[1], best[1] + size, last + 1)
        return best[1], best[0]

    def _occupy(self, start: int, end: int, free_from: int) -> None:
        kept = [
            (low, high, free)
            for old_start, old_end, free in zip(self._starts, self._ends, self._free_from, strict=True)
            for low, high in ((old_start, min(old_end, start)), (max(old_start, end), old_end))
            if low < high
        ]
        rows = sorted([*kept, (start, end, free_from)])
        self._starts, self._ends, self._free_from = (list(column) for column in zip(*rows, strict=True))


def segment_starts(plan: Plan) -> list[int]:
    """Return the first record of each segment that has records."""
    records = plan.records
    return [i for i, record in enumerate(records) if i == 0 or record.segment != records[i - 1].segment]


def lay_out(uses: Sequence[WeightUse], ring_bytes: int, starts: Sequence[int] = (0,)) -> list[Upload] | None:
    """Assign offsets in a ring to the streamed weights ``uses``, sorted by first use.

    Return None if the ring is too small. ``starts`` are the `segment_starts` of the plan.
    """
    ring = _Ring(ring_bytes // ALIGNMENT * ALIGNMENT)
    uploads: list[Upload] = []
    issue = 0
    for use in uses:
        placed = ring.allocate(use.nbytes, use.first, use.last)
        if placed is None:
            return None
        # An upload is awaited in its own segment. Uploads run one after the other, so none is issued before an
        # earlier one.
        issue = max(issue, placed[1], starts[bisect_right(starts, use.first) - 1])
        uploads.append(Upload(use, placed[0], issue))
    return uploads


def with_uploads(plan: Plan, uploads: Sequence[Upload]) -> Plan:
    """Return the plan with records that upload weights to the ring, from which the other records then read them.

    Raises: ValueError: the plan has uploads already: it comes from a malformed compiled model.
    """
    if any(record.kind in (RecordKind.UPLOAD, RecordKind.AWAIT) for record in plan.records):
        raise ValueError("a stored plan: got records that upload weights, expected none. Compile the model again")
    if not uploads:
        return plan
    ring = len(plan.buffers)
    offsets = {upload.use.number: upload.offset for upload in uploads}
    plan_index = {number: index for index, number in enumerate(plan.weights)}

    def streamed(param: Param) -> Param:
        if param.ref is None or param.ref.kind is not RefKind.WEIGHT:
            return param
        offset = offsets.get(plan.weights[param.ref.index])
        return param if offset is None else replace(param, ref=Ref(RefKind.BUFFER, ring), imm=param.imm + offset)

    records: list[Record] = []
    moved: list[int] = []  # the new position of each record
    issued: list[int] = []  # the position of each upload's record
    awaited = 0
    for position, record in enumerate(plan.records):
        while len(issued) < len(uploads) and uploads[len(issued)].issue == position:
            upload = uploads[len(issued)]
            issued.append(len(records))
            records.append(_upload(plan, upload, ring, plan_index[upload.use.number]))
        while awaited < len(uploads) and uploads[awaited].use.first == position:
            records.append(
                Record(RecordKind.AWAIT, record.node, (), issued[awaited], record.segment, nodes=(record.node,))
            )
            awaited += 1
        moved.append(len(records))
        records.append(replace(record, params=tuple(map(streamed, record.params))))
    records = [_renumbered(record, moved) for record in records]
    buffers = [
        replace(buffer, first_record=moved[buffer.first_record], last_record=moved[buffer.last_record])
        for buffer in plan.buffers
    ]
    last = max(moved[upload.use.last] for upload in uploads)
    size = PlanExpr(ExprOp.CONST, plan.num_registers, imm=max(u.offset + aligned(u.use.nbytes) for u in uploads))
    first_later = next((i for i, expr in enumerate(plan.exprs) if expr.segment > 0), len(plan.exprs))
    return replace(
        plan,
        num_registers=plan.num_registers + 1,
        exprs=(*plan.exprs[:first_later], size, *plan.exprs[first_later:]),
        buffers=(*buffers, PlanBuffer(size.dst, issued[0], last, records[issued[0]].segment)),
        records=tuple(records),
    )


def _renumbered(record: Record, moved: Sequence[int]) -> Record:
    """Return the record with the new positions of the loops whose conditions it sets."""
    params = tuple(
        replace(param, imm=moved[param.imm]) if param.kind is ParamKind.CONDITION else param for param in record.params
    )
    return replace(record, params=params) if params != record.params else record


def _upload(plan: Plan, upload: Upload, ring: int, index: int) -> Record:
    reader = plan.records[upload.use.first]
    params = (
        Param.pointer(Ref(RefKind.BUFFER, ring), offset=upload.offset),
        Param.pointer(Ref(RefKind.WEIGHT, index)),
        Param.i64(value=upload.use.nbytes),
    )
    return Record(RecordKind.UPLOAD, reader.node, params, segment=reader.segment, nodes=(reader.node,))
