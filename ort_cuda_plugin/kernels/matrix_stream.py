"""Attention by tensor cores: the walk of `stream`, whose two products are those of small matrices.

A block has 32 rows, and four warps: a pair of them has 16 rows, and one warp of a pair has half of the keys of a tile,
and later half of the columns of the result. Keys, and then values, of a tile stand in shared memory in their own type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..program.symbolic import Dim, hint
from .attend import Form
from .stream_kernel import StreamKernel
from .tiles import Element, indented, store_tile

GAP = 8
"""Elements between rows in shared memory, so that neighbouring rows begin in other banks."""


def matrix_form(width: Dim) -> Form:
    """For results of up to 128 columns."""
    return Form(32, 64, 64 if hint(width) <= 64 else 128, 128, resident=False)


@dataclass(frozen=True)
class MatrixStreamKernel(StreamKernel):
    """The kernel for heads of ``size`` elements, a multiple of 16 up to 128, of keys and of values."""

    size: int = 0

    @property
    def name(self) -> str:
        return f"matrix_{super().name}"

    @property
    def pitch(self) -> int:
        return self.size + GAP

    def prologue(self) -> list[str]:
        form = self.form
        return [
            *self.block_place(),
            "lane_row = int32((thread & 31) >> 2)",
            "lane_pair = int32((thread & 3) * 2)",
            "warp_row = int32(((thread >> 5) & 1) * 16)",
            "warp_half = int32(thread >> 6)",
            f"tile_c = array_pointer(cuda.shared.array({form.m * form.width}, float32, 16))",
            f"tile_b = array_pointer(cuda.shared.array({form.keys * self.pitch}, uint16, 16))",
            f"element_t = array_pointer(cuda.shared.array({form.keys * form.pitch}, float32, 16))",
            "score_t = element_t",
            f"score_sums = registers_f32({form.keys // 4})",
            f"result_sums = registers_f32({self.size // 4})",
            *self.weights.block_lines,
        ]

    def _fill(self, pointer: str, base: str, stride: str) -> list[str]:
        """Copies the tile's rows of keys or values to shared memory; zeros stand behind the last key."""
        per_row = self.size // 4
        names = [f"filled{i}" for i in range(4)]
        return [
            f"for piece in range(thread, {self.form.keys * per_row}, {self.form.threads}):",
            f"    line = int32(piece // {per_row})",
            f"    column = int32((piece - line * {per_row}) * 4)",
            f"    to = int64(int32(line * {self.pitch} + column))",
            "    if int32(key0 + line) < n:",
            f"        at = {base} + int64({self.index_type}(int32(key0 + line) * {stride})) + int64(column)",
            *(f"        {name} = {pointer}[at + {i}]" for i, name in enumerate(names)),
            *(f"        tile_b[to + {i}] = {name}" for i, name in enumerate(names)),
            "    else:",
            "        for i in range(4):",
            "            tile_b[to + i] = uint16(0)",
            "cuda.syncthreads()",
        ]

    def _multiply(self, sums: str, count: int, b: Sequence[str]) -> list[str]:
        """Adds the product of a0 to a3 with each of ``count`` matrices, in whose texts {} is the number."""
        lines = []
        for i in range(count):
            lines += [f"b0 = {b[0].format(i)}", f"b1 = {b[1].format(i)}"]
            lines.append(f"multiply_add_matrix_{self.storage[0]}({sums}, {4 * i}, a0, a1, a2, a3, b0, b1)")
        return lines

    def scores(self) -> list[str]:
        form = self.form
        count = form.keys // 16
        at = f"int64(int32((warp_half * {form.keys // 2} + {{}} * 8 + lane_row) * {self.pitch} + k0"
        step = [
            "k0 = int32(step * 16 + lane_pair)",
            *(
                f"a{i} = load_pair_u16(a, a_start + int64({self.index_type}(row_{i & 1} * {self._stride('a_m')}))"
                f" + int64(k0 + {8 * (i >> 1)}))"
                for i in range(4)
            ),
            *self._multiply("score_sums", count, tuple(f"load_pair_u16(tile_b, {at} + {8 * i})))" for i in (0, 1))),
        ]
        place = f"int64(int32((warp_half * {form.keys // 2} + lane_pair + {{}}) * {form.pitch} + warp_row + lane_row))"
        return [
            *self._fill("b", "b_start", self._stride("b_n")),
            "row_0 = int32(min(int32(row0 + warp_row + lane_row), int32(m - 1)))",
            "row_1 = int32(min(int32(row0 + warp_row + lane_row + 8), int32(m - 1)))",
            f"clear_f32(score_sums, {4 * count})",
            f"for step in range({self.size // 16}):",
            *indented(step, 1),
            *(
                line
                for number in range(count)
                for i in range(4)
                for line in [
                    f"at = {place.format(8 * number + i % 2)}",
                    f"element_t[at + {8 * (i // 2)}] = score_sums[{4 * number + i}]",
                ]
            ),
            "cuda.syncthreads()",
        ]

    def scale(self) -> list[str]:
        first, second = ("factors[int64(int32(warp_row + lane_row))]", "factors[int64(int32(warp_row + lane_row + 8))]")
        return [f"scale_matrix_f32(result_sums, {first}, {second}, {self.size // 16})"]

    def weighted_values(self) -> list[str]:
        form = self.form
        pair = f"pair_{self.storage[0]}"

        def weights(row: int, key: int) -> str:
            places = [f"element_t[at + {row + (key + i) * form.pitch}]" for i in (0, 1)]
            return f"{pair}({', '.join(places)})"

        step = [
            f"at = int64(int32((step * 16 + lane_pair) * {form.pitch} + warp_row + lane_row))",
            *(f"a{i} = {weights(8 * (i & 1), 8 * (i >> 1))}" for i in range(4)),
            f"at_b = int64(int32((step * 16 + lane_pair) * {self.pitch} + warp_half * {self.size // 2} + lane_row))",
            *self._multiply(
                "result_sums",
                self.size // 16,
                tuple(
                    f"load_two_u16(tile_b, at_b + {{0}} * 8 + {first * self.pitch}, "
                    f"at_b + {{0}} * 8 + {(first + 1) * self.pitch})"
                    for first in (0, 8)
                ),
            ),
        ]
        return [
            *self._fill("c", "c_start", self._stride("c_n")),
            f"for step in range({form.keys // 16}):",
            *indented(step, 1),
            "cuda.syncthreads()",
        ]

    def store(self) -> list[str]:
        form = self.form
        placed = [
            f"to = int64(int32((warp_row + lane_row) * {form.width} + warp_half * {self.size // 2} + lane_pair))",
            *(
                f"tile_c[to + {8 * number + i % 2 + i // 2 * 8 * form.width}] = result_sums[{4 * number + i}]"
                for number in range(self.size // 16)
                for i in range(4)
            ),
        ]
        stored = store_tile(form.result, "m", "d", Element("f32"), self.epilogue, placed=placed)
        return ["cuda.syncthreads()", *stored.splitlines()]
