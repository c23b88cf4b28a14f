"""Concat elimination: producers write directly into slices of the concatenation, so that no copies are needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ...program.expressions.symbolic import Dim, le
from ...program.lowering.context import Lowering
from ...program.lowering.shapes import collapse
from ...program.steps.steps import Contract, Map, Sums, dense
from ...program.steps.tensor import Buffer, BufferKind, Tensor
from ...program.steps.trace import Arg, Launch, ReadBack, Remake, Step
from ...program.termination import Measure
from ..analysis.affine_view import exact_quotient, find_path
from ..analysis.uses import Uses


def eliminate_concats(ctx: Lowering, steps: Sequence[Step]) -> list[Step]:
    """Let producers write directly into slices of a concatenation, so that no copies are needed.

    The source of a copy becomes a view of the copy's target, for all steps that use the source. Copies are visited from
    the last to the first, so that a chain of copies ends in the last target.

    Assumes: a Concat consists of elementwise steps that each copy a whole intermediate to its slice.
    Guarantees: slices tile the result (invariant 4). A copy stays where a step cannot write or read the strides of its
        slice.
    Example: ``a = Exp(x); y[:, :4] = a; y[:, 4:] = b`` -> ``y[:, :4] = Exp(x); y[:, 4:] = b``.
    """
    return _Placement(ctx, steps).run()


@dataclass(frozen=True)
class Copy:
    """A copy of all elements of ``source`` to ``target``: output ``number`` of an elementwise step."""

    number: int
    source: Tensor
    target: Tensor


class _Placement:
    def __init__(self, ctx: Lowering, steps: Sequence[Step]) -> None:
        self.ctx = ctx
        self.steps: list[Step | None] = list(steps)
        self.uses = Uses(enumerate(steps))

    def run(self) -> list[Step]:
        for position in reversed(range(len(self.steps))):
            step, measure = self.steps[position], Measure("concat_elimination")
            while isinstance(step, Map):
                measure.fall(len(step.outputs), step.node)  # each eliminated copy removes an output of the step
                if not self._place_one(position, step):
                    break
                step = self.steps[position]
        return [step for step in self.steps if step is not None]

    def _place_one(self, position: int, step: Map) -> bool:
        return any(self._place(position, step, copy) for copy in _copies(step))

    def _place(self, position: int, step: Map, copy: Copy) -> bool:
        """Replace the copy's source by a view of its target in all steps, and remove the copy; return False if
        impossible.
        """
        users = sorted(self.uses.users(copy.source.buffer))
        if not self._is_free(position, users, copy):
            return False
        remaining = tuple(output for number, output in enumerate(step.outputs) if number != copy.number)
        without = replace(step, outputs=remaining)
        changed: dict[int, Step | None] = {position: without if without.all_outputs else None}
        for user in users:
            moved = changed.get(user, self.steps[user])
            if moved is not None:
                viewed = with_view(moved, copy)
                if viewed is None:
                    return False
                changed[user] = viewed
        for user, new in changed.items():
            old = self.steps[user]
            assert old is not None
            self.uses.leave(user, old)
            if new is not None:
                self.uses.enter(user, new)
            self.steps[user] = new
        if copy.source.buffer in self.ctx.stand_ins:
            self.ctx.stand_ins.add(copy.target.buffer)
        return True

    def _is_free(self, position: int, users: Sequence[int], copy: Copy) -> bool:
        """Return whether the ``users`` of the copy's source can use its target instead.

        The host must know the target's size before the users run. No step may change the source after the copy, and no
        other step may write to the same elements of the target.
        """
        source, target = copy.source.buffer, copy.target.buffer
        first = min(users[0], position)
        if any(isinstance(step, ReadBack) for step in self.steps[first:position]):
            return False
        for user in users:
            step = self.steps[user]
            if step is not None and user > position and source in step.writes:
                return False
        for user in self.uses.writers(target):
            written = written_views(self.steps[user], target)
            if user == position:
                written.remove(copy.target)
            elif not written:
                return False
            if not all(are_apart(y, copy.target) for y in written):
                return False
        return True


def written_views(step: Step | None, buffer: Buffer) -> list[Tensor]:
    """Return the views of ``buffer`` that a step writes; for a launch that writes it, all arguments in ``buffer``.

    Empty for other steps, even for those that write ``buffer``.
    """
    if isinstance(step, Map):
        return [y for _, y in step.all_outputs if y.buffer is buffer]
    if isinstance(step, Launch) and buffer in step.writes:
        return [arg for arg in step.args if isinstance(arg, Tensor) and arg.buffer is buffer]
    return []


def _copies(step: Map) -> Iterable[Copy]:
    for number, (value, target) in enumerate(step.outputs):
        sources = [x for leaf, x in step.inputs if leaf is value and x.shape == step.shape]
        sources += [y for other, y in step.outputs[:number] if other is value]
        for source in sources:
            is_whole = source.buffer.kind is BufferKind.SCRATCH and dense(source) and source.shape == target.shape
            if is_whole and source.buffer is not target.buffer and source.dtype is target.dtype:
                yield Copy(number, source, target)


def are_apart(x: Tensor, y: Tensor) -> bool:
    """Return whether two views of one buffer provably share no element: along some axis, one ends before the other
    begins.
    """
    if x.rank != y.rank or any(
        a != b for a, b, n, m in zip(x.strides, y.strides, x.shape, y.shape, strict=True) if n != 1 or m != 1
    ):
        return False
    for axis in range(x.rank):
        others = [number for number in range(x.rank) if number != axis]
        if any(x.shape[number] != y.shape[number] for number in others):
            continue
        for first, second in ((x, y), (y, x)):
            distance = exact_quotient(second.offset - first.offset, y.strides[axis])
            if distance is not None and le(first.shape[axis], distance) == 1:
                return True
    return False


def with_view(step: Step, copy: Copy) -> Step | None:
    """Return the step with the copy's source replaced by its target; None if the step does not support the views."""
    if isinstance(step, Launch):
        return _launched_with_view(step, copy)
    if not isinstance(step, Map):
        return None
    rigid: set[Tensor] = set()
    if isinstance(step, Sums):
        pairs = zip(step.operands, step.conversions, strict=False)
        packed = {x.buffer for x, conversion in pairs if conversion is not None and conversion.bits}
        if copy.source.buffer in packed:
            return None  # strides of packed operands (4-bit codes) count codes, not elements
        if not isinstance(step, Contract):
            rigid.update(step.operands)  # convolutions and attention require the strides of their operands
    try:
        return step.map_tensors(lambda x: _shifted(x, copy) if x in rigid else _moved(x, copy))
    except _NoView:
        return None


def _launched_with_view(step: Launch, copy: Copy) -> Launch | None:
    """Return the launch on the copy's target; None if its tensors would get other strides."""
    try:
        views: dict[Arg, Tensor] = {arg: _shifted(arg, copy) for arg in step.args if isinstance(arg, Tensor)}
    except _NoView:
        return None

    def moved(buffers: Sequence[Buffer]) -> tuple[Buffer, ...]:
        return tuple(copy.target.buffer if buffer is copy.source.buffer else buffer for buffer in buffers)

    return replace(
        step,
        args=tuple(views.get(arg, arg) for arg in step.args),
        reads=moved(step.reads),
        writes=moved(step.writes),
        uses={views.get(x, x): use for x, use in step.uses.items()},
        remake=_remade_with(step.remake, views),
    )


def _remade_with(remake: Remake | None, views: Mapping[Arg, Tensor]) -> Remake | None:
    return remake and (lambda view: remake(lambda x: view(views.get(x, x))))


class _NoView(Exception):
    """Raised for a view of the source that has no counterpart in the target."""


def _shifted(x: Tensor, copy: Copy) -> Tensor:
    """Return the view of the target for x (`_moved`); raise `_NoView` if its strides differ from those of x."""
    view = _moved(x, copy)
    if any(dim != 1 and old != new for dim, old, new in zip(x.shape, x.strides, view.strides, strict=True)):
        raise _NoView
    return view


def _moved(x: Tensor, copy: Copy) -> Tensor:
    if x.buffer is not copy.source.buffer:
        return x
    if x.dtype is not copy.target.dtype:
        raise _NoView
    target = copy.target
    forms: list[tuple[Sequence[Dim], Sequence[Dim]]] = [(target.shape, target.strides)]
    dims, (strides,) = collapse(target.shape, [target.strides])
    forms.append((dims, strides))
    for beneath, placed in forms:
        path = find_path(x.shape, x.strides, x.offset, beneath)
        if path is not None:
            offset = target.offset + path.offset(placed)
            return Tensor(x.dtype, x.shape, target.buffer, strides=path.strides(placed), offset=offset)
    raise _NoView
