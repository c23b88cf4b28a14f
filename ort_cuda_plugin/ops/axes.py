"""Axes as ONNX counts them: negative ones from the end."""

from __future__ import annotations

from collections.abc import Iterable

from ort_cuda_plugin.graph.ir import InvalidModel, Unsupported
from ort_cuda_plugin.graph.symbolic import Dim
from ort_cuda_plugin.graph.tensor import Tensor


def normalize_axis(axis: Dim, rank: int) -> int:
    """The axis counted from the front.

    Raises InvalidModel where it is outside -rank..rank-1, Unsupported where it is not known before the Run.
    """
    if not isinstance(axis, int):
        raise Unsupported("shape", "an axis that is not known before the Run")
    if not -rank <= axis < rank:
        raise InvalidModel(f"axis {axis} of a tensor of rank {rank}")
    return axis % rank


def normalize_axes(axes: Iterable[Dim], rank: int) -> tuple[int, ...]:
    """As `normalize_axis` for several, in order. Raises InvalidModel for one that is named twice."""
    result = tuple(normalize_axis(axis, rank) for axis in axes)
    if len(set(result)) != len(result):
        raise InvalidModel(f"axes {result} name one twice")
    return result


def axes_count(axes: Tensor) -> int:
    """How many axes a one-dimensional input names. Raises Unsupported where that is not known before the Run."""
    if not isinstance(axes.size, int):
        raise Unsupported("shape", "a number of axes that is not known before the Run")
    return axes.size
