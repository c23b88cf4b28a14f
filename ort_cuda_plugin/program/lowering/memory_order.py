"""Memory order of tensors in sessions with the option prefer_nhwc, for which ONNX Runtime converts nodes to NHWC.

Convolutions and pooling read and write NCHW memory through NHWC views. Elementwise results between such steps keep NCHW
memory order, so that no step converts the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...model.ir import DType
from ..expressions.symbolic import Dim
from ..steps.tensor import Tensor
from .recorder import Recorder
from .views import permute, unsqueeze


def is_channels_first(x: Tensor) -> bool:
    """Return whether x is an NHWC view of NCHW memory."""
    if x.rank < 3 or x.is_contiguous:
        return False
    dense: Dim = 1
    for axis in (*range(x.rank - 2, 0, -1), x.rank - 1):
        if x.strides[axis] != dense and x.shape[axis] != 1:
            return False
        dense = dense * x.shape[axis]
    return True


def in_memory_order(ctx: Recorder, x: Tensor, rank: int) -> Tensor:
    """Return x, which broadcasts to an NHWC tensor of ``rank`` dimensions, as a view in NCHW order."""
    x = unsqueeze(ctx, x, range(rank - x.rank))
    return permute(ctx, x, _to_channels_first(rank))


def empty_in_order(ctx: Recorder, shape: Sequence[Dim], dtype: DType, like: Iterable[Tensor]) -> Tensor:
    """Return a new tensor, in NCHW memory order if the session prefers NHWC and a tensor of ``like`` has this order."""
    rank = len(shape)
    if not ctx.options.prefer_nhwc or not any(x.rank == rank and is_channels_first(x) for x in like):
        return ctx.empty(shape, dtype)
    result = ctx.empty([shape[axis] for axis in _to_channels_first(rank)], dtype)
    return permute(ctx, result, (0, *range(2, rank), 1))


def _to_channels_first(rank: int) -> tuple[int, ...]:
    return (0, rank - 1, *range(1, rank - 1))
