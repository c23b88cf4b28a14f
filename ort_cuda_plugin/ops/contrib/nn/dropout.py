"""Dropout of com.microsoft: with a bias and a residual, with a mask of one bit per element."""

from __future__ import annotations

from collections.abc import Callable

from ort_cuda_plugin.kernels.codegen.source import constant_number
from ort_cuda_plugin.kernels.elementwise.index_map import IndexMap, gather_map
from ort_cuda_plugin.model.ir import DType
from ort_cuda_plugin.ops.contrib.nn.fused import sum_like_first
from ort_cuda_plugin.ops.onnx.math.random import dropout_12
from ort_cuda_plugin.ops.registry import BOOL, FLOATS, T1, T2, T, contrib_op
from ort_cuda_plugin.program.expressions import scalar as s
from ort_cuda_plugin.program.expressions.scalar import Scalar
from ort_cuda_plugin.program.expressions.symbolic import ceildiv
from ort_cuda_plugin.program.lowering.context import Lowering, Tensor
from ort_cuda_plugin.program.lowering.elementwise import full
from ort_cuda_plugin.program.lowering.views import reshape
from ort_cuda_plugin.program.steps.row_program import SUM

_TYPES = {"T": FLOATS, "T1": FLOATS, "T2": BOOL, "T3": frozenset({DType.UINT32})}
_BITS = 32


def _packed(ctx: Lowering, mask: Tensor, training_mode: Tensor | None) -> Tensor:
    """Pack the mask: bit i % 32 of word i // 32 keeps element i; bits past the end are 1 outside training."""
    words = ceildiv(mask.size, _BITS)
    if training_mode is None or constant_number(training_mode) is False:
        return full(ctx, [words], 2**_BITS - 1, DType.UINT32)
    flat = reshape(ctx, mask, [mask.size])

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        size, behind = maps.dim(mask.size), ~maps.number(training_mode)

        def bit(i: Scalar) -> list[Scalar]:
            at = c[0] * _BITS + i
            kept = maps.source(flat).at([at], at < size, behind)
            return [s.cast(kept, DType.UINT32) << s.cast(i, DType.UINT32)]

        return maps.fold(SUM, s.constant(_BITS, DType.INT64), bit)[0]

    return gather_map(ctx, [words], DType.UINT32, element)


@contrib_op("BitmaskDropout", **_TYPES)
def bitmask_dropout(
    ctx: Lowering, data: T, ratio: T1 | None = None, training_mode: T2 | None = None, *, seed: int | None = None
) -> tuple[Tensor, ...]:
    """Return dropout(data) and its mask."""
    kept, *mask = dropout_12(ctx, data, ratio, training_mode, seed=seed)
    return (kept, *(_packed(ctx, x, training_mode) for x in mask))


def _bias_dropout(name: str, dropout: Callable[..., tuple[Tensor, ...]], **types: frozenset[DType]) -> None:
    """Register an operator that adds a bias before ``dropout``, and a residual after it."""

    @contrib_op(name, **types)
    def function(
        ctx: Lowering,
        data: T,
        bias: T,
        residual: T | None = None,
        ratio: T1 | None = None,
        training_mode: T2 | None = None,
        *,
        seed: int | None = None,
    ) -> tuple[Tensor, ...]:
        """Return dropout(data + bias) + residual and the mask."""
        kept, *mask = dropout(ctx, sum_like_first(ctx, data, bias), ratio, training_mode, seed=seed)
        return (kept if residual is None else sum_like_first(ctx, kept, residual), *mask)


_bias_dropout("BiasDropout", dropout_12, T=FLOATS, T1=FLOATS, T2=BOOL)
_bias_dropout("BitmaskBiasDropout", bitmask_dropout, **_TYPES)
