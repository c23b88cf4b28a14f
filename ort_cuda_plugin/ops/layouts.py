"""Shared views: a scalar, a column, a vector per channel, channels-first and channels-last layouts."""

from __future__ import annotations

from collections.abc import Callable

from ..program.lowering.context import Lowering, Tensor
from ..program.lowering.views import permute, unsqueeze
from . import requirements as require


def as_number(ctx: Lowering, x: Tensor, name: str = "each scale and zero point") -> Tensor:
    """View a tensor of one element as a scalar; ``name`` is its name in messages."""
    require.scalar(ctx, **{name: x})
    return ctx.view(x, (), (), x.offset)


def column_of(ctx: Lowering, x: Tensor, column: int) -> Tensor:
    """View one column of x [rows, columns]."""
    return ctx.view(x, x.shape[:1], x.strides[:1], x.offset + column * x.strides[1])


def per_channel(ctx: Lowering, x: Tensor, rank: int, name: str) -> Tensor:
    """View the input ``name``, a vector [C], so that it broadcasts to [N, C, ...] of ``rank``."""
    require.rank(1, **{name: x})
    return unsqueeze(ctx, x, range(1, rank - 1))


def channels_first(ctx: Lowering, x: Tensor) -> Tensor:
    """Permute [N, ..., C] to [N, C, ...]."""
    require.least_rank(3, X=x)
    return permute(ctx, x, (0, x.rank - 1, *range(1, x.rank - 1)))


def channels_last(ctx: Lowering, x: Tensor) -> Tensor:
    """Permute [N, C, ...] to [N, ..., C]."""
    return permute(ctx, x, (0, *range(2, x.rank), 1))


def with_channels_first(
    ctx: Lowering, x: Tensor, function: Callable[[Tensor], Tensor], is_channels_last: int
) -> Tensor:
    """Apply ``function`` to x in channels-first layout, and return the result in the layout of x."""
    require.least_rank(3, X=x)
    return channels_last(ctx, function(channels_first(ctx, x))) if is_channels_last else function(x)
