"""Composition of strided views: maps the coordinates of a view to those of the dense tensor that it views."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...program.expressions.symbolic import Dim, floordiv, le
from ...program.steps.tensor import contiguous_strides


@dataclass(frozen=True)
class Path:
    """An affine map from a view's coordinates to those of the dense tensor.

    Coordinate k of the dense tensor is ``starts[k]`` plus, for each axis of the view with ``targets[axis] == k``,
    ``factors[axis]`` times the view's coordinate on that axis. An axis with the target None is broadcast. ``digits[k]``
    lists the axes with target k, the innermost first.
    Example: ``x[:, 2:6].transpose()`` of a dense x [3, 8] has shape [4, 3], targets (1, 0), factors (1, 1), starts (0,
        2).
    """

    targets: tuple[int | None, ...]
    factors: tuple[Dim, ...]
    starts: tuple[Dim, ...]
    digits: tuple[tuple[int, ...], ...]

    def strides(self, beneath: Sequence[Dim]) -> tuple[Dim, ...]:
        """Return a tensor's strides over the view's axes; ``beneath`` are its strides over the dense dimensions."""
        return tuple(
            0 if target is None else factor * beneath[target]
            for target, factor in zip(self.targets, self.factors, strict=True)
        )

    def strides_beneath(self, shape: Sequence[Dim], strides: Sequence[Dim]) -> tuple[Dim, ...] | None:
        """Return a tensor's strides over the dense dimensions; ``strides`` are its strides over the axes of a view of
        ``shape``.

        Inverse of `strides`. The view must contain every element of the dense tensor once (`covers`). Returns None if
        the axes that form one dense dimension have no common stride, or if the view runs backwards along an axis.
        """
        result: list[Dim] = []
        for axes in self.digits:
            if any(le(self.factors[axis], 0) == 1 for axis in axes):
                return None
            if any(strides[outer] != strides[inner] * shape[inner] for inner, outer in pairwise(axes)):
                return None
            result.append(strides[axes[0]] if axes else 0)
        return tuple(result)

    def offset(self, beneath: Sequence[Dim]) -> Dim:
        """Return the offset of the view's first element in a tensor with strides ``beneath`` over the
        dense dimensions.
        """
        total: Dim = 0
        for start, stride in zip(self.starts, beneath, strict=True):
            total = total + start * stride
        return total


def find_path(shape: Sequence[Dim], strides: Sequence[Dim], offset: Dim, beneath: Sequence[Dim]) -> Path | None:
    """Return the map from a view (``shape``, ``strides``, ``offset``) to a dense tensor with dimensions ``beneath``.

    Returns None if there is no affine map, or if none can be proven for all symbolic sizes. For example, an axis of the
    view may cross two dense dimensions.
    """
    targets: list[int | None] = [None] * len(shape)
    factors: list[Dim] = [0] * len(shape)
    pending = {axis for axis, (dim, stride) in enumerate(zip(shape, strides, strict=True)) if dim != 1 and stride != 0}
    digits: list[list[int]] = [[] for _ in beneath]
    units = contiguous_strides(beneath)
    starts = _starts(offset, beneath, units)
    if starts is None:
        return None
    for number in reversed(range(len(beneath))):
        size, unit = beneath[number], units[number]
        start = starts[number]
        covered: Dim = 1
        # View axes that share a dense dimension are the digits of a mixed-radix number: the factor of each axis is the
        # product of the sizes of the axes inside it.
        while covered != size:
            axis = next((axis for axis in pending if strides[axis] == unit * covered), None)
            if axis is None:
                break
            pending.remove(axis)
            targets[axis], factors[axis] = number, covered
            digits[number].append(axis)
            covered = covered * shape[axis]
        if covered == 1 and size != 1:
            found = _stepping_axis(shape, strides, pending, unit, start, size)
            if found is not None:
                axis, factor = found
                pending.remove(axis)
                targets[axis], factors[axis] = number, factor
                digits[number].append(axis)
        elif le(start + covered, size) != 1:
            return None
    if pending:
        return None
    return Path(tuple(targets), tuple(factors), starts, tuple(map(tuple, digits)))


def _starts(offset: Dim, beneath: Sequence[Dim], units: Sequence[Dim]) -> tuple[Dim, ...] | None:
    """Return the dense coordinates of the element at ``offset``; None if they cannot be proven for all sizes."""
    starts: list[Dim] = []
    for size, unit in zip(beneath, units, strict=True):
        if isinstance(offset, int) and isinstance(unit, int):
            start: Dim | None = offset // unit if unit else 0
        else:
            start = exact_quotient(offset, unit)
        if start is None or (start != 0 and le(start + 1, size) != 1):
            start = 0
        starts.append(start)
        offset = offset - start * unit
    return tuple(starts) if offset == 0 else None


def _stepping_axis(
    shape: Sequence[Dim], strides: Sequence[Dim], pending: set[int], unit: Dim, start: Dim, size: Dim
) -> tuple[int, Dim] | None:
    """Return (axis, step) for a view axis that goes through a dimension of ``size`` from ``start`` in a constant step;
    else None.
    """
    for axis in sorted(pending):
        factor = exact_quotient(strides[axis], unit)
        if isinstance(factor, int):
            end = start + (shape[axis] - 1) * factor
            if le(end + 1, size) == 1 and le(0, end) == 1:
                return axis, factor
    return None


def exact_quotient(dividend: Dim, divisor: Dim) -> Dim | None:
    """Return ``dividend / divisor`` if that is an integer for all symbolic sizes, else None."""
    if divisor == 1:
        return dividend
    if divisor == 0:
        return None
    quotient = floordiv(dividend, divisor)
    return quotient if quotient * divisor == dividend else None


def covers(shape: Sequence[Dim], path: Path, beneath: Sequence[Dim]) -> bool:
    """Return whether the view contains every element of the dense tensor exactly once."""
    if any(target is None and dim != 1 for target, dim in zip(path.targets, shape, strict=True)):
        return False
    counts: list[Dim] = [1] * len(beneath)
    for target, dim, factor in zip(path.targets, shape, path.factors, strict=True):
        if target is not None:
            counts[target] = counts[target] * dim
            if factor == 0:
                return False
    return all(count == size for count, size in zip(counts, beneath, strict=True))
