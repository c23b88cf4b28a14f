"""ConvTransposeWithDynamicPads."""

from __future__ import annotations

from ort_cuda_plugin.ops.onnx.nn.conv import transposed_convolution
from ort_cuda_plugin.ops.onnx.nn.windows import Ints
from ort_cuda_plugin.ops.registry import NO_BFLOAT16, HostTensor, T, op
from ort_cuda_plugin.ops.requirements import require_rank
from ort_cuda_plugin.program.lowering import Lowering, Tensor
from ort_cuda_plugin.program.symbolic import le


@op("ConvTransposeWithDynamicPads", domain="com.microsoft", since=1, types={"T": NO_BFLOAT16})
def conv_transpose_with_dynamic_pads(
    ctx: Lowering,
    x: T,
    w: T,
    pads: HostTensor | None = None,
    b: T | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    output_padding: Ints | None = None,
    strides: Ints | None = None,
) -> Tensor:
    """ConvTranspose whose pads are an input."""
    name = "ConvTransposeWithDynamicPads"
    require_rank(1, pads=pads)
    values = None if pads is None else ctx.host_values(pads, f"pads of {name}")
    for pad in values or ():
        ctx.require(le(0, pad), f"{name} with a negative pad")
    return transposed_convolution(
        ctx, x, w, b, auto_pad=auto_pad, dilations=dilations, group=group, kernel_shape=kernel_shape,
        output_padding=output_padding, output_shape=None, pads=values, strides=strides,
    )  # fmt: skip
