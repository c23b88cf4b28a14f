"""Direct convolution without shared memory: a thread computes a strip of adjacent pixels for a few output channels.

The kernel serves convolutions that would leave a GEMM tile mostly empty: those with few output channels, with groups,
and transposed ones. On a GPU a strip is one pixel. On the emulated device it has 8 to 64 pixels, which the CPU's vector
instructions process: each weight is loaded once per strip, and a strip inside the image needs no bounds checks.

Along each axis, a transposed convolution of stride s is the sum of s plain convolutions, its phases: outputs o with the
same (o + pad) mod s use the same taps of the weights, and adjacent outputs of a phase read adjacent inputs.

Tensors are contiguous: x is [images, groups * channels, z, y, x], out [images, groups * rows, z, y, x]; 2D kernels omit
z. ``rows`` are the output channels of a group, ``channels`` its input channels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from ...model.ir import Array, DType
from ..codegen.epilogue import Epilogue
from ..codegen.simt_fragments import Element, indent, indented
from ..codegen.source import register_type, text_property
from ..contraction.prologue import conversion_setup, type_names

PHASE_ENTRIES = 12
"""Integers per phase in the table of `Phases`: three for each axis (up to three axes), padding, and a tap index."""
ACCUMULATORS = 128
"""Accumulators per thread on the emulated device: eight 512-bit vectors of float32."""
EMULATED_THREADS = 16
"""Threads per block on the emulated device; few, since each computes `ACCUMULATORS` results."""


@dataclass(frozen=True)
class Phases:
    """Phases of a transposed convolution, in row-major order of their remainders. A plain convolution is one phase.

    ``table`` has for each phase and axis: the remainder (o + pad) mod stride of its outputs o, the input position of
    its first tap relative to (o + pad) // stride, and the number of taps; at the end the index of the phase's first
    entry in ``taps``, which lists flat kernel positions, phase by phase. ``steps`` is, for each axis, the distance
    between the input positions of consecutive taps.
    """

    table: tuple[tuple[int, ...], ...]
    taps: tuple[int, ...]
    steps: tuple[int, ...]

    @staticmethod
    @cache
    def plain(kernel: tuple[int, ...], dilations: tuple[int, ...]) -> Phases:
        return Phases(((),), tuple(range(math.prod(kernel))), dilations)

    @staticmethod
    @cache
    def transposed(kernel: tuple[int, ...], strides: tuple[int, ...], dilations: tuple[int, ...]) -> Phases:
        numbers = np.arange(math.prod(kernel)).reshape(kernel)
        table: list[tuple[int, ...]] = []
        taps: list[int] = []
        for remainders in itertools.product(*(range(stride) for stride in strides)):
            entries: list[int] = []
            chosen = []
            for remainder, size, stride, dilation in zip(remainders, kernel, strides, dilations, strict=True):
                own = [k for k in range(size) if (k * dilation - remainder) % stride == 0]
                shift = (remainder - own[0] * dilation) // stride if own else 0
                entries += (remainder, shift, len(own))
                chosen.append(own)
            table.append((*entries, *[0] * (PHASE_ENTRIES - 1 - len(entries)), len(taps)))
            taps += numbers[np.ix_(*chosen)].reshape(-1).tolist()
        steps = tuple(-d // math.gcd(d, s) for d, s in zip(dilations, strides, strict=True))
        return Phases(tuple(table), tuple(taps), steps)

    @property
    def array(self) -> Array:
        return np.array(self.table, np.int32)


def rows_of_thread(rows: int, *, emulated: bool) -> int:
    """Return the output channels per thread that divide ``rows`` channels of a group most evenly.

    On a GPU they are 1, 2, or a multiple of 4, for vectorized loads of the weights.
    """
    most = 8 if emulated else 16
    even = -(-rows // -(-rows // most))
    return even if emulated or even <= 2 else -(-even // 4) * 4


def strip_shape(shape: Sequence[int], groups: int, rows: int, thread_rows: int) -> tuple[int, int, int, int, int]:
    """Return the shape of packed weights: [groups, tiles of output channels, channels, taps, channels of a tile].

    A tile is the output channels of one thread. ``shape`` is that of ONNX; ``rows`` are the output channels of a group.
    """
    taps = math.prod(shape[2:])
    channels = math.prod(shape[:2]) // (groups * rows)
    return groups, -(-rows // thread_rows), channels, taps, thread_rows


@dataclass(frozen=True)
class StripConv:
    """Direct convolution: a thread computes ``rows`` output channels of one group at ``width`` adjacent pixels along x.

    ``element`` loads the image's elements. ``stride`` is the stride along x if it is 1 or 2; 0 makes it a parameter.
    ``index`` is the type of offsets in x and out. In a transposed convolution, base is pad // stride, and the outputs
    of a phase are (base + i) * stride + remainder - pad. The grid is (images * groups * chunks * phases * tiles, 1, 1),
    where a chunk is the strips of one thread block, and a tile is ``rows`` output channels.
    """

    element: Element
    epilogue: Epilogue
    rows: int
    width: int = 1
    rank: int = 2
    transposed: bool = False
    stride: int = 0
    index: DType = DType.INT32

    @property
    def axes(self) -> str:
        return "zyx"[3 - self.rank :]

    @property
    def storage(self) -> str:
        return self.element.storage

    @property
    def is_converted(self) -> bool:
        """Whether the image has a prologue. Then its elements are converted into array ``buffer`` first."""
        return self.element.memory != self.storage

    @property
    def accumulator(self) -> str:
        """Short type name of accumulators and packed weights, which is the suffix of intrinsics."""
        return "f32" if self.storage in ("f16", "bf16") else self.storage

    @property
    def overlaps(self) -> bool:
        """Whether a row's last strip is shifted back to end at the last pixel; it does not store the overlap."""
        return self.width > 1 and not self.transposed

    @property
    def neighbor(self) -> str:
        """Distance in elements from a pixel's input to the input of the next pixel."""
        return "1" if self.transposed else str(self.stride or "stride_x")

    @property
    def spacing(self) -> str:
        """Distance in elements from a pixel's output to the output of the next pixel."""
        return str(self.stride or "stride_x") if self.transposed else "1"

    @property
    def name(self) -> str:
        transposed = "_transposed" if self.transposed else ""
        return f"conv{transposed}{self.rank}d_{self.rows}x{self.width}_{type_names(self.element)}"

    @text_property
    def body(self) -> str:
        setup = conversion_setup(self.element).text
        return indent("\n".join([setup, *self._decode(), *self._starts(), *self._sum(), *self._store()]), 1)

    def _decode(self) -> list[str]:
        """Compute the thread's ``tile``, ``phase``, ``plane`` (image * groups + group), and first pixel ``o<axis>``."""
        lines = [
            "block = int32(cuda.blockIdx.x)",
            "rest = int32(block // tiles)",
            "tile = int32(block - rest * tiles)",
        ]
        if self.transposed:
            lines += ["quotient = int32(rest // num_phases)", "phase = int32(rest - quotient * num_phases)"]
            lines += ["rest = quotient"]
        lines += [
            "plane = int32(rest // chunks)",
            "number = int32((rest - plane * chunks) * int32(cuda.blockDim.x) + int32(cuda.threadIdx.x))",
            "if number >= positions:",
            "    return",
            "group = int32(plane % groups)",
            "quotient = int32(number // strips)",
            f"ox = int32((number - quotient * strips) * {self.width})",
        ]
        if self.overlaps:
            lines += [f"own = int32(ox - max(min(ox, out_x - {self.width}), int32(0)))", "ox = int32(ox - own)"]
        outer = self.axes[:-1]
        for axis in reversed(outer[1:]):
            limit = f"count_{axis}" if self.transposed else f"out_{axis}"
            lines += [
                "rest = quotient",
                f"quotient = int32(rest // {limit})",
                f"o{axis} = int32(rest - quotient * {limit})",
            ]
        return [*lines, f"o{outer[0]} = quotient"]

    def _starts(self) -> list[str]:
        """Compute the input position ``<axis>0`` of the first tap along each axis.

        In a transposed convolution, convert ``o<axis>`` from an index within the phase to an output position; threads
        outside of the output along an axis other than x return.
        """
        axes, lines = self.axes, []
        for number, axis in enumerate(axes):
            if not self.transposed:
                lines.append(f"{axis}0 = int32(o{axis} * stride_{axis} - pad_{axis})")
                continue
            entry = f"phases[int64(phase * {PHASE_ENTRIES} + {3 * number}"
            lines += [
                f"turn = int32(o{axis} + base_{axis})",
                f"{axis}0 = int32(turn + {entry} + 1)])",
                f"taps_{axis} = {entry} + 2)]",
                f"o{axis} = int32(turn * stride_{axis} + {entry})] - pad_{axis})",
            ]
            if axis != "x":
                lines += [f"if uint32(o{axis}) >= uint32(out_{axis}):", "    return"]
        return lines

    def _sum(self) -> list[str]:
        """Accumulate the products of all input channels and taps."""
        integer = register_type(self.index)
        size = " * ".join(f"in_{axis}" for axis in self.axes)
        first = f"phases[int64(phase * {PHASE_ENTRIES} + {PHASE_ENTRIES - 1})]" if self.transposed else "0"
        lines = [
            f"size = {integer}({size})",
            f"image = {integer}({integer}(plane * channels) * size)",
            f"first = int64(group * tiles + tile) * int64(channels * taps) + int64({first})",
            f"weight = first * {self.rows}",
            f"sums = strips_{self.accumulator}({self.rows}, {self.width})",
        ]
        if self.width > 1 or self.is_converted:
            lines.append(f"buffer = array_pointer(cuda.local.array({self.width}, {self.element.accumulator}))")
        if self.width > 1:
            last = f"({self.width - 1}) * {self.neighbor}"
            lines += [
                "reach = int32((taps_x - 1) * step_x)",
                "whole = x0 + min(reach, int32(0)) >= 0",
                f"whole = whole and x0 + {last} + max(reach, int32(0)) < in_x",
            ]
        lines += ["for _ in range(channels):", "    at_weight = weight"]
        level, line = 1, "image"
        for axis in self.axes[:-1]:
            inner = " * ".join(f"in_{a}" for a in self.axes[self.axes.index(axis) + 1 :])
            skipped = " * ".join(f"taps_{a}" for a in self.axes[self.axes.index(axis) + 1 :])
            lines += [
                "    " * level + f"for k{axis} in range(taps_{axis}):",
                "    " * level + f"    at_{axis} = int32({axis}0 + int32(k{axis}) * step_{axis})",
                "    " * level + f"    if uint32(at_{axis}) >= uint32(in_{axis}):",
                "    " * level + f"        at_weight += int64(int32({skipped})) * {self.rows}",
                "    " * level + "        continue",
                "    " * level + f"    line_{axis} = {integer}({line} + {integer}(at_{axis} * {integer}({inner})))",
            ]
            line, level = f"line_{axis}", level + 1
        lines += [indent(self._row(line), level)]
        return [*lines, f"    image = {integer}(image + size)", f"    weight += int64(taps * {self.rows})"]

    def _row(self, line: str) -> str:
        """Accumulate the products of the taps along the x axis with the image row that begins at ``line``."""
        integer, element, sizes = register_type(self.index), self.element, f"{self.rows}, {self.width}"

        def add(pointer: str, at: str) -> str:
            storage = self.storage if pointer == "x" else self.accumulator
            return f"multiply_add_strip_{storage}(sums, weights, at_weight, {pointer}, int64({at}), {sizes})"

        at_x = "at_x = int32(x0 + int32(kx) * step_x)"
        checked = [
            "for kx in range(taps_x):",
            f"    {at_x}",
        ]
        if self.width == 1:
            at = f"{integer}({line} + at_x)"
            checked.append("    if uint32(at_x) < uint32(in_x):")
            if self.is_converted:
                checked += [f"        buffer[0] = {element.load('x', at)}", f"        {add('buffer', '0')}"]
            else:
                checked.append(f"        {add('x', at)}")
            return "\n".join([*checked, f"    at_weight += {self.rows}"])
        each = f"int32(at_x + int32(i) * {self.neighbor})"
        if self.neighbor == "1" and not self.is_converted:
            inside = [add("x", "at")]
        else:
            read = element.load("x", f"{integer}(at + {integer}(int32(i) * {self.neighbor}))")
            inside = [f"for i in range({self.width}):", f"    buffer[i] = {read}", add("buffer", "0")]
        checked += [
            f"    if at_x >= 0 and at_x + ({self.width - 1}) * {self.neighbor} < in_x:",
            f"        at = {integer}({line} + at_x)",
            *indented(inside, 2),
            "    else:",
            f"        for i in range({self.width}):",
            f"            value = {element.accumulator}(0)",
            f"            if uint32({each}) < uint32(in_x):",
            f"                value = {element.load('x', f'{integer}({line} + {each})')}",
            "            buffer[i] = value",
            f"        {add('buffer', '0')}",
            f"    at_weight += {self.rows}",
        ]
        whole = ["for kx in range(taps_x):", f"    at = {integer}({line} + {integer}(x0 + int32(kx) * step_x))"]
        whole += indented(inside, 1)
        whole.append(f"    at_weight += {self.rows}")
        return "\n".join(["if whole:", *(f"    {x}" for x in whole), "else:", *(f"    {x}" for x in checked)])

    def _store(self) -> list[str]:
        """Apply the epilogue to the accumulators of each output channel; its coordinate ``column`` is along x."""
        lines = ["image_of_batch = int32(plane // groups)", f"left = int32(rows - tile * {self.rows})"]
        if self.width == 1:
            if not self.is_converted:
                lines += [f"buffer = array_pointer(cuda.local.array(1, {self.element.accumulator}))"]
            lines += ["if uint32(ox) >= uint32(out_x):", "    return"] if self.transposed else []
        else:
            lines.append(f"every = ox >= 0 and ox + {self.width - 1} * {self.spacing} < out_x")
            if self.overlaps:
                lines.append("every = every and own == 0")
        if self.width > 1 and self.rows > 1:
            return [*lines, *self._store_in_loop()]
        for row in range(self.rows):
            lines += [
                f"if {row} < left:",
                f"    copy_strip_{self.accumulator}(buffer, sums, {row}, {self.width})",
                f"    channel = int32(group * rows + tile * {self.rows} + {row})",
                *indented(self.epilogue.rows(), 1),
                *indented(self._store_row(), 1),
            ]
        return lines

    def _store_in_loop(self) -> list[str]:
        """Apply the epilogue in a loop over the output channels, after copying the accumulators to an array.

        So the source has the epilogue only once, which halves the time to compile the kernel.
        """
        sizes = f"{self.rows}, {self.width}"
        lines = [
            f"channel = int32(group * rows + tile * {self.rows} + row)",
            f"first_of_row = int64(row) * {self.width}",
            *self.epilogue.rows(),
            *self._store_row("results[first_of_row + i]"),
        ]
        return [
            f"results = array_pointer(cuda.local.array({self.rows * self.width}, {self.element.accumulator}))",
            f"store_strips_{self.accumulator}(results, int64(0), sums, {sizes})",
            f"for row in range(int32(min(left, int32({self.rows})))):",
            *indented(lines, 1),
        ]

    def _store_row(self, total: str = "buffer[i]") -> list[str]:
        def write(column: str, total: str) -> list[str]:
            elements = [*self.epilogue.elements("_0"), *self.epilogue.stores("_0")]
            return [f"column_0 = {column}", f"total_0 = {total}", *elements]

        if self.width == 1:
            return write("ox", "buffer[0]")
        offset = f"int32(i) * {self.spacing}" if self.spacing != "1" else "int32(i)"
        each = write(f"int32(ox + {offset})", total)
        loop = f"    for i in range({self.width}):"
        inside = f"        if uint32(ox + {offset}) < uint32(out_x):"
        rest = f"    for i in range(own, {self.width}):" if self.overlaps else loop
        return ["if every:", loop, *indented(each, 2), "else:", rest, inside, *indented(each, 3)]
