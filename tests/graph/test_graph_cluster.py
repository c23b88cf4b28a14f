"""Clusters of toy operators: an interpreter in Python runs their plans, and results are compared with NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from graph_toys import Builder, strided_map
from ort_cuda_plugin.clusters.cluster import CompiledCluster, Variant
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.model.ir import Array, Constant, DType, InvalidModel, NodeError, Value
from ort_cuda_plugin.plan.decoder import decode
from ort_cuda_plugin.plan.format import Plan, RecordKind, RefKind, encode
from ort_cuda_plugin.plan.tables import Weight
from ort_cuda_plugin.program.lowering.context import DeviceProperties, Lowering
from plan_interpreter import PlanMismatch, RunError, run_plan


@pytest.fixture(autouse=True)
def copy_with_the_toy_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `Lowering.contiguous` copy with a toy kernel, since these tests use no operator of the package."""
    monkeypatch.setattr(
        Lowering, "contiguous", lambda ctx, x, alignment=1: x if x.is_contiguous else strided_map(ctx, "a", x)
    )


class Session:
    """A stand-in for the provider and the C executor: it builds plans for a cluster and runs them in Python."""

    def __init__(self, b: Builder, *outputs: Value) -> None:
        self.kernels: list[KernelSpec] = []
        self.weights: list[Array] = []
        self.plans: list[Plan] = []
        self.cluster = CompiledCluster(b.graph(*outputs), DeviceProperties())
        self.cluster.weight_reader.read = self.read_weight
        self.add(self.cluster.prepare())

    def read_weight(self, number: int) -> bytes:
        return self.weights[number].tobytes()

    def add(self, variant: Variant) -> None:
        self.kernels += variant.kernels
        self.cluster.kernels_added(variant)
        self.weights += map(contents, variant.weights)
        self.cluster.weights_added(variant)
        if variant.plan is not None:
            self.plans.append(decode(encode(variant.plan)))

    def run(self, *inputs: Array) -> list[Array]:
        for plan in reversed(self.plans):
            try:
                return run_plan(plan, self.kernels, self.weights, inputs, self.cluster.host_inputs)
            except PlanMismatch:
                pass
        host_values = [[int(x) for x in inputs[index].reshape(-1)] for index in self.cluster.host_inputs]
        self.add(self.cluster.build([x.shape for x in inputs], host_values))
        return run_plan(self.plans[-1], self.kernels, self.weights, inputs, self.cluster.host_inputs)


def contents(weight: Weight) -> Array:
    """Return the contents of a weight. A precomputed weight's program runs in Python."""
    if isinstance(weight, Constant):
        return weight.array.copy()
    program = weight.program
    arrays = [constant.array for constant in program.weights]
    return run_plan(program.plan, program.kernels, arrays, [], [])[weight.number]


def floats(*shape: int) -> Array:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1


def test_a_static_cluster_has_its_plan_after_prepare() -> None:
    b = Builder()
    x, y = b.input("x", 2, 3), b.input("y", 3)
    session = Session(b, b.node("Add", b.node("Mul", x, y), y))
    assert len(session.plans) == 1
    np.testing.assert_array_equal(session.run(floats(2, 3), floats(3))[0], floats(2, 3) * floats(3) + floats(3))
    assert len(session.plans) == 1


def test_a_plan_serves_every_shape_that_broadcasts_the_same_way() -> None:
    b = Builder()
    x, y = b.input("x", "batch", "sequence"), b.input("y", None)
    session = Session(b, b.node("Add", b.node("Mul", x, y), x))
    for batch, sequence, other in [(2, 3, 3), (2, 3, 1), (1, 1, 1), (1, 4, 4), (5, 1, 4), (0, 3, 3), (3, 2, 1)]:
        a, c = floats(batch, sequence), floats(other)
        np.testing.assert_array_equal(session.run(a, c)[0], a * c + a)
    assert len(session.plans) == 3


def test_shapes_that_do_not_broadcast_fail_with_the_name_of_the_node() -> None:
    b = Builder()
    x, y = b.input("x", "n"), b.input("y", "m")
    session = Session(b, b.node("Add", x, y))
    session.run(floats(3), floats(3))
    with pytest.raises(RunError, match=r"Add_0 \(Add\): dimensions cannot be broadcast"):
        session.run(floats(3), floats(4))


def test_dimensions_of_one_name_may_differ_at_the_price_of_a_variant() -> None:
    b = Builder()
    x, y = b.input("x", "n"), b.input("y", "n")
    session = Session(b, b.node("Add", x, y))
    session.run(floats(3), floats(3))
    session.run(floats(7), floats(7))
    assert len(session.plans) == 1
    np.testing.assert_array_equal(session.run(floats(3), floats(1))[0], floats(3) + 1)
    assert len(session.plans) == 2


def test_shape_arithmetic_stays_on_the_host() -> None:
    b = Builder()
    x = b.input("x", "n", "m", 4)
    shape = b.node("Mul", b.node("Shape", x, dtype=DType.INT64), b.constant(np.array([1, 2, 1])), dtype=DType.INT64)
    shape = b.node("Add", shape, b.constant(np.array([0, 0, -5])), dtype=DType.INT64)
    session = Session(b, b.node("Add", b.node("Reshape", x, shape), b.constant(floats(2))))
    for n, m in [(2, 3), (1, 1), (4, 1)]:
        np.testing.assert_array_equal(session.run(a := floats(n, m, 4))[0], a.reshape(n, 2 * m, 2) + floats(2))
    (plan,) = session.plans
    assert [record.kind for record in plan.records] == [RecordKind.LAUNCH]
    assert session.cluster.host_inputs == []


def test_a_reshape_by_computed_shape_is_a_view_and_one_copy() -> None:
    b = Builder()
    x = b.input("x", "n", "m")
    shape = b.node("Shape", b.node("Transpose", x), dtype=DType.INT64)
    session = Session(b, b.node("Reshape", x, shape))
    np.testing.assert_array_equal(session.run(floats(2, 3))[0], floats(2, 3).reshape(3, 2))
    np.testing.assert_array_equal(session.run(floats(5, 1))[0], floats(5, 1).reshape(1, 5))
    assert [record.kind for record in session.plans[0].records] == [RecordKind.COPY]
    assert session.plans[0].buffers == ()


def test_a_graph_input_that_decides_a_shape_is_a_host_input() -> None:
    b = Builder()
    x, shape = b.input("x", "n"), b.input("shape", 2, dtype=DType.INT64)
    session = Session(b, b.node("Reshape", x, shape))
    assert session.cluster.host_inputs == [1]
    np.testing.assert_array_equal(session.run(floats(6), np.array([2, 3]))[0], floats(6).reshape(2, 3))
    np.testing.assert_array_equal(session.run(floats(6), np.array([6, -1]))[0], floats(6).reshape(6, 1))
    np.testing.assert_array_equal(session.run(floats(8), np.array([-1, 2]))[0], floats(8).reshape(4, 2))
    assert len(session.plans) == 1
    with pytest.raises(RunError, match="number of elements"):
        session.run(floats(8), np.array([3, 2]))


def test_arithmetic_on_an_integer_input_is_read_back_only_where_it_decides_a_shape() -> None:
    b = Builder()
    x, y = b.input("x", "n"), b.input("y", 2, dtype=DType.INT64)
    doubled = b.node("Add", y, y, dtype=DType.INT64)
    only_computed = Session(b, doubled)
    assert only_computed.cluster.host_inputs == []
    np.testing.assert_array_equal(only_computed.run(floats(1), np.array([2, 5]))[0], [4, 10])
    decides = Session(b, b.node("Reshape", x, doubled))
    assert decides.cluster.host_inputs == [1]
    np.testing.assert_array_equal(decides.run(floats(24), np.array([2, 3]))[0], floats(24).reshape(4, 6))


def test_a_shape_computed_from_floats_on_the_device_is_declined() -> None:
    b = Builder()
    x = b.input("x", 2)
    bad = b.node("Reshape", x, b.node("Add", x, x))
    with pytest.raises(NodeError, match=r"Reshape_1 \(Reshape\): the type of shape is FLOAT32"):
        Session(b, bad)


def test_a_shape_that_the_device_computes_is_read_back_in_the_middle_of_the_run() -> None:
    b = Builder()
    x, shape = b.input("x", "n"), b.input("shape", 2, dtype=DType.INT64)
    negated = b.node("Negative", shape, dtype=DType.INT64)
    before = b.node("Add", x, x)
    session = Session(b, b.node("Add", b.node("Reshape", before, negated), b.constant(floats(1))), negated)
    assert session.cluster.host_inputs == []
    for n, dims in [(6, (2, 3)), (8, (8, 1)), (5, (1, 5))]:
        out, values = session.run(floats(n), -np.array(dims))
        np.testing.assert_array_equal(out, 2 * floats(n).reshape(dims) + 1)
        np.testing.assert_array_equal(values, dims)
    (plan,) = session.plans
    assert plan.num_segments == 2
    assert len(plan.readbacks) == 1
    with pytest.raises(RunError, match=r"Reshape_2 \(Reshape\): the number of elements changes"):
        session.run(floats(6), -np.array([2, 2]))


def test_results_of_shape_arithmetic_can_be_outputs() -> None:
    b = Builder()
    x = b.input("x", "n", "m")
    shape = b.node("Shape", x, dtype=DType.INT64)
    session = Session(b, shape, b.node("Row", shape, index=1, dtype=DType.INT64))
    outputs = session.run(floats(3, 5))
    np.testing.assert_array_equal(outputs[0], [3, 5])
    assert outputs[1].shape == ()
    assert outputs[1] == 5


def test_outputs_are_written_by_their_producers() -> None:
    b = Builder()
    x = b.input("x", "n")
    product_value = b.node("Mul", x, x)
    session = Session(b, product_value, b.node("Add", product_value, x))
    outputs = session.run(floats(5))
    np.testing.assert_array_equal(outputs[1], floats(5) ** 2 + floats(5))
    plan = session.plans[0]
    assert [record.kind for record in plan.records] == [RecordKind.LAUNCH] * 2
    assert plan.buffers == ()
    assert {p.ref.kind for p in plan.records[1].params if p.ref} == {RefKind.INPUT, RefKind.OUTPUT}


def test_inputs_constants_views_and_repeated_values_can_be_outputs() -> None:
    b = Builder()
    x = b.input("x", "n", "m")
    constant = b.constant(floats(2, 2))
    total = b.node("Add", x, x)
    outputs = (x, constant, b.node("Transpose", total), b.node("Row", total, index=1), total, total)
    session = Session(b, *outputs)
    a = floats(2, 3)
    expected = (a, floats(2, 2), 2 * a.T, 2 * a[1], 2 * a, 2 * a)
    for actual, wanted in zip(session.run(a), expected, strict=True):
        np.testing.assert_array_equal(actual, wanted)


def test_steps_whose_results_nobody_needs_are_dropped() -> None:
    b = Builder()
    x = b.input("x", "n")
    unused = b.node("Add", x, b.constant(floats(1)))
    b.node("Mul", unused, unused)
    session = Session(b, b.node("Zeros", x))
    np.testing.assert_array_equal(session.run(floats(4))[0], np.zeros(4))
    assert [record.kind for record in session.plans[0].records] == [RecordKind.MEMSET]
    assert session.plans[0].weights == ()


def test_intermediates_live_from_first_to_last_use() -> None:
    b = Builder()
    x = b.input("x", 4)
    value = x
    for _ in range(4):
        value = b.node("Add", value, x)
    plan = Session(b, value).plans[0]
    assert [(buffer.first_record, buffer.last_record) for buffer in plan.buffers] == [(0, 1), (1, 2), (2, 3)]


def test_a_guard_gives_each_side_a_variant_and_weights_are_shared() -> None:
    b = Builder()
    x = b.input("x", "n")
    session = Session(b, b.node("Add", b.node("Pick", x), b.constant(floats(1))))
    np.testing.assert_array_equal(session.run(floats(3))[0], floats(3) * 2 + 1)
    np.testing.assert_array_equal(session.run(floats(1))[0], floats(1) + 2)
    np.testing.assert_array_equal(session.run(floats(8))[0], floats(8) * 2 + 1)
    assert len(session.plans) == 2
    assert len(session.weights) == 1
    assert session.plans[0].weights == session.plans[1].weights == (0,)
    assert session.plans[0].kernels == (0, 1)
    assert session.plans[1].kernels == (2, 1)


def test_many_elements_take_64_bit_indices() -> None:
    b = Builder()
    session = Session(b, b.node("Add", x := b.input("x", "n"), x))
    session.run(floats(3))
    wide = session.cluster.build([(2**31,)], [])
    assert session.plans[0] is not wide.plan
    assert "i64" in wide.kernels[0].signature


def test_inputs_that_contradict_the_model_are_refused() -> None:
    b = Builder()
    x = b.input("x", 2, "n")
    made = Session(b, b.node("Add", x, x)).cluster
    with pytest.raises(InvalidModel, match="'x': got 3 in dimension 0, the model declares 2"):
        made.build([(3, 4)], [])
    with pytest.raises(InvalidModel, match="'x': got rank 1, the model declares rank 2"):
        made.build([(2,)], [])
    with pytest.raises(InvalidModel, match="'x': got 2199023255552 in dimension 1"):
        made.build([(2, 2**41)], [])


def test_a_plan_does_not_hold_for_other_static_dimensions_than_the_model_says() -> None:
    b = Builder()
    session = Session(b, b.node("Add", x := b.input("x", 2, 3), x))
    with pytest.raises(PlanMismatch):
        run_plan(session.plans[0], session.kernels, session.weights, [floats(3, 2)])


def borrowed(source: Array) -> Value:
    """Return an initializer that borrows ``source``, as if ORT were going to free that memory."""
    constant = Constant(DType.FLOAT32, source.shape, lambda: source, borrowed=True)
    return Value("borrowed", DType.FLOAT32, source.shape, constant)


def test_weights_of_a_cluster_with_dynamic_shapes_are_known_before_the_first_run() -> None:
    source = floats(3)
    b = Builder()
    session = Session(b, b.node("Add", b.input("x", "n"), borrowed(source)))
    assert session.plans == []
    assert len(session.weights) == 1
    source[:] = 99
    np.testing.assert_array_equal(session.run(floats(3))[0], 2 * floats(3))
    assert len(session.weights) == 1


def test_small_constants_are_kept_and_large_ones_read_back_from_the_device() -> None:
    small, large = floats(3), floats(20000)
    b = Builder()
    values = borrowed(small), borrowed(large)
    Session(b, *(b.node("Add", b.input(f"x{i}", "n"), value) for i, value in enumerate(values)))
    expected = large.copy()
    small[:] = large[:] = 99
    np.testing.assert_array_equal(values[0].constant, floats(3))
    np.testing.assert_array_equal(values[1].constant, expected)


def test_constants_of_a_cluster_with_static_shapes_cannot_be_read_after_its_plan() -> None:
    b = Builder()
    value = borrowed(floats(3))
    session = Session(b, b.node("Add", b.input("x", 3), value))
    np.testing.assert_array_equal(session.run(floats(3))[0], 2 * floats(3))
    with pytest.raises(RuntimeError, match="after ONNX Runtime freed it"):
        value.constant  # noqa: B018


def test_a_constant_that_no_launch_reads_at_first_is_kept_for_later_plans() -> None:
    source = floats(20000)
    b = Builder()
    value = borrowed(source)
    picked = b.node("Pick", b.input("x", "n"))
    b.node("Add", b.constant(floats(1)), value)
    session = Session(b, picked)
    assert session.weights == []
    source[:] = 99
    np.testing.assert_array_equal(value.constant, floats(20000))


def test_rearranging_a_constant_costs_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    b = Builder()
    constant = b.node("Transpose", b.constant(floats(2, 3)))
    session = Session(b, b.node("Add", b.input("x", 6), b.node("Reshape", constant, b.constant(np.array([6])))))
    np.testing.assert_array_equal(session.run(floats(6))[0], floats(6) + floats(2, 3).T.reshape(6))
    assert [record.kind for record in session.plans[0].records] == [RecordKind.LAUNCH]


def test_a_plan_that_reads_nothing_back_has_one_segment() -> None:
    b = Builder()
    (plan,) = Session(b, b.node("Add", b.input("x", 2, 3), b.input("y", 3))).plans
    assert plan.num_segments == 1
