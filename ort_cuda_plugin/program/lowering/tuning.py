"""The tuner's interface: chooses among the tactics of a step, or of a custom operator, by their times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from ..steps.steps import Sums, Tactic
from ..steps.tensor import Tensor

if TYPE_CHECKING:
    from .context import Lowering

Make: TypeAlias = "Callable[[Lowering, Sequence[Tensor | None], str], object]"
"""Records in a context an operator's work on its inputs, by the tactic of this name."""


class Tuner(Protocol):
    """Chooses by measuring."""

    def tactic(self, ctx: Lowering, step: Sums, names: Sequence[str]) -> Tactic:
        """Return the fastest of ``names``, of which rules prefer the first; without a name if that is not known."""

    def fastest(
        self, ctx: Lowering, problem: str, inputs: Sequence[Tensor | None], names: Sequence[str], make: Make
    ) -> Tactic:
        """Return the fastest of the tactics ``names``; without a name if that is not known. ``problem`` identifies the
        computation, with everything that decides its time besides types and sizes.
        """
