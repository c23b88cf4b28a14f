"""Affine views: strided views of a dense tensor as coordinates in that tensor."""

from __future__ import annotations

import pytest

from ort_cuda_plugin.passes.analysis.affine_view import exact_quotient, find_path
from ort_cuda_plugin.program.expressions.symbolic import Dim, symbol


@pytest.mark.parametrize(("size", "is_within"), [(7, False), (8, False), (9, True)])
def test_the_last_step_along_a_dimension_stays_inside_it(size: int, is_within: bool) -> None:
    # Three elements with a stride of 4: offsets 0, 4 and 8.
    path = find_path((3,), (4,), 0, (size,))
    assert (path is not None) == is_within
    assert path is None or (path.targets, path.factors) == ((0,), (4,))


@pytest.mark.parametrize(
    ("dividend", "divisor", "quotient"), [(12, 4, 3), (12, 5, None), (12, 1, 12), (12, 0, None), (0, 0, None)]
)
def test_a_quotient_is_exact_or_there_is_none(dividend: int, divisor: int, quotient: int | None) -> None:
    n: Dim = symbol(0, "n", 40)
    assert exact_quotient(dividend, divisor) == quotient
    assert exact_quotient(n * dividend, divisor) == (None if quotient is None else n * quotient)
