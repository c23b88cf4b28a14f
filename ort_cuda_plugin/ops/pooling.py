"""Pooling by norms of windows."""

from __future__ import annotations

from collections.abc import Sequence

from ort_cuda_plugin.graph.ir import DType, InvalidModel
from ort_cuda_plugin.graph.lowering import Lowering, Tensor
from ort_cuda_plugin.graph.symbolic import Dim, product
from ort_cuda_plugin.kernels import scalar as s
from ort_cuda_plugin.kernels.index import IndexMap, gather_map
from ort_cuda_plugin.kernels.row_program import SUM
from ort_cuda_plugin.kernels.scalar import Scalar
from ort_cuda_plugin.ops.image import real_type
from ort_cuda_plugin.ops.nn import Windows, windows
from ort_cuda_plugin.ops.registry import FLOATS, T, op


def _norm_pool(ctx: Lowering, x: Tensor, window: Windows, spatial: Sequence[Dim], p: float) -> Tensor:
    """The p-norm of every window; positions outside of x count as 0."""
    if p < 1:
        raise InvalidModel(f"the norm of order {p}")
    real = real_type(x.dtype)

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        source = maps.source(x)

        def power(k: Scalar) -> list[Scalar]:
            places: list[Scalar] = []
            inside = s.constant(True, DType.BOOL)
            for axis in reversed(range(len(spatial))):
                size = maps.dim(window.kernel[axis])
                within, k = s.trunc_modulo(k, size), s.trunc_divide(k, size)
                start = c[2 + axis] * maps.dim(window.strides[axis]) - maps.dim(window.begin[axis])
                place = start + within * maps.dim(window.dilations[axis])
                inside = inside & (place >= 0) & (place < source.dim(2 + axis))
                places.insert(0, place)
            value = s.absolute(s.cast(source.at([*c[:2], *places], inside), real))
            return [s.power(value, float(p))]

        (total,) = maps.fold(SUM, maps.dim(product(window.kernel)), power)
        return s.cast(s.power(total, 1.0 / p), x.dtype)

    return gather_map(ctx, [*x.shape[:2], *spatial], x.dtype, element)


@op("LpPool", since=2, types={"T": FLOATS})
def lp_pool(
    ctx: Lowering,
    x: T,
    *,
    kernel_shape: tuple[int, ...],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: tuple[int, ...] | None = None,
    p: int = 2,
    pads: tuple[int, ...] | None = None,
    strides: tuple[int, ...] | None = None,
) -> Tensor:
    window = windows(x.shape[2:], kernel_shape, strides, dilations, pads, auto_pad)
    return _norm_pool(ctx, x, window, window.count(ctx, bool(ceil_mode)), p)


@op("LpPool", since=1, types={"T": FLOATS})
def lp_pool_1(
    ctx: Lowering,
    x: T,
    *,
    kernel_shape: tuple[int, ...],
    auto_pad: str = "NOTSET",
    p: float = 2.0,
    pads: tuple[int, ...] | None = None,
    strides: tuple[int, ...] | None = None,
) -> Tensor:
    window = windows(x.shape[2:], kernel_shape, strides, None, pads, auto_pad)
    return _norm_pool(ctx, x, window, window.count(ctx), p)


@op("GlobalLpPool", since=1, types={"T": FLOATS})
def global_lp_pool(ctx: Lowering, x: T, *, p: float = 2.0) -> Tensor:
    window = windows(x.shape[2:], x.shape[2:], None, None, None, "NOTSET")
    return _norm_pool(ctx, x, window, [1] * (x.rank - 2), p)
