"""FlashAttention: one pass over the keys with an online softmax, where `multi_pass` needs one pass per reduction.

A block reads each key and value once, and only the range of keys that its query rows may attend to. The kernel may read
the bounds of this range from device memory. With few rows and many keys, blocks split the keys (split-KV, flash
decoding) and store partial results, which `_reduce_splits` combines. The order of additions is not that of
unfused GEMM, softmax and GEMM, so that results differ by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...model.ir import DType
from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import ceildiv, product
from ...program.lowering.context import Lowering, Tensor
from ...program.lowering.views import transpose_matrices
from ...program.steps.row_program import Row
from ...program.steps.schedule import Engine, Schedule
from ...program.steps.steps import Input, Map, used_inputs
from ...program.steps.trace import Use
from ..codegen.epilogue import Axes, Epilogue, make_epilogue, make_row_destination
from ..codegen.launch_geometry import extent, index_type, reach
from ..codegen.row_cache import find_by_column
from ..codegen.simt_fragments import Element
from ..codegen.source import Emitter, KernelBuilder, Parameters
from ..gemm.dispatch import add_batch, collapsed_batch
from .flash_kernel import Range, StreamKernel
from .flash_mma import MatrixStreamKernel
from .multi_pass import PREFIX, Pass, Weights, add_operands, attention_axes, bind_inputs
from .split_kv_reduction import MERGED_ROWS, MergeKernel


@dataclass(frozen=True)
class Reading:
    """Score modifier and key range: the computation between the scores [batch..., groups, rows, keys] and the softmax.

    ``value`` is the modified score: an expression of the score ``score``, of elements of ``inputs`` (broadcast to the
    scores) and of the key's index ``row.index``; -inf masks the key. A row attends to the keys with ``first`` <= index
    < ``end`` (int64; None: no bound). ``sink`` (float32; None: no sink) is the score of an additional key whose value
    vector is zero. ``first``, ``end`` and ``sink`` may differ by row, but do not depend on the key.
    """

    score: Scalar
    inputs: tuple[Input, ...]
    value: Scalar
    row: Row
    first: Scalar | None = None
    end: Scalar | None = None
    sink: Scalar | None = None
    factor: float = 1.0
    """Positive constant that multiplies ``value``."""
    unit: Scalar | None = None
    """Second factor that multiplies ``value``, None for 1. The kernel computes it from one-element ``inputs``."""
    without_keys: float = 0.0
    """Result of a row that attends to no key: 0, or NaN as ONNX's softmax computes it."""


def stream_attention(
    ctx: Lowering,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    reading: Reading,
    schedule: Schedule,
    *,
    elements: tuple[Element, Element] | None = None,
) -> None:
    """Write softmax(``reading`` applied to q @ k^T) @ v to ``out`` [batch..., groups, rows, width], of any strides.

    q is [batch..., groups, rows, size]; its groups and rows must flatten into one dimension. k [batch..., keys, size]
    and v [batch..., keys, width] have any strides. All groups of a batch share its keys (grouped-query attention).
    ``elements`` are the loaders of k's and v's elements, by default plain loads.
    """
    *batch, groups, rows, size = q.shape
    width, keys = v.shape[-1], k.shape[-2]
    m = groups * rows
    a = ctx.view(q, (*batch, m, size), (*q.strides[:-3], *q.strides[-2:]), q.offset)
    operands = (a, transpose_matrices(ctx, k), v)
    contiguous = attention_axes(operands)
    tile, splits, is_mma = schedule.attention_tile, schedule.split_k, schedule.engine is Engine.FLASH_MMA
    if not is_mma:
        value = reading.value * reading.factor
        reading = replace(reading, value=value if reading.unit is None else value * reading.unit, factor=1.0, unit=None)
    index = index_type(ctx, *(reach(x.shape[-2:], x.strides[-2:]) for x in operands))
    dims, strides = collapsed_batch(operands, batch)
    scores = Map(ctx.nodes, (*batch, groups, rows, keys), reading.inputs, ())
    weights, of_weights = _weights(ctx, scores, reading)
    bounds, of_bounds = _range(ctx, scores, reading, needs_sink=splits == 1)
    total = Scalar(DType.FLOAT32, "leaf")
    if splits == 1:
        stored = Map(ctx.nodes, out.shape, (), ((s.cast(total, out.dtype), out),))
        part: Tensor | None = None
        outer = [Axes("batch", range(len(batch))), Axes("row", [len(batch), len(batch) + 1])]
    else:
        part = ctx.empty((splits, *out.shape), DType.FLOAT32)
        stored = Map(ctx.nodes, part.shape, (), ((total, part),))
        lead = len(batch) + 1
        outer = [Axes("part", [0]), Axes("batch", range(1, lead)), Axes("row", [lead, lead + 1])]
    last = Axes("column", [len(stored.shape) - 1])
    operation = (q.dtype.short, k.dtype.short, v.dtype.short), contiguous, weights
    nan = math.isnan(reading.without_keys)
    shared, split = 0, part is not None
    kernel: StreamKernel
    if is_mma and isinstance(size, int):
        destination, of_result = make_row_destination(ctx, stored, outer, last)
        given = (*operation, Epilogue(), len(dims), index, tile, bounds, split, nan)
        kernel = MatrixStreamKernel(*given, size=size, factor=reading.factor, result=destination)
        shared = kernel.shared_bytes
    else:
        epilogue, of_result = make_epilogue(ctx, stored, total, outer, last)
        loads = None if elements is None else (Element(q.dtype.short), *elements)
        kernel = StreamKernel(*operation, epilogue, len(dims), index, tile, bounds, split, nan, loads)
    builder = KernelBuilder()
    add_operands(builder, kernel, operands)
    row_blocks, column_blocks = ceildiv(m, tile.m), ceildiv(width, tile.width)
    if is_mma:
        extent(builder, row_blocks, DType.INT32, ("row_blocks", "row_divisor"))
        for number, dim in enumerate(dims[1:], 1):
            extent(builder, dim, DType.INT32, (f"size{number}", f"batch{number}_divisor"))
    add_batch(builder, dims, **dict(zip("abc", strides, strict=True)))
    statistics = []
    if part is not None:
        builder.integers(DType.INT32, splits=splits)
        builder.integers(batches=product(batch))
        statistics = [ctx.empty((splits, *out.shape[:-1]), DType.FLOAT32) for _ in range(2)]
        builder.tensors(written=True, maxima=statistics[0], weights=statistics[1])
    builder.include(of_weights, of_bounds, of_result)
    grid = (row_blocks * column_blocks * product(dims), splits, 1)
    uses = {operands[1]: Use(column_blocks * row_blocks), v: Use(row_blocks)}
    builder.launch(ctx, kernel.name, grid, (tile.threads, 1, 1), uses, shared, body=kernel.body)
    if part is not None:
        _reduce_splits(ctx, scores, part, statistics, out, reading)


def _weights(ctx: Lowering, scores: Map, reading: Reading) -> tuple[Weights, Parameters]:
    """Return the source that computes the modified score (`Reading.value`), and the kernel parameters that it needs."""
    emit = Emitter(PREFIX, indent=0)
    builder = KernelBuilder(PREFIX, emit)
    unit = [] if reading.unit is None else [reading.unit]
    used = replace(scores, inputs=used_inputs(reading.inputs, [reading.value, *unit]))
    block_lines, key_lines, row_lines = bind_inputs(ctx, builder, used, _axes(scores, "batch", "key", "row"))
    scalars = {leaf for leaf, x in used.inputs if x.size == 1}
    emit.hoist([reading.value], find_by_column([[reading.value]], lambda leaf: leaf not in scalars))
    name = emit.value(reading.unit) if reading.unit is not None else ""
    block_lines += tuple(emit.taken())
    emit.bind(reading.score, "total")
    emit.bind(reading.row.index, "int64(key)")
    with emit.scope():
        value = emit.value(reading.value)
        one = Pass(tuple(emit.taken()), value)
    return Weights(block_lines, key_lines, row_lines, (one,), name), builder


def _range(ctx: Lowering, scores: Map, reading: Reading, needs_sink: bool) -> tuple[Range, Parameters]:
    """Return the source that computes a row's key range and sink, and the kernel parameters that it needs."""
    emit = Emitter("g_", indent=0)
    builder = KernelBuilder("g_", emit)
    wanted = (reading.first, reading.end, reading.sink if needs_sink else None)
    used = replace(scores, inputs=used_inputs(reading.inputs, [x for x in wanted if x is not None]))
    block_lines, row_lines = bind_inputs(ctx, builder, used, _axes(scores, "batch", "row"))
    names = ["" if x is None else emit.value(x) for x in wanted]
    return Range(block_lines, (*row_lines, *emit.taken()), *names), builder


def _axes(scores: Map, *names: str) -> list[Axes]:
    rank = len(scores.shape)
    dims = {"batch": range(rank - 3), "key": [rank - 1], "row": [rank - 3, rank - 2]}
    return [Axes(name, dims[name]) for name in names]


def _reduce_splits(
    ctx: Lowering, scores: Map, part: Tensor, statistics: Sequence[Tensor], out: Tensor, reading: Reading
) -> None:
    """Launch `MergeKernel`, which rescales the splits' partial results to a common maximum and adds them."""
    *batch, groups, rows, width = out.shape
    splits = part.shape[0]
    assert isinstance(splits, int)
    bounds, of_bounds = _range(ctx, scores, replace(reading, first=None, end=None), needs_sink=True)
    total = Scalar(DType.FLOAT32, "leaf")
    stored = Map(ctx.nodes, out.shape, (), ((s.cast(total, out.dtype), out),))
    outer = [Axes("batch", range(len(batch))), Axes("row", [len(batch), len(batch) + 1])]
    epilogue, of_result = make_epilogue(ctx, stored, total, outer, Axes("column", [len(out.shape) - 1]))
    builder = KernelBuilder()
    builder.tensors(parts=part, maxima=statistics[0], weights=statistics[1])
    builder.integers(DType.INT32, m=groups * rows, rows=product(batch) * groups * rows, d=width)
    builder.include(of_bounds, of_result)
    kernel = MergeKernel(splits, epilogue, bounds, math.isnan(reading.without_keys))
    grid = (ceildiv(product(batch) * groups * rows, MERGED_ROWS), 1, 1)
    builder.launch(ctx, kernel.name, grid, (32 * MERGED_ROWS, 1, 1), body=kernel.body)
