"""Which weights stay resident, and where streamed weights are placed in the ring."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ort_cuda_plugin.plan.format import Param, Plan, Record, RecordKind, Ref, RefKind
from ort_cuda_plugin.plan.residency import SMALL, BudgetTooSmall, PlanUses, choose, least_budget, reside
from ort_cuda_plugin.plan.streaming import (
    Upload,
    WeightUse,
    aligned,
    lay_out,
    segment_starts,
    weight_uses,
    with_uploads,
)

KIB = 1024
MIB = 1024 * KIB


def plan_of(*reads: tuple[int, ...], segments: tuple[int, ...] = ()) -> Plan:
    """Return a plan of launches; launch i reads the weights ``reads[i]``."""
    count = 1 + max(number for numbers in reads for number in numbers)
    return Plan(
        num_registers=0,
        inputs=(),
        outputs=(),
        nodes=("node",),
        records=tuple(
            Record(
                RecordKind.LAUNCH,
                0,
                tuple(Param.pointer(Ref(RefKind.WEIGHT, number)) for number in numbers),
                segment=segments[index] if segments else 0,
            )
            for index, numbers in enumerate(reads)
        ),
        weights=tuple(range(count)),
        num_segments=1 + max(segments, default=0),
    )


def chosen(sizes: list[int], plan: Plan, budget: int) -> tuple[int, ...]:
    nbytes = dict(enumerate(sizes))
    return choose(nbytes, (), [weight_uses(plan, nbytes)], budget).resident


def test_everything_is_resident_if_it_fits() -> None:
    assert chosen([MIB, MIB], plan_of((0,), (1,)), 2 * MIB) == (0, 1)


def test_resident_weights_are_spread_over_the_plan_from_its_start() -> None:
    """A ring of two weights is left; half of the others stay, every second one."""
    plan = plan_of(*((number,) for number in range(8)))
    assert chosen([MIB] * 8, plan, 6 * MIB) == (0, 2, 4, 6)


def test_small_weights_and_weights_of_distant_steps_stay() -> None:
    plan = plan_of((3,), (0,), (1,), (2,), (5,), (3,), (4,))
    resident = chosen([MIB, MIB, MIB, MIB, SMALL, MIB], plan, 4 * MIB + SMALL)
    assert resident == (4, 3, 0)  # with weight 3 resident, the upload ring is one weight smaller, so weight 0 has room


def test_a_weight_larger_than_all_others_stays_instead_of_a_ring_for_it() -> None:
    plan = plan_of((0,), (1,), (2,), (3,))
    assert chosen([10 * MIB, MIB, MIB, MIB], plan, 12 * MIB) == (0,)


def test_a_resident_weight_is_exchanged_for_one_that_fills_the_budget() -> None:
    sizes = [size * 100 * KIB for size in (3, 3, 4, 4, 4, 4)]
    plan = plan_of(*((number,) for number in range(6)))
    resident = chosen(sizes, plan, (8 + 4) * 100 * KIB)
    assert sum(sizes[number] for number in resident) == 400 * KIB


def test_a_budget_without_room_for_one_step_is_refused() -> None:
    plan = plan_of((0, 1), (2,))
    with pytest.raises(BudgetTooSmall) as error:
        chosen([MIB] * 3, plan, MIB)
    assert (error.value.needed, error.value.record) == (2 * MIB, 0)


@given(st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=12), st.data())
def test_the_least_budget_suffices_and_one_byte_less_does_not(reads: list[list[int]], data: st.DataObject) -> None:
    plan = plan_of(*(tuple(numbers) for numbers in reads), (7,))
    sizes = {number: data.draw(st.integers(1, 300_000), label=f"bytes of {number}") for number in range(8)}
    plans = [PlanUses(weight_uses(plan, sizes))]
    needed = least_budget(lambda budget: reside(sizes, (), plans, budget), 0, sum(map(aligned, sizes.values())))
    assert plans[0].fits(reside(sizes, (), plans, needed).resident, sizes, needed)
    with pytest.raises(BudgetTooSmall):
        reside(sizes, (), plans, needed - 1)


def test_an_upload_does_not_cross_a_segment() -> None:
    plan = plan_of((0,), (1,), segments=(0, 1))
    uploads = lay_out(weight_uses(plan, {0: 256, 1: 256}), 1024, segment_starts(plan))
    assert uploads is not None
    assert [upload.issue for upload in uploads] == [0, 1]


def test_stored_plans_with_uploads_are_refused() -> None:
    plan = plan_of((0,))
    twice = with_uploads(plan, [Upload(WeightUse(0, 256, 0, 0), 0, 0)])
    with pytest.raises(ValueError, match="records that upload weights"):
        with_uploads(twice, [])


@given(st.lists(st.lists(st.integers(0, 11), max_size=3), min_size=1, max_size=30), st.integers(1, 24), st.data())
def test_no_upload_overwrites_a_weight_in_use(reads: list[list[int]], ring: int, data: st.DataObject) -> None:
    plan = plan_of(*(tuple(numbers) for numbers in reads), (11,))
    sizes = {number: data.draw(st.integers(1, 1000), label=f"bytes of {number}") for number in range(12)}
    uses = weight_uses(plan, sizes)
    uploads = lay_out(uses, 256 * ring)
    if uploads is None:
        return
    assert [upload.use for upload in uploads] == uses
    assert [upload.issue for upload in uploads] == sorted(upload.issue for upload in uploads)
    for index, upload in enumerate(uploads):
        assert upload.issue <= upload.use.first
        assert upload.offset + aligned(upload.use.nbytes) <= 256 * ring
        for other in uploads[:index]:
            apart = upload.offset >= other.offset + aligned(
                other.use.nbytes
            ) or other.offset >= upload.offset + aligned(upload.use.nbytes)
            assert apart or upload.issue > other.use.last
    streamed = with_uploads(plan, uploads)
    kinds = [record.kind for record in streamed.records]
    assert kinds.count(RecordKind.UPLOAD) == kinds.count(RecordKind.AWAIT) == len(uses)
    launches = [record for record in streamed.records if record.kind is RecordKind.LAUNCH]
    assert all(param.ref is None or param.ref.kind is RefKind.BUFFER for record in launches for param in record.params)
