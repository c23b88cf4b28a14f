"""Estimate of weight streaming: when each copy of a weight ends, and how long steps wait for copies.

The schedule is that of `plan.streaming` for the budget. Copies run one after the other on the link between host and
device, and overlap with steps; a step starts when the weights that it reads have arrived.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ...gpus import Gpu
from ...plan.residency import BudgetTooSmall, PlanUses, least_budget, reside
from ...plan.streaming import Upload, WeightUse, aligned, lay_out


@dataclass(frozen=True)
class Streaming:
    """The copies of weights in a Run.

    Attributes:
        budget: bytes of device memory for weights.
        resident: bytes of resident weights.
        copies: number of copies.
        nbytes: bytes that the copies move.
        link_seconds: the time of all copies.
        waiting: seconds for which steps wait for copies.
    """

    budget: int
    resident: int
    copies: int
    nbytes: int
    link_seconds: float
    waiting: float


def streaming(
    nbytes: Mapping[int, int],
    reads: Sequence[Collection[int]],
    states: Collection[int],
    seconds: Sequence[float],
    device: Gpu,
    budget: int,
) -> Streaming:
    """Return the copies of a Run. ``seconds`` has the time of each step.

    ``reads`` has the numbers of the weights that each step reads. ``nbytes`` has the bytes of each weight, by number.
    ``states`` are the weights that Runs write.

    Raises: BudgetTooSmall: the budget is smaller than the weights that a step reads at once.
    """
    spans: dict[int, tuple[int, int]] = {}
    for position, numbers in enumerate(reads):
        for number in numbers:
            spans[number] = spans.get(number, (position, 0))[0], position
    uses = sorted(
        (WeightUse(number, nbytes[number], first, last) for number, (first, last) in spans.items()),
        key=lambda use: (use.first, use.last),
    )
    plans = [PlanUses(uses)]
    try:
        resident = reside(nbytes, states, plans, budget).resident
    except BudgetTooSmall as error:
        everything = sum(map(aligned, nbytes.values()))
        needed = least_budget(lambda given: reside(nbytes, states, plans, given), budget, everything)
        raise BudgetTooSmall(needed, error.record) from None
    held = sum(aligned(nbytes[number]) for number in resident)
    uploads = lay_out([use for use in uses if use.number not in resident], budget - held)
    assert uploads is not None, "reside returns weights with which the others fit into the ring"
    moved = sum(upload.use.nbytes for upload in uploads)
    waiting = _waiting(uploads, seconds, device.copied_per_second)
    return Streaming(budget, held, len(uploads), moved, moved / device.copied_per_second, waiting)


def _waiting(uploads: Sequence[Upload], seconds: Sequence[float], rate: float) -> float:
    """Return the seconds for which steps wait for the uploads. ``rate`` is that of the link, in bytes per second."""
    ends = [0.0]  # ends[i]: when the steps before step i have finished
    copied = waited = 0.0
    position = 0
    for step, duration in enumerate(seconds):
        ready = ends[-1]
        while position < len(uploads) and uploads[position].use.first == step:
            upload = uploads[position]
            copied = max(copied, ends[upload.issue]) + upload.use.nbytes / rate
            position += 1
            ready = max(ready, copied)
        waited += ready - ends[-1]
        ends.append(ready + duration)
    return waited
