"""Substitutes of vendor library calls: programs of the plugin's kernels that compute a call's problem.

A library may refuse a call in a Run: it has no algorithm for the sizes, or an engine does not execute. The inputs of
the program are the call's tensors, including its result. Each input is a tensor of rank 1 that begins at the call's
pointer. So the program can run in the middle of a plan, and it writes only the elements of the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..kernels.conv.channels_last import channels_last_strides
from ..model.ir import DType, Node
from ..ops.onnx.math.activation import gelu_tanh
from ..ops.onnx.nn.normalization import softmax_row
from ..plan.format import PlanInput
from ..plan.planner import make_plan
from ..plan.precompute import precompute
from ..plan.tables import KnownEntries, Tables
from ..program.device import DeviceProperties, LoweringOptions
from ..program.expressions import scalar as s
from ..program.expressions.scalar import Scalar
from ..program.expressions.symbolic import hint
from ..program.lowering.context import Lowering
from ..program.lowering.elementwise import copy_into, elementwise
from ..program.lowering.multiply import multiply
from ..program.lowering.reduce import row_map
from ..program.steps.libraries import ATTENTION, CONV, MATMUL, LibraryProblem, ProblemFlags
from ..program.steps.steps import Contract, Convolve, Input
from ..program.steps.tensor import Buffer, BufferKind, Tensor, contiguous_strides
from ..program.steps.windows import Windows
from .cluster import Variant
from .launches import make_launches

__all__ = ["SUBSTITUTES", "Substitute", "substitute_of"]

PER_DIMENSION = 7  # integer arguments of a convolution's call for each spatial dimension


@dataclass(frozen=True)
class Substitute:
    """A program, and the number of elements of each of its inputs, in the order of the call's pointers."""

    variant: Variant
    elements: tuple[int, ...]


class _Tensors:
    """The tensors of a call: views of its pointers, in order; the first is the result."""

    def __init__(self, dtype: DType) -> None:
        self._dtype = dtype
        self.buffers: list[Buffer] = []

    def add(self, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
        elements = 1 + sum((dim - 1) * stride for dim, stride in zip(shape, strides, strict=True))
        elements = elements if math.prod(shape) else 0
        kind = BufferKind.INPUT if self.buffers else BufferKind.OUTPUT
        self.buffers.append(Buffer(kind, elements * self._dtype.itemsize, index=len(self.buffers)))
        return Tensor(self._dtype, tuple(shape), self.buffers[-1], strides=tuple(strides))

    @property
    def elements(self) -> tuple[int, ...]:
        return tuple(int(buffer.nbytes) // self._dtype.itemsize for buffer in self.buffers)


def substitute_of(problem: LibraryProblem, values: Sequence[int], device: DeviceProperties) -> Substitute:
    """Return the substitute of a call of ``problem`` with the integer arguments ``values``.

    Raises: Unsupported: no kernel of the plugin computes the problem.
    """
    flags = ProblemFlags(problem.flags)
    options = LoweringOptions(use_tf32=ProblemFlags.TF32 in flags, deterministic=ProblemFlags.DETERMINISTIC in flags)
    ctx = Lowering(device, options)
    ctx.nodes = (Node("substitute of a library call", "LibraryCall", "", 1, (), ()),)
    dtype = DType.from_ort(problem.dtype)
    tensors = _Tensors(dtype)
    is_empty = SUBSTITUTES[problem.kind](ctx, problem, flags, values, tensors)
    tables = Tables(KnownEntries())
    fixed, launches, _ = ([], [], None) if is_empty else make_launches(ctx)
    tensors.buffers[0].kind = BufferKind.INPUT  # the result was an output for the passes, so that they keep its steps
    precompute(fixed, launches, tables)
    inputs = [PlanInput(dtype.ort, 1, index) for index in range(len(tensors.buffers))]
    plan = make_plan(ctx.trace, launches, inputs, (), (), tables, len(inputs))
    variant = Variant(plan, tables.kernels.new, tables.weights.new, tables.problems.new, tables)
    return Substitute(variant, tensors.elements)


def _finish(
    problem: LibraryProblem, flags: ProblemFlags, total: Scalar, residual: Tensor | None, bias: Tensor | None
) -> tuple[tuple[Input, ...], Scalar]:
    """Return inputs and value of the epilogue: activation(alpha * ``total`` + beta * ``residual`` + ``bias``)."""
    value = total * problem.alpha if problem.alpha != 1.0 else total
    inputs: list[Input] = []
    for tensor, factor in ((residual, problem.beta), (bias, 1.0)):
        if tensor is not None:
            inputs.append((Scalar(tensor.dtype, "leaf"), tensor))
            addend = s.cast(inputs[-1][0], total.dtype)
            value = value + (addend if factor == 1.0 else addend * factor)
    if ProblemFlags.RELU in flags:
        value = s.maximum(value, 0.0)
    if ProblemFlags.RELU6 in flags:
        value = s.minimum(s.maximum(value, 0.0), 6.0)
    if ProblemFlags.SWISH in flags:
        value = value * s.sigmoid(value)
    if ProblemFlags.GELU in flags:
        value = gelu_tanh(value)
    return tuple(inputs), value


def _product(
    ctx: Lowering, problem: LibraryProblem, flags: ProblemFlags, values: Sequence[int], tensors: _Tensors
) -> bool:
    m, n, k, a_leading, b_leading, out_leading, batches, a_batch, b_batch, out_batch, _ = values
    a_strides = (1, a_leading) if ProblemFlags.A_TRANSPOSED in flags else (a_leading, 1)
    b_strides = (1, b_leading) if ProblemFlags.B_TRANSPOSED in flags else (b_leading, 1)
    shape = (batches, m, n)
    out = tensors.add(shape, (out_batch, out_leading, 1))
    a = tensors.add((batches, m, k), (a_batch, *a_strides))
    b = tensors.add((batches, k, n), (b_batch, *b_strides))
    bias = tensors.add(shape, (0, 0, 1)) if ProblemFlags.BIAS in flags else None
    residual = tensors.add(shape, (m * n, n, 1)) if ProblemFlags.RESIDUAL in flags else None
    total = Scalar(s.accumulation_type(a.dtype), "leaf")
    inputs, value = _finish(problem, flags, total, residual, bias)
    outputs = ((s.cast(value, out.dtype), out),)
    ctx.record(Contract(ctx.nodes, shape, inputs, outputs, operands=(a, b), total=total, conversions=(None, None)))
    return math.prod(shape) == 0


def _image_strides(shape: Sequence[int], is_last: bool, apart: int = 0) -> tuple[int, ...]:
    """Return the strides of images of ``shape``, (image, channel, spatial...): channels-last or contiguous.

    ``apart`` is the distance between images (with channels last, between pixels) in elements; 0: no gaps.
    """
    if is_last:
        return tuple(map(hint, channels_last_strides(shape, apart or None)))
    images, *others = map(hint, contiguous_strides(shape))
    return (apart or images, *others)


def _convolution(
    ctx: Lowering, problem: LibraryProblem, flags: ProblemFlags, values: Sequence[int], tensors: _Tensors
) -> bool:
    images, channels, rows, groups, apart = values[:5]
    axes = [values[5 + i * PER_DIMENSION : 5 + (i + 1) * PER_DIMENSION] for i in range(problem.rank)]
    size, kernel, spatial, strides, dilations, begin, end = (tuple(axis) for axis in zip(*axes, strict=True))
    is_last = ProblemFlags.CHANNELS_LAST in flags
    shape = (images, rows, *spatial)
    x_shape, w_shape = (images, channels, *size), (rows, channels // groups, *kernel)
    out = tensors.add(shape, _image_strides(shape, is_last, apart if images > 1 or is_last else 0))
    x = tensors.add(x_shape, _image_strides(x_shape, is_last))
    w = tensors.add(w_shape, _image_strides(w_shape, is_last))
    per_channel = tuple(int(axis == 1) for axis in range(len(shape)))
    bias = tensors.add(shape, per_channel) if ProblemFlags.BIAS in flags else None
    residual = tensors.add(shape, _image_strides(shape, is_last)) if ProblemFlags.RESIDUAL in flags else None
    total = Scalar(s.accumulation_type(x.dtype), "leaf")
    inputs, value = _finish(problem, flags, total, residual, bias)
    if math.prod(shape) == 0:
        return True
    result = ctx.empty(shape, out.dtype)
    operands = ctx.contiguous(x), ctx.contiguous(w)
    windows = Windows(size, kernel, strides, dilations, begin, end)
    outputs = ((s.cast(value, out.dtype), result),)
    ctx.record(
        Convolve(ctx.nodes, shape, inputs, outputs, operands=operands, total=total, windows=windows, groups=groups)
    )
    copy_into(ctx, out, result)
    return False


def _attention(
    ctx: Lowering, problem: LibraryProblem, flags: ProblemFlags, values: Sequence[int], tensors: _Tensors
) -> bool:
    """Record attention with scores in float32, as the library computes it."""
    batches, heads, rows, keys, depth, width, *strides = values
    of_q, of_k, of_v, of_out = (strides[i : i + 3] for i in range(0, 12, 3))
    batch = (batches, heads)
    out = tensors.add((*batch, rows, width), (*of_out, 1))
    q = tensors.add((*batch, rows, depth), (*of_q, 1))
    k = tensors.add((*batch, depth, keys), (*of_k[:2], 1, of_k[2]))
    v = tensors.add((*batch, keys, width), (*of_v, 1))
    bias = [tensors.add((*batch, rows, keys), strides[12:16])] if ProblemFlags.BIAS in flags else []
    if math.prod(out.static_shape) == 0:
        return True

    def wide(x: Tensor) -> Tensor:
        return elementwise(ctx, lambda element: s.cast(element, DType.FLOAT32), x)

    def score(total: Scalar, *addends: Scalar) -> Scalar:
        value = total * problem.alpha
        for addend in addends:
            value = value + s.cast(addend, DType.FLOAT32)
        return value

    scores = multiply(ctx, wide(q), wide(k), *bias, finish=score)
    weights = row_map(ctx, softmax_row, [3], scores)[0]
    copy_into(ctx, out, elementwise(ctx, lambda x: s.cast(x, out.dtype), multiply(ctx, weights, wide(v))))
    return False


_Record = Callable[[Lowering, LibraryProblem, ProblemFlags, Sequence[int], _Tensors], bool]

SUBSTITUTES: dict[int, _Record] = {MATMUL: _product, CONV: _convolution, ATTENTION: _attention}
"""For each kind of problem the function that records its steps; it returns whether there is nothing to compute."""
