"""Lowering rules for com.microsoft operators with growing K/V caches: attention, and T5's relative position bias.

The attention kernels append to a buffer of fixed capacity, and read the number of valid keys in device memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ...kernels.elementwise.index_map import IndexMap
from ...model.ir import DType, InvalidModel, Node, Unsupported, Value
from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import Dim
from ...program.steps.tensor import Tensor
from .body import GrowingBody, needed_input
from .values import PAST, WHAT_PAST, BeamOfKey, Growing, Sizes, after_past

_MASK_AXIS: Final = {2: 1, 3: 2}
"""Rank of a mask -> its axis of keys."""


def attention(body: GrowingBody, node: Node) -> None:
    """Lower Attention with ``past`` [2, batch, heads, keys, size]."""
    _, _, _, mask, past, bias, count = _inputs(node, 7)
    _check(body, node, caches=(past,), axis=3, masks=(mask, bias), fixed=(0, 1, 2))
    if count is not None:
        raise Unsupported(
            "control-flow",
            f"past_sequence_length (input 6, {count.name!r}) is given, so the past and present caches of the node "
            "share a buffer; supported: separate tensors",
        )
    _lower(body, node, 6, 3, ["past_present_share_buffer"])


def multi_head_attention(body: GrowingBody, node: Node) -> None:
    """Lower MultiHeadAttention with ``past_key`` and ``past_value`` [batch, heads, keys, size]."""
    *_, mask, bias, past_key, past_value, count, indirection = _inputs(node, 10)
    if past_key is None and past_value is None:
        raise _without_past()
    _check(body, node, caches=(past_key, past_value), axis=2, masks=(mask, bias), fixed=(0, 1, 2, 3))
    cache = body.growing(past_key)
    _check_buffer(body, cache is not None and cache.is_shared, count, indirection)
    node = replace(node, inputs=node.inputs[:8])
    if len(node.outputs) > 3 and node.outputs[3] is not None:
        raise Unsupported(
            "control-flow", f"output 3 ({node.outputs[3].name!r}) has the attention scores; supported: no output 3"
        )
    _lower(body, node, 8, 2, [])


def _without_past() -> Unsupported:
    return Unsupported(
        "control-flow",
        "an input grows in each iteration, but past_key and past_value are missing; supported: keys and values that "
        "grow in past_key and past_value",
    )


def decoder_masked_multi_head_attention(body: GrowingBody, node: Node) -> None:
    """Lower DecoderMaskedMultiHeadAttention as MultiHeadAttention of one token, with or without a past."""
    query, key, value, mask, bias, past_key, past_value, count, _, indirection, added = _inputs(node, 11)
    kept = ("num_heads", "mask_filter_value", "scale")
    attributes = {name: x for name, x in node.attributes.items() if name in kept}
    inputs: tuple[Value | None, ...]
    if past_key is None and past_value is None:  # attention to the encoder
        inputs = (query, key, value, mask, bias, None, None, None, None, None, added)
        if any(body.special(each) is not None for each in inputs):
            raise _without_past()
        body.results(replace(node, inputs=inputs, attributes=attributes))
        return
    inputs = (query, key, value, added, mask, bias, past_key, past_value, count, indirection)
    multi_head_attention(
        body, replace(node, op_type="MultiHeadAttention", since_version=1, inputs=inputs, attributes=attributes)
    )


def relative_position_bias(body: GrowingBody, node: Node) -> None:
    """Lower RelativePositionBias of all queries and keys. Decoders use the last query's row, see `Growing.row`."""
    extras = []
    for index in (1, 2):
        array = body.sizes(needed_input(node, index))
        extra = None if array is None or array.size != 1 else after_past(array.reshape(-1)[0])
        if not isinstance(extra, int):
            name = ("query_length", "key_length")[index - 1]
            raise Unsupported(
                "control-flow",
                f"{name} (input {index}) is not one number that follows from the number of cached keys; supported: the "
                "number of cached keys plus a constant",
            )
        extras.append(extra)
    if extras[0] != extras[1]:
        raise InvalidModel(
            f"query_length must be key_length = {PAST + extras[1]!r}, got {PAST + extras[0]!r} ({WHAT_PAST})"
        )
    whole = body.ctx.host_tensor([body.capacity], (1,), DType.INT64)
    (result,) = body.results(node, {1: whole, 2: whole})
    table, distance = body.tensor(needed_input(node, 0)), node.attributes.get("max_distance")
    if not isinstance(distance, int):
        raise InvalidModel(f"max_distance: got {distance!r}, expected an integer")
    is_bidirectional = bool(node.attributes.get("is_bidirectional", 0))

    def row(first: Dim) -> Tensor:
        def query(maps: IndexMap, index: Scalar) -> Scalar:
            return index + body.number(maps) + maps.dim(first)

        # Imported here: a session that loads a compiled model must not import the operators of products.
        from ...ops.contrib.attention.position import distance_bias

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
            name = "missing" if cache is None else repr(cache.name)
            raise Unsupported(
                "control-flow",
                f"its past is {name}; supported: a K/V cache of the decoder, with keys along axis {axis}",
            )
    inputs = _inputs(node, max(fixed) + 1)
    for index in fixed:
        if (found := inputs[index]) is not None and body.special(found) is not None:
            raise Unsupported(
                "control-flow",
                f"input {index} ({found.name!r}) depends on the number of cached keys; supported: K/V caches and "
                "masks that do, and no other inputs",
            )
    for given, tokens in _token_axes(body, inputs[:3]):
        if (dim := body.tensor(given).shape[tokens]) != 1:
            raise Unsupported(
                "control-flow", f"{given.name!r} has {dim!r} queries or keys for each sequence; supported: 1"
            )
    mask, bias = masks
    for value, keys in ((mask, None), (bias, 3)):
        if value is None:
            continue
        rank = body.tensor(value).rank
        at = _MASK_AXIS.get(rank) if keys is None else keys
        x = body.growing(value)
        if at is None or x is None or x.axes != {at: 1}:
            name = "mask" if keys is None else "attention bias"
            wanted = "axis 1 of rank 2, or axis 2 of rank 3" if keys is None else f"axis {keys}"
            raise Unsupported(
                "control-flow",
                f"its {name} {value.name!r} of rank {rank} does not have one column for each key; supported: keys "
                f"along {wanted}",
            )


def _check_buffer(body: GrowingBody, is_shared: bool, count: Value | None, indirection: Value | None) -> None:
    """Check the inputs past_sequence_length (``count``) and cache_indirection of a node.

    ``count`` must be the number of cached keys if past and present share a buffer (``is_shared``), else missing.
    """
    found = body.special(count)
    counts = [] if not isinstance(found, Sizes) else found.array.reshape(-1).tolist()
    if (counts != [PAST]) if is_shared else (count is not None):
        name = "missing" if count is None else repr(count.name)
        supported = (
            "the number of cached keys" if is_shared else "none, because past and present caches share no buffer"
        )
        raise Unsupported("control-flow", f"its past_sequence_length is {name}; supported: {supported}")
    if indirection is not None and not isinstance(body.special(indirection), BeamOfKey):
        raise Unsupported(
            "control-flow",
            f"its cache_indirection is {indirection.name!r}; supported: the decoder's input cache_indirection",
        )


def _token_axes(body: GrowingBody, values: list[Value | None]) -> list[tuple[Value, int]]:
    """Return each query, key and value of rank 3 or more with its axis of tokens: 1, or for rank 4 (after heads) 2."""
    given = [value for value in values if value is not None and body.tensor(value).rank >= 3]
    return [(value, 2 if body.tensor(value).rank == 4 else 1) for value in given]


def _lower(body: GrowingBody, node: Node, index: int, axis: int, flags: list[str]) -> None:
    """Lower the node with the number of cached keys as input ``index``, and the attributes ``flags`` set to 1.

    The present caches grow along ``axis``.
    """
    attributes = {**node.attributes, **dict.fromkeys(flags, 1)}
    output, *presents = body.results(replace(node, attributes=attributes), {index: body.past})
    named = [value for value in node.outputs[1:] if value is not None]
    if node.outputs[0] is None:
        raise Unsupported(
            "control-flow", "output 0, the result of attention, is missing; supported: attention with output 0"
        )
    body.set(node.outputs[0], output)
    is_shared = any((x := body.growing(value)) is not None and x.is_shared for value in node.inputs)
    for value, present in zip(named, presents, strict=True):
        body.set(value, Growing(present, {axis: 1}, is_shared=is_shared))
