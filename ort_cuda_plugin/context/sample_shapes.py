"""Sample shapes: the shapes for which a context gets plans if the model leaves dimensions open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..model.ir import Value

SAMPLES = ((2, 224), (1, 64), (8, 8), (4, 1), (1, 1))
"""Sizes assumed for dynamic dimensions: (first dimension of an input, all others).

A plan's guards allow other sizes too, so each pair stands for a class: first dimensions of one or several, other
dimensions small or large.
"""


Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of some of a cluster's inputs, by name."""


def sample_shapes(
    inputs: Sequence[Value], ranks: Mapping[str, int], wanted: Sequence[Shapes] = ()
) -> Iterator[list[tuple[int, ...]]]:
    """Yield shapes of all inputs, the ``wanted`` ones last; nothing if a rank is unknown.

    Dimensions with the same name in the model have the same size.
    """
    shapes: list[tuple[int | str | None, ...]] = []
    for value in inputs:
        rank = ranks.get(value.name)
        if value.shape is None and rank is None:
            return
        shapes.append(value.shape if value.shape is not None else (None,) * (rank or 0))
    for first, other in SAMPLES:
        yield _sized(shapes, {}, first, other)
    for given in wanted:
        known: dict[str, int] = {}
        told = []
        for value, shape in zip(inputs, shapes, strict=True):
            sizes = given.get(value.name)
            if sizes is None or len(sizes) != len(shape):
                told.append(shape)
                continue
            known.update((dim, size) for dim, size in zip(shape, sizes, strict=True) if isinstance(dim, str))
            told.append(sizes)
        yield _sized(told, known, *SAMPLES[-1])


def _sized(
    shapes: Sequence[tuple[int | str | None, ...]], known: Mapping[str, int], first: int, other: int
) -> list[tuple[int, ...]]:
    """Replace unknown dimensions by sizes: ``known`` by name, else ``first`` for leading ones, else ``other``."""
    leading = {shape[0] for shape in shapes if shape and shape[0] is not None}

    def size(dim: int | str | None, axis: int) -> int:
        if isinstance(dim, int):
            return dim
        if dim is not None and dim in known:
            return known[dim]
        return first if dim in leading or (dim is None and axis == 0) else other

    return [tuple(size(dim, axis) for axis, dim in enumerate(shape)) for shape in shapes]
