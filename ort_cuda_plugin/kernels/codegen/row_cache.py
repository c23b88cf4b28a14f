"""Cache of a row between the passes of a reduction kernel, in registers or shared memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...model.ir import NARROW_FLOATS, DType
from ...program.expressions.scalar import Scalar, operands_first
from .source import register_type

MAX_SLOTS = 2  # maximum values per element that a kernel caches; more registers or shared memory would lower occupancy


@dataclass(frozen=True)
class RowCache:
    """Cached values of each element of a row: the slot of a value, the pass that stores it, the passes that load it."""

    slots: Mapping[Scalar, int]
    stores: Mapping[Scalar, int]
    loads: Mapping[Scalar, frozenset[int]]

    @property
    def count(self) -> int:
        return 1 + max(self.slots.values(), default=-1)

    @property
    def type(self) -> str:
        """Register type that all cached values have; "" for an empty cache."""
        return next((register_type(x.dtype) for x in self.slots), "")

    @property
    def itemsize(self) -> int:
        """Bytes of a cached value in a register."""
        return max((4 if x.dtype in NARROW_FLOATS else x.dtype.itemsize for x in self.slots), default=0)

    def loaded(self, walk: int) -> list[Scalar]:
        return [x for x, walks in self.loads.items() if walk in walks]

    def stored(self, walk: int) -> list[Scalar]:
        return [x for x, first in self.stores.items() if first == walk]


NO_CACHE = RowCache({}, {}, {})


def find_row_cache(walks: Sequence[Sequence[Scalar]], varies: Callable[[Scalar], bool]) -> RowCache:
    """Choose the values to cache. Pass i evaluates ``walks[i]``; ``varies`` tells which leaves differ by column.

    Of the values that several passes compute, the cache has the largest expressions. The cache has no products: the
    compiler may contract a multiplication and a following addition into an FMA, and caching would round the product.
    """
    by_column = find_by_column(walks, varies)
    computed: dict[Scalar, int] = {}
    loads: dict[Scalar, set[int]] = {}
    for number, roots in enumerate(walks):
        stack, seen = list(roots), set()
        while stack:
            x = stack.pop()
            if x in seen or not by_column[x]:
                continue
            seen.add(x)
            if computed.get(x, number) < number and _is_keepable(x):
                loads.setdefault(x, set()).add(number)
            elif x.op != "reduced":
                stack += x.operands
        for x in seen:
            computed.setdefault(x, number)
    slots: dict[Scalar, int] = {}
    free_from: list[int] = []
    for x in sorted(loads, key=computed.__getitem__):
        # A pass loads before it stores, so that the last pass that loads a slot's value can store another value there.
        slot = next((i for i, walk in enumerate(free_from) if walk <= computed[x]), len(free_from))
        free_from[slot : slot + 1] = [max(loads[x])]
        slots[x] = slot
    kept = RowCache(slots, {x: computed[x] for x in loads}, {x: frozenset(w) for x, w in loads.items()})
    has_one_type = len({register_type(x.dtype) for x in loads}) <= 1
    return kept if has_one_type and kept.count <= MAX_SLOTS else NO_CACHE


def find_by_column(walks: Sequence[Sequence[Scalar]], varies: Callable[[Scalar], bool]) -> dict[Scalar, bool]:
    """Return for each subexpression whether its value varies along the columns of a row."""
    known: dict[Scalar, bool] = {}
    for x in operands_first(root for roots in walks for root in roots):
        inner = x.op != "reduced" and any(known[operand] for operand in x.operands)
        known[x] = inner or x.op == "index" or (x.op == "leaf" and varies(x))
    return known


def _is_keepable(x: Scalar) -> bool:
    if x.op in ("neg", "cast"):
        return _is_keepable(x.operands[0])
    return x.op not in ("index", "mul") and x.dtype is not DType.BOOL
