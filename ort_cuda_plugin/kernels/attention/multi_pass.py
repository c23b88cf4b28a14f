"""Multi-pass attention: GEMM, row program (reductions such as a softmax) and GEMM in one kernel.

A block owns ``m`` query rows and loops over tiles of keys once for each reduction of the row program and once for the
second GEMM. Scores are in shared memory only. If the scores of all keys fit there, the block computes them once,
otherwise in each pass. On the emulated device the order of additions is that of the unfused kernels, so that the
results are bit-identical, except for GEMMs of at most `schedule.gemm.GEMV_ROWS` rows and rows of more than
`reduce.LONG_COLUMNS` keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...model.ir import DType
from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import Dim, ceildiv, hint, product
from ...program.lowering.context import Lowering, Tensor
from ...program.lowering.shapes import broadcast_strides
from ...program.steps.row_program import Stage, Values, grouped_stages
from ...program.steps.schedule import AttentionTile
from ...program.steps.steps import Attend, Map
from ...program.steps.trace import Use
from ..codegen.block_mapping import batch_offsets, tile_of_block
from ..codegen.epilogue import Axes, Epilogue, Terms, count_along, make_epilogue, sum_text
from ..codegen.launch_geometry import index_type, reach
from ..codegen.simt_fragments import (
    Element,
    Operand,
    fill_matrix,
    indented,
    log2,
    pipeline,
    store_tile,
    thread_tile,
)
from ..codegen.source import Emitter, KernelBuilder, Parameters, load_text, offset_text, register_type, text_property
from ..gemm.dispatch import add_batch, collapsed_batch, contiguous_axis
from ..reduction.reduce import SERIAL_PARTS

PREFIX = "r_"
"""Prefix of the row program's parameters and variables in the kernel's source."""
RESIDENT_BYTES = 48 << 10
"""Maximum bytes of scores that a block keeps in shared memory, besides its operands' tiles, on every device."""

TILE_GAP = 4
"""Elements of padding between rows of tiles in shared memory, on a GPU."""


def block_tile(ctx: Lowering, m: int, keys: int, width: int, resident: bool) -> AttentionTile:
    """Return a tile whose number of threads suits the device."""
    if ctx.device.emulated:
        return AttentionTile(m, keys, width, 32, resident)
    return AttentionTile(m, keys, width, 4 * m, resident, tile_gap=TILE_GAP)


def resident_tile(ctx: Lowering, m: int, width: Dim) -> AttentionTile:
    """Return a tile of ``m`` rows that keeps the scores of all keys in shared memory."""
    tile = 64 if m < 32 or ctx.device.emulated else 128
    columns = 64 if hint(width) <= 64 else 128
    return block_tile(ctx, m, tile, columns, resident=True)


@dataclass(frozen=True)
class Pass:
    """One loop over the keys: ``lines`` compute ``value`` of element (``key``, ``row``) from its score ``total``.

    A pass with ``types`` reduces these values: accumulators ``a0, a1, ...`` start at ``initial``, ``step_lines``
    reduce element ``x`` into them, and ``combine_lines`` merge the partial accumulators ``b0, b1, ...`` into them. In
    the last pass, without ``types``, the values are the attention weights.
    """

    lines: tuple[str, ...]
    value: str
    types: tuple[str, ...] = ()
    initial: tuple[str, ...] = ()
    step_lines: tuple[str, ...] = ()
    combine_lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Weights:
    """Source text of a row program over scores.

    The kernel runs ``block_lines`` once, ``key_lines`` after each assignment of ``key``, and ``row_lines`` where both
    ``key`` and ``row`` are assigned. ``unit`` names the variable with a factor of all scores, "" without one.
    """

    block_lines: tuple[str, ...]
    key_lines: tuple[str, ...]
    row_lines: tuple[str, ...]
    passes: tuple[Pass, ...]
    unit: str = ""


@dataclass(frozen=True)
class AttentionKernel:
    """Attention kernel for Q, K and V of the types ``storage``; ``contiguous`` names the axis of stride 1 of each."""

    storage: tuple[str, str, str]
    contiguous: tuple[str, str, str]
    weights: Weights
    epilogue: Epilogue
    batch_rank: int
    index: DType
    form: AttentionTile

    @property
    def strides(self) -> tuple[str, ...]:
        known = {f"{x}_{axis}" for x, axis in zip("abc", self.contiguous, strict=True)}
        return tuple(name for name in ("a_m", "a_k", "b_k", "b_n", "c_n", "c_d") if name not in known)

    def _stride(self, name: str) -> str:
        return name if name in self.strides else "1"

    def element(self, number: int) -> Element:
        """Return the loader of the elements of operand ``number``."""
        return Element(self.storage[number])

    @property
    def name(self) -> str:
        return f"attention_{self.form.name}_{self.storage[0]}"

    @text_property
    def body(self) -> str:
        lines = [
            *self.prologue(),
            *(line for number, one in enumerate(self.weights.passes[:-1]) for line in self._reduction(number, one)),
            *self._product(self.weights.passes[-1]),
            *self.store(),
        ]
        return "\n".join(indented(lines, 1))

    def prologue(self) -> list[str]:
        form = self.form
        scores, result = form.scores, form.result
        shared = max(scores.operands, result.operands, result.m * result.n)
        lines = [
            *self.block_setup(),
            f"steps = int32((k_end + {scores.k - 1}) >> {log2(scores.k)})",
            f"tile_c = array_pointer(cuda.shared.array({shared}, float32, 16))",
            f"element_t = array_pointer(cuda.shared.array({form.keys * form.pitch}, float32, 16))",
        ]
        if form.resident:
            lines.append("score_t = array_pointer(cuda.shared.array(0, float32, 16))")
        else:
            lines.append("score_t = element_t")
        for number, one in enumerate(self.weights.passes[:-1]):
            for i, kind in enumerate(one.types):
                lines.append(
                    f"part{number}_{i} = array_pointer(cuda.shared.array({SERIAL_PARTS * form.m}, {kind}, 16))"
                )
                lines.append(f"stat{number}_{i} = array_pointer(cuda.shared.array({form.m}, {kind}, 16))")
        accumulators = form.scores.thread_m * form.scores.thread_n
        lines.append(f"score_sums = registers_f32({accumulators})")
        lines.append(f"result_sums = registers_f32({form.result.thread_m * form.result.thread_n})")
        return [*lines, *self.weights.block_lines]

    def block_setup(self) -> list[str]:
        """Compute the block's tile and batch, the operands' offsets, and the thread index."""
        form = self.form
        return [
            *tile_of_block(form.m, form.width, "m", "d").lines,
            f"tiles = int32((n + {form.keys - 1}) >> {log2(form.keys)})",
            "thread = int32(cuda.threadIdx.x)",
            *batch_offsets("abc", "start", self.batch_rank).lines,
        ]

    def scores(self) -> list[str]:
        """Compute tile ``tile`` of scores, [key][row]: dot products of b's columns (keys) and a's rows (queries)."""
        form, tile = self.form, self.form.scores
        b_n, b_k, a_m, a_k = (self._stride(name) for name in ("b_n", "b_k", "a_m", "a_k"))
        keys = Operand("a", "b", "key0", "n", "k_end", b_n, b_k, self.contiguous[1] == "k")
        rows = Operand("b", "a", "row0", "m", "k_end", a_m, a_k, self.contiguous[0] != "m")
        fill = [
            fill_matrix(keys, tile.m, tile, self.element(1), register_type(self.index)),
            fill_matrix(rows, tile.n, tile, self.element(0), register_type(self.index)),
        ]
        return [
            "a_base = b_start",
            "b_base = a_start",
            *thread_tile(tile),
            f"clear_f32(score_sums, {tile.thread_m * tile.thread_n})",
            "sums = score_sums",
            *pipeline(tile, "float32", "\n".join(fill)).lines,
            f"to = int64(int32(at_tile + thread_row * {form.pitch} + thread_column))",
            f"store_tile_f32(score_t, to, {form.pitch}, score_sums, {tile.thread_m}, {tile.thread_n})",
            "cuda.syncthreads()",
        ]

    def _tiles(self, computes: bool, body: Sequence[str]) -> list[str]:
        """Loop over the tiles of keys; first compute a tile's scores if ``computes``, or if scores are not resident."""
        at_tile = f"int32(tile * {self.form.keys * self.form.pitch})" if self.form.resident else "int32(0)"
        lines = [f"key0 = int32(tile * {self.form.keys})", f"at_tile = {at_tile}"]
        if computes or not self.form.resident:
            lines += self.scores()
        return ["for tile in range(tiles):", *indented([*lines, *body], 1)]

    def each_element(self, one: Pass, otherwise: Sequence[str]) -> list[str]:
        """Compute ``one.value`` for each score of the tile; ``otherwise`` is the code for keys past the end."""
        form = self.form
        # With more threads than keys, several threads share a key.
        sharing = max(1, form.threads // form.keys)
        rows = f"range({form.m})"
        local = f"int32(thread + piece * {form.threads})"
        if sharing > 1:
            rows = f"range(first_row, int32(first_row + {form.m // sharing}))"
            local = f"int32(thread & {form.keys - 1})"
        each_row = ["row = int32(min(int32(row0 + r), int32(m - 1)))", "total = score_t[at_tile + place + r]"]
        each_row += [*self.weights.row_lines, *one.lines, f"element_t[place + r] = {one.value}"]
        per_key = [
            f"local = {local}",
            *([f"first_row = int32((thread >> {log2(form.keys)}) * {form.m // sharing})"] if sharing > 1 else []),
            "key = int32(key0 + local)",
            f"place = int64(local * {form.pitch})",
            "if key < n:",
            *indented(self.weights.key_lines, 1),
            f"    for r in {rows}:",
            *indented(each_row, 2),
        ]
        if otherwise:
            per_key += ["else:", *indented(otherwise, 1)]
        turns = max(1, form.keys // form.threads)
        return [f"for piece in range({turns}):", *indented(per_key, 1), "cuda.syncthreads()"]

    def _reduction(self, number: int, one: Pass) -> list[str]:
        """Reduce each row to variables ``stat<number>_<i>``, which later passes read.

        Key k goes to partial accumulator k % `SERIAL_PARTS`, except the last n % `SERIAL_PARTS` keys. After the last
        tile, `_combine` combines the partial accumulators and reduces these keys.
        """
        form = self.form
        names = [f"part{number}_{i}" for i in range(len(one.types))]
        parts = SERIAL_PARTS * form.m
        lanes = form.threads // form.m
        initial = [f"{name}[i] = {value}" for name, value in zip(names, one.initial, strict=True)]
        lines = [f"for i in range(thread, {parts}, {form.threads}):", *indented(initial, 1), "cuda.syncthreads()"]
        take = [f"a{i} = {name}[at]" for i, name in enumerate(names)]
        give = [f"{name}[at] = a{i}" for i, name in enumerate(names)]
        part = [
            f"at = int64(int32(part * {form.m} + mine))",
            *take,
            f"for j in range(part, min(int32({form.keys}), int32(whole - key0)), {SERIAL_PARTS}):",
            *indented([f"x = element_t[int64(int32(j * {form.pitch} + mine))]", *one.step_lines], 1),
            *give,
        ]
        lines += [f"mine = int32(thread & {form.m - 1})", f"whole = int32(n & -{SERIAL_PARTS})"]
        rows = [f"for part in range(int32(thread >> {log2(form.m)}), {SERIAL_PARTS}, {lanes}):", *indented(part, 1)]
        lines += self._tiles(number == 0, [*self.each_element(one, ()), *rows, "cuda.syncthreads()"])
        return [*lines, *self._combine(number, one, names)]

    def _combine(self, number: int, one: Pass, names: Sequence[str]) -> list[str]:
        """Combine a row's partial accumulators as a tree, then reduce the last n % `SERIAL_PARTS` keys one by one."""
        form = self.form
        lines = []
        half = SERIAL_PARTS // 2
        while half:
            for part in range(half):
                lines.append(f"at = int64(int32({part * form.m} + mine))")
                lines += [f"a{i} = {x}[at]" for i, x in enumerate(names)]
                lines += [f"b{i} = {x}[at + {half * form.m}]" for i, x in enumerate(names)]
                lines += [*one.combine_lines, *(f"{x}[at] = a{i}" for i, x in enumerate(names))]
            half //= 2
        lines += [f"a{i} = {x}[int64(mine)]" for i, x in enumerate(names)]
        lines += [
            f"first = int32((tiles - 1) * {form.keys})",
            "for j in range(int32(whole - first), int32(n - first)):",
            *indented([f"x = element_t[int64(int32(j * {form.pitch} + mine))]", *one.step_lines], 1),
            *(f"stat{number}_{i}[int64(mine)] = a{i}" for i in range(len(names))),
        ]
        return [f"if thread < {form.m} and n > 0:", *indented(lines, 1), "cuda.syncthreads()"]

    def _product(self, one: Pass) -> list[str]:
        """Compute the weights of each tile, and accumulate weights @ V over all tiles."""
        zeros = [f"for r in range({self.form.m}):", "    element_t[place + r] = float32(0)"]
        return self._tiles(len(self.weights.passes) == 1, [*self.each_element(one, zeros), *self.weighted_values()])

    def weighted_values(self) -> list[str]:
        """Add the product of the tile's weights, in ``element_t``, and its V rows to the accumulators."""
        form, tile = self.form, self.form.result
        values = Operand(
            "b", "c", "column0", "d", "left", self._stride("c_d"), self._stride("c_n"), self.contiguous[2] == "n"
        )
        fill = fill_matrix(values, tile.n, tile, self.element(2), register_type(self.index))
        sizes = f"{tile.thread_m}, {tile.thread_n}"
        multiply = [
            f"at_a = int64(int32((step - 1) * {tile.k * form.pitch} + thread_row))",
            f"at_b = int64(int32((1 - filling) * {tile.k * tile.b_pitch} + {tile.b_first} + thread_column))",
            f"for _ in range({tile.k}):",
            f"    multiply_add_tile_f32(result_sums, element_t, at_a, tile_c, at_b, {sizes})",
            f"    at_a += {form.pitch}",
            f"    at_b += {tile.b_pitch}",
        ]
        return [
            *thread_tile(tile),
            "left = int32(n - key0)",
            f"b_base = c_start + int64({self.index_type}(key0 * {self._stride('c_n')}))",
            f"pieces = int32((min(left, int32({form.keys})) + {tile.k - 1}) >> {log2(tile.k)})",
            "for step in range(int32(pieces + 1)):",
            "    filling = int32(step & 1)",
            "    if step < pieces:",
            *indented(fill.splitlines(), 2),
            "    if step > 0:",
            *indented(multiply, 2),
            "    cuda.syncthreads()",
        ]

    @property
    def index_type(self) -> str:
        return register_type(self.index)

    def store(self) -> list[str]:
        tile = self.form.result
        stored = store_tile(tile, "m", "d", Element("f32"), self.epilogue)
        return [*thread_tile(tile), "sums = result_sums", "cuda.syncthreads()", *stored.lines]


def attention_axes(operands: Sequence[Tensor]) -> tuple[str, str, str]:
    """Return the names of the axes of stride 1 of a [m, k], b [k, n] and c [n, d]; "" for an operand without one."""
    a, b, c = operands
    return contiguous_axis(a, "m", "k"), contiguous_axis(b, "k", "n"), contiguous_axis(c, "n", "d")


def add_operands(builder: KernelBuilder, kernel: AttentionKernel, operands: Sequence[Tensor]) -> None:
    """Add the parameters of a [m, k], b [k, n] and c [n, d]: pointers, sizes, and strides other than 1."""
    a, b, c = operands
    builder.tensors(a=a, b=b, c=c)
    builder.integers(DType.INT32, m=a.shape[-2], n=b.shape[-1], k_end=a.shape[-1], d=c.shape[-1])
    strides = (stride for x in operands for stride in x.strides[-2:])
    for name, stride in zip(("a_m", "a_k", "b_k", "b_n", "c_n", "c_d"), strides, strict=True):
        if name in kernel.strides:
            builder.integer(stride, kernel.index, name)


def launch_attend(ctx: Lowering, step: Attend) -> None:
    """Launch the multi-pass kernel with the step's schedule."""
    assert step.schedule is not None
    a, b, c = step.operands
    m, n, d = a.shape[-2], b.shape[-1], c.shape[-1]
    index = index_type(ctx, *(reach(x.shape[-2:], x.strides[-2:]) for x in step.operands))
    batch, batches = collapsed_batch(step.operands, step.batch)
    axes = range(len(step.batch))
    weights, score_parameters = make_weights(ctx, step)
    outer = [Axes("batch", axes), Axes("row", [len(axes)])]
    epilogue, result_parameters = make_epilogue(ctx, step, step.total, outer, Axes("column", [len(axes) + 1]))
    kernel = AttentionKernel(
        (a.dtype.short, b.dtype.short, c.dtype.short),
        attention_axes(step.operands),
        weights,
        epilogue,
        len(batch),
        index,
        step.schedule.attention_tile,
    )
    builder = KernelBuilder()
    add_operands(builder, kernel, step.operands)
    add_batch(builder, batch, **dict(zip("abc", batches, strict=True)))
    builder.include(score_parameters, result_parameters)
    form = kernel.form
    row_blocks, column_blocks = ceildiv(m, form.m), ceildiv(d, form.width)
    grid = (row_blocks * column_blocks * product(batch), 1, 1)
    uses = _uses(step, len(weights.passes), row_blocks, column_blocks, form.resident)
    shared = form.score_bytes(n) if form.resident else 0
    builder.launch(ctx, kernel.name, grid, (form.threads, 1, 1), uses, shared, body=kernel.body)


def _uses(step: Attend, passes: int, row_blocks: Dim, column_blocks: Dim, resident: bool) -> dict[Tensor, Use]:
    """Return how often the launch reads each tensor. Each pass reads K, unless scores are ``resident`` in a block."""
    a, b, c = step.operands
    reads = column_blocks * (1 if resident else passes)
    uses = {x: Use(column_blocks * passes) for _, x in step.score_inputs}
    return uses | {a: Use(reads), b: Use(reads * row_blocks), c: Use(row_blocks)}


# ---- source of the row program ----


def make_weights(ctx: Lowering, step: Attend) -> tuple[Weights, Parameters]:
    """Return the row program of a step as source text, and the kernel parameters that it needs."""
    emit = Emitter(PREFIX, indent=0)
    builder = KernelBuilder(PREFIX, emit)
    scores = Map(step.nodes, step.score_shape, step.score_inputs, ())
    rank = len(step.batch)
    block_lines, key_lines, row_lines = bind_inputs(
        ctx, builder, scores, (Axes("batch", range(rank)), Axes("key", [rank + 1]), Axes("row", [rank]))
    )
    emit.bind(step.score, "total")
    emit.bind(step.row.index, "int64(key)")
    emit.bind(step.row.count, "int64(n)")
    numbers: dict[Stage, int] = {}
    emit.handlers["reduced"] = lambda x: emit.assign(f"stat{numbers[x.value[0]]}_{x.value[1]}[r]")
    passes = []
    for number, (stage,) in enumerate(grouped_stages([step.weight])):
        with emit.scope():
            value = emit.value(stage.elements[0])
            body = tuple(emit.taken())
        types = tuple(register_type(x.dtype) for x in stage.initial)
        initial = tuple(emit.value(x) for x in stage.initial)
        step_lines, combine_lines = _changes(emit, stage)
        passes.append(Pass(body, value, types, initial, step_lines, combine_lines))
        numbers[stage] = number
    with emit.scope():
        value = emit.value(step.weight)
        passes.append(Pass(tuple(emit.taken()), value))
    emit.release()
    return Weights(block_lines, key_lines, row_lines, tuple(passes)), builder


def bind_inputs(
    ctx: Lowering, builder: KernelBuilder, scores: Map, axes: Sequence[Axes]
) -> tuple[tuple[str, ...], ...]:
    """Emit loads of the inputs of ``scores``. Return the lines for each of ``axes``: nested loops, outermost first.

    An input is loaded in the outermost loop in which its offset is known. The lines for the first of ``axes`` always
    run, and load only one-element tensors: another tensor may be empty, so that an inner loop has no iterations.
    """
    emit = builder.emit
    loaded = builder.to_load(scores.inputs)
    tensors = [x for _, x in loaded]
    pointers = [builder.tensor(x) for x in tensors]
    placed = [broadcast_strides(x, scores.shape) for x in tensors]
    lines: list[tuple[str, ...]] = []
    offsets = ["0"] * len(tensors)
    for number, along in enumerate(axes if tensors else ()):
        mine: list[Terms] = [[] for _ in tensors]
        count_along(ctx, builder, scores, along, placed, mine)
        sums = [sum_text(base, offset_text(pairs)) for base, pairs in zip(offsets, mine, strict=True)]
        offsets = [text if text == "0" else emit.assign(text) for text in sums]
        later = [axis for more in axes[number + 1 :] for axis in more.dims]
        for (leaf, x), pointer, offset, strides in zip(loaded, pointers, offsets, placed, strict=True):
            exists = number > 0 or x.size == 1
            if exists and emit.bound(leaf) is None and all(strides[axis] == 0 for axis in later):
                emit.bind(leaf, emit.assign(load_text(pointer, offset, x.dtype)))
        lines.append(tuple(emit.taken()))
    return tuple(lines) if tensors else ((),) * len(axes)


def _changes(emit: Emitter, stage: Stage) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the ``step_lines`` and ``combine_lines`` (`Pass`) of the stage's reduction."""

    def changed(new: Values) -> tuple[str, ...]:
        values = [emit.value(x) for x in new]
        return (*emit.taken(), *(f"a{i} = {value}" for i, value in enumerate(values)))

    with emit.scope():
        totals = _bound(emit, [x.dtype for x in stage.initial], "a")
        element = Scalar(stage.elements[0].dtype, "accumulator")
        emit.bind(element, "x")
        step_lines = changed(stage.reduction.step(totals, (element,)))
    with emit.scope():
        totals = _bound(emit, [x.dtype for x in stage.initial], "a")
        others = _bound(emit, [x.dtype for x in stage.initial], "b")
        combine_lines = changed(stage.reduction.combine(totals, others))
    return step_lines, combine_lines


def _bound(emit: Emitter, dtypes: Sequence[DType], name: str) -> tuple[Scalar, ...]:
    scalars = tuple(Scalar(dtype, "accumulator") for dtype in dtypes)
    for i, x in enumerate(scalars):
        emit.bind(x, f"{name}{i}")
    return scalars
