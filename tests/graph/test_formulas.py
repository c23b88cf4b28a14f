"""Formulas: the scalar expressions of a program's steps, printed as text."""

from __future__ import annotations

from ort_cuda_plugin.model.ir import DType
from ort_cuda_plugin.program.analysis.formulas import MOST_OPERATIONS, formulas
from ort_cuda_plugin.program.expressions import scalar as s
from ort_cuda_plugin.program.expressions.scalar import Scalar
from ort_cuda_plugin.program.steps.row_program import SUM, Row


def test_a_value_that_is_used_twice_has_a_name() -> None:
    x, row = Scalar(DType.FLOAT32, "leaf"), Row()
    e = s.exp(x - 1.5)
    lines = formulas([("y", e / row.reduce(SUM, e)), ("z", s.cast(x, DType.FLOAT16))], {x: "x"})
    assert lines == ["v1 = exp((x - 1.5))", "y = (v1 / sum(v1))", "z = f16(x)"]


def test_a_large_expression_is_counted() -> None:
    x = value = Scalar(DType.FLOAT32, "leaf")
    for _ in range(MOST_OPERATIONS + 1):
        value = s.exp(value)
    assert formulas([("y", value)], {x: "x"}) == [f"y = an expression of {MOST_OPERATIONS + 1} operations"]


def test_an_expression_as_deep_as_it_may_be_is_written_out() -> None:
    x = value = Scalar(DType.FLOAT32, "leaf")
    for _ in range(MOST_OPERATIONS):
        value = s.exp(value)
    assert formulas([("y", value)], {x: "x"}) == [f"y = {'exp(' * MOST_OPERATIONS}x{')' * MOST_OPERATIONS}"]
