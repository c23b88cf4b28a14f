"""Row programs (reductions, and elementwise results computed from them) in one launch.

Reductions that do not depend on each other share a pass over the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from ...model.ir import DType
from ...program.expressions.symbolic import Dim, ceildiv, divides, hint, le, product
from ...program.lowering.context import Tensor
from ...program.lowering.shapes import broadcast_strides, collapse
from ...program.steps.row_program import Stage, grouped_stages
from ...program.steps.steps import Input
from ...program.steps.trace import Use
from ..codegen.launch_geometry import SERIAL_THREADS, Plane, coordinates, extent, index_type
from ..codegen.row_cache import NO_CACHE, RowCache, find_by_column, find_row_cache
from ..codegen.source import kernel_name, offset_text, register_type
from ..codegen.vectors import is_dense
from .block_reduce import WARP, Accumulators, stepped
from .row_columns import REGISTERS, RowColumns
from .row_in_registers import choose_row_form, row_height
from .strided_axis import StridedSchedule, choose_strided, row_vectors
from .vector_io import RowMoves

SERIAL_COLUMNS = 32
"""Maximum columns of a row that a single thread reduces on a GPU, except along a strided axis (`choose_strided`).

On the emulated device a single thread always does, since the threads of a block run on one CPU core.
"""
MOST_TURNS = 8
"""Maximum columns per thread for which the kernel unrolls the loop along a strided axis."""
SERIAL_PARTS = 4
"""Independent partial accumulators of a thread that reduces a row without other threads."""
LONG_COLUMNS = 1024
"""Columns above which a thread has `LONG_PARTS` accumulators, new ones per `PIECE` columns, on the emulated device."""
LONG_PARTS = 16  # partial accumulators of a thread that reduces a long row
PIECE = 4096
"""Columns of a long row after which a thread starts new partial accumulators, to reduce rounding errors."""
WARP_COLUMNS = 2048
"""Maximum columns of a row that one warp reduces."""
BLOCK = 256
"""Threads per row for rows of more than `WARP_COLUMNS` columns: all threads of a block."""


class RowKernel(RowColumns):
    """Generator of the kernel of one row program.

    ``threads`` threads share a row: one, some threads of a warp, a warp, or a block. In each pass, thread t reduces
    columns t, t + threads, ..., or its vectors of a row that is held in registers (`RowForm`). Partial results are
    combined by shuffles, and across warps in shared memory.

    With ``part_form`` a row is split into ``parts`` of ``part_form.capacity`` columns; a block reduces one part, the
    results have one element per part, and there are no elementwise results. With ``strided_parts`` a block reduces the
    same part of several adjacent rows, and only the capacity of ``part_form`` counts.
    """

    def launch(self) -> None:
        builder, emit, elements, rows = self.builder, self.emit, self.step.outputs, self.step.row_outputs
        outputs = self.step.all_outputs
        sources = builder.to_load(self.step.inputs)
        # Per-row results have stride 0 along the columns: so they do not prevent the collapse of column axes.
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
        kept = self._find_cache(groups, sources, column_strides)
        kept = NO_CACHE if self.strided is not None else kept
        if ((self.threads > 1 and adjacent) or self.part_form is not None) and not self.strided_parts:
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

        addresses = []
        for number, (by_row, by_column) in enumerate(zip(row_strides, column_strides, strict=True)):
            tensor = sources[number][1] if number < len(sources) else outputs[number - len(sources)][1]
            pointer = builder.tensor(tensor, written=number >= len(sources))
            if self.moves is not None and self.is_exact:
                self.moves.find_whole(pointer, tensor, by_row)
            terms = [(name, builder.stride(stride)) for name, stride in zip(names, by_row, strict=True)]
            offset = emit.assign(offset_text(terms))
            addresses.append((pointer, offset, [builder.stride(stride) for stride in by_column]))
        for (leaf, _), address in zip(sources, addresses, strict=False):
            self.sources[leaf] = address
        if self.strided is not None and self.strided.width > 1:
            self._place_rows(sources, row_strides)
        element_addresses = addresses[len(sources) : len(sources) + len(elements)]
        row_addresses = addresses[len(sources) + len(elements) :]

        with emit.block(f"if {inside}:"), self.moves.loads_ahead() if self.moves else nullcontext():
            self.passes = len(groups)
            for group in groups:
                self._reduce(group)
            self.pass_number += 1
            with emit.block(f"if {'exists' if self.shares_rows else 'True'}:"):
                if elements and self.form is not None:
                    strides_of = column_strides[len(sources) :]
                    self._store_lanes(element_addresses, [is_dense(strides, column_dims) for strides in strides_of])
                elif elements:
                    self._hoist(x for x, _ in elements)
                    with self._columns():
                        for (value, _), (pointer, base, strides) in zip(elements, element_addresses, strict=True):
                            emit.store(pointer, self._offset(base, strides), value)
                if rows:
                    with emit.block("if lane == 0:"):
                        self._store_rows(row_addresses, row_strides[len(addresses) - len(rows) :])
        uses = {x: Use(times=len(self.load_passes.get(leaf, ()))) for leaf, x in sources}
        bounded = block[0] * block[1] > BLOCK
        builder.launch(self.ctx, kernel_name(self.ctx), grid, block, uses, shared_bytes, bounded=bounded)

    def _find_cache(
        self, groups: Sequence[Sequence[Stage]], sources: Sequence[Input], column_strides: Sequence[Sequence[Dim]]
    ) -> RowCache:
        """Choose the values that are cached between passes; none on the emulated device, as caching saves no time."""
        if self.ctx.device.emulated:
            return NO_CACHE
        pairs = zip(sources, column_strides, strict=False)
        varying = {leaf for (leaf, _), strides in pairs if any(stride != 0 for stride in strides)}
        walks = [[x for stage in group for x in stage.elements] for group in groups]
        walks.append([x for x, _ in self.step.outputs])
        self.by_column = find_by_column(walks, varying.__contains__)
        return find_row_cache(walks, varying.__contains__)

    def _choose_form(
        self,
        groups: Sequence[Sequence[Stage]],
        kept: RowCache,
        sources: Sequence[Tensor],
        column_dims: Sequence[Dim],
        column_strides: Sequence[Sequence[Dim]],
    ) -> None:
        """Choose a layout (`RowForm`) that holds a row in registers, if the row and its cached values fit."""
        tensors = [*sources, *(y for _, y in self.step.outputs)]
        moved = [x for x, s in zip(tensors, column_strides, strict=False) if is_dense(s, column_dims)]
        if kept.slots and kept.type not in REGISTERS:
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

    def _collapse(self, placed: Sequence[tuple[Dim, ...]], reduced: bool) -> tuple[list[Dim], list[tuple[Dim, ...]]]:
        axes = [axis for axis in range(len(self.shape)) if (axis in self.axes) == reduced]
        return collapse(
            [self.shape[axis] for axis in axes], [tuple(strides[axis] for axis in axes) for strides in placed]
        )

    def _choose_threads(self, columns: Dim, rows: Dim, adjacent: bool, width: int) -> int:
        """Return the threads per row for the expected sizes; the kernel is correct for other sizes as well.

        ``adjacent`` tells that the columns are contiguous; ``width`` is the number of rows per vector (`row_vectors`).
        """
        if self.strided_parts:
            self.strided = StridedSchedule(WARP)
            return WARP
        if self.ctx.device.emulated or hint(columns) <= SERIAL_COLUMNS:
            return 1
        # On a strided axis, adjacent threads get adjacent rows, so that they load adjacent elements.
        if not adjacent and hint(rows) >= WARP:
            self.strided = choose_strided(self.ctx.device, columns, rows, width)
            return self.strided.threads if self.strided is not None else 1
        return WARP if hint(columns) <= WARP_COLUMNS else BLOCK

    def _rows(self, dims: list[Dim]) -> tuple[tuple[Dim, Dim, Dim], tuple[int, int, int], list[str], str]:
        """Emit the thread's row coordinates; return grid, block, coordinates, and the test that the row exists."""
        if self.threads == 1 and not self.long:
            plane = Plane(self.ctx, self.builder, dims or [1], SERIAL_THREADS)
            self.emit.line("lane = 0")
            return plane.grid, plane.block, plane.names[: len(dims)], plane.inside
        rows = product(dims)
        height = BLOCK // 2 // WARP if self.threads == WARP else 1
        if self.form is not None and self.threads <= WARP:
            height = row_height(self.ctx, rows, self.threads)
        across, along, step = "x", "y", 1
        if self.strided is not None:
            across, along, height, step = "y", "x", self.strided.rows, self.strided.width
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
            # Shuffles and barriers need all threads: those without a row compute the last row, but do not store it.
            self.emit.line(f"exists = {exists}")
            self.emit.line(f"row = choose(exists, row, {index}({n_rows} - {step}))")
        names = coordinates(self.emit, "row", extents, dtype) if dims else []
        if self.part_form is not None:
            self.emit.line("part = int64(cuda.blockIdx.y)")
            self.emit.line(f"column0 = part * {self.part_form.capacity}")
            self.emit.line(f"stop = min(column0 + {self.part_form.capacity}, {self.n})")
        block_shape = (self.threads, height, 1)
        if self.strided is not None:
            block_shape = (self.strided.side, self.threads, 1)
        return (ceildiv(rows, height), self.parts, 1), block_shape, names, "True" if self.shares_rows else exists

    def _reduce(self, stages: Sequence[Stage]) -> None:
        """Emit one pass over the row that computes all ``stages``."""
        self.pass_number += 1
        for row in self.rows_of_thread:
            row.update(self.results.started(stages))
        if self.strided is not None:
            self._reduce_strided(stages, self.strided)
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

    def _reduce_parts(self, stages: Sequence[Stage]) -> str:
        """Reduce the row in several independent accumulators of one thread; return the source of the first column left.

        The chains of dependent additions are shorter, so that the loop is faster and rounding errors are smaller.
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
                self.results.update(stages, self.results.joined(parts[0][0]))
        return f"{self.n} & -{LONG_PARTS}"

    def _reduce_strided(self, stages: Sequence[Stage], form: StridedSchedule) -> None:
        if form.width == 1:
            self._hoist(x for stage in stages for x in stage.elements)
        own = [{stage: row[stage] for stage in stages} for row in self.rows_of_thread]
        columns = product(self.shape[axis] for axis in self.axes)
        turns = ceildiv(columns, form.threads)
        if self.part_form is None and isinstance(turns, int) and turns <= MOST_TURNS:
            # Unroll, so that all loads are in flight at once.
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
                index = form.shared_index(f"lane // {form.above}", number)
                self.results.copy_shared(stages, shared, index, stores=True)
        self.emit.line("cuda.syncthreads()")
        for number in self._each_row():
            self.results.copy_shared(stages, shared, form.shared_index("0", number), stores=False)
        # After the last pass, if there are only per-row results, lane 0 stores them: only it needs all warps' results.
        alone = not self.step.outputs and self.pass_number == self.passes - 1
        with self.emit.block(f"if {'lane == 0' if alone else 'True'}:"):
            for warp in range(1, warps):
                for number in self._each_row():
                    with self.emit.scope():
                        self.results.update(stages, self.results.joined(shared, form.shared_index(str(warp), number)))

    def _fill_parts(
        self, stages: Sequence[Stage], parts: list[list[Accumulators]], columns: str, apart: int = 1, last: str = ""
    ) -> None:
        """Emit a loop ``for j in columns`` that adds column ``j + i * apart`` to accumulators i of ``parts``.

        Then combine all parts in the first one. A part has accumulators for each of the thread's rows. ``last`` is a
        line for the end of the loop's body.
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
        """Combine the accumulators of all ``parts`` in the first one, in the order of a binary tree."""
        while len(parts) > 1:
            half = len(parts) // 2
            for part, others in zip(parts[:half], parts[half:], strict=True):
                for number in self._each_row(part):
                    with self.emit.scope():
                        self.results.update(stages, self.results.joined(others[number]))
            del parts[half:]
