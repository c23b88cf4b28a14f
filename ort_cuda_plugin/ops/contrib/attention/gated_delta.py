"""GatedDeltaNet and LinearAttentionGate of com.microsoft: linear attention over packed tokens, and its gates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....kernels.attention.linear_attention import LinearAttention, linear_attention
from ....kernels.elementwise.index_map import IndexMap, gather_map
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import Dim, floordiv, product
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import copy_of, elementwise, full
from ....program.lowering.reduce import row_map
from ....program.lowering.views import expand, permute, reshape, unsqueeze
from ....program.steps.row_program import SUM, Row
from ... import requirements as require
from ...onnx.attention.linear_attention import UPDATE_RULES
from ...onnx.attention.scores import scaled_by
from ...onnx.math.activation import softplus
from ...onnx.nn.normalization import Outputs
from ...onnx.tensor.slicing import concat
from ...outputs import is_used
from ...registry import FLOAT32, INT32, TF, TI, TS, UP_TO_FLOAT32, Gates, T, contrib_op
from ..packed_tokens import PackedTokens, check_capture
from .multi_head import split_columns

_SOFTPLUS = ("qwen", "softplus")
"""Values of ``gate_activation`` that do not use ``gate_lower_bound``."""
_BOUNDED = ("sigmoid", "kda")
"""Values of ``gate_activation`` that bound the logarithm of a decay below by ``gate_lower_bound``."""


@contrib_op("LinearAttentionGate", T=UP_TO_FLOAT32, TF=FLOAT32)
def linear_attention_gate(ctx: Lowering, a: T, dt_bias: TF, decay_scale: TF, b: T | None = None) -> tuple[Tensor, ...]:
    """Return decay_scale * softplus(a + dt_bias), and sigmoid(b) if b is given, computed in float32."""
    require.rank(3, a=a)
    require.shape(ctx, a.shape[2:], dt_bias=dt_bias, decay_scale=decay_scale)
    if is_used(ctx, 1):
        require.given(b, "b", "be given if the node has the output beta")

    def gate(x: Scalar, bias: Scalar, factor: Scalar) -> Scalar:
        return s.cast(factor * softplus(s.widen(x) + bias), a.dtype)

    decay = elementwise(ctx, gate, a, dt_bias, decay_scale)
    if b is None:
        return (decay,)
    require.shape(ctx, a.shape, b=b)
    return decay, elementwise(ctx, s.sigmoid, b)


@contrib_op("GatedDeltaNet", T=UP_TO_FLOAT32, TS=FLOAT32, TI=INT32)
def gated_delta_net(
    ctx: Lowering,
    query: T,
    key: T | None = None,
    value: T | None = None,
    cu_seqlens: TI | None = None,
    decay: Gates | None = None,
    beta: Gates | None = None,
    initial_state: TS | None = None,
    a_log: TS | None = None,
    dt_bias: TS | None = None,
    capture_count: TI | None = None,
    state_update_active: TI | None = None,
    *,
    beta_activation: str = "none",
    chunk_size: int = 64,
    gate_activation: str = "none",
    gate_lower_bound: float = -5.0,
    qk_l2_norm: int = 0,
    scale: float = 0.0,
    state_update_capacity: int = 0,
    update_rule: str = "gated_delta",
) -> tuple[Tensor, ...]:
    """Return output, final state and state update. ``chunk_size``, a hint for chunked algorithms, is ignored.

    The state of each head is transposed, [value size, key size]. The state update is 0 after the tokens that
    ``capture_count`` selects.
    """
    require.one_of(UPDATE_RULES, update_rule=update_rule)
    require.one_of(("none", "sigmoid"), beta_activation=beta_activation)
    require.one_of(("none", *_SOFTPLUS, *_BOUNDED), gate_activation=gate_activation)
    require.all_or_none(a_log=a_log, dt_bias=dt_bias)
    found = f"gate_activation = {gate_activation!r} {'without' if a_log is None else 'with'} them"
    wanted = "be given if and only if gate_activation is not 'none'"
    require.that((gate_activation == "none") == (a_log is None), "a_log and dt_bias", wanted, found)
    check_capture(state_update_capacity, capture_count)
    require.rank(4, initial_state=initial_state)
    lead, q, k, v = _heads(ctx, query, key, value, initial_state)
    tokens, heads, width = v.shape
    size, key_heads = q.shape[2], k.shape[1]
    require.multiple_of(ctx, heads, key_heads, "the number of heads of value", "that of key")
    wanted = f"have rank {query.rank - 1} (all sequences in one dimension of tokens) if cu_seqlens is given"
    require.that(cu_seqlens is None or len(lead) == 1, "query", wanted, f"rank {query.rank}")
    packed, count, steps = _sequences(ctx, cu_seqlens, initial_state, tokens)
    require.shape(ctx, (count, heads, width, size), initial_state=initial_state)
    gates = None
    if decay is not None and "gated" in update_rule:
        fits = not state_update_capacity or decay.rank == len(lead) + 1
        wanted = f"have rank {len(lead) + 1} (one element per head) if state_update_capacity is above 0"
        require.that(fits, "decay", wanted, f"rank {decay.rank}")
        bound = gate_lower_bound if gate_activation in _BOUNDED else None
        gates = _decay(ctx, decay, lead, size, heads, a_log, dt_bias, bound)
    require.shape(ctx, (*lead, heads), beta=beta)
    rate = None if beta is None else elementwise(ctx, s.widen, reshape(ctx, beta, (tokens, heads, 1)))
    if rate is not None and beta_activation == "sigmoid":
        rate = elementwise(ctx, s.sigmoid, rate)
    if "delta" not in update_rule and rate is not None:
        v, rate = elementwise(ctx, lambda x, factor: s.widen(x) * factor, v, rate), None
    elif "delta" in update_rule and rate is None:
        rate = expand(ctx, full(ctx, (1, 1, 1), 1.0, DType.FLOAT32), (tokens, heads, 1))
    if qk_l2_norm:
        q, k = _unit(ctx, q), _unit(ctx, k)

    def by_sequence(x: Tensor) -> Tensor:
        """Return x with a leading dimension of sequences; with packed tokens each sequence views all tokens."""
        if packed is None:
            return reshape(ctx, x, (count, steps, *x.shape[1:]))
        return expand(ctx, unsqueeze(ctx, x, [0]), (count, *x.shape))

    outputs = ctx.empty((tokens, heads, width), query.dtype)
    if packed is not None:
        # With invalid cu_seqlens, some tokens belong to no sequence; their results are 0.
        ctx.memset(outputs, 0)
    state = ctx.empty((count, heads, size, width), DType.FLOAT32)
    captured = (count, state_update_capacity, heads, width)
    added = ctx.empty(captured, DType.FLOAT32) if state_update_capacity else None
    given = LinearAttention(
        query=by_sequence(unsqueeze(ctx, q, [2])),
        key=by_sequence(k),
        value=by_sequence(v),
        past=None if initial_state is None else permute(ctx, initial_state, (0, 1, 3, 2)),
        decay=None if gates is None else by_sequence(gates),
        beta=None if rate is None else by_sequence(rate),
        scale=scaled_by(ctx, full(ctx, (), 1.0, DType.FLOAT32), size, scale or None),
        state=state,
        outputs=by_sequence(unsqueeze(ctx, outputs, [2])),
        bounds=cu_seqlens,
        added=added,
    )
    linear_attention(ctx, given)
    results = [ctx.view(outputs, (*lead, heads, width)), copy_of(ctx, permute(ctx, state, (0, 1, 3, 2)))]
    if added is not None and capture_count is not None:
        require.shape(ctx, (count,), capture_count=capture_count)

        def span(maps: IndexMap, row: Scalar) -> tuple[Scalar, Scalar]:
            if packed is not None:
                return packed.range(maps, row)
            return row * maps.dim(steps), maps.dim(steps)

        results.append(_captured(ctx, span, gates, k, added, capture_count, state_update_active))
    return tuple(results)


def _sequences(
    ctx: Lowering, cu_seqlens: Tensor | None, initial_state: Tensor | None, tokens: Dim
) -> tuple[PackedTokens | None, Dim, Dim]:
    """Return the packed sequences (None without ``cu_seqlens``), their number, and the maximum tokens of a sequence."""
    if cu_seqlens is not None:
        packed = PackedTokens(ctx, cu_seqlens, tokens)
        return packed, packed.count, tokens
    if initial_state is None:
        raise require.violation("cu_seqlens or initial_state", "be given", "neither")
    count = initial_state.shape[0]
    require.least_dim(ctx, 1, **{"the number of sequences of initial_state": count})
    require.multiple_of(ctx, tokens, count, "the number of tokens", "the number of sequences of initial_state")
    return None, count, floordiv(tokens, count)


def _heads(
    ctx: Lowering, query: Tensor, key: Tensor | None, value: Tensor | None, state: Tensor | None
) -> tuple[tuple[Dim, ...], Tensor, Tensor, Tensor]:
    """Return the token dimensions, and Q, K, V [tokens, heads, size]; the query may hold all three packed."""
    require.all_or_none(key=key, value=value)
    packed = key is None
    lead = query.shape[: query.rank - (1 if packed else 2)]
    wanted = "have rank 2 or 3 if it holds Q, K and V (no key and value), else rank 3 or 4"
    require.that(len(lead) in (1, 2), "query", wanted, f"rank {query.rank}")
    tokens = product(lead)
    if key is None or value is None:
        wanted = "be given if query holds Q, K and V (no key and value)"
        _, heads, width, size = require.given(state, "initial_state", wanted).shape
        row = reshape(ctx, query, (tokens, query.shape[-1]))
        key_heads = floordiv(query.shape[-1] - heads * width, 2 * size)
        require.least_dim(ctx, 1, **{"the number of key heads in the packed query": key_heads})
        columns = split_columns(ctx, row, [key_heads * size, key_heads * size, heads * width], "query")
        q, k, v = (
            reshape(ctx, x, (tokens, number, each))
            for x, number, each in zip(columns, (key_heads, key_heads, heads), (size, size, width), strict=True)
        )
        return lead, q, k, v
    require.rank(query.rank, key=key, value=value)
    require.shape(ctx, query.shape, key=key)
    require.shape(ctx, (*lead, *value.shape[-2:]), value=value)
    q, k, v = (reshape(ctx, x, (tokens, *x.shape[-2:])) for x in (query, key, value))
    return lead, q, k, v


def _decay(
    ctx: Lowering, decay: Tensor, lead: Sequence[Dim], size: Dim, heads: Dim, a_log: Tensor | None, bias: Tensor | None,
    bound: float | None,
) -> Tensor:  # fmt: skip
    """Return the logarithms of the decays, [tokens, heads, size].

    ``decay`` contains them per element or per head. With ``a_log`` and ``bias`` [heads], ``decay`` is the input x of a
    gate: the result is -exp(a_log) * softplus(x + bias), or with a ``bound`` b: b * sigmoid(exp(a_log) * (x + bias)).
    """
    tokens, each = product(lead), decay.rank == len(lead) + 2
    require.shape(ctx, (*lead, heads, size) if each else (*lead, heads), decay=decay)
    gates = reshape(ctx, decay, (tokens, heads, size if each else 1))
    if a_log is not None and bias is not None:
        require.shape(ctx, (heads,), a_log=a_log, dt_bias=bias)

        def made(x: Scalar, logarithm: Scalar, offset: Scalar) -> Scalar:
            x, factor = s.widen(x) + offset, s.exp(logarithm)
            return -factor * softplus(x) if bound is None else bound * s.sigmoid(factor * x)

        gates = elementwise(ctx, made, gates, *(unsqueeze(ctx, x, [1]) for x in (a_log, bias)))
    return expand(ctx, gates, (tokens, heads, size))


def _unit(ctx: Lowering, x: Tensor) -> Tensor:
    """Return x in float32, scaled to L2 norm 1 along the last axis."""

    def program(row: Row, value: Scalar) -> Outputs:
        real = s.widen(value)
        return [real / s.sqrt(row.reduce(SUM, real * real) + 1e-12)], []

    return row_map(ctx, program, [x.rank - 1], x)[0]


def _captured(
    ctx: Lowering,
    span: Callable[[IndexMap, Scalar], tuple[Scalar, Scalar]],
    gates: Tensor | None,
    key: Tensor,
    added: Tensor,
    wanted: Tensor,
    active: Tensor | None,
) -> Tensor:
    """Return decays, keys and state additions of the first tokens of each sequence, one row per sequence.

    ``span`` returns the first token of a sequence and its number of tokens. ``wanted`` [sequences] is the number of
    tokens to capture, at most the capacity of ``added``. If ``active`` is given and 0, no token is captured. Elements
    for tokens that are not captured are 0.
    """
    count, capacity, heads, _ = added.shape
    _, key_heads, size = key.shape

    def captured(maps: IndexMap, row: Scalar, slot: Scalar) -> tuple[Scalar, Scalar]:
        """Return the first token of the sequence, and whether the sequence captures this slot."""
        begin, steps = span(maps, row)
        inside = (slot < steps) & (slot < s.cast(maps.source(wanted).at([row]), DType.INT64))
        return begin, inside if active is None else inside & s.not_equal(maps.number(active), 0)

    def decay_of(maps: IndexMap, c: list[Scalar]) -> Scalar:
        begin, inside = captured(maps, c[0], c[1])
        if gates is None:
            return s.where(inside, s.constant(1.0, DType.FLOAT32), 0.0)
        gate = s.widen(maps.source(gates).at([begin + c[1], c[2], s.constant(0, DType.INT64)], inside))
        return s.where(inside, s.exp(gate), 0.0)

    def key_of(maps: IndexMap, c: list[Scalar]) -> Scalar:
        begin, inside = captured(maps, c[0], c[1])
        return s.cast(maps.source(key).at([begin + c[1], c[2], c[3]], inside), DType.FLOAT32)

    def addition_of(maps: IndexMap, c: list[Scalar]) -> Scalar:
        return maps.source(added).at(c, captured(maps, c[0], c[1])[1])

    shapes = ((count, capacity, heads), (count, capacity, key_heads, size), added.shape)
    parts = [
        reshape(ctx, gather_map(ctx, shape, DType.FLOAT32, element), (count, product(shape[1:])))
        for shape, element in zip(shapes, (decay_of, key_of, addition_of), strict=True)
    ]
    return concat(ctx, *parts, axis=1)
