"""Copies for cuBLASLt calls: operands with several batch strides, such as [batch, heads, m, k], get one batch stride.

cuBLASLt supports only one stride from matrix to matrix. For large GEMMs, the plugin copies operands with more strides
before the call, and results with more strides after it.
"""

from __future__ import annotations

from dataclasses import replace

from ...model.ir import DType
from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import hint, product
from ...program.lowering.context import Lowering
from ...program.lowering.elementwise import copy_of
from ...program.lowering.shapes import collapse
from ...program.lowering.views import transpose_matrices
from ...program.steps.steps import Contract, Input, Map, Output
from ...program.steps.tensor import Tensor
from .library_calls import call_cublaslt

MUCH_WORK = 1 << 22
"""Minimum multiply-adds of a GEMM for which copies pay off (estimate, not measured)."""


def call_with_dense_batches(ctx: Lowering, step: Contract) -> bool:
    """Record copies and a call of cuBLASLt; return False if the copies do not pay off, or the call is not possible."""
    a = step.a
    if "cublaslt" not in ctx.device.libraries or not a.dtype.is_float or a.dtype is DType.FLOAT64:
        return False
    if len(step.batch) < 2 or hint(product(step.shape)) * hint(a.shape[-1]) < MUCH_WORK:
        return False
    if any(x.rank != len(step.shape) or x.shape[:-2] != step.batch for x in step.operands):
        return False
    with ctx.recording() as made:
        operands = tuple(_dense(ctx, x) for x in step.operands)
        outputs: list[Output] = []
        copies: list[tuple[Tensor, Tensor]] = []
        for value, y in step.outputs:
            if len(collapse(step.batch, [y.strides[: len(step.batch)]])[0]) > 1:
                copies.append((ctx.empty(step.shape, y.dtype), y))
                y = copies[-1][0]
            outputs.append((value, y))
        called = call_cublaslt(ctx, replace(step, operands=operands, outputs=tuple(outputs)))
        for source, target in copies:
            leaf = Scalar(source.dtype, "leaf")
            inputs: tuple[Input, ...] = ((leaf, source),)
            ctx.record(Map(step.nodes, step.shape, inputs, ((leaf, target),)))
    if called:
        ctx.trace.steps += made
    return called


def _dense(ctx: Lowering, x: Tensor) -> Tensor:
    """Return x if one stride leads from each matrix to the next, else a copy with the same contiguous axis."""
    batch = x.rank - 2
    if len(collapse(x.shape[:batch], [x.strides[:batch]])[0]) <= 1:
        return x
    if x.strides[-1] == 1 or x.strides[-2] != 1:
        return copy_of(ctx, x)
    return transpose_matrices(ctx, copy_of(ctx, transpose_matrices(ctx, x)))
