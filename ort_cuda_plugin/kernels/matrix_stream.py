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
SCORE_GAP = 5
"""Floats between the scores of keys: of four pairs of keys times eight rows, a warp, at most two are in one bank."""
RESULT_GAP = 8
"""The same of floats, between rows of the result."""
PIECE = 8
"""Elements of 16 bytes, which are copied at once."""


def matrix_form(width: Dim) -> Form:
    """For results of up to 128 columns."""
    return Form(32, 64, 64 if hint(width) <= 64 else 128, 128, resident=False, gap=SCORE_GAP)


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
            f"tile_c = array_pointer(cuda.shared.array({form.m * (form.width + RESULT_GAP)}, float32, 16))",
            f"tile_b = array_pointer(cuda.shared.array({form.keys * self.pitch}, uint16, 16))",
            f"element_t = array_pointer(cuda.shared.array({form.keys * form.pitch}, float32, 16))",
            "score_t = element_t",
            "tile_at = shared_address(tile_b)",
            # Where the warp's lanes find the rows of its first matrices of keys, and of values.
            "eight = int32(thread & 7)",
            "low, high = int32(((thread >> 3) & 1) * 8), int32(((thread >> 4) & 1) * 8)",
            f"first_key = int32(warp_half * {form.keys // 2} + eight + high)",
            f"keys_at = tile_at + int64(int32((first_key * {self.pitch} + low) * 2))",
            f"first_column = int32(warp_half * {self.size // 2} + high)",
            f"values_at = tile_at + int64(int32(((eight + low) * {self.pitch} + first_column) * 2))",
            self._aligned("b_whole", "b", "b_start", self._stride("b_n")),
            self._aligned("c_whole", "c", "c_start", self._stride("c_n")),
            *self._rows(),
            f"score_sums = registers_f32({form.keys // 4})",
            f"result_sums = registers_f32({self.size // 4})",
            *self.weights.block_lines,
        ]

    def _aligned(self, name: str, pointer: str, base: str, stride: str) -> str:
        """Says whether rows begin at multiples of 16 bytes."""
        return f"{name} = opaque_i32(int32(((address_of({pointer}) + {base} * 2) & 15) | (int64({stride}) & 7)))"

    def _fill(self, pointer: str, base: str, stride: str) -> list[str]:
        """Copies the tile's rows of keys or values to shared memory; zeros stand behind the last key."""
        per_row = self.size // PIECE
        return [
            f"for piece in range(thread, {self.form.keys * per_row}, {self.form.threads}):",
            f"    line = int32(piece // {per_row})",
            f"    column = int32((piece - line * {per_row}) * {PIECE})",
            f"    to = int64(int32(line * {self.pitch} + column))",
            f"    at = {base} + int64({self.index_type}(int32(key0 + line) * {stride})) + int64(column)",
            f"    if {pointer}_whole == 0 and int32(key0 + line) < n:",
            f"        copy_async(tile_at + to * 2, {pointer}, at)",
            "    else:",
            f"        for i in range({PIECE}):",
            "            filled = uint16(0)",
            "            if int32(key0 + line) < n:",
            f"                filled = {pointer}[at + i]",
            "            tile_b[to + i] = filled",
            "copy_async_commit()",
            "copy_async_wait(0)",
            "cuda.syncthreads()",
        ]

    def _rows(self) -> list[str]:
        """The warp's rows, which stay in registers."""
        lines = [
            f"row_{half} = int32(min(int32(row0 + warp_row + lane_row + {8 * half}), int32(m - 1)))" for half in (0, 1)
        ]
        starts = [f"a_start + int64({self.index_type}(row_{half} * {self._stride('a_m')}))" for half in (0, 1)]
        for step in range(self.size // 16):
            lines += [
                f"a{step}_{i} = load_pair_u16(a, {starts[i & 1]} + int64(lane_pair) + {16 * step + 8 * (i >> 1)})"
                for i in range(4)
            ]
        return lines

    def _multiply(self, sums: str, count: int, load: str, step: int, a: Sequence[str]) -> list[str]:
        """Adds the product of a with each of ``count`` matrices, which ``load`` of an index gives two at a time."""
        lines = []
        for i in range(count):
            if i % 2 == 0:
                lines.append(f"b0, b1, b2, b3 = {load} + {i // 2 * step})")
            of_b = "b0, b1" if i % 2 == 0 else "b2, b3"
            lines.append(f"multiply_add_matrix_{self.storage[0]}({sums}, {4 * i}, {', '.join(a)}, {of_b})")
        return lines

    def scores(self) -> list[str]:
        form = self.form
        count = form.keys // 16
        products = [
            line
            for step in range(self.size // 16)
            for line in self._multiply(
                "score_sums",
                count,
                f"load_matrices(keys_at + {32 * step}",
                32 * self.pitch,
                [f"a{step}_{i}" for i in range(4)],
            )
        ]
        place = f"int64(int32((warp_half * {form.keys // 2} + lane_pair + {{}}) * {form.pitch} + warp_row + lane_row))"
        return [
            *self._fill("b", "b_start", self._stride("b_n")),
            f"clear_f32(score_sums, {4 * count})",
            *products,
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
            f"at_b = values_at + int64(int32(step * {32 * self.pitch}))",
            *self._multiply(
                "result_sums", self.size // 16, "load_matrices_transposed(at_b", 32, ("a0", "a1", "a2", "a3")
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
        pitch = form.width + RESULT_GAP
        placed = [
            f"to = int64(int32((warp_row + lane_row) * {pitch} + warp_half * {self.size // 2} + lane_pair))",
            *(
                f"store_f32x2(tile_c, to + {8 * number + half * 8 * pitch}, "
                f"result_sums[{4 * number + 2 * half}], result_sums[{4 * number + 2 * half + 1}])"
                for number in range(self.size // 16)
                for half in (0, 1)
            ),
        ]
        stored = store_tile(form.result, "m", "d", Element("f32"), self.epilogue, placed=placed, pitch=pitch)
        return ["cuda.syncthreads()", *stored.splitlines()]
