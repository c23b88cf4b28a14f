"""Attention with quantized projections: QAttention, and int8 attention in cuBLASLt's memory orders."""

from __future__ import annotations

from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise
from ....program.lowering.reduce import row_map
from ....program.lowering.views import permute
from ... import requirements as require
from ...layouts import as_number
from ...onnx.attention.attention import merge_heads, split_heads
from ...onnx.math.elementwise import cast
from ...onnx.math.matmul import matrix_product
from ...onnx.nn.normalization import softmax_row
from ...onnx.nn.quantization import shifted
from ...registry import BYTES, FLOAT16, FLOAT32, FLOAT_OR_HALF, INT8, INT32, T1, T2, T3, T4, F, G, Q, S, contrib_op
from ..attention.multi_head import MASKED, Masking, of_projection, score_bias
from ..sparse_attention.block_sparse import longformer_of_projections
from . import cublaslt_ordered_int8 as ordered
from .qlinear import code_of, real_of, scaled_product


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


# ---- memory orders of cuBLASLt: row-major inputs and column-major weights ----


@contrib_op("QOrderedAttention", Q=INT8, S=FLOAT32, G=INT32)
def qordered_attention(
    ctx: Lowering,
    x: Q,
    scale_x: S,
    scale_q: S,
    scale_k: S,
    scale_v: S,
    q_weight: Q,
    k_weight: Q,
    v_weight: Q,
    scale_q_weight: S,
    scale_k_weight: S,
    scale_v_weight: S,
    q_bias: S,
    k_bias: S,
    v_bias: S,
    scale_scores: S | None,
    scale_softmax: S | None,
    scale_values: S,
    mask_index: G | None = None,
    past: Q | None = None,
    attention_bias: S | None = None,
    *,
    num_heads: int,
    order_input: int,
    order_output: int,
    order_weight: int,
    qkv_hidden_sizes: tuple[int, ...] | None = None,
    unidirectional: int = 0,
) -> Tensor:
    """Compute int8 attention with column-major weights, and a scale for the result of each GEMM and of the softmax."""
    ordered.check_orders((order_input, order_output), (order_weight,))
    if past is not None or attention_bias is not None or unidirectional:
        what = "past, attention_bias or unidirectional = 1"
        raise require.unsupported("attribute", what, "given", "none of them")
    if scale_scores is None or scale_softmax is None:
        given = require.named(scale_QKT_gemm=scale_scores, scale_QKT_softmax=scale_softmax)
        raise require.violation("scale_QKT_gemm and scale_QKT_softmax", "be given", given)
    require.rank(3, input=x)
    require.rank(2, Q_weight=q_weight, K_weight=k_weight, V_weight=v_weight)
    if qkv_hidden_sizes is not None and len(set(qkv_hidden_sizes)) != 1:
        raise require.unsupported("attribute", "qkv_hidden_sizes", list(qkv_hidden_sizes), "equal sizes")
    heads = []
    for weight, by, bias, scale in (
        (q_weight, scale_q_weight, q_bias, scale_q),
        (k_weight, scale_k_weight, k_bias, scale_k),
        (v_weight, scale_v_weight, v_bias, scale_v),
    ):
        require.shape(ctx, weight.shape[1:], bias=bias)
        real = scaled_product(ctx, x, ordered.from_order(ctx, weight, ordered.COL), scale_x, by, None, None, bias)
        codes = code_of(ctx, real, scale, None, DType.INT8)
        heads.append(shifted(ctx, split_heads(ctx, codes, num_heads), None))
    q, k, v = heads
    by_q, by_k, by_v = (as_number(ctx, y) for y in (scale_q, scale_k, scale_v))

    def product(value: Scalar, a: Scalar, b: Scalar) -> Scalar:
        return s.cast(value, DType.FLOAT32) * (a * b)

    total = elementwise(ctx, product, matrix_product(ctx, q, permute(ctx, k, (0, 1, 3, 2))), by_q, by_k)
    scores = code_of(ctx, total, scale_scores, None, DType.INT8)
    size = ctx.host_tensor([q.shape[3]], [], DType.INT64)

    def score(code: Scalar, by: Scalar, length: Scalar, *added: Scalar) -> Scalar:
        value = s.cast(code, DType.FLOAT32) * (by / s.sqrt(s.cast(length, DType.FLOAT32)))
        return value + s.widen(added[0]) if added else value

    bias_of_mask = score_bias(ctx, mask_index, None, x.shape[0], x.shape[1], x.shape[1], MASKED)
    masks = [] if bias_of_mask is None else [bias_of_mask]
    (shares,) = row_map(
        ctx, softmax_row, [3], elementwise(ctx, score, scores, as_number(ctx, scale_scores), size, *masks)
    )
    codes = shifted(ctx, code_of(ctx, shares, scale_softmax, None, DType.INT8), None)
    values = elementwise(ctx, product, matrix_product(ctx, codes, v), as_number(ctx, scale_softmax), by_v)
    return merge_heads(ctx, code_of(ctx, values, scale_values, None, DType.INT8))


@contrib_op("QOrderedLongformerAttention", Q=INT8, S=FLOAT32, F=FLOAT16, G=INT32)
def qordered_longformer_attention(
    ctx: Lowering,
    x: Q,
    scale_x: S,
    weight: Q,
    scale_weight: S,
    bias: S,
    scale_bias: S,
    scale_projection: S,
    mask: F,
    global_weight: Q,
    scale_global_weight: S,
    global_bias: S,
    scale_global_projection: S,
    is_global: G,
    scale_output: S,
    *,
    num_heads: int,
    order_global_weight: int,
    order_input: int,
    order_output: int,
    order_weight: int,
    window: int,
) -> Tensor:
    """Compute int8 projections, with biases in units of the result's scale, and Longformer attention in float16."""
    ordered.check_orders((order_input, order_output), (order_weight, order_global_weight))
    require.rank(3, input=x)
    require.rank(2, weight=weight, global_weight=global_weight)
    require.least(1, num_heads=num_heads)
    require.least(0, window=window)

    def projection(matrix: Tensor, by: Tensor, added: Tensor, scale: Tensor) -> Tensor:
        codes = ordered.qordered_matmul(
            ctx, x, scale_x, matrix, by, scale, added, order_A=order_input, order_B=ordered.COL, order_Y=order_output
        )
        return cast(ctx, real_of(ctx, codes, scale, None), to=DType.FLOAT16.onnx)

    projected = (
        projection(weight, scale_weight, bias, scale_projection),
        projection(global_weight, scale_global_weight, global_bias, scale_global_projection),
    )
    result = longformer_of_projections(ctx, projected, mask, is_global, num_heads, window)
    return code_of(ctx, cast(ctx, result, to=DType.FLOAT32.onnx), scale_output, None, DType.INT8)
