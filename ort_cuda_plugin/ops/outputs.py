"""Which outputs of a node the model uses."""

from __future__ import annotations

from ort_cuda_plugin.program.lowering.context import Lowering


def is_used(ctx: Lowering, output: int) -> bool:
    """Return whether the node that is lowered names this output, so that something may read it."""
    return ctx.node is not None and len(ctx.node.outputs) > output and ctx.node.outputs[output] is not None
