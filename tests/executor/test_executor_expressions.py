"""The arithmetic of plans in C, against the folding of symbolic integers in Python."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_harness import INT64, PARAMETERS, OnHost, Registers, TestCluster, launch
from ort_cuda_plugin.plan.format import Param, ParamKind, Plan, PlanInput, PlanOutput, Ref, RefKind
from ort_cuda_plugin.program.expressions.operations import ExprOp
from ort_cuda_plugin.program.expressions.symbolic import evaluators


def meaning(a: int, b: int, c: int) -> dict[ExprOp, int]:
    return {op: f(a, b, c) if op is ExprOp.SELECT else f(a, b) for op, f in evaluators.items()}


def every_operation() -> Plan:
    """Return a plan that applies each operation to a, b and c, the values of a host input; row i of the output [n, 6]
    has the result of operation i in column 3, the int64 parameter of a kernel that writes its parameters.
    """
    r = Registers(4)
    results = [r.op(op, 1, 2, 3) for op in evaluators]
    one, rows, columns = r.const(1), r.const(len(results)), r.const(6)
    records = []
    for row, result in enumerate(results):
        params = [Param.pointer(Ref(RefKind.OUTPUT, 0), offset=48 * row)]
        params += [
            Param(ParamKind.I8),
            Param(ParamKind.I16),
            Param.i32(),
            Param.i64(result),
            Param.f32(0),
            Param.f64(0),
        ]
        records.append(launch(PARAMETERS, (one, one, one), params))
    return Plan(
        num_registers=r.count,
        inputs=(PlanInput(INT64, 1, 0, host_register=1, host_count=3),),
        outputs=(PlanOutput(INT64, (rows, columns)),),
        nodes=("arithmetic",),
        exprs=tuple(r.exprs),
        records=tuple(records),
        kernels=tuple(range(PARAMETERS + 1)),
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[TestCluster]:
    with TestCluster(every_operation(), host_inputs=[0], outputs=[INT64]) as made:
        yield made


numbers = st.one_of(st.integers(-9, 9), st.integers(-(1 << 31), 1 << 31))


@given(a=numbers, b=numbers.filter(bool), c=numbers)
def test_every_operation_means_what_constants_are_folded_with(cluster: TestCluster, a: int, b: int, c: int) -> None:
    (out,) = cluster.run(OnHost(np.array([a, b, c], np.int64)))
    assert dict(zip(evaluators, out[:, 3].tolist(), strict=True)) == meaning(a, b, c)


def test_every_operation_is_tested() -> None:
    assert set(evaluators) | {ExprOp.CONST} == set(ExprOp)
