"""Activation functions."""

from __future__ import annotations

import math
from collections.abc import Callable

from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise
from ....program.lowering.views import unsqueeze
from ... import requirements as require
from ...registry import ARITHMETIC, FLOATS, SIGNED, WIDE_INTS, contrib_op, op
from .elementwise import unary


def softplus(x: Scalar) -> Scalar:
    """Return log(1 + exp(x)) without overflow."""
    return s.maximum(x, 0.0) + s.log1p(s.exp(-s.absolute(x)))


def gelu_erf(x: Scalar) -> Scalar:
    return 0.5 * x * (1.0 + s.erf(x * math.sqrt(0.5)))


def gelu_tanh(x: Scalar) -> Scalar:
    return 0.5 * x * (1.0 + s.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


def leaky_relu(x: Scalar, alpha: float = 0.01) -> Scalar:
    return s.where(x < 0, alpha * x, x)


def elu(x: Scalar, alpha: float) -> Scalar:
    return s.where(x < 0, alpha * s.expm1(x), x)


def _selu(x: Scalar, alpha: float, gamma: float) -> Scalar:
    return gamma * elu(x, alpha)


def swish(x: Scalar, alpha: float = 1.0) -> Scalar:
    return x * s.sigmoid(alpha * x)


def _shrunk(x: Scalar, bias: float, lambd: float) -> Scalar:
    value = s.cast(x, DType.FLOAT64) if x.dtype.is_integer else x
    return s.cast(s.where(value < -lambd, value + bias, s.where(value > lambd, value - bias, 0.0)), x.dtype)


unary("Relu", 1, lambda x: s.maximum(x, 0), SIGNED)
unary("Sigmoid", 1, s.sigmoid)
unary("Tanh", 1, s.tanh)
unary("Softplus", 1, softplus)
unary("Softsign", 1, lambda x: x / (1.0 + s.absolute(x)))
unary("Mish", 18, lambda x: x * s.tanh(softplus(x)))
unary("HardSwish", 14, lambda x: x * s.maximum(0.0, s.minimum(1.0, x / 6.0 + 0.5)))
unary("LeakyRelu", 1, leaky_relu, alpha=0.01)

unary("Shrink", 9, _shrunk, ARITHMETIC, bias=0.0, lambd=0.5)
unary("Elu", 1, elu, alpha=1.0)
unary("Selu", 6, _selu, alpha=1.67326319217681884765625, gamma=1.05070102214813232421875)
unary("Selu", 1, _selu, alpha=1.6732, gamma=1.0507)
unary("Celu", 12, lambda x, alpha: s.where(x < 0, alpha * s.expm1(x / alpha), x), alpha=1.0)
unary("HardSigmoid", 1, lambda x, alpha, beta: s.maximum(s.minimum(alpha * x + beta, 1.0), 0.0), alpha=0.2, beta=0.5)
unary("Swish", 24, swish, alpha=1.0)
unary("QuickGelu", 1, swish, domain="com.microsoft", alpha=1.702)
unary("Gelu", 1, gelu_erf, domain="com.microsoft")


@op("SwiGLU", since=28, types={"T": FLOATS})
def swiglu(ctx: Lowering, a: Tensor, b: Tensor, *, alpha: float = 1.0) -> Tensor:
    """Return a * sigmoid(alpha * a) * b for a and b of equal shape."""
    require.shape(ctx, a.shape, **{"the second input": b})
    return elementwise(ctx, lambda a, b: a * s.sigmoid(alpha * a) * b, a, b)


@op("PRelu", since=7, types={"T": SIGNED | WIDE_INTS})
def prelu(ctx: Lowering, x: Tensor, slope: Tensor) -> Tensor:
    return elementwise(ctx, lambda a, b: s.where(a < 0, b * a, a), x, slope)


@op("PRelu", since=1, types={"T": FLOATS})
def prelu_1(ctx: Lowering, x: Tensor, slope: Tensor) -> Tensor:
    """Compute PRelu with one slope, or one per channel."""
    if slope.rank == 1 and x.rank > 1:
        slope = unsqueeze(ctx, slope, range(1, x.rank - 1))
        require.one_or_size(ctx, x.shape[1], slope=slope)
    return prelu(ctx, x, slope)


@op("ThresholdedRelu", since=1, types={"T": FLOATS})
def thresholded_relu(ctx: Lowering, x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return elementwise(ctx, lambda a: s.where(a > alpha, a, 0.0), x)


@op("Gelu", since=20, types={"T": FLOATS})
def gelu(ctx: Lowering, x: Tensor, *, approximate: str = "none") -> Tensor:
    forms: dict[str, Callable[[Scalar], Scalar]] = {"none": gelu_erf, "tanh": gelu_tanh}
    require.one_of(forms, approximate=approximate)
    return elementwise(ctx, forms[approximate], x)


@contrib_op("BiasGelu", T=FLOATS)
def bias_gelu(ctx: Lowering, x: Tensor, bias: Tensor) -> Tensor:
    return elementwise(ctx, lambda a, b: gelu_erf(a + b), x, bias)


@contrib_op("FastGelu", T=FLOATS)
def fast_gelu(ctx: Lowering, x: Tensor, bias: Tensor | None = None) -> Tensor:
    if bias is None:
        return elementwise(ctx, gelu_tanh, x)
    return elementwise(ctx, lambda a, b: gelu_tanh(a + b), x, bias)
