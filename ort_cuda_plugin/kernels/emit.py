"""From steps to launches: makes the kernel of every map, row program, product and convolution of a trace."""

from __future__ import annotations

from collections.abc import Iterable

from ..graph.lowering import Lowering
from ..graph.steps import Contract, Convolve, Map, Rows
from ..graph.trace import Recordable, Step
from .contract import launch_contract
from .elementwise import launch_map
from .reduce import launch_rows

__all__ = ["emit"]


def emit(ctx: Lowering, steps: Iterable[Step]) -> list[Recordable]:
    """``steps`` with launches in place of those that say no kernel yet. Guards of the kernels join the trace's."""
    recorded, node = ctx.trace.steps, ctx.nodes
    launched: list[Recordable] = []
    launches: list[Step] = []
    ctx.trace.steps = launches
    for step in steps:
        if isinstance(step, Map):
            ctx.nodes = step.nodes
            if isinstance(step, Contract):
                launch_contract(ctx, step)
            elif isinstance(step, Convolve):
                step.launch(ctx, step)
            elif isinstance(step, Rows):
                launch_rows(ctx, step)
            else:
                launch_map(ctx, step)
            launched += (step for step in launches if not isinstance(step, Map))
            launches.clear()
        else:
            launched.append(step)
    ctx.trace.steps, ctx.nodes = recorded, node
    return launched
