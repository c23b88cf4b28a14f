"""DynamicTimeWarping of com.microsoft."""

from __future__ import annotations

from ....kernels.block_algorithms.dynamic_time_warping import warping_path
from ....kernels.elementwise.index_map import IndexMap, gather_map
from ....model.ir import DType
from ....program.expressions.scalar import Scalar
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.views import squeeze
from ... import requirements as require
from ...registry import FLOAT32, INT32, F, contrib_op


@contrib_op("DynamicTimeWarping", F=FLOAT32, I=INT32)
def dynamic_time_warping(ctx: Lowering, cost: F) -> Tensor:
    """Return rows and columns [2, steps] of the cheapest path through a cost matrix."""
    if cost.rank == 3:
        require.dim(ctx, 0, 1, input=cost)
        cost = squeeze(ctx, cost, [0])
    require.rank(2, input=cost)
    for dim in cost.shape:
        require.least_dim(ctx, 1, **{"each dimension of input": dim})
    path, count, most = warping_path(ctx, cost)
    (steps,) = ctx.read_back(count, "number of steps", 1, most)

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        return maps.source(path).at([c[0], maps.dim(steps) - 1 - c[1]])

    return gather_map(ctx, (2, steps), DType.INT32, element)
