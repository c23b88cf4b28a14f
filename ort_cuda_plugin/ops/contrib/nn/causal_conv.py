"""Causal convolution of com.microsoft: dilated, channels-last, variable-length, with several states."""

from __future__ import annotations

from ....kernels.elementwise.index_map import IndexMap, gather_map, walk_map
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import product
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.views import part, permute, reshape, squeeze
from ....program.steps.row_program import SUM
from ... import requirements as require
from ...onnx.nn.causal_conv import causal_convolution, check_convolution, filter_length
from ...registry import INT32, UP_TO_FLOAT32, M, T, contrib_op
from ..packed_tokens import PackedTokens, check_capture

MAX_WINDOW = 8
"""Maximum number of states that a node may keep, by the schema."""
_ADDED = "(input_channel_offset, input_channels, state_channels_last, state_length, state_update_capacity)"
_PLAIN = (0, 0, -1, 0, 0)
"""Defaults of the attributes `_ADDED` of newer schemas of CausalConvWithState. No other values are supported."""


@contrib_op("CausalConvWithState", T=UP_TO_FLOAT32)
def microsoft_causal_conv_with_state(
    ctx: Lowering,
    x: T,
    weight: T,
    bias: T | None = None,
    past_state: T | None = None,
    *,
    activation: str = "none",
    channels_last: int = 0,
    dilation: int = 1,
    input_channel_offset: int = 0,
    input_channels: int = 0,
    ndim: int = 1,
    state_channels_last: int = -1,
    state_length: int = 0,
    state_update_capacity: int = 0,
    state_window: int = 0,
) -> tuple[Tensor, ...]:
    """Return output and present state; with ``state_window`` n, output and the states after each of n last steps."""
    if ndim != 1:
        # Only the last dimension is causal; the schema does not define the padding of the other dimensions.
        raise require.unsupported("attribute", "ndim", ndim, "1")
    added = (input_channel_offset, input_channels, state_channels_last, state_length, state_update_capacity)
    require.supported(added == _PLAIN, "attribute", _ADDED, added, f"the defaults {_PLAIN}")
    require.within(0, MAX_WINDOW, state_window=state_window)
    require.one_of((0, 1), channels_last=channels_last)
    if x.rank < 3 or (x.rank > 3 and not channels_last):
        raise require.violation("input", "have rank 3, or at least 3 if channels_last is 1", f"rank {x.rank}")
    shape, past = x.shape, past_state
    if past is not None and state_window:
        require.rank(x.rank + 1, past_state=past)
        require.dim(ctx, 0, state_window, past_state=past)
        past = squeeze(ctx, part(ctx, past, 0, state_window - 1, 1), [0])
    if channels_last:
        x = _channels_first(ctx, x)
        past = None if past is None else _channels_first(ctx, past)
    output, padded = causal_convolution(ctx, x, weight, bias, past, activation, dilation)
    batch, channels, length = x.shape
    reach = padded.shape[2] - length
    if state_window:

        def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
            window, row, step, channel = c
            first = maps.dim(length) - state_window + window + 1
            is_last = s.equal(window, state_window - 1)
            return maps.source(padded).at([row, channel, first + step], (first > 0) | is_last)

        state = gather_map(ctx, (state_window, batch, reach, channels), x.dtype, element)
        if not channels_last:
            state = permute(ctx, state, (0, 1, 3, 2))
    else:
        state = part(ctx, padded, 2, length, reach)
        if channels_last:
            state = permute(ctx, state, (0, 2, 1))
    if channels_last:
        output = reshape(ctx, permute(ctx, output, (0, 2, 1)), shape)
        state = reshape(ctx, state, (*state.shape[:-1], *shape[2:]))
    return output, state


def _channels_first(ctx: Lowering, x: Tensor) -> Tensor:
    """Return x [batch, steps, ...] as [batch, channels, steps]."""
    batch, steps, *channels = x.shape
    return permute(ctx, reshape(ctx, x, (batch, steps, product(channels))), (0, 2, 1))


@contrib_op("VarlenCausalConvWithState", T=UP_TO_FLOAT32, M=INT32)
def varlen_causal_conv_with_state(
    ctx: Lowering,
    x: T,
    weight: T,
    cumulative_sequence_length: M,
    bias: T | None,
    initial_state: T,
    capture_count: M | None = None,
    *,
    activation: str = "none",
    delta_offset: int = 0,
    dilation: int = 1,
    group_size: int = 1,
    state_update_capacity: int = 0,
) -> tuple[Tensor, ...]:
    """Return output [tokens, channels], final state, and with ``capture_count`` the first tokens of each sequence.

    ``capture_count`` holds the number of these tokens for each sequence. ``delta_offset`` and ``group_size`` are
    ignored: they belong to inputs that only newer schemas have.
    """
    check_capture(state_update_capacity, capture_count)
    check_convolution(activation, dilation)
    require.rank(2, input=x)
    tokens, channels = x.shape
    width = filter_length(ctx, weight, bias, channels)
    packed = PackedTokens(ctx, cumulative_sequence_length, tokens)
    reach = (width - 1) * dilation
    require.shape(ctx, (packed.count, channels, reach), initial_state=initial_state)

    def sample(maps: IndexMap, row: Scalar, begin: Scalar, channel: Scalar, t: Scalar) -> Scalar:
        """Return the element at position t of a sequence that begins at ``begin``; t < 0 reads the sequence's state."""
        before = maps.source(initial_state).at([row, channel, t + maps.dim(reach)], t < 0)
        return s.where(t < 0, before, maps.source(x).at([begin + t, channel], t >= 0))

    def convolved(maps: IndexMap, c: list[Scalar]) -> Scalar:
        row, begin, at = packed.locate(maps, c[0])

        def tap(j: Scalar) -> list[Scalar]:
            value = sample(maps, row, begin, c[1], at - (maps.dim(width) - 1 - j) * dilation)
            factor = maps.source(weight).at([c[1], s.constant(0, DType.INT64), j])
            return [s.widen(value) * s.widen(factor)]

        (total,) = maps.fold(SUM, maps.dim(width), tap)
        if bias is not None:
            total = total + s.widen(maps.source(bias).at([c[1]]))
        return s.cast(total if activation == "none" else total * s.sigmoid(total), x.dtype)

    def final(maps: IndexMap, c: list[Scalar]) -> Scalar:
        begin, count = packed.range(maps, c[0])
        return sample(maps, c[0], begin, c[1], count - maps.dim(reach) + c[2])

    results = [
        gather_map(ctx, (tokens, channels), x.dtype, convolved),
        # Initial and final state may share a buffer: elements only move towards the front.
        walk_map(ctx, (packed.count, channels, reach), x.dtype, final, over=initial_state),
    ]
    if capture_count is not None:
        require.shape(ctx, (packed.count,), capture_count=capture_count)

        def captured(maps: IndexMap, c: list[Scalar]) -> Scalar:
            begin, count = packed.range(maps, c[0])
            wanted = s.cast(maps.source(capture_count).at([c[0]]), DType.INT64)
            return maps.source(x).at([begin + c[1], c[2]], (c[1] < count) & (c[1] < wanted))

        results.append(gather_map(ctx, (packed.count, state_update_capacity, channels), x.dtype, captured))
    return tuple(results)
