"""Records of a plan that call Python in each Run."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from executor_harness import (
    AFFINE,
    FLOAT,
    Outputs,
    Registers,
    Stream,
    TestCluster,
    device,
    driver,
    run_in_threads,
    succeed,
)
from ort_cuda_plugin.abi.core import PluginError, check, core, counters, ffi, new_error
from ort_cuda_plugin.plan.format import Param, Plan, PlanBuffer, PlanInput, PlanOutput, Record, RecordKind
from ort_cuda_plugin.program.expressions.operations import ExprOp
from test_executor_run import affine, ref_buffer, ref_input, ref_output

pytestmark = pytest.mark.usefixtures("collected")


class CallCluster(TestCluster):
    """A cluster with one callback that takes two pointers and a number; ``function`` also gets the stream."""

    __test__ = False

    def __init__(self, function: Callable[[int, int, int, Any], None], graphs: int = 0) -> None:
        super().__init__()
        self.function = function
        core().cluster_set_graphs(self.pointer, 1, graphs)
        assert core().cluster_add_callback(self.pointer, 2, 1, new_error()) == 0
        self.add(call_plan())

    def call_back(self, number: int, addresses: Sequence[int], numbers: Sequence[int], stream: Any) -> None:
        assert number == 0
        self.function(addresses[0], addresses[1], numbers[0], stream)


def call_plan(condition: int | None = None) -> Plan:
    """Return a plan of y = f(2 * x) + 1 for x [n, m]: a launch before the call, and one after it that reads the call's
    result.
    """
    r = Registers(2)
    size = r.product(0, 1)
    nbytes = r.op(ExprOp.MUL, size, r.const(4))
    params = (Param.pointer(ref_buffer(0)), Param.pointer(ref_buffer(1)), Param.i64(size))
    return Plan(
        inputs=(PlanInput(FLOAT, 2, 0),),
        outputs=(PlanOutput(FLOAT, (0, 1)),),
        nodes=("before", "mine", "after"),
        buffers=(PlanBuffer(nbytes, 0, 1), PlanBuffer(nbytes, 1, 2)),
        records=(
            affine(r, ref_input(), ref_buffer(0), size, 2, 0),
            Record(RecordKind.CALL, 1, params, condition_register=condition),
            affine(r, ref_buffer(1), ref_output(), size, 1, 1),
        ),
        exprs=tuple(r.exprs),
        num_registers=r.count,
        kernels=tuple(range(AFFINE + 1)),
    )


def negate(source: int, target: int, size: int, stream: Any) -> None:
    """Negate on the host, after waiting for the stream's earlier work."""
    values = np.empty(size, np.float32)
    raw = ffi.from_buffer(values.view(np.uint8))
    handle = core().stream_handle(stream)
    succeed(driver().MemcpyDtoHAsync(raw, source, values.nbytes, handle))
    error = new_error()
    core().stream_synchronize(stream, error)
    check(error)
    np.negative(values, out=values)
    succeed(driver().MemcpyHtoDAsync(target, raw, values.nbytes, handle))
    core().stream_synchronize(stream, error)
    check(error)


def copy(source: int, target: int, size: int, stream: Any) -> None:
    """Copy ``size`` elements on the device, without waiting."""
    succeed(driver().MemcpyDtoDAsync(target, source, size * 4, core().stream_handle(stream)))


def test_a_callback_is_called_in_each_run_between_the_launches_around_it() -> None:
    with CallCluster(negate) as cluster:
        before = counters()["python_calls"]
        for rows in (3, 1, 3, 3):
            x = np.arange(rows * 50, dtype=np.float32).reshape(rows, 50)
            np.testing.assert_array_equal(cluster.run(x)[0], 1 - 2 * x)
        assert counters()["python_calls"] - before == 4


def test_work_that_a_callback_enqueues_is_in_the_order_of_the_stream() -> None:
    with CallCluster(copy) as cluster:
        x = np.arange(1000, dtype=np.float32).reshape(10, 100)
        for _ in range(3):
            np.testing.assert_array_equal(cluster.run(x)[0], 1 + 2 * x)


def test_concurrent_runs_call_back_on_their_streams() -> None:
    def slow(source: int, target: int, size: int, stream: Any) -> None:
        time.sleep(0.001)  # other threads get the GIL here
        negate(source, target, size, stream)

    with CallCluster(slow) as cluster:
        run_in_threads(cluster, lambda x: 1 - 2 * x, 10)


def test_a_plan_with_a_callback_becomes_no_graph() -> None:
    with CallCluster(copy, graphs=4) as cluster:
        x = np.ones((2, 3), np.float32)
        before = counters()
        for _ in range(4):
            cluster.run(x)
        after = counters()
        changed = {name: after[name] - before[name] for name in after if after[name] != before[name]}
        assert changed["graph_fallbacks_call"] == changed["graph_fallbacks"] == 3
        assert changed["python_calls"] == 4
        assert "graph_captures" not in changed


def test_an_error_of_a_callback_names_the_node_and_the_next_run_is_right() -> None:
    wrong = True

    def fails_first(source: int, target: int, size: int, stream: Any) -> None:
        if wrong:
            raise ValueError("a size of 6 is unlucky")
        negate(source, target, size, stream)

    with CallCluster(fails_first) as cluster:
        x = np.ones((2, 3), np.float32)
        before = counters()["device_bytes_in_use"]
        with pytest.raises(PluginError, match="node 'mine': a size of 6 is unlucky"):
            cluster.run(x)
        wrong = False
        np.testing.assert_array_equal(cluster.run(x)[0], 1 - 2 * x)
        gc.collect()  # frees the failed Run's outputs
        assert counters()["device_bytes_in_use"] == before


def test_a_stream_that_is_captured_refuses_the_call() -> None:
    def never(*_: object) -> None:
        raise AssertionError("called during a capture")

    x = np.ones((0, 4), np.float32)  # empty: an upload would disturb the capture
    with CallCluster(never) as cluster, Stream() as own:
        handle = core().stream_handle(own)
        adopted = ffi.new("ocp_stream **")
        error = new_error()
        application = ffi.new("CUstream *")
        succeed(driver().StreamCreate(application, 1))
        core().stream_adopt(device(), application[0], adopted, error)
        check(error)
        assert handle != application[0]
        succeed(driver().StreamBeginCapture(application[0], 2))
        try:
            with pytest.raises(PluginError, match="'mine': a custom operator runs Python code in each Run"):
                cluster.enqueue([x], Outputs([FLOAT]), adopted[0])
        finally:
            graph = ffi.new("CUgraph *")
            if driver().StreamEndCapture(application[0], graph) == 0:  # the failed wait may invalidate the capture
                driver().GraphDestroy(graph[0])
            core().stream_release(adopted[0])


def test_a_callback_that_the_record_does_not_fit_is_refused() -> None:
    with CallCluster(copy) as cluster:
        core().cluster_add_callback(cluster.pointer, 1, 2, new_error())
        plan = call_plan()
        other = Record(RecordKind.CALL, 1, plan.records[1].params, index=1)
        records = (plan.records[0], other, plan.records[2])
        wrong = Plan(**{name: getattr(plan, name) for name in plan.__slots__ if name != "records"}, records=records)
        with pytest.raises(PluginError, match="with 2 pointers and 1 numbers, expected 1 and 2"):
            cluster.add(wrong)
