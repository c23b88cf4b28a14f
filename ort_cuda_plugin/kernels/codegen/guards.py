"""Guards that the choice of a kernel adds to a plan."""

from __future__ import annotations

from ...program.expressions.symbolic import Dim, is_read_back
from ...program.lowering.context import Lowering


def try_guard(ctx: Lowering, condition: Dim) -> bool:
    """Return whether ``condition`` holds for the sizes that the plan is built for, and guard the plan on this result.

    Returns False, without a guard, if the condition depends on sizes that are computed on the device.
    """
    return not is_read_back(condition) and ctx.guard(condition)
