"""Packed variable-length sequences: tokens of all sequences in one dimension, with cumulative lengths."""

from __future__ import annotations

from ...kernels.elementwise.index_map import IndexMap, gather_map
from ...model.ir import DType
from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import Dim, eq, logical_or, lt
from ...program.lowering.context import Lowering, Tensor
from ...program.steps.row_program import SUM
from .. import requirements as require

MAX_CAPTURED = 8
"""Maximum number of states that a node may capture, by the schema."""


def int64(x: Scalar) -> Scalar:
    return s.cast(x, DType.INT64)


class PackedTokens:
    """Packed sequences of ``total`` tokens; ``bounds`` [count + 1] are cumulative lengths from 0 on.

    ``bounds`` are data of a Run: token and sequence indices derived from invalid bounds stay in range.
    """

    def __init__(self, ctx: Lowering, bounds: Tensor, total: Dim, *, empty: bool = False) -> None:
        """Check the number of bounds, not their values. With ``empty``, a sequence may have no tokens."""
        require.rank(1, **{"the cumulative sequence lengths": bounds})
        self._ctx, self._bounds, self.total = ctx, bounds, total
        self.count = bounds.shape[0] - 1
        enough = logical_or(lt(0, self.count), eq(total, 0)) if empty else lt(0, self.count)
        require.holds(ctx, enough, "the cumulative sequence lengths", "have at least 2 elements", bounds.shape[0])
        if not empty:
            require.most_dim(ctx, total, **{"the number of sequences": self.count})
        self._owners: Tensor | None = None

    def range(self, maps: IndexMap, sequence: Scalar) -> tuple[Scalar, Scalar]:
        """Return the first token and the number of tokens of a sequence."""
        bounds, total = maps.source(self._bounds), maps.dim(self.total)
        begin, end = (int64(bounds.at([at])) for at in (sequence, sequence + 1))
        begin = s.minimum(s.maximum(begin, 0), total)
        return begin, s.minimum(s.maximum(end, begin), total) - begin

    def are_whole(self, maps: IndexMap) -> Scalar:
        """Return whether the cumulative lengths begin at 0 and end at the number of tokens."""
        first, last = (maps.source(self._bounds).at([at]) for at in (s.constant(0, DType.INT64), maps.dim(self.count)))
        return s.equal(first, 0) & s.equal(int64(last), maps.dim(self.total))

    def are_in_order(self, maps: IndexMap, sequence: Scalar) -> Scalar:
        """Return whether 0 <= begin <= end <= number of tokens for a sequence."""
        begin, end = (int64(maps.source(self._bounds).at([at])) for at in (sequence, sequence + 1))
        return (begin >= 0) & (end >= begin) & (end <= maps.dim(self.total))

    def locate(self, maps: IndexMap, token: Scalar) -> tuple[Scalar, Scalar, Scalar]:
        """Return a token's sequence, the first token of the sequence, and the token's position in the sequence."""
        sequence = int64(maps.source(self._owner()).at([token]))
        begin = int64(maps.source(self._bounds).at([sequence]))
        begin = s.minimum(s.maximum(begin, 0), token)
        return sequence, begin, token - begin

    def row(self, maps: IndexMap, token: Scalar) -> tuple[Scalar, Scalar, Scalar]:
        """Return a token's sequence, its position in the sequence, and whether the sequence contains the token.

        With invalid bounds (a late start, an early end, decreasing values) a token may be in no sequence.
        """
        sequence = self.locate(maps, token)[0]
        begin, count = self.range(maps, sequence)
        row = token - begin
        return sequence, row, (row >= 0) & (row < count)

    def _owner(self) -> Tensor:
        """Return the index of each token's sequence, int32 [tokens]."""

        def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
            bounds = maps.source(self._bounds)

            def is_behind(i: Scalar) -> list[Scalar]:
                return [s.cast(int64(bounds.at([i + 1])) <= c[0], DType.INT32)]

            return maps.fold(SUM, maps.dim(self.count - 1), is_behind)[0]

        if self._owners is None:
            self._owners = gather_map(self._ctx, [self.total], DType.INT32, element)
        return self._owners


def check_capture(capacity: int, count: Tensor | None) -> None:
    """Check that a node has the input ``capture_count`` if and only if its capacity is positive."""
    require.within(0, MAX_CAPTURED, state_update_capacity=capacity)
    wanted = "be given if and only if state_update_capacity is positive"
    found = f"state_update_capacity = {capacity} {'without' if count is None else 'with'} this input"
    require.that((count is not None) == (capacity > 0), "the input with the capture count", wanted, found)
