"""Attention by tensor cores: the walk of `stream`, whose two products are those of small matrices.

A warp has 16 rows, whose scores, weights and sums never leave its registers. Keys and values of a tile stand in shared
memory in their own type; the copies of the next keys go on while those of this tile are used. Where there are many
rows, the four warps of a block have 64 of them. Few rows are all warps' rows: then each has a part of the keys of
every tile, and in the end the warps add up what they have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..program.symbolic import Dim, hint
from .attend import Form
from .codegen import text_property
from .stream_kernel import StreamKernel
from .tiles import indented, log2, store_rows

GAP = 8
"""Elements between rows in shared memory, so that neighbouring rows begin in other banks."""
RESULT_GAP = 8
"""The same of floats, between rows of the result."""
PIECE = 8
"""Elements of 16 bytes, which are copied at once."""
WARPS, WARP_ROWS = 4, 16
FEW_MATRIX_ROWS = WARP_ROWS


def matrix_form(rows: Dim, width: Dim) -> Form:
    """For so many rows, by what is expected, and results of up to 128 columns."""
    columns = 64 if hint(width) <= 64 else 128
    if hint(rows) > FEW_MATRIX_ROWS:
        return Form(WARPS * WARP_ROWS, 64, columns, 32 * WARPS, resident=False)
    return Form(WARP_ROWS, 128 if columns == 64 else 64, columns, 32 * WARPS, resident=False)


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

    @property
    def tile_bytes(self) -> int:
        """Of the keys of a tile, or of its values."""
        return self.form.keys * self.pitch * 2

    @property
    def shares_rows(self) -> bool:
        """Whether all warps have the same rows, and each a part of the keys."""
        return self.form.m == WARP_ROWS

    @property
    def warp_keys(self) -> int:
        """Keys of a tile that a warp has."""
        return self.form.keys // WARPS if self.shares_rows else self.form.keys

    @text_property
    def body(self) -> str:
        lines = [*self.prologue(), *self._bounds(), *self._walk(), *self._end(), *self.store()]
        return "\n".join(indented(lines, 1))

    def prologue(self) -> list[str]:
        form = self.form
        words = max(2 * self.tile_bytes // 4, form.m * (form.width + RESULT_GAP))
        return [
            *self.block_place(),
            "lane = int32(thread & 31)",
            "warp = int32(thread >> 5)",
            "lane_row = int32(lane >> 2)",
            "lane_pair = int32((lane & 3) * 2)",
            f"warp_row = {'int32(0)' if self.shares_rows else f'int32(warp * {WARP_ROWS})'}",
            f"warp_key = {f'int32(warp * {self.warp_keys})' if self.shares_rows else 'int32(0)'}",
            f"tile_c = array_pointer(cuda.shared.array({words}, float32, 16))",
            "tile_at = shared_address(tile_c)",
            # Where the warp's lanes find the rows of its first matrices of keys, and of values.
            "eight = int32(lane & 7)",
            "low, high = int32(((lane >> 3) & 1) * 8), int32(((lane >> 4) & 1) * 8)",
            f"keys_at = tile_at + int64(int32(((warp_key + eight + high) * {self.pitch} + low) * 2))",
            f"values_at = tile_at + int64(int32(((warp_key + eight + low) * {self.pitch} + high) * 2"
            f" + {self.tile_bytes}))",
            self._aligned("b_whole", "b", "b_start", self._stride("b_n")),
            self._aligned("c_whole", "c", "c_start", self._stride("c_n")),
            *self._rows(),
            f"score_sums = registers_f32({self.warp_keys // 2})",
            f"result_sums = registers_f32({self.size // 2})",
            *self.weights.block_lines,
        ]

    def _aligned(self, name: str, pointer: str, base: str, stride: str) -> str:
        """Says whether rows begin at multiples of 16 bytes."""
        return f"{name} = opaque_i32(int32(((address_of({pointer}) + {base} * 2) & 15) | (int64({stride}) & 7)))"

    def _bounds(self) -> list[str]:
        """Narrows ``n`` and the tiles to the keys of the block's rows, and to those of its part."""
        known, shift = self.range, log2(self.form.keys)
        lines = [*known.block_lines, "tile0 = int32(0)"]
        if known.first or known.end:
            lines += ["lower, upper = int64(n), int64(0)"]
            each = ["row = int32(min(int32(row0 + r), int32(m - 1)))", *known.row_lines]
            each.append(f"lower = min(lower, {known.first or 'int64(0)'})")
            each.append(f"upper = max(upper, {known.end or 'int64(n)'})")
            lines += [f"for r in range(int32(lane & {min(self.form.m, 32) - 1}), {self.form.m}, 32):"]
            lines += [
                *indented(each, 1),
                "first = int32(max(int64(0), min(int64(n), lower)))",
                "end = int32(max(int64(0), min(int64(n), upper)))",
                "for step in range(5):",
                "    first = min(first, shfl_xor_i32(first, int32(16 >> step)))",
                "    end = max(end, shfl_xor_i32(end, int32(16 >> step)))",
                "n = end",
                f"tiles = int32((n + {self.form.keys - 1}) >> {shift})",
                f"tile0 = int32(first >> {shift})",
            ]
        if self.split:
            lines += self._part()
        return lines

    def _fill(self, pointer: str, base: str, stride: str, tile: str, place: int) -> list[str]:
        """Begins to copy a tile's rows of keys or values to shared memory; the last row stands for those behind it."""
        per_row, threads = self.size // PIECE, self.form.threads
        each = [
            f"piece = int32(thread + part_of_tile * {threads})",
            f"line = int32(piece // {per_row})",
            f"column = int32((piece - line * {per_row}) * {PIECE})",
            f"source = int32(min(int32({tile} * {self.form.keys} + line), int32(n - 1)))",
            f"at = {base} + int64({self.index_type}(source * {stride})) + int64(column)",
            f"to = int32(line * {self.pitch} + column)",
        ]
        count = self.form.keys * per_row // threads
        return [
            f"if {pointer}_whole == 0:",
            f"    for part_of_tile in range({count}):",
            *indented(each, 2),
            f"        copy_async(tile_at + int64(int32(to * 2 + {place})), {pointer}, at)",
            "else:",
            f"    for part_of_tile in range({count}):",
            *indented(each, 2),
            f"        for i in range(0, {PIECE}, 2):",
            f"            word = uint32({pointer}[at + i]) | (uint32({pointer}[at + i + 1]) << 16)",
            f"            tile_c[int64(int32((to + i) // 2 + {place // 4}))] = u32_as_f32(word)",
            "copy_async_commit()",
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

    def _walk(self) -> list[str]:
        keys = ("b", "b_start", self._stride("b_n"))
        products = [
            line
            for step in range(self.size // 16)
            for line in self._multiply(
                "score_sums",
                self.warp_keys // 8,
                f"load_matrices(keys_at + {32 * step}",
                32 * self.pitch,
                [f"a{step}_{i}" for i in range(4)],
            )
        ]
        body = [
            *self._fill("c", "c_start", self._stride("c_n"), "tile", self.tile_bytes),
            "copy_async_wait(1)",
            "cuda.syncthreads()",
            f"clear_f32(score_sums, {self.warp_keys // 2})",
            *products,
            "cuda.syncthreads()",
            "if int32(tile + 1) < tiles:",
            *indented(self._fill(*keys, "int32(tile + 1)", 0), 1),
            "else:",
            "    copy_async_commit()",
            *self._softmax(),
            "copy_async_wait(1)",
            "cuda.syncthreads()",
            *self._weighted(),
            "cuda.syncthreads()",
        ]
        return [
            *(f"top_{half}, weight_{half} = float32(-math.inf), float32(0)" for half in (0, 1)),
            f"clear_f32(result_sums, {self.size // 2})",
            "if tile0 < tiles:",
            *indented(self._fill(*keys, "tile0", 0), 1),
            "for tile in range(tile0, tiles):",
            *indented(body, 1),
            "copy_async_wait(0)",
            "cuda.syncthreads()",
        ]

    def _places(self, half: int) -> list[int]:
        """Where the scores of a thread's first or second row are."""
        return [4 * number + 2 * half + i for number in range(self.warp_keys // 8) for i in (0, 1)]

    def _softmax(self) -> list[str]:
        """Makes weights of the tile's scores; ``factor_*`` is what their new maximum makes of sums so far."""
        one = self.weights.passes[0]
        lines = []
        for number in range(self.warp_keys // 8):
            for i in (0, 1):
                place = f"tile * {self.form.keys} + warp_key + lane_pair + {8 * number + i}"
                lines += [
                    f"key = int32({place})",
                    "exists = key < n",
                    "key = int32(min(key, int32(n - 1)))",
                    *self.weights.key_lines,
                ]
                for half in (0, 1):
                    at = 4 * number + 2 * half + i
                    lines += [f"row = row_{half}", f"total = score_sums[{at}]", *self.weights.row_lines, *one.lines]
                    lines.append(f"score_sums[{at}] = choose(exists, {one.value}, float32(-math.inf))")
        for half in (0, 1):
            places = self._places(half)
            lines += [f"most = top_{half}", *(f"most = max(most, score_sums[{at}])" for at in places)]
            lines += [f"most = max(most, shfl_xor_f32(most, int32({lanes})))" for lanes in (1, 2)]
            lines += [
                f"shift = choose(most == float32(-math.inf), float32(0), most) * float32({math.log2(math.e)!r})",
                f"factor_{half} = libdevice.exp2f(fma_f32(top_{half}, float32({math.log2(math.e)!r}), -shift))",
                f"top_{half} = most",
                "weight = float32(0)",
            ]
            for at in places:
                power = f"fma_f32(score_sums[{at}], float32({math.log2(math.e)!r}), -shift)"
                lines += [f"x = libdevice.exp2f({power})", f"score_sums[{at}] = x", "weight += x"]
            lines.append(f"weight_{half} = weight_{half} * factor_{half} + weight")
        return [*lines, self._scale()]

    def _scale(self) -> str:
        return f"scale_matrix_f32(result_sums, factor_0, factor_1, {self.size // 8})"

    def _weighted(self) -> list[str]:
        """Adds the products of the tile's weights and values."""
        lines = []
        for step in range(self.warp_keys // 16):
            firsts = [8 * step + 2 * (i & 1) + 4 * (i >> 1) for i in range(4)]
            lines += [
                f"a{i} = pair_{self.storage[0]}(score_sums[{at}], score_sums[{at + 1}])" for i, at in enumerate(firsts)
            ]
            lines.append(f"at_b = values_at + {32 * self.pitch * step}")
            load = "load_matrices_transposed(at_b"
            lines += self._multiply("result_sums", self.size // 8, load, 32, ("a0", "a1", "a2", "a3"))
        return lines

    def _end(self) -> list[str]:
        """``factor_*``: what makes the result, or the sums of a part, of the warp's sums."""
        halves = (0, 1)
        lines = [f"weight_{half} += shfl_xor_f32(weight_{half}, int32({lanes}))" for half in halves for lanes in (1, 2)]
        lines += [f"own_{half} = top_{half}" for half in halves]
        if self.shares_rows:
            lines += self._of_all_warps()
        if self.split:
            for half in halves:
                row = f"int32(row0 + warp_row + lane_row + {8 * half})"
                place = f"(int64(part) * batches + int64(batch)) * int64(m) + int64({row})"
                once = " and warp == 0" if self.shares_rows else ""
                lines += [
                    f"if lane_pair == 0 and {row} < m{once}:",
                    f"    maxima[{place}] = top_{half}",
                    f"    weights[{place}] = weight_{half}",
                ]
        for half in halves:
            lines += self._factor(half)
        return [*lines, self._scale()]

    def _of_all_warps(self) -> list[str]:
        """``top_*`` and ``weight_*`` of all warps in place of the warp's own."""
        lines = [
            f"{name} = array_pointer(cuda.shared.array({WARPS * WARP_ROWS}, float32, 16))"
            for name in ("tops_t", "weights_t")
        ]
        lines += ["if lane_pair == 0:"]
        for half in (0, 1):
            place = f"int64(int32(warp * {WARP_ROWS} + lane_row + {8 * half}))"
            lines += [f"    tops_t[{place}] = top_{half}", f"    weights_t[{place}] = weight_{half}"]
        lines.append("cuda.syncthreads()")
        for half in (0, 1):
            places = [f"int64(int32(lane_row + {WARP_ROWS * warp + 8 * half}))" for warp in range(WARPS)]
            lines += [f"top_{half} = max(top_{half}, tops_t[{place}])" for place in places]
            lines.append(f"shift = choose(top_{half} == float32(-math.inf), float32(0), top_{half})")
            lines.append("weight = float32(0)")
            lines += [f"weight += weights_t[{place}] * libdevice.expf(tops_t[{place}] - shift)" for place in places]
            lines.append(f"weight_{half} = weight")
        return lines

    def _factor(self, half: int) -> list[str]:
        top = f"top_{half}"
        lines = [f"most = {top}"]
        sink = "" if self.split else self.range.sink
        if sink:
            lines += [f"row = row_{half}", *self.range.row_lines, f"most = max(most, {sink})"]
        lines.append("shift = choose(most == float32(-math.inf), float32(0), most)")
        lines.append(f"factor_{half} = libdevice.expf(own_{half} - shift)")
        if self.split:
            return lines
        lines.append(f"weight = weight_{half} * libdevice.expf({top} - shift)")
        if sink:
            lines.append(f"weight += libdevice.expf({sink} - shift)")
        if self.nan:
            return [*lines, f"factor_{half} /= weight"]
        return [*lines, f"factor_{half} = choose(weight == float32(0), float32(0), factor_{half} / weight)"]

    def store(self) -> list[str]:
        form = self.form
        pitch = form.width + RESULT_GAP
        halves = [(number, half) for number in range(self.size // 8) for half in (0, 1)]
        each = [(8 * number + half * 8 * pitch, 4 * number + 2 * half) for number, half in halves]
        own = [f"store_f32x2(tile_c, to + {to}, result_sums[{at}], result_sums[{at + 1}])" for to, at in each]
        placed = [f"to = int64(int32((warp_row + lane_row) * {pitch} + lane_pair))"]
        if not self.shares_rows:
            placed += own
        else:
            added = [f"tile_c[to + {to + i}] += result_sums[{at + i}]" for to, at in each for i in (0, 1)]
            for warp in range(WARPS):
                placed += [f"if warp == {warp}:", *indented(added if warp else own, 1)]
                placed += ["cuda.syncthreads()"] if warp + 1 < WARPS else []
        return store_rows(form.result, "m", "d", "{}", self.epilogue, placed, pitch).splitlines()
