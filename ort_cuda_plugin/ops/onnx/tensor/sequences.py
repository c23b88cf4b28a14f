"""Operators on sequences and optional values of tensors; see `program.steps.containers`."""

from __future__ import annotations

from collections.abc import Sequence

from ort_cuda_plugin.model.ir import DType, Unsupported
from ort_cuda_plugin.ops.axes import normalize_axis
from ort_cuda_plugin.ops.onnx.tensor.slicing import concat, slice_axis
from ort_cuda_plugin.ops.registry import ALL_TENSORS, HostTensor, T, op
from ort_cuda_plugin.ops.requirements import require, require_least, require_type, violation
from ort_cuda_plugin.program.expressions.symbolic import Dim, eq, le
from ort_cuda_plugin.program.lowering.context import Lowering, Tensor
from ort_cuda_plugin.program.lowering.views import squeeze, unsqueeze
from ort_cuda_plugin.program.steps.containers import Operand, TensorOptional, TensorSequence

MAX_LENGTH = 1024
"""Maximum length of a sequence, in tensors: the size of a plan grows with it."""


def _sequence(x: Operand, name: str) -> TensorSequence:
    if not isinstance(x, TensorSequence):
        raise violation(f"the input of {name}", "be a sequence", "another value")
    return x


def _position(
    ctx: Lowering, position: Tensor, length: int, name: str, ends: int = 0, choices: Sequence[int] | None = None
) -> int:
    """The position counted from the front; ``ends`` is 1 where the place after the last element counts as well.

    ``choices`` are positions that stand for all; default: all.
    """
    what = f"the position of {name}"
    places = length + ends
    require(places != 0, f"the sequence of {name}", "have an element", "none")
    number = ctx.chosen(ctx.host_number(position, what), what, range(places) if choices is None else choices)
    require(-length <= number < places, what, f"be in [{-length}, {places})", number)
    return number + length if number < 0 else number


@op("SequenceConstruct", since=11, types={"T": ALL_TENSORS}, containers=True)
def sequence_construct(ctx: Lowering, *inputs: T) -> TensorSequence:
    if not inputs or any(x.dtype is not inputs[0].dtype for x in inputs):
        raise violation("inputs", "be tensors of one element type", [x.dtype.short for x in inputs])
    return TensorSequence(inputs[0].dtype, inputs)


@op("SequenceEmpty", since=11, containers=True)
def sequence_empty(ctx: Lowering, *, dtype: int = DType.FLOAT32.onnx) -> TensorSequence:
    return TensorSequence(DType.of_attribute(dtype, "a sequence of element type"), ())


@op("SequenceInsert", since=11, types={"T": ALL_TENSORS}, containers=True)
def sequence_insert(
    ctx: Lowering, input_sequence: Operand, tensor: T, position: HostTensor | None = None
) -> TensorSequence:
    sequence = _sequence(input_sequence, "SequenceInsert")
    require_type({sequence.dtype}, tensor=tensor)
    length = len(sequence.tensors)
    if length == MAX_LENGTH:
        raise Unsupported("cost", f"a sequence of more than {MAX_LENGTH} tensors")
    at = length if position is None else _position(ctx, position, length, "SequenceInsert", 1)
    return TensorSequence(sequence.dtype, (*sequence.tensors[:at], tensor, *sequence.tensors[at:]))


@op("SequenceErase", since=11, containers=True)
def sequence_erase(ctx: Lowering, input_sequence: Operand, position: HostTensor | None = None) -> TensorSequence:
    sequence = _sequence(input_sequence, "SequenceErase")
    length = len(sequence.tensors)
    require(length != 0, "the sequence", "have an element", "none")
    at = length - 1 if position is None else _position(ctx, position, length, "SequenceErase")
    return TensorSequence(sequence.dtype, sequence.tensors[:at] + sequence.tensors[at + 1 :])


@op("SequenceAt", since=11, containers=True)
def sequence_at(ctx: Lowering, input_sequence: Operand, position: HostTensor) -> Tensor:
    sequence = _sequence(input_sequence, "SequenceAt")
    tensors = sequence.tensors
    of_each_rank = [*{x.rank: number for number, x in enumerate(tensors)}.values()]
    return tensors[_position(ctx, position, len(tensors), "SequenceAt", choices=of_each_rank)]


@op("SequenceLength", since=11, containers=True)
def sequence_length(ctx: Lowering, input_sequence: Operand) -> Tensor:
    return ctx.host_tensor([len(_sequence(input_sequence, "SequenceLength").tensors)], (), DType.INT64)


@op("ConcatFromSequence", since=11, containers=True)
def concat_from_sequence(ctx: Lowering, input_sequence: Operand, *, axis: int, new_axis: int = 0) -> Tensor:
    tensors = _sequence(input_sequence, "ConcatFromSequence").tensors
    require(len(tensors) > 0, "the sequence", "have an element", "none")
    if not new_axis:
        return concat(ctx, *tensors, axis=axis)
    first = tensors[0]
    at = normalize_axis(axis, first.rank + 1)
    for x in tensors:
        ctx.require_shape(x, first.shape, "element of ConcatFromSequence")
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
        ctx.require(le(0, size), "a negative size of SplitToSequence")
        part = slice_axis(ctx, x, axis, start, start + size)
        start = start + size
        parts.append(squeeze(ctx, part, (axis,)) if split is None and not keepdims else part)
    ctx.require(eq(start, dim), "the sizes of SplitToSequence do not add up to the dimension")
    return TensorSequence(x.dtype, tuple(parts))


def _part_sizes(ctx: Lowering, dim: Dim, split: Tensor | None) -> list[Dim]:
    if split is not None and split.rank:
        return list(ctx.host_values(split, "sizes of SplitToSequence"))
    size = 1 if split is None else ctx.host_number(split, "size of SplitToSequence")
    if not isinstance(dim, int) or not isinstance(size, int):
        raise Unsupported("shape", "the number of parts of SplitToSequence is only known in a Run")
    require_least(1, split=size)
    if dim > size * MAX_LENGTH:
        raise Unsupported("cost", f"a sequence of more than {MAX_LENGTH} tensors")
    return [min(size, dim - start) for start in range(0, dim, size)]


@op("Optional", since=15, containers=True)
def optional(ctx: Lowering, content: Operand | None = None) -> TensorOptional:
    if isinstance(content, TensorOptional):
        raise violation("the input of Optional", "be a tensor or a sequence", "an optional value")
    return TensorOptional(DType.FLOAT32 if content is None else content.dtype, content)


@op("OptionalHasElement", since=15, containers=True)
def optional_has_element(ctx: Lowering, content: Operand | None = None) -> Tensor:
    value = content.content if isinstance(content, TensorOptional) else content
    return ctx.host_tensor([int(value is not None)], (), DType.BOOL)


@op("OptionalGetElement", since=15, containers=True)
def optional_get_element(ctx: Lowering, content: Operand) -> Tensor | TensorSequence:
    value = content.content if isinstance(content, TensorOptional) else content
    if value is None:
        raise violation("the optional value", "hold a value", "none")
    return value
