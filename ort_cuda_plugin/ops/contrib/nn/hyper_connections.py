"""Hyper-connections of com.microsoft: C residual streams with H features each, mixed by gates."""

from __future__ import annotations

from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import Dim, eq, floordiv
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise
from ....program.lowering.reduce import row_map
from ....program.lowering.views import expand, reshape, squeeze, unsqueeze
from ....program.steps.row_program import SUM, Row
from ... import requirements as require
from ...onnx.nn.normalization import Outputs, rms_normalized
from ...outputs import is_used
from ...registry import UP_TO_FLOAT32, M, T, contrib_op

_TYPES = {"T": UP_TO_FLOAT32, "M": UP_TO_FLOAT32}


def _grouped(ctx: Lowering, x: Tensor, num_branches: int) -> Tensor:
    """Return x as [..., C, H]; ``num_branches`` is C if x is [..., C * H], else 0."""
    require.least(0, num_branches=num_branches)
    require.least_rank(1 if num_branches else 2, X=x)
    if not num_branches:
        return x
    width = floordiv(x.shape[-1], num_branches)
    require.multiple_of(ctx, x.shape[-1], num_branches, "the last dimension of X", "num_branches")
    return reshape(ctx, x, [*x.shape[:-1], num_branches, width])


def _gates(ctx: Lowering, gates: Tensor, streams: Tensor) -> Tensor:
    """Expand gates [..., C], [..., C, 1], [..., C, H] or [..., C * H] to the shape of ``streams`` [..., C, H]."""
    *outer, branches, width = streams.shape
    if gates.rank == streams.rank:
        each = ctx.guard(eq(gates.shape[-1], 1))
        require.shape(ctx, (*outer, branches, 1 if each else width), gates=gates)
    elif gates.rank == streams.rank - 1:
        each = ctx.guard(eq(gates.shape[-1], branches))
        require.shape(ctx, (*outer, branches if each else branches * width), gates=gates)
        gates = reshape(ctx, gates, (*outer, branches, 1 if each else width))
    else:
        expected = f"have rank {streams.rank} or {streams.rank - 1}"
        raise require.violation("the input pre_mix or post_mix", expected, f"rank {gates.rank}")
    return expand(ctx, gates, streams.shape)


def _product(a: Scalar, b: Scalar) -> Scalar:
    return s.widen(a) * s.widen(b)


@contrib_op("BranchwiseRMSNorm", **_TYPES)
def branchwise_rms_norm(
    ctx: Lowering, x: T, scale: M | None = None, *, epsilon: float = 1e-5, num_branches: int = 0
) -> Tensor:
    """Return the RMS norm of each of C streams of H elements; ``scale`` is [C * H], [C, H] or [H]."""
    streams = _grouped(ctx, x, num_branches)
    branches, width = streams.shape[-2:]
    factors: list[Tensor] = []
    if scale is not None:
        shape: tuple[Dim, ...] = (branches, width)
        if scale.rank == 1 and ctx.guard(eq(scale.shape[0], width)):
            shape = (width,)
        elif scale.rank == 1:
            require.size(ctx, branches * width, scale=scale)
            scale = reshape(ctx, scale, shape)
        require.shape(ctx, shape, scale=scale)
        factors = [scale]

    def program(row: Row, value: Scalar, *factor: Scalar) -> Outputs:
        return [s.cast(rms_normalized(row, value, epsilon, *factor), x.dtype)], []

    (result,) = row_map(ctx, program, [streams.rank - 1], streams, *factors)
    return ctx.view(result, x.shape)


@contrib_op("HyperConnectionPreMix", **_TYPES)
def hyper_connection_pre_mix(
    ctx: Lowering, streams: T, pre_mix: M, *, num_branches: int = 0, reduction_scale: float = 1.0
) -> Tensor:
    """Return the sum of gate * stream over the streams."""
    grouped = _grouped(ctx, streams, num_branches)
    gates = _gates(ctx, pre_mix, grouped)
    axis = grouped.rank - 2

    def program(row: Row, x: Scalar, gate: Scalar) -> Outputs:
        return [], [s.cast(row.reduce(SUM, _product(x, gate)) * reduction_scale, streams.dtype)]

    (result,) = row_map(ctx, program, [axis], grouped, gates)
    return squeeze(ctx, result, [axis])


@contrib_op("HyperConnectionPostMix", **_TYPES)
def hyper_connection_post_mix(
    ctx: Lowering, streams: T, block_output: T, post_mix: M, stream_mix: M | None = None, *, num_branches: int = 0
) -> Tensor:
    """Mix the streams by a matrix [C (from), C (to)] per token, and add gate * block_output to each stream."""
    grouped = _grouped(ctx, streams, num_branches)
    gates = _gates(ctx, post_mix, grouped)
    *outer, branches, width = grouped.shape
    require.shape(ctx, (*outer, width), block_output=block_output)
    block, axis = unsqueeze(ctx, block_output, [len(outer)]), len(outer)
    mixed = grouped
    if stream_mix is not None:
        require.shape(ctx, (*outer, branches, branches), stream_mix=stream_mix)
        sources = unsqueeze(ctx, grouped, [axis + 1])
        matrix = unsqueeze(ctx, stream_mix, [axis + 2])
        (total,) = row_map(
            ctx, lambda row, x, weight: ([], [row.reduce(SUM, _product(x, weight))]), [axis], sources, matrix
        )
        mixed = squeeze(ctx, total, [axis])

    def finish(x: Scalar, y: Scalar, gate: Scalar) -> Scalar:
        return s.cast(s.widen(x) + _product(y, gate), streams.dtype)

    return reshape(ctx, elementwise(ctx, finish, mixed, block, gates), streams.shape)


@contrib_op("EngramGate", T=UP_TO_FLOAT32)
def engram_gate(
    ctx: Lowering,
    key: Tensor,
    query: Tensor,
    value: Tensor,
    key_norm_scale: Tensor,
    query_norm_scale: Tensor,
    conv_norm_scale: Tensor | None = None,
    *,
    epsilon: float = 1e-5,
) -> tuple[Tensor, ...]:
    """Return value * gate for each stream, and the RMS norm of this product.

    The gate is sigmoid(sign(d) * sqrt(max(abs(d), 1e-6))) with d = dot(norm(key), norm(query)) / sqrt(H).
    """
    require.rank(4, key=key)
    batch, steps, branches, width = key.shape
    require.shape(ctx, key.shape, query=query)
    require.shape(ctx, (batch, steps, width), value=value)
    scales = [key_norm_scale, query_norm_scale]
    normed = is_used(ctx, 1)
    if normed:
        wanted = "be given if the node has its second output, the normalized one"
        scales.append(require.given(conv_norm_scale, "conv_norm_scale", wanted))
    for scale in scales:
        require.shape(ctx, (branches, width), scale=scale)

    def program(row: Row, k: Scalar, q: Scalar, v: Scalar, *factors: Scalar) -> Outputs:
        count = s.cast(row.count, DType.FLOAT32)
        keys, queries = (rms_normalized(row, x, epsilon, factor) for x, factor in ((k, factors[0]), (q, factors[1])))
        product = row.reduce(SUM, keys * queries) / s.sqrt(count)
        gate = s.sigmoid(s.sign(product) * s.sqrt(s.maximum(s.absolute(product), 1e-6)))
        gated = gate * s.widen(v)
        results = [gated, rms_normalized(row, gated, epsilon, factors[2])] if normed else [gated]
        return [s.cast(x, key.dtype) for x in results], []

    return row_map(ctx, program, [3], key, query, unsqueeze(ctx, value, [2]), *scales)
