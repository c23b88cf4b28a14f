"""Affine views: strided views of a dense tensor as coordinates in that tensor."""

from __future__ import annotations

import pytest

from ort_cuda_plugin.passes.analysis.affine_view import find_path


@pytest.mark.parametrize(("size", "is_within"), [(7, False), (8, False), (9, True)])
def test_the_last_step_along_a_dimension_stays_inside_it(size: int, is_within: bool) -> None:
    # Three elements with a stride of 4: offsets 0, 4 and 8.
    path = find_path((3,), (4,), 0, (size,))
    assert (path is not None) == is_within
    assert path is None or (path.targets, path.factors) == ((0,), (4,))
