"""Constant folding on the device: launches that depend only on weights run once, when a plan is made, and the plan uses
their results as weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..model.ir import Constant, DType, Node
from ..program.steps.tensor import Buffer, BufferKind, Tensor, known_bytes
from ..program.steps.trace import Recordable, Trace
from .planner import make_plan
from .tables import KnownEntries, Precomputation, Precomputed, Tables, weight_key


def precompute(groups: Sequence[Sequence[Recordable]], rest: Sequence[Recordable], tables: Tables) -> None:
    """Convert each group of launches to a `Precomputation`, and the results that ``rest`` reads to weights."""
    wanted = {buffer for launch in rest for buffer in launch.reads}
    for group in groups:
        makers = {buffer: launch.node for launch in group for buffer in launch.writes}
        _precompute(group, {buffer: node for buffer, node in makers.items() if buffer in wanted}, tables)


def _precompute(group: Sequence[Recordable], results: dict[Buffer, Node | None], tables: Tables) -> None:
    outputs = []
    for number, (buffer, node) in enumerate(results.items()):
        buffer.kind, buffer.index = BufferKind.OUTPUT, number
        outputs.append((Tensor(DType.UINT8, (buffer.nbytes,), buffer), node))
    own = Tables(KnownEntries())
    plan = make_plan(Trace(), group, (), outputs, (), own, 0)
    kernels = tuple(own.kernels.new)
    weights = tuple(weight for weight in own.weights.new if isinstance(weight, Constant))
    program = Precomputation(plan, kernels, weights, (plan, kernels, tuple(map(weight_key, weights))))
    for number, buffer in enumerate(results):
        buffer.kind = BufferKind.WEIGHT
        tables.precomputed[buffer] = Precomputed(program, number, known_bytes(buffer))
        tables.weight(buffer)
