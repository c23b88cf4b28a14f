"""Normalization of ONNX axes, which may be negative to count from the end."""

from __future__ import annotations

from collections.abc import Iterable

from ..program.expressions.symbolic import Dim
from ..program.lowering.context import Lowering, Tensor
from . import requirements as require


def normalize_axis(axis: Dim, rank: int) -> int:
    """Return the axis counted from the front.

    Raises InvalidModel for an axis outside [-rank, rank), Unsupported for an axis whose value only a Run computes.
    """
    axis = require.static(axis, "axis")
    require.that(-rank <= axis < rank, "axis", f"be in [{-rank}, {rank})", axis)
    return axis % rank


def normalize_axes(axes: Iterable[Dim], rank: int) -> tuple[int, ...]:
    """Normalize several axes, in order. Raises InvalidModel for a duplicate, and the errors of `normalize_axis`."""
    result = tuple(normalize_axis(axis, rank) for axis in axes)
    require.that(len(set(result)) == len(result), "axes", "name each axis once", result)
    return result


def axes_count(axes: Tensor) -> int:
    """Return the number of elements of the input ``axes``. Raises Unsupported if the number is dynamic."""
    return require.static(axes.size, "the number of axes")


def axis_of_input(ctx: Lowering, axis: Tensor, rank: int, what: str, guess: int = 0) -> int:
    """Return the normalized axis in the one-element input ``axis``; a guard limits the plan to this axis.

    ``guess`` is a valid axis, which a claim assumes if the contents of ``axis`` are unknown. Raises InvalidModel if
    ``axis`` has another number of elements, or if its element is outside [-rank, rank).
    """
    values = ctx.host_constants(axis, what, [guess])
    require.that(len(values) == 1, what, "have one element", len(values))
    return normalize_axis(values[0], rank)
