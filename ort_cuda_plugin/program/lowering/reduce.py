"""Recording of reductions and row programs (reductions fused with elementwise work) as one step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..expressions.scalar import Scalar
from ..expressions.symbolic import Dim
from ..steps.row_program import Row
from ..steps.steps import Input, Output, Rows, used_inputs
from ..steps.tensor import Tensor
from .context import Lowering
from .elementwise import leaves_of, loadable
from .shapes import aligned, axes_of, broadcast_shapes


def reduce(
    ctx: Lowering, fn: Callable[[Row, Scalar], Scalar], x: Tensor, axes: Iterable[int], keepdims: bool = True
) -> Tensor:
    """Return x reduced by ``fn(row, element)`` along ``axes``, which get size 1, or disappear without ``keepdims``."""
    axes = frozenset(axes_of(axes, x.rank))
    (leaf,), row = leaves_of([x]), Row()
    expression = fn(row, leaf)
    kept = [1 if axis in axes else dim for axis, dim in enumerate(x.shape)]
    result = ctx.empty(kept, expression.dtype)
    _record(ctx, x.shape, axes, row, [(leaf, x)], [], [(expression, result)])
    if keepdims:
        return result
    return ctx.view(result, [dim for axis, dim in enumerate(x.shape) if axis not in axes])


def row_map(
    ctx: Lowering,
    fn: Callable[..., tuple[Sequence[Scalar], Sequence[Scalar]]],
    axes: Iterable[int],
    *tensors: Tensor,
) -> tuple[Tensor, ...]:
    """Return the results of a row program along ``axes`` of ``tensors``, which broadcast to each other.

    ``fn(row, *elements)`` returns (expressions per element, expressions per row). The results are in the same order: a
    result per element has the broadcast shape, a result per row has size 1 along ``axes``.
    """
    leaves, row = leaves_of(tensors), Row()
    per_element, per_row = fn(row, *leaves)
    shape = broadcast_shapes(ctx, *(x.shape for x in tensors))
    axes = frozenset(axes_of(axes, len(shape)))
    kept = [1 if axis in axes else dim for axis, dim in enumerate(shape)]
    elements = [(x, ctx.empty(shape, x.dtype)) for x in per_element]
    rows = [(x, ctx.empty(kept, x.dtype)) for x in per_row]
    placed = [aligned(ctx, x, shape) for x in tensors]
    _record(ctx, shape, axes, row, list(zip(leaves, placed, strict=True)), elements, rows)
    return tuple(tensor for _, tensor in elements + rows)


def _record(
    ctx: Lowering,
    shape: Sequence[Dim],
    axes: frozenset[int],
    row: Row,
    inputs: Sequence[Input],
    elements: Sequence[Output],
    rows: Sequence[Output],
) -> None:
    used = used_inputs(inputs, [x for x, _ in (*elements, *rows)])
    step = Rows(ctx.nodes, tuple(shape), loadable(ctx, used), tuple(elements), axes, row, tuple(rows))
    ctx.record(step)
