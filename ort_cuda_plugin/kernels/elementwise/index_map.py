"""Index maps: gather and scatter kernels whose source or target coordinates an operator gives as expressions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...model.ir import DType
from ...program.expressions import scalar as s
from ...program.expressions.scalar import Operand, Scalar, expression, in_order, operands_first, reachable
from ...program.expressions.symbolic import Dim, ceildiv, divides, eq, hint, product
from ...program.lowering.context import Lowering, Tensor
from ...program.steps.row_program import Reduction, Values
from ...program.steps.trace import InPlace, Remake, Step, Use, View, in_place_of
from ..codegen.launch_geometry import Plane
from ..codegen.source import Combination, KernelBuilder, atomic_type, kernel_name, load_text, offset_text
from ..codegen.vectors import CALL_WORK, begins_at_vectors, cheap, vector_width
from .host_map import gather_on_host, may_hold_sizes

MOST_LOADED = 192
"""Maximum bytes of loaded vectors that a thread holds at a time; more registers would lower the occupancy."""


def unravel(index: Scalar, shape: Sequence[Scalar]) -> list[Scalar]:
    """Return the coordinates of row-major ``index`` in ``shape``. The first coordinate is not wrapped."""
    coordinates: list[Scalar] = []
    for size in reversed(shape[1:]):
        coordinates.insert(0, s.trunc_modulo(index, size))
        index = s.trunc_divide(index, size)
    return [index, *coordinates]


class Source:
    """A tensor that an index map reads: `at` is the element at coordinates (int64 Scalars)."""

    def __init__(self, maps: Loads, tensor: Tensor) -> None:
        self._maps = maps
        self.tensor = tensor
        self.dtype = tensor.dtype
        self.rank = tensor.rank
        self._dims: dict[int, Scalar] = {}

    def dim(self, axis: int) -> Scalar:
        """Return the size of a dimension as an int64 Scalar."""
        if axis not in self._dims:
            self._dims[axis] = self._maps.dim(self.tensor.shape[axis])
        return self._dims[axis]

    def at(self, coordinates: Sequence[Scalar | Dim], when: Scalar | None = None, other: Operand = 0) -> Scalar:
        """Return the element at ``coordinates``; where predicate ``when`` is false, ``other`` without a load.

        Raises TypeError unless there is one coordinate per dimension.
        """
        if len(coordinates) != self.rank:
            raise TypeError(
                f"at: wrong number of coordinates: got {len(coordinates)}, expected {self.rank}, the tensor's rank"
            )
        operands = tuple(c if isinstance(c, Scalar) else self._maps.dim(c) for c in coordinates)
        if when is not None:
            fallback = other if isinstance(other, Scalar) else s.constant(other, self.dtype)
            operands += (when, fallback)
        return Scalar(self.dtype, "load", operands, self)


@dataclass(frozen=True, eq=False)
class _Loop:
    """A reduction loop of an index map over ``index`` < ``count``.

    ``totals`` are leaves that stand for the accumulators, ``initial`` their first values, and ``next`` the expressions
    of their values after element ``index``.
    """

    count: Scalar
    index: Scalar
    initial: Values
    totals: Values
    next: Values


class Loads:
    """Loads by coordinates, for a kernel under construction; the tensors' strides become kernel parameters."""

    def __init__(self, builder: KernelBuilder) -> None:
        self._builder = builder
        emit = builder.emit
        emit.handlers["load"] = self._load
        emit.handlers["dim"] = lambda x: builder.integer(x.value)
        emit.handlers["code"] = self._code
        self._pointers: dict[Source, tuple[str, list[str]]] = {}

    def dim(self, value: Dim) -> Scalar:
        """Return a size as an int64 Scalar. The size becomes a parameter of the kernel."""
        if isinstance(value, int) and value in (0, 1):
            return s.constant(value, DType.INT64)
        return Scalar(DType.INT64, "dim", (), value)

    def dims(self, values: Sequence[Dim]) -> list[Scalar]:
        return [self.dim(value) for value in values]

    def source(self, tensor: Tensor) -> Source:
        return Source(self, tensor)

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors that the kernel loads so far."""
        return [source.tensor for source in self._pointers]

    def code(self, source: Source, row: Scalar, index: Scalar, bits: int) -> Scalar:
        """Return code ``index`` of row ``row`` as int32. Rows hold codes of 2, 4 or 8 ``bits``, low bits first."""
        if bits == 8:
            return s.cast(source.at([row, index]), DType.INT32)
        byte = source.at([row, index >> (8 // bits).bit_length() - 1])
        return Scalar(DType.INT32, "code", (byte, index), bits)

    def _code(self, x: Scalar) -> str:
        byte, index = (self._builder.emit.value(operand) for operand in x.operands)
        return self._builder.emit.assign(f"code{x.value}({byte}, {index})")

    def _parameters(self, source: Source, written: bool = False) -> tuple[str, list[str]]:
        if source not in self._pointers:
            pointer = self._builder.tensor(source.tensor, written=written)
            strides = [
                "0" if dim == 1 else self._builder.stride(stride)
                for dim, stride in zip(source.tensor.shape, source.tensor.strides, strict=True)
            ]
            self._pointers[source] = pointer, strides
        return self._pointers[source]

    def _load(self, x: Scalar) -> str:
        emit, source = self._builder.emit, x.value
        pointer, strides = self._parameters(source)
        names = [emit.value(c) for c in x.operands[: source.rank]]
        text = load_text(pointer, offset_text(list(zip(names, strides, strict=True))), x.dtype)
        if len(x.operands) == source.rank:
            return emit.assign(text)
        condition, other = x.operands[source.rank :]
        when, fallback, result = emit.value(condition), emit.value(other), emit.fresh()
        emit.line(f"{result} = {fallback}")
        with emit.block(f"if {when}:"):
            emit.line(f"{result} = {text}")
        return result


class IndexMap(Loads):
    """A kernel over the elements of ``shape``; ``coordinates`` (int64 Scalars) stand for those of a thread's element.

    Consecutive threads are adjacent along the last dimension of ``order``, a permutation of the dimensions. ``view``
    may replace each source tensor by a view of it.
    """

    def __init__(
        self, ctx: Lowering, shape: Sequence[Dim], order: Sequence[int] = (), view: View = lambda x: x
    ) -> None:
        super().__init__(KernelBuilder())
        self._ctx = ctx
        emit = self._builder.emit
        emit.handlers["fold"] = self._fold
        self._size = product(shape)
        self._loads: dict[Source, int | None] = {}
        """Number of elements that a thread loads, by source; None for loads in a loop of unknown length."""
        self._loops = 0
        self._shifts: dict[Scalar, tuple[int, int]] = {}
        """Loads by `near`: the axis, and the shift along it."""
        self._view = view
        self._axes = [axis for axis in order or range(len(shape)) if shape[axis] != 1]
        self._dims = [shape[axis] for axis in self._axes] or [1]
        zero = s.constant(0, DType.INT64)
        self.coordinates = [zero if dim == 1 else Scalar(DType.INT64, "coordinate") for dim in shape]

    def _begin(self, width: int = 1) -> str:
        """Emit the coordinates of the first of a thread's ``width`` elements, adjacent along the fastest dimension.

        Return the coordinate along the fastest dimension.
        """
        *outer, columns = self._dims
        vectors = ceildiv(columns, width)
        is_row = vectors == 1 and bool(outer)
        self._plane = Plane(self._ctx, self._builder, outer if is_row else [*outer, vectors])
        *names, column = [*self._plane.names, "int64(0)"] if is_row else self._plane.names
        for axis, name in zip(self._axes, names, strict=False):
            self._builder.emit.bind(self.coordinates[axis], name)
        if width > 1:
            return self._builder.emit.assign(f"{column} * {width}")
        if self._axes:
            self._builder.emit.bind(self.coordinates[self._axes[-1]], column)
        return column

    def source(self, tensor: Tensor) -> Source:
        return Source(self, self._view(tensor))

    def near(self, source: Source, coordinates: Sequence[Scalar], axis: int, shift: int) -> Scalar:
        """Return the element ``shift`` positions after ``coordinates`` along ``axis``; 0 outside of the source.

        ``coordinates`` must be inside. If the axis is contiguous, a thread loads vectors, which several shifts share.
        """
        if shift == 0:
            return source.at(coordinates)
        neighbor = coordinates[axis] + shift
        inside = neighbor >= 0 if shift < 0 else neighbor < source.dim(axis)
        load = source.at([*coordinates[:axis], neighbor, *coordinates[axis + 1 :]], inside)
        self._shifts[load] = axis, shift
        return load

    def number(self, x: Tensor) -> Scalar:
        """Return the element of x as a Scalar. The Run fails unless x has exactly one element."""
        self._ctx.require(eq(x.size, 1), f"an input that must have one element is {x!r}")
        leaf = Scalar(x.dtype, "leaf")
        element = self._builder.element(x)
        if element is None:
            element = self._builder.emit.assign(load_text(self._builder.tensor(x), "0", x.dtype))
        self._builder.emit.bind(leaf, element)
        return leaf

    def fold(self, reduction: Reduction, count: Scalar, fn: Callable[[Scalar], Sequence[Scalar]]) -> Values:
        """Reduce the elements ``fn(i)`` for i in 0..count-1 (int64), in this order; return the accumulators."""
        index = Scalar(DType.INT64, "index")
        elements = tuple(fn(index))
        initial = reduction.initial(tuple(x.dtype for x in elements))
        totals = tuple(Scalar(x.dtype, "accumulator") for x in initial)
        loop = _Loop(count, index, initial, totals, reduction.step(totals, elements))
        return tuple(Scalar(x.dtype, "fold", (), (loop, number)) for number, x in enumerate(initial))

    def _load(self, x: Scalar) -> str:
        self._count(x.value)
        return super()._load(x)

    def _count(self, source: Source) -> None:
        before = self._loads.get(source, 0)
        self._loads[source] = None if before is None or self._loops else before + 1

    def _fold(self, x: Scalar) -> str:
        emit = self._builder.emit
        loop: _Loop
        number: int
        loop, number = x.value
        names = self._folded(loop)
        if names is None:
            names = [emit.fresh("a") for _ in loop.initial]
            for total, name, initial in zip(loop.totals, names, loop.initial, strict=True):
                emit.line(f"{name} = {emit.value(initial)}")
                emit.bind(total, name)
            count, index = emit.value(loop.count), emit.fresh("i")
            self._loops += 1
            with emit.block(f"for {index} in range({count}):"):
                emit.bind(loop.index, emit.assign(f"int64({index})"))
                # Compute all new values before the first assignment, since each may read all accumulators.
                values = [emit.value(value) for value in loop.next]
                for name, value in zip(names, values, strict=True):
                    emit.line(f"{name} = {value}")
            self._loops -= 1
        chosen: str = names[number]
        return chosen

    def _folded(self, loop: _Loop) -> list[str] | None:
        """Return the variables of the loop's accumulators if the loop is emitted and in scope, else None."""
        names = [self._builder.emit.bound(total) for total in loop.totals]
        return None if None in names else [name for name in names if name is not None]

    def store(
        self,
        destination: Tensor,
        coordinates: Sequence[Scalar],
        value: Scalar,
        when: Scalar | None,
        how: Combination | None = None,
        remake: Remake | None = None,
    ) -> None:
        """Emit the store of ``value`` at ``coordinates`` of ``destination``, and launch the kernel.

        Elements whose predicate ``when`` (None: true) is false are not stored. With ``how`` the store is an atomic
        update.
        """
        emit = self._builder.emit
        if how is not None:
            stored = atomic_type(destination.dtype, how)
            destination = Tensor(
                stored, destination.shape, destination.buffer, strides=destination.strides, offset=destination.offset
            )
        target = Source(self, destination)
        if when is None and how is None and self._store_vectors(target, coordinates, value):
            self._launch(remake)
            return
        self._begin()

        def write(pointer: str, offset: str) -> None:
            if how is None:
                emit.store(pointer, offset, value)
            else:
                emit.combine(pointer, offset, value, how)

        pointer, strides = self._parameters(target, written=True)
        with emit.block(f"if {self._plane.inside}:"):
            names = [emit.value(c) for c in coordinates]
            offset = offset_text(list(zip(names, strides, strict=True)))
            if when is None:
                write(pointer, offset)
            else:
                condition = emit.value(when)
                with emit.block(f"if {condition}:"):
                    write(pointer, offset)
        self._launch(remake)

    def _store_vectors(self, target: Source, coordinates: Sequence[Scalar], value: Scalar) -> bool:
        """Emit a vectorized kernel body, in which a thread stores a vector; return False if it does not pay off.

        The device must be a GPU, and the destination contiguous along the fastest dimension.
        """
        if self._ctx.device.emulated or not self._axes or list(coordinates) != self.coordinates:
            return False
        column, expressions = self.coordinates[self._axes[-1]], in_order([value])
        if any(x.op == "fold" for x in expressions) or target.tensor.strides[self._axes[-1]] != 1:
            return False
        moved = [x for x in expressions if x.op == "load" and _has_neighbors(x, column)]
        around = self._around(expressions, moved, column)
        joined = [x for group in around for x in group]
        work = _work(value, column, [*moved, *joined])
        width = vector_width(self._dims, [value.dtype, *(x.dtype for x in (*moved, *joined))], work)
        moved = [x for x in moved if x not in joined]
        while width > 1 and sum(x.dtype.itemsize for x in moved) * width > MOST_LOADED:
            width //= 2
        # Without vectorized loads, vectors only pay off if a vector is a whole row: otherwise the single loads of
        # adjacent threads would no longer coalesce.
        if width == 1 or (not moved and not joined and self._dims[-1] != width):
            return False
        emit, first = self._builder.emit, self._begin(width)

        def address(source: Source, at: Sequence[Scalar]) -> tuple[str, str]:
            pointer, strides = self._parameters(source, written=source is target)
            names = [first if c is column else emit.value(c) for c in at]
            return pointer, emit.assign(offset_text(list(zip(names, strides, strict=True))))

        def is_vector(source: Source, at: Sequence[Scalar]) -> bool:
            """Tell whether all accesses are aligned, whole vectors: then no code for single elements is needed."""
            x = source.tensor
            others = [stride for stride, c in zip(x.strides, at, strict=True) if c is not column]
            return begins_at_vectors(x, width) and all(divides(width, number) for number in (*others, self._dims[-1]))

        with emit.block(f"if {self._plane.inside}:"):
            lanes: dict[Scalar, tuple[str, str]] = {}
            shifted = [x for group in around for x in self._loaded_around(group, first, width).items()]
            for x in moved:
                source, at = x.value, x.operands[: x.value.rank]
                self._count(source)
                pointer, where = address(source, at)
                name = emit.lanes(pointer, width)
                condition = emit.value(x.operands[source.rank]) if len(x.operands) > source.rank else ""
                if is_vector(source, at):
                    emit.line(f"load_lanes_inside({name}, 0, {pointer}, {where}, {condition or 'True'}, {width})")
                    if condition and x.operands[-1].op == "constant" and x.operands[-1].value == 0:
                        condition = ""  # the vector load above returns zeros if the condition is false
                else:
                    with emit.block(f"if {condition or 'True'}:"):
                        emit.line(f"load_row({name}, {pointer}, {where}, 0, {where} + {width}, {width}, 1)")
                lanes[x] = name, condition
            pointer, where = address(target, coordinates)
            stored = emit.lanes(pointer, width)
            with emit.block(f"for e in range({width}):"):
                emit.bind(column, emit.assign(f"{first} + e"))
                for x, text in shifted:
                    emit.bind(x, emit.assign(text))
                for x, (name, condition) in lanes.items():
                    text = load_text(name, "e", x.dtype)
                    if condition:
                        text = f"choose({condition}, {text}, {emit.value(x.operands[-1])})"
                    emit.bind(x, emit.assign(text))
                emit.store(stored, "e", value)
            if is_vector(target, coordinates):
                emit.line(f"store_lanes({stored}, 0, {pointer}, {where}, 0, {where} + {width}, True, {width}, 1)")
            else:
                emit.line(f"store_row({stored}, {pointer}, {where}, 0, {where} + {width}, {width}, 1)")
        return True

    def _around(self, expressions: Sequence[Scalar], moved: Sequence[Scalar], column: Scalar) -> list[list[Scalar]]:
        """Group the loads that differ only in their shift (`near`) along ``column``, including those without shift."""
        groups: dict[tuple[Source, tuple[Scalar, ...]], list[Scalar]] = {}
        for x in expressions:
            if x not in self._shifts:
                continue
            axis, _ = self._shifts[x]
            source: Source = x.value
            tensor = source.tensor
            if self.coordinates[axis] is column and tensor.strides[axis] == 1 and tensor.shape[axis] == self._dims[-1]:
                others = tuple(c for number, c in enumerate(x.operands[: source.rank]) if number != axis)
                groups.setdefault((source, others), []).append(x)
        for (source, others), group in groups.items():
            axis, _ = self._shifts[group[0]]
            here = (*others[:axis], column, *others[axis:])
            group += [x for x in moved if x.value is source and x.operands == here]
        return list(groups.values())

    def _loaded_around(self, group: Sequence[Scalar], first: str, width: int) -> dict[Scalar, str]:
        """Emit one load of adjacent vectors for a group of `_around`; return each load's expression for lane ``e``."""
        emit, source = self._builder.emit, group[0].value
        axis, _ = self._shifts[group[0]]
        shifts = {x: self._shifts[x][1] if x in self._shifts else 0 for x in group}
        reach = max(-(-abs(shift) // width) for shift in shifts.values())
        pointer, strides = self._parameters(source)
        at = [first if number == axis else emit.value(c) for number, c in enumerate(group[0].operands[: source.rank])]
        origin = emit.assign(offset_text(list(zip(at, strides, strict=True))))
        begin = emit.assign(f"{origin} - {first}")
        self._count(source)
        name = emit.lanes(pointer, (2 * reach + 1) * width)
        columns = self._builder.integer(self._dims[-1])
        emit.line(f"load_around({name}, {pointer}, {origin}, {begin}, {begin} + {columns}, {width}, {reach})")
        return {x: load_text(name, f"e + {reach * width + shift}", x.dtype) for x, shift in shifts.items()}

    def walk(self, destination: Tensor, axis: int, index: Scalar, value: Scalar, over: Tensor | None) -> None:
        """Emit a loop that stores ``value`` for each ``index`` along ``axis``, in order, and launch the kernel.

        The destination may overwrite ``over``, a source.
        """
        emit = self._builder.emit
        self._begin()
        pointer, strides = self._parameters(Source(self, destination), written=True)
        count = self._builder.integer(destination.shape[axis])
        self._loops += 1
        with emit.block(f"if {self._plane.inside}:"), emit.block(f"for walked in range({count}):"):
            emit.bind(index, emit.assign("int64(walked)"))
            names = [emit.value(c) for c in (*self.coordinates[:axis], index, *self.coordinates[axis:])]
            emit.store(pointer, offset_text(list(zip(names, strides, strict=True))), value)
        self._loops -= 1
        self._launch(in_place=in_place_of(over, destination))

    def _launch(self, remake: Remake | None = None, in_place: Sequence[InPlace] = ()) -> None:
        uses = {
            source.tensor: Use(elements=self._size * count)
            for source, count in self._loads.items()
            if count is not None
        }
        grid, block = self._plane.grid, self._plane.block
        name = kernel_name(self._ctx)
        self._builder.launch(self._ctx, name, grid, block, uses, remake=remake, in_place=in_place)
        self._loads.clear()  # their keys refer to this object: break the cycle
        self._pointers.clear()


def _work(value: Scalar, column: Scalar, moved: Sequence[Scalar]) -> int:
    """Estimate the operations of ``value`` that a thread repeats for each element of its vector."""
    depends: dict[Scalar, bool] = {}
    for x in operands_first([value]):
        depends[x] = x is column or any(depends[operand] for operand in x.operands)
    cheap_ones = {column, *moved}
    return sum(1 if x.op in cheap or x in cheap_ones else CALL_WORK for x, varies in depends.items() if varies)


def _has_neighbors(x: Scalar, column: Scalar) -> bool:
    """Tell whether load x reads adjacent elements in memory for adjacent values of ``column``."""
    source: Source = x.value
    along = [axis for axis, c in enumerate(x.operands[: source.rank]) if c is column]
    if len(along) != 1 or source.tensor.strides[along[0]] != 1:
        return False
    return column not in reachable(c for c in x.operands if c is not column)


def gather_map(
    ctx: Lowering, shape: Sequence[Dim], dtype: DType, fn: Callable[[IndexMap, list[Scalar]], Scalar]
) -> Tensor:
    """Return a new tensor whose element at coordinates c is ``fn(maps, c)``, an expression of `Source.at` loads.

    The host computes small int64 tensors from shape arithmetic.
    """

    def on_device() -> Tensor:
        result = ctx.empty(shape, dtype)

        def remake(view: View) -> Sequence[Step]:
            with ctx.recording() as steps:
                gather_into(ctx, view(result), fn, view)
            return steps

        gather_into(ctx, result, fn, remake=remake)
        return result

    if not may_hold_sizes(shape, dtype):
        return on_device()
    maps = IndexMap(ctx, shape)
    return gather_on_host(ctx, expression(fn(maps, maps.coordinates)), maps.coordinates, shape, on_device)


def gather_into(
    ctx: Lowering,
    result: Tensor,
    fn: Callable[[IndexMap, list[Scalar]], Scalar],
    view: View = lambda x: x,
    remake: Remake | None = None,
) -> None:
    """Store ``fn(maps, c)`` (`gather_map`) in ``result``, of any strides. ``view`` may replace sources by views."""
    order = list(range(result.rank))
    if not result.is_contiguous:
        order.sort(key=lambda axis: hint(result.strides[axis]), reverse=True)
    maps = IndexMap(ctx, result.shape, order, view)
    maps.store(result, maps.coordinates, _element_of(result, fn(maps, maps.coordinates)), None, remake=remake)


def _element_of(tensor: Tensor, value: object) -> Scalar:
    element = expression(value)
    if element.dtype is not tensor.dtype:
        raise TypeError(
            f"element of a result: got type {element.dtype.name}, expected {tensor.dtype.name}. cast() the element"
        )
    return element


def walk_map(
    ctx: Lowering,
    shape: Sequence[Dim],
    dtype: DType,
    fn: Callable[[IndexMap, list[Scalar]], Scalar],
    axis: int | None = None,
    over: Tensor | None = None,
) -> Tensor:
    """Gather (`gather_map`) with one thread for all elements along ``axis``, in order; by default the last axis.

    The result may overwrite a source ``over`` of its shape: then ``fn`` may only read elements of ``over`` at the
    result's own position or later along the axis.
    """
    axis = len(shape) - 1 if axis is None else axis
    result = ctx.empty(shape, dtype)
    maps, index = IndexMap(ctx, [*shape[:axis], *shape[axis + 1 :]]), Scalar(DType.INT64, "index")
    at = [*maps.coordinates[:axis], index, *maps.coordinates[axis:]]
    maps.walk(result, axis, index, _element_of(result, fn(maps, at)), over)
    return result


def scatter_map(
    ctx: Lowering,
    shape: Sequence[Dim],
    destination: Tensor,
    fn: Callable[[IndexMap, list[Scalar]], tuple[Sequence[Scalar], Scalar, Scalar | None]],
    how: Combination | None = None,
) -> None:
    """Scatter: for each c in ``shape``, ``fn(maps, c)`` returns coordinates in ``destination``, value and predicate.

    Values whose predicate is false are not stored; None stands for true. If several values have the same target, an
    arbitrary one is stored. With ``how`` all are combined atomically, in any order; elements must then have 4 or 8
    bytes.
    """
    maps = IndexMap(ctx, shape)
    coordinates, value, when = fn(maps, maps.coordinates)
    maps.store(destination, coordinates, _element_of(destination, value), when, how)
