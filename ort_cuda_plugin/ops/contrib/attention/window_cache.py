"""Sliding-window K/V cache of GroupQueryAttention (attribute ``sliding_window_cache``): the newest keys of each
sequence, in the order of their positions, from index 0 on.

ONNX Runtime defines the number of cached keys as a function of the number of tokens so far. So the device computes all
indices of a step from the lengths of the sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

from ort_cuda_plugin.kernels.elementwise.index_map import IndexMap, gather_map
from ort_cuda_plugin.model.ir import DType
from ort_cuda_plugin.ops import requirements as require
from ort_cuda_plugin.ops.onnx.tensor.indexing import select_index
from ort_cuda_plugin.program.expressions import scalar as s
from ort_cuda_plugin.program.expressions.scalar import Scalar
from ort_cuda_plugin.program.expressions.symbolic import Dim, eq
from ort_cuda_plugin.program.lowering.context import Lowering, Tensor
from ort_cuda_plugin.program.lowering.elementwise import elementwise
from ort_cuda_plugin.program.lowering.views import unsqueeze


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

    def numbers(maps: IndexMap, c: list[Scalar]) -> tuple[Scalar, Scalar, Scalar]:
        """Return the first new token's position, the number of keys cached before it, and the number of tokens."""
        begin = maps.source(begins).at([c[0]])
        count = s.cast(maps.source(lengths).at([c[0]]), DType.INT64) + 1
        return begin, kept(maps, begin), count

    def first(maps: IndexMap, c: list[Scalar]) -> Scalar:
        return numbers(maps, c)[1]

    def last(maps: IndexMap, c: list[Scalar]) -> Scalar:
        begin, before, count = numbers(maps, c)
        return before + count - begin - 1

    def dropped(maps: IndexMap, c: list[Scalar]) -> Scalar:
        begin, before, count = numbers(maps, c)
        return before + count - begin - kept(maps, count)

    def position(maps: IndexMap, c: list[Scalar]) -> Scalar:
        begin, before, _ = numbers(maps, c)
        return begin - before

    made = (gather_map(ctx, begins.shape, DType.INT64, x) for x in (first, last, dropped, position))
    return WindowStep(capacity, *made)


def indices_in_window(ctx: Lowering, step: WindowStep, positions: Tensor) -> Tensor:
    """Return the indices of the new keys in the cache, int64 [batch, rows]."""
    return elementwise(ctx, lambda at, position: at - position, positions, unsqueeze(ctx, step.position, (1,)))


def bias_of_window(ctx: Lowering, bias: Tensor, batch: Dim, keys: Dim, step: WindowStep) -> Tensor:
    """Return the columns of a ``bias`` [batch or 1, heads or 1, rows, positions] for the first ``keys`` cached keys."""
    is_shared = ctx.settled(eq(bias.shape[0], 1))

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        at = c[3] + maps.source(step.position).at([c[0]])
        sequence = s.constant(0, DType.INT64) if is_shared else c[0]
        return maps.source(bias).at([sequence, *c[1:3], at], (at >= 0) & (at < maps.dim(bias.shape[3])))

    return gather_map(ctx, [batch, *bias.shape[1:3], keys], bias.dtype, element)


def window_after(ctx: Lowering, step: WindowStep, whole: Tensor) -> Tensor:
    """Return the present cache: the keys of ``whole`` [batch, heads, keys, size] that are not evicted, from index 0."""

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        at = c[2] + maps.source(step.dropped).at([c[0]])
        inside = (at >= 0) & (at <= maps.source(step.last).at([c[0]])) & (at < maps.dim(whole.shape[2]))
        return maps.source(whole).at([*c[:2], at, c[3]], inside)

    return gather_map(ctx, [*whole.shape[:2], step.capacity, whole.shape[3]], whole.dtype, element)
