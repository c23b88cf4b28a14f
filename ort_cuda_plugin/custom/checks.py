"""Checks in authors' code, whose errors name the operator, the value and the reason."""

from __future__ import annotations

from ..model.ir import InvalidModel
from ..program.expressions.symbolic import Dim, Expr, hint, is_read_back
from ..program.lowering.context import Lowering


def check(ctx: Lowering, condition: Dim | bool, what: str, value: object, why: str) -> None:
    """Raise InvalidModel with ``what``, its ``value`` and ``why`` if the condition does not hold.

    A condition on sizes or on host values is looked at when they are known: in the Run that brings them, before it
    computes anything. A plan then holds where the condition does. One on values that a Run computes is looked at in
    the middle of it; its error has no value.
    """
    if isinstance(condition, bool):
        condition = int(condition)
    if not isinstance(condition, int) and is_read_back(condition):
        ctx.require(condition, f"{what}: {why}")
        return
    if ctx.settled(condition) is False:
        shown = hint(value) if isinstance(value, Expr) else value
        raise InvalidModel(f"{what} = {shown!r}: {why}")
