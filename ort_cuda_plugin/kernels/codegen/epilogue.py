"""Epilogues: code that computes results from an accumulator and elements of other tensors, and stores them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ...model.ir import DType
from ...program.expressions.scalar import Scalar, operands_first
from ...program.expressions.symbolic import Dim, divides, product
from ...program.lowering.context import Lowering, Tensor
from ...program.lowering.shapes import broadcast_strides, collapse
from ...program.steps.steps import Map, Sums
from .launch_geometry import coordinates, extent, index_type
from .source import Emitter, KernelBuilder, Parameters, load_text, offset_text, register_type
from .vectors import begins_at_vectors, vector_load, vector_store

PREFIX = "e_"
"""Prefix of an epilogue's variables; no other variable of a kernel begins with it."""
MARK, ROW, LANE = "@", "#", "$"
"""Placeholders in an epilogue's lines for the suffix of a variable: per column, per row, and per vector element."""
VECTOR = 4
"""Adjacent columns that one vectorized access loads or stores."""


@dataclass(frozen=True)
class Epilogue:
    """Source text of an epilogue. A kernel inserts it once per row, column and element that a thread processes.

    A mark is the suffix of the variables of one column or row, such as "_0". ``row_lines`` follow the definition of
    ``row`` and ``batch``, inside the bounds check. ``column_lines`` compute the values that all elements of column
    ``column<mark>`` share. ``element_lines`` compute one element from accumulator ``total<mark>``, and ``store_lines``
    store it. In a kernel that processes several rows at a time, ``row`` and ``total`` also end in the row's mark; the
    rows share their other outer coordinates.

    With a ``width`` of `VECTOR` a mark stands for a vector of ``width`` adjacent columns. ``column<mark>`` is the first
    of these, a multiple of ``width``, and each accumulator ends in ``_<lane>``. ``column_loads`` and ``element_loads``
    load whole vectors, ahead of the lines for each lane.
    """

    row_lines: tuple[str, ...] = ()
    element_lines: tuple[str, ...] = ()
    store_lines: tuple[str, ...] = ()
    column_lines: tuple[str, ...] = ()
    column_loads: tuple[str, ...] = ()
    element_loads: tuple[str, ...] = ()
    width: int = 1

    def rows(self, row: str = "") -> list[str]:
        return [line.replace(ROW, row) for line in self.row_lines]

    def columns(self, mark: str) -> list[str]:
        return [line.replace(MARK, mark) for line in (*self.column_loads, *self._of_lanes(self.column_lines))]

    def elements(self, mark: str) -> list[str]:
        """Return the lines for a column and its element, in a kernel that processes one row at a time."""
        return [*self.columns(mark), *self.inner(mark)]

    def inner(self, mark: str, row: str = "") -> list[str]:
        """Return the lines for an element; ``row`` is the row's mark. The lines of `columns` must precede them."""
        lines = (*self.element_loads, *self._of_lanes(self.element_lines))
        return [line.replace(MARK, mark).replace(ROW, row) for line in lines]

    def stores(self, mark: str, row: str = "") -> list[str]:
        return [line.replace(MARK, mark).replace(ROW, row) for line in self.store_lines]

    def _of_lanes(self, lines: Sequence[str]) -> Iterable[str]:
        return (line.replace(LANE, str(lane)) for lane in range(self.width) for line in lines)


@dataclass(frozen=True)
class RowDestination:
    """Address of a row of the result, for kernels that store without an `Epilogue`.

    ``row_lines`` compute it and must follow the definition of ``row``. Column c is at ``pointer[base + c * stride]``.
    """

    pointer: str = ""
    row_lines: tuple[str, ...] = ()
    base: str = "0"
    stride: str = "1"
    dtype: DType = DType.FLOAT32

    def stores(self, column: str, values: Sequence[str]) -> list[str]:
        """Return lines that store four float32 ``values`` to the columns from ``column`` on, a multiple of four.

        They use one vectorized store if the row is contiguous and the address is aligned.
        """
        narrow = {DType.FLOAT16: "f32_to_f16({})", DType.BFLOAT16: "f32_to_bf16({})"}.get(self.dtype, "{}")
        kind = "f32" if self.dtype is DType.FLOAT32 else "u16"
        names = [f"{PREFIX}value{i}" for i in range(len(values))]
        lines = [f"{name} = {narrow.format(value)}" for name, value in zip(names, values, strict=True)]
        step = "" if self.stride == "1" else f" * {self.stride}"
        lines.append(f"{PREFIX}at = {sum_text(self.base, f'int64({column}){step}')}")
        single = [f"{self.pointer}[{PREFIX}at + {i}{step}] = {name}" for i, name in enumerate(names)]
        if step:
            return [*lines, *single]
        return [
            *lines,
            f"if {PREFIX}is_whole:",
            f"    store_{kind}x4({self.pointer}, {PREFIX}at, {', '.join(names)})",
            "else:",
            *(f"    {line}" for line in single),
        ]


def make_row_destination(
    ctx: Lowering, step: Map, outer: Iterable[Axes], last: Axes
) -> tuple[RowDestination, Parameters]:
    """Return the destination of a step's only output, and the kernel parameters that it needs."""
    ((_, y),) = step.outputs
    emit = Emitter(PREFIX, indent=0)
    builder = KernelBuilder(PREFIX, emit)
    pointer = builder.tensor(y, written=True)
    placed = [broadcast_strides(y, step.shape)]
    terms: list[Terms] = [[]]
    for axes in outer:
        count_along(ctx, builder, step, axes, placed, terms)
    base = emit.assign(offset_text(terms[0])) if terms[0] else "0"
    (axis,) = last.dims
    size = y.dtype.itemsize
    begin = f"int32(address_of({pointer})) + (int32({base}) << {size.bit_length() - 1})"
    is_whole = f"{PREFIX}is_whole = (({begin}) & {4 * size - 1}) == 0"
    return RowDestination(pointer, (*emit.taken(), is_whole), base, builder.stride(placed[0][axis]), y.dtype), builder


@dataclass(frozen=True)
class Axes:
    """Adjacent dimensions of the result that a kernel indexes by one linear coordinate, and the coordinate's name."""

    name: str
    dims: Sequence[int]


def make_epilogue(
    ctx: Lowering, step: Map, total: Scalar, outer: Iterable[Axes], last: Axes, *, vectors: bool = False
) -> tuple[Epilogue, Parameters]:
    """Return the epilogue of a step, and its parameters, which follow the kernel's own.

    ``total`` is the leaf of the step's expressions that stands for the accumulator. ``outer`` and ``last`` together
    list all dimensions of the step, in order; ``last`` are the columns. An output may be a range of the columns. With
    ``vectors`` the epilogue loads and stores `VECTOR` columns with one access, if all tensors allow it.
    """
    emit = Emitter(PREFIX, indent=0)
    builder = KernelBuilder(PREFIX, emit)
    loaded = builder.to_load(step.inputs)
    numbers = emit.taken()
    tensors = [x for _, x in loaded] + [y for _, y in step.outputs]
    pointers = [builder.tensor(x, written=number >= len(loaded)) for number, x in enumerate(tensors)]
    placed = [broadcast_strides(x, step.shape) for x in tensors]
    is_wide = vectors and _has_vectors(step, last, list(zip(tensors, placed, strict=True)))
    pairs = zip(pointers, tensors, strict=True) if is_wide else ()
    tests = [f"is_aligned({pointer}, {VECTOR})" for pointer, x in pairs if not begins_at_vectors(x, VECTOR)]
    whole = emit.assign(" & ".join(tests)) if tests else "True"
    numbers += emit.taken()
    lane = f"_{LANE}" if is_wide else ""
    terms: list[Terms] = [[] for _ in tensors]
    emit.suffix = ROW
    for axes in outer:
        count_along(ctx, builder, step, axes, placed, terms, ROW if axes.name == "row" else "")
    conditions = _column_conditions(builder, step, last, placed, terms)
    bases = [emit.assign(offset_text(mine)) if mine else "0" for mine in terms]
    along: list[Terms] = [[] for _ in tensors]
    with emit.detached() as counting:
        emit.suffix = MARK
        count_along(ctx, builder, step, last, placed, along, MARK)
        emit.suffix = ROW
    offsets = [sum_text(base, offset_text(mine)) for base, mine in zip(bases, along, strict=True)]
    loads = list(zip(loaded, pointers, offsets, terms, along, strict=False))

    def load(pointer: str, offset: str, x: Tensor) -> str:
        """Return the source of x's element at ``offset``; if vectorized, append its vector's load to ``together``."""
        if not is_wide:
            return load_text(pointer, offset, x.dtype)
        lanes = emit.fresh().removesuffix(lane)
        together.extend(vector_load(lanes, pointer, offset, whole, VECTOR))
        return load_text(lanes, LANE, x.dtype)

    for (leaf, x), pointer, offset, _, mine in loads:
        if not mine:
            emit.bind(leaf, emit.assign(load_text(pointer, offset, x.dtype)))
    row_lines = emit.taken()
    together = list(counting)
    emit.suffix = f"{MARK}{lane}"
    shared = {leaf for leaf, _ in step.inputs} - {leaf for leaf, _ in loaded}
    for (leaf, x), pointer, offset, beneath, mine in loads:
        if mine and not beneath:
            emit.bind(leaf, emit.assign(load(pointer, offset, x)))
            shared.add(leaf)
    _hoist([value for value, _ in step.outputs], shared, emit)
    column_lines, column_loads, together = emit.taken(), together, []
    emit.suffix = f"{MARK}{ROW}{lane}"
    for (leaf, x), pointer, offset, *_ in loads:
        if emit.bound(leaf) is None:
            emit.bind(leaf, emit.assign(load(pointer, offset, x)))
    emit.bind(total, f"total{MARK}{ROW}{lane}")
    stores = []
    written = zip(pointers, offsets, conditions, strict=True)
    for (expression, _), (pointer, offset, condition) in zip(step.outputs, list(written)[len(loaded) :], strict=True):
        if not is_wide:
            stores.append(f"{condition}{pointer}[{offset}] = {emit.assign(emit.memory_form(expression))}")
            continue
        lanes = emit.fresh().removesuffix(lane)
        together.append(f"{lanes} = lanes_of({pointer}, {VECTOR})")
        emit.store(lanes, LANE, expression)
        stores.append(condition + vector_store(lanes, pointer, offset, whole, VECTOR))
    element_lines = emit.taken()
    epilogue = Epilogue(
        (*numbers, *row_lines),
        tuple(element_lines),
        tuple(stores),
        tuple(column_lines),
        (*numbers, *column_loads),
        tuple(together),
        VECTOR if is_wide else 1,
    )
    return epilogue, builder


def _column_conditions(
    builder: KernelBuilder, step: Map, last: Axes, placed: Sequence[Sequence[Dim]], terms: list[Terms]
) -> list[str]:
    """Return each tensor's store condition, as the text "if ...: ", or "" for a tensor that has all columns.

    For an output with a range of the columns, subtract the range's first column in the tensor's ``terms``.
    """
    conditions = [""] * len(terms)
    parts = step.column_parts if isinstance(step, Sums) else ()
    for number, part in enumerate(parts, len(terms) - len(parts)):
        first, end = (builder.integer(channel, DType.INT32) for channel in (part.start, part.stop))
        (axis,) = last.dims
        terms[number].append((builder.integer(-part.start * placed[number][axis]), "1"))
        conditions[number] = f"if {first} <= {last.name}{MARK} < {end}: "
    return conditions


def _has_vectors(step: Map, last: Axes, tensors: Sequence[tuple[Tensor, Sequence[Dim]]]) -> bool:
    """Tell whether each tensor that varies along the columns has rows of contiguous, whole vectors of `VECTOR`."""
    if not last.dims or not divides(VECTOR, step.shape[last.dims[-1]]):
        return False
    parts = step.column_parts if isinstance(step, Sums) else ()
    if any(part.start % VECTOR or part.stop % VECTOR for part in parts):
        return False
    for x, strides in tensors:
        if all(strides[axis] == 0 for axis in last.dims):
            continue
        *others, inner = strides[: last.dims[-1] + 1]
        if inner != 1 or x.dtype.is_packed or x.dtype.itemsize > 4:
            return False
        if not all(divides(VECTOR, stride) for stride in others):
            return False
    return True


def _hoist(results: Sequence[Scalar], shared: set[Scalar], emit: Emitter) -> None:
    """Emit the largest subexpressions of ``results`` that depend only on ``shared`` leaves.

    A ``shared`` leaf has the same value for all elements of a column. For divisions by such a subexpression, emit its
    reciprocal (`Emitter.invert`).
    """
    is_shared: dict[Scalar, bool] = {}
    for x in operands_first(results):
        of_operands = all(is_shared[y] for y in x.operands)
        is_shared[x] = x in shared or x.op == "constant" or (bool(x.operands) and of_operands)
    for value in _largest(results, is_shared):
        emit.value(value)
    for quotient in (x for x in is_shared if x.op == "div" and is_shared[x.operands[1]] and not is_shared[x]):
        emit.invert(quotient)


def _largest(expressions: Sequence[Scalar], is_shared: dict[Scalar, bool]) -> list[Scalar]:
    """Return the largest subexpressions for which ``is_shared`` is true, except leaves and constants."""
    found: dict[Scalar, None] = {}
    seen: set[Scalar] = set()
    stack = list(expressions)
    while stack:
        x = stack.pop()
        if x not in seen:
            seen.add(x)
            if not is_shared[x]:
                stack += x.operands
            elif x.operands:
                found[x] = None
    return list(found)


Terms: TypeAlias = list[tuple[str, str]]
"""Offset of an element in a tensor, as pairs (coordinate, stride): the sum of their products."""


def count_along(
    ctx: Lowering,
    builder: KernelBuilder,
    step: Map,
    axes: Axes,
    placed: Sequence[Sequence[Dim]],
    terms: list[Terms],
    mark: str = "",
) -> None:
    """Emit the coordinates along ``axes``, and append to each tensor's ``terms`` those on which its offset depends.

    ``placed`` are each tensor's strides, broadcast to the step's shape. The coordinates are computed from the kernel's
    linear coordinate ``axes.name`` with suffix ``mark``.
    """
    shape = [step.shape[axis] for axis in axes.dims]
    dims, strides = collapse(shape, [tuple(x[axis] for axis in axes.dims) for x in placed])
    if not dims:
        return
    emit = builder.emit
    if len(dims) == 1:
        names = [emit.assign(f"int64({axes.name}{mark})")]
    else:
        dtype = index_type(ctx, product(dims))
        extents = [extent(builder, dim, dtype) for dim in dims[1:]]
        names = coordinates(emit, emit.assign(f"{register_type(dtype)}({axes.name}{mark})"), extents, dtype)
    for mine, steps in zip(terms, strides, strict=True):
        pairs = [(name, builder.stride(stride)) for name, stride in zip(names, steps, strict=True)]
        mine += [pair for pair in pairs if pair[1] != "0"]


def sum_text(base: str, more: str) -> str:
    if base == "0":
        return more
    return base if more == "0" else f"{base} + {more}"
