"""Sliding-window K/V cache of GroupQueryAttention (attribute ``sliding_window_cache``): the newest keys of each
sequence, in the order of their positions, from index 0 on.

ONNX Runtime defines the number of cached keys as a function of the number of tokens so far. So the device computes all
indices of a step from the lengths of the sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ....kernels.elementwise.index_map import IndexMap, gather_map
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import Dim, eq
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise
from ....program.lowering.views import unsqueeze
from ... import requirements as require
from ...onnx.tensor.indexing import select_index


@dataclass(frozen=True, eq=False)
class WindowStep:
    """Indices of one decoder step into a key buffer: cached keys start at index 0, the step's new keys follow them.

    Old keys are evicted after the step. The tensors are int64 [batch].
    """

    capacity: Dim
    first: Tensor
    """Index of the first new key."""
    last: Tensor
    """Index of the last new key."""
    dropped: Tensor
    """Number of keys that are evicted after the step."""
    position: Tensor
    """Position in its sequence of the key at index 0."""

    def indices(self, ctx: Lowering, positions: Tensor) -> Tensor:
        """Return the indices of the new keys in the cache, int64 [batch, rows]."""
        return elementwise(ctx, lambda at, position: at - position, positions, unsqueeze(ctx, self.position, (1,)))

    def bias(self, ctx: Lowering, bias: Tensor, batch: Dim, keys: Dim) -> Tensor:
        """Return ``bias`` [batch or 1, heads or 1, rows, positions] with a column per index of the key buffer.

        Column i, for i < ``keys``, is the bias of the key at index i; 0 if ``bias`` has no column for its position.
        """
        is_shared = ctx.settled(eq(bias.shape[0], 1))

        def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
            at = c[3] + maps.source(self.position).at([c[0]])
            sequence = s.constant(0, DType.INT64) if is_shared else c[0]
            return maps.source(bias).at([sequence, *c[1:3], at], (at >= 0) & (at < maps.dim(bias.shape[3])))

        return gather_map(ctx, [batch, *bias.shape[1:3], keys], bias.dtype, element)

    def after(self, ctx: Lowering, whole: Tensor) -> Tensor:
        """Return the present cache: the keys of ``whole`` [batch, heads, keys, size] that stay, from index 0 on."""

        def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
            at = c[2] + maps.source(self.dropped).at([c[0]])
            inside = (at >= 0) & (at <= maps.source(self.last).at([c[0]])) & (at < maps.dim(whole.shape[2]))
            return maps.source(whole).at([*c[:2], at, c[3]], inside)

        return gather_map(ctx, [*whole.shape[:2], self.capacity, whole.shape[3]], whole.dtype, element)


def window_step(ctx: Lowering, positions: Tensor, lengths: Tensor, capacity: Dim, window: int) -> WindowStep:
    """Return the step for new tokens at ``positions`` [batch, rows]; ``lengths`` [batch] has the last positions."""
    require.that(window > 0, "local_window_size", "be positive if sliding_window_cache is 1", window)
    require.most_dim(ctx, capacity, local_window_size=window)
    begins = select_index(ctx, positions, 1, 0)

    def kept(maps: IndexMap, count: Scalar) -> Scalar:
        room = maps.dim(capacity)
        step = room - (window - 1)
        left = s.trunc_divide(count - room + step - 1, step) * step
        return s.where(count <= room, count, count - left)

    def index(formula: Callable[[IndexMap, Scalar, Scalar, Scalar], Scalar]) -> Tensor:
        """Return ``formula(maps, first new token's position, number of keys cached before it, number of tokens)``."""

        def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
            begin = maps.source(begins).at([c[0]])
            count = s.cast(maps.source(lengths).at([c[0]]), DType.INT64) + 1
            return formula(maps, begin, kept(maps, begin), count)

        return gather_map(ctx, begins.shape, DType.INT64, element)

    return WindowStep(
        capacity,
        first=index(lambda maps, begin, before, count: before),
        last=index(lambda maps, begin, before, count: before + count - begin - 1),
        dropped=index(lambda maps, begin, before, count: before + count - begin - kept(maps, count)),
        position=index(lambda maps, begin, before, count: begin - before),
    )
