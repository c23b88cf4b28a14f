"""Linear attention of ai.onnx and com.microsoft: a recurrent state matrix per head replaces cached keys and values."""

from __future__ import annotations

from ....kernels.attention.linear_attention import LinearAttention, linear_attention
from ....program.expressions import scalar as s
from ....program.expressions.symbolic import Dim, eq, floordiv, product
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise, full
from ....program.lowering.views import expand, part, reshape, squeeze
from ... import requirements as require
from ...registry import FLOATS, UP_TO_FLOAT32, S, T, contrib_op, op
from .scores import scaled_by

UPDATE_RULES = ("linear", "gated", "delta", "gated_delta")
""""gated": the state decays. "delta": the state's present value for the key is subtracted from the new value."""
MAX_WINDOW = 8
"""Maximum of the attribute state_window, in states, by the schema."""


@op("LinearAttention", since=27, types={"T": FLOATS, "S": FLOATS})
def linear_attention_27(
    ctx: Lowering,
    query: T,
    key: T,
    value: T,
    past_state: S | None = None,
    decay: T | None = None,
    beta: T | None = None,
    *,
    chunk_size: int | None = None,
    kv_num_heads: int,
    q_num_heads: int,
    scale: float | None = None,
    update_rule: str = "gated_delta",
) -> tuple[Tensor, ...]:
    """Return output and present state. ``chunk_size``, a hint for chunked algorithms, is ignored."""
    if ("gated" in update_rule) != (decay is not None) or ("delta" in update_rule) != (beta is not None):
        given = [name for name, x in (("decay", decay), ("beta", beta)) if x is not None]
        expected = f"fit update_rule {update_rule!r}: decay only for a gated rule, beta only for a delta rule"
        raise require.violation("decay and beta", expected, " and ".join(given) or "neither")
    require.that(q_num_heads >= kv_num_heads, "q_num_heads", f"be at least kv_num_heads = {kv_num_heads}", q_num_heads)
    return _linear_attention(
        ctx, query, key, value, past_state, decay, beta, kv_num_heads, q_num_heads, scale or 0.0, update_rule, 0
    )


@contrib_op("LinearAttention", T=UP_TO_FLOAT32, S=UP_TO_FLOAT32)
def microsoft_linear_attention(
    ctx: Lowering,
    query: T,
    key: T,
    value: T,
    past_state: S | None = None,
    decay: T | None = None,
    beta: T | None = None,
    *,
    chunk_size: int | None = None,
    kv_num_heads: int,
    q_num_heads: int,
    scale: float = 0.0,
    state_window: int = 0,
    update_rule: str = "gated_delta",
) -> tuple[Tensor, ...]:
    """Compute LinearAttention. Several K/V heads may share a query head or a key head.

    With ``state_window`` n, the present state holds the states after each of the last n steps, in dimension 0.
    """
    for x, name, kind in ((decay, "decay", "gated"), (beta, "beta", "delta")):
        require.that(kind not in update_rule or x is not None, name, f"be given for {update_rule!r}", "none")
    require.within(0, MAX_WINDOW, state_window=state_window)
    return _linear_attention(
        ctx, query, key, value, past_state, decay if "gated" in update_rule else None,
        beta if "delta" in update_rule else None, kv_num_heads, q_num_heads, scale, update_rule, state_window,
    )  # fmt: skip


def _linear_attention(
    ctx: Lowering, query: Tensor, key: Tensor, value: Tensor, past: Tensor | None, decay: Tensor | None,
    beta: Tensor | None, heads: int, query_heads: int, scale: float, update_rule: str, window: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return output and present state, with the last ``window`` states in dimension 0 unless ``window`` is 0."""
    require.one_of(UPDATE_RULES, update_rule=update_rule)
    if heads <= 0 or query_heads <= 0 or (query_heads % heads and heads % query_heads):
        wanted = f"be a positive multiple or divisor of kv_num_heads ({heads})"
        raise require.violation("q_num_heads", wanted, query_heads)
    require.rank(3, query=query, key=key, value=value, decay=decay, beta=beta)
    batch, steps, hidden = query.shape
    group = max(query_heads // heads, 1)
    size, width = floordiv(hidden, query_heads), floordiv(value.shape[2], heads)

    def split(x: Tensor, what: str, *dims: Dim) -> Tensor:
        require.shape(ctx, (batch, steps, product(dims)), **{what: x})
        return reshape(ctx, x, [batch, steps, *dims])

    key_heads: Dim = heads
    if not ctx.guard(eq(key.shape[2], heads * size)):
        key_heads = floordiv(key.shape[2], size)
        require.multiple_of(ctx, heads, key_heads, "the number of heads of value", "that of key")
    kept, past_window = query.dtype if past is None else past.dtype, past if window else None
    if past is not None:
        lead = (window,) if window else ()
        require.shape(ctx, (*lead, batch, heads, size, width), past_state=past)
        if window:
            past = squeeze(ctx, part(ctx, past, 0, window - 1, 1), [0])
    if decay is not None:
        per_head = ctx.guard(eq(decay.shape[2], heads))
        decay = expand(ctx, split(decay, "decay", heads, 1 if per_head else size), [batch, steps, heads, size])
    if beta is not None:
        beta = expand(ctx, split(beta, "beta", beta.shape[2], 1), [batch, steps, heads, 1])
    compute = s.accumulation_type(query.dtype)
    state = ctx.empty((batch, heads, size, width), compute)
    output = ctx.empty((batch, steps, heads, group, width), query.dtype)
    states = ctx.empty((window, batch, heads, size, width), kept) if window else None
    given = LinearAttention(
        query=split(query, "query", min(query_heads, heads), group, size),
        key=split(key, "key", key_heads, size),
        value=split(value, "value", heads, width),
        past=past,
        decay=decay,
        beta=beta,
        scale=scaled_by(ctx, full(ctx, (), 1.0, compute), size, scale or None),
        state=state,
        outputs=output,
        window=states,
        past_window=past_window,
    )
    linear_attention(ctx, given)
    result = ctx.view(output, (batch, steps, heads * group * width))
    if states is not None:
        return result, states
    return result, state if kept is compute else elementwise(ctx, lambda x: s.cast(x, kept), state)
