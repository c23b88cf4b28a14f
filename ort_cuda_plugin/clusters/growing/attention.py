"""Rules of com.microsoft for growing caches: attention that appends to a buffer and reads the number of keys on the
device, and T5's relative position bias.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ...kernels.elementwise.index_map import IndexMap
from ...model.ir import DType, InvalidModel, Node, Unsupported, Value
from ...ops.contrib.attention.position import distance_bias
from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import Dim
from ...program.steps.tensor import Tensor
from .body import GrowingBody, needed_input
from .values import PAST, BeamOfKey, Growing, Sizes, after_past

_MASK_AXIS: Final = {2: 1, 3: 2}
"""Rank of a mask -> its axis of keys."""


def attention(body: GrowingBody, node: Node) -> None:
    """Attention with ``past`` [2, batch, heads, keys, size]."""
    _, _, _, mask, past, bias, count = _inputs(node, 7)
    _check(body, node, caches=(past,), axis=3, masks=(mask, bias), fixed=(0, 1, 2))
    if count is not None:
        raise Unsupported("control-flow", "its past and present share a buffer already")
    _lower(body, node, 6, 3, ["past_present_share_buffer"])


def multi_head_attention(body: GrowingBody, node: Node) -> None:
    """MultiHeadAttention with ``past_key`` and ``past_value`` [batch, heads, keys, size]."""
    *_, mask, bias, past_key, past_value, count, indirection = _inputs(node, 10)
    if past_key is None and past_value is None:
        raise Unsupported("control-flow", "its keys grow in each iteration, but are not its past_key")
    _check(body, node, caches=(past_key, past_value), axis=2, masks=(mask, bias), fixed=(0, 1, 2, 3))
    cache = body.growing(past_key)
    _check_buffer(body, cache is not None and cache.is_shared, count, indirection)
    node = replace(node, inputs=node.inputs[:8])
    if len(node.outputs) > 3 and node.outputs[3] is not None:
        raise Unsupported("control-flow", "it returns attention scores")
    _lower(body, node, 8, 2, [])


def decoder_masked_multi_head_attention(body: GrowingBody, node: Node) -> None:
    """DecoderMaskedMultiHeadAttention with past_key and past_value, as MultiHeadAttention of one token."""
    query, key, value, mask, bias, past_key, past_value, count, _, indirection, added = _inputs(node, 11)
    kept = ("num_heads", "mask_filter_value", "scale")
    attributes = {name: x for name, x in node.attributes.items() if name in kept}
    inputs: tuple[Value | None, ...]
    if past_key is None and past_value is None:  # attention to the encoder
        inputs = (query, key, value, mask, bias, None, None, None, None, None, added)
        if any(body.special(each) is not None for each in inputs):
            raise Unsupported("control-flow", "its keys grow in each iteration, but are not its past_key")
        body.results(replace(node, inputs=inputs, attributes=attributes))
        return
    inputs = (query, key, value, added, mask, bias, past_key, past_value, count, indirection)
    multi_head_attention(
        body, replace(node, op_type="MultiHeadAttention", since_version=1, inputs=inputs, attributes=attributes)
    )


def relative_position_bias(body: GrowingBody, node: Node) -> None:
    """RelativePositionBias of all queries and keys. Decoders use the last query's row, see `Growing.row`."""
    extras = []
    for index in (1, 2):
        array = body.sizes(needed_input(node, index))
        extra = None if array is None or array.size != 1 else after_past(array.reshape(-1)[0])
        if not isinstance(extra, int):
            raise Unsupported("control-flow", "the number of keys does not determine its lengths")
        extras.append(extra)
    if extras[0] != extras[1]:
        raise InvalidModel("query_length: got another number than key_length, expected the same")
    whole = body.ctx.host_tensor([body.capacity], (1,), DType.INT64)
    (result,) = body.results(node, {1: whole, 2: whole})
    table, distance = body.tensor(needed_input(node, 0)), node.attributes.get("max_distance")
    if not isinstance(distance, int):
        raise InvalidModel(f"max_distance: got {distance!r}, expected an integer")
    is_bidirectional = bool(node.attributes.get("is_bidirectional", 0))

    def row(first: Dim) -> Tensor:
        def query(maps: IndexMap, index: Scalar) -> Scalar:
            return index + body.number(maps) + maps.dim(first)

        return distance_bias(body.ctx, table, (1, body.capacity), distance, query, is_bidirectional=is_bidirectional)

    body.set(node.outputs[0], Growing(result, {2: extras[0], 3: extras[1]}, row))


def _inputs(node: Node, count: int) -> list[Value | None]:
    return [*node.inputs, *[None] * (count - len(node.inputs))]


def _check(
    body: GrowingBody,
    node: Node,
    *,
    caches: tuple[Value | None, ...],
    axis: int,
    masks: tuple[Value | None, Value | None],
    fixed: tuple[int, ...],
) -> None:
    """Check that caches and masks grow along their axes of keys, and that the inputs ``fixed`` do not grow."""
    for cache in caches:
        if (x := body.growing(cache)) is None or x.axes != {axis: 0}:
            raise Unsupported("control-flow", "its past is not a K/V cache of the decoder")
    inputs = _inputs(node, max(fixed) + 1)
    if any(body.special(inputs[index]) is not None for index in fixed):
        raise Unsupported("control-flow", "its queries, keys or values grow in each iteration")
    if any(body.tensor(value).shape[axis] != 1 for value, axis in _token_axes(body, inputs[:3])):
        raise Unsupported("control-flow", "it has more than one query or key for each sequence")
    mask, bias = masks
    for value, keys in ((mask, None), (bias, 3)):
        if value is None:
            continue
        rank = body.tensor(value).rank
        at = _MASK_AXIS.get(rank) if keys is None else keys
        x = body.growing(value)
        if at is None or x is None or x.axes != {at: 1}:
            raise Unsupported("control-flow", "its mask does not have one column for each key")


def _check_buffer(body: GrowingBody, is_shared: bool, count: Value | None, indirection: Value | None) -> None:
    """Check the number of past keys and cache_indirection of a node, which it has if its past and present share."""
    found = body.special(count)
    counts = [] if not isinstance(found, Sizes) else found.array.reshape(-1).tolist()
    if (counts != [PAST]) if is_shared else (count is not None):
        raise Unsupported("control-flow", "its past_sequence_length is not the number of the decoder's past keys")
    if indirection is not None and not isinstance(body.special(indirection), BeamOfKey):
        raise Unsupported("control-flow", "its cache_indirection is not the decoder's")


def _token_axes(body: GrowingBody, values: list[Value | None]) -> list[tuple[Value, int]]:
    """Return the axis of tokens of each query, key and value: the second one, or the third behind heads."""
    given = [value for value in values if value is not None and body.tensor(value).rank >= 3]
    return [(value, 2 if body.tensor(value).rank == 4 else 1) for value in given]


def _lower(body: GrowingBody, node: Node, index: int, axis: int, flags: list[str]) -> None:
    """Lower the node with the number of cached keys as input ``index``, and the attributes ``flags`` set."""
    attributes = {**node.attributes, **dict.fromkeys(flags, 1)}
    output, *presents = body.results(replace(node, attributes=attributes), {index: body.past})
    named = [value for value in node.outputs[1:] if value is not None]
    if node.outputs[0] is None:
        raise Unsupported("control-flow", "its result is not used")
    body.set(node.outputs[0], output)
    is_shared = any((x := body.growing(value)) is not None and x.is_shared for value in node.inputs)
    for value, present in zip(named, presents, strict=True):
        body.set(value, Growing(present, {axis: 1}, is_shared=is_shared))
