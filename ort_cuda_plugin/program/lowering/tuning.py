"""The tuner: chooses among the ways to compute a step, or an application's operator, by what they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from ..steps.steps import Sums, Tactic
from ..steps.tensor import Tensor

if TYPE_CHECKING:
    from .context import Lowering

Make: TypeAlias = "Callable[[Lowering, Sequence[Tensor | None], str], object]"
"""Records in a context what an operator does with its inputs by the tactic of this name."""


class Tuner(Protocol):
    """Chooses by measuring."""

    def tactic(self, ctx: Lowering, step: Sums, names: Sequence[str]) -> Tactic:
        """The fastest of ``names``, of which rules prefer the first; without a name where that is not known."""

    def fastest(
        self, ctx: Lowering, problem: str, inputs: Sequence[Tensor | None], names: Sequence[str], make: Make
    ) -> Tactic:
        """The fastest of the tactics ``names``; without a name where that is not known.

        ``problem`` names what is computed, with all that decides how long it takes beside types and sizes.
        """
