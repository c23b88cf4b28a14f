"""The shapes that plans of a context are built for where the model leaves dimensions open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..model.ir import Value

SAMPLES = ((2, 224), (1, 64), (8, 8), (4, 1), (1, 1))
"""Sizes of open dimensions: of those that are first in an input, and of all others.

A plan's guards say where else it holds. So these stand for kinds: one or several, small or large.
"""


def sample_shapes(inputs: Sequence[Value], ranks: Mapping[str, int]) -> Iterator[list[tuple[int, ...]]]:
    """Shapes of all inputs, one list after the other; none where a rank is not known.

    Dimensions of one name are equal, as the model says.
    """
    shapes: list[tuple[int | str | None, ...]] = []
    for value in inputs:
        rank = ranks.get(value.name)
        if value.shape is None and rank is None:
            return
        shapes.append(value.shape if value.shape is not None else (None,) * (rank or 0))
    leading = {shape[0] for shape in shapes if shape and shape[0] is not None}
    for first, other in SAMPLES:
        yield [
            tuple(
                dim if isinstance(dim, int) else first if dim in leading or (dim is None and axis == 0) else other
                for axis, dim in enumerate(shape)
            )
            for shape in shapes
        ]
