"""Weight placement: keeps each weight of a cluster in device or host memory, by a budget.

The plans of the cluster get records that upload the weights in host memory (`streaming`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..abi.errors import Error
from ..model.ir import Constant
from .format import Plan
from .residency import SMALL, BudgetTooSmall, choose
from .streaming import (
    Upload,
    WeightUse,
    aligned,
    largest_need,
    lay_out,
    read_by_host,
    segment_starts,
    weight_uses,
    with_uploads,
)
from .tables import Weight


class WeightBudgetError(Error):
    """The option ``weight_budget`` is too small for a plan."""

    ort_code = 2  # ORT_INVALID_ARGUMENT


@dataclass(frozen=True)
class StreamedWeight:
    """A weight that each Run copies to the device.

    Attributes:
        name: the initializer's name; for a constant without a name, a description such as "tiles(w)".
        nbytes: bytes that a Run copies.
        step: index of the first record of the plan that reads the weight. Records of uploads do not count.
        node: the label of this record's node.
        issue: index of the record before which the copy is enqueued. Records of uploads do not count.
    """

    name: str
    nbytes: int
    step: int
    node: str
    issue: int


@dataclass(frozen=True)
class StreamingSchedule:
    """The weights that a Run with one plan copies to the device.

    Attributes:
        cluster: the name of the fused node.
        steps: number of records of the plan, without uploads.
        budget: bytes of device memory for weights.
        resident: bytes of the resident weights of the fused node.
        ring: bytes of the ring, the device memory in which a Run keeps streamed weights.
        weights: the streamed weights, in the order of their copies.
    """

    cluster: str
    steps: int
    budget: int
    resident: int
    ring: int
    weights: tuple[StreamedWeight, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes that a Run copies."""
        return sum(weight.nbytes for weight in self.weights)


class WeightPlacement:
    """The memory of each weight of one cluster, and the streaming schedules of its plans.

    ``budget``: bytes of device memory for the resident weights and for one ring. ``name``: the cluster, for errors.
    """

    def __init__(self, name: str, budget: int) -> None:
        self.name = name
        self.budget = budget
        self.schedules: list[StreamingSchedule] = []
        self._nbytes: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._resident: set[int] = set()

    def assign(self, weights: Mapping[int, Weight], plans: Sequence[Plan]) -> None:
        """Decide whether new weights are in device or host memory.

        ``weights`` maps the numbers of new weights in the cluster to the weights. ``plans`` read them.

        Raises: WeightBudgetError: the budget has no room for the weights that a step reads at once.
        """
        is_first = not self._nbytes
        new = {number: weight.nbytes for number, weight in weights.items()}
        self._nbytes.update(new)
        self._names.update((number, _name(weight)) for number, weight in weights.items())
        fixed = {number for number, weight in weights.items() if isinstance(weight, Constant) and weight.is_state}
        fixed |= {number for number, nbytes in new.items() if nbytes == 0}
        fixed |= {number for plan in plans for number in read_by_host(plan) if number in new}
        if not is_first:
            # The weights of earlier plans have used up the budget: the new ones are streamed where that is possible.
            self._resident |= fixed | {number for number, nbytes in new.items() if nbytes <= SMALL}
            return
        uses = [weight_uses(plan, self._nbytes) for plan in plans]
        try:
            residency = choose(new, fixed, uses, self.budget)
        except BudgetTooSmall as error:
            raise self._too_small(error.needed, plans, error.record) from error
        # Gaps between weights in the ring may need more room than the weights alone.
        optional = list(residency.resident[residency.num_forced :])
        self._resident = set(residency.resident)
        while optional and not all(self._fits(plan, each) for plan, each in zip(plans, uses, strict=True)):
            self._resident.discard(optional.pop())

    def is_streamed(self, number: int) -> bool:
        """Return whether the weight is in host memory."""
        return number not in self._resident

    def apply(self, plan: Plan) -> Plan:
        """Return the plan with uploads of the weights that are in host memory.

        Raises: WeightBudgetError: the budget has no room for the weights that a step reads at once.
        """
        uses = self._streamed(weight_uses(plan, self._nbytes))
        if in_host_memory := [number for number in read_by_host(plan) if self.is_streamed(number)]:
            names = ", ".join(self._names[number] for number in in_host_memory)
            raise WeightBudgetError(
                f"{self.name}: the host reads weights that an earlier plan streams: {names}. Leave out weight_budget"
            )
        uploads = lay_out(uses, self._ring_bytes, segment_starts(plan))
        if uploads is None:
            most, record = largest_need(uses)
            raise self._too_small(self._held + 2 * most, [plan], record)
        self._note(plan, uploads)
        return with_uploads(plan, uploads)

    @property
    def _held(self) -> int:
        return sum(aligned(self._nbytes[number]) for number in self._resident)

    @property
    def _ring_bytes(self) -> int:
        return max(self.budget - self._held, 0)

    def _streamed(self, uses: Sequence[WeightUse]) -> list[WeightUse]:
        return [use for use in uses if self.is_streamed(use.number)]

    def _fits(self, plan: Plan, uses: Sequence[WeightUse]) -> bool:
        return lay_out(self._streamed(uses), self._ring_bytes, segment_starts(plan)) is not None

    def _note(self, plan: Plan, uploads: Sequence[Upload]) -> None:
        if not uploads:
            return
        rows = tuple(
            StreamedWeight(
                self._names[upload.use.number],
                upload.use.nbytes,
                upload.use.first,
                plan.nodes[plan.records[upload.use.first].node],
                upload.issue,
            )
            for upload in uploads
        )
        ring = max(upload.offset + aligned(upload.use.nbytes) for upload in uploads)
        self.schedules.append(StreamingSchedule(self.name, len(plan.records), self.budget, self._held, ring, rows))

    def _too_small(self, needed: int, plans: Sequence[Plan], record: int) -> WeightBudgetError:
        where = ""
        if len(plans) == 1 and record < len(plans[0].records):  # the record may be of another plan
            where = f": node {plans[0].nodes[plans[0].records[record].node]!r} reads the most weights at once"
        return WeightBudgetError(
            f"{self.name}: weight_budget leaves {self.budget} bytes for the weights of this fused node, expected at "
            f"least {needed} bytes{where}. Raise weight_budget, or leave it out to keep all weights in device memory"
        )


def _name(weight: Weight) -> str:
    if not isinstance(weight, Constant):
        return "a value computed from weights"
    if weight.name:
        return weight.name
    if weight.recipe is None:
        return f"a constant of {weight.nbytes} bytes"
    parts = dict.fromkeys(part.constant.name or "a constant" for part in weight.recipe.parts)
    return f"{weight.recipe.function}({', '.join(parts)})"
