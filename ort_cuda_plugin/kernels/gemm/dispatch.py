"""GEMM launches: the kernels that a step's schedule selects, with their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ...model.ir import DType
from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import Dim, ceildiv, divides, is_const, le, product, select
from ...program.lowering.context import Lowering, Tensor
from ...program.lowering.elementwise import rearranged
from ...program.lowering.shapes import broadcast_strides, collapse
from ...program.lowering.views import permuted, transpose_matrices
from ...program.steps.schedule import Engine, WeightLayout
from ...program.steps.steps import Contract, Conversion, Map
from ..codegen.block_mapping import count_tiles
from ..codegen.epilogue import Axes, Epilogue, make_epilogue
from ..codegen.launch_geometry import index_type, reach
from ..codegen.simt_fragments import Element
from ..codegen.source import KernelBuilder, Parameters
from ..contraction.block_quantized import make_block_element
from ..contraction.integer_operands import PIECE, integer_form, integer_step
from ..contraction.prologue import make_element
from .gemm_mma import MatrixProduct, parts_epilogue, sum_of_parts
from .gemm_simt import Product, TiledProduct
from .gemv import Gemv, VectorGemv, few_row_form
from .gemv_emulated import EmulatedGemv
from .low_rank import LowRankForm, low_rank_form
from .tf32_weights_as_f16 import compact_columns, compact_lines
from .tile_shapes import INTEGERS

ProductFields: TypeAlias = tuple[tuple[Element, Element], Epilogue, str, str, int, DType]
"""Values of the fields of `Product`, in order: the arguments that all GEMM kernels have in common."""


@dataclass(frozen=True)
class Folded:
    """A GEMM as the plugin's kernels and cuBLASLt take it: a [m, k] and b [k, n] for each index of ``batch``.

    ``a_batch`` and ``b_batch`` are the operands' strides along ``batch``, 0 for a broadcast operand. ``rows_folded``
    tells that m has all rows of all batches of the step, since all share one b.
    """

    a: Tensor
    b: Tensor
    batch: list[Dim]
    a_batch: tuple[Dim, ...]
    b_batch: tuple[Dim, ...]
    rows_folded: bool

    @property
    def sizes(self) -> tuple[Dim, Dim, Dim]:
        """GEMM sizes m, n and k."""
        return self.a.shape[-2], self.b.shape[-1], self.a.shape[-1]

    @property
    def contiguous(self) -> tuple[str, str]:
        """Names of the operands' axes of stride 1: "m" or "k" for ``a``, "k" or "n" for ``b``, "" if there is none."""
        return contiguous_axis(self.a, "m", "k"), contiguous_axis(self.b, "k", "n")


def contiguous_axis(x: Tensor, row: str, column: str) -> str:
    """Return which of the last two axes of x has stride 1, by its name ``row`` or ``column``; "" if neither has."""
    if x.strides[-1] == 1 or x.shape[-1] == 1:
        return column if x.strides[-1] == 1 else (row if x.strides[-2] == 1 else "")
    return row if x.strides[-2] == 1 else ""


def folded(ctx: Lowering, step: Contract) -> Folded:
    """Return the step as a GEMM, with its batch dimensions collapsed and if possible folded into m."""
    a, b = _with_rows_folded(ctx, step.a, step.b), step.b
    batch = step.batch
    folded = a.rank == 2 and all(dim == 1 for dim in b.shape[:-2])
    if folded:
        b = ctx.view(b, b.shape[-2:], b.strides[-2:], b.offset)
        batch = ()
    dims, (a_batch, b_batch) = collapsed_batch((a, b), batch)
    return Folded(a, b, dims, a_batch, b_batch, folded)


def _with_rows_folded(ctx: Lowering, a: Tensor, b: Tensor) -> Tensor:
    """View a [batch..., m, k] as [batch * m, k], if b is a single matrix and a's strides allow it; else return a."""
    if a.rank == 2 or any(dim != 1 for dim in b.shape[:-2]):
        return a
    dims, (strides,) = collapse(a.shape[:-1], [a.strides[:-1]])
    if len(dims) > 1:
        return a
    rows, stride = (dims[0], strides[0]) if dims else (1, 0)
    return ctx.view(a, (rows, a.shape[-1]), (stride, a.strides[-1]), a.offset)


def collapsed_batch(operands: Sequence[Tensor], batch: Sequence[Dim]) -> tuple[list[Dim], list[tuple[Dim, ...]]]:
    """Return the fewest dimensions of the batch, at least one, and the strides of each operand along them."""
    leading = [Tensor(x.dtype, x.shape[:-2], x.buffer, strides=x.strides[:-2]) for x in operands]
    dims, strides = collapse(batch, [broadcast_strides(x, batch) for x in leading])
    return (dims, strides) if dims else ([1], [(0,) for _ in operands])


def split_along_k(ctx: Lowering, step: Contract, parts: int) -> tuple[Contract, Map]:
    """Split k into ``parts``: return a batched GEMM, and the step that reduces the splits and computes the epilogue."""
    call = folded(ctx, step)
    if has_weights_along_n(call):
        call = _along_k(ctx, call)
    m, n, k = call.sizes
    assert isinstance(k, int)
    depth = k // parts
    a, b = call.a, call.b
    a = ctx.view(a, (parts, m, depth), (depth * a.strides[-1], *a.strides[-2:]), a.offset)
    b = ctx.view(b, (parts, depth, n), (depth * b.strides[-2], *b.strides[-2:]), b.offset)
    sums = ctx.empty((parts, m, n), step.total.dtype)
    total = Scalar(step.total.dtype, "leaf")
    part = Contract(step.nodes, sums.shape, (), ((total, sums),), operands=(a, b), total=total)
    return part, sum_of_parts(ctx, step, sums, parts)


def _with_integers(ctx: Lowering, step: Contract) -> Contract:
    """Return the step that multiplies 8-bit codes (`integer_step`), with weights that are contiguous along k."""
    form = integer_form(step)
    assert form is not None
    changed = integer_step(ctx, step, form)
    assert isinstance(changed, Contract)
    b = changed.b
    if b.strides[-2] != 1 or not divides(PIECE, b.strides[-1]):
        b = transpose_matrices(ctx, ctx.contiguous(transpose_matrices(ctx, b)))
    return replace(changed, operands=(changed.a, b))


def operand_elements(step: Contract) -> tuple[tuple[Element, Element], tuple[Parameters, Parameters]]:
    """Return the loaders of a's and b's elements with their prologues, and the kernel parameters that each needs."""
    a_element, of_a = make_element(step.a, step.conversions[0], -2, "pa_")
    converted = step.conversions[1]
    b_element: Element
    if converted is not None and converted.bits:
        b_element, of_b = make_block_element(converted, "pb_")
    else:
        b_element, of_b = make_element(step.b, converted, -1, "pb_")
    return (a_element, b_element), (of_a, of_b)


def has_weights_along_n(call: Folded) -> bool:
    """Tell whether b is a constant matrix that is contiguous along n, of which a transposed copy can be made once."""
    return call.contiguous[1] == "n" and call.b.is_constant and call.b.rank == 2


def _along_k(ctx: Lowering, call: Folded) -> Folded:
    """Return the GEMM with a transposed copy of its weights, contiguous along k, which the device makes once."""
    return replace(call, b=transpose_matrices(ctx, rearranged(ctx, transpose_matrices(ctx, call.b))))


def transposed(ctx: Lowering, step: Contract) -> Contract:
    """Return the step that computes the transposed result, b^T @ a^T, and writes it to transposed output views."""
    (a, b), rank, end = step.operands, len(step.batch), len(step.shape)
    columns = end - step.column_axes
    a = _with_rows_folded(ctx, a, b)
    if a.rank == 2 and all(dim == 1 for dim in b.shape[:-2]):
        b, rank = ctx.view(b, b.shape[-2:], b.strides[-2:], b.offset), 0
    order = (*range(rank), *range(columns, end), *range(rank, columns))

    def converted(conversion: Conversion | None, old: Tensor, x: Tensor) -> Conversion | None:
        """Return the prologue for the transpose of x, a view of operand ``old`` whose batch may be folded into rows.

        The prologue's inputs must not vary along folded batch axes. None: the operand has no prologue.
        """
        if conversion is None:
            return None
        inputs = []
        for leaf, y in conversion.inputs:
            strides = broadcast_strides(y, old.shape)[-x.rank :]
            inputs.append((leaf, transpose_matrices(ctx, ctx.view(y, x.shape, strides, y.offset))))
        return replace(conversion, inputs=tuple(inputs))

    of_a, of_b = (converted(*each) for each in zip(step.conversions, step.operands, (a, b), strict=True))
    return replace(
        permuted(step, order),
        operands=(transpose_matrices(ctx, b), transpose_matrices(ctx, a)),
        conversions=(of_b, of_a),
        row_axes=step.column_axes,
        column_axes=columns - rank,
    )


def launch_contract(ctx: Lowering, step: Contract) -> None:
    """Launch the kernels that the step's schedule selects.

    If only a Run knows whether m is small, the plan launches both the GEMV and the tiled GEMM, one of them with an
    empty grid.
    """
    schedule = step.schedule
    assert schedule is not None
    if schedule.is_transposed:
        step = transposed(ctx, step)
    if schedule.operands in INTEGERS:
        step = _with_integers(ctx, step)
    call = folded(ctx, step)
    elements, (of_a, of_b) = operand_elements(step)
    is_along_k = schedule.weights is WeightLayout.F16_ALONG_K
    if is_along_k or schedule.weights is WeightLayout.F16_ALONG_N:
        step, b = (compact_lines if is_along_k else compact_columns)(ctx, step)
        call = replace(call, b=transpose_matrices(ctx, b) if is_along_k else b)
        elements = (elements[0], Element(b.dtype.short))
    elif schedule.weights is WeightLayout.ALONG_K:
        call = _along_k(ctx, call)
    a, b, (m, n, _) = call.a, call.b, call.sizes
    ends = ((a, call.a_batch), (b, call.b_batch))
    index = index_type(ctx, *(reach((*call.batch, *x.shape[-2:]), (*strides, *x.strides[-2:])) for x, strides in ends))
    low, of_low = _low_rank(ctx, step)
    batch, end = len(step.batch), len(step.shape)
    columns = end - step.column_axes
    rows = [Axes("row", range(columns))]
    if not call.rows_folded:
        rows = [Axes("batch", range(batch)), Axes("row", range(batch, columns))]
    last = Axes("column", range(columns, end))

    def common(vectors: bool) -> tuple[ProductFields, tuple[Parameters, ...]]:
        epilogue, more = make_epilogue(ctx, step, step.total, rows, last, vectors=vectors)
        return (elements, epilogue, *call.contiguous, len(call.batch), index), (of_a, of_b, of_low, more)

    few_rows: Dim = 1 if schedule.engine is Engine.GEMV else le(m, schedule.gemv_rows) if schedule.gemv_rows else 0
    is_mma = schedule.engine is Engine.MMA
    product_fields, parameters = common(vectors=is_mma and few_rows == 0)
    if few_rows != 0:
        gemv = _gemv(ctx, call, Gemv(*product_fields, low_rank=low))
        blocks = select(few_rows, ceildiv(n, gemv.block_columns) * m, 0)
        _launch_kernel(ctx, call, gemv, parameters, blocks, gemv.threads)
        if is_const(few_rows):
            return
        if is_mma:
            product_fields, parameters = common(vectors=True)
    tile = schedule.gemm_tile
    blocks = select(few_rows, 0, ceildiv(m, tile.m) * ceildiv(n, tile.n) * schedule.split_k)
    if not is_mma:
        _launch_kernel(ctx, call, TiledProduct(*product_fields, tile, low_rank=low), parameters, blocks, tile.threads)
        return
    mma = (tile, schedule.operands, schedule.split_k, schedule.sliced_k)
    if schedule.split_k == 1:
        kernel = MatrixProduct(*product_fields, *mma, low_rank=low)
        _launch_kernel(ctx, call, kernel, parameters, blocks, kernel.threads)
        return
    shape = (schedule.split_k, product(call.batch) * m, n)
    parts = ctx.empty(shape, step.total.dtype if schedule.operands in INTEGERS else DType.FLOAT32)
    epilogue, of_parts = parts_epilogue(parts, n)
    kernel = MatrixProduct(elements, epilogue, *product_fields[2:], *mma)
    _launch_kernel(ctx, call, kernel, (of_a, of_b, of_parts), blocks, kernel.threads)
    ctx.record(sum_of_parts(ctx, step, parts, schedule.split_k))


def _low_rank(ctx: Lowering, step: Contract) -> tuple[LowRankForm | None, Parameters]:
    """Return the `LowRankForm` of the step's low-rank product (None without one), and its kernel parameters."""
    if step.low_rank is None:
        return None, Parameters()
    low = folded(ctx, replace(step, operands=(step.low_rank.a, step.low_rank.b), conversions=(None, None)))
    assert low.rows_folded, "a product with a product of low rank has no batches"
    index = index_type(ctx, *(reach(x.shape, x.strides) for x in (low.a, low.b)))
    return low_rank_form(replace(step.low_rank, a=low.a, b=low.b), low.contiguous, index)


def _gemv(ctx: Lowering, call: Folded, general: Gemv) -> EmulatedGemv | Gemv | VectorGemv:
    """Return the GEMV kernel: the device's vectorized one if it supports the operands, else ``general``."""
    m, n, k = call.sizes
    if not ctx.device.emulated:
        return few_row_form(ctx.device, general, product(call.batch) * m, n, k) or general
    if isinstance(n, int) or general.b_contiguous == "k":
        form = (general.elements, general.epilogue, general.a_contiguous, general.b_contiguous, general.batch_rank)
        lanes = EmulatedGemv(*form, general.index, n if isinstance(n, int) else 0, low_rank=general.low_rank)
        return lanes if lanes.is_possible else general
    return general


def _launch_kernel(
    ctx: Lowering, call: Folded, kernel: Product, more: Sequence[Parameters], blocks: Dim, threads: int
) -> None:
    builder = KernelBuilder()
    builder.tensors(a=call.a, b=call.b)
    m, n, k = call.sizes
    builder.integers(DType.INT32, m=m, n=n, k_end=k)
    for name, stride in zip(("a_m", "a_k", "b_k", "b_n"), (*call.a.strides[-2:], *call.b.strides[-2:]), strict=True):
        if name in kernel.strides:
            builder.integer(stride, kernel.index, name)
    if isinstance(kernel, MatrixProduct):
        count_tiles(builder, kernel.tile, m, n)
    add_batch(builder, call.batch, a=call.a_batch, b=call.b_batch)
    builder.include(*more)
    grid = (blocks * product(call.batch), 1, 1)
    shared, body = kernel.shared_bytes, kernel.body
    builder.launch(ctx, kernel.name, grid, (threads, 1, 1), shared_bytes=shared, body=body, resident=kernel.resident)


def add_batch(builder: Parameters, batch: Sequence[Dim], **strides: Sequence[Dim]) -> None:
    """Add the kernel parameters that `batch_offsets` reads: sizes of ``batch`` except the first, and batch strides."""
    for number, dim in enumerate(batch[1:], 1):
        builder.integer(dim, DType.INT32, f"batch{number}")
    for operand, along in strides.items():
        for number, stride in enumerate(along):
            builder.integer(stride, name=f"{operand}_batch{number}")
