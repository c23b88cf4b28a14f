"""Runs of clusters through the library's table on the emulated device."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from executor_harness import (
    ADD,
    AFFINE,
    FLOAT,
    IDLE,
    INT64,
    KERNELS,
    PARAMETERS,
    OnHost,
    Outputs,
    Registers,
    Stream,
    TestCluster,
    launch,
    run_in_threads,
)
from ort_cuda_plugin.abi.core import PluginError, counters
from ort_cuda_plugin.plan.format import (
    Param,
    ParamKind,
    Plan,
    PlanAssert,
    PlanBuffer,
    PlanExpr,
    PlanInput,
    PlanOutput,
    Record,
    Ref,
    RefKind,
)
from ort_cuda_plugin.program.expressions.operations import ExprOp

pointer = Param.pointer


def ref_input(index: int = 0) -> Ref:
    return Ref(RefKind.INPUT, index)


def ref_output(index: int = 0) -> Ref:
    return Ref(RefKind.OUTPUT, index)


def ref_weight(index: int = 0) -> Ref:
    return Ref(RefKind.WEIGHT, index)


def ref_buffer(index: int = 0) -> Ref:
    return Ref(RefKind.BUFFER, index)


all_kernels = tuple(range(len(KERNELS)))


def affine(registers: Registers, source: Ref, target: Ref, size: int, a: float, b: float, **fields: int) -> Record:
    params = [pointer(source), pointer(target), Param.i64(size), Param.f32(a), Param.f32(b)]
    return launch(AFFINE, registers.grid(size, 32), params, **fields)


def affine_plan(a: float = 2, b: float = 1, guards: Sequence[tuple[ExprOp, int]] = ()) -> Plan:
    """Return a plan of y = a * x + b for x of any shape [n, m]: two launches with an intermediate buffer. Each guard is
    a comparison and the constant to compare n with.
    """
    r = Registers(2)
    size = r.product(0, 1)
    nbytes = r.op(ExprOp.MUL, size, r.const(4))
    return Plan(
        inputs=(PlanInput(FLOAT, 2, 0),),
        outputs=(PlanOutput(FLOAT, (0, 1)),),
        nodes=("scale", "shift"),
        buffers=(PlanBuffer(nbytes, 0, 1),),
        records=(
            affine(r, ref_input(), ref_buffer(), size, a, 0),
            affine(r, ref_buffer(), ref_output(), size, 1, b),
        ),
        kernels=all_kernels,
        guards=tuple(r.op(op, 0, r.const(value)) for op, value in guards),
        exprs=tuple(r.exprs),
        num_registers=r.count,
    )


def random_array(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape, dtype=np.float32)


def test_one_plan_runs_every_shape_without_python() -> None:
    with TestCluster(affine_plan()) as cluster:
        calls = counters()["python_calls"]
        for shape in [(1, 1), (3, 5), (0, 4), (7, 0), (64, 33), (3, 5), (1, 1)]:
            x = random_array(*shape)
            (y,) = cluster.run(x)
            np.testing.assert_array_equal(y, 2 * x + 1)
        assert counters()["python_calls"] == calls


def test_runs_launches_and_hits_are_counted() -> None:
    with TestCluster(affine_plan()) as cluster:
        before = counters()
        cluster.run(random_array(2, 2))
        cluster.run(random_array(0, 2))
        after = counters()
    assert {name: after[name] - before[name] for name in ("runs", "launches", "plan_hits")} == {
        "runs": 2,
        "launches": 2,
        "plan_hits": 2,
    }


def test_more_shapes_than_the_cache_holds_stay_right() -> None:
    with TestCluster(affine_plan()) as cluster, Stream() as stream:
        for n in [*range(1, 300), 1, 2, 299]:
            x = np.full((n, 1), n, np.float32)
            (y,) = cluster.run(x, stream=stream)
            assert y.shape == (n, 1)
            assert (y == 2 * n + 1).all()


def test_guards_choose_the_variant_and_the_newest_comes_first() -> None:
    small = affine_plan(b=10, guards=[(ExprOp.LT, 4)])
    one = affine_plan(b=100, guards=[(ExprOp.EQ, 1)])
    with TestCluster(affine_plan(), small, one) as cluster:
        for n, b in [(1, 100), (2, 10), (3, 10), (4, 1), (1, 100)]:
            x = random_array(n, 2)
            np.testing.assert_array_equal(cluster.run(x)[0], 2 * x + b)


def test_a_guard_that_cannot_be_evaluated_does_not_hold() -> None:
    r = Registers(2)
    guard = r.op(ExprOp.FLOORDIV, 1, 0)
    never = Plan(
        r.count, (PlanInput(FLOAT, 2, 0),), (PlanOutput(FLOAT, (0, 1)),), exprs=tuple(r.exprs), guards=(guard,)
    )
    with TestCluster(affine_plan(), never) as cluster:
        assert cluster.run(random_array(0, 3))[0].shape == (0, 3)


def test_element_type_and_rank_must_match_the_plan() -> None:
    asked: list[Sequence[Sequence[int]]] = []
    with TestCluster(affine_plan(), build=lambda shapes, _: asked.append(shapes)) as cluster:
        with pytest.raises(PluginError, match="refuse them"):
            cluster.run(random_array(4))
        with pytest.raises(PluginError, match="refuse them"):
            cluster.run(np.zeros((2, 2), np.int32))
    assert asked == [[(4,)], [(2, 2)]]


def test_a_plan_is_built_when_none_matches_and_used_by_the_same_run() -> None:
    cluster = TestCluster(build=lambda shapes, _: cluster.add(affine_plan()))
    with cluster:
        before = counters()
        x = random_array(2, 3)
        np.testing.assert_array_equal(cluster.run(x)[0], 2 * x + 1)
        after = counters()
        assert after["python_calls"] - before["python_calls"] == 1
        assert after["plan_hits"] == before["plan_hits"]
        cluster.run(x)
        assert counters()["python_calls"] == after["python_calls"]


def test_an_error_while_building_reaches_the_caller_and_the_next_run_tries_again() -> None:
    attempts = []

    def build(shapes: Sequence[Sequence[int]], _: object) -> None:
        attempts.append(shapes)
        if len(attempts) == 1:
            raise ValueError("no such luck")
        cluster.add(affine_plan())

    cluster = TestCluster(build=build)
    with cluster:
        with pytest.raises(PluginError, match="no such luck"):
            cluster.run(random_array(2, 3))
        cluster.run(random_array(2, 3))
    assert len(attempts) == 2


def test_threads_that_need_the_same_plan_have_it_built_once() -> None:
    builds = []
    others_wait = threading.Event()

    def build(shapes: Sequence[Sequence[int]], _: object) -> None:
        builds.append(shapes)
        others_wait.wait(1)  # C holds no lock here, so the other threads can request the same plan
        cluster.add(affine_plan())

    cluster = TestCluster(build=build)
    results: dict[int, np.ndarray] = {}

    def work(n: int) -> None:
        results[n] = cluster.run(np.full((n, 2), n, np.float32))[0]

    with cluster:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 7)]
        for thread in threads:
            thread.start()
        others_wait.set()
        for thread in threads:
            thread.join()
    assert len(builds) == 1
    assert all((results[n] == 2 * n + 1).all() and results[n].shape == (n, 2) for n in range(1, 7))


def test_concurrent_runs_of_equal_and_different_shapes_do_not_disturb_each_other() -> None:
    with TestCluster(affine_plan()) as cluster:
        run_in_threads(cluster, lambda x: 2 * x + 1, 30)


def biased_plan(elements_offset: int) -> Plan:
    """Return a plan of y = x + weight 1 for x of shape [n]; reading of the weight starts at ``elements_offset``."""
    r = Registers(1)
    offset = r.op(ExprOp.MUL, r.const(elements_offset - 1), r.const(4))
    bias = pointer(ref_weight(), register=offset, offset=4)
    record = launch(ADD, r.grid(0, 32), [pointer(ref_input()), bias, pointer(ref_output()), Param.i32(0)])
    return Plan(
        num_registers=r.count,
        inputs=(PlanInput(FLOAT, 1, 0),),
        outputs=(PlanOutput(FLOAT, (0,)),),
        nodes=("bias",),
        exprs=tuple(r.exprs),
        records=(record,),
        weights=(1,),
        kernels=all_kernels,
    )


weights = [np.zeros(3, np.float32), np.arange(10, dtype=np.float32)]


def test_weights_are_addressed_with_their_offsets() -> None:
    with TestCluster(biased_plan(3), weights=weights) as cluster:
        np.testing.assert_array_equal(cluster.run(np.ones(4, np.float32))[0], [4, 5, 6, 7])


@pytest.mark.parametrize("elements_offset", [11, -1])
def test_a_pointer_outside_its_memory_is_an_error_of_the_node(elements_offset: int) -> None:
    with TestCluster(biased_plan(elements_offset), weights=weights) as cluster:
        with pytest.raises(PluginError, match="node 'bias': an address that a kernel, copy or call gets lies outside"):
            cluster.run(np.ones(4, np.float32))
        assert cluster.run(np.ones(0, np.float32))[0].shape == (0,)


def test_every_kind_of_parameter_arrives() -> None:
    r = Registers(0)
    minus = r.const(-5)
    params = [
        pointer(ref_output()),
        Param(ParamKind.I8, register=minus),
        Param(ParamKind.I16, imm=-300),
        Param.i32(value=-70000),
        Param.i64(value=-(1 << 40)),
        Param.f32(1.5),
        Param.f64(-0.25),
    ]
    one, six = r.const(1), r.const(6)
    plan = Plan(
        num_registers=r.count,
        inputs=(),
        outputs=(PlanOutput(INT64, (six,)),),
        nodes=("values",),
        exprs=tuple(r.exprs),
        records=(launch(PARAMETERS, (one, one, one), params),),
        kernels=all_kernels,
    )
    with TestCluster(plan, outputs=[INT64]) as cluster:
        assert cluster.run()[0].tolist() == [-5, -300, -70000, -(1 << 40), 1500, -250]


def test_a_size_that_does_not_fit_its_parameter_is_an_error_of_the_node() -> None:
    r = Registers(1)
    large = r.op(ExprOp.MUL, 0, r.const(1 << 33))
    record = launch(ADD, r.grid(0, 32), [pointer(ref_input())] * 3 + [Param.i32(large)])
    plan = Plan(
        num_registers=r.count,
        inputs=(PlanInput(FLOAT, 1, 0),),
        outputs=(),
        nodes=("wide",),
        exprs=tuple(r.exprs),
        records=(record,),
        kernels=all_kernels,
    )
    with TestCluster(plan) as cluster, pytest.raises(PluginError, match="node 'wide': a size does not fit"):
        cluster.run(np.ones(1, np.float32))


def test_copies_and_memsets_move_bytes_and_conditions_skip_them() -> None:
    r = Registers(1)
    nbytes = r.op(ExprOp.MUL, 0, r.const(4))
    many = r.op(ExprOp.LT, r.const(2), 0)
    records = (
        Record.copy(0, pointer(ref_output()), pointer(ref_input()), Param.i64(nbytes)),
        Record.memset(0, pointer(ref_output(), offset=4), Param.i32(value=0), Param.i64(value=4), condition=many),
    )
    plan = Plan(
        num_registers=r.count,
        inputs=(PlanInput(FLOAT, 1, 0),),
        outputs=(PlanOutput(FLOAT, (0,)),),
        nodes=("copy",),
        exprs=tuple(r.exprs),
        records=records,
    )
    with TestCluster(plan) as cluster:
        assert cluster.run(np.array([1, 2, 3], np.float32))[0].tolist() == [1, 0, 3]
        assert cluster.run(np.array([1, 2], np.float32))[0].tolist() == [1, 2]
        assert cluster.run(np.array([], np.float32))[0].tolist() == []


def test_inputs_in_host_memory_are_copied_up_once_each() -> None:
    x = random_array(5, 7)
    with TestCluster(affine_plan()) as cluster:
        before = counters()["copies_h2d"]
        np.testing.assert_array_equal(cluster.run(OnHost(x))[0], 2 * x + 1)
        assert counters()["copies_h2d"] == before + 1
        np.testing.assert_array_equal(cluster.run(x)[0], 2 * x + 1)
        assert counters()["copies_h2d"] == before + 1


@pytest.mark.usefixtures("collected")
def test_device_memory_returns_after_every_run() -> None:
    with TestCluster(affine_plan()) as cluster, Stream() as stream:
        cluster.run(random_array(9, 9), stream=stream)
        before = counters()["device_bytes_in_use"]
        for n in (9, 100, 9):
            cluster.run(OnHost(random_array(n, 9)), stream=stream)
        assert counters()["device_bytes_in_use"] == before


# ---- errors ----


def asserting_plan(message: str) -> Plan:
    """Return a plan for x of shape [n] that asserts n == 2 and has an expression that divides by n - 3."""
    r = Registers(1)
    is_two = r.op(ExprOp.EQ, 0, r.const(2))
    r.op(ExprOp.FLOORDIV, 0, r.op(ExprOp.SUB, 0, r.const(3)))
    return Plan(
        num_registers=r.count,
        inputs=(PlanInput(FLOAT, 1, 0),),
        outputs=(PlanOutput(FLOAT, (0,)),),
        nodes=("first", "Reshape_17"),
        exprs=tuple(r.exprs),
        asserts=(PlanAssert(is_two, 1, message),),
    )


@pytest.mark.parametrize("n", [1, 3])
def test_a_failed_assertion_names_the_node_and_the_message_even_where_arithmetic_fails_too(n: int) -> None:
    with TestCluster(asserting_plan("cannot reshape")) as cluster:
        with pytest.raises(PluginError, match="node 'Reshape_17': cannot reshape"):
            cluster.run(random_array(n))
        assert cluster.run(random_array(2))[0].shape == (2,)


@pytest.mark.parametrize(
    ("op", "a", "b"),
    [
        (ExprOp.ADD, (1 << 63) - 1, 1),
        (ExprOp.SUB, -(1 << 63), 1),
        (ExprOp.MUL, 1 << 62, 2),
        (ExprOp.FLOORDIV, 1, 0),
        (ExprOp.FLOORDIV, -(1 << 63), -1),
        (ExprOp.MOD, 1, 0),
        (ExprOp.CEILDIV, 1, 0),
        (ExprOp.TRUNCDIV, 1, 0),
    ],
)
def test_arithmetic_that_has_no_result_is_an_error(op: ExprOp, a: int, b: int) -> None:
    wrong = "divides by zero" if b == 0 else "overflows 64 bits"
    for node, name in ((1, "node 'guilty'"), (None, "^")):
        exprs = (PlanExpr(ExprOp.CONST, 0, imm=a), PlanExpr(ExprOp.CONST, 1, imm=b), PlanExpr(op, 2, 0, 1, node=node))
        plan = Plan(3, (), (), nodes=("innocent", "guilty"), exprs=exprs)
        text = rf"{name}.*: .* {a} \S+ {b} {wrong}; check"
        with TestCluster(plan) as cluster, pytest.raises(PluginError, match=text):
            cluster.run()


@pytest.mark.parametrize("dims", [(-1,), (1 << 62, 1 << 62)])
def test_outputs_of_impossible_shape_are_an_error(dims: tuple[int, ...]) -> None:
    exprs = tuple(PlanExpr(ExprOp.CONST, i, imm=dim) for i, dim in enumerate(dims))
    plan = Plan(len(dims), (), (PlanOutput(FLOAT, tuple(range(len(dims))), node=0),), nodes=("vast",), exprs=exprs)
    shape = " x ".join(map(str, dims))
    with TestCluster(plan) as cluster, pytest.raises(PluginError, match=f"node 'vast': .* the shape {shape}, "):
        cluster.run()


@pytest.mark.parametrize(
    ("grid", "shared", "message"),
    [
        ((-1, 1, 1), 0, "the size of an intermediate tensor, -1 bytes"),
        ((1, 65536, 1), 0, "launch grid"),
        ((1, 1, 1), -1, "dynamic shared memory"),
    ],
)
def test_launches_out_of_range_are_an_error_of_the_node(grid: tuple[int, int, int], shared: int, message: str) -> None:
    r = Registers(0)
    x, y, z, size = (r.const(value) for value in (*grid, shared))
    params = [pointer(ref_buffer()), Param.i64(value=0)]
    plan = Plan(
        num_registers=r.count,
        inputs=(),
        outputs=(),
        nodes=("huge",),
        exprs=tuple(r.exprs),
        records=(launch(IDLE, (x, y, z), params, shared_register=size),),
        buffers=(PlanBuffer(x, 0, 0),),
        kernels=all_kernels,
    )
    with TestCluster(plan) as cluster, pytest.raises(PluginError, match="node 'huge': .*" + message):
        cluster.run()


def test_an_output_that_cannot_be_allocated_fails_the_run_and_not_the_next_one() -> None:
    with TestCluster(affine_plan()) as cluster, Stream() as stream:
        x = random_array(2, 2)
        refused = Outputs([FLOAT])
        refused.allocate = lambda *_: 1  # type: ignore[method-assign]
        refused.bind()
        with pytest.raises(PluginError, match="output 0: the output could not be allocated"):
            cluster.enqueue([x], refused, stream)
        np.testing.assert_array_equal(cluster.run(x, stream=stream)[0], 2 * x + 1)
