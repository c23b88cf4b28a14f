"""Recording of GEMM steps."""

from __future__ import annotations

from collections.abc import Callable

from ..expressions import scalar as s
from ..expressions.scalar import Scalar
from ..expressions.symbolic import eq
from ..steps.steps import Contract, Conversion, used_inputs
from ..steps.tensor import Tensor
from .context import Lowering
from .elementwise import loadable
from .shapes import aligned, broadcast_shapes


def multiply(
    ctx: Lowering,
    a: Tensor,
    b: Tensor,
    *others: Tensor,
    finish: Callable[..., Scalar] | None = None,
    conversion: Conversion | None = None,
) -> Tensor:
    """Return a @ b for a [batch..., m, k], b [batch..., k, n] of any strides; batches broadcast.

    ``finish(total, *elements)`` is the epilogue, by default none: a function of the accumulator ``total`` and of the
    elements of ``others``, which broadcast to the result. ``conversion`` is the prologue of b. Raises
    InvalidModel if the inner dimensions differ; if they are unknown now, a Run in which they differ fails.
    """
    ctx.require(
        eq(a.shape[-1], b.shape[-2]),
        f"the inner dimensions of the two matrices differ: got shapes {list(a.shape)} and {list(b.shape)}",
    )
    shape = (*broadcast_shapes(ctx, a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    total = Scalar(s.accumulation_type(a.dtype) if a.dtype.is_float else a.dtype, "leaf")
    leaves = [Scalar(x.dtype, "leaf") for x in others]
    value = total if finish is None else finish(total, *leaves)
    core = s.cast(value, a.dtype)
    out = ctx.empty(shape, a.dtype)
    if conversion is None:
        a, b = _before_widening(ctx, a, b)
    placed = [aligned(ctx, x, shape) for x in others]
    inputs = loadable(ctx, used_inputs(zip(leaves, placed, strict=True), [core]))
    a, b = ctx.materialize(a), ctx.materialize(b)
    conversions = (None, conversion)
    step = Contract(ctx.nodes, shape, inputs, ((core, out),), operands=(a, b), total=total, conversions=conversions)
    ctx.record(step)
    return out


def _before_widening(ctx: Lowering, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 16-bit tensors that a and b are float32 copies of, else a and b.

    A product of 16-bit elements is exact in float32, and its accumulators are float32: the results are the same.
    """
    narrow = ctx.before_widening(a), ctx.before_widening(b)
    if narrow[0] is None or narrow[1] is None or narrow[0].dtype is not narrow[1].dtype:
        return a, b
    return narrow[0], narrow[1]
