"""AffineGrid and GridSample: interpolation of an image at the positions of a grid."""

from __future__ import annotations

import functools
import itertools
import operator
from dataclasses import dataclass

from ....kernels.elementwise.index_map import IndexMap, gather_map
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.lowering.context import Lowering, Tensor
from ... import requirements as require
from ...registry import ALL_TENSORS, FLOATS, INT64, T1, T2, HostTensor, contrib_op, op
from .resize import clamped, from_real, weight_of_mode


@op("AffineGrid", since=20, types={"T1": FLOATS, "T2": INT64})
def affine_grid(ctx: Lowering, theta: T1, size: HostTensor, *, align_corners: int = 0) -> Tensor:
    """Return the grid of ``theta`` [n, 2, 3] or [n, 3, 4]; coordinates are in order x, y, z (last dimension first)."""
    sizes = ctx.host_values(size, "size")
    rank = len(sizes) - 2
    require.rank(3, theta=theta)
    require.that(rank in (2, 3), "size", "have 4 or 5 entries", len(sizes))
    require.shape(ctx, (sizes[0], rank, rank + 1), theta=theta)
    real = s.accumulation_type(theta.dtype)

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        matrix = maps.source(theta)

        def factor(column: int) -> Scalar:
            return s.cast(matrix.at([c[0], c[-1], s.constant(column, DType.INT64)]), real)

        total = factor(rank)
        for column in range(rank):
            axis = rank - 1 - column
            at, count = (s.cast(value, real) for value in (c[1 + axis], maps.dim(sizes[2 + axis])))
            if align_corners:
                # A dimension of size 1 is at -1, as in ONNX Runtime.
                position = at * 2.0 / s.maximum(count - 1.0, 1.0) - 1.0
            else:
                position = (at * 2.0 + 1.0) / count - 1.0
            total = total + factor(column) * position
        return s.cast(total, theta.dtype)

    return gather_map(ctx, [sizes[0], *sizes[2:], rank], theta.dtype, element)


@dataclass(frozen=True)
class Sampling:
    """GridSample's interpolation and padding; ``real`` is the type of coordinates and interpolation weights."""

    mode: str
    padding: str
    align_corners: bool
    real: DType

    def taps(self, coordinate: Scalar, size: Scalar) -> list[tuple[Scalar, Scalar, Scalar]]:
        """Return (clamped index, weight, whether the index was inside) of each tap for a coordinate in [-1, 1]."""
        position = self._position(coordinate, size)
        weight, support = weight_of_mode(self.mode)
        first = s.cast(s.floor(position), DType.INT64)
        result = []
        for k in [0] if self.mode == "nearest" else range(1 - support, 1 + support):
            index = first + k
            factor = weight(s.absolute(s.cast(index, self.real) - position))
            if self.padding == "reflection":
                mirrored = self._reflected(s.cast(index, self.real), size)
                index = s.cast(s.round_half_even(mirrored), index.dtype)
            inside = (index >= 0) & (index < size)
            result.append((clamped(index, size), factor, inside))
        return result

    def _position(self, coordinate: Scalar, size: Scalar) -> Scalar:
        """Convert a coordinate in [-1, 1] to a real index on an axis of ``size`` elements."""
        length = s.cast(size, self.real)
        g = s.cast(coordinate, self.real) + 1.0
        position = g * 0.5 * (length - 1.0) if self.align_corners else (g * length - 1.0) * 0.5
        if self.mode == "nearest":
            return s.round_half_even(position)
        if self.padding == "zeros" or self.mode == "cubic":  # in these cases `taps` pads each index
            return position
        if self.padding == "reflection":
            position = self._reflected(position, size)
        return s.minimum(s.maximum(position, 0.0), s.cast(size - 1, self.real))

    def _reflected(self, x: Scalar, size: Scalar) -> Scalar:
        """Reflect ``x`` at both ends of the axis, at the centers (align_corners) or borders of the outer elements."""
        low = 0.0 if self.align_corners else -0.5
        span = s.cast(size, x.dtype) - (1.0 if self.align_corners else 0.0)
        m = s.trunc_modulo(s.absolute(x - low), span * 2.0)
        return s.where(span > 0.0, s.where(m > span, span * 2.0 - m, m) + low, 0.0)


@op("GridSample", since=16, types={"T1": ALL_TENSORS, "T2": FLOATS})
def grid_sample(
    ctx: Lowering, x: T1, grid: T2, *, align_corners: int = 0, mode: str = "linear", padding_mode: str = "zeros"
) -> Tensor:
    """Sample ``x`` [n, channels, *dims] at ``grid``. Version 16 calls the modes "bilinear" and "bicubic"."""
    mode = mode.removeprefix("bi")
    rank = x.rank - 2
    require.one_of(("linear", "cubic", "nearest"), mode=mode)
    require.one_of(("zeros", "border", "reflection"), padding_mode=padding_mode)
    require.least_rank(3, X=x)
    require.least_rank(2, grid=grid)
    require.supported(rank <= 3, "shape", "the number of spatial dimensions", rank, "1 to 3")
    if x.dtype is DType.BOOL and mode != "nearest":
        raise require.unsupported("dtype", "mode for X of type bool", repr(mode), "'nearest'")
    require.dim(ctx, -1, rank, grid=grid)
    require.dim(ctx, 0, x.shape[0], grid=grid)
    sampling = Sampling(mode, padding_mode, bool(align_corners), s.accumulation_type(x.dtype))

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        source, points = maps.source(x), maps.source(grid)
        per_axis = [
            sampling.taps(points.at([c[0], *c[2:], s.constant(rank - 1 - axis, DType.INT64)]), source.dim(2 + axis))
            for axis in range(rank)
        ]
        terms = []
        for corner in itertools.product(*per_axis):
            indices, factors, within = zip(*corner, strict=True)
            inside = functools.reduce(operator.and_, within, s.constant(True, DType.BOOL))
            value = source.at([c[0], c[1], *indices], inside if padding_mode == "zeros" else None)
            if mode == "nearest":
                return value
            terms.append(functools.reduce(operator.mul, factors, s.cast(value, sampling.real)))
        return from_real(functools.reduce(operator.add, terms), x.dtype)

    return gather_map(ctx, [*x.shape[:2], *grid.shape[1:-1]], x.dtype, element)


@contrib_op("GridSample", T1=FLOATS)
def microsoft_grid_sample(
    ctx: Lowering, x: T1, grid: T1, *, align_corners: int = 0, mode: str = "bilinear", padding_mode: str = "zeros"
) -> Tensor:
    if mode == "bicubic" and padding_mode != "zeros":
        raise require.unsupported("attribute", "padding_mode for mode 'bicubic'", repr(padding_mode), "'zeros'")
    return grid_sample(ctx, x, grid, align_corners=align_corners, mode=mode, padding_mode=padding_mode)
