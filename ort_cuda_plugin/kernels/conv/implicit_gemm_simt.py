"""Implicit GEMM convolution without tensor cores: a tiled GEMM of the weights and an im2col matrix that is not stored.

A column of the im2col matrix is the patch of one output pixel: the input elements in its window.

Tensors are contiguous: x is [images, groups * channels, z, y, x], out [images, groups * rows, z, y, x]; 2D kernels omit
z. ``rows`` are the output channels of a group, ``channels`` its input channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...model.ir import Array, DType
from ..codegen.block_mapping import steps_of, tile_of_block
from ..codegen.epilogue import Epilogue
from ..codegen.fragment import Fragment, join
from ..codegen.simt_fragments import (
    Element,
    Operand,
    Tile,
    copied_chunk,
    declare,
    fill_matrix,
    fill_packed,
    indented,
    log2,
    pipeline,
    store_tile,
)
from ..codegen.source import register_type, text_property
from ..contraction.prologue import conversion_setup, type_names

COORDINATES = ("image = int32(batch // groups)", "channel = int32(group * rows + row)")
"""Source lines that define the epilogue's outer coordinates."""
OUTSIDE = -(2**30)
"""Coordinate that is outside of every image, even after the offset of a tap is added."""


def patch_table(channels: int, kernel: Sequence[int], dilations: Sequence[int], tile_k: int) -> Array:
    """Return the coordinates of a patch's elements, relative to its first one: int32 [k][4], entries y, x, channel, z.

    The order of k is channel-major: for each channel all taps, row-major. Entries outside of every image pad the table
    to a multiple of ``tile_k``. ``kernel`` and ``dilations`` have two or three entries.
    """
    channel, *position = np.indices((channels, *kernel), dtype=np.int32).reshape(1 + len(kernel), -1)
    steps = [p * d for p, d in zip(position, dilations, strict=True)]
    z, y, x = [np.zeros_like(channel)] * (3 - len(kernel)) + steps
    rows = np.stack([y, x, channel, z], axis=1)
    outside = np.tile(np.array([OUTSIDE, OUTSIDE, 0, 0], np.int32), (-len(rows) % tile_k, 1))
    return np.concatenate([rows, outside])


def packed_shape(shape: Sequence[int], groups: int, tile: Tile) -> tuple[int, int, int]:
    """Return the shape that weights of ONNX ``shape`` have after `pack_tiles`: [groups, k, output channels], padded."""
    rows, k = shape[0] // groups, math.prod(shape[1:])
    return groups, -(-k // tile.k) * tile.k, -(-rows // tile.m) * tile.m


@dataclass(frozen=True)
class TiledConv:
    """Implicit GEMM kernel: a block computes ``tile.m`` output channels of a group at ``tile.n`` pixels of an image.

    The epilogue's coordinates are ``image``, ``channel`` and ``column`` (the pixel). ``index`` is the type of offsets
    in an image of x. ``packed`` weights have the layout of `pack_tiles`, else that of ONNX. ``elements`` load x and the
    weights; the weights' prologue may read values per output channel. With fewer threads than columns in b's tile, a
    thread fills several adjacent columns, with one access if they are adjacent in x as well.
    The grid is (ceil(positions/tile.n) * ceil(rows/tile.m) * groups * images, 1, 1).
    """

    elements: tuple[Element, Element]
    epilogue: Epilogue
    tile: Tile
    rank: int = 2
    packed: bool = True
    index: DType = DType.INT32

    @property
    def patches(self) -> int:
        """Columns of b's tile (patches) that each thread fills."""
        return self.tile.chunk if self.tile.threads < self.tile.n else 1

    @property
    def axes(self) -> str:
        return "zyx"[3 - self.rank :]

    @property
    def name(self) -> str:
        return f"conv{self.rank}d_{self.tile.name}_{type_names(*self.elements)}"

    @text_property
    def body(self) -> str:
        tile, (element, weight) = self.tile, self.elements
        if self.packed:
            text = f"""
                packed_rows = int64(tiles_m * {tile.m})
                weights_base = int64(group) * int64(steps * {tile.k}) * packed_rows + int64(row0)
                """
            weights = Fragment("packed_weights", text, "packed_rows weights_base")
            fill = fill_packed("weights", "weights_base", tile, weight)
        else:
            weights = Fragment("weights", "a_base = int64(group) * int64(rows) * int64(k_end)", "a_base")
            operand = Operand("a", "weights", "row0", "rows", "k_end", "k_end", "1", True)
            fill = fill_matrix(operand, tile.m, tile, weight, "int32")
        offset = " * ".join(["image = int64(batch) * int64(channels)", *(f"int64(in_{axis})" for axis in self.axes)])
        if self.patches == 1:
            starts = " ".join(f"{axis}0" for axis in self.axes)
            lines = [offset, f"patch = int32(column0 + (thread & {tile.n - 1}))", *self._patch_origin()]
            image = Fragment("patch", "\n".join(lines), f"image {starts}")
            fill_b = self._fill_patches(element)
        else:
            starts = " ".join(f"{axis}_of" for axis in self.axes)
            image = Fragment("patches", f"{offset}\n{self._patches()}", f"image own together {starts}")
            fill_b = self._fill_many_patches(element)
        return join(
            [
                conversion_setup(element, weight),
                tile_of_block(tile.m, tile.n, "rows", "positions"),
                Fragment("group", "group = int32(batch % groups)", "group"),
                steps_of(tile.k),
                weights,
                declare(tile, element.accumulator),
                image,
                pipeline(tile, element.accumulator, f"{fill}\n{fill_b}"),
                store_tile(tile, "rows", "positions", element, self.epilogue, COORDINATES),
            ]
        )

    def _patch_origin(self) -> list[str]:
        """Compute the input coordinates of the first element of ``patch``; for a patch past the last, `OUTSIDE`."""
        axes = self.axes
        lines = ["inside = patch < positions"]
        for axis in reversed(axes[1:]):
            lines += [
                f"quotient = int32(patch // out_{axis})",
                f"{axis}0 = int32((patch - quotient * out_{axis}) * stride_{axis} - pad_{axis})",
                "patch = quotient",
            ]
        lines += [f"{axes[0]}0 = int32(patch * stride_{axes[0]} - pad_{axes[0]})"]
        return [*lines, "if not inside:", f"    y0 = int32({OUTSIDE})"]

    def _element(self, element: Element, at: Callable[[str], str]) -> list[str]:
        """Set ``b_value`` to the element of x at coordinates ``at(axis)``, or 0 outside of the image."""
        inside = " and ".join(f"uint32({at(axis)}) < uint32(in_{axis})" for axis in self.axes)
        return [
            f"b_value = {element.accumulator}(0)",
            f"if {inside}:",
            f"    b_value = {element.load('x', f'image + int64({self._offset(at)})')}",
        ]

    def _offset(self, at: Callable[[str], str]) -> str:
        index, offset = register_type(self.index), "channel"
        for axis in self.axes:
            offset = f"{index}({index}({offset} * in_{axis}) + {at(axis)})"
        return offset

    def _fill_patches(self, element: Element) -> str:
        """Fill stage ``filling`` of b's tile for k step ``step``, with zeros for padding."""
        tile = self.tile
        count = tile.k // (tile.threads // tile.n)
        return "\n".join(
            [
                f"first = int32((thread >> {log2(tile.n)}) * {count})",
                f"to = int32(filling * {tile.k * tile.b_pitch} + {tile.b_first} + first * {tile.b_pitch})",
                f"to = int64(int32(to + (thread & {tile.n - 1})))",
                f"entry = int64(int32(step * {tile.k} + first)) * 4",
                f"for _ in range({count}):",
                "    dy, dx, channel, dz = load_i32x4(table, entry)",
                "    entry += 4",
                *[f"    at_{axis} = int32({axis}0 + d{axis})" for axis in self.axes],
                *indented(self._element(element, "at_{}".format), 1),
                "    tile_c[to] = b_value",
                f"    to += {tile.b_pitch}",
            ]
        )

    def _patches(self) -> str:
        """Compute the input coordinates of each of the thread's patches (adjacent columns of b's tile).

        ``together`` tells whether the patches are adjacent along the image's innermost axis as well.
        """
        axes, last = self.axes, self.patches - 1
        lines = [f"{axis}_of = array_pointer(cuda.local.array({self.patches}, int32))" for axis in axes]
        lines += [
            f"own = int32((thread & {self.tile.n // self.patches - 1}) * {self.patches})",
            f"for i in range({self.patches}):",
            "    patch = int32(column0 + own + i)",
            *indented(self._patch_origin(), 1),
            *[f"    {axis}_of[i] = {axis}0" for axis in axes],
            f"together = x_of[{last}] - x_of[0] == {last}",
            *[f"together = together and {axis}_of[{last}] == {axis}_of[0]" for axis in axes[:-1]],
        ]
        return "\n".join(lines)

    def _fill_many_patches(self, element: Element) -> str:
        """Fill stage ``filling`` of b's tile for k step ``step``, with several columns per thread."""
        tile, patches = self.tile, self.patches
        lanes = tile.n // patches
        count = tile.k // (tile.threads // lanes)
        outer = "".join(f"uint32(at_{axis}) < uint32(in_{axis}) and " for axis in self.axes[:-1])
        copied_singly = [f"b_value{i} = {element.load('x', f'from_x + {i}')}" for i in range(patches)]
        copied_singly += [f"tile_c[to + {i}] = b_value{i}" for i in range(patches)]
        return "\n".join(
            [
                f"first = int32((thread >> {log2(lanes)}) * {count})",
                f"to = int64(int32(filling * {tile.k * tile.b_pitch} + {tile.b_first} + first * {tile.b_pitch} + own))",
                f"entry = int64(int32(step * {tile.k} + first)) * 4",
                f"for _ in range({count}):",
                "    dy, dx, channel, dz = load_i32x4(table, entry)",
                "    entry += 4",
                *[f"    at_{axis} = int32({axis}_of[0] + d{axis})" for axis in self.axes],
                f"    if together and {outer}at_x >= 0 and at_x + {patches - 1} < in_x:",
                f"        from_x = image + int64({self._offset('at_{}'.format)})",
                *indented(copied_chunk(tile, element, "x", "from_x", 1) or copied_singly, 2),
                "    else:",
                f"        for i in range({patches}):",
                *[f"            each_{axis} = int32({axis}_of[i] + d{axis})" for axis in self.axes],
                *indented(self._element(element, "each_{}".format), 3),
                "            tile_c[to + i] = b_value",
                f"    to += {tile.b_pitch}",
            ]
        )
