"""Fused operators of com.microsoft, which ONNX Runtime's graph optimizers create from two or three nodes.

Each is lowered as its original operators; the passes fuse them into one step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Unpack

from ....model.ir import DType
from ....program.expressions.symbolic import floordiv
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise
from ....program.lowering.reduce import row_map
from ....program.lowering.views import part, permute
from ... import requirements as require
from ...axes import normalize_axis
from ...layouts import channels_first, channels_last
from ...onnx.math.activation import fast_gelu, gelu_erf
from ...onnx.math.elementwise import sum_like_first
from ...onnx.math.matmul import gemm, matrix_product
from ...onnx.nn.conv import conv
from ...onnx.nn.normalization import softmax_row
from ...onnx.nn.windows import ConvAttributes
from ...registry import FLOATS, NO_BFLOAT16, UP_TO_FLOAT32, T, attributes_of, contrib_op, lookup

# ---- matrix products ----


def _operand(ctx: Lowering, x: Tensor, transpose: int, transpose_batch: int) -> Tensor:
    """Transpose an operand: transBatch moves dimension 0 behind the batch, trans swaps the last two dimensions.

    ``transpose`` does not change a vector.
    """
    if transpose_batch:
        require.least_rank(3, **{"an input with transBatchA or transBatchB": x})
        x = permute(ctx, x, (*range(1, x.rank - 1), 0, x.rank - 1))
    if transpose and x.rank > 1:
        x = permute(ctx, x, (*range(x.rank - 2), x.rank - 1, x.rank - 2))
    return x


@contrib_op("TransposeMatMul", T=FLOATS)
@contrib_op("FusedMatMul", T=FLOATS)
def fused_matmul(
    ctx: Lowering,
    a: T,
    b: T,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
) -> Tensor:
    left, right = _operand(ctx, a, transA, transBatchA), _operand(ctx, b, transB, transBatchB)
    return matrix_product(ctx, left, right, None if alpha == 1.0 else lambda total: total * alpha)


_ACTIVATIONS_OF: Final = 6
"""Opset version of the activations, in which Clip has its limits as attributes."""
_ACTIVATIONS: Final = (
    "Clip", "Elu", "HardSigmoid", "LeakyRelu", "Relu", "Selu", "Sigmoid", "Softplus", "Softsign", "Tanh",
    "ThresholdedRelu",
)  # fmt: skip
"""Activations of fused nodes. The order of their attributes is that of ``activation_params``."""


def _activated(ctx: Lowering, x: Tensor, activation: str, parameters: Mapping[str, float] | Sequence[float]) -> Tensor:
    """Apply the ai.onnx operator ``activation``, with its attributes by name or in order; "" returns x."""
    if not activation:
        return x
    require.supported(activation in _ACTIVATIONS, "attribute", "activation", repr(activation), ", ".join(_ACTIVATIONS))
    row = lookup("", activation, _ACTIVATIONS_OF)
    if not isinstance(parameters, Mapping):
        require.count(range(len(row.attributes) + 1), activation_params=parameters)
        parameters = dict(zip(row.attributes, parameters, strict=False))
    (result,) = row.lower(ctx, [x], {name: value for name, value in parameters.items() if name in row.attributes})
    assert isinstance(result, Tensor)
    return result


@contrib_op("FusedGemm", T=FLOATS)
@attributes_of(gemm)
def fused_gemm(
    ctx: Lowering,
    a: T,
    b: T,
    c: T | None = None,
    *,
    activation: str = "",
    activation_alpha: float | None = None,
    activation_beta: float | None = None,
    activation_gamma: float | None = None,
    **attributes: Any,
) -> Tensor:
    given = {"alpha": activation_alpha, "beta": activation_beta, "gamma": activation_gamma}
    result = gemm(ctx, a, b, c, **attributes)
    return _activated(ctx, result, activation, {name: value for name, value in given.items() if value is not None})


@contrib_op("GemmFastGelu", T=UP_TO_FLOAT32)
def gemm_fast_gelu(ctx: Lowering, x: T, w: T, bias: T | None = None) -> Tensor:
    return fast_gelu(ctx, matrix_product(ctx, x, w), bias)


# ---- convolutions ----


@contrib_op("FusedConv", T=FLOATS)
def fused_conv(
    ctx: Lowering,
    x: T,
    w: T,
    b: T | None = None,
    z: T | None = None,
    *,
    activation: str = "",
    activation_params: tuple[float, ...] = (),
    **attributes: Unpack[ConvAttributes],
) -> Tensor:
    """Return activation(conv(x, w) + b + z)."""
    result = conv(ctx, x, w, b, **attributes)
    if z is not None:
        require.shape(ctx, result.shape, Z=z)
        result = elementwise(ctx, lambda total, added: total + added, result, z)
    if not activation:
        require.count(0, activation_params=activation_params)
    return _activated(ctx, result, activation, activation_params)


@contrib_op("NhwcConv", T=FLOATS)
def nhwc_conv(ctx: Lowering, x: T, w: T, b: T | None = None, **attributes: Unpack[ConvAttributes]) -> Tensor:
    """Compute Conv with channels-last input, weights and output."""
    x, w = (channels_first(ctx, tensor) for tensor in (x, w))
    return channels_last(ctx, conv(ctx, x, w, b, **attributes))


# ---- elementwise operators and softmax ----


@contrib_op("BiasSoftmax", T=NO_BFLOAT16)
def bias_softmax(ctx: Lowering, data: Tensor, bias: Tensor, *, is_inner_broadcast: int, axis: int = 1) -> Tensor:
    """Return softmax(data + bias) over all dimensions from ``axis`` on, as Softmax before version 13."""
    if bias.rank > data.rank or (is_inner_broadcast and bias.rank != data.rank):
        wanted = f"{data.rank}, the rank of data, or a lower rank if is_inner_broadcast is 0"
        raise require.unsupported("shape", "the rank of bias", bias.rank, wanted)
    total = sum_like_first(ctx, data, bias)
    return row_map(ctx, softmax_row, range(normalize_axis(axis, data.rank), data.rank), total)[0]


@contrib_op("BiasAdd", T=NO_BFLOAT16 - {DType.FLOAT64})
def bias_add(ctx: Lowering, x: Tensor, bias: Tensor, skip: Tensor) -> Tensor:
    return sum_like_first(ctx, x, bias, skip)


@contrib_op("BiasSplitGelu", T=NO_BFLOAT16 - {DType.FLOAT64})
def bias_split_gelu(ctx: Lowering, x: Tensor, bias: Tensor) -> Tensor:
    """Split x + bias in two along the last axis; return the first half times the Gelu of the second."""
    require.least_rank(1, X=x)
    last = x.rank - 1
    width = x.shape[last]
    half = floordiv(width, 2)
    require.multiple_of(ctx, width, 2, "the last dimension of X")
    require.shape(ctx, (width,), bias=bias)
    halves = [part(ctx, tensor, axis, start, half) for start in (0, half) for tensor, axis in ((x, last), (bias, 0))]
    return elementwise(ctx, lambda a, p, b, q: (a + p) * gelu_erf(b + q), *halves)
