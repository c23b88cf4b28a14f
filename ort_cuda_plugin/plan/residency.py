"""Weight residency: chooses which weights of a cluster stay in device memory, if a budget does not permit all of them.

A streamed byte costs the same time on the host-to-device link for each weight. So resident weights fill the budget as
well as possible, and these rules decide between weights:

- A copy has a fixed cost: weights up to `SMALL` stay resident.
- A streamed weight occupies the ring (`streaming`) from the first record that reads it to the last one. If they are
  far apart, the weight stays resident instead.
- A copy is hidden if other records run meanwhile. So the first weights stay resident, and the streamed ones are spread
  evenly over the rest of the plan: the link is then busy throughout the Run.

If the budget permits, the ring has room for the weights that are in use at once and for one more, which is uploaded
while they are in use.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from .streaming import WeightUse, aligned, largest_need, lay_out

SMALL = 64 * 1024
"""Bytes up to which a weight's copy takes little longer than starting the copy."""


class BudgetTooSmall(Exception):
    """The budget has no room for the ring.

    ``needed`` is a number of bytes below which no budget suffices. Larger budgets may fail as well: `least_budget`
    finds one that suffices. ``record`` is the index of the record that reads the most weights at once; None: unknown.
    """

    def __init__(self, needed: int, record: int | None) -> None:
        super().__init__(f"{needed} bytes")
        self.needed = needed
        self.record = record


@dataclass(frozen=True)
class PlanUses:
    """The weights that a plan reads, sorted by first use, and the `segment_starts` of the plan."""

    uses: Sequence[WeightUse]
    starts: Sequence[int] = (0,)

    def fits(self, resident: Collection[int], nbytes: Mapping[int, int], budget: int) -> bool:
        """Return whether the ring beside the ``resident`` weights has room for the other weights of the plan."""
        held = sum(aligned(nbytes[number]) for number in resident)
        kept = set(resident)
        streamed = [use for use in self.uses if use.number not in kept]
        return lay_out(streamed, max(budget - held, 0), self.starts) is not None

    def too_small(self, resident: Collection[int], budget: int) -> BudgetTooSmall:
        """Return the error of a budget with which the plan does not fit."""
        _, record = largest_need(use for use in self.uses if use.number not in resident)
        return BudgetTooSmall(budget + 1, record)


@dataclass(frozen=True)
class Residency:
    """``resident`` are the numbers of the weights in device memory, in the order in which they were chosen.

    The first ``num_forced`` of them cannot be streamed, or need a larger ring than the budget permits.
    """

    resident: tuple[int, ...]
    num_forced: int


def choose(
    nbytes: Mapping[int, int], fixed: Collection[int], plans: Sequence[Sequence[WeightUse]], budget: int
) -> Residency:
    """Choose the resident weights among ``nbytes`` (number to bytes) for a budget in bytes.

    The weights ``fixed`` cannot be streamed. ``plans`` has the uses of each plan, sorted by first use.

    Raises: BudgetTooSmall: the budget has no room for the ring.
    """
    sizes = {number: aligned(size) for number, size in nbytes.items()}
    if sum(sizes.values()) <= budget:
        return Residency(tuple(sizes), len(sizes))
    forced, is_doubled = _forced(sizes, fixed, plans, budget)
    resident = dict.fromkeys(forced)
    while True:
        rest = {number: size for number, size in sizes.items() if number not in resident}
        ring, _ = _need(plans, rest)
        if is_doubled:
            ring += max(rest.values(), default=0)
        room = budget - ring - sum(sizes[number] for number in resident)
        more = _fill(rest, plans, room)
        if not more:
            return Residency(tuple(resident), len(forced))
        resident.update(dict.fromkeys(more))  # the ring for the remaining weights may be smaller now


def reside(nbytes: Mapping[int, int], fixed: Collection[int], plans: Sequence[PlanUses], budget: int) -> Residency:
    """Choose like `choose`, but stream more weights, the last chosen first, until the ring with its gaps has room.

    `choose` assumes a ring without gaps between the weights.

    Raises: BudgetTooSmall: the budget has no room for the ring.
    """
    found = choose(nbytes, fixed, [plan.uses for plan in plans], budget)
    resident = list(found.resident)
    while (unfit := next((plan for plan in plans if not plan.fits(resident, nbytes, budget)), None)) is not None:
        if len(resident) == found.num_forced:
            raise unfit.too_small(resident, budget)
        resident.pop()
    return Residency(tuple(resident), found.num_forced)


def least_budget(attempt: Callable[[int], object], too_small: int, enough: int) -> int:
    """Return the least budget for which ``attempt`` raises no BudgetTooSmall, by bisection.

    ``too_small`` is a budget for which it raises the error, ``enough`` one for which it does not. If larger budgets can
    fail as well, the result is one budget that suffices while one byte less does not.
    """
    while enough - too_small > 1:
        middle = (too_small + enough) // 2
        try:
            attempt(middle)
        except BudgetTooSmall:
            too_small = middle
        else:
            enough = middle
    return enough


def _need(plans: Sequence[Sequence[WeightUse]], streamed: Collection[int]) -> tuple[int, int]:
    """Return the maximum bytes of ``streamed`` weights that a plan needs at once, and the record where that happens."""
    return max((largest_need(use for use in uses if use.number in streamed) for uses in plans), default=(0, 0))


def _forced(
    sizes: Mapping[int, int], fixed: Collection[int], plans: Sequence[Sequence[WeightUse]], budget: int
) -> tuple[list[int], bool]:
    """Return the weights that must be resident, and whether the ring has room for the next upload as well.

    Weights larger than a limit must be resident, because a ring with room for them would take too much of the budget.
    The limit is the smallest one with which the ring and the weights that must be resident fit into the budget.
    """
    limits = sorted({size for number, size in sizes.items() if number not in fixed})
    rings = []
    for limit in limits:
        forced = [number for number, size in sizes.items() if number in fixed or size > limit]
        least, record = _need(plans, sizes.keys() - set(forced))
        rings.append((forced, sum(sizes[number] for number in forced), least, limit, record))
    for forced, held, least, limit, _ in rings:
        if held + least + limit <= budget:
            return forced, True
    for forced, held, least, _, _ in rings:
        if held + least <= budget:
            return forced, False
    needed, record = min(
        ((held + least, record) for _, held, least, _, record in rings), default=(sum(sizes.values()), 0)
    )
    raise BudgetTooSmall(needed, record)


def _fill(sizes: Mapping[int, int], plans: Sequence[Sequence[WeightUse]], room: int) -> list[int]:
    """Return the weights among ``sizes`` that fill ``room`` bytes, in the order in which they are chosen."""
    chosen: dict[int, None] = {}
    left = room

    def add(number: int) -> bool:
        nonlocal left
        if number in chosen or sizes[number] > left:
            return False
        chosen[number] = None
        left -= sizes[number]
        return True

    uses = _first_uses(plans, sizes)
    begins = sorted(use.first for use in uses)
    for number, size in sizes.items():
        if size <= SMALL:
            add(number)
    for use in sorted(uses, key=lambda use: use.first - use.last):
        if bisect_left(begins, use.last) > bisect_right(begins, use.first):  # other weights are first read in between
            add(use.number)
    spread = [use.number for use in uses if use.number not in chosen]
    total = sum(sizes[number] for number in spread)
    share = max(0.0, 1 - left / total) if total else 0.0
    owed = 0.0  # bytes by which the streamed weights so far fall short of their share
    for number in spread:
        owed += share * sizes[number]
        if owed >= sizes[number] or not add(number):
            owed -= sizes[number]
    for number in sorted(sizes, key=lambda number: -sizes[number]):
        add(number)
    return _exchanged(list(chosen), sizes, left)


def _first_uses(plans: Sequence[Sequence[WeightUse]], sizes: Mapping[int, int]) -> list[WeightUse]:
    """Return a use of each weight, from the first plan that reads it, in the order of the plans."""
    found: dict[int, WeightUse] = {}
    for uses in plans:
        for use in uses:
            if use.number in sizes:
                found.setdefault(use.number, use)
    return list(found.values())


def _exchanged(chosen: list[int], sizes: Mapping[int, int], room: int) -> list[int]:
    """Replace chosen weights by larger weights that are not chosen, while the difference fits into ``room`` bytes."""
    while room > 0:
        inside = set(chosen)
        outside = {size: number for number, size in sizes.items() if number not in inside}
        positions = {sizes[number]: position for position, number in enumerate(chosen)}
        gains = [
            (large - small, position, number)
            for small, position in positions.items()
            for large, number in outside.items()
            if 0 < large - small <= room
        ]
        if not gains:
            break
        gain, position, number = max(gains)
        chosen[position] = number
        room -= gain
    return chosen
