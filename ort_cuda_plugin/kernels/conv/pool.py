"""Pooling over windows (maximum, average), and local response normalization."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from ...model.ir import DType
from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import Dim, ceildiv, divides, hint, le, product
from ...program.lowering.context import Lowering, Tensor
from ...program.steps.row_program import SUM
from ...program.steps.trace import Remake, Step, View
from ...program.steps.windows import Windows
from ..codegen.block_mapping import element_number
from ..codegen.launch_geometry import index_type
from ..codegen.simt_fragments import THREADS, Element, indent
from ..codegen.source import KernelBuilder, register_type, text_property
from ..codegen.vectors import VECTOR_BYTES
from ..elementwise.index_map import IndexMap, gather_into, gather_map
from .channels_last_pool import launch_channel_pool

EMULATED_WIDTH = 32
"""Maximum adjacent output pixels per thread of pooling on the emulated device."""

MAX_TAPS, MAX_CHANNELS = 64, 16
"""Maximum elements of a pooling window, and maximum channels of a normalization, that a kernel unrolls."""

MOST_STRIDE = 4
"""Maximum stride of `VectorPool`. For stride s a thread loads s vectors per row of its windows."""

_lowest = {"f32": "float32(-math.inf)", "f64": "float64(-math.inf)", "f16": "float32(-math.inf)"}
_lowest |= {"bf16": "float32(-math.inf)", "i8": "int32(-128)", "u8": "int32(0)"}
_integer_lowest = {DType.INT8: -128, DType.UINT8: 0}
_registers = {"i8": "int32", "u8": "int32"}


@dataclass(frozen=True)
class Pool:
    """Maximum or average over windows along the last ``rank`` dimensions of contiguous [planes, z, y, x].

    A plane is one channel of one image. A thread computes ``width`` adjacent output pixels along x: one on a GPU, 8 to
    `EMULATED_WIDTH` on the emulated device. ``stride`` is the stride along x if it is 1 or 2; 0 makes it a parameter.
    With ``indices`` (only for ``width`` 1) the kernel also stores the offset of each maximum in x; with
    ``column_major`` the offset counts the plane's elements in column-major order. With ``include_pad`` averages divide
    by the number of window elements in the padded input, which ends at ``padded_end``. ``index`` is the type of offsets
    in the tensors.
    """

    kind: str  # "max" or "average"
    storage: str
    rank: int
    indices: bool = False
    column_major: bool = False
    include_pad: bool = False
    index: DType = DType.INT32
    width: int = 1
    stride: int = 0

    @property
    def axes(self) -> str:
        return "zyx"[3 - self.rank :]

    @property
    def element(self) -> Element:
        return Element(self.storage)

    @property
    def register(self) -> str:
        return _registers.get(self.storage, self.element.accumulator)

    @property
    def step(self) -> str:
        return str(self.stride or "stride_x")

    @property
    def name(self) -> str:
        return f"{self.kind}_pool{self.rank}d_{self.storage}"

    @property
    def start(self) -> str:
        """Initial value of an accumulator."""
        return _lowest[self.storage] if self.kind == "max" else f"{self.register}(0)"

    def setup(self) -> list[str]:
        """Compute the thread's first output pixel ``o<axis>``, its window's start ``<axis>0``, ``plane``, ``row``."""
        axes, integer = self.axes, register_type(self.index)
        lines = [
            indent(element_number(self.index), 0),
            f"rest = {integer}(number // strips)",
            f"ox = int32(int32(number - rest * strips) * {self.width})",
            f"row = {integer}(rest * out_x)",
        ]
        for axis in reversed(axes[:-1]):
            lines += [
                f"quotient = {integer}(rest // out_{axis})",
                f"o{axis} = int32(rest - quotient * out_{axis})",
                "rest = quotient",
            ]
        lines += [f"{axis}0 = int32(o{axis} * stride_{axis} - pad_{axis})" for axis in axes]
        lines.append("plane = rest")
        return [*lines, *(f"plane = {integer}(plane * in_{axis})" for axis in axes)]

    @text_property
    def body(self) -> str:
        lines = self.setup()
        lines.append(f"totals = array_pointer(cuda.local.array({self.width}, {self.register}))")
        lines += self._for_each([f"totals[i] = {self.start}"])
        lines += ["best_at = plane"] if self.indices else []
        lines += self._windows()
        lines += self._store()
        lines += self._index(self.axes) if self.indices else []
        return indent("\n".join(lines), 1)

    def _for_each(self, body: list[str]) -> list[str]:
        """Repeat ``body`` for the thread's output pixels ``i``."""
        if self.width == 1:
            return ["i = int32(0)", *body]
        return [f"for i in range({self.width}):", *(f"    {line}" for line in body)]

    def _windows(self) -> list[str]:
        """Accumulate the elements of the thread's windows."""
        return [
            "reach = int32((kernel_x - 1) * dilation_x)",
            f"whole = x0 >= 0 and x0 + {self.width - 1} * {self.step} + reach < in_x",
            *self.lines_of_windows(self._row("{line}")),
        ]

    def lines_of_windows(self, body: list[str]) -> list[str]:
        """Repeat ``body`` for each row of the window inside the image; for averages count ``rows`` for the divisor."""
        integer = register_type(self.index)
        lines = []
        if self.kind == "average":
            lines.append("rows = int32(1)")
            for axis in self.axes[:-1]:
                lines += [*self._covered(axis, f"{axis}0"), "rows *= covered"]
        level, line = 0, "plane"
        for number, axis in enumerate(self.axes[:-1]):
            inner = " * ".join(f"in_{after}" for after in self.axes[number + 1 :])
            head = [
                f"for k{axis} in range(kernel_{axis}):",
                f"    at_{axis} = int32({axis}0 + int32(k{axis}) * dilation_{axis})",
                f"    if uint32(at_{axis}) >= uint32(in_{axis}):",
                "        continue",
                f"    line_{axis} = {integer}({line} + {integer}(at_{axis} * {integer}({inner})))",
            ]
            lines += ["    " * level + text for text in head]
            line, level = f"line_{axis}", level + 1
        return [*lines, indent("\n".join(body).format(line=line), level)]

    def _covered(self, axis: str, start: str) -> list[str]:
        """Compute ``covered``: how many elements along ``axis`` an average counts, in the window at ``start``."""
        at = f"int32({start} + int32(k) * dilation_{axis})"
        inside = f"{at} < padded_end_{axis}" if self.include_pad else f"uint32({at}) < uint32(in_{axis})"
        return ["covered = int32(0)", f"for k in range(kernel_{axis}):", f"    if {inside}:", "        covered += 1"]

    def _row(self, line: str) -> list[str]:
        """Accumulate the window's elements along the x axis, in the row of the image that begins at ``line``."""
        at = f"{register_type(self.index)}({line} + at)"
        value = f"value = {self.register}({self.element.load('x', at)})"
        take = [value, self.taken("totals[i]")]
        if self.indices:
            take = [value, f"if {self.is_better('totals[i]')}:", "    totals[i] = value", f"    best_at = {at}"]
        move = f"at = int32(x0 + int32(kx) * dilation_x + int32(i) * {self.step})"
        checked = [move, "if uint32(at) < uint32(in_x):", *(f"    {text}" for text in take)]
        loop = "for kx in range(kernel_x):"
        slow = [loop, *(f"    {text}" for text in self._for_each(checked))]
        if self.width == 1:
            return slow
        fast = [loop, *(f"    {text}" for text in self._for_each([move, *take]))]
        return ["if whole:", *(f"    {text}" for text in fast), "else:", *(f"    {text}" for text in slow)]

    def taken(self, total: str) -> str:
        """Return the line that accumulates ``value`` in variable ``total``."""
        if self.kind == "average":
            return f"{total} += value"
        return f"{total} = value if {self.is_better(total)} else {total}"

    def is_better(self, total: str) -> str:
        """Return the test whether ``value`` replaces maximum ``total``. NaN is larger than every number."""
        nan = "" if self.storage in _registers else " | (value != value)"
        return f"(value > {total}){nan}"

    def result(self, total: str, divisor: str) -> str:
        """Return the source of the value to store for accumulator ``total``; averages are divided by ``divisor``."""
        value = f"({total} / {self.register}({divisor}))" if self.kind == "average" else total
        return {"i8": f"int8({value})", "u8": f"uint8({value})"}.get(self.storage, self.element.cast(value))

    def _store(self) -> list[str]:
        def write(divisor: str) -> str:
            return f"out[{register_type(self.index)}(row + ox + int32(i))] = {self.result('totals[i]', divisor)}"

        start = f"int32(x0 + int32(i) * {self.step})"
        checked = self._covered("x", start) if self.kind == "average" else []
        checked.append(write("max(int32(rows * covered), int32(1))"))
        if self.width == 1:
            return self._for_each(checked)
        return [
            f"if whole and ox + {self.width} <= out_x:",
            "    divisor = max(int32(rows * kernel_x), int32(1))" if self.kind == "average" else "    pass",
            *(f"    {text}" for text in self._for_each([write("divisor")])),
            "else:",
            f"    for i in range(min(int32({self.width}), int32(out_x - ox))):",
            *(f"        {text}" for text in checked),
        ]

    def _index(self, axes: str) -> list[str]:
        if not self.column_major:
            return ["indices[row + ox] = best_at"]
        integer = register_type(self.index)
        lines = [f"rest = {integer}(best_at - plane)"]
        for axis in reversed(axes):
            lines += [
                f"quotient = {integer}(rest // in_{axis})",
                f"best_{axis} = {integer}(rest - quotient * in_{axis})",
                "rest = quotient",
            ]
        offset = f"best_{axes[-1]}"
        for axis in reversed(axes[:-1]):
            offset = f"({offset} * in_{axis} + best_{axis})"
        return [*lines, f"indices[row + ox] = plane + {offset}"]


@dataclass(frozen=True)
class VectorPool(Pool):
    """Pooling on a GPU for windows that are adjacent along a row and do not overlap.

    Each of a thread's ``width`` windows covers ``stride`` elements of a row. The thread loads ``stride`` vectors per
    row and stores one vector. Indices are not supported.
    """

    @property
    def name(self) -> str:
        return f"{super().name}_vectors"

    @text_property
    def body(self) -> str:
        each = range(self.width)
        seen = self.width * self.stride
        lines = [
            *self.setup(),
            *(f"total_{i} = {self.start}" for i in each),
            f"seen = lanes_of(x, {seen})",
            f"found = lanes_of(out, {self.width})",
            f"aligned = is_aligned(x, {self.width}) & is_aligned(out, {self.width})",
        ]
        integer = register_type(self.index)
        take = [f"at = int64({integer}({{line}} + x0))"]
        take.append(f"load_lanes(seen, 0, x, at, {self.width}, at + {seen - 1}, aligned, {self.width}, {self.stride})")
        for tap in range(self.stride):
            for i in each:
                value = f"{self.register}({self.element.load('seen', str(i * self.stride + tap))})"
                take += [f"value = {value}", self.taken(f"total_{i}")]
        lines += self.lines_of_windows(take)
        lines += [f"divisor = max(int32(rows * {self.stride}), int32(1))"] if self.kind == "average" else []
        lines += [f"found[{i}] = {self.result(f'total_{i}', 'divisor')}" for i in each]
        lines.append(f"to = int64({integer}(row + ox))")
        lines.append(f"store_lanes(found, 0, out, to, 0, to + {self.width}, aligned, {self.width}, 1)")
        return indent("\n".join(lines), 1)


def window_vectors(ctx: Lowering, x: Tensor, windows: Windows, spatial: Sequence[Dim]) -> int:
    """Return the windows per thread for `VectorPool`; 1 if it does not support these windows."""
    stride, begin = windows.strides[-1], windows.begin[-1]
    is_side_by_side = windows.kernel[-1] == stride and (windows.dilations[-1] == 1 or stride == 1) and begin == 0
    if ctx.device.emulated or not is_side_by_side or stride > MOST_STRIDE:
        return 1
    width = VECTOR_BYTES // x.dtype.itemsize
    while width > 1 and not all(divides(width, size) for size in (spatial[-1], windows.size[-1])):
        width //= 2
    return width if width > 1 and ctx.settled(le(spatial[-1] * stride, windows.size[-1])) else 1


def launch_pool(
    ctx: Lowering,
    x: Tensor,
    windows: Windows,
    spatial: Sequence[Dim],
    kind: str,
    *,
    include_pad: bool = False,
    indices: bool = False,
    column_major: bool = False,
) -> tuple[Tensor, ...]:
    """Pool x [images, channels, space...] (`Pool`); return the result and, with ``indices``, the maxima's offsets.

    ``spatial`` are the spatial sizes of the result.
    """
    out = ctx.empty((*x.shape[:2], *spatial), x.dtype)
    positions = ctx.empty(out.shape, DType.INT64) if indices else None
    x = ctx.contiguous(x)
    index = index_type(ctx, out.size, x.size)
    rank, width = len(spatial), 1
    if ctx.device.emulated and not indices:
        width = max(8, min(EMULATED_WIDTH, 1 << (hint(spatial[-1]) - 1).bit_length()))
    stride = windows.strides[-1] if windows.strides[-1] <= 2 else 0
    short = x.dtype.short
    kernel = Pool(kind, short, rank, indices, column_major and rank > 1, include_pad, index, width, stride)
    if not indices and (vector := window_vectors(ctx, x, windows, spatial)) > 1:
        width, stride = vector, windows.strides[-1]
        kernel = VectorPool(kind, short, rank, include_pad=include_pad, index=index, width=width, stride=stride)
    strips = ceildiv(spatial[-1], width)
    count = product(out.shape[:-1]) * strips
    builder = KernelBuilder()
    builder.tensors(written=True, out=out, indices=positions)
    builder.tensor(x, "x")
    builder.integer(count, index, "count")
    builder.integer(strips, DType.INT32, "strips")
    sizes = {"kernel": windows.kernel, "dilation": windows.dilations, "in": windows.size, "out": spatial}
    builder.per_axis(kernel.axes, {**sizes, "stride": windows.strides, "pad": windows.begin})
    if include_pad:
        ends = [size + end for size, end in zip(windows.size, windows.end, strict=True)]
        builder.per_axis(kernel.axes, {"padded_end": ends})
    remake = None
    taps = product(windows.kernel)
    if not indices and isinstance(taps, int) and taps <= MAX_TAPS:
        remake = _remade(ctx, x, out, windows, kind, include_pad)
    grid = (ceildiv(count, THREADS), 1, 1)
    builder.launch(ctx, kernel.name, grid, (THREADS, 1, 1), body=kernel.body, remake=remake)
    return (out,) if positions is None else (out, positions)


def _remade(ctx: Lowering, x: Tensor, out: Tensor, windows: Windows, kind: str, include_pad: bool) -> Remake:
    """Return a function that records this pooling, bit-identical to `Pool`, for channels-last views of x and out."""
    total_type = DType.INT32 if x.dtype.is_integer else s.accumulation_type(x.dtype)

    def along(maps: IndexMap, axis: int, pixel: Scalar, tap: int) -> tuple[Scalar, Scalar]:
        """Return a tap's position in x along an axis, and whether it is inside x; ``pixel`` is the output position."""
        at = pixel * windows.strides[axis] - maps.dim(windows.begin[axis]) + tap * windows.dilations[axis]
        return at, (at >= 0) & (at < maps.dim(windows.size[axis]))

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        source = maps.source(x)
        taps = [[along(maps, axis, pixel, tap) for tap in range(operator.index(windows.kernel[axis]))]
                for axis, pixel in enumerate(c[2:])]  # fmt: skip
        start: float = 0 if kind == "average" else _integer_lowest.get(x.dtype, -math.inf)
        total = s.constant(start, total_type)
        for window in itertools.product(*taps):
            inside = functools.reduce(operator.and_, [is_in for _, is_in in window])
            value = source.at([*c[:2], *(at for at, _ in window)], inside, start)
            value = s.cast(value, total_type)
            total = total + value if kind == "average" else s.maximum(value, total)
        if kind == "average":
            total = total / s.cast(s.maximum(counted(maps, taps), 1), total_type)
        return s.cast(total, x.dtype)

    def counted(maps: IndexMap, taps: list[list[tuple[Scalar, Scalar]]]) -> Scalar:
        """Return the number of window elements by which an average divides."""
        count = s.constant(1, DType.INT32)
        for axis, of_axis in enumerate(taps):
            end = maps.dim(windows.size[axis] + windows.end[axis])
            counts = [at < end if include_pad else is_in for at, is_in in of_axis]
            count = count * functools.reduce(operator.add, [s.cast(x, DType.INT32) for x in counts])
        return count

    def remake(view: View) -> Sequence[Step]:
        with ctx.recording() as steps:
            if not launch_channel_pool(ctx, view(x), view(out), windows, kind, include_pad):
                gather_into(ctx, view(out), element, view)
        return steps

    return remake


def local_response_normalization(
    ctx: Lowering, x: Tensor, *, size: int, alpha: float, beta: float, bias: float
) -> Tensor:
    """Compute local response normalization over ``size`` adjacent channels of x [images, channels, ...].

    out = x / (bias + alpha/size * sum(x[c - before .. c + after]^2))^beta, as ONNX defines it.
    """
    real, before, after = s.accumulation_type(x.dtype), (size - 1) // 2, size // 2

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        source = maps.source(x)

        def square(value: Scalar) -> Scalar:
            value = s.cast(value, real)
            return value * value

        def neighbor(k: Scalar) -> list[Scalar]:
            channel = c[1] + k - before
            inside = (channel >= 0) & (channel < source.dim(1))
            return [square(source.at([c[0], channel, *c[2:]], inside))]

        if size <= MAX_CHANNELS:
            squares = [square(maps.near(source, c, 1, shift)) for shift in range(-before, after + 1)]
            total = functools.reduce(operator.add, squares)
        else:
            (total,) = maps.fold(SUM, s.constant(size, DType.INT64), neighbor)
        scale = s.constant(bias, real) + s.constant(alpha / size, real) * total
        return s.cast(s.cast(source.at(c), real) * _inverse_power(scale, beta), x.dtype)

    return gather_map(ctx, x.shape, x.dtype, element)


def _inverse_power(x: Scalar, exponent: float) -> Scalar:
    """Return x**-exponent. For the usual exponent 0.75, compute roots: a general power takes five times as long."""
    if exponent == 0.75:
        root = s.unary_float("rsqrt", x)
        return root * s.sqrt(root)
    return s.power(x, -exponent)
