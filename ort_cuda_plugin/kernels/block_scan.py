"""Scans on a GPU: a block goes along a row, or along a part of one, with a vector of the row for each thread.

Few long rows have many parts. Then one launch gives the accumulator of each part, a scan of these says what comes
before a part, and a last launch goes on from there. So the order of sums is the same in every run.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..model.ir import NARROW_FLOATS, DType
from ..program.lowering import Lowering, Tensor
from ..program.row_program import Reduction
from ..program.scalar import Scalar
from ..program.shapes import collapse
from ..program.symbolic import Dim, ceildiv, hint, product
from .codegen import KernelBuilder, kernel_name, load_text, offset_text, register_type
from .layout import coordinates, extent, index_type

SHORT = 128
"""Shorter rows are a thread's."""
THREADS, WARP = 256, 32
PART = 8192
"""Elements of a part: whole vectors of all threads."""
ROWS_PER_MULTIPROCESSOR = 2
"""So many rows are blocks enough."""
_TYPES = {DType.INT32: "i32", DType.INT64: "i64", DType.UINT32: "u32", DType.UINT64: "u64", DType.FLOAT64: "f64"}
_TYPES |= dict.fromkeys((DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16), "f32")


def has_block_scan(ctx: Lowering, x: Tensor, axis: int) -> bool:
    """Whether blocks scan such rows faster than threads."""
    return not ctx.device.emulated and x.dtype in _TYPES and hint(x.shape[axis]) >= SHORT


def block_scan(
    ctx: Lowering, reduction: Reduction, x: Tensor, result: Tensor, axis: int, *, exclusive: bool, reverse: bool
) -> None:
    """As `scan.scan`, to ``result``, which has the shape of x."""
    columns = x.shape[axis]
    rows = product(dim for other, dim in enumerate(x.shape) if other != axis)
    if hint(columns) <= 2 * PART or hint(rows) >= ROWS_PER_MULTIPROCESSOR * ctx.device.multiprocessors:
        _Scan(ctx, reduction, x, axis, exclusive, reverse).launch(result, None)
        return
    parts = ceildiv(columns, PART)
    wide = DType.FLOAT32 if x.dtype in NARROW_FLOATS else x.dtype
    outer = [dim for other, dim in enumerate(x.shape) if other != axis]
    totals, before = ctx.empty((*outer, parts), wide), ctx.empty((*outer, parts), wide)
    _Scan(ctx, reduction, x, axis, exclusive, reverse).launch(None, totals)
    block_scan(ctx, reduction, totals, before, len(outer), exclusive=True, reverse=False)
    _Scan(ctx, reduction, x, axis, exclusive, reverse).launch(result, before)


class _Scan:
    """Emits and launches one kernel: of the accumulators of parts, or of results."""

    def __init__(
        self, ctx: Lowering, reduction: Reduction, x: Tensor, axis: int, exclusive: bool, reverse: bool
    ) -> None:
        self.ctx, self.reduction, self.x, self.axis = ctx, reduction, x, axis
        self.exclusive, self.reverse = exclusive, reverse
        self.builder = KernelBuilder()
        self.emit = self.builder.emit
        self.width = 2 if x.dtype.itemsize == 8 else 4
        self.short = _TYPES[x.dtype]

    def _joined(self, a: str, b: str) -> str:
        """The accumulator of two neighbouring pieces."""
        with self.emit.scope():
            first, second = (Scalar(self.x.dtype, "accumulator") for _ in range(2))
            self.emit.bind(first, a)
            self.emit.bind(second, b)
            return self.emit.value(self.reduction.combine((first,), (second,))[0])

    def launch(self, result: Tensor | None, parts: Tensor | None) -> None:
        """With ``result`` the results, which go on from ``parts``; without it the accumulators of parts."""
        ctx, builder, emit, x, axis = self.ctx, self.builder, self.emit, self.x, self.axis
        width, count = self.width, builder.integer(x.shape[axis])
        kept = [other for other in range(x.rank) if other != axis]
        tensors = [x] if result is None else [x, result]
        shape = [x.shape[other] for other in kept]
        along_parts = [] if parts is None else [parts.strides[:-1]]
        placed = [tuple(t.strides[other] for other in kept) for t in tensors]
        dims, strides = collapse(shape, [*placed, *along_parts])
        dtype = index_type(ctx, product(dims))
        extents = [extent(builder, dim, dtype) for dim in dims[1:]]
        row = emit.assign(f"{register_type(dtype)}(cuda.blockIdx.x)")
        names = coordinates(emit, row, extents, dtype) if dims else []
        pointers = [builder.tensor(t, written=t is result) for t in tensors]

        def base(of: Sequence[Dim]) -> str:
            terms = [(name, builder.stride(stride)) for name, stride in zip(names, of, strict=True)]
            return emit.assign(offset_text(terms))

        bases = [base(by_row) for by_row in strides[: len(tensors)]]
        steps = [builder.stride(t.strides[axis]) for t in tensors]
        emit.line("lane = int64(cuda.threadIdx.x)")
        emit.line("part = int64(cuda.blockIdx.y)")
        emit.line(f"start = part * {PART}" if parts is not None else "start = int64(0)")
        emit.line(f"end = min(start + {PART}, {count})" if parts is not None else f"end = {count}")
        (initial,) = self.reduction.initial((x.dtype,))
        zero = emit.value(initial)
        emit.line(f"total = {zero}")
        if parts is not None:
            place = f"{base(strides[-1])} + part"
            pointer = builder.tensor(parts, written=result is None)
            if result is not None:
                emit.line(f"total = {pointer}[{place}]")
        emit.line(f"sums = cuda.shared.array({THREADS // WARP}, {register_type(x.dtype)})")
        emit.line(f"reached = registers_{self.short}({width})")
        if result is not None:
            emit.line(f"results = lanes_of({pointers[1]}, {width})")
        by_vectors = [step == "1" and not self.reverse for step in steps]
        with emit.block(f"for j0 in range(start, end, {THREADS * width}):"):
            emit.line(f"first = j0 + lane * {width}")
            emit.line(f"items = lanes_of({pointers[0]}, {width})")
            if by_vectors[0]:
                emit.line(f"load_row(items, {pointers[0]}, {bases[0]} + first, 0, {bases[0]} + end, {width}, 1)")
            else:
                with emit.block(f"for e in range({width}):"), emit.block("if first + e < end:"):
                    emit.line(f"items[e] = {pointers[0]}[{bases[0]} + {self._column(count)} * {steps[0]}]")
            emit.line(f"mine = {zero}")
            with emit.block(f"for e in range({width}):"):
                element, total = Scalar(x.dtype, "leaf"), Scalar(x.dtype, "accumulator")
                emit.bind(element, emit.assign(load_text("items", "e", x.dtype)))
                emit.bind(total, "mine")
                (after,) = self.reduction.step((total,), (element,))
                emit.line(f"mine = choose(first + e < end, {emit.value(after)}, mine)")
                emit.line("reached[e] = mine")
            with emit.block("for d in range(5):"):
                emit.line(f"other = shfl_up_{self.short}(mine, int32(1 << d))")
                emit.line(f"mine = choose((lane & {WARP - 1}) >= (1 << d), {self._joined('other', 'mine')}, mine)")
            with emit.block(f"if lane & {WARP - 1} == {WARP - 1}:"):
                emit.line(f"sums[lane // {WARP}] = mine")
            emit.line("cuda.syncthreads()")
            emit.line("before = total")
            with emit.block(f"for warp in range({THREADS // WARP}):"):
                emit.line("one = sums[warp]")
                emit.line(f"before = choose(warp < lane // {WARP}, {self._joined('before', 'one')}, before)")
                emit.line(f"total = {self._joined('total', 'one')}")
            emit.line("cuda.syncthreads()")
            if result is not None:
                self._store(pointers[1], bases[1], steps[1], by_vectors[1], count)
        if result is None:
            assert parts is not None
            with emit.block("if lane == 0:"):
                emit.line(f"{pointer}[{place}] = total")
        grid = product(dims), 1 if parts is None else parts.shape[-1], 1
        builder.launch(ctx, kernel_name(ctx), grid, (THREADS, 1, 1))

    def _column(self, count: str) -> str:
        return f"({count} - 1 - first - e)" if self.reverse else "(first + e)"

    def _store(self, pointer: str, base: str, step: str, by_vectors: bool, count: str) -> None:
        emit, width, dtype = self.emit, self.width, self.x.dtype
        emit.line(f"left = shfl_up_{self.short}(mine, int32(1))")
        emit.line(f"before = choose((lane & {WARP - 1}) > 0, {self._joined('before', 'left')}, before)")
        with emit.block(f"for e in range({width}):"):
            value = Scalar(dtype, "accumulator")
            if self.exclusive:
                emit.line("until = reached[max(e - 1, 0)]")
                emit.line(f"made = choose(e > 0, {self._joined('before', 'until')}, before)")
            else:
                emit.line("until = reached[e]")
                emit.line(f"made = {self._joined('before', 'until')}")
            emit.bind(value, "made")
            if by_vectors:
                emit.store("results", "e", value)
            else:
                with emit.block("if first + e < end:"):
                    emit.store(pointer, f"{base} + {self._column(count)} * {step}", value)
        if by_vectors:
            emit.line(f"store_row(results, {pointer}, {base} + first, 0, {base} + end, {width}, 1)")
