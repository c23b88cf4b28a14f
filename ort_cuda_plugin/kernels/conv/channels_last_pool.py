"""Pooling of channels-last images, on a GPU: adjacent threads process adjacent channels.

A thread computes a vector of channels for several adjacent output pixels along the last two dimensions, so that their
windows share loads.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from ...model.ir import DType
from ...program.expressions.symbolic import Dim, ceildiv, divides, hint, le, product
from ...program.lowering.context import Lowering, Tensor
from ...program.steps.windows import Windows
from ..codegen.launch_geometry import Plane, coordinates, extent, index_type, reach
from ..codegen.simt_fragments import Element
from ..codegen.source import KernelBuilder, kernel_name, register_type
from ..codegen.vectors import VECTOR_BYTES, begins_at_vectors, vector_threads
from .adjacent_windows import Reads, batches_of, reads_of

PIXELS, ROWS = 4, 2
"""Maximum output pixels per thread along the last dimension, and along the second-to-last."""
SIDE = 8
"""Maximum adjacent threads on the channels of the same pixels: their vectors fill a cache line of 8 x 16 bytes."""
MAX_READS = 32
"""Maximum vector loads per thread, which are all unrolled."""
THREADS = 512
"""Wanted threads per multiprocessor; a launch with fewer computes fewer output pixels per thread."""
_types = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)


@dataclass(frozen=True)
class _Form:
    """What one thread computes: ``width`` channels of ``rows`` x ``pixels`` adjacent output pixels."""

    width: int
    pixels: int
    rows: int

    def counts(self, rank: int) -> list[int]:
        """Return the thread's number of output pixels along each of ``rank`` spatial dimensions."""
        return [1, self.rows, self.pixels][-rank:]


def _fits(ctx: Lowering, x: Tensor, out: Tensor, windows: Windows, kind: str) -> bool:
    """Tell whether the kernel supports these tensors: their channels form aligned vectors.

    For a maximum, each window must also overlap x, since the kernel clamps coordinates to the border of x.
    """
    if ctx.device.emulated or x.dtype not in _types or not all(isinstance(size, int) for size in windows.kernel):
        return False
    width = VECTOR_BYTES // x.dtype.itemsize
    for y in (x, out):
        others = [y.shape[1], *(stride for axis, stride in enumerate(y.strides) if axis != 1)]
        if y.strides[1] != 1 or not begins_at_vectors(y, width) or not all(divides(width, size) for size in others):
            return False
    if kind == "average":
        return True
    pads = [
        (pad, size) for side in (windows.begin, windows.end) for pad, size in zip(side, windows.kernel, strict=True)
    ]
    reached = all(ctx.settled(le(pad + 1, size)) for pad, size in pads)
    return reached and max(windows.dilations) == 1 and all(ctx.settled(le(1, size)) for size in windows.size)


def _reads(form: _Form, windows: Windows) -> list[Reads]:
    """Return the elements that a thread's windows read along each spatial dimension."""
    kernel = [operator.index(size) for size in windows.kernel]
    counts = form.counts(len(kernel))
    return [reads_of(*each) for each in zip(counts, kernel, windows.strides, windows.dilations, strict=True)]


def _choose_form(ctx: Lowering, x: Tensor, out: Tensor, windows: Windows) -> _Form | None:
    """Choose the number of a thread's output pixels; None if even one pixel needs more than `MAX_READS` loads."""
    width = VECTOR_BYTES // x.dtype.itemsize
    elements, wanted = hint(product(out.shape)), THREADS * ctx.device.multiprocessors
    sizes = [(PIXELS >> halved, ROWS) for halved in range(PIXELS.bit_length())] + [(1, 1)]
    for pixels, rows in sizes:
        form = _Form(width, pixels, rows)
        reads = math.prod(len(along) for along in _reads(form, windows))
        few = elements < wanted * width * pixels * rows
        if reads <= MAX_READS and (pixels * rows == 1 or not few):
            return form
    return None


def launch_channel_pool(ctx: Lowering, x: Tensor, out: Tensor, windows: Windows, kind: str, include_pad: bool) -> bool:
    """Launch the kernel, bit-identical to `Pool`; return False if it does not support these tensors or windows."""
    form = _choose_form(ctx, x, out, windows) if _fits(ctx, x, out, windows, kind) else None
    if form is not None:
        _ChannelPool(ctx, x, out, windows, kind, include_pad, form).launch()
    return form is not None


class _ChannelPool:
    """Generator of the kernel for one pooling step."""

    def __init__(
        self, ctx: Lowering, x: Tensor, out: Tensor, windows: Windows, kind: str, include_pad: bool, form: _Form
    ) -> None:
        self.ctx, self.x, self.out, self.windows, self.width = ctx, x, out, windows, form.width
        self.is_average, self.include_pad = kind == "average", include_pad
        self.element = Element(x.dtype.short)
        self.counts = form.counts(x.rank - 2)
        self.reads = _reads(form, windows)
        self.builder = KernelBuilder()
        self.emit = self.builder.emit

    def launch(self) -> None:
        ctx, builder, emit, out = self.ctx, self.builder, self.emit, self.out
        vectors = operator.index(out.shape[1]) // self.width
        side = next(size for size in range(min(SIDE, vectors), 0, -1) if vectors % size == 0)
        spaces = [ceildiv(size, count) for size, count in zip(out.shape[2:], self.counts, strict=True)]
        dims = [out.shape[0], vectors // side, *spaces, side]
        items = product(dims)
        plane = Plane(ctx, builder, [items], vector_threads(ctx.device, items))
        self.dtype = index_type(ctx, items, reach(self.x.shape, self.x.strides), reach(out.shape, out.strides))
        self.index = register_type(self.dtype)
        extents = [extent(builder, dim, self.dtype) for dim in dims[1:]]
        with emit.block(f"if {plane.inside}:"):
            flat = "column" if self.dtype is DType.INT64 else emit.assign("int32(column)")
            image, group, *pixels, beside = coordinates(emit, flat, extents, self.dtype)
            channel = self._index(f"({group} * {side} + {beside}) * {self.width}")
            first = [self._index(f"{pixel} * {count}") for pixel, count in zip(pixels, self.counts, strict=True)]
            self._totals(image, channel, first)
            self._results(image, channel, first)
        builder.launch(ctx, kernel_name(ctx), plane.grid, plane.block, bounded=True)

    def _index(self, text: str) -> str:
        """Assign ``text``, cast to the index type, to a variable and return it."""
        return self.emit.assign(f"{self.index}({text})")

    def _size(self, value: Dim) -> str:
        return self.builder.stride(value, self.dtype)

    def _lanes(self, pixel: Sequence[int]) -> int:
        """Return the index in array ``total`` of the first channel of the thread's output pixel ``pixel``."""
        number = 0
        for at, count in zip(pixel, self.counts, strict=True):
            number = number * count + at
        return number * self.width

    def _along(self, axis: int, first: str) -> tuple[dict[int, str], dict[int, str]]:
        """Emit the memory offsets, along a dimension, of the elements of x that the thread's windows read, and the
        tests that these are inside x.

        Returns the names of both by offset from the first window's start. An average skips elements outside. Max
        pooling needs no tests: it clamps to the border element, which the window contains anyway.
        """
        windows = self.windows
        start = self._index(f"{first} * {windows.strides[axis]} - {self._size(windows.begin[axis])}")
        limit, step = self._size(windows.size[axis]), self._size(self.x.strides[2 + axis])
        positions, tests = {}, {}
        for offset in sorted(self.reads[axis]):
            at = self._index(f"{start} + {offset}")
            if self.is_average:
                tests[offset] = self.emit.assign(f"({at} >= 0) & ({at} < {limit})")
            else:
                at = self._index(f"min(max({at}, {self.index}(0)), {self.index}({limit} - 1))")
            positions[offset] = self._index(f"{at} * {step}")
        if self.is_average:
            self._cover(axis, start, tests)
        return positions, tests

    def _cover(self, axis: int, start: str, tests: dict[int, str]) -> None:
        """Emit, for each of the thread's output pixels along a dimension, how many elements an average divides by."""
        if self.include_pad:
            end = self._size(self.windows.size[axis] + self.windows.end[axis])
            tests = {offset: self.emit.assign(f"{start} + {offset} < {end}") for offset in tests}
        terms: list[list[str]] = [[] for _ in range(self.counts[axis])]
        for offset, along in self.reads[axis].items():
            for pixel, _ in along:
                terms[pixel].append(f"choose({tests[offset]}, int32(1), int32(0))")
        self.covered.append([self.emit.assign(f"int32({' + '.join(each)})") for each in terms])

    def _totals(self, image: str, channel: str, first: Sequence[str]) -> None:
        """Emit the loads, and the accumulation of all windows in ``total``; each window adds its elements in order."""
        emit, width = self.emit, self.width
        pointer = self.builder.tensor(self.x)
        self.covered: list[list[str]] = []
        positions, tests = zip(*(self._along(axis, begin) for axis, begin in enumerate(first)), strict=True)
        emit.line(f"total = registers_f32({width * math.prod(self.counts)})")
        for e in range(width * math.prod(self.counts)):
            emit.line(f"total[{e}] = {'float32(0)' if self.is_average else 'float32(-math.inf)'}")
        columns = sorted(self.reads[-1])
        rows = list(itertools.product(*(sorted(along) for along in self.reads[:-1])))
        batches = batches_of(rows, len(columns))
        emit.line(f"found = lanes_of({pointer}, {width * len(columns) * len(batches[0])})")
        base = self._index(f"{image} * {self._size(self.x.strides[0])} + {channel}")
        for batch in batches:
            taken = [(*row, column) for row in batch for column in columns]
            for number, offsets in enumerate(taken):
                if offsets[-1] == columns[0]:
                    outer = [of_axis[offset] for of_axis, offset in zip(positions, offsets[:-1], strict=False)]
                    first_of_row = self._index(" + ".join([base, *outer]))
                at = self._index(f"{first_of_row} + {positions[-1][offsets[-1]]}")
                inside = [of_axis[offset] for of_axis, offset in zip(tests, offsets, strict=True) if of_axis]
                emit.line(
                    f"load_lanes_inside(found, {number * width}, {pointer}, int64({at}),"
                    f" {' & '.join(inside) or 'True'}, {width})"
                )
            for number, offsets in enumerate(taken):
                serving = [
                    [pixel for pixel, _ in along[offset]] for along, offset in zip(self.reads, offsets, strict=True)
                ]
                # Unroll here: for sm_100, NVVM leaves some of these loops rolled, and puts the arrays in local memory.
                for e in range(width):
                    emit.line(f"value = {self.element.load('found', str(number * width + e))}")
                    for pixel in itertools.product(*serving):
                        total = f"total[{self._lanes(pixel) + e}]"
                        new = (
                            f"{total} + value"
                            if self.is_average
                            else f"choose((value > {total}) | (value != value), value, {total})"
                        )
                        emit.line(f"{total} = {new}")

    def _results(self, image: str, channel: str, first: Sequence[str]) -> None:
        """Emit the stores of the results."""
        emit, out = self.emit, self.out
        pointer = self.builder.tensor(out, written=True)
        emit.line(f"stored = lanes_of({pointer}, {self.width})")
        steps, ends = [self._size(stride) for stride in out.strides[2:]], [self._size(size) for size in out.shape[2:]]
        begin = [f"{image} * {self._size(out.strides[0])}", channel]
        base = self._index(" + ".join([*begin, *(f"{at} * {step}" for at, step in zip(first, steps, strict=True))]))
        for pixel in itertools.product(*(range(count) for count in self.counts)):
            inside = [f"({begin} + {at} < {end})" for begin, at, end in zip(first, pixel, ends, strict=True) if at]
            with emit.block(f"if {' & '.join(inside) or 'True'}:"):
                moved = [f"{at} * {step}" for at, step in zip(pixel, steps, strict=True) if at]
                to = self._index(" + ".join([base, *moved]))
                if self.is_average:
                    covered = " * ".join(of_axis[at] for of_axis, at in zip(self.covered, pixel, strict=True))
                    emit.line(f"divisor = float32(max(int32({covered}), int32(1)))")
                    emit.line("inverse = float32(1) / divisor")
                with emit.block(f"for e in range({self.width}):"):
                    emit.line(f"value = total[{self._lanes(pixel)} + e]")
                    if self.is_average:
                        self._divide()
                    emit.line(f"stored[e] = {self.element.cast('value')}")
                emit.line(
                    f"store_lanes(stored, 0, {pointer}, int64({to}), 0, int64({to}) + {self.width}, True,"
                    f" {self.width}, 1)"
                )

    def _divide(self) -> None:
        """Emit the division of ``value`` by the integer ``divisor``, whose reciprocal ``inverse`` is computed once.

        An FMA computes the remainder exactly, so a quotient that is not subnormal is correctly rounded (Markstein,
        1990). For an infinite value the remainder is NaN, and the product with the reciprocal is the result.
        """
        self.emit.line("quotient = value * inverse")
        self.emit.line("rest = fma_f32(-quotient, divisor, value)")
        self.emit.line("value = choose(rest == rest, fma_f32(rest, inverse, quotient), quotient)")
