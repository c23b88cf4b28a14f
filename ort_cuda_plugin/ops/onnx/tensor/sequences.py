"""Operators on tensor sequences and optional values; see `program.steps.containers`."""

from __future__ import annotations

from collections.abc import Sequence

from ....model.ir import DType
from ....program.expressions.symbolic import Dim, eq
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.views import squeeze, unsqueeze
from ....program.steps.containers import Operand, TensorOptional, TensorSequence
from ... import requirements as require
from ...axes import normalize_axis
from ...registry import ALL_TENSORS, HostTensor, T, op
from .slicing import concat, slice_axis

MAX_LENGTH = 1024
"""Maximum length of a sequence, tensors, since plans grow with the length."""


def _sequence(x: Operand) -> TensorSequence:
    if not isinstance(x, TensorSequence):
        raise require.violation("input_sequence", "be a sequence", "a tensor or an optional value")
    return x


def _position(ctx: Lowering, position: Tensor, length: int, ends: int = 0, choices: Sequence[int] | None = None) -> int:
    """Return the position counted from the front; ``ends`` is 1 if the position after the last element is valid.

    ``choices`` are the positions that are tried at claim time if the value is unknown, by default all.
    """
    limit = length + ends
    require.that(limit != 0, "input_sequence", "have an element", "none")
    given = ctx.host_number(position, "position")
    number = ctx.chosen(given, "position", range(limit) if choices is None else choices)
    require.that(-length <= number < limit, "position", f"be in [{-length}, {limit})", number)
    return number + length if number < 0 else number


@op("SequenceConstruct", since=11, types={"T": ALL_TENSORS}, containers=True)
def sequence_construct(ctx: Lowering, *inputs: T) -> TensorSequence:
    if not inputs or any(x.dtype is not inputs[0].dtype for x in inputs):
        found = ", ".join(x.dtype.short for x in inputs) or "no input"
        raise require.violation("inputs", "be one or more tensors of the same element type", found)
    return TensorSequence(inputs[0].dtype, inputs)


@op("SequenceEmpty", since=11, containers=True)
def sequence_empty(ctx: Lowering, *, dtype: int = DType.FLOAT32.onnx) -> TensorSequence:
    return TensorSequence(DType.of_attribute(dtype, "a sequence of element type"), ())


@op("SequenceInsert", since=11, types={"T": ALL_TENSORS}, containers=True)
def sequence_insert(
    ctx: Lowering, input_sequence: Operand, tensor: T, position: HostTensor | None = None
) -> TensorSequence:
    sequence = _sequence(input_sequence)
    require.element_type({sequence.dtype}, tensor=tensor)
    length = len(sequence.tensors)
    require.supported(length != MAX_LENGTH, "cost", "the length of the sequence", length + 1, f"up to {MAX_LENGTH}")
    at = length if position is None else _position(ctx, position, length, 1)
    return TensorSequence(sequence.dtype, (*sequence.tensors[:at], tensor, *sequence.tensors[at:]))


@op("SequenceErase", since=11, containers=True)
def sequence_erase(ctx: Lowering, input_sequence: Operand, position: HostTensor | None = None) -> TensorSequence:
    sequence = _sequence(input_sequence)
    length = len(sequence.tensors)
    require.that(length != 0, "input_sequence", "have an element", "none")
    at = length - 1 if position is None else _position(ctx, position, length)
    return TensorSequence(sequence.dtype, sequence.tensors[:at] + sequence.tensors[at + 1 :])


@op("SequenceAt", since=11, containers=True)
def sequence_at(ctx: Lowering, input_sequence: Operand, position: HostTensor) -> Tensor:
    sequence = _sequence(input_sequence)
    tensors = sequence.tensors
    of_each_rank = [*{x.rank: number for number, x in enumerate(tensors)}.values()]
    return tensors[_position(ctx, position, len(tensors), choices=of_each_rank)]


@op("SequenceLength", since=11, containers=True)
def sequence_length(ctx: Lowering, input_sequence: Operand) -> Tensor:
    return ctx.host_tensor([len(_sequence(input_sequence).tensors)], (), DType.INT64)


@op("ConcatFromSequence", since=11, containers=True)
def concat_from_sequence(ctx: Lowering, input_sequence: Operand, *, axis: int, new_axis: int = 0) -> Tensor:
    tensors = _sequence(input_sequence).tensors
    require.that(len(tensors) > 0, "input_sequence", "have an element", "none")
    if not new_axis:
        return concat(ctx, *tensors, axis=axis)
    first = tensors[0]
    at = normalize_axis(axis, first.rank + 1)
    for x in tensors:
        require.shape(ctx, first.shape, **{"each element of the sequence": x})
    return concat(ctx, *(unsqueeze(ctx, x, (at,)) for x in tensors), axis=at)


@op("SplitToSequence", since=11, types={"T": ALL_TENSORS}, containers=True)
def split_to_sequence(
    ctx: Lowering, x: T, split: HostTensor | None = None, *, axis: int = 0, keepdims: int = 1
) -> TensorSequence:
    axis = normalize_axis(axis, x.rank)
    dim = x.shape[axis]
    parts = []
    start: Dim = 0
    for size in _part_sizes(ctx, dim, split):
        require.least_dim(ctx, 0, split=size)
        part = slice_axis(ctx, x, axis, start, start + size)
        start = start + size
        parts.append(squeeze(ctx, part, (axis,)) if split is None and not keepdims else part)
    require.holds(ctx, eq(start, dim), "split", f"add up to {dim!r}", start)
    return TensorSequence(x.dtype, tuple(parts))


def _part_sizes(ctx: Lowering, dim: Dim, split: Tensor | None) -> list[Dim]:
    if split is not None and split.rank:
        return list(ctx.host_values(split, "split"))
    size = 1 if split is None else ctx.host_number(split, "split")
    dim, size = (require.static(number, "the number of parts") for number in (dim, size))
    require.least(1, split=size)
    require.supported(dim <= size * MAX_LENGTH, "cost", "the number of parts", -(-dim // size), f"up to {MAX_LENGTH}")
    return [min(size, dim - start) for start in range(0, dim, size)]


@op("Optional", since=15, containers=True)
def optional(ctx: Lowering, content: Operand | None = None) -> TensorOptional:
    if isinstance(content, TensorOptional):
        raise require.violation("the input of Optional", "be a tensor or a sequence", "an optional value")
    return TensorOptional(DType.FLOAT32 if content is None else content.dtype, content)


@op("OptionalHasElement", since=15, containers=True)
def optional_has_element(ctx: Lowering, content: Operand | None = None) -> Tensor:
    value = content.content if isinstance(content, TensorOptional) else content
    return ctx.host_tensor([int(value is not None)], (), DType.BOOL)


@op("OptionalGetElement", since=15, containers=True)
def optional_get_element(ctx: Lowering, content: Operand) -> Tensor | TensorSequence:
    value = content.content if isinstance(content, TensorOptional) else content
    if value is None:
        raise require.violation("the optional input", "have a value", "none")
    return value
