"""Reductions along axes, ArgMax, ArgMin, and cumulative sums and products."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Sequence

import numpy as np

from ....kernels.scan_sort.scan import scan
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.fold import NotFoldable
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import Dim, eq, le, logical_or, lt, product, sym_max, sym_min
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise
from ....program.lowering.host import HostArray, on_host
from ....program.lowering.reduce import reduce
from ....program.steps.row_program import MAX, MIN, PRODUCT, SUM, Reduction, Row, arg_max, arg_min
from ... import requirements as require
from ...axes import axes_count, axis_of_input, normalize_axis
from ...registry import ARITHMETIC, BOOL, FLOATS, INDICES, WIDE_INTS, HostTensor, T, op

RowFunction = Callable[[Row, Scalar], Scalar]
Combine = Callable[[Dim, Dim], Dim]


def reduction(
    name: str,
    axes_input_since: int,
    fn: RowFunction,
    element: Callable[[Scalar], Scalar] = lambda x: x,
    types: frozenset[DType] = FLOATS | WIDE_INTS,
    empty_fn: RowFunction | None = None,
    combine: Combine | None = None,
) -> None:
    """Register a reduction by ``fn``; ``element`` computes the result of a row with one element.

    ``empty_fn`` replaces ``fn`` if rows may be empty. ``combine`` reduces two sizes: with it, the host reduces int64
    tensors that it knows, such as shapes. ``axes`` is an attribute before version ``axes_input_since`` and an input
    from it on.
    """

    def run(ctx: Lowering, x: Tensor, axes: tuple[Dim, ...] | None, keepdims: int, noop: int) -> Tensor:
        if not axes and noop:
            return elementwise(ctx, element, x)
        # Duplicate axes count once, and a scalar has an axis 0, as in the CPU provider.
        named = {normalize_axis(axis, max(x.rank, 1)) for axis in axes} if axes else range(x.rank)
        if x.rank == 0:
            return elementwise(ctx, element, x)
        has_elements = empty_fn is None or ctx.settled(le(1, product(x.shape[axis] for axis in named)))
        chosen = fn if has_elements or empty_fn is None else empty_fn
        if combine is None or x.dtype is not DType.INT64 or x.host is None:
            return reduce(ctx, chosen, x, named, keepdims != 0)
        shape = _reduced_shape(x.shape, named, keepdims != 0)
        on_sizes = _on_sizes(combine, tuple(named), shape)
        return on_host(ctx, on_sizes, (x,), shape, x.dtype, lambda: reduce(ctx, chosen, x, named, keepdims != 0))

    @op(name, since=1, types={"T": types})
    def by_attribute(ctx: Lowering, data: Tensor, *, axes: tuple[int, ...] | None = None, keepdims: int = 1) -> Tensor:
        return run(ctx, data, axes, keepdims, 0)

    @op(name, since=axes_input_since, types={"T": types})
    def by_input(
        ctx: Lowering, data: T, axes: HostTensor | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
    ) -> Tensor:
        values = None if axes is None else ctx.host_constants(axes, "axes", range(axes_count(axes)))
        return run(ctx, data, values, keepdims, noop_with_empty_axes)


def _reduced_shape(shape: Sequence[Dim], axes: Container[int], keepdims: bool) -> list[Dim]:
    return [1 if axis in axes else dim for axis, dim in enumerate(shape) if keepdims or axis not in axes]


def _on_sizes(combine: Combine, axes: tuple[int, ...], shape: Sequence[Dim]) -> Callable[[HostArray], HostArray]:
    """Return a function that reduces an array of sizes along ``axes`` to ``shape``, for `on_host`.

    The function raises NotFoldable if it would reduce no elements.
    """
    reduction = np.frompyfunc(combine, 2, 1, identity=None)  # with an identity of None it accepts several axes

    def reduced(values: HostArray) -> HostArray:
        if not values.size:
            raise NotFoldable
        result: HostArray = reduction.reduce(values, axis=axes, keepdims=True)
        return result.reshape([operator.index(dim) for dim in shape])

    return reduced


def _mean(row: Row, x: Scalar, count: Scalar | None = None) -> Scalar:
    """Return the sum divided by ``count``, by default the number of elements."""
    count = row.count if count is None else count
    if x.dtype.is_integer:
        return s.trunc_divide(row.reduce(SUM, x), s.cast(count, x.dtype))
    total = row.reduce(SUM, s.widen(x))
    return s.cast(total / s.cast(count, total.dtype), x.dtype)


def _float(x: Scalar) -> Scalar:
    """Convert x to a float type that is at least float32."""
    return s.cast(x, DType.FLOAT64) if x.dtype.is_integer else s.widen(x)


def _sum_of(element: Callable[[Scalar], Scalar], finish: Callable[[Scalar], Scalar] = lambda x: x) -> RowFunction:
    """Return the reduction finish(sum(element(x))), computed in a float type."""
    return lambda row, x: s.cast(finish(row.reduce(SUM, element(_float(x)))), x.dtype)


def _log_sum_exp(row: Row, x: Scalar) -> Scalar:
    value = _float(x)
    largest = row.reduce(MAX, value)
    # An infinite maximum would yield inf - inf.
    shift = s.where(s.equal(s.absolute(largest), float("inf")), 0.0, largest)
    return s.cast(s.log(row.reduce(SUM, s.exp(value - shift))) + shift, x.dtype)


reduction("ReduceSum", 13, lambda row, x: row.reduce(SUM, x), types=ARITHMETIC, combine=operator.add)
# The mean of an empty row is 0, as in the CPU provider.
reduction("ReduceMean", 18, _mean, empty_fn=lambda row, x: _mean(row, x, s.maximum(row.count, 1)))
reduction("ReduceProd", 18, lambda row, x: row.reduce(PRODUCT, x), types=ARITHMETIC, combine=operator.mul)
reduction("ReduceL1", 18, lambda row, x: row.reduce(SUM, s.absolute(x)), s.absolute)
reduction("ReduceL2", 18, _sum_of(lambda x: x * x, s.sqrt), s.absolute)
reduction("ReduceSumSquare", 18, lambda row, x: row.reduce(SUM, x * x), lambda x: x * x)
reduction("ReduceLogSum", 18, _sum_of(lambda x: x, s.log), lambda x: s.cast(s.log(_float(x)), x.dtype))
reduction("ReduceLogSumExp", 18, _log_sum_exp)


def _extreme(name: str, arithmetic: RowFunction, combine: Combine) -> None:
    def fn(row: Row, x: Scalar) -> Scalar:
        # Compare booleans as uint8, which warp shuffles support; its minimum 0 makes ReduceMax of an empty row False.
        if x.dtype is DType.BOOL:
            return s.cast(arithmetic(row, s.cast(x, DType.UINT8)), DType.BOOL)
        return arithmetic(row, x)

    reduction(name, 18, fn, types=ARITHMETIC | BOOL, combine=combine)


_extreme("ReduceMax", lambda row, x: row.reduce(MAX, x), sym_max)
_extreme("ReduceMin", lambda row, x: row.reduce(MIN, x), sym_min)


def _arg(name: str, find: Callable[[bool], Reduction]) -> Callable[..., Tensor]:
    @op(name, since=1, types={"T": ARITHMETIC})
    def function(ctx: Lowering, x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
        axis = normalize_axis(axis, max(x.rank, 1))
        if x.rank == 0:  # the index in a scalar is 0, as in the CPU provider
            return ctx.constant(np.array(0, np.int64))
        rest = product(dim for index, dim in enumerate(x.shape) if index != axis)
        has_rows_with_elements = logical_or(lt(0, x.shape[axis]), eq(rest, 0))
        require.holds(ctx, has_rows_with_elements, "data", f"have elements along axis {axis}", "none")
        first = find(bool(select_last_index))
        return reduce(ctx, lambda row, e: row.reduce_all(first, e, row.index)[1], x, [axis], keepdims != 0)

    return function


argmax = _arg("ArgMax", arg_max)
_arg("ArgMin", arg_min)


def _cumulative(name: str, since: int, reduction: Reduction) -> None:
    @op(name, since=since, types={"T": FLOATS | WIDE_INTS, "T2": INDICES})
    def function(ctx: Lowering, x: T, axis: HostTensor, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
        at = axis_of_input(ctx, axis, x.rank, "axis")
        return scan(ctx, reduction, x, at, exclusive=bool(exclusive), reverse=bool(reverse))


_cumulative("CumSum", 11, SUM)
_cumulative("CumProd", 26, PRODUCT)
