"""Compilation of a cluster's recorded steps into launches: places outputs, runs passes, emits kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..kernels.elementwise.sub_byte import pack
from ..model.ir import Node
from ..passes.contraction.fold_dequantize import fold_dequantize
from ..passes.simplification.constant_folding import fixed_buffers, is_fixed
from ..passes.table import FUSION, KERNEL_SELECTION, KERNELS, LOWERED, Watch, run_passes
from ..program.analysis.traffic import ProgramTraffic, Traffic, traffic
from ..program.analysis.verify import Verifier, check_writers, is_wanted
from ..program.lowering.context import Lowering
from ..program.steps.steps import Map
from ..program.steps.tensor import BufferKind, Tensor
from ..program.steps.trace import Recordable, Step

Output = tuple[Tensor, Node | None]
"""A result of a cluster, and the node that produces it; None for an input of the cluster."""


def place_outputs(ctx: Lowering, outputs: Sequence[Output]) -> list[Output]:
    """Assign separate buffers to the outputs. Producers write them directly if possible; other outputs are copied."""
    placed = []
    for index, (output, node) in enumerate(outputs):
        ctx.node = node
        if output.dtype.is_packed:
            buffer = pack(ctx, output).buffer
            buffer.kind, buffer.index = BufferKind.OUTPUT, index
            placed.append((Tensor(output.dtype, output.shape, buffer), node))
            continue
        tensor = ctx.materialize(output)
        if not tensor.is_contiguous:
            tensor = ctx.contiguous(tensor)
        buffer = tensor.buffer
        if buffer.kind is not BufferKind.SCRATCH or tensor.offset != 0 or buffer.nbytes != tensor.nbytes:
            copy = ctx.empty(tensor.shape, tensor.dtype)
            ctx.copy(copy, tensor)
            tensor, buffer = copy, copy.buffer
        buffer.kind = BufferKind.OUTPUT
        buffer.index = index
        placed.append((tensor, node))
    return placed


def make_launches(
    ctx: Lowering, watch: Watch | None = None
) -> tuple[list[list[Recordable]], list[Recordable], ProgramTraffic]:
    """Compile the steps in ``ctx.trace``.

    Returns independent groups of launches that run once, before the first Run; the launches of each Run; and the memory
    traffic of a Run.
    ``watch`` receives the program after each pass.
    """
    watch = _verified(ctx, watch)
    if watch is not None:
        watch(LOWERED, ctx.trace.steps)
    fused = run_passes(ctx, ctx.trace.steps, FUSION, watch)
    folded: list[Sequence[Step]] = []

    def note(name: str, steps: Sequence[Step]) -> None:
        if name == "fold_dequantize":
            folded.append(steps)
        if watch is not None:
            watch(name, steps)

    launches = [step for step in run_passes(ctx, fused, KERNELS, note) if not isinstance(step, Map)]
    check_writers(KERNELS[-1].name, [*_once(ctx), *launches], ctx.stand_ins)
    if folded and any(each.when(ctx) for each in KERNEL_SELECTION):
        # The minimum traffic assumes that all operands are dequantized when they are loaded. In ``folded``, separate
        # steps dequantize the operands of library calls.
        folded = [fold_dequantize(fused)]
    compulsory = _compulsory(ctx, folded[0] if folded else fused)
    return ctx.trace.folded, launches, ProgramTraffic(compulsory, traffic(launches))


def _verified(ctx: Lowering, watch: Watch | None) -> Watch | None:
    """Return a watch that runs the verifier before ``watch`` if verification is on, else ``watch``."""
    if not is_wanted():
        return watch
    verify = Verifier(ctx.stand_ins)

    def both(name: str, steps: Sequence[Step]) -> None:
        verify(name, [*_once(ctx), *steps])
        if watch is not None:
            watch(name, steps)

    return both


def _once(ctx: Lowering) -> Iterator[Step]:
    """Yield the launches that constant folding moved out of the Runs."""
    return (launch for group in ctx.trace.folded for launch in group)


def _compulsory(ctx: Lowering, steps: Sequence[Step]) -> Traffic:
    """Return the minimum memory traffic of the program's kernels in a Run."""
    fixed = fixed_buffers(steps) if ctx.options.fusion else {}
    return traffic(step for step in steps if not is_fixed(step, fixed))
