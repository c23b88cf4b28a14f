"""Row programs: reductions along axes of tensors, fused with elementwise work before and after them.

A row program is a function of Scalars, as for `elementwise`, that may also reduce over the elements of a row::

    def normalized(row: Row, x: Scalar) -> Scalar:
        e = s.exp(x - row.reduce(MAX, x))
        return e / row.reduce(SUM, e)

A reduction has initial accumulators, a function that adds an element, and a function that combines two partial results.
The results of a reduction are leaves of further expressions. `ort_cuda_plugin.kernels.reduction.reduce` generates
kernels from row programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...model.ir import DType
from ..expressions import scalar as s
from ..expressions.scalar import Scalar, operands_first

Values = tuple[Scalar, ...]


@dataclass(frozen=True, eq=False)
class Reduction:
    """A reduction. ``initial(dtypes)`` returns the initial accumulators for elements of these types.

    ``step(accumulators, elements)`` adds an element, which consists of one or several values. ``combine(a, b)`` merges
    the accumulators of two parts of a row, in any order.
    """

    initial: Callable[[tuple[DType, ...]], Values]
    step: Callable[[Values, Values], Values]
    combine: Callable[[Values, Values], Values]


def _fold(initial: Callable[[DType], int | float], fn: Callable[[Scalar, Scalar], Scalar]) -> Reduction:
    return Reduction(
        lambda dtypes: (s.constant(initial(dtypes[0]), dtypes[0]),),
        lambda totals, elements: (fn(totals[0], elements[0]),),
        lambda a, b: (fn(a[0], b[0]),),
    )


def lowest(dtype: DType) -> int | float:
    """Return the lowest value of a type, -inf for floats."""
    if dtype.is_float:
        return float("-inf")
    return -(1 << (8 * dtype.itemsize - 1)) if dtype.short[0] == "i" else 0


def highest(dtype: DType) -> int | float:
    """Return the highest value of a type, inf for floats."""
    if dtype.is_float:
        return float("inf")
    return (1 << (8 * dtype.itemsize - (dtype.short[0] == "i"))) - 1


SUM = _fold(lambda dtype: 0, lambda a, b: a + b)
PRODUCT = _fold(lambda dtype: 1, lambda a, b: a * b)
MAX = _fold(lowest, s.maximum)
MIN = _fold(highest, s.minimum)


def _arg(better: Callable[[Scalar, Scalar], Scalar], initial: Callable[[DType], int | float], last: bool) -> Reduction:
    """Return argmin or argmax of elements (value, index), with accumulators (best, its index or -1). NaN is best."""

    def combine(a: Values, b: Values) -> Values:
        is_better, is_equal = better(b[0], a[0]), s.equal(a[0], b[0])
        if a[0].dtype.is_float:
            is_better = is_better | (s.is_nan(b[0]) & ~s.is_nan(a[0]))
            is_equal = is_equal | (s.is_nan(a[0]) & s.is_nan(b[0]))
        tie = is_equal & (b[1] >= 0) & ((a[1] < b[1]) if last else (b[1] < a[1]))
        take = (b[1] >= 0) & ((a[1] < 0) | is_better | tie)
        return s.where(take, b[0], a[0]), s.where(take, b[1], a[1])

    return Reduction(
        lambda dtypes: (s.constant(initial(dtypes[0]), dtypes[0]), s.constant(-1, DType.INT64)), combine, combine
    )


def arg_max(last: bool) -> Reduction:
    """Return the reduction of elements (value, index) to (maximum, index of its first or last occurrence)."""
    return _arg(lambda a, b: a > b, lowest, last)


def arg_min(last: bool) -> Reduction:
    """Return the reduction of elements (value, index) to (minimum, index of its first or last occurrence)."""
    return _arg(lambda a, b: a < b, highest, last)


@dataclass(frozen=True, eq=False)
class Stage:
    """A reduction of ``elements`` in a row program.

    Its results are Scalars with ``op="reduced"`` and ``value=(stage, index of the accumulator)``.
    """

    reduction: Reduction
    initial: Values
    elements: Values


class Row:
    """The first argument of a row program; its methods declare the reductions over a row."""

    def __init__(self) -> None:
        self.index = Scalar(DType.INT64, "index")
        """Index of the element in its row."""
        self.count = Scalar(DType.INT64, "count")
        """Number of elements of a row."""

    def reduce(self, reduction: Reduction, *elements: Scalar) -> Scalar:
        """Return the first accumulator of ``reduction`` over the elements of the row."""
        return self.reduce_all(reduction, *elements)[0]

    def reduce_all(self, reduction: Reduction, *elements: Scalar) -> Values:
        """Return all accumulators of ``reduction`` over the elements of the row."""
        initial = reduction.initial(tuple(x.dtype for x in elements))
        stage = Stage(reduction, initial, elements)
        return tuple(Scalar(x.dtype, "reduced", elements, (stage, i)) for i, x in enumerate(initial))

    def mean(self, x: Scalar) -> Scalar:
        """Return the arithmetic mean of a float over the row, computed in float32 for 16-bit types."""
        x = s.widen(x)
        return self.reduce(SUM, x) / s.cast(self.count, x.dtype)


def grouped_stages(expressions: Iterable[Scalar]) -> list[list[Stage]]:
    """Return the reductions that the expressions need, in groups; a group depends on earlier groups only."""
    depths: dict[Stage, int] = {}
    known: dict[Scalar, int] = {}
    pending = list(expressions)
    for expression in pending:
        for x in operands_first([expression], known):
            known[x] = max((known[operand] for operand in x.operands), default=0)
            if x.op == "reduced":
                depths[x.value[0]] = known[x]
                known[x] += 1
    groups = max((known[x] for x in pending), default=0)
    return [[stage for stage, depth in depths.items() if depth == group] for group in range(groups)]
