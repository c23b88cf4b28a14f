"""Sequential folds: recurrences, and binary search in a sorted table."""

from __future__ import annotations

from collections.abc import Callable

from ..kernels.elementwise.index_map import IndexMap
from ..model.ir import DType
from ..program.expressions import scalar as s
from ..program.expressions.scalar import Scalar
from ..program.steps.row_program import Reduction, Values


def in_order(initial: Values, step: Callable[[Values, Values], Values]) -> Reduction:
    """Return the reduction that applies ``step`` to the elements in order, from ``initial`` on, in one thread."""

    def combine(a: Values, b: Values) -> Values:
        raise TypeError("a sequential fold runs in one thread, and cannot combine partial results. Report the model")

    return Reduction(lambda dtypes: initial, step, combine)


def lower_bound(maps: IndexMap, count: int, is_less: Callable[[Scalar], Scalar]) -> Scalar:
    """Return the index (int64) of the first of ``count`` sorted entries that is not less than a value, else the last.

    ``is_less(index)`` returns whether the entry at an index is less than the searched value.
    """
    end = maps.dim(count - 1)

    def halve(bounds: Values, _: Values) -> Values:
        low, high = bounds
        middle = (low + high) >> 1
        less = is_less(middle)
        return s.where(less, s.minimum(middle + 1, end), low), s.where(less, high, middle)

    search = in_order((s.constant(0, DType.INT64), end), halve)
    return maps.fold(search, maps.dim(count.bit_length()), lambda i: (i,))[0]
