"""Values of a decoder whose K/V caches grow: tensors in buffers of fixed capacity, and sizes that the device counts.

::

    past  [batch, heads, PAST, size]      ->  Growing([batch, heads, capacity, size], {2: 0})
    Shape(past)                           ->  Sizes([batch, heads, PAST, size])
    Concat(past, new, axis=2)             ->  Growing([batch, heads, capacity, size], {2: 1})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from ...model.ir import DType
from ...program.expressions.symbolic import Dim, Expr, symbol
from ...program.lowering.host import HostArray
from ...program.steps.tensor import Tensor

PAST: Final = symbol(-1, "past", 1)
"""The number of cached keys before a step of the decoder, which only the device knows. No tensor's shape has it."""

WHAT_PAST: Final = "past: the number of cached keys"
"""Explains PAST in messages, where it is called "past"."""

_ATOM: Final = PAST.terms[0][0][0]


@dataclass(frozen=True)
class Growing:
    """A tensor whose valid part grows: along each of ``axes``, the first PAST + ``axes[axis]`` elements are valid.

    ``axes[axis]`` is from -1 to 1, because PAST is at least 1, and the capacity is at least PAST + 1.

    The size of a growing axis is the capacity; elements after the valid ones are arbitrary. ``row(first)``, if given,
    computes only the row PAST + ``first`` along axis 2, so that the whole tensor may be dead code. With ``is_shared``
    the model itself treats the tensor as a buffer of this capacity, which past and present share.
    """

    x: Tensor
    axes: Mapping[int, int]
    row: Callable[[Dim], Tensor] | None = None
    is_shared: bool = False


@dataclass(frozen=True)
class BeamOfKey:
    """The input cache_indirection of a decoder, which names the beam that holds each past key.

    It has no tensor: the search moves the keys of the chosen beams instead.
    """


@dataclass(frozen=True)
class Sizes:
    """An integer tensor computed from shapes; elements are symbolic integers, and at least one contains PAST."""

    array: HostArray
    dtype: DType


def has_past(dim: Dim) -> bool:
    """Return whether a sum of products contains PAST."""
    return isinstance(dim, Expr) and any(_ATOM in monomial for monomial, _ in dim.terms)


def elements(extra: int | None) -> str:
    """Return PAST + ``extra`` as text for a message; None stands for a fixed number."""
    return "a fixed number of" if extra is None else repr(PAST + extra)


def after_past(dim: Dim) -> Dim | None:
    """Return ``dim`` - PAST if that does not depend on PAST, else None."""
    rest: Dim = dim - PAST
    return None if has_past(rest) else rest
