"""Checks for operator authors, whose errors name the operator, the value and the reason."""

from __future__ import annotations

from ..model.ir import InvalidModel
from ..program.expressions.symbolic import Dim, Expr, hint, is_read_back
from ..program.lowering.context import Lowering


def check(ctx: Lowering, condition: Dim | bool, what: str, value: object, why: str) -> None:
    """Raise InvalidModel with ``what``, its ``value`` and ``why`` if the condition does not hold.

    A condition on sizes or host values becomes a guard of the plan, and is checked before a Run computes anything. A
    condition on values that the Run computes is checked when the Run has read them; its error does not show the value.
    """
    if isinstance(condition, bool):
        condition = int(condition)
    if not isinstance(condition, int) and is_read_back(condition):
        ctx.require(condition, f"{what}: {why}")
        return
    if ctx.settled(condition) is False:
        shown = hint(value) if isinstance(value, Expr) else value
        raise InvalidModel(f"{what} = {shown!r}: {why}")
