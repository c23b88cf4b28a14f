"""Vertical fusion: joins producers into consumers, so that the tensors between them stay in registers.

A producer fuses with its consumer if the consumer reads the result as a strided view, and no step between them both
depends on the producer and is needed by the consumer. If further steps read the result, the fused step must also store
it. Values are rounded to the type in which the unfused steps stored them, so that fusion changes no result.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...program.expressions.scalar import Scalar, reachable_beyond
from ...program.expressions.symbolic import Dim, hint, product
from ...program.lowering.shapes import broadcast_strides, collapse
from ...program.steps.steps import (
    Contract,
    Convolve,
    Input,
    Map,
    Output,
    Rows,
    Substitution,
    Sums,
    dense,
    joined_nodes,
    stored,
)
from ...program.steps.tensor import BufferKind, Tensor, contiguous_strides
from ...program.steps.trace import ReadBack, Step
from ...program.termination import Measure
from ..analysis.affine_view import Path, covers, find_path
from ..analysis.uses import Uses
from ..simplification.constant_folding import fixed_buffers, is_fixed

MAX_TENSORS = 24
"""Maximum tensors of a fused step. A kernel has a limited number of parameters, and needs a pointer and strides for
each tensor.
"""
MAX_PARAMETERS = 60
MAX_OPERATIONS = 512
"""Maximum operations of a fused step. Compilation takes seconds for that many, and grows faster than linearly."""
MAX_REPEATED_OPERATIONS = 16
"""Maximum operations of a producer whose elements the fused step computes more than once, because its result is
broadcast.
"""
MAX_DISTANCE = 400
"""Maximum number of steps between producer and consumer that are searched for dependencies."""
FEW_ROWS, MANY_COLUMNS = 128, 8192
"""A row program of fewer than FEW_ROWS rows with more than MANY_COLUMNS columns has too few blocks for elementwise
work, which then stays a separate step.
"""


def fuse_vertically(steps: Sequence[Step]) -> list[Step]:
    """Fuse producers into their consumers: elementwise steps (maps), reductions, and maps as epilogues of contractions.

    Assumes: one step for each operation of an operator.
    Guarantees: the order of reads and writes of each buffer does not change. A value that the model stores in a narrow
        type is rounded in the fused step (`stored`), so that no bit of a result changes.
    Example: ``p = MatMul(a, b); y = Relu(p)`` -> one GEMM whose epilogue is Relu.
    """
    return _Fusion(steps).run()


class _Fusion:
    """The state of the pass: the current program is ``done`` followed by ``pending`` in reverse.

    A fusion changes only the ends of the two lists, so that its cost does not depend on the length of the program.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self.done: list[Step] = []
        self.pending = list(reversed(steps))
        self.uses = Uses((step, step) for step in steps)
        self.fixed = fixed_buffers(steps)

    def run(self) -> list[Step]:
        measure = Measure[tuple[int, ...]]("fuse")
        while self.pending:
            consumer = self.pending.pop()
            # The loop terminates: a fusion replaces two steps by one, and without a fusion ``done`` grows.
            measure.fall((len(self.done) + len(self.pending), -len(self.done)), consumer.node)
            if not isinstance(consumer, Map) or not self._join_a_producer(consumer):
                self.done.append(consumer)
        return self.done

    def _join_a_producer(self, consumer: Map) -> bool:
        """Fuse one producer, a step of ``done``, into the consumer; return False if no producer can be fused.

        The fused step goes to ``pending``, since it may have more producers.
        """
        for buffer in reversed(consumer.reads):
            writers = self.uses.writers(buffer)
            if len(writers) != 1 or not isinstance(writers[0], Map) or writers[0] is consumer:
                continue
            producer = writers[0]
            if isinstance(consumer, Sums) and any(x.buffer in producer.writes for x in consumer.summed):
                continue  # a contraction's operands must be in memory, so their producer cannot be fused
            if self._is_better_kept(producer, consumer):
                continue
            between = self._between(producer, consumer)
            if between is None:
                continue
            joint = self._joint(producer, consumer)
            if joint is None:
                continue
            independent, dependent = between
            for gone in (producer, consumer):
                self.uses.leave(gone, gone)
            self.uses.enter(joint, joint)
            self.done[-1 - len(independent) - len(dependent) :] = independent
            self.pending += [*reversed(dependent), joint]
            return True
        return False

    def _is_better_kept(self, producer: Map, consumer: Map) -> bool:
        """Return whether the producer should stay a separate step that constant folding computes once.

        This is so if the producer depends on weights only, and has other readers or results no larger than its inputs.
        """
        if not is_fixed(producer, self.fixed) or is_fixed(consumer, self.fixed):
            return False
        if any(reader is not consumer for buffer in producer.writes for reader in self.uses.readers(buffer)):
            return True
        results = sum(hint(y.distinct_bytes) for _, y in producer.all_outputs)
        return results <= sum(hint(x.distinct_bytes) for _, x in producer.inputs)

    def _between(self, producer: Map, consumer: Map) -> tuple[list[Step], list[Step]] | None:
        """Return the steps between producer and consumer: (independent of the producer, dependent on it).

        Returns None if the consumer needs a dependent step, or if a read-back or more than `MAX_DISTANCE` steps lie
        between.
        """
        position = len(self.done)
        start = position - 1
        while self.done[start] is not producer:
            start -= 1
            if position - start > MAX_DISTANCE or start < 0:
                return None
        written, read = set(producer.writes), set(producer.reads)
        independent: list[Step] = []
        dependent: list[Step] = []
        for step in self.done[start + 1 :]:
            if isinstance(step, ReadBack):
                return None
            if written.isdisjoint(step.reads) and written.isdisjoint(step.writes) and read.isdisjoint(step.writes):
                independent.append(step)
            else:
                dependent.append(step)
                written.update(step.writes)
                read.update(step.reads)
        theirs = written.difference(producer.writes)
        if not (theirs.isdisjoint(consumer.reads) and written.isdisjoint(consumer.writes)):
            return None
        return (independent, dependent) if read.isdisjoint(consumer.writes) else None

    def _joint(self, producer: Map, consumer: Map) -> Map | None:
        """Return one step that computes both producer and consumer; None if that is impossible or slower."""
        made = {y.buffer: (x, y) for x, y in producer.all_outputs}
        if any(not dense(y) or len(self.uses.writers(buffer)) != 1 for buffer, (_, y) in made.items()):
            return None
        kept = [
            output
            for output in producer.all_outputs
            if output[1].buffer.kind is not BufferKind.SCRATCH
            or any(step is not consumer for step in self.uses.readers(output[1].buffer))
        ]
        if self._are_too_many(producer, consumer, kept):
            return None
        joint: Map | None
        if isinstance(producer, Sums):
            joint = _join_sums(producer, consumer, kept)
        elif isinstance(producer, Rows):
            joint = _join_rows(producer, consumer, kept)
        else:
            return join_map(producer, consumer, kept)
        return joint if joint is not None and is_small(joint) else None

    def _are_too_many(self, producer: Map, consumer: Map, kept: Sequence[Output]) -> bool:
        """Return whether the joint step is certain to exceed `MAX_OPERATIONS`; found without building the joint step.

        If joining removes no operation, the joint step has the operations of both steps, apart from leaves, which
        joining may replace or share.
        """
        needed = {y.buffer for _, y in kept}.union(consumer.reads)
        if any(buffer not in needed for buffer in producer.writes):
            return False  # joining removes some of the producer's operations
        leaves = len(producer.inputs) + len(consumer.inputs)
        shared = len(producer.scalars & consumer.scalars)
        return len(producer.scalars) + len(consumer.scalars) - shared - leaves > MAX_OPERATIONS


def is_small(step: Map) -> bool:
    """Return whether the step's kernel fits the parameter limit of every device, and compiles quickly."""
    tensors = [x for _, x in step.inputs if x.size != 1] + [y for _, y in step.all_outputs]
    if len(tensors) > MAX_TENSORS:
        return False
    dims: Sequence[Dim] = step.shape
    strides = [broadcast_strides(x, step.shape) for x in tensors]
    if not isinstance(step, Sums):  # contractions pass sizes of rows, columns and channels as separate parameters
        dims, strides = collapse(dims, strides)
    numbers = sum(not isinstance(s, int) or s not in (0, 1) for axes in strides for s in axes)
    parameters = len(step.inputs) + len(step.all_outputs) + numbers + 2 * len(dims) + _own_parameters(step, len(dims))
    return parameters <= MAX_PARAMETERS and len(step.scalars) <= MAX_OPERATIONS


def _own_parameters(step: Map, dims: int) -> int:
    """Return an upper bound of the kernel's parameters besides those of tensors and of the dimensions' sizes."""
    if isinstance(step, Convolve):
        return 11 + 7 * len(step.places)
    if isinstance(step, Contract):
        return 8 + 3 * max(len(step.batch), 1) + (0 if step.low_rank is None else 8)
    return 4 + dims


# ---- elementwise steps as producers ----


def join_map(producer: Map, consumer: Map, kept: Sequence[Output]) -> Map | None:
    """Return one step that computes the elementwise ``producer`` inside ``consumer``, and also stores the producer's
    outputs in ``kept``.

    Returns None if no such step exists, or if no kernel supports it.
    """
    joint = _join_map(producer, consumer, kept)
    return joint if joint is not None and is_small(joint) else None


def _join_map(producer: Map, consumer: Map, kept: Sequence[Output]) -> Map | None:
    views = _Views(producer, consumer.shape)
    replaced: dict[Scalar, Scalar] = {}
    rest: list[Input] = []
    for leaf, x in consumer.inputs:
        output = next((output for output in producer.outputs if output[1].buffer is x.buffer), None)
        if output is None:
            rest.append((leaf, x))
            continue
        if output[1].dtype is not x.dtype:
            return None
        value = views.value(output[0], x)
        if value is None:
            return None
        replaced[leaf] = value
    # A stored value needs a view that contains each of its elements exactly once.
    outputs: list[Output] = []
    for expression, y in kept:
        view = views.covering()
        if view is None:
            return None
        outputs.append((views.at(expression, view), view.of_result(y, consumer.shape)))
    if views.repeats and len(producer.scalars) > MAX_REPEATED_OPERATIONS:
        return None
    if isinstance(consumer, Rows) and _is_narrow(consumer) and len(producer.scalars) > 8:
        return None
    # Substitute the consumer's leaves, not the producer's: in a long chain the consumer's expressions are small.
    known = {_place(x, consumer.shape): leaf for leaf, x in views.inputs}
    replaced |= {leaf: known[place] for leaf, x in rest if (place := _place(x, consumer.shape)) in known}
    changed = consumer.map_values(Substitution(replaced))
    return _joined(producer, consumer, changed, [*views.inputs, *rest], outputs=(*outputs, *changed.outputs))


class _Views:
    """The producer's inputs as seen by a consumer of ``shape``, for each of its views of the producer's result."""

    def __init__(self, producer: Map, shape: tuple[Dim, ...]) -> None:
        self.producer, self.shape = producer, shape
        placed = [broadcast_strides(x, producer.shape) for _, x in producer.inputs]
        self.paths: dict[_View, Substitution | None] = {}
        """For each view, the substitution of the producer's leaves; None if the view needs the inputs unchanged."""
        self.inputs: list[Input] = []
        # Views that keep the producer's dimensions match the first entry; views that merge adjacent dimensions match
        # the second entry, whose dimensions are collapsed.
        self.forms = [_Form(producer.shape, tuple(placed))]
        dims, merged = collapse(producer.shape, placed)
        if len(dims) < len(producer.shape):
            self.forms.append(_Form(tuple(dims), tuple(merged)))

    @property
    def repeats(self) -> bool:
        return any(not self._covers(view) for view in self.paths)

    def _covers(self, view: _View) -> bool:
        return covers(self.shape, view.path, view.form.dims)

    def value(self, expression: Scalar, x: Tensor) -> Scalar | None:
        """Return the producer's ``expression`` at the element that the consumer reads through its view x.

        Returns None if x is not an affine view of the producer's result.
        """
        strides = broadcast_strides(x, self.shape)
        for form in self.forms:
            path = find_path(self.shape, strides, x.offset, form.dims)
            if path is not None:
                return stored(self.at(expression, _View(form, path)))
        return None

    def at(self, expression: Scalar, view: _View) -> Scalar:
        if view not in self.paths:
            placed = [
                self._along(x, strides, view.path)
                for (_, x), strides in zip(self.producer.inputs, view.form.placed, strict=True)
            ]
            if not self.paths and all(x is y for (_, x), y in zip(self.producer.inputs, placed, strict=True)):
                self.inputs += self.producer.inputs
                self.paths[view] = None
            else:
                leaves = {leaf: Scalar(leaf.dtype, "leaf") for leaf, _ in self.producer.inputs}
                self.inputs += zip(leaves.values(), placed, strict=True)
                self.paths[view] = Substitution(leaves)
        new = self.paths[view]
        return expression if new is None else new(expression)

    def _along(self, x: Tensor, strides: Sequence[Dim], path: Path) -> Tensor:
        """Return the producer's input x as the consumer sees it through ``path``; x itself if nothing changes."""
        if x.size == 1:
            return _of_rank(x, len(self.shape))
        offset, new = x.offset + path.offset(strides), path.strides(strides)
        pairs = zip(reversed(x.shape), reversed(self.shape), strict=False)
        is_over_shape = x.rank <= len(self.shape) and all(dim in (1, size) for dim, size in pairs)
        if is_over_shape and offset == x.offset and tuple(new) == broadcast_strides(x, self.shape):
            return x
        return Tensor(x.dtype, self.shape, x.buffer, strides=new, offset=offset)

    def covering(self) -> _View | None:
        return next((view for view in self.paths if self._covers(view)), None)


@dataclass(frozen=True)
class _Form:
    """The dimensions of a producer, as given or collapsed, and its inputs' strides over these dimensions."""

    dims: tuple[Dim, ...]
    placed: tuple[tuple[Dim, ...], ...]


@dataclass(frozen=True)
class _View:
    form: _Form
    path: Path

    def of_result(self, y: Tensor, shape: tuple[Dim, ...]) -> Tensor:
        """Return y, the producer's dense result, as a tensor of ``shape`` along this view; strides may be negative."""
        dense = contiguous_strides(self.form.dims)
        return Tensor(y.dtype, shape, y.buffer, strides=self.path.strides(dense), offset=self.path.offset(dense))


def _is_narrow(step: Rows) -> bool:
    """Return whether the step has few long rows, so that too few blocks would share the elementwise work."""
    columns = product(dim for axis, dim in enumerate(step.shape) if axis in step.axes)
    return hint(product(step.row_shape)) < FEW_ROWS and hint(columns) > MANY_COLUMNS


# ---- row programs as producers ----


def _join_rows(producer: Rows, consumer: Map, kept: Sequence[Output]) -> Map | None:
    """Fuse an elementwise consumer, or a row program over the same rows, into the row program that produces its input.

    The elementwise consumer runs over the elements or over the rows of the row program. Returns None if the consumer
    does not fit, or if the row program has few long rows (`_is_narrow`).
    """
    if isinstance(consumer, Rows):
        if consumer.axes != producer.axes or consumer.shape != producer.shape:
            return None
    elif isinstance(consumer, Sums):
        return None
    row_buffers = {y.buffer for _, y in producer.row_outputs}
    element_buffers = {y.buffer for _, y in producer.outputs}
    own: Map | None = consumer
    by_row = False
    if consumer.shape != producer.shape:
        read = [x for _, x in consumer.inputs if x.buffer in element_buffers]
        by_row = not read
        if by_row:
            read = [x for _, x in consumer.inputs if x.buffer in row_buffers]
        own = rebased(consumer, producer.row_shape if by_row else producer.shape, read[0])
    if own is None or (not by_row and _is_narrow(producer)):
        return None
    element_strides = contiguous_strides(producer.shape)
    row_strides = tuple(
        0 if axis in producer.axes else stride for axis, stride in enumerate(contiguous_strides(producer.row_shape))
    )
    replaced: dict[Scalar, Scalar] = {}
    rest: list[Input] = []
    for leaf, x in own.inputs:
        output = next((output for output in producer.all_outputs if output[1].buffer is x.buffer), None)
        if output is None:
            rest.append((leaf, x))
            continue
        wanted = row_strides if x.buffer in row_buffers else element_strides
        if not reads_all(x, own.shape, output[1], wanted) or (by_row and x.buffer in element_buffers):
            return None
        replaced[leaf] = stored(output[0])
    if isinstance(own, Rows):
        replaced[own.row.index], replaced[own.row.count] = producer.row.index, producer.row.count
    new = Substitution(replaced)
    elements = [output for output in kept if output[1].buffer in element_buffers]
    rows = [output for output in kept if output[1].buffer in row_buffers]
    (rows if by_row else elements).extend((new(x), y) for x, y in own.outputs)
    if isinstance(own, Rows):
        rows += [(new(x), y) for x, y in own.row_outputs]
    return _joined(
        producer, consumer, producer, [*producer.inputs, *rest], outputs=tuple(elements), row_outputs=tuple(rows)
    )


def reads_all(x: Tensor, shape: Sequence[Dim], y: Tensor, strides: Sequence[Dim]) -> bool:
    """Return whether x, broadcast to ``shape``, reads the dense result y (``strides``) at unchanged coordinates."""
    if x.dtype is not y.dtype or x.offset != 0:
        return False
    triples = zip(shape, broadcast_strides(x, shape), strides, strict=True)
    return all(dim == 1 or stride == wanted for dim, stride, wanted in triples)


def _of_rank(x: Tensor, rank: int) -> Tensor:
    """Return x, a tensor of one element, with at most ``rank`` dimensions."""
    return x if x.rank <= rank else Tensor(x.dtype, (1,) * rank, x.buffer, offset=x.offset)


def rebased(consumer: Map, shape: tuple[Dim, ...], x: Tensor) -> Map | None:
    """Return the consumer with iteration space ``shape``, the dimensions of the dense tensor that it views through x.

    Returns None if strides over ``shape`` cannot express the views of all the consumer's tensors.
    """
    strides = broadcast_strides(x, consumer.shape)
    over: Callable[[Sequence[Dim]], tuple[Dim, ...] | None]
    path = find_path(consumer.shape, strides, x.offset, shape)
    if path is not None and covers(consumer.shape, path, shape):
        over = partial(path.strides_beneath, consumer.shape)
    elif x.offset == 0 and strides == contiguous_strides(consumer.shape):
        back = find_path(shape, contiguous_strides(shape), 0, consumer.shape)
        if back is None or not covers(shape, back, consumer.shape):
            return None
        over = back.strides
    else:
        return None

    def moved(pairs: Sequence[Input]) -> tuple[Input, ...] | None:
        result = []
        for scalar, y in pairs:
            if y.size == 1:
                y = _of_rank(y, len(shape))
            else:
                placed = over(broadcast_strides(y, consumer.shape))
                if placed is None:
                    return None
                y = Tensor(y.dtype, shape, y.buffer, strides=placed, offset=y.offset)
            result.append((scalar, y))
        return tuple(result)

    inputs, outputs = moved(consumer.inputs), moved(consumer.outputs)
    return None if inputs is None or outputs is None else replace(consumer, shape=shape, inputs=inputs, outputs=outputs)


def _join_sums(producer: Sums, consumer: Map, kept: Sequence[Output]) -> Map | None:
    """Fuse an elementwise consumer of a contraction's results into the contraction's epilogue; None if impossible."""
    if isinstance(consumer, (Rows, Sums)):
        return None
    read = [x for _, x in consumer.inputs if any(x.buffer is y.buffer for _, y in producer.outputs)]
    own: Map | None = consumer
    if consumer.shape != producer.shape:
        own = rebased(consumer, producer.shape, read[0])
        if own is None and isinstance(producer, (Contract, Convolve)):
            producer, kept = _split(producer, consumer, read[0], kept)
            own = rebased(consumer, producer.shape, read[0])
    if own is None:
        return None
    strides = contiguous_strides(producer.shape)
    replaced: dict[Scalar, Scalar] = {}
    rest: list[Input] = []
    for leaf, x in own.inputs:
        output = next((output for output in producer.outputs if output[1].buffer is x.buffer), None)
        if output is None:
            rest.append((leaf, x))
        elif reads_all(x, own.shape, output[1], strides):
            replaced[leaf] = stored(output[0])
        else:
            return None
    new = Substitution(replaced)
    outputs = (*kept, *((new(x), y) for x, y in own.outputs))
    return _joined(producer, consumer, producer, [*producer.inputs, *rest], outputs=outputs)


def _split(
    producer: Contract | Convolve, consumer: Map, x: Tensor, kept: Sequence[Output]
) -> tuple[Contract | Convolve, Sequence[Output]]:
    """Return the contraction with its rows, columns or channels split into several axes, which the consumer's view
    needs.

    Also returns the ``kept`` outputs over the new axes.
    """
    path = find_path(consumer.shape, broadcast_strides(x, consumer.shape), x.offset, producer.shape)
    if path is None:
        return producer, kept
    parts = [max(len(axes), 1) for axes in path.digits]
    if isinstance(producer, Convolve):
        fixed = [count for axis, count in enumerate(parts) if axis not in producer.channels]
    else:
        fixed = parts[: len(producer.batch)]
    if any(count > 1 for count in fixed):
        return producer, kept
    shape: list[Dim] = []
    for number, dim in enumerate(producer.shape):
        axes = path.digits[number]
        shape += [consumer.shape[axis] for axis in reversed(axes)] if len(axes) > 1 else [dim]

    def placed(y: Tensor) -> Tensor:
        strides: list[Dim] = []
        for axes, stride in zip(path.digits, broadcast_strides(y, producer.shape), strict=True):
            strides += [stride * path.factors[axis] for axis in reversed(axes)] if len(axes) > 1 else [stride]
        return Tensor(y.dtype, shape, y.buffer, strides=strides, offset=y.offset)

    def all_placed(pairs: Sequence[Input]) -> tuple[Input, ...]:
        return tuple((scalar, y if y.size == 1 else placed(y)) for scalar, y in pairs)

    inputs, outputs = all_placed(producer.inputs), all_placed(producer.outputs)
    split = replace(producer, shape=tuple(shape), inputs=inputs, outputs=outputs)
    if isinstance(split, Convolve):
        return replace(split, channel_axes=sum(parts[1 : 1 + split.channel_axes])), all_placed(kept)
    end = len(producer.shape) - split.column_axes
    rows = parts[end - split.row_axes : end]
    return replace(split, row_axes=sum(rows), column_axes=sum(parts[end:])), all_placed(kept)


# ---- joint steps ----


def _joined(producer: Map, consumer: Map, base: Map, inputs: Iterable[Input], **outputs: Any) -> Map:
    """Return ``base`` with ``outputs``, those of ``inputs`` that the outputs need, and the nodes of both steps.

    Does not visit the producer's expressions again, since they grow with each fusion.
    """
    joint = replace(base, nodes=joined_nodes(producer, consumer), **outputs)
    scalars = reachable_beyond(
        (value for value, _ in joint.all_outputs), producer.scalars, [value for value, _ in producer.all_outputs]
    )
    used = tuple((leaf, x) for leaf, x in inputs if leaf in scalars)
    return unified(replace(joint, inputs=used).with_scalars(scalars))


def _place(x: Tensor, shape: tuple[Dim, ...]) -> Hashable:
    """Return a key that two tensors share if they have the same elements when broadcast to ``shape``."""
    return x.buffer, x.dtype, x.offset, broadcast_strides(x, shape)


def unified(step: Map) -> Map:
    """Return the step with a single leaf for inputs that read the same view."""
    known: dict[object, Scalar] = {}
    replaced: dict[Scalar, Scalar] = {}
    inputs: list[Input] = []
    for leaf, x in step.inputs:
        key = _place(x, step.shape)
        if key in known:
            replaced[leaf] = known[key]
        else:
            known[key] = leaf
            inputs.append((leaf, x))
    if not replaced:
        return step
    return replace(step, inputs=tuple(inputs)).map_values(Substitution(replaced))
