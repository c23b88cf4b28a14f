"""QOrdered operators: int8 matrices with one scale each, in the memory orders of cuBLASLt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import eq, floordiv, logical_or
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise
from ....program.lowering.reduce import row_map
from ....program.lowering.views import permute, reshape, unsqueeze
from ....program.steps.row_program import Row
from ... import requirements as require
from ...axes import normalize_axis
from ...layouts import as_number
from ...onnx.math.activation import gelu_erf
from ...onnx.math.elementwise import cast
from ...onnx.math.matmul import matrix_product
from ...onnx.nn.normalization import Outputs
from ...onnx.nn.quantization import shifted
from ...registry import FLOAT32, FLOAT_OR_HALF, INT8, F, Q, S, contrib_op
from .qlinear import code_of, real_of

COL, ROW, COL32 = 0, 1, 2
_WIDTH: Final = 32
"""Columns per tile of the order COL32."""


def check_order(order: int, *supported: int) -> None:
    require.that(order in range(5), "order", "be the number of a cuBLASLt memory order, 0 to 4", order)
    require.supported(order in supported, "attribute", "order", order, ", ".join(map(str, supported)))


def check_orders(rows: Sequence[int], columns: Sequence[int] = ()) -> None:
    """Check that the orders ``rows`` are row-major, and ``columns`` column-major."""
    for order, wanted in (*((order, ROW) for order in rows), *((order, COL) for order in columns)):
        check_order(order, wanted)


def from_order(ctx: Lowering, x: Tensor, order: int, *, inverse: bool = False) -> Tensor:
    """Convert matrices from memory order ``order`` to row-major order, or with ``inverse`` back."""
    if order == ROW:
        return x
    *batch, rows, columns = x.shape
    tiles, width = ([columns], []) if order == COL else ([floordiv(columns, _WIDTH)], [_WIDTH])
    parts = reshape(ctx, x, [*batch, rows, *tiles, *width] if inverse else [*batch, *tiles, rows, *width])
    last = len(batch)
    swapped = permute(ctx, parts, (*range(last), last + 1, last, *range(last + 2, parts.rank)))
    return swapped if swapped.shape == x.shape else reshape(ctx, swapped, x.shape)


def _reordered(ctx: Lowering, x: Tensor, before: int, after: int) -> Tensor:
    """Convert x from one memory order to another."""
    for order in (before, after):
        check_order(order, COL, ROW, COL32)
        if order == COL32 and x.rank:
            require.multiple_of(ctx, x.shape[-1], _WIDTH, "the last dimension of input in the order COL32")
    if before == after or x.rank < 2:
        return x
    return from_order(ctx, from_order(ctx, x, before), after, inverse=True)


@contrib_op("QuantizeWithOrder", F=FLOAT_OR_HALF, S=FLOAT32, Q=INT8)
def quantize_with_order(ctx: Lowering, x: F, scale: S, *, order_input: int, order_output: int) -> Tensor:
    real = cast(ctx, x, to=DType.FLOAT32.onnx)
    return _reordered(ctx, code_of(ctx, real, scale, None, DType.INT8), order_input, order_output)


@contrib_op("DequantizeWithOrder", Q=INT8, S=FLOAT32, F=FLOAT_OR_HALF)
def dequantize_with_order(
    ctx: Lowering, x: Q, scale: S, *, order_input: int, order_output: int, to: int
) -> Tensor:  # fmt: skip
    dtype = DType.of_attribute(to)
    require.that(dtype in FLOAT_OR_HALF, "to", "be float32 or float16", dtype.name)
    return cast(ctx, real_of(ctx, _reordered(ctx, x, order_input, order_output), scale, None), to=to)


@contrib_op("QOrderedGelu", Q=INT8, S=FLOAT32)
def qordered_gelu(ctx: Lowering, x: Q, scale_x: S, scale_y: S, *, order_X: int = ROW, order_Y: int = ROW) -> Tensor:
    """Compute Gelu of int8 codes; input and output have the same order."""
    require.that(order_X == order_Y, "order_Y", f"be order_X = {order_X}", order_Y)
    return code_of(ctx, elementwise(ctx, gelu_erf, real_of(ctx, x, scale_x, None)), scale_y, None, DType.INT8)


@contrib_op("QOrderedLayerNormalization", F=FLOAT_OR_HALF, S=FLOAT32, Q=INT8)
def qordered_layer_normalization(
    ctx: Lowering,
    x: Q,
    scale_x: S,
    scale: F,
    bias: F | None,
    scale_y: S,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    order_X: int = ROW,
    order_Y: int = ROW,
) -> Tensor:
    check_orders((order_X, order_Y))

    def program(row: Row, value: Scalar, factor: Scalar, *added: Scalar) -> Outputs:
        difference = value - row.mean(value)
        result = difference / s.sqrt(row.mean(difference * difference) + epsilon) * s.widen(factor)
        return [result + s.widen(added[0]) if added else result], []

    axes = range(normalize_axis(axis, x.rank), x.rank)
    affine = [scale] if bias is None else [scale, bias]
    for y in affine:
        require.shape(ctx, x.shape[axes.start :], **{"scale or bias": y})
    (result,) = row_map(ctx, program, axes, real_of(ctx, x, scale_x, None), *affine)
    return code_of(ctx, result, scale_y, None, DType.INT8)


@contrib_op("QOrderedMatMul", Q=INT8, S=FLOAT32)
def qordered_matmul(
    ctx: Lowering,
    a: Q,
    scale_a: S,
    b: Q,
    scale_b: S,
    scale_y: S,
    bias: S | None = None,
    c: Q | None = None,
    scale_c: S | None = None,
    *,
    order_A: int,
    order_B: int,
    order_Y: int,
) -> Tensor:
    """Return (a @ b * scale_a * scale_b + c * scale_c) / scale_y + bias as int8; only b is column-major."""
    check_orders((order_A, order_Y), (order_B,))
    require.rank((2, 3), A=a, B=b, C=c)
    require.all_or_none(C=c, scale_C=scale_c)
    total = matrix_product(ctx, shifted(ctx, a, None), shifted(ctx, from_order(ctx, b, COL), None))
    require.that(total.rank <= a.rank, "B", f"have at most the rank of A, {a.rank}", f"rank {b.rank}")
    if scale_b.rank == 0 or scale_b.size == 1:
        scale_b = as_number(ctx, scale_b)
    else:
        require.shape(ctx, b.shape[-1:], scale_B=scale_b)
    require.shape(ctx, b.shape[-1:], bias=bias)
    inputs = [as_number(ctx, scale_a), scale_b, as_number(ctx, scale_y), *([] if bias is None else [bias])]
    if c is not None and scale_c is not None:
        if c.rank < total.rank:
            c = unsqueeze(ctx, c, (0,))
        require.that(c.rank <= total.rank, "C", f"have at most the rank of A, {total.rank}", f"rank {c.rank}")
        for axis in range(total.rank):
            fits = eq(c.shape[axis], total.shape[axis])
            fits = logical_or(fits, eq(c.shape[axis], 1)) if axis < total.rank - 2 else fits
            expected = f"have the shape {list(total.shape)} of the product, or size 1 in its batch dimension"
            require.holds(ctx, fits, "C", expected, list(c.shape))
        inputs += [c, as_number(ctx, scale_c)]

    def result(value: Scalar, by_a: Scalar, by_b: Scalar, by_y: Scalar, *more: Scalar) -> Scalar:
        rest = list(more)
        sum_ = s.cast(value, DType.FLOAT32) * (by_a * by_b / by_y)
        if bias is not None:
            sum_ = sum_ + rest.pop(0)
        if rest:
            sum_ = sum_ + s.cast(rest[0], DType.FLOAT32) * (rest[1] / by_y)
        bounded = s.maximum(s.minimum(s.round_half_even(sum_), 127.0), -128.0)
        return s.cast(s.where(s.is_nan(bounded), 0.0, bounded), DType.INT8)

    return elementwise(ctx, result, total, *inputs)
