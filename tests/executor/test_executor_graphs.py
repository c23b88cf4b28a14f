"""Automatic CUDA graphs: when an instance gets one, how changes reach it, and when records are enqueued one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from executor_harness import (
    FLOAT,
    INT64,
    DeviceBlock,
    Outputs,
    Registers,
    Stream,
    TestCluster,
    run_in_threads,
    synchronize,
)
from ort_cuda_plugin.abi.core import check, core, counters, ffi, new_error
from ort_cuda_plugin.plan.format import Param, Plan, PlanBuffer, PlanInput, PlanOutput, Record
from ort_cuda_plugin.program.expressions.operations import ExprOp
from test_executor_run import affine, affine_plan, pointer, random_array, ref_buffer, ref_input, ref_output
from test_executor_segments import keep_positive_plan

pytestmark = pytest.mark.usefixtures("collected")
WARM = 2


class GraphCluster(TestCluster):
    """A cluster that captures a graph after `WARM` Runs, and keeps at most ``most`` graphs."""

    __test__ = False

    def __init__(self, *plans: Plan, most: int = 4, **settings: Any) -> None:
        super().__init__(*plans, **settings)
        core().cluster_set_graphs(self.pointer, WARM, most)


class Changes:
    """Collects the changes of the graph counters during a with statement, without those that stay the same."""

    def __enter__(self) -> dict[str, int]:
        self.before = counters()
        self.changes: dict[str, int] = {}
        return self.changes

    def __exit__(self, *_: object) -> None:
        names = [name for name in self.before if name.startswith("graph")]
        after = counters()
        self.changes.update({n: after[n] - self.before[n] for n in names if after[n] != self.before[n]})


class Bound:
    """Holds memory for one float32 input and one output, so that all its Runs have the same addresses."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        nbytes = 4 * int(np.prod(self.shape))
        self.input, self.output = DeviceBlock(nbytes), DeviceBlock(nbytes)
        self.dims = ffi.new("int64_t[]", self.shape)

    def run(self, cluster: TestCluster, stream: Any, x: np.ndarray | None = None) -> None:
        """Enqueue a Run, after an upload of ``x`` if it is given, without waiting for it."""
        if x is not None:
            self.input.upload(x)
        row = ffi.new("ocp_input *")
        row.dims, row.rank, row.dtype, row.on_device = self.dims, len(self.shape), FLOAT, True
        row.data = ffi.cast("void *", self.input.address)

        def allocate(_context: Any, _index: int, _dims: Any, _rank: int, data: Any, _error: Any) -> int:
            data[0] = ffi.cast("void *", self.output.address)
            return 0

        callback = ffi.callback("int(void *, uint32_t, const int64_t *, uint32_t, void **, ocp_error *)", allocate)
        error = new_error()
        core().cluster_run(cluster.pointer, stream, row, 1, callback, ffi.NULL, error)
        check(error)

    def result(self, stream: Any) -> np.ndarray:
        return self.output.download(self.shape, np.float32, stream)


def test_a_warm_instance_becomes_a_graph_that_only_new_addresses_change() -> None:
    with GraphCluster(affine_plan()) as cluster, Stream() as stream:
        first, second = Bound((3, 5)), Bound((3, 5))
        for _ in range(WARM):
            with Changes() as changes:
                first.run(cluster, stream, random_array(3, 5))
            assert changes == {}
        with Changes() as changes:
            first.run(cluster, stream)
        assert changes == {"graph_captures": 1, "graph_replays": 1, "graphs_live": 1}
        with Changes() as changes:
            first.run(cluster, stream, 2 * random_array(3, 5))
        assert changes == {"graph_replays": 1}
        np.testing.assert_array_equal(first.result(stream), 4 * random_array(3, 5) + 1)
        with Changes() as changes:
            second.run(cluster, stream, random_array(3, 5))  # one kernel gets another input, the other another output
        assert changes == {"graph_replays": 1, "graph_updates": 2}
        np.testing.assert_array_equal(second.result(stream), 2 * random_array(3, 5) + 1)
        np.testing.assert_array_equal(first.result(stream), 4 * random_array(3, 5) + 1)


def test_launches_are_counted_in_replays_too() -> None:
    with GraphCluster(affine_plan()) as cluster, Stream() as stream:
        bound = Bound((3, 5))
        for _ in range(5):
            before = counters()["launches"]
            bound.run(cluster, stream, random_array(3, 5))
            assert counters()["launches"] - before == 2


def moves_plan() -> Plan:
    """Return a plan for x of shape [n]: a launch writes 2 * x to output 0, a copy puts it into output 1, and a memset
    clears the second element there.
    """
    r = Registers(1)
    nbytes = r.op(ExprOp.MUL, 0, r.const(4))
    records = (
        affine(r, ref_input(), ref_output(), 0, 2, 0),
        Record.copy(0, pointer(ref_output(1)), pointer(ref_output()), Param.i64(nbytes)),
        Record.memset(0, pointer(ref_output(1), offset=4), Param.i32(value=0), Param.i64(value=4)),
    )
    return Plan(
        num_registers=r.count,
        inputs=(PlanInput(FLOAT, 1, 0),),
        outputs=(PlanOutput(FLOAT, (0,)), PlanOutput(FLOAT, (0,))),
        nodes=("moves",),
        exprs=tuple(r.exprs),
        records=records,
        kernels=tuple(range(5)),
    )


def test_copies_and_memsets_are_nodes_whose_addresses_change() -> None:
    with GraphCluster(moves_plan(), outputs=[FLOAT, FLOAT]) as cluster, Stream() as stream:
        outputs = []
        for n in range(WARM + 3):
            x = np.arange(1 + n, 9 + n, dtype=np.float32)
            outputs.append(Outputs([FLOAT, FLOAT]))  # kept, so that each Run writes to other addresses
            with Changes() as changes:
                cluster.enqueue([x], outputs[-1], stream)
            if n > WARM:
                assert changes == {"graph_replays": 1, "graph_updates": 3}
        for n, output in enumerate(outputs):
            doubled, cleared = output.arrays(stream)
            expected = 2 * np.arange(1 + n, 9 + n, dtype=np.float32)
            np.testing.assert_array_equal(doubled, expected)
            expected[1] = 0
            np.testing.assert_array_equal(cleared, expected)


def test_a_single_call_is_no_graph() -> None:
    r = Registers(1)
    plan = Plan(
        num_registers=r.count + 3,
        inputs=(PlanInput(FLOAT, 1, 0),),
        outputs=(PlanOutput(FLOAT, (0,)),),
        nodes=("double",),
        records=(affine(r, ref_input(), ref_output(), 0, 2, 0),),
        exprs=tuple(r.exprs),
        kernels=tuple(range(5)),
    )
    with GraphCluster(plan) as cluster, Stream() as stream, Changes() as changes:
        for _ in range(WARM + 2):
            cluster.run(np.ones(4, np.float32), stream=stream)
    assert changes == {}


def test_one_graph_follows_runs_whose_shapes_are_all_new() -> None:
    """Shapes grow with each Run, as in decoding, and the slab grows with them."""
    with GraphCluster(affine_plan()) as cluster, Stream() as stream:
        rows = [Bound((n, 40)) for n in range(3, 23)]
        with Changes() as changes:
            for bound in rows:
                bound.run(cluster, stream, random_array(*bound.shape))
        runs = len(rows) - WARM
        assert changes == {
            "graph_captures": 1,
            "graph_replays": runs,
            "graph_updates": 2 * (runs - 1),  # both nodes, except in the Run that captures the graph
            "graphs_live": 1,
        }
        for bound in rows:
            np.testing.assert_array_equal(bound.result(stream), 2 * random_array(*bound.shape) + 1)
        with Changes() as changes:  # repeated shapes have graphs of their own
            for _ in range(WARM + 2):
                for n in (20, 21, 3):
                    rows[n - 3].run(cluster, stream)
        assert changes == {"graph_captures": 3, "graph_replays": 3 * 2, "graphs_live": 3}
        for bound in rows:
            np.testing.assert_array_equal(bound.result(stream), 2 * random_array(*bound.shape) + 1)


def test_the_slab_of_a_graph_is_kept_and_returned_with_the_graph() -> None:
    def in_use() -> int:
        return counters()["device_bytes_in_use"]

    with Stream() as stream:
        with GraphCluster(affine_plan()) as cluster:
            bound = Bound((64, 64))
            bound.run(cluster, stream, random_array(64, 64))
            before, graphs = in_use(), counters()["graphs_live"]
            for _ in range(WARM):
                bound.run(cluster, stream)
            assert in_use() - before == 64 * 64 * 4
            core().cluster_release_graphs(cluster.pointer)
            assert in_use() == before
            assert counters()["graphs_live"] == graphs
            for n in range(2 * WARM + 1):  # an instance that lost its graph needs more warm Runs
                with Changes() as changes:
                    bound.run(cluster, stream, np.full((64, 64), n, np.float32))
                assert changes.get("graph_captures", 0) == int(n == 2 * WARM)
                assert (bound.result(stream) == 2 * n + 1).all()
            assert in_use() - before == 64 * 64 * 4
        assert in_use() == before
        del bound


def test_the_graph_that_waits_the_longest_makes_room() -> None:
    with GraphCluster(affine_plan(), most=2) as cluster, Stream() as stream:
        bounds = [Bound((n, 3)) for n in (1, 2, 3)]
        with Changes() as changes:
            for bound in bounds:
                for _ in range(WARM + 2):
                    bound.run(cluster, stream, random_array(*bound.shape))
        assert changes == {"graph_captures": 3, "graph_replays": 6, "graphs_live": 2}
        with Changes() as changes:
            for bound in bounds:
                bound.run(cluster, stream)
        assert changes == {"graph_replays": 2}  # the graphs of the last two shapes still exist


def test_a_size_that_the_device_computes_is_a_counted_reason() -> None:
    with GraphCluster(keep_positive_plan(), outputs=[FLOAT, FLOAT]) as cluster, Changes() as changes:
        for _ in range(WARM + 3):
            cluster.run(random_array(6))
    assert changes == {"graph_fallbacks": 3, "graph_fallbacks_read_back": 3}


def sized_plan() -> Plan:
    """Return a plan of y = 2 * x[:n] + 1, with n from the host input."""
    r = Registers(3)
    nbytes = r.op(ExprOp.MUL, 2, r.const(4))
    return Plan(
        inputs=(PlanInput(FLOAT, 1, 0), PlanInput(INT64, 1, 1, host_register=2, host_count=1)),
        outputs=(PlanOutput(FLOAT, (2,)),),
        nodes=("scale", "shift"),
        buffers=(PlanBuffer(nbytes, 0, 1),),
        records=(affine(r, ref_input(), ref_buffer(), 2, 2, 0), affine(r, ref_buffer(), ref_output(), 2, 1, 1)),
        kernels=tuple(range(5)),
        exprs=tuple(r.exprs),
        num_registers=r.count,
    )


def test_values_that_decide_sizes_choose_the_graph() -> None:
    x = random_array(8)
    with GraphCluster(sized_plan(), host_inputs=[1]) as cluster, Stream() as stream:
        with Changes() as changes:
            for _ in range(WARM + 2):
                for size in (3, 5):
                    (y,) = cluster.run(x, np.array([size]), stream=stream)
                    np.testing.assert_array_equal(y, 2 * x[:size] + 1)
        assert changes["graph_captures"] == 2
        assert changes["graph_replays"] == 4
        assert "graph_fallbacks" not in changes


def test_another_stream_has_a_graph_of_its_own_until_the_first_is_idle() -> None:
    with GraphCluster(affine_plan()) as cluster, Stream() as one, Stream() as two:
        bound = Bound((3, 5))
        bound.input.upload(random_array(3, 5))
        for _ in range(WARM + 1):
            bound.run(cluster, one)
        with Changes() as changes:
            bound.run(cluster, two)  # no thread waited for the first stream, so its graph may still run
        assert changes == {}
        synchronize(one)
        synchronize(two)
        with Changes() as changes:
            for _ in range(WARM + 1):
                bound.run(cluster, two)
        assert changes.get("graph_replays", 0) >= 1
        np.testing.assert_array_equal(bound.result(two), 2 * random_array(3, 5) + 1)


def test_threads_with_changing_shapes_share_a_few_graphs() -> None:
    before = counters()
    with GraphCluster(affine_plan(), most=3) as cluster, Changes() as changes:
        run_in_threads(cluster, lambda x: 2 * x + 1, 60)
    assert changes["graph_replays"] > 20
    after = counters()
    assert after["graphs_live"] == before["graphs_live"]
    assert after["device_bytes_in_use"] == before["device_bytes_in_use"]
