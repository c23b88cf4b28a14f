"""Guards that the choice of a kernel adds to a plan."""

from __future__ import annotations

from ...program.expressions.symbolic import Dim, is_read_back
from ...program.lowering.context import Lowering


def try_guard(ctx: Lowering, condition: Dim) -> bool:
    """Guard the plan on ``condition``; return False if it is false, or if sizes computed on the device decide it."""
    return not is_read_back(condition) and ctx.guard(condition)
