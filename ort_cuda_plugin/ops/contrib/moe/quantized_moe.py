"""QMoE: mixture of experts with weights of 2, 4 or 8 bits, dequantized in the operand loads of a grouped GEMM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from ....kernels.elementwise.index_map import Loads
from ....kernels.gemm.grouped_gemm import BLOCK, Shared, WeightBlock, WeightElement, Weights
from ....model.ir import DType
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import Dim, ceildiv, eq, floordiv, product
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.views import reshape
from ... import requirements as require
from ...registry import FLOAT32, T1, T2, T4, UINT8, UP_TO_FLOAT32, T, attributes_of, contrib_op
from ..quantization.mixed_gemm_layout import raw_codes, try_interleaved
from ..quantization.small_float_gemm import E2M1
from .moe import Mixture, check_tokens, settle_older_shape

_FLOATS_4: Final = {
    "fp4": (32, DType.FLOAT8E8M0),
    "wfp4afp8": (32, DType.FLOAT8E8M0),
    "nvfp4": (16, DType.FLOAT8E4M3FN),
}
"""Quantization block (inputs per scale) and type of the scale, by quant_type with 4-bit floats."""
_Made: TypeAlias = tuple[WeightElement, WeightBlock, tuple[Tensor, ...]]


@dataclass(frozen=True)
class _Projection:
    """QMoE's tensors for one GEMM. ``block``: elements along k per scale, 0 without blocks. ``name`` begins messages.

    The model declares codes as [experts, outputs, inputs / pack], or with ``older`` [experts, inputs, outputs / pack].
    ``interleaved`` codes are prepacked for CUTLASS mixed GEMM kernels.
    """

    name: str
    kind: str
    bits: int
    block: int
    older: bool
    interleaved: bool
    codes: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    total: Tensor | None
    bias: Tensor | None

    def weights(self, ctx: Lowering, experts: Dim, columns: Dim, width: Dim) -> Weights:
        """Check the inputs and return the weights of a grouped GEMM [tokens, width] x [width, columns]."""
        stored = DType.FLOAT8E4M3FN if self.kind == "fp8" else DType.UINT8
        require.element_type({stored}, **{f"{self.name}_experts_weights": self.codes})
        rows, row = (width, columns) if self.older else (columns, width)
        packed = ceildiv(row * self.bits, 8)
        require.shape(ctx, (experts, rows, packed), **{f"{self.name}_experts_weights": self.codes})
        is_whole, found = eq(packed * (8 // self.bits), row), f"{row!r} codes of {self.bits} bits"
        require.holds(ctx, is_whole, f"{self.name}_experts_weights", "have rows of whole bytes", found)
        require.shape(ctx, (experts, columns), **{f"{self.name}_experts_bias": self.bias})
        bias = None if self.bias is None else ctx.contiguous(self.bias)
        make = {"int": self._integers, "fp8": self._floats_8}.get(self.kind, self._floats_4)
        element, shared, read = make(ctx, experts, columns, width)
        return Weights(columns, element, read, bias, shared)

    def _given(self, x: Tensor | None, what: str) -> Tensor:
        return require.given(x, f"{self.name}_{what}", f"be given for quant_type {self.kind!r}")

    def _none(self, x: Tensor | None, what: str) -> None:
        require.that(x is None, f"{self.name}_{what}", f"be left out for quant_type {self.kind!r}", "an input")

    def _integers(self, ctx: Lowering, experts: Dim, columns: Dim, width: Dim) -> _Made:
        """Return weights (code - zero) * scale, with zero and scale per column or per block of a column."""
        scales, zeros, bits = self._given(self.scales, "scales"), self.zeros, self.bits
        require.element_type(UP_TO_FLOAT32, **{f"{self.name}_scales": scales})
        shift = self.block.bit_length() - 1
        blocks = ceildiv(width, self.block) if self.block else 1
        shape = (experts, columns, blocks) if self.block else (experts, columns)
        require.shape(ctx, shape, **{f"{self.name}_scales": scales})
        if zeros is not None:
            require.element_type(UINT8, **{f"{self.name}_zero_points": zeros})
            along = blocks if zeros.rank == 3 else columns
            packed = ceildiv(along * bits, 8)
            wanted = (experts, columns, packed) if zeros.rank == 3 else (experts, packed)
            require.shape(ctx, wanted, **{f"{self.name}_zero_points": zeros})
            points = reshape(ctx, zeros, [product(zeros.shape[:-1]), packed])

        packed_codes = self._rows(ctx, experts, columns, width)

        def shared(loads: Loads, expert: Scalar, column: Scalar, k: Scalar) -> Shared:
            block = [k >> shift] if self.block else []
            zero = s.constant(1 << (bits - 1), DType.INT32)
            if zeros is not None:
                at = (block[0] if self.block else s.constant(0, DType.INT64)) if zeros.rank == 3 else column
                row = expert * loads.dim(columns) + column if zeros.rank == 3 else expert
                zero = loads.code(loads.source(points), row, at, bits)
            scale = s.widen(loads.source(scales).at([expert, column, *block]))
            return zero, scale, expert * loads.dim(columns) + column

        def element(loads: Loads, expert: Scalar, column: Scalar, k: Scalar, shared: Shared) -> Scalar:
            zero, scale, row = shared
            code = loads.code(loads.source(packed_codes), row, k, bits)
            return s.cast(code - zero, DType.FLOAT32) * scale

        return element, shared, (packed_codes, scales) if zeros is None else (packed_codes, scales, zeros)

    def _floats_8(self, ctx: Lowering, experts: Dim, columns: Dim, width: Dim) -> _Made:
        """Return float8 weights times a scale per ``block`` x ``block`` square, or without blocks per expert."""
        self._none(self.zeros, "zero_points")
        shift = self.block.bit_length() - 1
        if self.block:
            scales = self._given(self.scales, "scales")
            require.element_type(UP_TO_FLOAT32, **{f"{self.name}_scales": scales})
            self._none(self.total, "global_scale")
            shape = (experts, ceildiv(columns, self.block), ceildiv(width, self.block))
            require.shape(ctx, shape, **{f"{self.name}_scales": scales})
        else:
            scales = self._given(self.total, "global_scale")
            self._none(self.scales, "scales")
            require.shape(ctx, (experts,), **{f"{self.name}_global_scale": scales})
        rows = self._rows(ctx, experts, columns, width)

        def shared(loads: Loads, expert: Scalar, column: Scalar, k: Scalar) -> Shared:
            at = [column >> shift, k >> shift] if self.block else []
            return s.widen(loads.source(scales).at([expert, *at])), expert * loads.dim(columns) + column

        def element(loads: Loads, expert: Scalar, column: Scalar, k: Scalar, shared: Shared) -> Scalar:
            scale, row = shared
            return s.cast(loads.source(rows).at([row, k]), DType.FLOAT32) * scale

        return element, shared, (rows, scales)

    def _rows(self, ctx: Lowering, experts: Dim, columns: Dim, width: Dim) -> Tensor:
        """Return the codes as bytes [experts * columns, bytes of a column]."""
        if self.interleaved:
            return raw_codes(ctx, self.codes, experts * columns, width, self.bits)
        return reshape(ctx, self.codes, [experts * columns, ceildiv(width * self.bits, 8)])

    def _floats_4(self, ctx: Lowering, experts: Dim, columns: Dim, width: Dim) -> _Made:
        """Return 4-bit float weights times a scale per block and one per expert.

        The memory order is [experts, width, columns / 2], with two adjacent columns in a byte. The schema and
        onnxruntime-genai's builder declare different shapes for these bytes; ``codes`` may have either (``older``).
        """
        self._none(self.zeros, "zero_points")
        scales, total = self._given(self.scales, "scales"), self._given(self.total, "global_scale")
        require.element_type({_FLOATS_4[self.kind][1]}, **{f"{self.name}_scales": scales})
        shift = self.block.bit_length() - 1
        require.shape(ctx, (experts, columns, ceildiv(width, self.block)), **{f"{self.name}_scales": scales})
        require.shape(ctx, (experts,), **{f"{self.name}_global_scale": total})
        pairs = floordiv(columns, 2)
        require.multiple_of(ctx, columns, 2, f"the number of columns of {self.name}_experts_weights")
        table = ctx.constant(E2M1)
        codes = ctx.contiguous(self.codes)
        turned = ctx.view(codes, (experts * width, pairs), None, codes.offset)

        def shared(loads: Loads, expert: Scalar, column: Scalar, k: Scalar) -> Shared:
            scale = s.cast(loads.source(scales).at([expert, column, k >> shift]), DType.FLOAT32)
            return scale * loads.source(total).at([expert]), expert * loads.dim(width)

        def element(loads: Loads, expert: Scalar, column: Scalar, k: Scalar, shared: Shared) -> Scalar:
            scale, first = shared
            code = loads.code(loads.source(turned), first + k, column, 4)
            return loads.source(table).at([s.cast(code, DType.INT64)]) * scale

        return element, shared, (turned, scales, total)


def _check_block(kind: str, block: int) -> int:
    """Check ``block_size``; return the number of inputs per scale, 0 for scales without blocks."""
    if kind in _FLOATS_4:
        return _FLOATS_4[kind][0]
    if block <= 0:
        return 0
    if block & (block - 1) or (kind == "int" and block < BLOCK):
        wanted = f"be 0 (no blocks) or a power of two, of at least {BLOCK} if quant_type is 'int'"
        raise require.violation("block_size", wanted, block)
    if block < BLOCK:
        raise require.unsupported("attribute", f"block_size for quant_type {kind!r}", block, f"0, or at least {BLOCK}")
    return block


@contrib_op(
    "QMoE",
    T=UP_TO_FLOAT32,
    T1=frozenset({DType.UINT8, DType.FLOAT8E4M3FN}),
    T2=UP_TO_FLOAT32 | {DType.FLOAT8E8M0, DType.FLOAT8E4M3FN},
    T4=FLOAT32,
)
@attributes_of(Mixture)
def qmoe(
    ctx: Lowering,
    x: T,
    router_probs: T,
    fc1_experts_weights: T1,
    fc1_scales: T2 | None,
    fc1_experts_bias: T | None,
    fc2_experts_weights: T1,
    fc2_scales: T2 | None = None,
    fc2_experts_bias: T | None = None,
    fc3_experts_weights: T1 | None = None,
    fc3_scales: T2 | None = None,
    fc3_experts_bias: T | None = None,
    fc1_zero_points: T1 | None = None,
    fc2_zero_points: T1 | None = None,
    fc3_zero_points: T1 | None = None,
    router_weights: T | None = None,
    fc1_global_scale: T4 | None = None,
    fc2_global_scale: T4 | None = None,
    fc1_act_scale: T4 | None = None,
    fc2_act_scale: T4 | None = None,
    fc1_act_block_scale: T2 | None = None,
    fc2_act_block_scale: T2 | None = None,
    *,
    accuracy_level: int = 0,
    block_size: int = 0,
    expert_weight_bits: int = 4,
    fc1_expert_weight_bits: int | None = None,
    fc2_expert_weight_bits: int | None = None,
    fc3_expert_weight_bits: int | None = None,
    quant_type: str = "int",
    weights_prepacked: int = -1,
    **attributes: Any,
) -> Tensor:
    """Compute MoE with quantized weights. Activations keep their type: ``accuracy_level`` and act_scales are unused."""
    require.one_of(("int", "fp8", *_FLOATS_4), quant_type=quant_type)
    require.one_of((-1, 0, 1), weights_prepacked=weights_prepacked)
    require.rank(3, fc1_experts_weights=fc1_experts_weights, fc2_experts_weights=fc2_experts_weights)
    if fc3_experts_weights is None and any(x is not None for x in (fc3_experts_bias, fc3_scales, fc3_zero_points)):
        wanted = "be left out if fc3_experts_weights is left out"
        raise require.violation("fc3_experts_bias, fc3_scales and fc3_zero_points", wanted, "at least one of them")
    if fc3_experts_weights is not None and quant_type != "int" and not (quant_type == "fp8" and block_size > 0):
        wanted = "be 'int', or 'fp8' with block_size above 0, if fc3_experts_weights is given"
        raise require.violation("quant_type", wanted, f"{quant_type!r} with block_size = {block_size}")
    mixture = Mixture(**attributes).checked(fc3_experts_weights)
    block = _check_block(quant_type, block_size)

    def bits_of(own: int | None) -> int:
        bits = expert_weight_bits if own is None else own
        bits = {"int": bits, "fp8": 8}.get(quant_type, 4)
        require.one_of((2, 4, 8), expert_weight_bits=bits)
        return bits

    width, experts = check_tokens(ctx, x, router_probs)
    first_bits, second_bits = bits_of(fc1_expert_weight_bits), bits_of(fc2_expert_weight_bits)
    pack = 8 // second_bits
    per_output = fc1_scales if quant_type != "fp8" else fc1_experts_bias
    older = settle_older_shape(ctx, fc1_experts_weights, per_output, fc2_experts_weights, width, mixture, pack)
    inner = fc2_experts_weights.shape[1] if older else fc2_experts_weights.shape[2] * pack
    hidden = mixture.parts * inner
    sizes = [(first_bits, hidden, width), (second_bits, width, inner)]
    interleaved = quant_type == "int" and (
        weights_prepacked == 1 or (weights_prepacked == -1 and older and try_interleaved(ctx, x.dtype, sizes))
    )
    if interleaved and fc3_experts_weights is not None:
        found = "prepacked for CUDAExecutionProvider's kernels"
        raise require.unsupported("attribute", "fc3_experts_weights", found, "weights that are not prepacked")

    def weights(name: str, bits: int, columns: Dim, inputs: Dim, codes: Tensor, *others: Tensor | None) -> Weights:
        projection = _Projection(name, quant_type, bits, block, older, interleaved, codes, *others)
        return projection.weights(ctx, experts, columns, inputs)

    first = weights(
        "fc1", first_bits, hidden, width,
        fc1_experts_weights, fc1_scales, fc1_zero_points, fc1_global_scale, fc1_experts_bias,
    )  # fmt: skip
    second = weights(
        "fc2", second_bits, width, inner,
        fc2_experts_weights, fc2_scales, fc2_zero_points, fc2_global_scale, fc2_experts_bias,
    )  # fmt: skip
    third = None
    if fc3_experts_weights is not None:
        third = weights(
            "fc3", bits_of(fc3_expert_weight_bits), inner, width,
            fc3_experts_weights, fc3_scales, fc3_zero_points, None, fc3_experts_bias,
        )  # fmt: skip
    require.shape(ctx, router_probs.shape, router_weights=router_weights)
    return mixture(ctx, x, router_probs, router_weights, first, second, third)
