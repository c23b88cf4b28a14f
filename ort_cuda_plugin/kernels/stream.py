"""Attention in one walk over the keys, which keeps sums and maxima up to date instead of walking once for each.

So a block reads each key and each value once, and only those that one of its rows attends to: the ends of that range
may be read on the device. Few rows of many keys are split along the keys: blocks then store partial sums, which
`_merge` adds up. Sums are in another order than those of the three steps that attention is made of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..model.ir import DType
from ..program import scalar as s
from ..program.lowering import Lowering, Tensor
from ..program.row_program import MAX, SUM, Row
from ..program.scalar import Scalar
from ..program.shapes import collapse
from ..program.steps import Input, Map, Substitution, used_inputs
from ..program.symbolic import Dim, ceildiv, hint, le, product
from ..program.trace import Use
from ..program.views import expand
from .attend import PREFIX, AttentionKernel, Form, Pass, Weights, bind_inputs, thread_place
from .codegen import Emitter, KernelBuilder, Parameters, text_property
from .contract import add_batch, batch_strides, contiguous_axis
from .epilogue import Axes, make_epilogue
from .index import IndexMap
from .layout import index_type
from .tiles import Element, indented, log2

MAX_SPLITS = 32
SPLIT_KEYS = 512
"""Keys of a part, at least. An estimate: no GPU has measured it."""
MANY_BLOCKS = 128
"""Blocks that fill a GPU without splitting."""


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


@dataclass(frozen=True)
class Range:
    """Source lines that give the names of a row's first key and end, where known, and of its sink.

    ``block_lines`` come once, ``row_lines`` where ``row`` is set.
    """

    block_lines: tuple[str, ...] = ()
    row_lines: tuple[str, ...] = ()
    first: str = ""
    end: str = ""
    sink: str = ""


@dataclass(frozen=True)
class StreamKernel(AttentionKernel):
    """The kernel; with ``split`` it stores unscaled sums, with the maximum and the sum of weights of each row."""

    range: Range = Range()
    split: bool = False
    elements: tuple[Element, Element, Element] | None = None

    @property
    def name(self) -> str:
        return f"stream_{self.form.name}_{'split_' if self.split else ''}{'_'.join(dict.fromkeys(self.storage))}"

    def element(self, number: int) -> Element:
        return Element(self.storage[number]) if self.elements is None else self.elements[number]

    @text_property
    def body(self) -> str:
        lines = [
            *self.prologue(),
            *self._statistics(),
            *self._bounds(),
            *self._walk(),
            *(self._store_part() if self.split else self._finish()),
            *self.store(),
        ]
        return "\n".join(indented(lines, 1))

    def _statistics(self) -> list[str]:
        m = self.form.m
        lines = [
            f"{name} = array_pointer(cuda.shared.array({count}, float32, 16))"
            for name, count in (("parts", self.form.threads), ("largest", m), ("total_weight", m), ("factors", m))
        ]
        return [
            *lines,
            f"mine = int32(thread & {m - 1})",
            f"lane = int32(thread >> {log2(m)})",
            f"if thread < {m}:",
            "    largest[int64(thread)] = float32(-math.inf)",
            "    total_weight[int64(thread)] = float32(0)",
        ]

    def _bounds(self) -> list[str]:
        """Narrows ``n`` and the tiles to the keys of the block's rows, and to those of its part."""
        known = self.range
        lines = list(known.block_lines)
        if known.first or known.end:
            lines += ["lower, upper = int64(n), int64(0)"] if known.first else ["upper = int64(0)"]
            each = ["row = int32(min(int32(row0 + r), int32(m - 1)))", *known.row_lines]
            if known.first:
                each.append(f"lower = min(lower, {known.first})")
            each.append(f"upper = max(upper, {known.end})" if known.end else "upper = int64(n)")
            lines += [f"for r in range({self.form.m}):", *indented(each, 1)]
            lines.append("n = int32(max(int64(0), min(int64(n), upper)))")
            lines.append(f"tiles = int32((n + {self.form.keys - 1}) >> {log2(self.form.keys)})")
        low = f"int32(max(int64(0), min(int64(n), lower)) >> {log2(self.form.keys)})" if known.first else "int32(0)"
        lines.append(f"tile0 = {low}")
        if self.split:
            lines += [
                "part = int32(cuda.blockIdx.y)",
                "per_part = int32(truncdiv_i32(int32(max(int32(tiles - tile0), int32(0)) + splits - 1), splits))",
                "tile0 = int32(tile0 + part * per_part)",
                "tiles = int32(min(tiles, int32(tile0 + per_part)))",
            ]
        return lines

    def _walk(self) -> list[str]:
        form = self.form
        lanes = form.threads // form.m
        keys = f"for j in range(lane, {form.keys}, {lanes}):"
        minus = [f"for r in range({form.m}):", "    element_t[place + r] = float32(-math.inf)"]
        body = [
            f"key0 = int32(tile * {form.keys})",
            "at_tile = int32(0)",
            *self.scores(),
            *self.each_element(self.weights.passes[0], minus),
            "most = largest[int64(mine)]",
            keys,
            f"    most = max(most, element_t[int64(int32(j * {form.pitch} + mine))])",
            "parts[int64(thread)] = most",
            "cuda.syncthreads()",
            f"for j in range({lanes}):",
            f"    most = max(most, parts[int64(int32(j * {form.m} + mine))])",
            "shift = choose(most == float32(-math.inf), float32(0), most)",
            "weight = float32(0)",
            "cuda.syncthreads()",
            keys,
            f"    at = int64(int32(j * {form.pitch} + mine))",
            "    x = libdevice.expf(element_t[at] - shift)",
            "    element_t[at] = x",
            "    weight += x",
            "parts[int64(thread)] = weight",
            "cuda.syncthreads()",
            f"if thread < {form.m}:",
            "    factor = libdevice.expf(largest[int64(mine)] - shift)",
            "    weight = total_weight[int64(mine)] * factor",
            f"    for j in range({lanes}):",
            f"        weight += parts[int64(int32(j * {form.m} + mine))]",
            "    total_weight[int64(mine)] = weight",
            "    largest[int64(mine)] = most",
            "    factors[int64(mine)] = factor",
            "cuda.syncthreads()",
            *self._scale(),
            *self.weighted_values(),
        ]
        return ["for tile in range(tile0, tiles):", *indented(body, 1)]

    def _scale(self) -> list[str]:
        tile = self.form.result
        return [
            *thread_place(tile),
            f"scale_tile_f32(result_sums, factors, int64(thread_row), {tile.thread_m}, {tile.thread_n})",
        ]

    def _finish(self) -> list[str]:
        """Divides by the sum of weights; a row without one gives zeros."""
        lines = ["most = largest[int64(mine)]"]
        if self.range.sink:
            lines += ["row = int32(min(int32(row0 + mine), int32(m - 1)))", *self.range.row_lines]
            lines.append(f"most = max(most, {self.range.sink})")
        lines += [
            "shift = choose(most == float32(-math.inf), float32(0), most)",
            "factor = libdevice.expf(largest[int64(mine)] - shift)",
            "weight = total_weight[int64(mine)] * factor",
        ]
        if self.range.sink:
            lines.append(f"weight += libdevice.expf({self.range.sink} - shift)")
        lines.append("factors[int64(mine)] = choose(weight == float32(0), float32(0), factor / weight)")
        return [f"if thread < {self.form.m}:", *indented(lines, 1), "cuda.syncthreads()", *self._scale()]

    def _store_part(self) -> list[str]:
        return [
            f"if thread < {self.form.m} and int32(row0 + thread) < m and column0 == 0:",
            "    at = (int64(part) * batches + int64(batch)) * int64(m) + int64(int32(row0 + thread))",
            "    maxima[at] = largest[int64(thread)]",
            "    weights[at] = total_weight[int64(thread)]",
        ]


def choose_stream_form(ctx: Lowering, rows: Dim, width: Dim) -> Form:
    """By the sizes that are expected; every form is right for all sizes."""
    m = 8 if hint(rows) <= 8 else 16 if hint(rows) <= 16 else 32
    columns = 64 if hint(width) <= 64 else 128 if hint(width) <= 128 or m > 16 else 256
    tile = 64 if m < 32 or ctx.device.emulated else 128
    return Form(m, tile, columns, 32 if ctx.device.emulated else 4 * m, resident=False)


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

    q is a dense [batch..., groups, rows, size], k [batch..., keys, size] and v [batch..., keys, width] have any
    strides; all groups and rows of a batch share its keys. ``elements`` says how memory holds k and v.
    """
    *batch, groups, rows, size = q.shape
    width, keys = v.shape[-1], k.shape[-2]
    m = groups * rows
    form = choose_stream_form(ctx, m, width)
    splits = _splits(ctx, form, batch, m, keys, width)
    a = ctx.view(q, (*batch, m, size), None, q.offset)
    operands = (a, ctx.view(k, (*batch, size, keys), (*k.strides[:-2], k.strides[-1], k.strides[-2]), k.offset), v)
    index = index_type(ctx, *(x.shape[-2] * x.strides[-2] + x.shape[-1] * x.strides[-1] for x in operands))
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
    epilogue, of_result = make_epilogue(ctx, stored, total, outer, Axes("column", [len(stored.shape) - 1]))
    kernel = StreamKernel(
        (q.dtype.short, k.dtype.short, v.dtype.short),
        (contiguous_axis(operands[0], "m", "k"), contiguous_axis(operands[1], "k", "n"), contiguous_axis(v, "n", "d")),
        weights,
        epilogue,
        len(dims),
        index,
        form,
        range=bounds,
        split=part is not None,
        elements=None if elements is None else (Element(q.dtype.short), *elements),
    )
    builder = KernelBuilder()
    for name, x in zip("abc", operands, strict=True):
        builder.tensor(x, name)
    builder.integers(DType.INT32, m=m, n=keys, k_end=size, d=width)
    places = (*a.strides[-2:], *operands[1].strides[-2:], *v.strides[-2:])
    for name, stride in zip(("a_m", "a_k", "b_k", "b_n", "c_n", "c_d"), places, strict=True):
        if name in kernel.strides:
            builder.integer(stride, index, name)
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
    row_blocks, column_blocks = ceildiv(m, form.m), ceildiv(width, form.width)
    grid = (row_blocks * column_blocks * product(dims), splits, 1)
    uses = {operands[1]: Use(column_blocks * row_blocks), v: Use(row_blocks)}
    builder.launch(ctx, kernel.name, grid, (form.threads, 1, 1), uses, 0, body=kernel.body)
    if part is not None:
        _merge(ctx, part, statistics, out, reading)


def _weights(ctx: Lowering, scores: Map, reading: Reading) -> tuple[Weights, Parameters]:
    """What makes the value of a score, and its parameters."""
    emit = Emitter(PREFIX, indent=0)
    builder = KernelBuilder(PREFIX, emit)
    used = replace(scores, inputs=used_inputs(reading.inputs, [reading.value]))
    block_lines, key_lines, row_lines = bind_inputs(ctx, builder, used, _axes(scores, "batch", "key", "row"))
    emit.bind(reading.score, "total")
    emit.bind(reading.row.index, "int64(key)")
    with emit.scope():
        value = emit.value(reading.value)
        one = Pass(tuple(emit.taken()), value)
    return Weights(block_lines, key_lines, row_lines, (one,)), builder


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
    splits = 1
    while splits < MAX_SPLITS and hint(blocks) * splits < MANY_BLOCKS and hint(keys) >= 2 * splits * SPLIT_KEYS:
        splits *= 2
    if splits == 1:
        return 1
    # Other sizes are right in every number of parts: the guard is for time alone.
    return splits if ctx.settled(le(SPLIT_KEYS * splits, keys)) else 1


def _merge(ctx: Lowering, part: Tensor, statistics: Sequence[Tensor], out: Tensor, reading: Reading) -> None:
    """Adds up the parts, each with the factor that its maximum lacks to that of all."""
    maps = IndexMap(ctx, out.shape)
    c = maps.coordinates
    sums, (maxima, weights) = maps.source(part), (maps.source(x) for x in statistics)
    count = maps.dim(part.shape[0])
    (most,) = maps.fold(MAX, count, lambda i: [maxima.at([i, *c[:-1]])])
    sink = None
    if reading.sink is not None:
        used = used_inputs(reading.inputs, [reading.sink])
        placed = {leaf: expand(ctx, x, (*out.shape[:-1], 1)) for leaf, x in used}
        at = [*c[:-1], s.constant(0, DType.INT64)]
        sink = Substitution({leaf: maps.source(x).at(at) for leaf, x in placed.items()})(reading.sink)
        most = s.maximum(most, sink)
    shift = s.where(s.equal(most, -math.inf), 0.0, most)

    def factor(i: Scalar) -> Scalar:
        return s.exp(maxima.at([i, *c[:-1]]) - shift)

    (weight,) = maps.fold(SUM, count, lambda i: [weights.at([i, *c[:-1]]) * factor(i)])
    (added,) = maps.fold(SUM, count, lambda i: [sums.at([i, *c]) * factor(i)])
    if sink is not None:
        weight = weight + s.exp(sink - shift)
    result = added / s.where(s.equal(weight, 0.0), 1.0, weight)
    maps.store(out, c, s.cast(result, out.dtype), None)
