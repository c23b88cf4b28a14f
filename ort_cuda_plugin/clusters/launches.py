"""Compiles the recorded steps of a cluster into the launches of its plan: places outputs, runs the passes, emits
kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..kernels.emit import emit
from ..kernels.packed import pack
from ..kernels.tactics import Tuner, is_of_integers
from ..model.ir import Node
from ..passes.constant_folding import fixed_buffers, is_fixed, split_constants
from ..passes.fold_dequantize import fold_dequantize, fold_dequantize_into_inputs
from ..passes.horizontal_integer_gemm import merge_integer_gemms
from ..passes.kernel_selection import choose
from ..passes.split_k_fusion import fuse_split_k
from ..passes.squeeze_excite_fusion import fuse_squeeze_excite
from ..passes.table import Watch, run_passes
from ..passes.tf32_as_scaled_f16 import store_tf32_as_scaled_f16
from ..program.lowering import Lowering
from ..program.tensor import BufferKind, Tensor
from ..program.trace import Recordable, Step
from ..program.traffic import ProgramTraffic, traffic
from ..program.verify import Verifier, is_wanted

Output = tuple[Tensor, Node | None]
"""A result of a cluster, and the node that produces it."""


def place_outputs(ctx: Lowering, outputs: Sequence[Output]) -> list[Output]:
    """Place the outputs in separate buffers. Producers write to them directly if they can; the others are copied."""
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


def _both(first: Watch | None, second: Watch) -> Watch:
    def watch(name: str, steps: Sequence[Step]) -> None:
        if first is not None:
            first(name, steps)
        second(name, steps)

    return watch


def make_launches(
    ctx: Lowering, watch: Watch | None = None, tuner: Tuner | None = None
) -> tuple[list[list[Recordable]], list[Recordable], ProgramTraffic]:
    """Compile the steps in ``ctx.trace``: return launches that run once, in independent groups, launches of each Run,
    and traffic.

    ``watch`` sees the steps after each pass, and the launches. ``tuner`` is asked before heuristics choose a kernel.
    The traffic is that of a Run.
    """
    verify, show = Verifier(ctx.stand_ins) if is_wanted() else None, watch
    if verify is not None:
        watch = _both(watch, verify)
    steps = run_passes(ctx.trace.steps, ctx.options.fusion, watch, attention=ctx.options.fuses_attention)
    if ctx.options.fusion:
        steps = fuse_squeeze_excite(ctx, steps)
        if watch:
            watch("chain", steps)
    least = fold_dequantize(steps) if ctx.options.fusion else steps
    known = fixed_buffers(least) if ctx.options.fusion else {}
    compulsory = traffic(step for step in least if not is_fixed(step, known))
    is_chosen = bool(ctx.device.libraries) or not ctx.device.emulated or tuner is not None
    if is_chosen:
        if ctx.options.fusion:
            # What tensor cores multiply as it is stored does not become float32 for a library.
            steps = fold_dequantize_into_inputs(fold_dequantize(steps, lambda step: is_of_integers(ctx, step)))
            steps = merge_integer_gemms(ctx, steps)
            if watch:
                watch("integers", steps)
            steps = store_tf32_as_scaled_f16(ctx, steps)
            if watch:
                watch("halves", steps)
            steps = fuse_split_k(ctx, steps)
            if watch:
                watch("cut", steps)
        steps = choose(ctx, steps, tuner, verify)
        if watch:
            watch("choose", steps)
    if ctx.options.fusion:
        steps = fold_dequantize(steps) if is_chosen else least
        if watch:
            watch("narrow", steps)
    launches = emit(ctx, steps)
    if watch:
        watch("emitted", launches)
    if not ctx.options.fusion:
        return [], launches, ProgramTraffic(compulsory, traffic(launches))
    fixed, rest = split_constants(launches)
    if verify is not None:
        verify("split", [*(launch for group in fixed for launch in group), *rest])
    if show and fixed:
        show("split, of what is computed once", [launch for group in fixed for launch in group])
        show("split, of each Run", rest)
    return fixed, rest, ProgramTraffic(compulsory, traffic(rest))
