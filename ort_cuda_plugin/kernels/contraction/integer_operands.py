"""Integer GEMM and convolution: tensor cores multiply the 8-bit codes of quantized operands.

An operand's element is (code - zero point) * scale. If scales and zero points are constant along k, then ``sum(a * b) =
scale_a * scale_b * (sum(code_a * code_b) - zero_a * sum(code_b))`` for weights b with zero point 0. Integer
accumulators are exact, and the epilogue rounds once. Dequantizing before the GEMM would round each operand and product.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from ...model.ir import DType
from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar, reachable
from ...program.lowering.context import Lowering, Tensor
from ...program.lowering.elementwise import elementwise
from ...program.lowering.reduce import reduce
from ...program.steps.row_program import SUM
from ...program.steps.steps import Contract, Conversion, Convolve, Input, Substitution, Sums
from ...program.steps.tensor import Buffer, BufferKind
from .operand_axes import axes_of_elements, over_result, weights_axis

AnySums = TypeVar("AnySums", bound=Sums)

MAX_DEPTH = 1 << 16
"""Maximum k for which the int32 sum of products of a byte of the input and an int8 weight cannot overflow."""
PIECE = 16
"""Codes in a 16-byte chunk; copies of aligned chunks need a k that is a multiple of this number."""
KINDS = {DType.INT8: "i8", DType.UINT8: "u8"}
"""Operand type of the mma instruction, by the type of the codes of the first operand."""
_middle = 128
"""Zero point that uint8 weights must have: subtracting it from the codes gives int8 weights with zero point 0."""


@dataclass(frozen=True)
class Affine:
    """Dequantization of an operand: (code - ``zero``) * ``scale``. ``zero`` is int32, None for 0; a scale of None is 1.

    ``inputs`` are the leaves of both expressions and their tensors. ``known`` is the zero point if it is one constant
    number, else None.
    """

    zero: Scalar | None
    scale: Scalar | None
    inputs: tuple[Input, ...]
    known: int | None


@dataclass(frozen=True)
class IntegerForm:
    """Dequantizations of both operands of an integer contraction, and the operand ``kind`` of its mma instruction."""

    kind: str
    a: Affine
    b: Affine

    @property
    def zero_codes(self) -> Tensor | None:
        """The zero point of the first operand as a one-element tensor of the codes' type; None if it is 0."""
        return None if self.a.known == 0 else _codes(self.a)


def integer_form(step: Sums) -> IntegerForm | None:
    """Return the dequantizations of a contraction's operands; None if tensor cores cannot multiply the operands' codes.

    The weights must be constant, and quantized symmetrically: int8 after the subtraction of their zero point. Scales
    and the input's zero point must not vary along k. Both operands must have a scale, or neither. Transposed
    convolutions and GEMMs with a low-rank product are not supported.
    """
    if not isinstance(step, Contract | Convolve) or (isinstance(step, Contract) and step.low_rank is not None):
        return None
    (x, w), (a, b) = step.operands, (_affine(conversion) for conversion in step.conversions)
    if a is None or b is None or (a.scale is None) != (b.scale is None) or not w.is_constant:
        return None
    if step.total.dtype is not (DType.INT32 if a.scale is None else DType.FLOAT32):
        return None
    if b.known != (0 if w.dtype is DType.INT8 else _middle):
        return None
    if a.known != 0 and _codes(a) is None:
        return None
    if isinstance(step, Convolve):
        outer, own = None, 0
        if step.channel_axes != 1 or step.transposed:
            return None
    else:
        outer, own = x.rank - 2, w.rank - 1
    if not all(axes_of_elements(y) <= {outer} for _, y in a.inputs) or not all(
        axes_of_elements(y) <= {own} for _, y in b.inputs
    ):
        return None
    return IntegerForm(KINDS[x.dtype], a, b)


def integer_step(ctx: Lowering, step: Sums, form: IntegerForm) -> Sums:
    """Return the step that multiplies codes, with int32 accumulators.

    Launches the kernels that convert uint8 weights to int8 and compute the weights' column sums. Constant folding moves
    these launches out of the plan.
    """
    w = step.operands[1]
    if w.dtype is DType.UINT8:
        w = elementwise(ctx, lambda code: s.cast(s.cast(code, DType.INT32) - _middle, DType.INT8), w)
    sums = None
    if form.a.known != 0:
        along = [axis for axis in range(w.rank) if axis != weights_axis(step)]
        sums = reduce(ctx, lambda row, code: row.reduce(SUM, s.cast(code, DType.INT32)), w, along)
    return integer_epilogue(replace(step, operands=(step.operands[0], w)), form, sums)


def integer_epilogue(step: AnySums, form: IntegerForm, sums: Tensor | None = None) -> AnySums:
    """Return the step with an epilogue for integer accumulators, which applies zero points and scales.

    ``sums`` are the weights' column sums. A caller that only estimates the step's time needs none.
    """
    w, total = step.operands[1], Scalar(DType.INT32, "leaf")
    (a, a_inputs), (b, b_inputs) = _over_results(step, 0, form.a), _over_results(step, 1, form.b)
    inputs = [*step.inputs, *a_inputs, *b_inputs]
    value = total
    if form.a.known != 0:
        assert a.zero is not None
        if sums is None:
            shape = [dim if axis == weights_axis(step) else 1 for axis, dim in enumerate(w.shape)]
            sums = Tensor(DType.INT32, shape, Buffer(BufferKind.SCRATCH, 0))
        leaf = Scalar(DType.INT32, "leaf")
        inputs.append((leaf, over_result(step, 1, sums)))
        value = value - a.zero * leaf
    if a.scale is not None and b.scale is not None:
        value = s.cast(value, DType.FLOAT32) * (a.scale * b.scale)
    changed = Substitution({step.total: value})
    outputs = tuple((changed(y), out) for y, out in step.outputs)
    used = reachable(y for y, _ in outputs)
    kept = tuple((leaf, y) for leaf, y in inputs if leaf in used)
    return replace(step, conversions=(None, None), total=total, inputs=kept, outputs=outputs)


def _affine(conversion: Conversion | None) -> Affine | None:
    """Match a prologue as the dequantization of 8-bit codes; None if it is another conversion."""
    if conversion is None or conversion.leaf.dtype not in KINDS or conversion.bits:
        return None
    value, leaf, scale = conversion.value, conversion.leaf, None
    if value.dtype is DType.FLOAT32 and value.op == "mul":
        value, scale = value.operands if leaf in reachable(value.operands[:1]) else value.operands[::-1]
        value = value.operands[0] if value.op == "cast" else value
    zero = None
    if value.dtype is DType.INT32 and value.op == "sub":
        value, zero = value.operands
    if value.dtype is not DType.INT32 or value.op != "cast" or value.operands[0] is not leaf:
        return None
    if leaf in reachable(x for x in (zero, scale) if x is not None):
        return None
    return Affine(zero, scale, conversion.inputs, _known(zero, conversion.inputs))


def _known(zero: Scalar | None, inputs: Iterable[Input]) -> int | None:
    """Return the zero point if it is one constant number for all elements, else None."""
    if zero is None:
        return 0
    tensors = dict(inputs)
    x = tensors.get(zero.operands[0]) if zero.op == "cast" else None
    if x is None:
        return None
    distinct = [1 if stride == 0 else dim for dim, stride in zip(x.shape, x.strides, strict=True)]
    contents = Tensor(x.dtype, distinct, x.buffer, strides=x.strides, offset=x.offset).constant
    if contents is None or contents.size == 0 or (contents != contents.flat[0]).any():
        return None
    return int(contents.flat[0])


def _codes(x: Affine) -> Tensor | None:
    """Return the zero point as a tensor of one element; None if it has several, or is not converted from 8 bits."""
    if x.zero is None or x.zero.op != "cast":
        return None
    y = dict(x.inputs).get(x.zero.operands[0])
    if y is None or y.dtype not in KINDS or axes_of_elements(y):
        return None
    return Tensor(y.dtype, (), y.buffer, offset=y.offset)


def _over_results(step: Sums, number: int, x: Affine) -> tuple[Affine, list[Input]]:
    """Return an operand's `Affine` with new leaves, and the inputs of these, broadcast over the step's result."""
    leaves = {leaf: Scalar(leaf.dtype, "leaf") for leaf, _ in x.inputs}
    changed = Substitution(leaves)
    inputs = [(leaves[leaf], over_result(step, number, y)) for leaf, y in x.inputs]
    zero, scale = (None if y is None else changed(y) for y in (x.zero, x.scale))
    return replace(x, zero=zero, scale=scale), inputs
