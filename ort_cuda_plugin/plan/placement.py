"""Weight placement: keeps each weight of a cluster in device or host memory, by a budget.

The plans of the cluster get records that upload the weights in host memory (`streaming`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..abi.errors import Error
from ..model.ir import Constant
from .format import Plan
from .residency import SMALL, BudgetTooSmall, PlanUses, least_budget, reside
from .streaming import (
    Upload,
    aligned,
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


@dataclass(frozen=True)
class BudgetShare:
    """The part of the option ``weight_budget`` for one fused node: (budget - earlier) * part / whole bytes.

    ``budget`` is the option in bytes, ``earlier`` the bytes of the weights of nodes that were compiled earlier.
    """

    budget: int
    part: int = 1
    whole: int = 1
    earlier: int = 0

    @property
    def nbytes(self) -> int:
        return max(self.budget - self.earlier, 0) * self.part // self.whole

    def budget_for(self, nbytes: int) -> int:
        """Return the least value of the option with which the share has ``nbytes`` bytes."""
        return self.earlier + -(-nbytes * self.whole // self.part)


@dataclass(frozen=True)
class _Batch:
    """The weights that a variant adds: their bytes by number, those that cannot be streamed, and the plans that read
    them. The resident weights are chosen for the plans ``likely``, and fit all ``plans``.
    """

    nbytes: Mapping[int, int]
    fixed: frozenset[int]
    likely: tuple[PlanUses, ...]
    plans: tuple[PlanUses, ...]


class WeightPlacement:
    """The memory of each weight of one cluster, and the streaming schedules of its plans.

    ``share``: the budget of device memory for the resident weights and for one ring. ``name``: the cluster, for errors.
    """

    def __init__(self, name: str, share: BudgetShare) -> None:
        self.name = name
        self.budget = share.nbytes
        self._share = share
        self.schedules: list[StreamingSchedule] = []
        self._nbytes: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._resident: set[int] = set()
        self._batches: list[_Batch] = []

    def assign(self, weights: Mapping[int, Weight], plans: Sequence[Plan], likely: Sequence[Plan]) -> None:
        """Decide whether new weights are in device or host memory.

        ``weights`` maps the numbers of new weights in the cluster to the weights. ``plans`` read them, and ``likely``
        are the plans for which the resident weights are chosen.

        Raises: WeightBudgetError: the budget has no room for the weights that a record reads at once.
        """
        new = {number: weight.nbytes for number, weight in weights.items()}
        self._nbytes.update(new)
        self._names.update((number, _name(weight)) for number, weight in weights.items())
        fixed = {number for number, weight in weights.items() if isinstance(weight, Constant) and weight.is_state}
        fixed |= {number for number, nbytes in new.items() if nbytes == 0}
        fixed |= {number for plan in (*plans, *likely) for number in read_by_host(plan) if number in new}
        batch = _Batch(new, frozenset(fixed), self._uses(likely), self._uses(plans))
        try:
            self._resident = self._placed([batch], self._resident, self.budget, is_first=not self._batches)
        except BudgetTooSmall as error:
            batches = [*self._batches, batch]
            everything = sum(aligned(nbytes) for each in batches for nbytes in each.nbytes.values())
            needed = least_budget(lambda budget: self._placed(batches, set(), budget), self.budget, everything)
            raise self._too_small(needed, likely, error.record) from error
        self._batches.append(batch)

    def _uses(self, plans: Sequence[Plan]) -> tuple[PlanUses, ...]:
        return tuple(PlanUses(weight_uses(plan, self._nbytes), segment_starts(plan)) for plan in plans)

    def _placed(
        self, batches: Sequence[_Batch], resident: Collection[int], budget: int, *, is_first: bool = True
    ) -> set[int]:
        """Return the resident weights after ``batches``. ``is_first``: these begin with the cluster's first batch.

        Raises: BudgetTooSmall: the budget has no room for a ring.
        """
        held = set(resident)
        for batch in batches:
            if is_first:
                held = set(reside(batch.nbytes, batch.fixed, batch.likely, budget).resident)
            else:
                # The weights of earlier plans have used up the budget: the new ones are streamed where possible.
                held |= batch.fixed | {number for number, nbytes in batch.nbytes.items() if nbytes <= SMALL}
            is_first = False
            for plan in batch.plans:
                if not plan.fits(held, self._nbytes, budget):
                    raise BudgetTooSmall(budget + 1, None)
        return held

    def is_streamed(self, number: int) -> bool:
        """Return whether the weight is in host memory."""
        return number not in self._resident

    def apply(self, plan: Plan) -> Plan:
        """Return a plan of the last `assign` with uploads of the weights that are in host memory.

        Raises: WeightBudgetError: the host reads a streamed weight.
        """
        uses = [use for use in weight_uses(plan, self._nbytes) if self.is_streamed(use.number)]
        if in_host_memory := [number for number in read_by_host(plan) if self.is_streamed(number)]:
            names = ", ".join(self._names[number] for number in in_host_memory)
            raise WeightBudgetError(
                f"{self.name}: the host reads weights that an earlier plan streams: {names}. Leave out weight_budget"
            )
        uploads = lay_out(uses, max(self.budget - self._held, 0), segment_starts(plan))
        assert uploads is not None, "assign has checked the plan"
        self._note(plan, uploads)
        return with_uploads(plan, uploads)

    @property
    def _held(self) -> int:
        return sum(aligned(self._nbytes[number]) for number in self._resident)

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

    def _too_small(self, needed: int, plans: Sequence[Plan], record: int | None) -> WeightBudgetError:
        where = ""
        if len(plans) == 1 and record is not None:
            where = f": node {plans[0].nodes[plans[0].records[record].node]!r} reads the most weights at once"
        return WeightBudgetError(
            f"{self.name}: weight_budget leaves {self.budget} bytes for the weights of this fused node, expected at "
            f"least {needed} bytes{where}. Raise weight_budget to {self._share.budget_for(needed)} bytes, or leave it "
            "out to keep all weights in device memory"
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
