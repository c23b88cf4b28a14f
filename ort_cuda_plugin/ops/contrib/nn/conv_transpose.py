"""ConvTransposeWithDynamicPads of com.microsoft."""

from __future__ import annotations

from typing import Unpack

from ort_cuda_plugin.ops import requirements as require
from ort_cuda_plugin.ops.onnx.nn.conv import transposed_convolution
from ort_cuda_plugin.ops.onnx.nn.windows import TransposedConvAttributes
from ort_cuda_plugin.ops.registry import NO_BFLOAT16, HostTensor, T, contrib_op
from ort_cuda_plugin.program.lowering.context import Lowering, Tensor


@contrib_op("ConvTransposeWithDynamicPads", T=NO_BFLOAT16)
def conv_transpose_with_dynamic_pads(
    ctx: Lowering,
    x: T,
    w: T,
    pads: HostTensor | None = None,
    b: T | None = None,
    **attributes: Unpack[TransposedConvAttributes],
) -> Tensor:
    """Compute ConvTranspose with pads from an input."""
    require.rank(1, pads=pads)
    values = None if pads is None else ctx.host_values(pads, "pads")
    for pad in values or ():
        require.least_dim(ctx, 0, pads=pad)
    return transposed_convolution(ctx, x, w, b, values, **attributes)
