"""Guards that a plan needs because of the choice of a kernel."""

from __future__ import annotations

from ...program.expressions.symbolic import Dim, is_read_back
from ...program.lowering.context import Lowering


def try_guard(ctx: Lowering, condition: Dim) -> bool:
    """Guard the plan on ``condition``. Return False if it is false, or depends on sizes computed on the device."""
    return not is_read_back(condition) and ctx.guard(condition)
