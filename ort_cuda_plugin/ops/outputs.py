"""Tests whether a node's output is used."""

from __future__ import annotations

from ..program.lowering.context import Lowering


def is_used(ctx: Lowering, output: int) -> bool:
    """Return whether the current node names this output, so that the model may read it."""
    return ctx.node is not None and len(ctx.node.outputs) > output and ctx.node.outputs[output] is not None
