"""Mixture of experts: a router assigns each token to k feed-forward networks, and their results are weighted.

The device selects each token's experts by the rank of their probabilities. `grouped_product`, a grouped GEMM, reads
only the weights of chosen experts. Intermediate values are float32; the result is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from ....kernels.elementwise.index_map import IndexMap, Loads, gather_map, scatter_map
from ....kernels.gemm.grouped_gemm import Choices, Shared, Weights, group_rows, grouped_product
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import Dim, eq, floordiv, product
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise
from ....program.lowering.reduce import row_map
from ....program.lowering.views import part, reshape, unsqueeze
from ....program.steps.row_program import SUM, Row
from ... import requirements as require
from ...onnx.math.activation import gelu_tanh
from ...registry import UP_TO_FLOAT32, T, attributes_of, contrib_op

_ACTIVATIONS: Final[dict[str, Callable[[Scalar], Scalar]]] = {
    "relu": lambda x: s.maximum(x, 0.0),
    "gelu": gelu_tanh,
    "silu": lambda x: x * s.sigmoid(x),
    "identity": lambda x: x,
}
INTERLEAVED: Final = 1
"""Value of `Mixture.swiglu_fusion`: columns of the first GEMM alternate between swiglu's gate and linear part."""
_JITTER: Final = 0.01
"""Relative jitter of the sparse mixer.

An expert with score s is masked if best - s > 2 * _JITTER * max(abs(s), best).
"""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """How tokens choose experts, and the gate between the two GEMMs of an expert. Fields are ONNX attributes.

    ``activation_type`` is an activation, or "swiglu" with its parameters. ``swiglu_fusion`` says how the first GEMM
    stores swiglu's gate and linear part: 0 two GEMMs, 1 interleaved, 2 concatenated. ``swiglu_limit`` clamps the linear
    part on both sides, and the gate from above. With ``swiglu_limit_after_activation`` it clamps the activated gate
    instead of the gate.
    """

    activation_alpha: float = 1.0
    activation_beta: float = 0.0
    activation_type: str = "relu"
    k: int = 1
    normalize_routing_weights: int = 0
    swiglu_fusion: int = 0
    swiglu_limit: float | None = None
    swiglu_limit_after_activation: int = 0
    use_sparse_mixer: int = 0

    def checked(self, third: Tensor | None) -> Mixture:
        """Check the attributes of the gate, and return them as they apply; ``third`` are the weights of fc3."""
        is_swiglu, fusion = self.activation_type == "swiglu", self.swiglu_fusion
        require.one_of((*_ACTIVATIONS, "swiglu"), activation_type=self.activation_type)
        require.one_of((0, 1, 2), swiglu_fusion=fusion)
        limits = (0, 1) if is_swiglu else (0,)
        require.one_of(limits, swiglu_limit_after_activation=self.swiglu_limit_after_activation)
        fits = not is_swiglu or third is None or not fusion
        require.that(fits, "swiglu_fusion", "be 0 if fc3_experts_weights is given", fusion)
        if is_swiglu and third is None and fusion == 0:
            # Exporters before ONNX Runtime 1.27 wrote interleaved parts without the attribute (gpt-oss-20b).
            # CUDAExecutionProvider reads these models in the same way.
            return replace(self, swiglu_fusion=INTERLEAVED)
        return self

    @property
    def parts(self) -> int:
        """Return how many columns of the first GEMM make one column of the second GEMM's input."""
        return 2 if self.activation_type == "swiglu" and self.swiglu_fusion else 1

    def swiglu(self, gate: Scalar, linear: Scalar) -> Scalar:
        limit = self.swiglu_limit
        if limit is not None:
            linear = s.maximum(s.minimum(linear, limit), -limit)
            if not self.swiglu_limit_after_activation:
                gate = s.minimum(gate, limit)
        activated = gate * s.sigmoid(self.activation_alpha * gate)
        if limit is not None and self.swiglu_limit_after_activation:
            activated = s.minimum(activated, limit)
        return activated * (linear + self.activation_beta)

    def gated(self, ctx: Lowering, first: Tensor, third: Tensor | None, width: Dim) -> Tensor:
        """Return the input of the second GEMM, float32 [rows, width]."""
        if self.activation_type != "swiglu":
            activation = _ACTIVATIONS[self.activation_type]
            if third is None:
                return elementwise(ctx, activation, first)
            return elementwise(ctx, lambda x, y: activation(x) * y, first, third)
        if third is None:
            axis = 2 if self.swiglu_fusion == INTERLEAVED else 1
            both = reshape(ctx, first, [first.shape[0], *((width, 2) if axis == 2 else (2, width))])
            first, third = (reshape(ctx, part(ctx, both, axis, i, 1), [first.shape[0], width]) for i in range(2))
        return elementwise(ctx, self.swiglu, first, third)

    def __call__(
        self, ctx: Lowering, x: Tensor, scores: Tensor, given: Tensor | None, first: Weights, second: Weights,
        third: Weights | None,
    ) -> Tensor:  # fmt: skip
        """Return the weighted sum of the results of each token's experts; ``scores`` are [tokens, experts]."""
        k, sparse = self.k, bool(self.use_sparse_mixer)
        require.least(1, k=k)
        if sparse and (k != 2 or given is not None):
            found = f"k = {k} {'without' if given is None else 'with'} router_weights"
            raise require.violation("a node with use_sparse_mixer = 1", "have k = 2 and no router_weights", found)
        tokens, width = product(x.shape[:-1]), x.shape[-1]
        chosen = choose(ctx, scores, k)
        counts = factors(ctx, scores, chosen, given, bool(self.normalize_routing_weights), sparse)
        choices: Choices = group_rows(ctx, ctx.view(chosen, (tokens * k,)), scores.shape[1])
        rows = reshape(ctx, x, [tokens, width])
        hidden = grouped_product(ctx, choices, rows, k, first, x.dtype)
        other = None if third is None else grouped_product(ctx, choices, rows, k, third, x.dtype)
        between = self.gated(ctx, hidden, other, floordiv(first.columns, self.parts))
        results = ctx.view(grouped_product(ctx, choices, between, 1, second, x.dtype), (tokens, k, width))

        def total(row: Row, value: Scalar, count: Scalar) -> tuple[list[Scalar], list[Scalar]]:
            return [], [s.cast(row.reduce(SUM, value * count), x.dtype)]

        (result,) = row_map(ctx, total, [1], results, unsqueeze(ctx, counts, (2,)))
        return ctx.view(result, x.shape)


def settle_older_shape(
    ctx: Lowering, first: Tensor, per_output: Tensor | None, second: Tensor, width: Dim, gate: Mixture, pack: int = 1
) -> bool:
    """Return whether weights declare [experts, inputs, outputs / pack] instead of [experts, outputs, inputs / pack].

    As in ONNX Runtime, the shape of the third weights does not matter. Both shapes mean the byte order of [experts,
    outputs, inputs / pack], except for 4-bit floats and prepacked codes. If ``width`` is unknown at claim time, the
    first GEMM's number of outputs decides: dimension 1 of ``per_output``, or without it a dimension of ``second``.
    """
    may_be_older = ctx.settled(eq(second.shape[2] * pack, width))
    if may_be_older is None:
        # At claim time the tokens' width may be unknown: compare dimensions of the weights with each other.
        outputs = gate.parts * second.shape[2] * pack if per_output is None else per_output.shape[1]
        return ctx.known(eq(first.shape[1], outputs)) is False
    if not may_be_older:
        return False
    if ctx.settled(eq(second.shape[1], width)):
        return gate.parts > 1 and bool(ctx.settled(eq(first.shape[1], width)))
    return True


def choose(ctx: Lowering, scores: Tensor, k: int) -> Tensor:
    """Return the experts with the k largest scores [tokens, experts], largest first: int32 [tokens, k].

    The last of equal scores wins, as in the CPU provider. NaN ranks last, so that every token has k experts.
    """
    tokens, experts = scores.shape
    require.most_dim(ctx, experts, k=k)
    chosen = ctx.empty((tokens, k), DType.INT32)

    def ranked(maps: IndexMap, c: list[Scalar]) -> tuple[list[Scalar], Scalar, Scalar]:
        def score(expert: Scalar) -> Scalar:
            value = s.widen(maps.source(scores).at([c[0], expert]))
            return s.where(s.is_nan(value), float("-inf"), value)

        own = score(c[1])

        def before(other: Scalar) -> list[Scalar]:
            theirs = score(other)
            wins = (theirs > own) | (s.equal(theirs, own) & (other > c[1]))
            return [s.cast(wins, DType.INT64)]

        (rank,) = maps.fold(SUM, maps.dim(experts), before)
        return [c[0], rank], s.cast(c[1], DType.INT32), rank < k

    scatter_map(ctx, (tokens, experts), chosen, ranked)
    return chosen


def factors(
    ctx: Lowering, scores: Tensor, chosen: Tensor, given: Tensor | None, normalize: bool, sparse: bool
) -> Tensor:
    """Return the weight of each chosen expert, float32 [tokens, k].

    Without ``given``, weights are the softmax of the scores over all experts, or with ``normalize`` over the chosen
    experts. With ``given`` [tokens, experts], weights are its elements, with ``normalize`` divided by their sum.
    ``sparse`` selects the sparse mixer of two experts: softmax over scores close to the best, then, without the best,
    over scores close to the second.
    """
    tokens, k = chosen.shape
    experts = scores.shape[1]

    def factor(maps: IndexMap, c: list[Scalar]) -> Scalar:
        table, of = maps.source(chosen), maps.source(scores if given is None else given)

        def expert_at(j: Scalar) -> Scalar:
            return s.cast(table.at([c[0], j]), DType.INT64)

        def score(expert: Scalar) -> Scalar:
            return s.widen(of.at([c[0], expert]))

        first = s.constant(0, DType.INT64)
        own = score(expert_at(c[1]))
        if given is not None:
            if not normalize:
                return own
            (total,) = maps.fold(SUM, maps.dim(k), lambda j: [score(expert_at(j))])
            return s.where(s.equal(total, 0.0), 0.0, own / total)
        best = own if sparse else score(expert_at(first))
        winner = expert_at(first)

        def power(expert: Scalar) -> list[Scalar]:
            value = score(expert)
            result = s.exp(value - best)
            if not sparse:
                return [result]
            far = (best - value) > 2 * _JITTER * s.maximum(s.absolute(value), best)
            taken = (c[1] > 0) & s.equal(expert, winner)
            return [s.where(far | taken, 0.0, result)]

        if normalize and not sparse:
            (total,) = maps.fold(SUM, maps.dim(k), lambda j: power(expert_at(j)))
        else:
            (total,) = maps.fold(SUM, maps.dim(experts), power)
        return s.exp(own - best) / total

    return gather_map(ctx, (tokens, k), DType.FLOAT32, factor)


def check_tokens(ctx: Lowering, x: Tensor, scores: Tensor) -> tuple[Dim, Dim]:
    """Check x and router_probs; return the tokens' width and the number of experts."""
    require.rank((2, 3), input=x)
    require.rank(2, router_probs=scores)
    require.dim(ctx, 0, product(x.shape[:-1]), router_probs=scores)
    return x.shape[-1], scores.shape[1]


def _plain(
    ctx: Lowering, weights: Tensor, bias: Tensor | None, shape: tuple[Dim, Dim, Dim], older: bool, what: str
) -> Weights:
    """Return unquantized weights, stored in the byte order of ``shape`` [experts, outputs, inputs]."""
    experts, columns, inputs = shape
    declared = (experts, inputs, columns) if older else shape
    require.shape(ctx, declared, **{f"{what}_experts_weights": weights})
    if bias is not None:
        require.shape(ctx, shape[:2], **{f"{what}_experts_bias": bias})
        bias = ctx.contiguous(bias)

    rows = reshape(ctx, weights, [experts * columns, inputs])

    def shared(loads: Loads, expert: Scalar, column: Scalar, k: Scalar) -> Shared:
        return (expert * loads.dim(columns) + column,)

    def element(loads: Loads, expert: Scalar, column: Scalar, k: Scalar, shared: Shared) -> Scalar:
        return s.widen(loads.source(rows).at([shared[0], k]))

    return Weights(columns, element, (weights,), bias, shared)


@contrib_op("MoE", T=UP_TO_FLOAT32)
@attributes_of(Mixture)
def moe(
    ctx: Lowering,
    x: T,
    router_probs: T,
    fc1_experts_weights: T,
    fc1_experts_bias: T | None,
    fc2_experts_weights: T,
    fc2_experts_bias: T | None = None,
    fc3_experts_weights: T | None = None,
    fc3_experts_bias: T | None = None,
    **attributes: Any,
) -> Tensor:
    """Compute a mixture of experts. Weights are declared as [experts, outputs, inputs] or [experts, inputs, outputs].

    Both shapes mean the same order of bytes (`settle_older_shape`). With fc3, an expert multiplies the activated result
    of fc1 by the result of fc3.
    """
    mixture = Mixture(**attributes).checked(fc3_experts_weights)
    require.rank(3, fc1_experts_weights=fc1_experts_weights, fc2_experts_weights=fc2_experts_weights)
    if fc3_experts_weights is None and fc3_experts_bias is not None:
        raise require.violation("fc3_experts_bias", "be left out if fc3_experts_weights is left out", "a bias")
    width, count = check_tokens(ctx, x, router_probs)
    older = settle_older_shape(ctx, fc1_experts_weights, fc1_experts_bias, fc2_experts_weights, width, mixture)
    inner = fc2_experts_weights.shape[1 if older else 2]
    first = _plain(ctx, fc1_experts_weights, fc1_experts_bias, (count, mixture.parts * inner, width), older, "fc1")
    second = _plain(ctx, fc2_experts_weights, fc2_experts_bias, (count, width, inner), older, "fc2")
    third = None
    if fc3_experts_weights is not None:
        third = _plain(ctx, fc3_experts_weights, fc3_experts_bias, (count, inner, width), older, "fc3")
    return mixture(ctx, x, router_probs, None, first, second, third)
