"""Channels-last (NHWC) operators: the function of ai.onnx between two transposed views.

If a session prefers channels-last, ONNX Runtime converts claimed nodes to this domain and inserts transposes around
them. All these transposes are views, and cancel each other.
"""

from __future__ import annotations

import functools
from typing import Any

from ...program.lowering.context import Lowering, Tensor
from ...program.lowering.views import permute
from .. import requirements as require
from ..layouts import channels_last
from ..registry import CHANNELS_LAST_DOMAIN, OperatorFunction, op, versions
from .image import grid_sample
from .nn import batch_norm, conv, normalization, pooling
from .tensor import slicing

_DECLARING = (batch_norm, conv, grid_sample, normalization, pooling, slicing)
"""Modules that must have registered their operators before this module reads the table."""

_OPERATORS = (
    "AveragePool", "BatchNormalization", "Conv", "ConvTranspose", "DepthToSpace", "GlobalAveragePool", "GlobalMaxPool",
    "GridSample", "LRN", "MaxPool", "SpaceToDepth",
)  # fmt: skip


def _channels_last(function: OperatorFunction) -> OperatorFunction:
    """Wrap ``function`` for a channels-last first input and first result.

    ONNX Runtime inserts no transposes for other tensors: the indices of MaxPool, for example, are in ONNX's order.
    """

    @functools.wraps(function)
    def between_views(ctx: Lowering, x: Tensor, *inputs: Tensor | None, **attributes: Any) -> tuple[Tensor, ...]:
        require.least_rank(2, **{"a channels-last input": x})
        result = function(ctx, permute(ctx, x, (0, x.rank - 1, *range(1, x.rank - 1))), *inputs, **attributes)
        first, *others = result if isinstance(result, tuple) else (result,)
        assert isinstance(first, Tensor)
        return channels_last(ctx, first), *others

    return between_views


for _row in [row for name in _OPERATORS for row in versions("", name)]:
    _declare = op(
        _row.name, domain=CHANNELS_LAST_DOMAIN, since=_row.since, until=_row.until, types=_row.types, names=_row.names
    )
    _declare(_channels_last(_row.function))
