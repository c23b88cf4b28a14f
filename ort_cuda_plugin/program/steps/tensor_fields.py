"""Generic access to the tensors of a step through the fields of its dataclass.

Passes rewrite tensors through `TensorFields`, so that they also reach fields that are added later.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from .tensor import Tensor

if TYPE_CHECKING:
    from typing import Self


class TensorFields:
    """A dataclass with tensors in its fields: directly, in tuples, or in other dataclasses of this type."""

    def tensors(self, without: Collection[str] = ()) -> tuple[Tensor, ...]:
        """Return the tensors of all fields except those named in ``without``, in the order of the fields."""
        kind: type = type(self)
        found: list[Tensor] = []
        for name in field_names(kind):
            if name not in without:
                _collect(getattr(self, name), found)
        return tuple(found)

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return a copy with each tensor replaced by ``function`` of it, or the object itself if no tensor changes."""
        kind: type = type(self)
        old = {name: getattr(self, name) for name in field_names(kind)}
        new = {name: _mapped(value, function) for name, value in old.items()}
        changed: dict[str, Any] = {name: value for name, value in new.items() if value is not old[name]}
        return replace(self, **changed) if changed else self  # type: ignore[type-var]


@cache
def field_names(kind: type) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass, without ``nodes``, which holds no tensors and may be long."""
    return tuple(field.name for field in fields(kind) if field.name != "nodes")


def _collect(value: object, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, tuple):
        for item in value:
            _collect(item, found)
    elif isinstance(value, TensorFields):
        found += value.tensors()


def _mapped(value: object, function: Callable[[Tensor], Tensor]) -> object:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, TensorFields):
        return value.map_tensors(function)
    if not isinstance(value, tuple):
        return value
    new = tuple([_mapped(item, function) for item in value])
    return value if all(map(operator.is_, new, value)) else new
