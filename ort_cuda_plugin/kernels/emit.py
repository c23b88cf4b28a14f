"""From steps to launches: makes the kernel of every map, row program, product and convolution of a trace."""

from __future__ import annotations

from collections.abc import Iterable

from ..program.lowering import Lowering
from ..program.steps import Attend, Contract, Convolve, Map, Rows, Sums
from ..program.trace import Recordable, Step
from .attend import launch_attend
from .attend_matrices import attend_by_matrices
from .contract import launch_contract
from .convolve import launch_convolve
from .map import launch_map
from .split_rows import launch_rows
from .tactics import MATRICES, explain

__all__ = ["emit", "launch_step"]


def emit(ctx: Lowering, steps: Iterable[Step]) -> list[Recordable]:
    """``steps`` with launches in place of those that say no kernel yet. Guards of the kernels join the trace's.

    The function that makes a step's launches may record more steps before them, such as a copy of weights.
    """
    launched: list[Recordable] = []
    for step in steps:
        if not isinstance(step, Map):
            launched.append(step)
            continue
        with ctx.recording(step.nodes) as made:
            launch_step(ctx, step)
            if isinstance(step, Sums):
                explain(ctx, step)
        launched += emit(ctx, made)
    return launched


def launch_step(ctx: Lowering, step: Map) -> None:
    """Makes the kernels of one step, and launches them."""
    if isinstance(step, Contract):
        launch_contract(ctx, step)
    elif isinstance(step, Attend):
        if step.tactic.name not in ("", MATRICES) or not attend_by_matrices(ctx, step):
            launch_attend(ctx, step)
    elif isinstance(step, Convolve):
        launch_convolve(ctx, step)
    elif isinstance(step, Rows):
        launch_rows(ctx, step)
    else:
        launch_map(ctx, step)
