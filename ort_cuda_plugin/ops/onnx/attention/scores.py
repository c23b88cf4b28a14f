"""Attention variants as data: scale, mask, bias, window and sink of the scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import Dim, hint
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise
from ....program.steps.row_program import Row
from ... import requirements as require


def checked_heads(ctx: Lowering, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Check k and v [batch, heads, sequence, size], and return views that share q's and each other's symbolic sizes.

    A Run fails if the sizes differ. Steps over equal symbols can be fused.
    """
    (batch, _, _, size), (_, heads, keys, _), width = q.shape, k.shape, v.shape[3]
    require.shape(ctx, (batch, heads, keys, size), key=k)
    require.shape(ctx, (batch, heads, keys, width), value=v)
    require.multiple_of(ctx, q.shape[1], heads, "the number of heads of query", "that of key")
    return (
        ctx.view(k, (batch, heads, keys, size), k.strides, k.offset),
        ctx.view(v, (batch, heads, keys, width), v.strides, v.offset),
    )


@dataclass(frozen=True)
class Reach:
    """Causality and sliding window.

    A query attends to ``left`` keys before its position and ``right`` keys after it; -1 stands for all keys.
    """

    is_causal: bool = False
    left: int = -1
    right: int = -1

    @property
    def is_limited(self) -> bool:
        return self.is_causal or self.left >= 0 or self.right >= 0

    def within(self, attended: Scalar, distance: Scalar) -> Scalar:
        """Restrict ``attended`` to the window; ``distance`` is the key's position minus the query's."""
        if self.is_causal:
            attended = attended & (distance <= 0)
        if self.left >= 0:
            attended = attended & (distance >= -self.left)
        if self.right >= 0:
            attended = attended & (distance <= self.right)
        return attended


EVERYWHERE = Reach()


def window_before(is_causal: int, size: int) -> Reach:
    """Return the reach for the attribute local_window_size = ``size``.

    Of the keys up to the query's position it includes the last ``size``, or all if ``size`` is not positive. It
    includes later keys unless ``is_causal``.
    """
    return Reach(is_causal=bool(is_causal), left=size - 1 if size > 0 else -1)


class Scores(IntEnum):
    """Scores that attention may return: q @ k, after softcap, after masks, after softmax."""

    RAW = 0
    CAPPED = 1
    BIASED = 2
    PROBABILITIES = 3


@dataclass(frozen=True, kw_only=True)
class Variant:
    """An attention variant: how the scores of queries and keys are scaled, masked and normalized.

    Attributes:
        mask: additive bias, or bool (attend); for the first ``count`` keys, by default for all.
        position: index of each query among the keys, the origin of ``reach``.
        length, last: number of keys, or index of the last key; at most one of the two fields is set.
        sink: score of an additional key with the value zero.
        scale: factor of the scores, by default 1 / sqrt(size of a head).
        softcap: c of ``c * tanh(score / c)``, 0 for none.
        returned: scores that attention returns beside its result.
        precise: compute the softmax in float64.

    ``mask``, ``position``, ``length``, ``last`` and ``sink`` broadcast to the scores [batch, heads, queries, keys].
    """

    mask: Tensor | None = None
    position: Tensor | None = None
    length: Tensor | None = None
    last: Tensor | None = None
    sink: Tensor | None = None
    count: Dim | None = None
    reach: Reach = EVERYWHERE
    scale: float | None = None
    softcap: float = 0.0
    returned: int = Scores.RAW
    precise: bool = False

    @property
    def operands(self) -> dict[str, Tensor]:
        """Return the tensors that a kernel reads beside queries, keys and values, by name."""
        names = ("mask", "position", "last", "length", "sink")
        return {name: x for name in names if (x := getattr(self, name)) is not None}


def biased_score(row: Row, value: Scalar, given: Mapping[str, Scalar], reach: Reach) -> Scalar:
    """Return the score ``value`` with its bias, -inf for a masked key.

    ``given`` may hold "mask" (bias or bool), "position" (index of the query among the keys) and "length" (of keys).
    """
    attended = s.constant(True, DType.BOOL)
    if "mask" in given:
        mask = given["mask"]
        if mask.dtype is DType.BOOL:
            attended = attended & mask
        else:
            bias = s.cast(mask, value.dtype)
            attended = attended & s.not_equal(bias, -math.inf)
            value = value + bias
    if "position" in given:
        attended = reach.within(attended, row.index - given["position"])
    if "length" in given:
        attended = attended & (row.index < given["length"])
    return s.where(attended, value, -math.inf) if attended.op != "constant" else value


def scaled_by(ctx: Lowering, q: Tensor, size: Dim, scale: float | None) -> Tensor:
    """Return q times ``scale``, by default 1 / sqrt(size)."""
    if scale is not None or isinstance(size, int):
        factor = scale if scale is not None else 1.0 / math.sqrt(max(hint(size), 1))
        return elementwise(ctx, lambda x: x * factor, q)
    sizes = ctx.host_tensor([size], (), DType.INT64)
    wide = s.widen(Scalar(q.dtype, "leaf")).dtype
    return elementwise(ctx, lambda x, n: s.cast(s.widen(x) / s.sqrt(s.cast(n, wide)), x.dtype), q, sizes)
