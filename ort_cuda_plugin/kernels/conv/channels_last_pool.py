"""Pooling of images with channels last, on a GPU: neighbouring threads take neighbouring channels.

A thread has a vector of channels at some places that lie side by side along the last two dimensions, so that what it
reads serves several windows.
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
from .adjacent_windows import Reads, batches_of, reads_of, size_text

__all__ = ["launch_channel_pool"]

PLACES, ROWS = 4, 2
"""Maximum output pixels of a thread along the last dimension, and along the one before."""
SIDE = 8
"""Vectors of channels that neighbouring threads take before they go on to the next places: a line of the caches."""
MAX_READS = 32
"""Vectors that a thread reads, at most: all of them are written out."""
THREADS = 512
"""For each multiprocessor; a thread has less where there would be fewer of them."""
_types = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)


@dataclass(frozen=True)
class _Form:
    """A thread has ``width`` channels at ``places`` neighbouring places of ``rows`` neighbouring lines."""

    width: int
    places: int
    rows: int

    def counts(self, rank: int) -> list[int]:
        """How many results the thread has along each dimension."""
        return [1, self.rows, self.places][-rank:]


def _fits(ctx: Lowering, x: Tensor, out: Tensor, windows: Windows, kind: str) -> bool:
    """Whether channels lie side by side in whole vectors, and each window of a maximum has its nearest place in x."""
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
    """Along each dimension, what a thread reads."""
    kernel = [operator.index(size) for size in windows.kernel]
    counts = form.counts(len(kernel))
    return [reads_of(*each) for each in zip(counts, kernel, windows.strides, windows.dilations, strict=True)]


def _choose_form(ctx: Lowering, x: Tensor, out: Tensor, windows: Windows) -> _Form | None:
    """None where a thread would read too much even for one place."""
    width = VECTOR_BYTES // x.dtype.itemsize
    elements, wanted = hint(product(out.shape)), THREADS * ctx.device.multiprocessors
    sizes = [(PLACES >> halved, ROWS) for halved in range(PLACES.bit_length())] + [(1, 1)]
    for places, rows in sizes:
        form = _Form(width, places, rows)
        reads = math.prod(len(along) for along in _reads(form, windows))
        few = elements < wanted * width * places * rows
        if reads <= MAX_READS and (places * rows == 1 or not few):
            return form
    return None


def launch_channel_pool(ctx: Lowering, x: Tensor, out: Tensor, windows: Windows, kind: str, include_pad: bool) -> bool:
    """Launches the kernel, with the bits of `Pool`; False where it has no form for these tensors."""
    form = _choose_form(ctx, x, out, windows) if _fits(ctx, x, out, windows, kind) else None
    if form is not None:
        _ChannelPool(ctx, x, out, windows, kind, include_pad, form).launch()
    return form is not None


class _ChannelPool:
    """Emits the kernel."""

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
            image, group, *places, beside = coordinates(emit, flat, extents, self.dtype)
            channel = self._index(f"({group} * {side} + {beside}) * {self.width}")
            first = [self._index(f"{place} * {count}") for place, count in zip(places, self.counts, strict=True)]
            self._totals(image, channel, first)
            self._results(image, channel, first)
        builder.launch(ctx, kernel_name(ctx), plane.grid, plane.block, bounded=True)

    def _index(self, text: str) -> str:
        """A number that counts elements or places."""
        return self.emit.assign(f"{self.index}({text})")

    def _size(self, value: Dim) -> str:
        return size_text(self.builder, self.dtype, value)

    def _lanes(self, place: Sequence[int]) -> int:
        """Where ``total`` has one of the thread's results."""
        number = 0
        for at, count in zip(place, self.counts, strict=True):
            number = number * count + at
        return number * self.width

    def _along(self, axis: int, first: str) -> tuple[dict[int, str], dict[int, str]]:
        """By offset from the first window's begin along a dimension, where in x that is, and whether it is in x.

        An average reads nothing outside. A maximum reads the nearest place instead, which the window has as well.
        """
        windows = self.windows
        start = self._index(f"{first} * {windows.strides[axis]} - {self._size(windows.begin[axis])}")
        limit, step = self._size(windows.size[axis]), self._size(self.x.strides[2 + axis])
        places, tests = {}, {}
        for offset in sorted(self.reads[axis]):
            at = self._index(f"{start} + {offset}")
            if self.is_average:
                tests[offset] = self.emit.assign(f"({at} >= 0) & ({at} < {limit})")
            else:
                at = self._index(f"min(max({at}, {self.index}(0)), {self.index}({limit} - 1))")
            places[offset] = self._index(f"{at} * {step}")
        if self.is_average:
            self._cover(axis, start, tests)
        return places, tests

    def _cover(self, axis: int, start: str, tests: dict[int, str]) -> None:
        """For each of the thread's places along a dimension, how many positions of a window an average divides by."""
        if self.include_pad:
            end = self._size(self.windows.size[axis] + self.windows.end[axis])
            tests = {offset: self.emit.assign(f"{start} + {offset} < {end}") for offset in tests}
        terms: list[list[str]] = [[] for _ in range(self.counts[axis])]
        for offset, along in self.reads[axis].items():
            for place, _ in along:
                terms[place].append(f"choose({tests[offset]}, int32(1), int32(0))")
        self.covered.append([self.emit.assign(f"int32({' + '.join(each)})") for each in terms])

    def _totals(self, image: str, channel: str, first: Sequence[str]) -> None:
        """The sums or maxima of the thread's windows, in ``total``; each window's elements come in order."""
        emit, width = self.emit, self.width
        pointer = self.builder.tensor(self.x)
        self.covered: list[list[str]] = []
        places, tests = zip(*(self._along(axis, begin) for axis, begin in enumerate(first)), strict=True)
        emit.line(f"total = registers_f32({width * math.prod(self.counts)})")
        for e in range(width * math.prod(self.counts)):
            emit.line(f"total[{e}] = {'float32(0)' if self.is_average else 'float32(-math.inf)'}")
        columns = sorted(self.reads[-1])
        lines = list(itertools.product(*(sorted(along) for along in self.reads[:-1])))
        batches = batches_of(lines, len(columns))
        emit.line(f"found = lanes_of({pointer}, {width * len(columns) * len(batches[0])})")
        base = self._index(f"{image} * {self._size(self.x.strides[0])} + {channel}")
        for batch in batches:
            taken = [(*line, column) for line in batch for column in columns]
            for number, offsets in enumerate(taken):
                if offsets[-1] == columns[0]:
                    outer = [of_axis[offset] for of_axis, offset in zip(places, offsets[:-1], strict=False)]
                    row = self._index(" + ".join([base, *outer]))
                at = self._index(f"{row} + {places[-1][offsets[-1]]}")
                inside = [of_axis[offset] for of_axis, offset in zip(tests, offsets, strict=True) if of_axis]
                emit.line(
                    f"load_lanes_inside(found, {number * width}, {pointer}, int64({at}),"
                    f" {' & '.join(inside) or 'True'}, {width})"
                )
            for number, offsets in enumerate(taken):
                serving = [
                    [place for place, _ in along[offset]] for along, offset in zip(self.reads, offsets, strict=True)
                ]
                # Without a loop: for sm_100 NVVM leaves some loops of these in place, and the arrays in memory.
                for e in range(width):
                    emit.line(f"value = {self.element.load('found', str(number * width + e))}")
                    for place in itertools.product(*serving):
                        total = f"total[{self._lanes(place) + e}]"
                        new = (
                            f"{total} + value"
                            if self.is_average
                            else f"choose((value > {total}) | (value != value), value, {total})"
                        )
                        emit.line(f"{total} = {new}")

    def _results(self, image: str, channel: str, first: Sequence[str]) -> None:
        """The stores."""
        emit, out = self.emit, self.out
        pointer = self.builder.tensor(out, written=True)
        emit.line(f"stored = lanes_of({pointer}, {self.width})")
        steps, ends = [self._size(stride) for stride in out.strides[2:]], [self._size(size) for size in out.shape[2:]]
        begin = [f"{image} * {self._size(out.strides[0])}", channel]
        base = self._index(" + ".join([*begin, *(f"{at} * {step}" for at, step in zip(first, steps, strict=True))]))
        for place in itertools.product(*(range(count) for count in self.counts)):
            inside = [f"({begin} + {at} < {end})" for begin, at, end in zip(first, place, ends, strict=True) if at]
            with emit.block(f"if {' & '.join(inside) or 'True'}:"):
                moved = [f"{at} * {step}" for at, step in zip(place, steps, strict=True) if at]
                to = self._index(" + ".join([base, *moved]))
                if self.is_average:
                    covered = " * ".join(of_axis[at] for of_axis, at in zip(self.covered, place, strict=True))
                    emit.line(f"divisor = float32(max(int32({covered}), int32(1)))")
                    emit.line("inverse = float32(1) / divisor")
                with emit.block(f"for e in range({self.width}):"):
                    emit.line(f"value = total[{self._lanes(place)} + e]")
                    if self.is_average:
                        self._divide()
                    emit.line(f"stored[e] = {self.element.cast('value')}")
                emit.line(
                    f"store_lanes(stored, 0, {pointer}, int64({to}), 0, int64({to}) + {self.width}, True,"
                    f" {self.width}, 1)"
                )

    def _divide(self) -> None:
        """``value`` by ``divisor``, an integer: its one ``inverse`` serves many.

        What is left of ``value`` is exact, so the quotient is the one that is nearest (Markstein, 1990), subnormal ones
        aside. Nothing is left of what is not finite.
        """
        self.emit.line("quotient = value * inverse")
        self.emit.line("rest = fma_f32(-quotient, divisor, value)")
        self.emit.line("value = choose(rest == rest, fma_f32(rest, inverse, quotient), quotient)")
