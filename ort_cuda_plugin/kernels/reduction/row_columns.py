"""Loops over the columns of a row in a reduction kernel: loads, cached values, and stores.

A thread loads elements one by one; or the vectors of its row into registers (`row_in_registers`); or, on a strided
axis, vectors of adjacent rows (`strided_axis`). Values that a later pass needs may be cached.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from ...model.ir import DType
from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import Dim, le
from ...program.lowering.context import Lowering
from ...program.steps.steps import Input, Rows
from ..codegen.launch_geometry import Extent, coordinates
from ..codegen.row_cache import NO_CACHE, RowCache
from ..codegen.source import KernelBuilder, load_text, offset_text
from ..codegen.vectors import vector_load
from .block_reduce import WARP, Accumulators, PartialResults
from .row_in_registers import RowForm
from .strided_axis import StridedSchedule
from .vector_io import RowMoves

CACHE_BYTES = 32 << 10
"""Maximum bytes of a block's row cache in shared memory; more would lower the occupancy."""
REGISTERS = {f"{kind}{bits}": f"registers_{kind[0]}{bits}" for kind in ("float", "int", "uint") for bits in (32, 64)}


class RowColumns:
    """Base of `RowKernel`: loops over columns, loads and stores. `RowKernel` chooses the schedule and emits passes.

    In the kernel, ``lane`` is the thread's index among those that share its row, and ``j`` a column. In a row that is
    held in registers, ``e`` is the index of one of the thread's elements.
    """

    def __init__(
        self,
        ctx: Lowering,
        step: Rows,
        part_form: RowForm | None = None,
        parts: Dim = 1,
        *,
        strided_parts: bool = False,
    ) -> None:
        self.part_form, self.parts, self.strided_parts = part_form, parts, strided_parts
        self.ctx, self.step, self.row = ctx, step, step.row
        self.shape, self.axes = step.shape, step.axes
        self.builder = KernelBuilder()
        self.emit = self.builder.emit
        self.emit.handlers["leaf"] = self._load
        self.emit.handlers["reduced"] = lambda x: self.results.current[x.value[0]][x.value[1]]
        self.results = PartialResults(self.emit)
        self.sources: dict[Scalar, tuple[str, str, list[str]]] = {}
        self.coordinates: list[str] | None = None
        self.threads = 1
        """Threads per row."""
        self.n = ""
        """Name of the kernel parameter with the number of columns."""
        self.column_dtype = DType.INT64
        self.column_extents: list[Extent] = []
        self.pass_number = -1
        """Index of the pass over the row that is being emitted."""
        self.passes = 0
        """Number of passes with reductions."""
        self.cache = NO_CACHE
        self.cache_index = ""
        """Format string of the index of a cached value in shared memory; fields: slot, column."""
        self.by_column: dict[Scalar, bool] = {}
        """Whether each value depends on the column. Empty on the emulated device, where LLVM hoists invariants."""
        self.load_passes: dict[Scalar, set[int]] = {}
        """Numbers of the passes that load an input's elements, by input."""
        self.form: RowForm | None = None
        """Layout of a row in registers; None if rows are not in registers."""
        self.moves: RowMoves | None = None
        """Loads and stores of rows in registers."""
        self.vectors: set[Scalar] = set()
        """Inputs that are contiguous along the columns, if rows are held in registers."""
        self.lanes: dict[Scalar, str] = {}
        self.pending: list[Scalar] = []
        """Inputs in registers that the pass being emitted reads first: its loop must follow their loads."""
        self.strided: StridedSchedule | None = None
        """Schedule of a reduction over a strided axis; None for other reductions."""
        self.rows_of_thread: list[Accumulators] = [self.results.current]
        """Accumulators of each of the thread's rows; `PartialResults.current` has those of the row being emitted."""
        self.row_number = 0
        """Index of the thread's row that is being emitted."""
        self.adjacent: set[Scalar] = set()
        """Inputs in which the rows of a thread with several rows are adjacent in memory."""
        self.row_lanes: dict[Scalar, str] = {}
        """Registers with one element of each of the thread's rows, for the column being emitted, by input."""
        self.whole_rows = ""
        """Variable that tells whether the vectors of adjacent rows are aligned."""
        self.is_exact = False
        """Whether every register of every thread has an element: the row's length equals the layout's capacity."""
        self.has_whole_vectors = False
        """Whether vectors are whole: all registers of a vector have an element, or none has."""

    @property
    def shares_rows(self) -> bool:
        """Whether threads of different rows take part in the same shuffles or barriers."""
        return self.strided is not None or 1 < self.threads < WARP

    @property
    def column0(self) -> str:
        """Source of the first column of the block's part with a following "+"; "" if the block has whole rows."""
        return "" if self.part_form is None else "column0 + "

    @property
    def stop(self) -> str:
        """Source of the column at which the block's part, or the row, ends."""
        return self.n if self.part_form is None else "stop"

    def _keep(self, kept: RowCache, columns: Dim, block: tuple[int, int, int]) -> Dim:
        """Declare the row cache ``kept``, in registers or shared memory; return its bytes of dynamic shared memory."""
        if not kept.slots:
            return 0
        emit, serial = self.emit, self.threads == 1
        if self.form is not None:
            self.cache = kept
            emit.line(f"kept = {REGISTERS[kept.type]}({kept.count * self.form.lanes})")
            return 0
        rows = block[0] * block[1] if serial else block[1]
        column_bytes = rows * kept.count * kept.itemsize
        if not self.ctx.settled(le(columns, CACHE_BYTES // column_bytes)):
            return 0
        self.cache = kept
        emit.line(f"kept = array_pointer(cuda.shared.array(0, {kept.type}, 16))")
        if serial:
            emit.line("mine = int64(cuda.threadIdx.y) * int64(cuda.blockDim.x) + int64(cuda.threadIdx.x)")
            self.cache_index = f"mine + ({{slot}} * {self.n} + {{column}}) * {rows}"
        else:
            emit.line(f"mine = int64(cuda.threadIdx.y) * ({kept.count} * {self.n})")
            self.cache_index = f"mine + {{slot}} * {self.n} + {{column}}"
        return columns * column_bytes

    @contextmanager
    def _columns(self, start: str = "lane") -> Iterator[None]:
        """Emit a loop over the thread's columns, whose body is the ``with`` block; ``start`` is the first column."""
        if self.form is None:
            with self.emit.block(f"for j in range({start}, {self.stop}, {self.threads}):"), self._column("j"):
                yield
            return
        # Emitting the loop shows which inputs the pass needs in registers: insert their loads before it afterwards.
        with (
            self.emit.detached() as loop,
            self.emit.block(f"for e in range({self.form.lanes}):"),
            self._column(f"{self.column0}{self.form.column('e')}"),
        ):
            yield
        assert self.moves is not None
        for leaf in self.pending:
            pointer, base, _ = self.sources[leaf]
            self.moves.load(self.lanes[leaf], pointer, base, leaf.dtype, is_later=self.pass_number > 0)
        self.pending.clear()
        self.emit.lines += loop

    @contextmanager
    def _column(self, index: str, inside: str = "") -> Iterator[None]:
        """Emit the ``with`` block for the column with source ``index``.

        ``inside`` is the format string of a condition on the column; columns outside are not accumulated.
        """
        with self.emit.scope():
            name = self.emit.assign(index)
            if inside:
                self.results.inside = self.emit.assign(inside.format(name))
                name = self.emit.assign(f"choose({self.results.inside}, {name}, int64(0))")
            self.emit.bind(self.row.index, name)
            for x in self.cache.loaded(self.pass_number):
                self.emit.bind(x, self.emit.assign(f"kept[{self._cache_offset(x, name)}]"))
            if self.form is not None and not self.is_exact:
                self.results.inside = self.emit.assign(
                    f"int32({self.form.distance('e', self.has_whole_vectors)}) < left"
                )
                name = self.emit.assign(f"choose({self.results.inside}, {name}, int64(0))")
            flat = name if self.column_dtype is DType.INT64 else self.emit.assign(f"int32({name})")
            self.coordinates = coordinates(self.emit, flat, self.column_extents, self.column_dtype)
            self.row_lanes.clear()
            yield
            for x in self.cache.stored(self.pass_number):
                self.emit.line(f"kept[{self._cache_offset(x, name)}] = {self.emit.value(x)}")
            self.coordinates = None
            self.results.inside = ""

    def _store_lanes(self, addresses: Sequence[tuple[str, str, list[str]]], dense: Sequence[bool]) -> None:
        """Emit the last pass of a row in registers, which stores elementwise results, by vectors where ``dense``."""
        assert self.form is not None
        assert self.moves is not None
        emit = self.emit
        vectors = (pointer for (pointer, _, _), is_vector in zip(addresses, dense, strict=False) if is_vector)
        lanes = {pointer: emit.lanes(pointer, self.form.lanes) for pointer in vectors}
        self._hoist(x for x, _ in self.step.outputs)
        with self._columns():
            for (value, _), (pointer, base, strides) in zip(self.step.outputs, addresses, strict=True):
                if pointer in lanes:
                    emit.store(lanes[pointer], "e", value)
                    continue
                stored, at = emit.memory_form(value), self._offset(base, strides)
                with emit.block(f"if {self.results.inside or 'True'}:"):
                    emit.line(f"{pointer}[{at}] = {stored}")
        for pointer, base, _ in addresses:
            if pointer in lanes:
                emit.line(self.moves.text("store", lanes[pointer], pointer, base))

    def _cache_offset(self, x: Scalar, column: str) -> str:
        if self.form is not None:
            return f"{self.cache.slots[x] * self.form.lanes} + e"
        return self.cache_index.format(slot=self.cache.slots[x], column=column)

    def _offset(self, base: str, strides: Sequence[str]) -> str:
        if self.coordinates is None:
            if any(stride != "0" for stride in strides):
                raise TypeError(
                    "a value that is computed once per row depends on an element of the row. Reduce the elements first"
                )
            return base
        terms = offset_text(list(zip(self.coordinates, strides, strict=False)))
        return base if terms == "0" else f"{base} + {terms}"

    def _load(self, leaf: Scalar) -> str:
        pointer, base, strides = self.sources[leaf]
        if leaf in self.vectors and self.coordinates is not None:
            if leaf not in self.lanes:
                self.load_passes.setdefault(leaf, set()).add(self.pass_number)
                self.lanes[leaf] = self.emit.fresh("r")
                self.pending.append(leaf)
            return self.emit.assign(load_text(self.lanes[leaf], "e", leaf.dtype))
        self.load_passes.setdefault(leaf, set()).add(self.pass_number)
        if leaf in self.adjacent and self.coordinates is not None:
            if leaf not in self.row_lanes:
                self.row_lanes[leaf] = self._loaded_rows(pointer, self.emit.assign(self._offset(base, strides)))
            return self.emit.assign(load_text(self.row_lanes[leaf], str(self.row_number), leaf.dtype))
        if leaf in self.adjacent:
            base = f"{base} + {self.row_number}"
        return self.emit.assign(load_text(pointer, self._offset(base, strides), leaf.dtype))

    def _place_rows(self, sources: Sequence[Input], row_strides: Sequence[Sequence[Dim]]) -> None:
        """Find the inputs in which a thread's rows are adjacent; emit a test that these are aligned for vectors."""
        assert self.strided is not None
        self.rows_of_thread = [{} for _ in range(self.strided.width)]
        pairs = zip(sources, row_strides, strict=False)
        self.adjacent = {leaf for (leaf, _), strides in pairs if strides[-1] == 1}
        pointers = [pointer for leaf, (pointer, _, _) in self.sources.items() if leaf in self.adjacent]
        aligned = " & ".join(f"is_aligned({pointer}, {self.strided.width})" for pointer in pointers)
        self.whole_rows = self.emit.assign(aligned)

    def _loaded_rows(self, pointer: str, offset: str) -> str:
        """Emit the load of a column's elements of all of the thread's rows, at ``offset``; return their variable."""
        assert self.strided is not None
        width, name = self.strided.width, self.emit.fresh("r")
        for line in vector_load(name, pointer, offset, self.whole_rows, width):
            self.emit.line(line)
        return name

    def _each_row(self, rows: Sequence[Accumulators] = ()) -> Iterator[int]:
        """Yield the index of each of the thread's rows, after making that row's accumulators the current ones.

        The accumulators are those in ``rows``, if given. Values emitted for one row are not reused for another.
        """
        for number, own in enumerate(self.rows_of_thread):
            self.row_number = number
            self.results.current.update(own)
            if rows:
                self.results.current.update(rows[number])
            if len(self.rows_of_thread) == 1:
                yield number
                continue
            with self.emit.scope():
                yield number

    def _store_rows(self, addresses: Sequence[tuple[str, str, list[str]]], strides: Sequence[Sequence[Dim]]) -> None:
        """Emit the stores of per-row results; ``strides`` are the results' strides along the row dimensions."""
        emit, width = self.emit, len(self.rows_of_thread)
        texts = [self.builder.stride(along[-1]) if width > 1 else "" for along in strides]
        vectors = (pointer for (pointer, _, _), text in zip(addresses, texts, strict=True) if text == "1")
        lanes = {pointer: emit.lanes(pointer, width) for pointer in vectors}
        for number in self._each_row():
            for (value, _), (pointer, base, _), stride in zip(self.step.row_outputs, addresses, texts, strict=True):
                if pointer in lanes:
                    emit.store(lanes[pointer], str(number), value)
                    continue
                offset = base if self.part_form is None else f"{base} + part"
                emit.store(pointer, f"{offset} + {number} * {stride}" if number else offset, value)
        for pointer, base, _ in addresses:
            if pointer in lanes:
                emit.line(f"store_row({lanes[pointer]}, {pointer}, {base}, 0, {base} + {width}, {width}, 1)")

    def _hoist(self, roots: Iterable[Scalar]) -> None:
        """Emit the values of ``roots`` that depend only on the row, before a pass's loop."""
        if self.by_column:
            self.emit.hoist(roots, self.by_column)
