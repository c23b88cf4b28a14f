"""Generic access to the tensors of a step through the fields of its dataclass.

Passes rewrite tensors through `TensorFields`, so that a field that is added later is rewritten too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from .tensor import Tensor

if TYPE_CHECKING:
    from typing import Self


class TensorFields:
    """A dataclass whose fields contain tensors: directly, in tuples, or in other dataclasses of this kind."""

    def tensors(self, without: Collection[str] = ()) -> tuple[Tensor, ...]:
        """Return the tensors of all fields except ``without``, in the order of the fields."""
        names = (name for name in _names(self) if name not in without)
        return tuple(x for name in names for x in _found(getattr(self, name)))

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return a copy with ``function`` applied to each tensor, or the object itself if no tensor changes."""
        old = {name: getattr(self, name) for name in _names(self)}
        new = {name: _mapped(value, function) for name, value in old.items()}
        changed: dict[str, Any] = {name: value for name, value in new.items() if value is not old[name]}
        return replace(self, **changed) if changed else self  # type: ignore[type-var]


def _names(holder: TensorFields) -> tuple[str, ...]:
    """Return the names of the fields except ``nodes``, which holds no tensors and may be long."""
    return tuple(field.name for field in fields(holder) if field.name != "nodes")  # type: ignore[arg-type]


def _found(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _found(item)
    elif isinstance(value, TensorFields):
        yield from value.tensors()


def _mapped(value: object, function: Callable[[Tensor], Tensor]) -> object:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, TensorFields):
        return value.map_tensors(function)
    if not isinstance(value, tuple):
        return value
    new = tuple(_mapped(item, function) for item in value)
    return value if all(one is two for one, two in zip(new, value, strict=True)) else new
