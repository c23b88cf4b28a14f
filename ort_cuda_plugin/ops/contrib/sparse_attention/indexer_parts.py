"""Shared parts of the two sparse attention indexers: norms, rotary embedding, pooling, ranking."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ....kernels.elementwise.index_map import IndexMap, Source, gather_map
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import Dim, floordiv
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.reduce import row_map
from ....program.steps.row_program import MAX, SUM, Row
from ... import requirements as require
from ...onnx.nn.normalization import Outputs, rms_normalized
from ...onnx.tensor.indexing import order_of

PositionOf: TypeAlias = Callable[[IndexMap, list[Scalar]], Scalar]
Predicate: TypeAlias = Callable[[IndexMap, list[Scalar]], Scalar]


def normalized(ctx: Lowering, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return the RMS norm of x along the last dimension, float32."""
    require.shape(ctx, x.shape[-1:], **{"query_norm_weight and key_norm_weight": weight})

    def program(row: Row, value: Scalar, factor: Scalar) -> Outputs:
        return [rms_normalized(row, value, epsilon, factor)], []

    return row_map(ctx, program, [x.rank - 1], x, weight)[0]


class Rotary:
    """Rotary embedding. A token's position, clamped to the tables, selects the row of the cos and sin tables.

    With ``leading`` the first elements rotate, in pairs (i, i + half) with an angle per element; otherwise the last
    elements, in adjacent pairs that share an angle. A table of rank 3 holds one table per sequence.
    """

    def __init__(self, ctx: Lowering, cos: Tensor, sin: Tensor, sequences: Dim, *, leading: bool) -> None:
        require.rank((2, 3), cos_cache=cos)
        require.shape(ctx, cos.shape, sin_cache=sin)
        if cos.rank == 3:
            require.shape(ctx, (sequences, *cos.shape[1:]), cos_cache=cos)
        self._ctx, self._cos, self._sin, self._leading = ctx, cos, sin, leading

    def __call__(self, x: Tensor, position: PositionOf, sequence: PositionOf = lambda maps, c: c[0]) -> Tensor:
        """Rotate x [..., size] to float32; ``position`` and ``sequence`` map coordinates to position and sequence."""
        cos, sin, leading = self._cos, self._sin, self._leading
        width, size = cos.shape[-1], x.shape[-1]
        rotated = width if leading else 2 * width
        require.most_dim(self._ctx, size, **{"the number of rotated elements": rotated})

        def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
            source = maps.source(x)
            begin = s.constant(0, DType.INT64) if leading else maps.dim(size - rotated)
            at = c[-1] - begin
            inside = (at >= 0) & (at < maps.dim(rotated))
            if leading:
                half = maps.dim(floordiv(rotated, 2))
                first, angle = at < half, at
                partner = s.where(first, at + half, at - half)
            else:
                first, angle, partner = s.equal(at & 1, 0), at >> 1, at ^ 1

            def number(table: Source) -> Scalar:
                row = s.minimum(s.maximum(position(maps, c), 0), table.dim(table.rank - 2) - 1)
                lead = [sequence(maps, c)] if table.rank == 3 else []
                return s.widen(table.at([*lead, row, angle], inside & (row >= 0)))

            value, other = s.widen(source.at(c)), s.widen(source.at([*c[:-1], begin + partner], inside))
            result = value * number(maps.source(cos)) + s.where(first, -other, other) * number(maps.source(sin))
            return s.where(inside, result, value)

        return gather_map(self._ctx, x.shape, DType.FLOAT32, element)


def pooled_by_gates(
    maps: IndexMap,
    at: Callable[[int, Scalar, Scalar, Scalar], Scalar],
    bias: Tensor,
    begin: Scalar,
    column: Scalar,
    size: Dim,
    ratio: int,
    slots: Scalar,
) -> Scalar:
    """Return one column of the softmax(gate)-weighted mean key of two adjacent windows of ``ratio`` tokens.

    ``at(plane, token, column, when)`` reads a key (plane 0) or gate (1), to which ``bias`` is added. The windows are
    ``slots`` tokens from ``begin`` on; negative tokens do not exist. The second window uses the columns from ``size``
    on.
    """

    def slot(i: Scalar) -> tuple[Scalar, Scalar, Scalar]:
        return begin + i, s.where(i < ratio, column, column + maps.dim(size)), begin + i >= 0

    def gate(i: Scalar) -> Scalar:
        token, own, exists = slot(i)
        raw = s.widen(at(1, token, own, exists))
        added = s.widen(maps.source(bias).at([s.trunc_modulo(i, ratio), own]))
        return s.where(exists, raw + added, -math.inf)

    most = maps.fold(MAX, slots, lambda i: [gate(i)])[0]
    most = s.where(s.equal(most, -math.inf), 0.0, most)
    total = maps.fold(SUM, slots, lambda i: [s.exp(gate(i) - most)])[0]

    def weighted(i: Scalar) -> Sequence[Scalar]:
        token, own, exists = slot(i)
        return [s.exp(gate(i) - most) * s.widen(at(0, token, own, exists))]

    result = maps.fold(SUM, slots, weighted)[0] / total
    # Return 0 unless the sum of exponentials is positive and finite.
    return s.where((total > 0.0) & (total < math.inf), result, 0.0)


def best_first(ctx: Lowering, scores: Tensor, allowed: Predicate) -> Tensor:
    """Argsort the last dimension of ``scores``, best first; a score that is NaN or not ``allowed`` counts as -inf."""

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        return ranked(maps.source(scores).at(c), allowed(maps, c))

    return order_of(ctx, gather_map(ctx, scores.shape, DType.FLOAT32, element))


def ranked(score: Scalar, allowed: Scalar) -> Scalar:
    """Return the score, or -inf if it is NaN or not allowed."""
    return s.where(allowed & s.equal(score, score), score, -math.inf)


def complete(position: Scalar, ratio: int) -> Scalar:
    """Return the number of blocks of ``ratio`` tokens that end at or before a position; 0 for a negative position."""
    count = s.trunc_divide(position, ratio)
    count = count + s.cast(s.equal(s.trunc_modulo(position, ratio), ratio - 1), DType.INT64)
    return s.where(position >= 0, count, 0)


def check_policy(mode: str, ratio: int, budget: int | None, top: int | None) -> None:
    require.one_of(("qsa", "csa"), policy_mode=mode)
    require.least(1, compress_ratio=ratio)
    if mode == "qsa":
        fits = budget is not None and budget > 0 and budget % ratio == 0 and top is None
        wanted = (
            f"be a positive multiple of compress_ratio ({ratio}), and index_topk be left out, if policy_mode is 'qsa'"
        )
        require.that(fits, "token_budget", wanted, f"{budget} and index_topk = {top}")
    else:
        fits = top is not None and top > 0 and budget is None
        wanted = "be positive, and token_budget be left out, if policy_mode is 'csa'"
        require.that(fits, "index_topk", wanted, f"{top} and token_budget = {budget}")
