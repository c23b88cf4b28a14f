"""K/V cache update: appends new rows, in place if the application binds past and present cache to one buffer.

Each Run may bind other buffers, so the kernel compares the addresses of past and present. If they are equal, it writes
only the new rows. A cache may be quantized to int8, to an 8-bit float, or to 4 bits: two adjacent elements in a byte,
the first in the low nibble, each stored with an offset of 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...model.ir import DType
from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import ceildiv, eq
from ...program.lowering.context import Lowering, Tensor
from ...program.lowering.shapes import broadcast_strides
from ...program.steps.trace import InPlace, Use, in_place_of
from ..codegen.launch_geometry import Plane
from ..codegen.simt_fragments import Element
from ..codegen.source import KernelBuilder, StridedTensor, kernel_name, load_text
from ..codegen.vectors import FEW_ELEMENTS, VECTOR_BYTES, vector_width

ROWS = 16
"""Consecutive cache rows per thread, and the elements per thread of `carry_over` without vectorized accesses."""


@dataclass(frozen=True, eq=False)
class CachePart:
    """The K or the V half of a cache update, tensors ``past`` and ``present`` [batch, heads, capacity, size].

    ``new`` [batch, heads, rows, size] are the rows to append. ``past`` is None if there are no earlier rows. ``scale``
    dequantizes the elements of a quantized cache: one number, or one for each channel [heads, 1, size]; None for a
    cache that is not quantized. With 4 ``bits`` a byte has two elements, and the last dimension of past and present is
    size / 2.
    """

    past: Tensor | None
    present: Tensor
    new: Tensor
    scale: Tensor | None = None
    bits: int = 8

    @property
    def elements(self) -> Tensor:
        """View of ``present`` whose sizes and strides count elements; with 4 bits a byte of ``present`` holds two."""
        if self.bits == 8:
            return self.present
        *outer, size = self.present.shape
        strides = [2 * stride for stride in self.present.strides[:-1]]
        return Tensor(self.present.dtype, (*outer, 2 * size), self.present.buffer, strides=[*strides, 1])

    @property
    def element(self) -> Element:
        """Loader of a cache element as float32, before the multiplication by the scale."""
        return CacheElement("f32", self.present.dtype, self.bits)


@dataclass(frozen=True)
class CacheElement(Element):
    """Loader of a cache element as float32: from type ``source``, or with 4 ``bits`` from a nibble, minus 8."""

    source: DType = DType.FLOAT32
    bits: int = 8

    @property
    def memory(self) -> str:
        return self.source.short if self.bits == 8 else "packed"

    def load(self, pointer: str, index: str, outer: str = "", inner: str = "") -> str:
        if self.bits == 8:
            return f"float32({load_text(pointer, index, self.source)})"
        byte = f"int32({pointer}[({index}) >> 1])"
        return f"float32((({byte} >> ((int32({index}) & 1) << 2)) & 15) - 8)"


def append(ctx: Lowering, parts: Sequence[CachePart], first: Tensor) -> None:
    """Write each part's ``present``: rows of ``past`` before row ``first`` [batch], then the rows of ``new``.

    Rows after the new ones become zero, or stay unchanged if past and present are one buffer. All parts have equal
    shapes.
    """
    builder = KernelBuilder()
    emit = builder.emit
    batch, heads, capacity, size = parts[0].present.shape
    n_capacity, n_rows = builder.integer(capacity), builder.integer(parts[0].new.shape[2])
    begins = StridedTensor(builder, first)
    width = _vector_width(ctx, parts)
    writers = [_Writer(builder, part, width) for part in parts]
    plane = Plane(ctx, builder, [batch, heads, ceildiv(capacity, ROWS), ceildiv(size, width)])
    b, h, chunk, d = plane.names
    with emit.block(f"if {plane.inside}:"):
        if width > 1:
            d = emit.assign(f"{d} * {width}")
            for writer in writers:
                writer.declare()
        emit.line(f"begin = {begins.load(b)}")
        emit.line(f"start = {chunk} * {ROWS}")
        emit.line(f"stop = min(start + {ROWS}, {n_capacity})")
        for writer in writers:
            writer.write(b, h, d, n_rows)
    uses: dict[Tensor, Use] = {}
    for part in parts:
        # With equal capacities an application usually binds one buffer: estimate the memory traffic for this case.
        if part.past is not None and ctx.settled(eq(part.past.shape[2], capacity)):
            uses |= {part.past: Use(elements=0), part.present: Use(elements=part.new.size)}
    # No guard on equal capacities: tensors of unequal sizes cannot be bound to one buffer.
    in_place = [
        InPlace(part.past.buffer, part.present.buffer, kept=True)
        for part in parts
        if part.past is not None and _is_whole(part.past) and _is_whole(part.present)
    ]
    builder.launch(ctx, kernel_name(ctx), plane.grid, plane.block, uses, in_place=in_place)


def _is_whole(x: Tensor) -> bool:
    return x.is_contiguous and x.offset == 0


def carry_over(ctx: Lowering, past: Tensor, present: Tensor) -> None:
    """Copy the ``past`` cache to a contiguous ``present`` one, unless both are bound to one buffer.

    A program that updates only some rows of the present cache needs this copy for the other rows.
    """
    past = ctx.contiguous(past)
    builder = KernelBuilder()
    source, target = builder.tensor(past), builder.tensor(present, written=True)
    count = builder.integer(present.size)
    width = 1 if ctx.device.emulated else VECTOR_BYTES // present.dtype.itemsize
    plane = Plane(ctx, builder, [ceildiv(present.size, ROWS if width == 1 else width)])
    (chunk,) = plane.names
    uses = {past: Use(elements=0), present: Use(elements=0)}
    in_place = in_place_of(past, present, kept=True)
    with builder.emit.block(f"if {plane.inside} and address_of({source}) != address_of({target}):"):
        if width > 1:
            builder.emit.line(f"lanes = lanes_of({source}, {width})")
            for function, pointer in (("load_row", source), ("store_row", target)):
                builder.emit.line(f"{function}(lanes, {pointer}, {chunk} * {width}, 0, {count}, {width}, 1)")
        else:
            builder.emit.line(f"for i in range({chunk} * {ROWS}, min({chunk} * {ROWS} + {ROWS}, {count})):")
            builder.emit.line(f"    {target}[i] = {source}[i]")
    builder.launch(ctx, kernel_name(ctx), plane.grid, plane.block, uses, in_place=in_place)


def _vector_width(ctx: Lowering, parts: Sequence[CachePart]) -> int:
    """Return the columns per thread: on a GPU a vector if rows are whole vectors without a conversion, else 1."""
    tensors = [x for part in parts for x in (part.past, part.new, part.present) if x is not None]
    moved = all(part.scale is None and part.bits == 8 for part in parts) and len({x.dtype for x in tensors}) == 1
    if ctx.device.emulated or not moved or any(x.strides[-1] != 1 for x in tensors):
        return 1
    return vector_width([FEW_ELEMENTS, parts[0].present.shape[-1]], [tensors[0].dtype], 1)


class _Writer:
    """Emitter of a thread's writes to a `CachePart`: rows ``start`` to ``stop`` - 1, ``width`` columns."""

    def __init__(self, builder: KernelBuilder, part: CachePart, width: int) -> None:
        self._emit, self._part, self._width = builder.emit, part, width
        self._past = None if part.past is None else StridedTensor(builder, part.past)
        self._before = "" if part.past is None else builder.integer(part.past.shape[2])
        self._new, self._present = StridedTensor(builder, part.new), StridedTensor(builder, part.present, written=True)
        self._scale: StridedTensor | None = None
        if part.scale is not None:
            strides = broadcast_strides(part.scale, (part.new.shape[1], 1, part.new.shape[3]))
            self._scale = StridedTensor(builder, part.scale, strides=(strides[0], strides[2]))

    def declare(self) -> None:
        """Declare the variable for the thread's vector, and one for a vector of zeros."""
        self._lanes, self._zeros = self._emit.fresh("r"), self._emit.fresh("z")
        for name in (self._lanes, self._zeros):
            self._emit.line(f"{name} = lanes_of({self._present.pointer}, {self._width})")

    def _move(self, function: str, lanes: str, x: StridedTensor, *at: str) -> None:
        offset = self._emit.assign(x.offset(*at))
        width = self._width
        self._emit.line(f"{function}({lanes}, {x.pointer}, {offset}, 0, {offset} + {width}, {width}, 1)")

    def _copy(self, b: str, h: str, d: str, source: StridedTensor | None, row: str) -> None:
        """Copy a vector of row ``row`` of ``source`` to row ``place`` of present; zeros if ``source`` is None."""
        if source is not None:
            self._move("load_row", self._lanes, source, b, h, row, d)
        self._move("store_row", self._zeros if source is None else self._lanes, self._present, b, h, "place", d)

    def write(self, b: str, h: str, d: str, rows: str) -> None:
        emit, past, present = self._emit, self._past, self._present
        emit.line("low, high = start, stop")
        if past is not None:
            with emit.block(f"if address_of({past.pointer}) == address_of({present.pointer}):"):
                emit.line(f"low, high = max(start, begin), min(stop, begin + {rows})")
        with emit.block("for place in range(low, high):"):
            emit.line("taken = place - begin")
            at = f"{present.pointer}[{present.offset(b, h, 'place', d)}]"
            with emit.block(f"if taken >= 0 and taken < {rows}:"):
                if self._width > 1:
                    self._copy(b, h, d, self._new, "taken")
                else:
                    emit.line(f"{at} = {self._encoded(b, h, d)}")
            if past is not None:
                with emit.block(f"elif taken < 0 and place < {self._before}:"):
                    if self._width > 1:
                        self._copy(b, h, d, past, "place")
                    else:
                        emit.line(f"{at} = {past.load(b, h, 'place', d)}")
            with emit.block("else:"):
                if self._width > 1:
                    self._copy(b, h, d, None, "place")
                else:
                    emit.line(f"{at} = {'136' if self._part.bits == 4 else '0'}")

    def _encoded(self, b: str, h: str, d: str) -> str:
        """Return the source of an element of new row ``taken`` in the cache's type; with 4 bits, of a byte of two."""
        part, new = self._part, self._new
        if self._scale is None:
            return new.load(b, h, "taken", d)
        if part.bits == 8:
            return self._emit.memory_form(self._quantized(b, h, d, -128, 127))
        first, second = (self._quantized(b, h, f"({d} * 2 + {i})", -8, 7) for i in (0, 1))
        return self._emit.memory_form(s.cast((first + 8) | ((second + 8) << 4), DType.UINT8))

    def _quantized(self, b: str, h: str, d: str, low: int, high: int) -> Scalar:
        """Return element d of new row ``taken``, divided by its scale, as an 8-bit float or a clamped integer."""
        part, emit = self._part, self._emit
        assert self._scale is not None
        value = Scalar(part.new.dtype, "leaf")
        emit.bind(value, emit.assign(load_text(self._new.pointer, self._new.offset(b, h, "taken", d), value.dtype)))
        scale = Scalar(DType.FLOAT32, "leaf")
        emit.bind(scale, emit.assign(self._scale.load(h, d)))
        scaled = s.cast(value, DType.FLOAT32) / scale
        if part.present.dtype.is_float:
            return s.cast(scaled, part.present.dtype)
        whole = s.minimum(s.maximum(s.round_half_even(scaled), float(low)), float(high))
        return s.cast(whole, part.present.dtype if part.bits == 8 else DType.INT32)
