"""Normalizations of com.microsoft: with a skip connection, of embeddings, and group norm with an activation."""

from __future__ import annotations

from ....kernels.elementwise.index_map import gather_map
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise, full
from ....program.lowering.reduce import reduce
from ....program.lowering.views import unsqueeze
from ....program.steps.row_program import SUM, Row
from ... import requirements as require
from ...layouts import with_channels_first
from ...onnx.math.activation import swish
from ...onnx.math.elementwise import sum_like_first
from ...onnx.nn.normalization import group_normalization_21, layer_norm
from ...onnx.tensor.indexing import gather
from ...outputs import is_used
from ...registry import INT32, T1, UP_TO_FLOAT32, M, T, contrib_op

STABLE = UP_TO_FLOAT32 - {DType.BFLOAT16}
_FLOAT32 = DType.FLOAT32.onnx


@contrib_op("SkipLayerNormalization", T=UP_TO_FLOAT32)
def skip_layer_normalization(
    ctx: Lowering,
    x: Tensor,
    skip: Tensor,
    gamma: Tensor,
    beta: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    epsilon: float = 1e-12,
) -> tuple[Tensor, ...]:
    """Return the layer norm of s = x + skip + bias, the mean and reciprocal standard deviation of s, and s."""
    total = _skipped(ctx, x, skip, bias)
    return *layer_norm(ctx, total, gamma, beta, [total.rank - 1], epsilon, _FLOAT32), total


@contrib_op("SkipSimplifiedLayerNormalization", T=UP_TO_FLOAT32)
def skip_simplified_layer_normalization(
    ctx: Lowering, x: Tensor, skip: Tensor, gamma: Tensor, bias: Tensor | None = None, *, epsilon: float = 1e-12
) -> tuple[Tensor, ...]:
    """Compute SkipLayerNormalization with RMS norm in place of layer norm."""
    require.supported(
        not is_used(ctx, 1), "attribute", "the output mean", "used", "the other outputs, since RMS norm has no mean"
    )
    total = _skipped(ctx, x, skip, bias)
    return *layer_norm(ctx, total, gamma, None, [total.rank - 1], epsilon, _FLOAT32, center=False), total


def _skipped(ctx: Lowering, x: Tensor, skip: Tensor, bias: Tensor | None) -> Tensor:
    require.least_rank(1, input=x)
    return sum_like_first(ctx, x, skip, *([] if bias is None else [bias]))


@contrib_op("EmbedLayerNormalization", T1=INT32, T=STABLE)
def embed_layer_normalization(
    ctx: Lowering,
    input_ids: T1,
    segment_ids: T1 | None,
    word_embedding: T,
    position_embedding: T,
    segment_embedding: T | None,
    gamma: T,
    beta: T,
    mask: T1 | None = None,
    position_ids: T1 | None = None,
    *,
    epsilon: float = 1e-12,
    mask_index_type: int = 0,
) -> tuple[Tensor, ...]:
    """Return the layer norm of the embeddings, the number of ones in each row of the mask, and the embeddings' sum.

    An id outside its table reads zeros. ``mask_index_type`` describes the second output and changes nothing.
    """
    require.all_or_none(segment_ids=segment_ids, segment_embedding=segment_embedding)
    require.rank(2, input_ids=input_ids)
    require.rank(
        2, word_embedding=word_embedding, position_embedding=position_embedding, segment_embedding=segment_embedding
    )
    batch, length = input_ids.shape
    if position_ids is None:
        position_ids = gather_map(ctx, [1, length], DType.INT64, lambda _, c: c[1])
    parts = [gather(ctx, word_embedding, input_ids), gather(ctx, position_embedding, position_ids)]
    if segment_ids is not None and segment_embedding is not None:
        parts.append(gather(ctx, segment_embedding, segment_ids))
    total = sum_like_first(ctx, *parts)
    normalized = layer_norm(ctx, total, gamma, beta, [2], epsilon, _FLOAT32)[0]
    if mask is None:
        return normalized, full(ctx, [batch], 0, DType.INT32), total
    require.shape(ctx, (batch, length), mask=mask)

    def ones(row: Row, value: Scalar) -> Scalar:
        return row.reduce(SUM, s.cast(s.equal(value, 1), DType.INT32))

    return normalized, reduce(ctx, ones, mask, [1], keepdims=False), total


@contrib_op("GroupNorm", T=STABLE, M=STABLE)
def group_norm(
    ctx: Lowering,
    x: T,
    gamma: M,
    beta: M,
    *,
    activation: int,
    groups: int,
    channels_last: int = 1,
    epsilon: float = 1e-5,
) -> Tensor:
    """Normalize groups of channels; ``activation`` 1 applies x * sigmoid(x)."""
    require.one_of((0, 1), activation=activation)

    def normalized(first: Tensor) -> Tensor:
        result = group_normalization_21(ctx, first, gamma, beta, num_groups=groups, epsilon=epsilon)
        return elementwise(ctx, swish, result) if activation else result

    return with_channels_first(ctx, x, normalized, channels_last)


@contrib_op("SkipGroupNorm", T=STABLE, M=STABLE)
def skip_group_norm(
    ctx: Lowering,
    x: T,
    gamma: M,
    beta: M,
    skip: T,
    bias: T | None = None,
    *,
    activation: int,
    groups: int,
    channels_last: int = 1,
    epsilon: float = 1e-5,
) -> tuple[Tensor, ...]:
    """Return the GroupNorm of x + skip + bias, and this sum."""
    require.rank(4, X=x)
    spatial, after = ((1, 2), ()) if channels_last else ((2, 3), (1, 2))
    if skip.rank == 2:
        skip = unsqueeze(ctx, skip, spatial)
    addends = [skip] if bias is None else [skip, unsqueeze(ctx, bias, after)]
    total = sum_like_first(ctx, x, *addends)
    normalized = group_norm(
        ctx, total, gamma, beta, activation=activation, groups=groups, channels_last=channels_last, epsilon=epsilon
    )
    return normalized, total
