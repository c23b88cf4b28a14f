"""Guards that a choice of a kernel needs."""

from __future__ import annotations

from ...program.expressions.symbolic import Dim, is_read_back
from ...program.lowering.context import Lowering


def try_guard(ctx: Lowering, condition: Dim) -> bool:
    """Guard the plan on ``condition``; False where it does not hold, or where only a Run's own results can tell."""
    return not is_read_back(condition) and ctx.guard(condition)
