"""Epilogue matching for convolutions by cuDNN, in the layout in which the plugin calls cuDNN."""

from __future__ import annotations

from ...program.lowering.context import Lowering
from ...program.steps.steps import Convolve
from ...program.steps.tensor import contiguous_strides
from ..contraction.epilogue_patterns import LibraryForm, convolution_form
from .channels_last import channels_last_strides, is_channels_last, prefers_channels_last

MIN_TENSOR_CHANNELS = 16  # minimum input and output channels for which cuDNN's run-time compilation pays off


def cudnn_form(ctx: Lowering, step: Convolve) -> LibraryForm | None:
    """Match the part of the epilogue that cuDNN can fuse, for a result in the layout that `call_cudnn` selects."""
    last = prefers_channels_last(ctx, step) and is_channels_last(step.operands[0])
    dense = channels_last_strides(step.shape) if last else contiguous_strides(step.shape)
    return convolution_form(ctx, step, dense, compiles=last and _is_compiled_for(ctx, step))


def _is_compiled_for(ctx: Lowering, step: Convolve) -> bool:
    """Tell whether a tensor-core engine with a fused epilogue is worth the seconds that cuDNN takes to compile it."""
    channels, rows = step.operands[0].shape[1], step.operands[1].shape[0]
    known = isinstance(channels, int) and isinstance(rows, int) and min(channels, rows) >= MIN_TENSOR_CHANNELS
    return (
        known and step.groups == 1 and len(step.windows.size) == 2 and ctx.options.cudnn_conv_algo_search != "DEFAULT"
    )
