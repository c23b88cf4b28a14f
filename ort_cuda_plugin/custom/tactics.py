"""Tactics: several ways in which an author's function can do the same, of which one is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..program.lowering import Lowering, Tensor
from .operator import LowerFunction


class Tactics:
    """Those of one operator. ``candidates`` says which there are for a node, the default one first."""

    def __init__(self, label: str, takes_tactic: bool) -> None:
        self.label = label
        self.takes_tactic = takes_tactic
        self.candidates: Callable[..., Sequence[Any]] | None = None

    def around(self, function: Callable[..., Any]) -> LowerFunction:
        """The function with the tactic that is taken, where it has any."""

        def call(ctx: Lowering, inputs: Sequence[Tensor | None], attributes: Mapping[str, Any]) -> Sequence[Tensor]:
            if not self.takes_tactic:
                return function(ctx, inputs, attributes)  # type: ignore[no-any-return]
            return function(ctx, inputs, attributes, tactic=self._chosen(ctx, inputs, attributes))  # type: ignore[no-any-return]

        return call

    def _chosen(self, ctx: Lowering, inputs: Sequence[Tensor | None], attributes: Mapping[str, Any]) -> Any:
        given = self.candidates(ctx, *inputs, **attributes) if self.candidates is not None else ()
        return given[0] if given else None
