"""Gates, gated norms and complex products of com.microsoft."""

from __future__ import annotations

from ....kernels.elementwise.index_map import IndexMap, gather_map
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import floordiv
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.elementwise import elementwise
from ....program.lowering.reduce import row_map
from ....program.lowering.shapes import broadcast_shapes
from ....program.lowering.views import expand, reshape
from ....program.steps.row_program import Row
from ... import requirements as require
from ...layouts import as_number
from ...onnx.nn.normalization import Outputs, rms_normalized
from ...registry import NO_BFLOAT16, UP_TO_FLOAT32, M, T, contrib_op

# ---- gates ----


@contrib_op("ScaledSiLU", T=UP_TO_FLOAT32, M=UP_TO_FLOAT32)
def scaled_silu(ctx: Lowering, x: T, scale: M | None = None, *, alpha: float = 1.0) -> Tensor:
    """Return z * sigmoid(z) for z = scale * x; z and sigmoid(z) are rounded to the type of x."""

    def gated(value: Scalar, *factor: Scalar) -> Scalar:
        z = s.cast(s.widen(value) * (s.widen(factor[0]) if factor else alpha), x.dtype)
        return z * s.sigmoid(z)

    return elementwise(ctx, gated, x, *([] if scale is None else [as_number(ctx, scale, "scale")]))


@contrib_op("GatedAdd", T=UP_TO_FLOAT32)
def gated_add(ctx: Lowering, x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """Return x + y * gate with one gate per row; y * gate is rounded to the type of the inputs."""
    require.least_rank(1, X=x)
    require.shape(ctx, x.shape, **{"the second input": y})
    require.shape(ctx, (*x.shape[:-1], 1), gate=gate)
    return elementwise(ctx, lambda a, b, factor: a + b * factor, x, y, gate)


@contrib_op("GatedRMSNorm", T=UP_TO_FLOAT32)
def gated_rms_norm(
    ctx: Lowering, x: Tensor, scale: Tensor, gate: Tensor, *, activation: str = "silu", epsilon: float = 1e-5
) -> Tensor:
    """Return gated RMS norm over rows as long as ``scale``; the last dimension of x holds a whole number of rows."""
    require.one_of(("silu", "swish", "sigmoid"), activation=activation)
    require.least_rank(1, X=x)
    require.rank(1, scale=scale)
    require.shape(ctx, x.shape, gate=gate)
    width = scale.shape[0]
    count = floordiv(x.shape[-1], width)
    require.multiple_of(ctx, x.shape[-1], width, "the last dimension of X", "the size of scale")

    def program(row: Row, value: Scalar, factor: Scalar, gated: Scalar) -> Outputs:
        z = s.widen(gated)
        opened = s.sigmoid(z) if activation == "sigmoid" else z * s.sigmoid(z)
        return [s.cast(rms_normalized(row, value, epsilon, factor) * opened, x.dtype)], []

    rows, gates = (reshape(ctx, y, [*x.shape[:-1], count, width]) for y in (x, gate))
    (result,) = row_map(ctx, program, [x.rank], rows, scale, gates)
    return ctx.view(result, x.shape)


# ---- complex numbers ----


def _complex_product(name: str, sign: float) -> None:
    """Register a complex product; the last dimension is (real, imaginary), ``sign`` multiplies b's imaginary part."""

    @contrib_op(name, T=NO_BFLOAT16)
    def function(ctx: Lowering, a: Tensor, b: Tensor) -> Tensor:
        require.least_rank(1, A=a, B=b)
        require.dim(ctx, -1, 2, A=a, B=b)
        shape = [*broadcast_shapes(ctx, a.shape[:-1], b.shape[:-1]), 2]
        left, right = expand(ctx, a, shape), expand(ctx, b, shape)

        def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
            zero, one = s.constant(0, DType.INT64), s.constant(1, DType.INT64)

            def parts(x: Tensor) -> tuple[Scalar, Scalar]:
                source = maps.source(x)
                return s.widen(source.at([*c[:-1], zero])), s.widen(source.at([*c[:-1], one]))

            (p, q), (u, v) = parts(left), parts(right)
            v = v * sign
            return s.cast(s.where(s.equal(c[-1], 0), p * u - q * v, p * v + q * u), a.dtype)

        return gather_map(ctx, shape, a.dtype, element)


_complex_product("ComplexMul", 1.0)
_complex_product("ComplexMulConj", -1.0)
