"""Uploads of weights in host memory: the executor runs them in order, and refuses plans that use them wrongly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from emulator_harness import configured
from executor_harness import FLOAT, INT64, Registers, TestCluster
from ort_cuda_plugin.abi.core import PluginError, core, counters
from ort_cuda_plugin.plan.format import (
    Param,
    Plan,
    PlanBuffer,
    PlanOutput,
    PlanReadback,
    Record,
    RecordKind,
)
from test_executor_run import affine, all_kernels, pointer, ref_buffer, ref_output, ref_weight

COUNT, NBYTES = 64, 256
WEIGHTS = [np.random.default_rng(seed).standard_normal(COUNT, np.float32) for seed in range(4)]
ON_DEVICE = 3
"""The weight that is in device memory."""


def upload(weight: int, offset: int = 0, **fields: Any) -> Record:
    params = (pointer(ref_buffer(0), offset=offset), pointer(ref_weight(weight)), Param.i64(value=NBYTES))
    return Record(RecordKind.UPLOAD, 0, params, **fields)


def awaits(record: int, **fields: Any) -> Record:
    return Record(RecordKind.AWAIT, 0, (), record, **fields)


def streaming_plan(*, ring: int = 2) -> Plan:
    """Return a plan that reads weights 0 to 2; the ring, buffer 0, has room for ``ring`` weights.

    Upload i goes to slot i modulo ``ring``, after the record that reads upload i - ``ring``.
    """
    r = Registers(0)
    size = r.const(COUNT)
    ring_bytes = r.const(ring * NBYTES)
    records: list[Record] = []
    uploads: list[int] = []

    def issue(weight: int) -> None:
        uploads.append(len(records))
        records.append(upload(weight, weight % ring * NBYTES))

    for weight in range(min(ring, 3)):
        issue(weight)
    for weight in range(3):
        records.append(awaits(uploads[weight]))
        source = affine(r, ref_buffer(0), ref_output(weight), size, 2, weight)
        params = (replace(source.params[0], imm=weight % ring * NBYTES), *source.params[1:])
        records.append(replace(source, params=params))
        if len(uploads) < 3:
            issue(len(uploads))
    return Plan(
        inputs=(),
        outputs=(PlanOutput(FLOAT, (size,)),) * 3,
        nodes=("layer",),
        buffers=(PlanBuffer(ring_bytes, 0, len(records) - 1),),
        records=tuple(records),
        kernels=all_kernels,
        weights=(0, 1, 2, ON_DEVICE),
        exprs=tuple(r.exprs),
        num_registers=r.count,
    )


def cluster_of(*plans: Plan) -> TestCluster:
    return TestCluster(*plans, weights=WEIGHTS, on_host=(0, 1, 2), outputs=(FLOAT,) * 3)


def check_results(results: list[np.ndarray]) -> None:
    for index, result in enumerate(results):
        np.testing.assert_array_equal(result, WEIGHTS[index] * np.float32(2) + np.float32(index))


@pytest.mark.parametrize("ring", [1, 2, 3])
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_record_reads_the_weight_that_was_uploaded_for_it(ring: int, seed: int | None) -> None:
    with (
        configured(adversarial=int(seed is not None), seed=seed or 0),
        cluster_of(streaming_plan(ring=ring)) as cluster,
    ):
        core().cluster_set_graphs(cluster.pointer, 2, 1)
        before = counters()
        for _ in range(5):
            check_results(cluster.run())
        after = counters()
    assert after["graph_replays"] - before["graph_replays"] == 3
    assert after["weight_bytes_streamed"] - before["weight_bytes_streamed"] == 5 * 3 * NBYTES


valid = streaming_plan()
# The records of `valid`: uploads 0, 1; await 0, launch; upload of weight 2 (record 4), await 1, launch; await 4, launch


def changed(position: int, **changes: Any) -> Plan:
    records = list(valid.records)
    records[position] = replace(records[position], **changes)
    return replace(valid, records=tuple(records))


def with_params(position: int, **by_index: Param) -> Plan:
    params = list(valid.records[position].params)
    for name, param in by_index.items():
        params[int(name[1:])] = param
    return changed(position, params=tuple(params))


def without(position: int) -> Plan:
    """Return the plan with a memset, which needs no order, in place of a record."""
    nothing = Record.memset(0, pointer(ref_output(0)), Param.i32(value=0), Param.i64(value=0))
    return replace(valid, records=(*valid.records[:position], nothing, *valid.records[position + 1 :]))


read_back = PlanReadback(ref_weight(0), INT64, 1, valid.num_registers, 1)
wrong_plans = {
    "uploads weight 3, which is in device memory": with_params(1, p1=pointer(ref_weight(ON_DEVICE))),
    "reads weight 0, which is in host memory": with_params(3, p0=pointer(ref_weight(0))),
    "an upload must copy a weight to a buffer": with_params(0, p0=pointer(ref_output(0))),
    "a weight to a buffer, with": with_params(0, p1=pointer(ref_buffer(0))),
    "with a constant size": with_params(0, p2=Param.i64(0)),
    "a constant size and": with_params(0, p2=Param.i64(value=0)),
    "and without a condition": changed(0, condition_register=0),
    "no record awaits record 4, an upload": without(7),
    "record 2 awaits record 1": changed(2, index=1),
    "record 5 awaits record 0": changed(5, index=0),
    "record 5 awaits record 4": changed(5, index=4),
    "record 2 awaits record 0": changed(2, params=(Param.i64(value=1),)),
    "with 0 parameters and a condition": changed(2, condition_register=0),
    "record 0 awaits record 1": replace(valid, records=(valid.records[2], *valid.records[1:])),
    "read-back 0 reads a weight that is in host memory": replace(
        valid, readbacks=(read_back,), num_segments=2, num_registers=valid.num_registers + 1
    ),
}


@pytest.mark.parametrize("why", wrong_plans)
def test_a_plan_is_refused_if_it(why: str) -> None:
    plan = wrong_plans[why]
    if why == "record 0 awaits record 1":
        plan = replace(plan, records=(replace(plan.records[0], index=1), *plan.records[1:]))
    with cluster_of() as cluster, pytest.raises(PluginError, match="invalid plan: ") as error:
        cluster.add(plan)
    assert why in str(error.value)


@pytest.mark.parametrize(
    "plan",
    [with_params(0, p2=Param.i64(value=NBYTES + 1)), with_params(1, p0=pointer(ref_buffer(0), offset=NBYTES + 4))],
)
def test_an_upload_beyond_the_weight_or_the_ring_fails_the_run(plan: Plan) -> None:
    with (
        cluster_of(plan) as cluster,
        pytest.raises(PluginError, match="'layer': an address that a kernel, copy or call gets lies outside"),
    ):
        cluster.run()
