"""Deep models, in which every value depends on the one before: no stack overflow, and time linear in the depth."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import ort_cuda_plugin
from ort_cuda_plugin.model.ir import DType
from ort_cuda_plugin.passes.fusion.vertical_fusion import fuse_vertically
from ort_cuda_plugin.plan.format import Plan
from ort_cuda_plugin.plan.registers import Registers
from ort_cuda_plugin.program.expressions import scalar
from ort_cuda_plugin.program.expressions.fold import fold
from ort_cuda_plugin.program.expressions.polynomial import MAX_DEGREE
from ort_cuda_plugin.program.expressions.scalar import Scalar
from ort_cuda_plugin.program.expressions.symbolic import (
    Dim,
    bounds,
    eq,
    floordiv,
    is_read_back,
    mod,
    sym_max,
    symbol,
    truncdiv,
)
from ort_cuda_plugin.program.lowering import elementwise
from ort_cuda_plugin.program.steps.steps import Map, Substitution, stored
from ort_cuda_plugin.program.steps.tensor import Buffer, BufferKind, Tensor
from plan_interpreter import evaluate_registers

DEPTH = 3000
STEPS = {
    "quotients": lambda x: floordiv(x + 7, 2) + 5,
    "remainders": lambda x: mod(x * 3 + 1, 1009) + 1,
    "clamps": lambda x: sym_max(x - 3, 1) + mod(x, 5),
    "signed": lambda x: truncdiv(0 - x, 3) + 11,
    "shared": lambda x: mod(x, 8) + floordiv(x, 2) + 1,
}


def nested(step: str, x: Dim) -> Dim:
    for _ in range(DEPTH):
        x = STEPS[step](x)
    return x


@pytest.mark.parametrize("step", STEPS)
def test_nested_size_arithmetic_has_registers_and_its_value(step: str) -> None:
    registers = Registers(1)
    register = registers.of(nested(step, symbol(0, "n", 40)))
    values = {0: 1000}
    evaluate_registers(Plan(registers.count, inputs=(), outputs=(), exprs=tuple(registers.exprs)), values)
    assert values[register] == nested(step, 1000)
    assert len(registers.exprs) < 12 * DEPTH


@pytest.mark.parametrize("step", STEPS)
def test_nested_size_arithmetic_that_was_made_twice_is_equal(step: str) -> None:
    first, second = (nested(step, symbol(0, "n", 40)) for _ in range(2))
    assert first is not second
    assert eq(first, second) == 1
    assert first - second == 0
    assert not is_read_back(first)
    assert first != nested(step, symbol(1, "m", 40))


GROWING: dict[str, Callable[[Dim], Dim]] = {
    "square": lambda x: truncdiv(x, 2) * x,
    "square of a quotient": lambda x: truncdiv(x, 2) * truncdiv(x, 2) + x,
    "square of a larger one": lambda x: sym_max(x, 3) * sym_max(x, 3),
}


@pytest.mark.parametrize("step", GROWING)
def test_bounds_of_nested_sizes_do_not_grow_with_each_level(step: str) -> None:
    """Without the limit `MAX_DEGREE`, a bound would have twice as many digits after each level."""
    x: Dim = symbol(0, "n", 2, 0, 2**31)
    for _ in range(80):
        x = GROWING[step](x)
    lower, upper = bounds(x)
    assert lower is None or abs(lower) < 2 ** (65 * MAX_DEGREE)
    assert upper is None or abs(upper) < 2 ** (65 * MAX_DEGREE)


def selections(x: Scalar, count: int) -> Scalar:
    """Return max(x, -x), nested ``count`` times. The expression has 2**count paths to ``x``."""
    for _ in range(count):
        x = scalar.maximum(x, -x)
    return x


def test_what_is_selected_again_and_again_is_looked_at_once_for_its_rounding() -> None:
    leaf, wide = Scalar(DType.FLOAT16, "leaf"), Scalar(DType.FLOAT16, "leaf") + 1.0
    assert stored(selections(leaf, 200)).op == "max"
    assert stored(selections(wide, 200)).op == "cast"


def test_size_arithmetic_that_reads_each_result_twice_is_folded_once() -> None:
    leaf = Scalar(DType.INT64, "leaf")
    assert fold(selections(leaf, 200), {leaf: -3}) == 3


def test_joining_a_chain_of_maps_rebuilds_each_operation_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vertical fusion counts a group's operations before it substitutes, so a rejected map rebuilds no expression."""
    count = 1500
    rebuilt: list[Scalar] = []
    plain = Substitution._rebuilt

    def counting(self: Substitution, x: Scalar) -> Scalar:
        rebuilt.append(x)
        return plain(self, x)

    monkeypatch.setattr(Substitution, "_rebuilt", counting)
    tensors = [Tensor(DType.FLOAT32, (64,), Buffer(BufferKind.SCRATCH, 256)) for _ in range(count + 1)]
    tensors[0].buffer.kind, tensors[-1].buffer.kind = BufferKind.INPUT, BufferKind.OUTPUT
    steps = []
    for x, y in pairwise(tensors):
        leaf = Scalar(DType.FLOAT32, "leaf")
        steps.append(Map((), (64,), ((leaf, x),), ((leaf * 0.5, y),)))
    joined = fuse_vertically(steps)
    assert count // 512 < len(joined) <= count // 200
    assert len(rebuilt) <= 4 * count


def chain(op_types: list[str], length: int, *, of_a_shape: bool, twice: bool = False) -> bytes:
    """Return a model with a chain of ``length`` integer nodes. The last result, modulo 5, is the size of the output.

    The chain begins with the size of x (``of_a_shape``) or with x itself. With ``twice`` a node reads the node before
    it as both operands.
    """
    first = helper.make_node("Shape", ["x"], ["v0"]) if of_a_shape else helper.make_node("Identity", ["x"], ["v0"])
    nodes = [first]
    for i in range(length):
        other = f"v{i}" if twice else "two"
        nodes.append(helper.make_node(op_types[i % len(op_types)], [f"v{i}", other], [f"v{i + 1}"], name=f"node{i}"))
    nodes.append(helper.make_node("Mod", [f"v{length}", "five"], ["size"]))
    nodes.append(helper.make_node("ConstantOfShape", ["size"], ["y"]))
    kind, dims = (TensorProto.FLOAT, ["n"]) if of_a_shape else (TensorProto.INT64, [1])
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("x", kind, dims)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["size"])],
        [numpy_helper.from_array(np.array([value]), name) for name, value in (("two", 2), ("five", 5))],
    )
    return bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9).SerializeToString()
    )


def compare(data: bytes, feeds: list[np.ndarray]) -> None:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    ours = ort_cuda_plugin.session(data, emulate=True, sess_options=options)
    cpu = ort.InferenceSession(data, providers=["CPUExecutionProvider"])
    assert {part.ep_name for part in ours.get_provider_graph_assignment_info()} == {ort_cuda_plugin.get_ep_name()}
    for x in feeds:
        np.testing.assert_array_equal(ours.run(None, {"x": x})[0], cpu.run(None, {"x": x})[0], strict=True)


@pytest.mark.parametrize("op_types", [["Add"], ["Div", "Add"], ["Max", "Add"], ["Mod", "Add", "Add"]])
def test_six_hundred_operations_on_a_dimension_run_on_the_plugin(op_types: list[str]) -> None:
    compare(chain(op_types, 600, of_a_shape=True), [np.zeros(n, np.float32) for n in (1, 17)])


@pytest.mark.parametrize("op_types", [["Add"], ["Mul", "Div", "Add"]])
def test_six_hundred_operations_on_a_size_that_is_fed_run_on_the_plugin(op_types: list[str]) -> None:
    compare(chain(op_types, 600, of_a_shape=False), [np.array([n]) for n in (1, 17)])


def test_shape_arithmetic_on_inputs_is_done_once_for_all_that_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counting(*arguments: Any) -> Any:
        calls.append(1)
        return fold(*arguments)

    monkeypatch.setattr(elementwise, "fold", counting)
    data = chain(["Add"], 12, of_a_shape=False, twice=True)
    compare(data, [np.array([3])])
    assert 12 <= len(calls) <= 12 * 20
