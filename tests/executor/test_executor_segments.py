"""Values that are read back before a plan, or a segment of it, can be evaluated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from executor_harness import (
    FLOAT,
    INT32,
    INT64,
    KEEP_POSITIVE,
    KERNELS,
    NUMPY_TYPES,
    ONNX_TYPES,
    OnHost,
    Registers,
    TestCluster,
    launch,
)
from ort_cuda_plugin.abi.core import PluginError, counters
from ort_cuda_plugin.plan.format import (
    Param,
    Plan,
    PlanBuffer,
    PlanInput,
    PlanOutput,
    PlanReadback,
    Record,
    Ref,
    RefKind,
)
from ort_cuda_plugin.program.expressions.operations import ExprOp

data = Ref(RefKind.INPUT, 0)
output = Ref(RefKind.OUTPUT, 0)


def reshape_plan(dtype: int, count: int) -> Plan:
    """Return a plan that copies x [n] to an output whose ``count`` dimensions are the values of a second input."""
    r = Registers(2 + count)
    dims = tuple(range(2, 2 + count))
    nbytes = r.op(ExprOp.MUL, r.product(*dims), r.const(4))
    return Plan(
        num_registers=r.count,
        inputs=(PlanInput(FLOAT, 1, 0), PlanInput(dtype, 1, 1, host_register=2, host_count=count)),
        outputs=(PlanOutput(FLOAT, dims),),
        nodes=("reshape",),
        exprs=tuple(r.exprs),
        records=(Record.copy(0, Param.pointer(output), Param.pointer(data), Param.i64(nbytes)),),
    )


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint64, np.int8])
def test_host_inputs_of_integer_types_become_registers(dtype: type[np.integer]) -> None:
    plan = reshape_plan(ONNX_TYPES[np.dtype(dtype)], 2)
    with TestCluster(plan, host_inputs=[1]) as cluster:
        for dims in [(2, 6), (3, 4), (2, 6)]:
            x = np.arange(12, dtype=np.float32)
            np.testing.assert_array_equal(cluster.run(x, np.array(dims, dtype))[0], x.reshape(dims))


def test_a_host_input_is_read_back_once_per_run_unless_it_is_in_host_memory() -> None:
    x, dims = np.arange(6, dtype=np.float32), np.array([2, 3], np.int64)
    with TestCluster(reshape_plan(INT64, 2), host_inputs=[1]) as cluster:
        before = counters()
        cluster.run(x, dims)
        cluster.run(x, dims)
        middle = counters()
        assert middle["host_value_reads"] - before["host_value_reads"] == 2
        np.testing.assert_array_equal(cluster.run(x, OnHost(dims))[0], x.reshape(2, 3))
        after = counters()
        assert after["host_value_reads"] == middle["host_value_reads"]
        assert after["copies_h2d"] == before["copies_h2d"], "no kernel reads it: nothing to copy up"


def test_another_number_of_host_values_needs_another_plan() -> None:
    asked: list[Sequence[Sequence[int]]] = []

    def build(_: object, host_values: Sequence[Sequence[int]]) -> None:
        asked.append(host_values)
        cluster.add(reshape_plan(INT64, len(host_values[0])))

    cluster = TestCluster(reshape_plan(INT64, 2), host_inputs=[1], build=build)
    with cluster:
        x = np.arange(6, dtype=np.float32)
        assert cluster.run(x, np.array([1, 2, 3]))[0].shape == (1, 2, 3)
        assert cluster.run(x, np.array([6, 1]))[0].shape == (6, 1)
        assert cluster.run(x[:1], np.array([], np.int64))[0].shape == ()
    assert asked == [[(1, 2, 3)], [()]]


def test_host_values_out_of_range_are_an_error() -> None:
    plan = reshape_plan(ONNX_TYPES[np.dtype(np.uint64)], 1)
    with (
        TestCluster(plan, host_inputs=[1]) as cluster,
        pytest.raises(PluginError, match=r"is 2\^63 or more"),
    ):
        cluster.run(np.ones(1, np.float32), np.array([1 << 63], np.uint64))


def test_a_host_input_must_hold_few_integers() -> None:
    with TestCluster(host_inputs=[1]) as cluster:
        with pytest.raises(PluginError, match="input 1, which determines shapes"):
            cluster.run(np.ones(1, np.float32), np.ones(1, np.float32))
        with pytest.raises(PluginError, match="input 1, which determines shapes"):
            cluster.run(np.ones(1, np.float32), np.ones(100_000, np.int64))


def test_plan_and_cluster_must_agree_on_the_host_inputs() -> None:
    with (
        TestCluster(host_inputs=[0]) as cluster,
        pytest.raises(PluginError, match="input 0: the plan says that the host does not read the input"),
    ):
        cluster.add(reshape_plan(INT64, 2))


def keep_positive_plan() -> Plan:
    """Return a plan whose outputs are the positive elements of x [n], and twice these, computed through a buffer of the
    second segment.
    """
    r = Registers(1)
    nbytes = r.op(ExprOp.MUL, 0, r.const(4))
    eight, one = r.const(8), r.const(1)
    kept, count, scratch = (Ref(RefKind.BUFFER, i) for i in range(3))
    params = [Param.pointer(ref) for ref in (data, kept, count)]
    r.segment = 1
    found = r.take(1)
    found_bytes = r.op(ExprOp.MUL, found, r.const(4))
    move = Param.i64(found_bytes)
    return Plan(
        inputs=(PlanInput(FLOAT, 1, 0),),
        outputs=(PlanOutput(FLOAT, (found,), 1), PlanOutput(FLOAT, (found,), 1)),
        nodes=("nonzero",),
        exprs=tuple(r.exprs),
        readbacks=(PlanReadback(count, INT64, 1, found, 1),),
        buffers=(PlanBuffer(nbytes, 0, 3), PlanBuffer(eight, 0, 0), PlanBuffer(found_bytes, 2, 3, 1)),
        records=(
            launch(KEEP_POSITIVE, (one, one, one), [*params, Param.i64(0)]),
            Record.copy(0, Param.pointer(output), Param.pointer(kept), move, 1),
            Record.copy(0, Param.pointer(scratch), Param.pointer(kept), move, 1),
            Record.copy(0, Param.pointer(Ref(RefKind.OUTPUT, 1)), Param.pointer(scratch), move, 1),
        ),
        kernels=tuple(range(len(KERNELS))),
        num_segments=2,
        num_registers=r.count,
    )


def test_a_segment_continues_with_a_size_that_the_device_computed() -> None:
    generator = np.random.default_rng(0)
    with TestCluster(keep_positive_plan(), outputs=[FLOAT, FLOAT]) as cluster:
        before = counters()["host_value_reads"]
        for n in (10, 10, 1, 1000, 10):
            x = generator.standard_normal(n).astype(np.float32)
            first, second = cluster.run(x)
            np.testing.assert_array_equal(first, x[x > 0])
            np.testing.assert_array_equal(second, x[x > 0])
        assert counters()["host_value_reads"] - before == 5


def test_a_read_back_outside_its_memory_is_an_error() -> None:
    r = Registers(1)
    r.segment = 1
    found = r.take(1)
    plan = Plan(
        num_registers=r.count,
        inputs=(PlanInput(INT32, 1, 0),),
        outputs=(PlanOutput(FLOAT, (found,), 1),),
        readbacks=(PlanReadback(data, INT32, 1, found, 1, byte_offset_register=0),),
        num_segments=2,
    )
    with TestCluster(plan) as cluster:
        with pytest.raises(PluginError, match="a read-back of 4 bytes at offset 0 lies outside"):
            cluster.run(np.array([5], NUMPY_TYPES[INT32])[:0])
        with pytest.raises(PluginError, match="negative dimension"):
            cluster.run(np.array([0, -9, 0, 0, 0, 0, 0, 0], NUMPY_TYPES[INT32])[[1] * 4])
