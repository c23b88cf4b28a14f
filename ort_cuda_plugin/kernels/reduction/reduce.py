"""Kernels of row programs: reductions, and reductions followed by work on each element, in one launch.

Reductions that do not depend on each other share one pass over the row.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from ort_cuda_plugin.kernels.codegen.launch_geometry import (
    SERIAL_THREADS,
    Plane,
    coordinates,
    extent,
    index_type,
)
from ort_cuda_plugin.kernels.codegen.row_cache import NOTHING, Kept, find_by_column, find_kept
from ort_cuda_plugin.kernels.codegen.source import (
    KernelBuilder,
    kernel_name,
    load_text,
    offset_text,
    register_type,
)
from ort_cuda_plugin.kernels.codegen.vectors import is_dense, vector_load
from ort_cuda_plugin.kernels.reduction.block_reduce import WARP, Accumulators, PartialResults, stepped
from ort_cuda_plugin.kernels.reduction.row_in_registers import RowForm, choose_row_form, row_height
from ort_cuda_plugin.kernels.reduction.strided_axis import Upright, choose_upright, row_vectors
from ort_cuda_plugin.kernels.reduction.vector_io import RowMoves
from ort_cuda_plugin.model.ir import DType
from ort_cuda_plugin.program.expressions.scalar import Scalar
from ort_cuda_plugin.program.expressions.symbolic import Dim, ceildiv, divides, hint, le, product
from ort_cuda_plugin.program.lowering.context import Lowering, Tensor
from ort_cuda_plugin.program.lowering.shapes import broadcast_strides, collapse
from ort_cuda_plugin.program.steps.row_program import Stage, grouped_stages
from ort_cuda_plugin.program.steps.steps import Input, Rows
from ort_cuda_plugin.program.steps.trace import Use

__all__ = ["RowKernel"]

SERIAL_COLUMNS = 32
"""A row of at most so many elements is reduced by one thread; on the emulated device every row is.

Threads of a block share one core there: working together they would only take turns.
"""
MOST_TURNS = 8
"""Columns of a thread that are written out, where rows lie side by side."""
SERIAL_PARTS = 4
"""Partial results that such a thread keeps."""
LONG_COLUMNS = 1024
"""From so many columns on there are more parts, as many as a vector has, and new ones for each `PIECE` of the row."""
LONG_PARTS = 16
PIECE = 4096
"""Columns after which partial results start again: a sum of fewer terms rounds less."""
WARP_COLUMNS = 2048
"""A row of at most so many elements is reduced by one warp."""
BLOCK = 256
"""Threads that reduce a longer row."""
KEPT_BYTES = 32 << 10
"""What a block keeps of its rows at most: more leaves too few blocks on a multiprocessor."""
_REGISTERS = {f"{kind}{bits}": f"registers_{kind[0]}{bits}" for kind in ("float", "int", "uint") for bits in (32, 64)}


class RowKernel:
    """Emits and launches one row program.

    ``threads`` threads work on a row: one, a warp, or a block. Every pass is a loop over the row's columns, strided by
    the threads; partial results meet by shuffles, and across warps in shared memory.

    With ``part_form`` a block has one of ``parts`` of a row, as large as the form's capacity. A row's results, of which
    there is then one for each part, have no elements along the row. With ``upright_parts`` a block has this part of
    neighbouring rows, and the form only says how large it is.
    """

    def __init__(
        self,
        ctx: Lowering,
        step: Rows,
        part_form: RowForm | None = None,
        parts: Dim = 1,
        *,
        upright_parts: bool = False,
    ) -> None:
        self.part_form, self.parts, self.upright_parts = part_form, parts, upright_parts
        self.ctx, self.step, self.row = ctx, step, step.row
        self.shape, self.axes = step.shape, step.axes
        self.builder = KernelBuilder()
        self.emit = self.builder.emit
        self.emit.handlers["leaf"] = self._load
        self.emit.handlers["reduced"] = lambda x: self.results.current[x.value[0]][x.value[1]]
        self.results = PartialResults(self.emit)
        self.sources: dict[Scalar, tuple[str, str, list[str]]] = {}
        self.coordinates: list[str] | None = None
        self.walk = -1
        """The number of the pass over the row that is being emitted."""
        self.passes = 0
        """How many passes reduce."""
        self.kept = NOTHING
        self.kept_place = ""
        """Where a value is kept, with {slot} and {column}."""
        self.by_column: dict[Scalar, bool] = {}
        """Whether each value is another one for each column; empty where LLVM finds out by itself."""
        self.walks: dict[Scalar, set[int]] = {}
        """The passes that load elements of an input."""
        self.form: RowForm | None = None
        """What a thread has of its row in registers; None where it has it not."""
        self.moves: RowMoves | None = None
        """What moves that."""
        self.vectors: set[Scalar] = set()
        """Inputs whose elements lie as the columns do."""
        self.lanes: dict[Scalar, str] = {}
        self.pending: list[Scalar] = []
        """Inputs that the pass being emitted needs in lanes."""
        self.upright: Upright | None = None
        """The form of rows whose columns are apart."""
        self.rows_of_thread: list[Accumulators] = [self.results.current]
        """The accumulators of each row that a thread has; those of the row being emitted are the current ones."""
        self.row_number = 0
        """Which of a thread's rows is being emitted."""
        self.beside: set[Scalar] = set()
        """Inputs of which a thread's rows have neighbours, where it has several."""
        self.row_lanes: dict[Scalar, str] = {}
        """Where these stand for the column being emitted."""
        self.whole_rows = ""
        """Whether vectors of them may be loaded."""
        self.is_exact = False
        """Whether every lane has an element."""
        self.has_whole_vectors = False
        """Whether all lanes of a vector have an element, or none."""

    @property
    def shares_rows(self) -> bool:
        """Whether threads of several rows meet: in a warp, or at a barrier."""
        return self.upright is not None or 1 < self.threads < WARP

    @property
    def column0(self) -> str:
        """Source of the first column of the block's part, to be added."""
        return "" if self.part_form is None else "column0 + "

    @property
    def stop(self) -> str:
        """Source of the column behind the block's last one."""
        return self.n if self.part_form is None else "stop"

    def launch(self) -> None:
        builder, emit, elements, rows = self.builder, self.emit, self.step.outputs, self.step.row_outputs
        outputs = self.step.all_outputs
        sources = builder.to_load(self.step.inputs)
        # A result per row has no place along the columns, so that it does not keep them from merging.
        placed = [broadcast_strides(x, self.shape) for x in (*(x for _, x in sources), *(y for _, y in outputs))]
        row_dims, row_strides = self._collapse(placed, reduced=False)
        column_dims, column_strides = self._collapse(placed, reduced=True)
        self.n = builder.integer(product(column_dims))
        emit.bind(self.row.count, self.n)
        self.column_dtype = index_type(self.ctx, product(column_dims)) if len(column_dims) > 1 else DType.INT64
        self.column_extents = [extent(builder, dim, self.column_dtype) for dim in column_dims[1:]]
        adjacent = not column_strides[0] or column_strides[0][-1] == 1
        loaded = zip(sources, row_strides, column_strides, strict=False)
        by_axes = [(x, by_row, by_column) for (_, x), by_row, by_column in loaded]
        width = row_vectors(row_dims, by_axes) if row_dims and not (adjacent or elements) else 1
        self.threads = self._choose_threads(product(column_dims), product(row_dims), adjacent, width)
        self.long = self.ctx.device.emulated and hint(product(column_dims)) > LONG_COLUMNS
        groups = grouped_stages(x for x, _ in outputs)
        kept = self._find_kept(groups, sources, column_strides)
        kept = NOTHING if self.upright is not None else kept
        if ((self.threads > 1 and adjacent) or self.part_form is not None) and not self.upright_parts:
            self._choose_form(groups, kept, [x for _, x in sources], column_dims, column_strides)
            self.vectors = {
                leaf
                for (leaf, _), strides in zip(sources, column_strides, strict=False)
                if self.form is not None and is_dense(strides, column_dims)
            }
        grid, block, names, inside = self._rows(row_dims)
        if self.form is not None and not self.is_exact:
            first = f"{self.column0}lane * {self.form.width}"
            emit.line(f"left = int32(min({self.n} - ({first}), int64({self.form.capacity})))")
        shared_bytes = self._keep(kept, product(column_dims), block)

        places = []
        for number, (by_row, by_column) in enumerate(zip(row_strides, column_strides, strict=True)):
            tensor = sources[number][1] if number < len(sources) else outputs[number - len(sources)][1]
            pointer = builder.tensor(tensor, written=number >= len(sources))
            if self.moves is not None and self.is_exact:
                self.moves.find_whole(pointer, tensor, by_row)
            terms = [(name, builder.stride(stride)) for name, stride in zip(names, by_row, strict=True)]
            places.append((pointer, emit.assign(offset_text(terms)), [builder.stride(stride) for stride in by_column]))
        for (leaf, _), place in zip(sources, places, strict=False):
            self.sources[leaf] = place
        if self.upright is not None and self.upright.width > 1:
            self._place_rows(sources, row_strides)
        element_places = places[len(sources) : len(sources) + len(elements)]
        row_places = places[len(sources) + len(elements) :]

        with emit.block(f"if {inside}:"), self.moves.loads_ahead() if self.moves else nullcontext():
            self.passes = len(groups)
            for group in groups:
                self._reduce(group)
            self.walk += 1
            with emit.block(f"if {'exists' if self.shares_rows else 'True'}:"):
                if elements and self.form is not None:
                    strides_of = column_strides[len(sources) :]
                    self._store_lanes(element_places, [is_dense(strides, column_dims) for strides in strides_of])
                elif elements:
                    self._hoist(x for x, _ in elements)
                    with self._columns():
                        for (value, _), (pointer, base, strides) in zip(elements, element_places, strict=True):
                            emit.store(pointer, self._offset(base, strides), value)
                if rows:
                    with emit.block("if lane == 0:"):
                        self._store_rows(row_places, row_strides[len(places) - len(rows) :])
        uses = {x: Use(times=len(self.walks.get(leaf, ()))) for leaf, x in sources}
        bounded = block[0] * block[1] > BLOCK
        builder.launch(self.ctx, kernel_name(self.ctx), grid, block, uses, shared_bytes, bounded=bounded)

    def _find_kept(
        self, groups: Sequence[Sequence[Stage]], sources: Sequence[Input], column_strides: Sequence[Sequence[Dim]]
    ) -> Kept:
        """What a thread keeps of its columns from pass to pass.

        On the emulated device shared memory is no nearer than other memory.
        """
        if self.ctx.device.emulated:
            return NOTHING
        pairs = zip(sources, column_strides, strict=False)
        varying = {leaf for (leaf, _), strides in pairs if any(stride != 0 for stride in strides)}
        walks = [[x for stage in group for x in stage.elements] for group in groups]
        walks.append([x for x, _ in self.step.outputs])
        self.by_column = find_by_column(walks, varying.__contains__)
        return find_kept(walks, varying.__contains__)

    def _choose_form(
        self,
        groups: Sequence[Sequence[Stage]],
        kept: Kept,
        sources: Sequence[Tensor],
        column_dims: Sequence[Dim],
        column_strides: Sequence[Sequence[Dim]],
    ) -> None:
        """Keeps the row in registers where that is possible."""
        tensors = [*sources, *(y for _, y in self.step.outputs)]
        moved = [x for x, s in zip(tensors, column_strides, strict=False) if is_dense(s, column_dims)]
        if kept.slots and kept.type not in _REGISTERS:
            return
        inputs = sum(is_dense(strides, column_dims) for strides in column_strides[: len(sources)])
        self.form = self.part_form or choose_row_form(
            self.ctx,
            self.step,
            groups,
            product(column_dims),
            product(self.step.row_shape),
            inputs,
            [x.dtype.itemsize for x in moved],
        )
        if self.form is not None:
            self.threads = self.form.threads
            self.is_exact = product(column_dims) == self.parts * self.form.capacity
            self.has_whole_vectors = divides(self.form.width, product(column_dims))
            self.moves = RowMoves(self.emit, self.form, self.n, self.column0)

    def _keep(self, kept: Kept, columns: Dim, block: tuple[int, int, int]) -> Dim:
        """Emits where each thread keeps its columns; gives the bytes of shared memory for it."""
        if not kept.slots:
            return 0
        emit, serial = self.emit, self.threads == 1
        if self.form is not None:
            self.kept = kept
            emit.line(f"kept = {_REGISTERS[kept.type]}({kept.count * self.form.lanes})")
            return 0
        rows = block[0] * block[1] if serial else block[1]
        column_bytes = rows * kept.count * kept.itemsize
        if not self.ctx.settled(le(columns, KEPT_BYTES // column_bytes)):
            return 0
        self.kept = kept
        emit.line(f"kept = array_pointer(cuda.shared.array(0, {kept.type}, 16))")
        if serial:
            emit.line("mine = int64(cuda.threadIdx.y) * int64(cuda.blockDim.x) + int64(cuda.threadIdx.x)")
            self.kept_place = f"mine + ({{slot}} * {self.n} + {{column}}) * {rows}"
        else:
            emit.line(f"mine = int64(cuda.threadIdx.y) * ({kept.count} * {self.n})")
            self.kept_place = f"mine + {{slot}} * {self.n} + {{column}}"
        return columns * column_bytes

    def _collapse(self, placed: Sequence[tuple[Dim, ...]], reduced: bool) -> tuple[list[Dim], list[tuple[Dim, ...]]]:
        axes = [axis for axis in range(len(self.shape)) if (axis in self.axes) == reduced]
        return collapse(
            [self.shape[axis] for axis in axes], [tuple(strides[axis] for axis in axes) for strides in placed]
        )

    def _choose_threads(self, columns: Dim, rows: Dim, adjacent: bool, width: int) -> int:
        """By the sizes that are expected; every choice is right for all sizes."""
        if self.upright_parts:
            self.upright = Upright(WARP)
            return WARP
        if self.ctx.device.emulated or hint(columns) <= SERIAL_COLUMNS:
            return 1
        # Where the columns of a row are apart, threads of neighbouring rows read neighbouring elements.
        if not adjacent and hint(rows) >= WARP:
            self.upright = choose_upright(self.ctx.device, columns, rows, width)
            return self.upright.threads if self.upright is not None else 1
        return WARP if hint(columns) <= WARP_COLUMNS else BLOCK

    def _rows(self, dims: list[Dim]) -> tuple[tuple[Dim, Dim, Dim], tuple[int, int, int], list[str], str]:
        """Emits the coordinates of the thread's row; gives grid, block, their names, and whether the row exists."""
        if self.threads == 1 and not self.long:
            plane = Plane(self.ctx, self.builder, dims or [1], SERIAL_THREADS)
            self.emit.line("lane = 0")
            return plane.grid, plane.block, plane.names[: len(dims)], plane.inside
        rows = product(dims)
        height = BLOCK // 2 // WARP if self.threads == WARP else 1
        if self.form is not None and self.threads <= WARP:
            height = row_height(self.ctx, rows, self.threads)
        across, along, step = "x", "y", 1
        if self.upright is not None:
            across, along, height, step = "y", "x", self.upright.rows, self.upright.width
        dtype = index_type(self.ctx, rows)
        index = register_type(dtype)
        n_rows = self.builder.integer(rows, dtype)
        extents = [extent(self.builder, dim, dtype) for dim in dims[1:]]
        self.emit.line(f"lane = int64(cuda.threadIdx.{across})")
        block = f"{index}(cuda.blockIdx.x)"
        number = f"{block} * {index}(cuda.blockDim.{along}) + {index}(cuda.threadIdx.{along})"
        self.emit.line(f"row = {index}({number if step == 1 else f'({number}) * {step}'})")
        exists = f"row < {n_rows}"
        if self.shares_rows:
            # All of a warp or block goes the same way: what has no row does another's work and stores nothing.
            self.emit.line(f"exists = {exists}")
            self.emit.line(f"row = choose(exists, row, {index}({n_rows} - {step}))")
        names = coordinates(self.emit, "row", extents, dtype) if dims else []
        if self.part_form is not None:
            self.emit.line("part = int64(cuda.blockIdx.y)")
            self.emit.line(f"column0 = part * {self.part_form.capacity}")
            self.emit.line(f"stop = min(column0 + {self.part_form.capacity}, {self.n})")
        block_shape = (self.threads, height, 1)
        if self.upright is not None:
            block_shape = (self.upright.side, self.threads, 1)
        return (ceildiv(rows, height), self.parts, 1), block_shape, names, "True" if self.shares_rows else exists

    @contextmanager
    def _columns(self, start: str = "lane") -> Iterator[None]:
        """A loop over the thread's share of the row."""
        if self.form is None:
            with self.emit.block(f"for j in range({start}, {self.stop}, {self.threads}):"), self._column("j"):
                yield
            return
        # Which inputs the pass needs is known when its loop has been emitted; they are loaded ahead of it.
        with (
            self.emit.detached() as loop,
            self.emit.block(f"for e in range({self.form.lanes}):"),
            self._column(f"{self.column0}{self.form.column('e')}"),
        ):
            yield
        assert self.moves is not None
        for leaf in self.pending:
            pointer, base, _ = self.sources[leaf]
            self.moves.load(self.lanes[leaf], pointer, base, leaf.dtype, is_later=self.walk > 0)
        self.pending.clear()
        self.emit.lines += loop

    def _store_lanes(self, places: Sequence[tuple[str, str, list[str]]], dense: Sequence[bool]) -> None:
        """The last pass, whose results go to memory by vectors where they lie as the columns do."""
        assert self.form is not None
        assert self.moves is not None
        emit = self.emit
        lanes = {
            pointer: emit.fresh("r") for (pointer, _, _), is_vector in zip(places, dense, strict=False) if is_vector
        }
        for pointer, name in lanes.items():
            emit.line(f"{name} = lanes_of({pointer}, {self.form.lanes})")
        self._hoist(x for x, _ in self.step.outputs)
        with self._columns():
            for (value, _), (pointer, base, strides) in zip(self.step.outputs, places, strict=True):
                if pointer in lanes:
                    emit.store(lanes[pointer], "e", value)
                    continue
                stored, place = emit.memory_form(value), self._offset(base, strides)
                with emit.block(f"if {self.results.inside or 'True'}:"):
                    emit.line(f"{pointer}[{place}] = {stored}")
        for pointer, base, _ in places:
            if pointer in lanes:
                emit.line(self.moves.text("store", lanes[pointer], pointer, base))

    @contextmanager
    def _column(self, index: str, inside: str = "") -> Iterator[None]:
        """A scope whose elements are those of column ``index``, which counts only if ``inside`` says so of its name."""
        with self.emit.scope():
            name = self.emit.assign(index)
            if inside:
                self.results.inside = self.emit.assign(inside.format(name))
                name = self.emit.assign(f"choose({self.results.inside}, {name}, int64(0))")
            self.emit.bind(self.row.index, name)
            for x in self.kept.loaded(self.walk):
                self.emit.bind(x, self.emit.assign(f"kept[{self._kept_place(x, name)}]"))
            if self.form is not None and not self.is_exact:
                self.results.inside = self.emit.assign(
                    f"int32({self.form.distance('e', self.has_whole_vectors)}) < left"
                )
                name = self.emit.assign(f"choose({self.results.inside}, {name}, int64(0))")
            flat = name if self.column_dtype is DType.INT64 else self.emit.assign(f"int32({name})")
            self.coordinates = coordinates(self.emit, flat, self.column_extents, self.column_dtype)
            self.row_lanes.clear()
            yield
            for x in self.kept.stored(self.walk):
                self.emit.line(f"kept[{self._kept_place(x, name)}] = {self.emit.value(x)}")
            self.coordinates = None
            self.results.inside = ""

    def _kept_place(self, x: Scalar, column: str) -> str:
        if self.form is not None:
            return f"{self.kept.slots[x] * self.form.lanes} + e"
        return self.kept_place.format(slot=self.kept.slots[x], column=column)

    def _offset(self, base: str, strides: Sequence[str]) -> str:
        if self.coordinates is None:
            if any(stride != "0" for stride in strides):
                raise TypeError("a value per row depends on an element other than through a reduction")
            return base
        terms = offset_text(list(zip(self.coordinates, strides, strict=False)))
        return base if terms == "0" else f"{base} + {terms}"

    def _load(self, leaf: Scalar) -> str:
        pointer, base, strides = self.sources[leaf]
        if leaf in self.vectors and self.coordinates is not None:
            if leaf not in self.lanes:
                self.walks.setdefault(leaf, set()).add(self.walk)
                self.lanes[leaf] = self.emit.fresh("r")
                self.pending.append(leaf)
            return self.emit.assign(load_text(self.lanes[leaf], "e", leaf.dtype))
        self.walks.setdefault(leaf, set()).add(self.walk)
        if leaf in self.beside and self.coordinates is not None:
            if leaf not in self.row_lanes:
                self.row_lanes[leaf] = self._loaded_rows(pointer, self.emit.assign(self._offset(base, strides)))
            return self.emit.assign(load_text(self.row_lanes[leaf], str(self.row_number), leaf.dtype))
        if leaf in self.beside:
            base = f"{base} + {self.row_number}"
        return self.emit.assign(load_text(pointer, self._offset(base, strides), leaf.dtype))

    def _place_rows(self, sources: Sequence[Input], row_strides: Sequence[Sequence[Dim]]) -> None:
        """Says of which inputs a thread's rows have neighbours, and whether addresses allow vectors of them."""
        assert self.upright is not None
        self.rows_of_thread = [{} for _ in range(self.upright.width)]
        pairs = zip(sources, row_strides, strict=False)
        self.beside = {leaf for (leaf, _), strides in pairs if strides[-1] == 1}
        pointers = [pointer for leaf, (pointer, _, _) in self.sources.items() if leaf in self.beside]
        aligned = " & ".join(f"is_aligned({pointer}, {self.upright.width})" for pointer in pointers)
        self.whole_rows = self.emit.assign(aligned)

    def _loaded_rows(self, pointer: str, place: str) -> str:
        """A column's elements of the thread's rows, from ``place`` on."""
        assert self.upright is not None
        width, name = self.upright.width, self.emit.fresh("r")
        for line in vector_load(name, pointer, place, self.whole_rows, width):
            self.emit.line(line)
        return name

    def _each_row(self, rows: Sequence[Accumulators] = ()) -> Iterator[int]:
        """The numbers of the thread's rows, each while it is the one being emitted; ``rows`` come in place of its own.

        What is emitted for one row is not used for another.
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

    def _store_rows(self, places: Sequence[tuple[str, str, list[str]]], strides: Sequence[Sequence[Dim]]) -> None:
        """The results of rows, which have these strides along the rows' dimensions."""
        emit, width = self.emit, len(self.rows_of_thread)
        texts = [self.builder.stride(along[-1]) if width > 1 else "" for along in strides]
        lanes = {pointer: emit.fresh("r") for (pointer, _, _), text in zip(places, texts, strict=True) if text == "1"}
        for pointer, name in lanes.items():
            emit.line(f"{name} = lanes_of({pointer}, {width})")
        for number in self._each_row():
            for (value, _), (pointer, base, _), stride in zip(self.step.row_outputs, places, texts, strict=True):
                if pointer in lanes:
                    emit.store(lanes[pointer], str(number), value)
                    continue
                place = base if self.part_form is None else f"{base} + part"
                emit.store(pointer, f"{place} + {number} * {stride}" if number else place, value)
        for pointer, base, _ in places:
            if pointer in lanes:
                emit.line(f"store_row({lanes[pointer]}, {pointer}, {base}, 0, {base} + {width}, {width}, 1)")

    def _reduce(self, stages: Sequence[Stage]) -> None:
        """One pass over the row for all ``stages``."""
        self.walk += 1
        for row in self.rows_of_thread:
            row.update(self.results.started(stages))
        if self.upright is not None:
            self._reduce_upright(stages, self.upright)
            return
        self._hoist(x for stage in stages for x in stage.elements)
        start = self._reduce_parts(stages) if self.threads == 1 else "lane"
        with self._columns(start):
            self.results.update(stages, stepped)
        if self.threads == 1:
            return
        lanes = min(self.threads, WARP)
        with self.emit.block(f"for step in range({lanes.bit_length() - 1}):"):
            self.results.update(stages, self.results.shuffled(f"int32({lanes // 2} >> step)"))
        if self.threads > WARP:
            self.results.combine_shared(stages, self.threads // WARP)

    def _hoist(self, roots: Iterable[Scalar]) -> None:
        """Emits what a pass computes of the row alone, ahead of its loop."""
        if self.by_column:
            self.emit.hoist(roots, self.by_column)

    def _reduce_parts(self, stages: Sequence[Stage]) -> str:
        """The columns of one thread in several partial results side by side; gives the first column that is left.

        Chains of dependent additions are shorter then, which is faster, and rounds less.
        """
        totals = {stage: self.results.current[stage] for stage in stages}
        if not self.long:
            parts = [[totals], *([self.results.started(stages)] for _ in range(SERIAL_PARTS - 1))]
            self._fill_parts(stages, parts, f"range(0, {self.n} - {SERIAL_PARTS - 1}, {SERIAL_PARTS})")
            return f"{self.n} & -{SERIAL_PARTS}"
        with self.emit.block(f"for piece in range(0, {self.n} - {LONG_PARTS - 1}, {PIECE}):"):
            parts = [[self.results.started(stages)] for _ in range(LONG_PARTS)]
            end = f"min({self.n}, piece + {PIECE})"
            self._fill_parts(stages, parts, f"range(piece, {end} - {LONG_PARTS - 1}, {LONG_PARTS})")
            self.results.current.update(totals)
            with self.emit.scope():
                self.results.update(stages, functools.partial(self.results.joined, other=parts[0][0]))
        return f"{self.n} & -{LONG_PARTS}"

    def _reduce_upright(self, stages: Sequence[Stage], form: Upright) -> None:
        if form.width == 1:
            self._hoist(x for stage in stages for x in stage.elements)
        own = [{stage: row[stage] for stage in stages} for row in self.rows_of_thread]
        columns = product(self.shape[axis] for axis in self.axes)
        turns = ceildiv(columns, form.threads)
        if self.part_form is None and isinstance(turns, int) and turns <= MOST_TURNS:
            # Written out, so that all loads are in flight at once.
            count = min(form.parts, 1 << turns.bit_length() - 1)
            parts = [own, *([self.results.started(stages) for _ in own] for _ in range(count - 1))]
            for turn in range(turns):
                inside = "{} < " + self.n if not le((turn + 1) * form.threads, columns) else ""
                with self._column(f"lane + {turn * form.threads}", inside):
                    for _ in self._each_row(parts[turn % len(parts)]):
                        self.results.update(stages, stepped)
            self._join_parts(stages, parts)
            self.results.current.update(own[0])
        else:
            parts = [own, *([self.results.started(stages) for _ in own] for _ in range(form.parts - 1))]
            step = form.parts * form.threads
            first, end = f"{self.column0}lane", f"{self.stop} - {step - form.threads}"
            self.emit.line(f"start = {first}")
            self._fill_parts(stages, parts, f"range({first}, {end}, {step})", form.threads, f"start = j + {step}")
            with self._columns("start"):
                for _ in self._each_row():
                    self.results.update(stages, stepped)
        distance = form.side
        while distance < WARP:
            for _ in self._each_row():
                with self.emit.scope():
                    self.results.update(stages, self.results.shuffled(f"int32({distance})"))
            distance *= 2
        shared, warps = self.results.shared_arrays(stages, form.shared), form.threads // form.above
        with self.emit.block(f"if lane % {form.above} == 0:"):
            for number in self._each_row():
                self.results.to_shared(stages, shared, form.place(f"lane // {form.above}", number))
        self.emit.line("cuda.syncthreads()")
        for number in self._each_row():
            self.results.from_shared(stages, shared, form.place("0", number))
        # Only what goes on with the result in all threads needs it there.
        alone = not self.step.outputs and self.walk == self.passes - 1
        with self.emit.block(f"if {'lane == 0' if alone else 'True'}:"):
            for warp in range(1, warps):
                for number in self._each_row():
                    with self.emit.scope():
                        self.results.update(stages, self.results.combined_with(shared, form.place(str(warp), number)))

    def _fill_parts(
        self, stages: Sequence[Stage], parts: list[list[Accumulators]], columns: str, apart: int = 1, last: str = ""
    ) -> None:
        """Columns into ``parts``, each of ``columns`` and those that follow, and then all parts into the first.

        A part has accumulators for each of the thread's rows.
        """
        with self.emit.block(f"for j in {columns}:"):
            for offset, part in enumerate(parts):
                with self._column(f"j + {offset * apart}"):
                    for _ in self._each_row(part):
                        self.results.update(stages, stepped)
            if last:
                self.emit.line(last)
        self._join_parts(stages, parts)

    def _join_parts(self, stages: Sequence[Stage], parts: list[list[Accumulators]]) -> None:
        """All parts into the first."""
        while len(parts) > 1:
            half = len(parts) // 2
            for part, others in zip(parts[:half], parts[half:], strict=True):
                for number in self._each_row(part):
                    with self.emit.scope():
                        self.results.update(stages, functools.partial(self.results.joined, other=others[number]))
            del parts[half:]
