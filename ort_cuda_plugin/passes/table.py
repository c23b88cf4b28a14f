"""The table of passes: every pass between the lowering of operators and the launches of a cluster, in order.

A pass is a function from a program to a program. Its docstring says what it does, what it assumes besides
docs/invariants.md, and what it guarantees to later passes. `run_passes` runs the passes that apply to the device and
the session's options, and shows the program after each pass to an observer (`Watch`). tests/passes compares the program
before and after each pass, and fails for a pass without such a test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..program.lowering.context import Lowering
from ..program.steps.trace import Step
from ..schedule.flash import has_tf32
from .attention.attention_decomposition import decompose_attention
from .attention.attention_fusion import fuse_attention
from .attention.gqa_broadcast_elimination import eliminate_gqa_broadcasts
from .contraction.fold_dequantize import fold_dequantize, fold_dequantize_into_inputs, fold_dequantize_of_integers
from .contraction.kernel_selection import select_kernels
from .contraction.low_rank_fusion import fuse_low_rank
from .contraction.pointwise_as_gemm import pointwise_as_gemm
from .contraction.tf32_as_scaled_f16 import store_tf32_as_scaled_f16
from .emission.emission import emit
from .fusion.horizontal_conv import merge_convolutions
from .fusion.horizontal_fusion import fuse_horizontally
from .fusion.horizontal_gemm import merge_gemms
from .fusion.horizontal_integer_gemm import merge_integer_gemms
from .fusion.split_k_fusion import fuse_split_k
from .fusion.squeeze_excite_fusion import fuse_squeeze_excite
from .fusion.vertical_fusion import fuse_vertically
from .layout.flatten_channel_axes import flatten_channel_axes
from .layout.l2_batch_tiling import tile_batches_for_l2
from .layout.layout_propagation import propagate_channels_last
from .layout.loop_interchange import interchange_loops
from .simplification.common_subexpression_elimination import eliminate_common_subexpressions
from .simplification.concat_elimination import eliminate_concats
from .simplification.constant_folding import fold_constants
from .simplification.dead_code_elimination import eliminate_dead_code
from .simplification.rematerialization import rematerialize
from .simplification.sink_through_concat import sink_through_concat

__all__ = ["FUSION", "KERNELS", "KERNEL_SELECTION", "LOWERED", "PASSES", "Pass", "Watch", "run_passes"]

Watch: TypeAlias = Callable[[str, Sequence[Step]], None]
"""Observer of the passes: called with the name of each pass and the program after it."""

LOWERED = "lowering"
"""Name with which an observer (`Watch`) receives the program before the first pass, as the operators recorded it."""


@dataclass(frozen=True)
class Pass:
    """A compiler pass, which runs if ``when`` is true for the device and the options of the context.

    ``run`` gets the context and the program. It may record guards and folded launches in the context, and does not
    modify the program. ``is_timed``: the pass changes only the speed, and not always for the better. An autotuner
    compares the plan's time with and without the pass.
    """

    name: str
    run: Callable[[Lowering, Sequence[Step]], Sequence[Step]]
    when: Callable[[Lowering], bool]
    is_timed: bool = False


def run_passes(
    ctx: Lowering, steps: Sequence[Step], passes: Sequence[Pass], watch: Watch | None = None
) -> Sequence[Step]:
    """Run the ``passes`` that apply, in order, and return the program; ``watch`` gets the program after each pass."""
    for each in passes:
        if each.when(ctx):
            changed = each.run(ctx, steps)
            if not each.is_timed or ctx.tuner is None or _pays(ctx, each, steps, changed):
                steps = changed
            if watch is not None:
                watch(each.name, steps)
    return steps


def _pays(ctx: Lowering, timed: Pass, before: Sequence[Step], after: Sequence[Step]) -> bool:
    """Return whether the autotuner keeps the program after a pass; True if the pass changed nothing."""
    assert ctx.tuner is not None
    if len(before) == len(after) and all(one is other for one, other in zip(before, after, strict=True)):
        return True
    following = PASSES[PASSES.index(timed) + 1 :]
    return ctx.tuner.pays(ctx, timed.name, before, after, lambda own, steps: run_passes(own, steps, following))


# ---- conditions under which a pass runs ----


def _always(ctx: Lowering) -> bool:
    return True


def _fuses(ctx: Lowering) -> bool:
    """Return False with the session option fusion=0, which keeps steps separate and folds no constants."""
    return ctx.options.fusion


def _fuses_attention(ctx: Lowering) -> bool:
    return ctx.options.fusion and ctx.options.fuses_attention


def _fuses_for_gpu(ctx: Lowering) -> bool:
    return ctx.options.fusion and not ctx.device.emulated


def _selects(ctx: Lowering) -> bool:
    """Return True if steps have several kernels to choose from: on a GPU, with vendor libraries, or with a tuner."""
    return bool(ctx.device.libraries) or not ctx.device.emulated or ctx.tuner is not None


def _selects_and_fuses(ctx: Lowering) -> bool:
    return ctx.options.fusion and _selects(ctx)


def _has_tf32(ctx: Lowering) -> bool:
    return _fuses_for_gpu(ctx) and has_tf32(ctx)


def _has_cudnn(ctx: Lowering) -> bool:
    return "cudnn" in ctx.device.libraries


def _has_libraries(ctx: Lowering) -> bool:
    return ctx.device.libraries.issuperset({"cublaslt", "cudnn"})


# ---- the table ----


def _of_steps(run: Callable[[Sequence[Step]], Sequence[Step]]) -> Callable[[Lowering, Sequence[Step]], Sequence[Step]]:
    """Return the pass ``run``, which needs no context, in the form of the table: a function of context and program."""

    def with_context(ctx: Lowering, steps: Sequence[Step]) -> Sequence[Step]:
        return run(steps)

    with_context.__doc__ = run.__doc__
    return with_context


FUSION = (
    Pass("dead_code_elimination", _of_steps(eliminate_dead_code), _always),
    Pass("sink_through_concat", _of_steps(sink_through_concat), _fuses),
    Pass("vertical_fusion", _of_steps(fuse_vertically), _fuses),
    Pass("rematerialization", _of_steps(rematerialize), _fuses),
    Pass("common_subexpression_elimination", _of_steps(eliminate_common_subexpressions), _fuses),
    Pass("low_rank_fusion", fuse_low_rank, _fuses, is_timed=True),
    Pass("horizontal_gemm", _of_steps(merge_gemms), _fuses, is_timed=True),
    Pass("concat_elimination", eliminate_concats, _fuses),
    Pass("attention_fusion", _of_steps(fuse_attention), _fuses_attention),
    Pass("gqa_broadcast_elimination", _of_steps(eliminate_gqa_broadcasts), _fuses),
    Pass("horizontal_fusion", _of_steps(fuse_horizontally), _fuses, is_timed=True),
    Pass("squeeze_excite_fusion", fuse_squeeze_excite, _fuses_for_gpu),
)
"""Passes that reduce the number of steps and their memory traffic. The minimum traffic of a program is counted after
them.
"""

KERNEL_SELECTION = (
    Pass("attention_decomposition", decompose_attention, _selects),
    Pass("flatten_channel_axes", flatten_channel_axes, _has_cudnn),
    Pass("layout_propagation", propagate_channels_last, _selects, is_timed=True),
    Pass("l2_batch_tiling", tile_batches_for_l2, _fuses_for_gpu, is_timed=True),
    Pass("horizontal_conv", merge_convolutions, _selects, is_timed=True),
    Pass("pointwise_as_gemm", pointwise_as_gemm, _has_libraries),
    Pass("kernel_selection", select_kernels, _selects),
    Pass("loop_interchange", _of_steps(interchange_loops), _selects),
)
"""Passes that choose the engine of each GEMM, convolution and attention step, and the layouts that engines need."""

KERNELS = (
    Pass("fold_dequantize_of_integers", fold_dequantize_of_integers, _selects_and_fuses),
    Pass("fold_dequantize_into_inputs", _of_steps(fold_dequantize_into_inputs), _selects_and_fuses),
    Pass("horizontal_integer_gemm", merge_integer_gemms, _selects_and_fuses, is_timed=True),
    Pass("tf32_as_scaled_f16", store_tf32_as_scaled_f16, _has_tf32, is_timed=True),
    Pass("split_k_fusion", fuse_split_k, _selects_and_fuses, is_timed=True),
    *KERNEL_SELECTION,
    Pass("fold_dequantize", _of_steps(fold_dequantize), _fuses),
    Pass("emission", emit, _always),
    Pass("constant_folding", fold_constants, _fuses),
)
"""Passes that depend on the device's kernels. The last ones produce launches."""

PASSES = (*FUSION, *KERNELS)
