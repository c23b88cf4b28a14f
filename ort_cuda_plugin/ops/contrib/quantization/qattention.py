"""QAttention: attention with a quantised Q/K/V projection."""

from __future__ import annotations

from ort_cuda_plugin.ops import requirements as require
from ort_cuda_plugin.ops.contrib.attention.multi_head import MASKED, Masking, of_projection
from ort_cuda_plugin.ops.contrib.quantization.qlinear import scaled_product
from ort_cuda_plugin.ops.registry import BYTES, FLOAT_OR_HALF, INT32, T1, T2, T3, T4, contrib_op
from ort_cuda_plugin.program.lowering.context import Lowering, Tensor


@contrib_op("QAttention", T1=BYTES, T2=BYTES, T3=FLOAT_OR_HALF, T4=INT32)
def qattention(
    ctx: Lowering,
    x: T1,
    weight: T2,
    bias: T3,
    input_scale: T3,
    weight_scale: T3,
    mask_index: T4 | None = None,
    input_zero_point: T1 | None = None,
    weight_zero_point: T2 | None = None,
    past: T3 | None = None,
    *,
    num_heads: int,
    do_rotary: int = 0,
    mask_filter_value: float = MASKED,
    past_present_share_buffer: int = 0,
    scale: float = 0.0,
    unidirectional: int = 0,
) -> tuple[Tensor, ...]:
    """Compute Attention of com.microsoft with a quantized projection, which has int32 accumulators."""
    if do_rotary or past_present_share_buffer:
        raise require.unsupported("attribute", "do_rotary or past_present_share_buffer", "1", "0")
    require.rank(3, input=x)
    require.rank(2, weight=weight)
    require.shape(ctx, weight.shape[1:], bias=bias)
    projected = scaled_product(ctx, x, weight, input_scale, weight_scale, input_zero_point, weight_zero_point, bias)
    masking = Masking(mask_index, None, mask_filter_value, scale, unidirectional)
    return of_projection(ctx, projected, past, masking, num_heads)
