"""Channels-last (NHWC) operators: the function of ai.onnx between two transposed views.

Where a session prefers channels-last tensors, ONNX Runtime gives claimed nodes this form and puts transposes around
them. Those are views as well, so that a function reads and writes what it would without them.
"""

from __future__ import annotations

import functools
from typing import Any

from ort_cuda_plugin.ops import requirements as require
from ort_cuda_plugin.ops.onnx.image import grid_sample
from ort_cuda_plugin.ops.onnx.nn import batch_norm, conv, normalization, pooling
from ort_cuda_plugin.ops.onnx.tensor import slicing
from ort_cuda_plugin.ops.registry import CHANNELS_LAST_DOMAIN, OperatorFunction, op, versions
from ort_cuda_plugin.program.lowering.context import Lowering, Tensor
from ort_cuda_plugin.program.lowering.views import permute

_DECLARING = (batch_norm, conv, grid_sample, normalization, pooling, slicing)
"""The modules whose rows have to be in the table before this one's."""

_OPERATORS = (
    "AveragePool", "BatchNormalization", "Conv", "ConvTranspose", "DepthToSpace", "GlobalAveragePool", "GlobalMaxPool",
    "GridSample", "LRN", "MaxPool", "SpaceToDepth",
)  # fmt: skip


def _channels_last(function: OperatorFunction) -> OperatorFunction:
    """``function`` for a channels-last first input; its first result is channels-last as well.

    Others stay as they are. ONNX Runtime puts no transpose around those: the indices of MaxPool, say, count in
    ONNX's order.
    """

    @functools.wraps(function)
    def between_views(ctx: Lowering, x: Tensor, *inputs: Tensor | None, **attributes: Any) -> tuple[Tensor, ...]:
        require.least_rank(2, **{"a channels-last input": x})
        result = function(ctx, permute(ctx, x, (0, x.rank - 1, *range(1, x.rank - 1))), *inputs, **attributes)
        first, *others = result if isinstance(result, tuple) else (result,)
        assert isinstance(first, Tensor)
        return permute(ctx, first, (0, *range(2, first.rank), 1)), *others

    return between_views


for _row in [row for name in _OPERATORS for row in versions("", name)]:
    op(_row.name, domain=CHANNELS_LAST_DOMAIN, since=_row.since, until=_row.until, types=_row.types)(
        _channels_last(_row.function)
    )
