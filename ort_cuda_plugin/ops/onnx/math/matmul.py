"""Matrix operators: MatMul, Gemm, Det and Inverse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....kernels.block_algorithms.determinant import determinants
from ....kernels.block_algorithms.inverse import inverses
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import eq
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise_into
from ....program.lowering.multiply import multiply
from ....program.lowering.views import unsqueeze
from ....program.steps.steps import Conversion
from ... import requirements as require
from ...registry import FLOATS, NO_BFLOAT16, WIDE_INTS, T, attributes_of, contrib_op, op
from .elementwise import cast

PRODUCTS = FLOATS | WIDE_INTS


@op("MatMul", since=1, types={"T": PRODUCTS})
def matmul(ctx: Lowering, a: T, b: T) -> Tensor:
    return matrix_product(ctx, a, b)


def matrix_product(ctx: Lowering, a: Tensor, b: Tensor, finish: Callable[[Scalar], Scalar] | None = None) -> Tensor:
    """Return a @ b with the epilogue ``finish``; a vector is a row on the left and a column on the right."""
    require.least_rank(1, A=a, B=b)
    left, right = a, b
    if a.rank == 1:
        left = ctx.view(a, (1, *a.shape), (a.shape[0] * a.strides[0], *a.strides), a.offset)
    if b.rank == 1:
        right = ctx.view(b, (*b.shape, 1), (*b.strides, b.shape[0] * b.strides[0]), b.offset)
    result = multiply(ctx, left, right, finish=finish)
    if a.rank > 1 and b.rank > 1:
        return result
    rows, columns = () if a.rank == 1 else result.shape[-2:-1], () if b.rank == 1 else result.shape[-1:]
    return ctx.view(result, (*result.shape[:-2], *rows, *columns))


def affine(
    ctx: Lowering, x: Tensor, weights: Tensor, bias: Tensor | None, conversion: Conversion | None = None
) -> Tensor:
    """Return x @ weights + bias for weights [k, n] and bias [n]; ``conversion`` is the prologue of the weights."""
    require.rank(2, weights=weights)
    require.shape(ctx, weights.shape[1:], bias=bias)
    if bias is None:
        return multiply(ctx, x, weights, conversion=conversion)
    return multiply(ctx, x, weights, bias, finish=lambda total, b: total + s.widen(b), conversion=conversion)


@op("Gemm", since=7, types={"T": PRODUCTS})
def gemm(
    ctx: Lowering,
    a: T,
    b: T,
    c: T | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    if a.rank == 1 and not transA:  # a vector is a row, as in the CPU provider
        a = unsqueeze(ctx, a, (0,))
    require.rank(2, A=a, B=b)
    if transA:
        a = ctx.view(a, a.shape[::-1], a.strides[::-1], a.offset)
    if transB:
        b = ctx.view(b, b.shape[::-1], b.strides[::-1], b.offset)
    if not a.dtype.is_float and (alpha != 1.0 or (c is not None and beta != 1.0)):
        raise require.unsupported("attribute", "(alpha, beta) for integer inputs", (alpha, beta), "(1, 1)")

    def scaled(total: Scalar) -> Scalar:
        return total if alpha == 1.0 else total * alpha

    if c is None or beta == 0.0:
        return multiply(ctx, a, b, finish=scaled)
    require.broadcast(ctx, (a.shape[0], b.shape[1]), C=c)

    def added(total: Scalar, addend: Scalar) -> Scalar:
        addend = s.cast(addend, total.dtype)
        return scaled(total) + (addend if beta == 1.0 else addend * beta)

    return multiply(ctx, a, b, c, finish=added)


@op("Gemm", since=1, types={"T": FLOATS})
@attributes_of(gemm)
def gemm_1(ctx: Lowering, a: T, b: T, c: T, *, broadcast: int = 0, **attributes: Any) -> Tensor:
    """Compute Gemm; ``broadcast``, which permits c to broadcast, is ignored since c always may."""
    return gemm(ctx, a, b, c, **attributes)


# ---- determinants and inverses ----


def _matrices(ctx: Lowering, x: Tensor) -> Tensor:
    """Return a copy of x in the accumulation type, which a kernel may overwrite."""
    require.least_rank(2, X=x)
    require.holds(ctx, eq(x.shape[-1], x.shape[-2]), "X", "be square matrices", list(x.shape))
    matrices = ctx.empty(x.shape, s.accumulation_type(x.dtype))
    elementwise_into(ctx, lambda a: s.cast(a, matrices.dtype), matrices, x)
    return matrices


@op("Det", since=11, types={"T": FLOATS})
def det(ctx: Lowering, x: Tensor) -> Tensor:
    return cast(ctx, determinants(ctx, _matrices(ctx, x)), to=x.dtype.onnx)


@contrib_op("Inverse", T=NO_BFLOAT16)
def inverse(ctx: Lowering, x: Tensor) -> Tensor:
    return cast(ctx, inverses(ctx, _matrices(ctx, x)), to=x.dtype.onnx)
