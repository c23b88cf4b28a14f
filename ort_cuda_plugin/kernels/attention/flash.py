"""Attention in one walk over the keys, which keeps sums and maxima up to date instead of walking once for each.

So a block reads each key and each value once, and only those that one of its rows attends to: the ends of that range
may be read on the device. Few rows of many keys are split along the keys: blocks then store partial sums, which
`_merge` adds up. Sums are in another order than those of the three steps that attention is made of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...model.ir import DType
from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import Dim, ceildiv, hint, le, product
from ...program.lowering.context import Lowering, Tensor
from ...program.lowering.shapes import collapse
from ...program.steps.row_program import Row
from ...program.steps.steps import Input, Map, used_inputs
from ...program.steps.trace import Use
from ..codegen.epilogue import Axes, Epilogue, make_epilogue, make_row_place
from ..codegen.launch_geometry import extent, index_type, reach
from ..codegen.row_cache import find_by_column
from ..codegen.simt_fragments import Element
from ..codegen.source import Emitter, KernelBuilder, Parameters
from ..gemm.dispatch import add_batch, batch_strides, contiguous_axis
from ..gemm.gemm_mma import kind_of
from .flash_kernel import Range, StreamKernel
from .flash_mma import MatrixStreamKernel
from .flash_mma_shapes import MATRIX_ROWS, MatrixForm, matrix_form
from .multi_pass import PREFIX, Form, Pass, Weights, add_operands, bind_inputs, block_form
from .split_kv_reduction import MERGED_ROWS, MergeKernel

MAX_SPLITS = 32
SPLIT_KEYS = 128
"""Keys of a part, at least. An estimate: no GPU has measured it."""
BLOCKS_PER_MULTIPROCESSOR = 2
"""More are enough without splitting; of blocks of many rows, half as many are."""
SHARED_SPLIT_KEYS = 512
"""The same where warps of a block share the keys: a second launch takes as long as some tiles of them."""
WARP, WARPS_PER_MULTIPROCESSOR = 32, 16
"""Blocks of one warp need more beside each other. With twice as many parts as tiles, none has two tiles where the
number of tiles is a little more than a power of two."""
EMULATED_SPLIT_KEYS, EMULATED_MANY_BLOCKS = 512, 128
WIDEST, WIDEST_FLOAT32 = 128, 64
"""Elements of a head whose tiles fit a block's shared memory."""
FEW_ROWS = 8
"""Rows of a block for which memory is what takes time."""


@dataclass(frozen=True)
class Reading:
    """What is computed of each score [batch..., groups, rows, keys] and which keys count.

    ``value`` is an expression of ``score``, of elements of ``inputs``, which broadcast to the scores, and of
    ``row.index``; -inf leaves the key out. ``first`` and ``end`` (int64) are a range that has all keys that the row
    attends to, and ``sink`` (float32) is the score of one more key, whose value is zero; they depend on no key.
    """

    score: Scalar
    inputs: tuple[Input, ...]
    value: Scalar
    row: Row
    first: Scalar | None = None
    end: Scalar | None = None
    sink: Scalar | None = None
    factor: float = 1.0
    """What values are multiplied by, a positive number, and..."""
    unit: Scalar | None = None
    """...another one, of inputs of one element each."""
    without_keys: float = 0.0
    """The result of a row that attends to no key: zeros, or NaN as a softmax gives it."""


def choose_stream_form(ctx: Lowering, rows: Dim, width: Dim) -> Form:
    """By the sizes that are expected; every form is right for all sizes."""
    m = 8 if hint(rows) <= 8 else 16 if hint(rows) <= 16 else 32
    columns = 64 if hint(width) <= 64 else 128 if hint(width) <= 128 or m > 16 else 256
    tile = 64 if m < 32 or ctx.device.emulated else 128
    return block_form(ctx, m, tile, columns, resident=False)


def has_matrices(ctx: Lowering) -> bool:
    """Whether tensor cores are faster: the emulated device has none, but it can do what they do."""
    return not ctx.device.emulated


def has_matrices_for(ctx: Lowering, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether tensor cores multiply heads of these types and sizes; few rows of float32 wait for memory instead."""
    sizes, types, size = {q.shape[-1], k.shape[-1], v.shape[-1]}, {q.dtype, k.dtype, v.dtype}, v.shape[-1]
    if len(sizes) > 1 or len(types) > 1 or not isinstance(size, int) or size <= 0 or size % 16:
        return False
    if q.dtype is DType.FLOAT32:
        return size <= WIDEST_FLOAT32 and hint(q.shape[-2]) > FEW_ROWS and has_tf32(ctx)
    return q.dtype in (DType.FLOAT16, DType.BFLOAT16) and size <= WIDEST


def has_tf32(ctx: Lowering) -> bool:
    """Whether tensor cores may multiply float32."""
    return kind_of(ctx.device, ctx.options, "f32") == "tf32"


def stream_attention(
    ctx: Lowering,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    reading: Reading,
    *,
    elements: tuple[Element, Element] | None = None,
) -> None:
    """Writes softmax(``reading`` of q @ k) @ v to ``out`` [batch..., groups, rows, width], a view of any strides.

    q is [batch..., groups, rows, size], whose groups and rows are one dimension, or one group; k [batch..., keys, size]
    and v [batch..., keys, width] have any strides. All groups and rows of a batch share its keys. ``elements`` says how
    memory holds k and v.
    """
    *batch, groups, rows, size = q.shape
    width, keys = v.shape[-1], k.shape[-2]
    m = groups * rows
    a = ctx.view(q, (*batch, m, size), (*q.strides[:-3], *q.strides[-2:]), q.offset)
    operands = (a, ctx.view(k, (*batch, size, keys), (*k.strides[:-2], k.strides[-1], k.strides[-2]), k.offset), v)
    contiguous = (
        contiguous_axis(operands[0], "m", "k"),
        contiguous_axis(operands[1], "k", "n"),
        contiguous_axis(v, "n", "d"),
    )
    by_matrices = elements is None and contiguous == ("k", "k", "d") and has_matrices_for(ctx, q, k, v)
    by_matrices = by_matrices and has_matrices(ctx)
    form = choose_stream_form(ctx, m, width)
    if by_matrices:
        is_masked = any(x.size != 1 for _, x in reading.inputs)
        form = matrix_form(ctx, product(batch), m, keys, width, q.dtype.itemsize, is_masked)
    else:
        value = reading.value * reading.factor
        reading = replace(reading, value=value if reading.unit is None else value * reading.unit, factor=1.0, unit=None)
    splits = _splits(ctx, form, batch, m, keys, width)
    index = index_type(ctx, *(reach(x.shape[-2:], x.strides[-2:]) for x in operands))
    dims, strides = collapse(batch, [batch_strides(x, batch) for x in operands])
    if not dims:
        dims, strides = [1], [(0,), (0,), (0,)]
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
    if isinstance(form, MatrixForm) and isinstance(size, int):
        place, of_result = make_row_place(ctx, stored, outer, last)
        given = (*operation, Epilogue(), len(dims), index, form, bounds, split, nan)
        kernel = MatrixStreamKernel(*given, size=size, factor=reading.factor, result=place)
        shared = kernel.shared_bytes
    else:
        epilogue, of_result = make_epilogue(ctx, stored, total, outer, last)
        loads = None if elements is None else (Element(q.dtype.short), *elements)
        kernel = StreamKernel(*operation, epilogue, len(dims), index, form, bounds, split, nan, loads)
    builder = KernelBuilder()
    add_operands(builder, kernel, operands)
    row_blocks, column_blocks = ceildiv(m, form.m), ceildiv(width, form.width)
    if isinstance(form, MatrixForm):
        extent(builder, row_blocks, DType.INT32, ("row_blocks", "row_divisor"))
        for number, dim in enumerate(dims[1:], 1):
            extent(builder, dim, DType.INT32, (f"size{number}", f"batch{number}_divisor"))
    add_batch(builder, dims, **dict(zip("abc", strides, strict=True)))
    statistics = []
    if part is not None:
        builder.integers(DType.INT32, splits=splits)
        builder.integers(batches=product(batch))
        statistics = [ctx.empty((splits, *out.shape[:-1]), DType.FLOAT32) for _ in range(2)]
        for name, x in zip(("maxima", "weights"), statistics, strict=True):
            builder.tensor(x, name, written=True)
    for more in (of_weights, of_bounds, of_result):
        builder.include(more)
    grid = (row_blocks * column_blocks * product(dims), splits, 1)
    uses = {operands[1]: Use(column_blocks * row_blocks), v: Use(row_blocks)}
    builder.launch(ctx, kernel.name, grid, (form.threads, 1, 1), uses, shared, body=kernel.body)
    if part is not None:
        _merge(ctx, scores, part, statistics, out, reading)


def _weights(ctx: Lowering, scores: Map, reading: Reading) -> tuple[Weights, Parameters]:
    """What makes the value of a score, and its parameters."""
    emit = Emitter(PREFIX, indent=0)
    builder = KernelBuilder(PREFIX, emit)
    unit = [] if reading.unit is None else [reading.unit]
    used = replace(scores, inputs=used_inputs(reading.inputs, [reading.value, *unit]))
    block_lines, key_lines, row_lines = bind_inputs(ctx, builder, used, _axes(scores, "batch", "key", "row"))
    alike = {leaf for leaf, x in used.inputs if x.size == 1}
    emit.hoist([reading.value], find_by_column([[reading.value]], lambda leaf: leaf not in alike))
    name = emit.value(reading.unit) if reading.unit is not None else ""
    block_lines += tuple(emit.taken())
    emit.bind(reading.score, "total")
    emit.bind(reading.row.index, "int64(key)")
    with emit.scope():
        value = emit.value(reading.value)
        one = Pass(tuple(emit.taken()), value)
    return Weights(block_lines, key_lines, row_lines, (one,), name), builder


def _range(ctx: Lowering, scores: Map, reading: Reading, needs_sink: bool) -> tuple[Range, Parameters]:
    """What gives the range of a row's keys and its sink, and the parameters of that."""
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


def _splits(ctx: Lowering, form: Form, batch: Sequence[Dim], m: Dim, keys: Dim, width: Dim) -> int:
    """Into how many parts the keys are split; a power of two, so that few kernels and plans differ."""
    blocks = product(batch) * ceildiv(m, form.m) * ceildiv(width, form.width)
    least, many = SPLIT_KEYS, ctx.device.multiprocessors
    if isinstance(form, MatrixForm) and form.stages == 1:
        return 1
    if isinstance(form, MatrixForm) and form.is_alone:
        least, many = SHARED_SPLIT_KEYS, many // 2
    elif form.m <= MATRIX_ROWS:
        many *= BLOCKS_PER_MULTIPROCESSOR
    if form.threads <= WARP:
        least, many = form.keys // 2, WARPS_PER_MULTIPROCESSOR * ctx.device.multiprocessors
    if ctx.device.emulated:
        least, many = EMULATED_SPLIT_KEYS, EMULATED_MANY_BLOCKS
    splits = 1
    while splits < MAX_SPLITS and hint(blocks) * splits < many and hint(keys) >= 2 * splits * least:
        splits *= 2
    if splits == 1:
        return 1
    # Other sizes are right in every number of parts: the guard is for time alone.
    return splits if ctx.settled(le(least * splits, keys)) else 1


def _merge(
    ctx: Lowering, scores: Map, part: Tensor, statistics: Sequence[Tensor], out: Tensor, reading: Reading
) -> None:
    """Adds up the parts, each with the factor that its maximum lacks to that of all. A warp has a row of the result,
    and all of its loads are in flight at once.
    """
    *batch, groups, rows, width = out.shape
    splits = part.shape[0]
    assert isinstance(splits, int)
    bounds, of_bounds = _range(ctx, scores, replace(reading, first=None, end=None), needs_sink=True)
    total = Scalar(DType.FLOAT32, "leaf")
    stored = Map(ctx.nodes, out.shape, (), ((s.cast(total, out.dtype), out),))
    outer = [Axes("batch", range(len(batch))), Axes("row", [len(batch), len(batch) + 1])]
    epilogue, of_result = make_epilogue(ctx, stored, total, outer, Axes("column", [len(out.shape) - 1]))
    builder = KernelBuilder()
    for name, x in zip(("parts", "maxima", "weights"), (part, *statistics), strict=True):
        builder.tensor(x, name)
    builder.integers(DType.INT32, m=groups * rows, rows=product(batch) * groups * rows, d=width)
    for more in (of_bounds, of_result):
        builder.include(more)
    kernel = MergeKernel(splits, epilogue, bounds, math.isnan(reading.without_keys))
    grid = (ceildiv(product(batch) * groups * rows, MERGED_ROWS), 1, 1)
    builder.launch(ctx, kernel.name, grid, (32 * MERGED_ROWS, 1, 1), body=kernel.body)
