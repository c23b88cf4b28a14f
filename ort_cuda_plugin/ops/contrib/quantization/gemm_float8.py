"""GemmFloat8: GEMM of float8 or wider operands, with one scale per matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ort_cuda_plugin.model.ir import DType
from ort_cuda_plugin.ops import requirements as require
from ort_cuda_plugin.ops.layouts import as_number
from ort_cuda_plugin.ops.onnx.math.activation import gelu_tanh
from ort_cuda_plugin.ops.onnx.math.matmul import gemm
from ort_cuda_plugin.ops.registry import FLOAT32, TA, TB, TC, TS, UP_TO_FLOAT32, contrib_op
from ort_cuda_plugin.program.expressions import scalar as s
from ort_cuda_plugin.program.expressions.scalar import Scalar
from ort_cuda_plugin.program.lowering.context import Lowering, Tensor
from ort_cuda_plugin.program.lowering.elementwise import elementwise

_EIGHT: Final = frozenset({DType.FLOAT8E4M3FN, DType.FLOAT8E5M2})
_ACTIVATIONS: Final[dict[str, Callable[[Scalar], Scalar]]] = {
    "NONE": lambda x: x,
    "RELU": lambda x: s.maximum(x, 0.0),
    "GELU": gelu_tanh,
}


@contrib_op(
    "GemmFloat8",
    TA=UP_TO_FLOAT32 | _EIGHT,
    TB=UP_TO_FLOAT32 | _EIGHT,
    TC=UP_TO_FLOAT32,
    TR=UP_TO_FLOAT32 | _EIGHT,
    TS=FLOAT32,
)
def gemm_float8(
    ctx: Lowering,
    a: TA,
    b: TB,
    c: TC | None = None,
    scale_a: TS | None = None,
    scale_b: TS | None = None,
    scale_y: TS | None = None,
    *,
    activation: str = "NONE",
    alpha: float = 1.0,
    beta: float = 0.0,
    dtype: int = 1,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    """Return scale_y * activation(alpha * (scale_a * a) @ (scale_b * b) + beta * c) as ``dtype``."""
    result = DType.of_attribute(dtype)
    require.that(result in UP_TO_FLOAT32 | _EIGHT, "dtype", "be a float of at most 32 bits", result.name)
    require.one_of(_ACTIVATIONS, activation=activation)
    finish = _ACTIVATIONS[activation]
    left, right = _real(ctx, a, scale_a), _real(ctx, b, scale_b)
    addend = None if c is None or beta == 0.0 else _real(ctx, c, None)
    total = gemm(ctx, left, right, addend, alpha=alpha, beta=beta, transA=transA, transB=transB)
    if scale_y is None:
        return elementwise(ctx, lambda x: s.cast(finish(x), result), total)
    return elementwise(ctx, lambda x, by: s.cast(finish(x) * by, result), total, as_number(ctx, scale_y))


def _real(ctx: Lowering, x: Tensor, scale: Tensor | None) -> Tensor:
    """Return x times its scale, in float32."""
    if scale is None:
        return elementwise(ctx, lambda value: s.cast(value, DType.FLOAT32), x)
    return elementwise(ctx, lambda value, by: s.cast(value, DType.FLOAT32) * by, x, as_number(ctx, scale))
