"""Split row reductions: on a GPU, several blocks reduce parts of each row, if rows are few and long.

So a sum over a whole tensor, or a normalization of few large groups, occupies all multiprocessors. The reductions of
one pass take two launches: the first stores the accumulators of the parts, the second combines them. An elementwise
kernel then computes the other results.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...model.ir import NARROW_FLOATS, DType
from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar, in_order, reachable
from ...program.expressions.symbolic import Dim, ceildiv, hint, le, product
from ...program.lowering.context import Lowering, Tensor
from ...program.lowering.shapes import broadcast_strides, collapse
from ...program.steps.row_program import Reduction, Row, Stage, grouped_stages
from ...program.steps.steps import Input, Map, Output, Rows, Substitution, used_inputs
from ..codegen.vectors import VECTOR_BYTES, is_dense
from ..elementwise.map import launch_map
from .reduce import RowKernel
from .row_in_registers import RowForm

LONG = 16384
"""Columns of a contiguous row above which it may be split; shorter rows fit the registers of a block."""
ROWS_PER_MULTIPROCESSOR = 2
"""Rows per multiprocessor from which one block per row keeps the GPU busy."""
THREADS = 256  # threads per block for contiguous rows
LANES = 16  # elements per thread for contiguous rows
MOST_PARTS = 65535  # maximum parts of a row: the maximum gridDim.y
STRIDED_THREADS, STRIDED_LANES = 32, (64, 32, 16, 8)
"""For rows along a strided axis: threads per row, and the columns per thread to choose from; fewer give more blocks."""
STRIDED_LONG = 2048
"""Columns of a row along a strided axis above which it may be split; shorter rows take longer with two launches."""


def launch_rows(ctx: Lowering, step: Rows) -> None:
    """Launch a row program, in one kernel or with split rows."""
    form = None if ctx.device.emulated else _part_form(ctx, step)
    if form is None:
        RowKernel(ctx, step).launch()
    else:
        _SplitRows(ctx, step, form, form.threads == STRIDED_THREADS).launch()


def _part_form(ctx: Lowering, step: Rows) -> RowForm | None:
    """Return the layout of a part of a row, for the expected sizes; None if rows are not split."""
    columns, rows = product(step.shape[axis] for axis in step.axes), product(step.row_shape)
    if hint(columns) <= STRIDED_LONG:
        return None
    axes = sorted(step.axes)
    placed = [broadcast_strides(x, step.shape) for _, x in step.inputs]
    dims, strides = collapse([step.shape[axis] for axis in axes], [tuple(p[axis] for axis in axes) for p in placed])
    sizes = [x.dtype.itemsize for (_, x), along in zip(step.inputs, strides, strict=True) if is_dense(along, dims)]
    across = [axis for axis, dim in enumerate(step.shape) if axis not in step.axes and dim != 1]
    # Along a strided axis, the elements of adjacent rows are adjacent in memory.
    if not sizes and across and any(own[across[-1]] == 1 for own in placed):
        form = _strided_form(ctx, columns, rows)
    elif hint(columns) > LONG and hint(rows) < ROWS_PER_MULTIPROCESSOR * ctx.device.multiprocessors:
        width = VECTOR_BYTES // max(sizes) if sizes else 1
        form = RowForm(THREADS, width, LANES // width)
    else:
        form = None
    stages = [stage for group in grouped_stages(x for x, _ in step.all_outputs) for stage in group]
    has_constants = all(x.op == "constant" for stage in stages for x in stage.initial)
    if form is None or not stages or not has_constants or not _has_maps(step):
        return None
    return form if ctx.settled(le(ceildiv(columns, form.capacity), MOST_PARTS)) else None


def _strided_form(ctx: Lowering, columns: Dim, rows: Dim) -> RowForm | None:
    """Return the layout of a part of rows along a strided axis; None if there are blocks enough without a split.

    A block reduces a part of `STRIDED_THREADS` adjacent rows.
    """
    blocks = hint(ceildiv(rows, STRIDED_THREADS))
    if ROWS_PER_MULTIPROCESSOR * blocks >= ctx.device.multiprocessors:
        return None
    forms = [RowForm(STRIDED_THREADS, 1, lanes) for lanes in STRIDED_LANES]
    busy = (x for x in forms if blocks * hint(ceildiv(columns, x.capacity)) >= ctx.device.multiprocessors)
    return next(busy, forms[-1])


def _has_maps(step: Rows) -> bool:
    """Tell whether Maps can compute all results, elementwise and per row, from those of the reductions."""
    known = {x: Scalar(x.dtype, "leaf") for x in step.scalars if x.op == "reduced"}
    after = Substitution(dict(known))
    if step.row.index in reachable(after(x) for x, _ in step.outputs):
        return False
    rank = len(step.shape)
    of_rows = used_inputs(step.inputs, [after(x) for x, _ in step.row_outputs])
    return all(x.rank == rank for _, x in step.row_outputs) and all(
        x.shape[axis - rank + x.rank] == 1 for _, x in of_rows for axis in step.axes if axis >= rank - x.rank
    )


class _SplitRows:
    """Launches of one row program with split rows."""

    def __init__(self, ctx: Lowering, step: Rows, form: RowForm, is_strided: bool) -> None:
        self.ctx, self.step, self.form, self.is_strided = ctx, step, form, is_strided
        columns = product(step.shape[axis] for axis in step.axes)
        self.parts = ceildiv(columns, form.capacity)
        self.count = Scalar(DType.INT64, "leaf")
        self.inputs: list[Input] = [*step.inputs, (self.count, ctx.host_tensor([columns], (1,), DType.INT64))]
        self.known: dict[Scalar, Scalar] = {step.row.count: self.count}
        """For the row's count and each reduction that has been launched: the expression of a leaf of ``inputs``."""

    def launch(self) -> None:
        step = self.step
        groups = grouped_stages(x for x, _ in step.all_outputs)
        for number, group in enumerate(groups):
            partial = self._reduce(group)
            if number == len(groups) - 1 and not step.outputs and self._finish(group, partial):
                return
            self._combine(group, partial)
        after = Substitution(dict(self.known))
        for shape, outputs in ((step.shape, step.outputs), (step.row_shape, step.row_outputs)):
            if outputs:
                stored = tuple((after(x), y) for x, y in outputs)
                launch_map(self.ctx, Map(step.nodes, shape, used_inputs(self.inputs, [x for x, _ in stored]), stored))

    def _reduce(self, group: Sequence[Stage]) -> dict[Stage, list[Tensor]]:
        """Launch the kernel that reduces the parts; return each stage's accumulators, tensors [rows..., parts]."""
        ctx, step, before = self.ctx, self.step, Substitution(dict(self.known))
        partial: dict[Stage, list[Tensor]] = {}
        outputs: list[Output] = []
        for old in group:
            stage = Stage(old.reduction, old.initial, tuple(before(x) for x in old.elements))
            partial[old] = []
            for number, initial in enumerate(stage.initial):
                result = Scalar(initial.dtype, "reduced", stage.elements, (stage, number))
                dtype = _wide(initial.dtype)
                partial[old].append(ctx.empty((*step.row_shape, self.parts), dtype))
                x = partial[old][-1]
                by_row = Tensor(dtype, step.row_shape, x.buffer, strides=x.strides[:-1])
                outputs.append((result if dtype is initial.dtype else s.cast(result, dtype), by_row))
        inputs = used_inputs(self.inputs, [x for x, _ in outputs])
        rows = Rows(step.nodes, step.shape, inputs, (), step.axes, step.row, tuple(outputs))
        RowKernel(ctx, rows, self.form, self.parts, strided_parts=self.is_strided).launch()
        return partial

    def _totals(
        self, group: Sequence[Stage], partial: dict[Stage, list[Tensor]], row: Row
    ) -> tuple[list[Input], dict[Scalar, Scalar]]:
        """Return the inputs of a row program that combines the parts, and its expressions for the group's results."""
        inputs: list[Input] = []
        totals: dict[Scalar, Scalar] = {}
        reduced = [x for x in in_order([x for x, _ in self.step.all_outputs]) if x.op == "reduced"]
        for stage in group:
            leaves = [Scalar(x.dtype, "leaf") for x in partial[stage]]
            inputs += zip(leaves, partial[stage], strict=True)
            results = row.reduce_all(_combination(stage), *leaves)
            totals |= {x: results[x.value[1]] for x in reduced if x.value[0] is stage}
        return inputs, totals

    def _combine(self, group: Sequence[Stage], partial: dict[Stage, list[Tensor]]) -> None:
        """Launch the kernel that combines the parts, and make its results inputs of later launches."""
        row = Row()
        inputs, totals = self._totals(group, partial, row)
        outputs: list[Output] = []
        for old, total in totals.items():
            result, leaf = self.ctx.empty(self.step.row_shape, total.dtype), Scalar(total.dtype, "leaf")
            outputs.append((total, _with_part_axis(result)))
            self.inputs.append((leaf, result))
            self.known[old] = leaf if total.dtype is old.dtype else s.cast(leaf, old.dtype)
        self._launch_combination(inputs, outputs, row)

    def _finish(self, group: Sequence[Stage], partial: dict[Stage, list[Tensor]]) -> bool:
        """Launch one kernel that combines the parts of the last pass and computes the per-row results.

        Returns False if these results need other inputs.
        """
        row = Row()
        inputs, totals = self._totals(group, partial, row)
        known = {old: total if total.dtype is old.dtype else s.cast(total, old.dtype) for old, total in totals.items()}
        after = Substitution({**self.known, **known})
        outputs = [(after(x), _with_part_axis(y)) for x, y in self.step.row_outputs]
        inputs.append((self.count, self.inputs[len(self.step.inputs)][1]))
        given = {leaf for leaf, _ in inputs}
        if any(x.op == "leaf" and x not in given for x in reachable(x for x, _ in outputs)):
            return False
        self._launch_combination(inputs, outputs, row)
        return True

    def _launch_combination(self, inputs: Sequence[Input], outputs: Sequence[Output], row: Row) -> None:
        shape = (*self.step.row_shape, self.parts)
        used = used_inputs(inputs, [x for x, _ in outputs])
        axes = frozenset([len(shape) - 1])
        RowKernel(self.ctx, Rows(self.step.nodes, shape, used, (), axes, row, tuple(outputs))).launch()


def _combination(stage: Stage) -> Reduction:
    """Return the reduction that combines the stage's accumulators of all parts of a row."""
    initial = tuple(s.constant(x.value, _wide(x.dtype)) for x in stage.initial)
    return Reduction(lambda dtypes: initial, stage.reduction.combine, stage.reduction.combine)


def _wide(dtype: DType) -> DType:
    """Return the type that stores accumulators of ``dtype`` without rounding: float32 for narrower floats."""
    return DType.FLOAT32 if dtype in NARROW_FLOATS else dtype


def _with_part_axis(x: Tensor) -> Tensor:
    """View x [rows...] as [rows..., 1], with one part in the last axis."""
    return Tensor(x.dtype, (*x.shape, 1), x.buffer, strides=(*x.strides, 1), offset=x.offset)
