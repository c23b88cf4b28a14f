"""Decoder attention of com.microsoft: operators for one new token per sequence, and DecoderAttention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from ....kernels.attention.kv_cache import CachePart, append
from ....kernels.elementwise.index_map import IndexMap, gather_map
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import Dim, floordiv
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise
from ....program.lowering.views import part, permute, reshape, unsqueeze
from ... import requirements as require
from ...onnx.attention.attention import after_past, attend, merge_heads, split_heads
from ...onnx.attention.scores import Scores, Variant
from ...onnx.math.elementwise import cast
from ...onnx.math.matmul import affine
from ...onnx.tensor.indexing import select_index
from ...onnx.tensor.slicing import concat
from ...outputs import is_used
from ...registry import BOOL, FLOAT_OR_HALF, INT32, B, HostTensor, M, T, contrib_op
from .multi_head import MASKED, Masking, separate, split_columns, with_bias

CHUNK_BYTES: Final = 16
"""Size in bytes of a chunk of a key in a chunked cache; a thread loads it as one vector."""

# ---- one new token ----


@contrib_op("DecoderMaskedMultiHeadAttention", T=FLOAT_OR_HALF, QK=FLOAT_OR_HALF, M=INT32)
def decoder_masked_multi_head_attention(
    ctx: Lowering,
    query: T,
    key: T | None = None,
    value: T | None = None,
    mask_index: M | None = None,
    attention_bias: T | None = None,
    past_key: T | None = None,
    past_value: T | None = None,
    past_sequence_length: HostTensor | None = None,
    beam_width: HostTensor | None = None,
    cache_indirection: M | None = None,
    bias: T | None = None,
    *,
    num_heads: int,
    mask_filter_value: float = MASKED,
    output_qk: int = 0,
    past_present_share_buffer: int = 0,
    scale: float = 0.0,
) -> tuple[Tensor, ...]:
    """Return output, present key, present value and biased scores.

    A key of rank 4 means cross attention. If past and present share a buffer, its keys have the CPU provider's layout,
    without chunks.
    """
    require.rank(3, query=query)
    require.dim(ctx, 1, 1, query=query)
    require.all_or_none(key=key, value=value)
    require.all_or_none(past_key=past_key, past_value=past_value)
    if key is not None and value is not None and key.rank == 4:
        if past_key is not None or is_used(ctx, 1) or is_used(ctx, 2):
            what, wanted = "past_key, present_key and present_value", "be left out if key has rank 4 (cross attention)"
            raise require.violation(what, wanted, "at least one of them")
        q = query
        if bias is not None:
            q = elementwise(ctx, lambda a, b: a + b, query, part(ctx, bias, 0, 0, query.shape[2]))
        keys, values, present = key, value, (key, value)
    else:
        q, k, v = _new_token(ctx, query, key, value, bias, num_heads)
        keys, values, present = _with_cache(
            ctx, past_key, past_value, k, v, past_sequence_length if past_present_share_buffer else None, 0
        )
    masking = Masking(mask_index, attention_bias, mask_filter_value, scale)
    output, scores = _attended(ctx, split_heads(ctx, q, num_heads), keys, values, cache_indirection, masking)
    require.that(not is_used(ctx, 3) or bool(output_qk), "output_qk", "be 1 if the node has the output qk", output_qk)
    return output, *present, scores


@contrib_op("DecoderMaskedSelfAttention", T=FLOAT_OR_HALF, M=INT32)
def decoder_masked_self_attention(
    ctx: Lowering,
    x: T,
    weights: T,
    bias: T,
    mask_index: M | None,
    past: T,
    attention_bias: T | None,
    past_sequence_length: HostTensor,
    beam_width: HostTensor | None = None,
    cache_indirection: M | None = None,
    *,
    do_rotary: int = 0,
    mask_filter_value: float = MASKED,
    num_heads: int,
    past_present_share_buffer: int = 0,
    scale: float = 0.0,
) -> tuple[Tensor, ...]:
    """Compute attention of one new token to past tokens and itself; also return past and new keys and values.

    Where past and present share a buffer, keys are stored as [batch, heads, size / chunk, length, chunk].
    """
    require.supported(not do_rotary, "attribute", "do_rotary", do_rotary, "0")
    require.rank(3, input=x)
    require.rank(5, past=past)
    require.dim(ctx, 1, 1, input=x)
    q, k, v = _new_token(ctx, affine(ctx, x, weights, bias), None, None, None, num_heads)
    past_key, past_value = (select_index(ctx, past, 0, number) for number in (0, 1))
    at = past_sequence_length if past_present_share_buffer else None
    chunk = CHUNK_BYTES // x.dtype.itemsize if past_present_share_buffer else 0
    keys, values, (key, value) = _with_cache(ctx, past_key, past_value, k, v, at, chunk)
    masking = Masking(mask_index, attention_bias, mask_filter_value, scale)
    output, _ = _attended(ctx, split_heads(ctx, q, num_heads), keys, values, cache_indirection, masking)
    return output, concat(ctx, unsqueeze(ctx, key, (0,)), unsqueeze(ctx, value, (0,)), axis=0)


def _new_token(
    ctx: Lowering, query: Tensor, key: Tensor | None, value: Tensor | None, bias: Tensor | None, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Q [batch, 1, hidden], K and V [batch, heads, 1, size], with ``bias`` added if it is given.

    Without a key, all three are unpacked from the query.
    """
    given = separate(ctx, query, key, value, 1, 1)
    query, key, value = with_bias(ctx, given, bias, [x.shape[2:] for x in given])
    return query, split_heads(ctx, key, heads), split_heads(ctx, value, heads)


def _with_cache(
    ctx: Lowering,
    past_key: Tensor | None,
    past_value: Tensor | None,
    k: Tensor,
    v: Tensor,
    past_length: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return all keys, all values and the present cache. With ``past_length`` the past cache has spare capacity.

    If ``chunk`` is not 0, the keys of a head are stored in the cache as [size / chunk, capacity, chunk].
    """
    if past_length is None or past_key is None or past_value is None:
        _, keys, values = after_past(ctx, past_key, past_value, k, v)
        return keys, values, (keys, values)
    at = ctx.host_number(past_length, "past_sequence_length")
    require.shape(ctx, (*k.shape[:2], past_key.shape[2], k.shape[3]), past_key=past_key)
    require.shape(ctx, (*v.shape[:2], past_key.shape[2], v.shape[3]), past_value=past_value)
    require.least_dim(ctx, 0, past_sequence_length=at)
    require.most_dim(ctx, past_key.shape[2] - 1, past_sequence_length=at)
    batch, heads, room, size = past_key.shape
    first = gather_map(ctx, [batch], DType.INT64, lambda maps, c: maps.dim(at))
    if not chunk:
        present_key, present_value = grown(ctx, (past_key, past_value), (k, v), first, room)
        keys, values = (part(ctx, x, 2, 0, at + 1) for x in (present_key, present_value))
        return keys, values, (present_key, present_value)
    (present_value,) = grown(ctx, (past_value,), (v,), first, room)
    values = part(ctx, present_value, 2, 0, at + 1)
    chunks = floordiv(size, chunk)
    require.multiple_of(ctx, size, chunk, "the head size of past_key", "the number of elements in 16 bytes")
    past = reshape(ctx, past_key, [batch, heads * chunks, room, chunk])
    (present,) = grown(ctx, (past,), (reshape(ctx, k, [batch, heads * chunks, 1, chunk]),), first, room)
    in_order = permute(ctx, reshape(ctx, present, [batch, heads, chunks, room, chunk]), (0, 1, 3, 2, 4))
    keys = reshape(ctx, part(ctx, in_order, 2, 0, at + 1), [batch, heads, at + 1, size])
    return keys, values, (reshape(ctx, present, past_key.shape), present_value)


def grown(
    ctx: Lowering, past: Sequence[Tensor | None], new: Sequence[Tensor], first: Tensor, capacity: Dim
) -> list[Tensor]:
    """Return caches [batch, heads, capacity, size] with new rows from index ``first`` [batch] on; see `append`."""
    parts = []
    for old, x in zip(past, new, strict=True):
        batch, heads, _, size = x.shape
        require.rank(4, past=old)
        require.shape(ctx, (batch, heads, capacity if old is None else old.shape[2], size), past=old)
        parts.append(CachePart(old, ctx.empty((batch, heads, capacity, size), x.dtype), x))
    append(ctx, parts, first)
    return [x.present for x in parts]


def _of_beams(ctx: Lowering, keys: Tensor, values: Tensor, beams: Tensor) -> tuple[Tensor, Tensor]:
    """Gather keys and values across beams: ``beams`` [batch, beam, key] names the beam that holds each past key.

    The last key is the beam's own. An invalid beam index reads zeros.
    """
    require.rank(3, cache_indirection=beams)
    batch, width, room = beams.shape
    last = keys.shape[2] - 1
    require.dim(ctx, 0, batch * width, past_key=keys)
    require.least_dim(ctx, last, **{"the last dimension of cache_indirection": room})

    def gathered(x: Tensor) -> Tensor:
        def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
            is_past = c[2] < maps.dim(last)
            count = maps.dim(width)
            group = s.trunc_divide(c[0], count)
            own = s.trunc_modulo(c[0], count)
            beam = s.cast(maps.source(beams).at([group, own, c[2]], is_past), DType.INT64)
            beam = s.where(is_past, beam, own)
            return maps.source(x).at([group * count + beam, *c[1:]], (beam >= 0) & (beam < count))

        return gather_map(ctx, x.shape, x.dtype, element)

    return gathered(keys), gathered(values)


def _attended(
    ctx: Lowering, q: Tensor, keys: Tensor, values: Tensor, beams: Tensor | None, masking: Masking
) -> tuple[Tensor, Tensor]:
    if beams is not None:
        keys, values = _of_beams(ctx, keys, values, beams)
    require.rank(2, mask_index=masking.mask)
    variant = masking.variant(ctx, q, keys.shape[2])
    output, scores = attend(ctx, q, keys, values, replace(variant, returned=Scores.BIASED))
    given = ctx.node.outputs[3] if ctx.node is not None and is_used(ctx, 3) else None
    if given is not None and given.dtype is not None:
        scores = cast(ctx, scores, to=given.dtype.onnx)
    return merge_heads(ctx, output), scores


# ---- DecoderAttention ----


@contrib_op("DecoderAttention", T=FLOAT_OR_HALF, B=BOOL)
def decoder_attention(
    ctx: Lowering,
    query: T,
    key: T,
    q_weight: T,
    kv_weight: T,
    bias: T,
    key_padding_mask: B | None,
    key_cache: T | None,
    value_cache: T | None,
    static_kv: HostTensor,
    use_past: HostTensor,
    has_layer_state: HostTensor,
    has_key_padding_mask: HostTensor,
    *,
    mask_filter_value: float = MASKED,
    num_heads: int,
) -> tuple[Tensor, ...]:
    """Return output, keys and values of inputs [sequence, batch, hidden]. True in the padding mask hides a key."""

    def flag(x: Tensor, name: str) -> bool:
        return bool(ctx.host_constants(x, name, [0])[0])

    is_cross, is_masked = flag(static_kv, "static_kv"), flag(has_key_padding_mask, "has_key_padding_mask")
    # Read all flags in any case: the inputs that the host reads must be the same at claim time and in each plan.
    uses_past, has_state = flag(use_past, "use_past"), flag(has_layer_state, "has_layer_state")
    has_past = uses_past and has_state
    require.rank(3, query=query, key=key)
    require.rank(1, bias=bias)
    require.least(1, num_heads=num_heads)
    _, batch, hidden = query.shape
    require.shape(ctx, (hidden, hidden), q_weight=q_weight)
    require.shape(ctx, (hidden, 2 * hidden), kv_weight=kv_weight)
    require.shape(ctx, (key.shape[0], batch, hidden), key=key)
    own, others = split_columns(ctx, bias, [hidden, 2 * hidden], "the bias")

    def projected(x: Tensor, weights: Tensor, added: Tensor) -> Tensor:
        """Return x @ weights + added, transposed to [batch, sequence, columns]."""
        return permute(ctx, affine(ctx, x, weights, added), (1, 0, 2))

    q = split_heads(ctx, projected(query, q_weight, own), num_heads)
    if has_past and (key_cache is None or value_cache is None):
        given = require.named(key_cache=key_cache, value_cache=value_cache)
        raise require.violation("key_cache and value_cache", "be given if use_past and has_layer_state are true", given)
    if has_past and is_cross and key_cache is not None and value_cache is not None:
        keys, values = key_cache, value_cache
    else:
        both = projected(key if is_cross else query, kv_weight, others)
        columns = split_columns(ctx, both, [hidden, hidden], "kv_weight of DecoderAttention")
        keys, values = (split_heads(ctx, x, num_heads) for x in columns)
        if has_past:
            _, keys, values = after_past(ctx, key_cache, value_cache, keys, values)
    mask = None
    if is_masked:
        padding = require.given(key_padding_mask, "key_padding_mask", "be given if has_key_padding_mask is true")
        require.shape(ctx, (batch, keys.shape[2]), key_padding_mask=padding)
        mask = unsqueeze(ctx, elementwise(ctx, lambda x: ~x, padding), (1, 2))
    output, _ = attend(ctx, q, keys, values, Variant(mask=mask))
    return permute(ctx, merge_heads(ctx, output), (1, 0, 2)), keys, values
