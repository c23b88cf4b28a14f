"""Schedules of convolutions: cuDNN, implicit GEMM on tensor cores or in SIMT tiles, direct, depthwise, im2col."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..kernels.conv.channels_last import is_channels_last, matrix_convolution_kind, place_stride, prefers_channels_last
from ..kernels.conv.depthwise_conv import depthwise_guards, is_depthwise
from ..kernels.conv.implicit_gemm_mma import count_pixels, count_taps, gemm_sizes
from ..kernels.gemm.tf32_weights_as_f16 import has_compact_lines
from ..kernels.gemm.tile_shapes import TileConfig
from ..kernels.library.library_calls import cudnn_form
from ..program.expressions.symbolic import Dim, hint, is_const, le, product
from ..program.lowering.context import Lowering
from ..program.steps.schedule import Choice, Engine, Schedule, WeightLayout
from ..program.steps.steps import Convolve
from .cost_model import choose_tile_config, epilogue_cost, no_more_blocks
from .gemm import mma_schedules, simt_schedules, tile_guards
from .reasons import by_rules

__all__ = ["conv_choices", "is_direct", "merged_conv_choice", "own_conv_schedules"]

DIRECT_ROWS = 16
"""Maximum output channels per group for which rules prefer a direct convolution."""
MAX_TUNED_DIRECT_ROWS = 64
"""Maximum output channels per group for which the autotuner also times a direct convolution."""
IM2COL_PIXELS = 32
"""Maximum output pixels per image for im2col on the emulated device: half the width of a tile."""


def conv_choices(ctx: Lowering, step: Convolve) -> Iterator[Choice]:
    """Yield the candidates for the convolution, the rules' preference first. cuDNN may still decline its candidate.

    A channels-last depthwise convolution has only one candidate.
    """
    own = own_conv_schedules(ctx, step)
    guards = depthwise_guards(step)
    if prefers_channels_last(ctx, step) and is_channels_last(step.operands[0]) and is_depthwise(ctx, step):
        yield Choice(Schedule(Engine.DEPTHWISE), by_rules(ctx), guards)
        return
    if "cudnn" in ctx.device.libraries:
        preferred = _sliced_k_before_library(ctx, step, own[0]) if own else None
        if preferred is not None:
            yield preferred
        if step.operands[0].dtype.is_float and not step.transposed:
            yield Choice(Schedule(Engine.LIBRARY), by_rules(ctx))
    pixels = count_pixels(step)
    for schedule in own:
        yield Choice(schedule, by_rules(ctx), tile_guards(ctx, schedule, pixels))


def own_conv_schedules(ctx: Lowering, step: Convolve) -> list[Schedule]:
    """Return the schedules of the plugin's kernels that are not quarantined, the rules' preference first."""
    found = [*_mma(ctx, step), *_others(ctx, step)]
    return [schedule for schedule in found if ctx.device.quarantine.allows(step, schedule)]


def is_direct(step: Convolve) -> bool:
    """Tell whether a direct convolution is faster than GEMM tiles, which few output channels would leave mostly empty.

    If the step has a schedule, return whether that is the direct kernel. Otherwise the result depends on the weights
    only, so that all plans have the same weight layout. The direct kernel supports no weight prologue.
    """
    if step.conversions[1] is not None:
        return False
    if step.schedule is not None:
        return step.schedule.engine is Engine.DIRECT
    return step.transposed or step.operands[1].static_shape[0] // step.groups <= DIRECT_ROWS


def merged_conv_choice(ctx: Lowering, merged: Convolve, count: int) -> Choice | None:
    """Return the choice for a convolution that horizontal fusion merged from ``count``; None if that is not faster.

    None also if no tensor-core kernel supports the merged convolution, or if the kernel is quarantined.
    The merged convolution has no split-K, since the reduction writes only one result. With cuDNN it must be faster than
    ``count`` calls of cuDNN, unless it is an integer convolution, which cuDNN does not support.
    """
    own = [schedule for schedule in _mma(ctx, merged) if ctx.device.quarantine.allows(merged, schedule)]
    if not own:
        return None
    m, n, _ = gemm_sizes(merged)
    why = f"one kernel is faster than {count} separate convolutions of the same image"
    config = None if merged.is_converted else _tile_config(ctx, merged, count)
    if config is not None:
        bounded = no_more_blocks(ctx.device, config.tile, m, n, merged.groups)
        found = replace(own[0], tile=config.tile, split_k=1, sliced_k=config.sliced_k)
        if not ctx.device.quarantine.allows(merged, found):
            return None
        return Choice(found, why, (bounded,)) if ctx.holds(bounded) else None
    is_ours = merged.is_converted or "cudnn" not in ctx.device.libraries
    return Choice(own[0], why) if is_ours and own[0].split_k == 1 else None


def _mma(ctx: Lowering, step: Convolve) -> list[Schedule]:
    """Return the schedules of implicit GEMM on tensor cores; none where ``_mma_kind`` returns ""."""
    kind = _mma_kind(ctx, step)
    if not kind:
        return []
    if step.transposed:
        return [Schedule(Engine.PHASES, operands=kind)]
    m, n, k = gemm_sizes(step)
    layout = WeightLayout.F16_ALONG_K if has_compact_lines(ctx, step) else WeightLayout.STORED
    found = mma_schedules(ctx.device, kind, m, n, step.groups, k, _tile_config(ctx, step))
    return [replace(schedule, weights=layout) for schedule in found]


def _mma_kind(ctx: Lowering, step: Convolve) -> str:
    """Return the mma operand type, "" if tensor cores do not support the convolution or the image's strides."""
    return "" if place_stride(step.operands[0]) is None or 0 in step.shape else matrix_convolution_kind(ctx, step)


def _others(ctx: Lowering, step: Convolve) -> list[Schedule]:
    """Return the schedules of kernels without tensor cores, which support images of any layout."""
    direct = Schedule(Engine.DIRECT)
    if step.transposed:
        return [direct]
    rows = step.operands[1].static_shape[0] // step.groups
    tiles = simt_schedules(ctx.device, rows, rows, step.total.dtype)
    if rows > DIRECT_ROWS:
        few_pixels = _has_few_pixels(ctx, step)
        if not is_const(few_pixels):
            tiles.insert(0, replace(tiles[0], im2col_pixels=IM2COL_PIXELS))
        elif few_pixels:
            tiles.insert(0, Schedule(Engine.IM2COL))
    if rows > MAX_TUNED_DIRECT_ROWS or step.conversions[1] is not None:
        return tiles
    return [direct, *tiles] if rows <= DIRECT_ROWS else [*tiles, direct]


def _has_few_pixels(ctx: Lowering, step: Convolve) -> Dim:
    """Return the condition under which the emulated device uses im2col: few pixels would leave tiles mostly empty.

    If many pixels are expected, the plan has only tiles, also for Runs with few pixels.
    """
    pixels = product(step.places)
    if not ctx.device.emulated or step.groups > 1 or step.is_converted or step.column_parts:
        return 0
    return le(pixels, IM2COL_PIXELS) if hint(pixels) <= IM2COL_PIXELS else 0


def _sliced_k_before_library(ctx: Lowering, step: Convolve, own: Schedule) -> Choice | None:
    """Return a choice of schedule ``own`` (sliced-K) if it is faster than a cuDNN call, else None."""
    config = None if step.transposed or not _mma_kind(ctx, step) else _tile_config(ctx, step)
    if config is None:
        return None
    m, n, _ = gemm_sizes(step)
    bounded = no_more_blocks(ctx.device, config.tile, m, n, step.groups)
    return Choice(own, f"faster than a library call; {by_rules(ctx)}", (bounded,)) if ctx.holds(bounded) else None


def _tile_config(ctx: Lowering, step: Convolve, convolutions: int = 1) -> TileConfig | None:
    """Return the result of `choose_tile_config` for a step that replaces ``convolutions`` separate convolutions.

    The image must be channels-last. None: library calls would be faster (estimate).
    """
    m, n, k = gemm_sizes(step)
    kind = matrix_convolution_kind(ctx, step)
    more = {**epilogue_cost(step, n * step.groups), "products": convolutions, "left": _left_by_cudnn(ctx, step)}
    more |= {"is_compact": has_compact_lines(ctx, step), "along_k": True}
    return choose_tile_config(ctx.device, kind, m, n, step.groups, k, taps=count_taps(step), **more)


def _left_by_cudnn(ctx: Lowering, step: Convolve) -> int:
    """Return the bytes of the result that a separate kernel must process after cuDNN: with the epilogue, or as a copy.

    cuDNN writes dense pixels only; a strided result, such as a slice of a concatenation, needs a copy.
    """
    if "cudnn" not in ctx.device.libraries:
        return 0
    (_, y), *others = step.outputs
    form = cudnn_form(ctx, step)
    is_left = form is None or bool(form.leftover) or (not others and place_stride(y) not in (None, y.shape[1]))
    return hint(product(y.shape)) * y.dtype.itemsize if is_left else 0
