"""Block scans on a GPU: a block scans a row, or a part of one, with a vector of elements per thread.

Few long rows are split into parts, with decoupled look-back (Merrill and Garland) and a fixed order of additions. A
block draws the index of its part from a counter, reduces the part, publishes the result, and waits for the results of
all earlier parts. Then it scans its part, starting from their total. A block waits only for parts that were drawn
before its own, so that blocks may run in any order. Rows of very many parts take three launches instead: the first
reduces the parts, the second scans the results, and the third scans the parts.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...model.ir import NARROW_FLOATS, DType
from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import Dim, ceildiv, hint, product
from ...program.lowering.context import Lowering, Tensor
from ...program.lowering.shapes import collapse
from ...program.steps.row_program import Reduction
from ..codegen.launch_geometry import coordinates, extent, index_type
from ..codegen.source import KernelBuilder, kernel_name, load_text, offset_text, register_type

SHORT = 128
"""Minimum columns of a row that a block scans; a single thread scans shorter rows."""
THREADS, WARP = 256, 32  # threads per block, and per warp
PART = 8192
"""Maximum elements of a part, a multiple of the elements that all threads load with one vector each."""
BLOCKS_PER_MULTIPROCESSOR = 4
"""Blocks per multiprocessor that a launch should have at least; otherwise parts get smaller."""
MOST_PARTS = 1280
"""Maximum parts of a row for look-back, in which each block reads the results of all parts before its own."""
ROWS_PER_MULTIPROCESSOR = 2
"""Rows per multiprocessor from which one block per row keeps the GPU busy."""
_TYPES = {DType.INT32: "i32", DType.INT64: "i64", DType.UINT32: "u32", DType.UINT64: "u64", DType.FLOAT64: "f64"}
_TYPES |= dict.fromkeys((DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16), "f32")


def has_block_scan(ctx: Lowering, x: Tensor, axis: int) -> bool:
    """Tell whether to scan rows of x along ``axis`` by blocks instead of single threads."""
    return not ctx.device.emulated and x.dtype in _TYPES and hint(x.shape[axis]) >= SHORT


def block_scan(
    ctx: Lowering, reduction: Reduction, x: Tensor, result: Tensor, axis: int, *, exclusive: bool, reverse: bool
) -> None:
    """Scan an axis of x into ``result``, which has the shape of x; see `scan.scan` for the parameters."""
    columns = x.shape[axis]
    rows = product(dim for other, dim in enumerate(x.shape) if other != axis)
    if hint(columns) <= 2 * PART or hint(rows) >= ROWS_PER_MULTIPROCESSOR * ctx.device.multiprocessors:
        _Scan(ctx, reduction, x, axis, exclusive, reverse).launch(result, None)
        return
    parts = ceildiv(columns, PART)
    if hint(parts) <= MOST_PARTS:
        _Scan(ctx, reduction, x, axis, exclusive, reverse).launch_once(result, rows)
        return
    wide = DType.FLOAT32 if x.dtype in NARROW_FLOATS else x.dtype
    outer = [dim for other, dim in enumerate(x.shape) if other != axis]
    totals, before = ctx.empty((*outer, parts), wide), ctx.empty((*outer, parts), wide)
    _Scan(ctx, reduction, x, axis, exclusive, reverse).launch(None, totals)
    block_scan(ctx, reduction, totals, before, len(outer), exclusive=True, reverse=False)
    _Scan(ctx, reduction, x, axis, exclusive, reverse).launch(result, before)


class _Scan:
    """Generator of one scan kernel, which stores the scanned row, or only the reductions of its parts.

    Of each pair of values the first is for x, the second for the result: ``pointers``, the row's offsets ``bases``,
    the strides ``steps`` along it, and whether accesses are vectorized (``by_vectors``). ``count`` is the row's length,
    ``zero`` the initial value of an accumulator.
    """

    def __init__(
        self, ctx: Lowering, reduction: Reduction, x: Tensor, axis: int, exclusive: bool, reverse: bool
    ) -> None:
        self.ctx, self.reduction, self.x, self.axis = ctx, reduction, x, axis
        self.exclusive, self.reverse = exclusive, reverse
        self.builder = KernelBuilder()
        self.emit = self.builder.emit
        self.width = 2 if x.dtype.itemsize == 8 else 4
        self.short = _TYPES[x.dtype]
        self.part = str(PART)
        """Source of the number of elements per part."""

    def _joined(self, a: str, b: str) -> str:
        """Emit the combination of accumulators ``a`` and ``b`` of two adjacent ranges of a row; return it."""
        with self.emit.scope():
            first, second = (Scalar(self.x.dtype, "accumulator") for _ in range(2))
            self.emit.bind(first, a)
            self.emit.bind(second, b)
            return self.emit.value(self.reduction.combine((first,), (second,))[0])

    def launch_once(self, result: Tensor, rows: Dim) -> None:
        """Launch the scan of ``rows`` rows with decoupled look-back."""
        ctx, builder, emit = self.ctx, self.builder, self.emit
        columns, size = self.x.shape[self.axis], THREADS * self.width
        while size < PART and hint(columns * rows) > size * BLOCKS_PER_MULTIPROCESSOR * ctx.device.multiprocessors:
            size *= 2
        parts = ceildiv(columns, size)
        self.part = builder.integer(size)
        totals = ctx.empty((rows, parts), DType.FLOAT32 if self.x.dtype in NARROW_FLOATS else self.x.dtype)
        progress = ctx.empty((rows * parts + 1,), DType.INT32)
        ctx.memset(progress, 0)
        builder.tensors(written=True, totals=totals, progress=progress)
        builder.integers(n_parts=parts)
        emit.line("drawn = cuda.shared.array(1, int32)")
        with emit.block("if cuda.threadIdx.x == 0:"):
            emit.line("drawn[0] = atomic_add_i32(progress, 0, int32(1))")
        emit.line("cuda.syncthreads()")
        emit.line("ticket = int64(drawn[0])")
        emit.line("drawn_row = quotient_i64(ticket, n_parts)")
        emit.line("part = ticket - drawn_row * n_parts")
        self._emit(result, None, drawn=True)
        builder.launch(ctx, kernel_name(ctx), (rows * parts, 1, 1), (THREADS, 1, 1))

    def launch(self, result: Tensor | None, parts: Tensor | None) -> None:
        """Launch the scan into ``result``; each part starts from its accumulator in ``parts`` (None: no row is split).

        Without ``result``, store the reduction of each part in ``parts`` instead.
        """
        self.emit.line("part = int64(cuda.blockIdx.y)")
        rows = self._emit(result, parts, drawn=False)
        grid = rows, 1 if parts is None else parts.shape[-1], 1
        self.builder.launch(self.ctx, kernel_name(self.ctx), grid, (THREADS, 1, 1))

    def _emit(self, result: Tensor | None, parts: Tensor | None, *, drawn: bool) -> Dim:
        """Emit the kernel; return the number of rows. ``drawn`` selects look-back. For the tensors see `launch`."""
        ctx, builder, emit, x, axis = self.ctx, self.builder, self.emit, self.x, self.axis
        self.count = builder.integer(x.shape[axis])
        kept = [other for other in range(x.rank) if other != axis]
        tensors = [x] if result is None else [x, result]
        shape = [x.shape[other] for other in kept]
        along_parts = [] if parts is None else [parts.strides[:-1]]
        placed = [tuple(t.strides[other] for other in kept) for t in tensors]
        dims, strides = collapse(shape, [*placed, *along_parts])
        dtype = index_type(ctx, product(dims))
        extents = [extent(builder, dim, dtype) for dim in dims[1:]]
        row = emit.assign(f"{register_type(dtype)}({'drawn_row' if drawn else 'cuda.blockIdx.x'})")
        names = coordinates(emit, row, extents, dtype) if dims else []
        self.pointers = [builder.tensor(t, written=t is result) for t in tensors]

        def base(of: Sequence[Dim]) -> str:
            terms = [(name, builder.stride(stride)) for name, stride in zip(names, of, strict=True)]
            return emit.assign(offset_text(terms))

        self.bases = [base(by_row) for by_row in strides[: len(tensors)]]
        self.steps = [builder.stride(t.strides[axis]) for t in tensors]
        self.by_vectors = [step == "1" and not self.reverse for step in self.steps]
        emit.line("lane = int64(cuda.threadIdx.x)")
        has_parts = drawn or parts is not None
        emit.line(f"start = part * {self.part}" if has_parts else "start = int64(0)")
        emit.line(f"end = min(start + {self.part}, {self.count})" if has_parts else f"end = {self.count}")
        (initial,) = self.reduction.initial((x.dtype,))
        self.zero = emit.value(initial)
        emit.line(f"total = {self.zero}")
        if parts is not None:
            offset = f"{base(strides[-1])} + part"
            pointer = builder.tensor(parts, written=result is None)
            if result is not None:
                emit.line(f"total = {pointer}[{offset}]")
        emit.line(f"sums = cuda.shared.array({THREADS // WARP}, {register_type(x.dtype)})")
        emit.line(f"reached = registers_{self.short}({self.width})")
        if result is not None:
            emit.line(f"results = lanes_of({self.pointers[1]}, {self.width})")
        if drawn:
            with emit.scope():
                self._walk(stores=False)
            self._look_back()
        self._walk(stores=result is not None)
        if result is None:
            assert parts is not None
            with emit.block("if lane == 0:"):
                emit.line(f"{pointer}[{offset}] = total")
        return product(dims)

    def _look_back(self) -> None:
        """Emit the publication of the part's reduction; set ``total`` to the reduction of all earlier parts."""
        emit = self.emit
        with emit.block("if lane == 0:"):
            emit.line("totals[ticket] = total")
            emit.line("cuda.threadfence()")
            emit.line("atomic_add_i32(progress, 1 + ticket, int32(1))")
        # Each thread combines consecutive parts, so that parts are combined in their order.
        emit.line(f"share = (part + {THREADS - 1}) // {THREADS}")
        emit.line("first_part = ticket - part + min(lane * share, part)")
        emit.line("last_part = min(first_part + share, ticket)")
        emit.line(f"mine = {self.zero}")
        with emit.block("for other_part in range(first_part, last_part):"):
            emit.line("while load_acquire_i32(progress, 1 + other_part) == 0:")
            emit.line("    cuda.nanosleep(uint32(20))")
            emit.line("one = totals[other_part]")
            emit.line(f"mine = {self._joined('mine', 'one')}")
        with emit.block("for d in range(5):"):
            emit.line(f"other = shfl_down_{self.short}(mine, int32(1 << d))")
            emit.line(f"mine = {self._joined('mine', 'other')}")
        with emit.block(f"if lane & {WARP - 1} == 0:"):
            emit.line(f"sums[lane // {WARP}] = mine")
        emit.line("cuda.syncthreads()")
        emit.line(f"total = {self.zero}")
        with emit.block(f"for warp in range({THREADS // WARP}):"):
            emit.line("one = sums[warp]")
            emit.line(f"total = {self._joined('total', 'one')}")
        emit.line("cuda.syncthreads()")

    def _walk(self, *, stores: bool) -> None:
        """Emit a loop that scans the elements from ``start`` to ``end``; ``total`` accumulates all elements so far.

        Before the loop, ``total`` is the accumulator of the elements before ``start``.
        """
        emit, x, width = self.emit, self.x, self.width
        pointer, base = self.pointers[0], self.bases[0]
        with emit.block(f"for j0 in range(start, end, {THREADS * width}):"):
            emit.line(f"first = j0 + lane * {width}")
            emit.line(f"items = lanes_of({pointer}, {width})")
            if self.by_vectors[0]:
                emit.line(f"load_row(items, {pointer}, {base} + first, 0, {base} + end, {width}, 1)")
            else:
                with emit.block(f"for e in range({width}):"), emit.block("if first + e < end:"):
                    emit.line(f"items[e] = {pointer}[{base} + {self._column} * {self.steps[0]}]")
            emit.line(f"mine = {self.zero}")
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
            if stores:
                self._store()

    @property
    def _column(self) -> str:
        return f"({self.count} - 1 - first - e)" if self.reverse else "(first + e)"

    def _store(self) -> None:
        emit, width, dtype = self.emit, self.width, self.x.dtype
        pointer, base, by_vectors = self.pointers[1], self.bases[1], self.by_vectors[1]
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
                    emit.store(pointer, f"{base} + {self._column} * {self.steps[1]}", value)
        if by_vectors:
            emit.line(f"store_row(results, {pointer}, {base} + first, 0, {base} + end, {width}, 1)")
