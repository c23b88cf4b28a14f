"""Folds whose elements count in their order: recurrences, and binary search in a sorted table."""

from __future__ import annotations

from collections.abc import Callable

from ort_cuda_plugin.kernels.elementwise.index_map import IndexMap
from ort_cuda_plugin.model.ir import DType
from ort_cuda_plugin.program.expressions import scalar as s
from ort_cuda_plugin.program.expressions.scalar import Scalar
from ort_cuda_plugin.program.steps.row_program import Reduction, Values


def in_order(initial: Values, step: Callable[[Values, Values], Values]) -> Reduction:
    """The fold of ``step`` from ``initial`` on, for one thread: it has no parts that threads could join."""

    def combine(a: Values, b: Values) -> Values:
        raise TypeError("the elements of this fold have an order")

    return Reduction(lambda dtypes: initial, step, combine)


def lower_bound(maps: IndexMap, count: int, is_less: Callable[[Scalar], Scalar]) -> Scalar:
    """The first of ``count`` sorted entries that is not less (int64), or the last one; ``is_less`` tells by index."""
    end = maps.dim(count - 1)

    def halve(bounds: Values, _: Values) -> Values:
        low, high = bounds
        middle = (low + high) >> 1
        less = is_less(middle)
        return s.where(less, s.minimum(middle + 1, end), low), s.where(less, high, middle)

    search = in_order((s.constant(0, DType.INT64), end), halve)
    return maps.fold(search, maps.dim(count.bit_length()), lambda i: (i,))[0]
