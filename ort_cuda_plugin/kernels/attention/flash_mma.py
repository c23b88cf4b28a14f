"""Attention by tensor cores: the walk of `stream`, whose two products are those of small matrices.

A warp has 16 or 32 rows and a part of the keys of each tile. Its scores, weights and sums never leave its registers,
and it needs no other warp before the walk ends: then the parts of a row meet in shared memory. Keys and values of a
tile stand there in their own type, twice: the next tile is copied while this one is used, and a step needs one barrier.
Tensor cores take float32 as TF32, to which it is rounded on the way from there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..codegen.block_mapping import batch_offsets
from ..codegen.epilogue import RowPlace
from ..codegen.simt_fragments import indented, log2
from ..codegen.source import text_property
from .flash_mma_shapes import MATRIX_ROWS
from .flash_mma_tiles import StreamTiles

RESULT_GAP = 8
"""Floats between rows of the result in shared memory, so that neighbouring rows begin in other banks."""
STEP_BYTES = 32
"""Bytes of a row that one step of mma along the inner dimension reads."""
LANES = 4
"""Columns of the result that a thread stores at once."""
MANY_THREADS = 256
"""Maximum threads of a block that can each have 255 registers."""
MOST_SHARED = 96 << 10
"""Bytes of a block that every device has for the results of parts."""
ONES = {"f16": 0x3C003C00, "bf16": 0x3F803F80, "tf32": 0x3F800000}
"""A register full of ones."""
LOG2_E = f"float32({math.log2(math.e)!r})"


@dataclass(frozen=True)
class MatrixStreamKernel(StreamTiles):
    """The kernel for heads of a multiple of 16 elements."""

    factor: float = 1.0
    result: RowPlace = field(default_factory=RowPlace)

    @property
    def name(self) -> str:
        return f"matrix_{super().name}"

    @property
    def steps(self) -> range:
        """Of the first product, along the elements of a head."""
        return range(self.size * self.itemsize // STEP_BYTES)

    @property
    def rounds(self) -> int:
        """How often the parts meet: for all columns at once, where their sums fit, or for half of them."""
        whole = self.form.parts * self.form.m * (self.form.width + RESULT_GAP) * 4
        return 1 if whole <= MOST_SHARED else 2

    @property
    def round_columns(self) -> int:
        return self.form.width // self.rounds

    @property
    def result_pitch(self) -> int:
        return self.round_columns + RESULT_GAP

    @property
    def row_pitch(self) -> int:
        """From part to part of what each row has: neither rows nor parts that are read together share a bank."""
        return self.form.m + (32 // self.form.parts if self.form.parts > 1 else 0)

    @property
    def log2(self) -> str:
        """What makes powers of 2 of a reading's values."""
        known = f"float32({self.factor * math.log2(math.e)!r})"
        return f"({self.weights.unit} * {known})" if self.weights.unit else known

    @property
    def is_near(self) -> bool:
        """Whether powers are those of differences: masked values may be so large that their products are not exact."""
        return self.factor == 1.0 and not self.weights.unit

    @property
    def shared_bytes(self) -> int:
        """That a launch asks for: stages of tiles and the block's rows, and then the sums of parts."""
        operands = 2 * self.form.stages * self.tile_bytes + self.form.m * self.pitch * self.itemsize
        return max(operands, self.form.parts * self.form.m * self.result_pitch * 4)

    @property
    def matrices(self) -> range:
        """Matrices of rows of a warp."""
        return range(self.form.warp_rows // MATRIX_ROWS)

    @property
    def halves(self) -> range:
        """Rows of a thread: every eighth one."""
        return range(2 * len(self.matrices))

    @text_property
    def body(self) -> str:
        lines = [*self.prologue(), *self._bounds(), *self._walk(), *self._end()]
        return "\n".join(indented(lines, 1))

    def block_place(self) -> list[str]:
        form = self.form
        return [
            f"tiles = int32((n + {form.keys - 1}) >> {log2(form.keys)})",
            "block = int32(cuda.blockIdx.x)",
            "batch = quotient_i32(block, row_divisor)",
            f"row0 = int32((block - batch * row_blocks) * {form.m})",
            "column0 = int32(0)",
            "thread = int32(cuda.threadIdx.x)",
            *batch_offsets("abc", "start", self.batch_rank, "quotient_i32(digits, batch{i}_divisor)").lines,
        ]

    def prologue(self) -> list[str]:
        form, rows_at = self.form, 2 * self.form.stages * self.tile_bytes
        parts, line = form.parts, self.pitch * self.itemsize
        return [
            *self.block_place(),
            "lane = int32(thread & 31)",
            "warp = int32(thread >> 5)",
            "lane_row = int32(lane >> 2)",
            "lane_pair = int32((lane & 3) * 2)",
            f"part_of_keys = int32(warp & {parts - 1})",
            f"warp_row = int32((warp >> {log2(parts)}) * {form.warp_rows})",
            f"warp_key = int32(part_of_keys * {form.warp_keys})",
            "tile_c = array_pointer(cuda.shared.array(0, float32, 16))",
            "tile_at = shared_address(tile_c)",
            # Where the warp's lanes find the first matrices of its rows, of keys and of values.
            "eight = int32(lane & 7)",
            "low, high = int32(((lane >> 3) & 1) * 8), int32(((lane >> 4) & 1) * 8)",
            f"rows_at = tile_at + int64(int32((warp_row + eight + low) * {line} + high * 2 + {rows_at}))",
            f"keys_at = tile_at + int64(int32((warp_key + eight + high) * {line} + low * 2))",
            *self._values_place(line),
            *self.copying(),
            *(
                f"row_{half} = int32(min(int32(row0 + warp_row + lane_row + {8 * half}), int32(m - 1)))"
                for half in self.halves
            ),
            *(f"score_sums_{i} = registers_f32({form.warp_keys // 2})" for i in self.matrices),
            *(f"result_sums_{i} = registers_f32({self.size // 2})" for i in self.matrices),
            *(f"weight_sums_{i} = registers_f32(4)" for i in self.matrices),
            *self.weights.block_lines,
        ]

    def _values_place(self, line: int) -> list[str]:
        """The lane's first values: of matrices that are loaded transposed, or, of float32, in a line of a key."""
        if self.kind == "tf32":
            place = f"(warp_key + lane_pair) * {line} + lane_row * {self.itemsize} + {self.tile_bytes}"
            return [f"values_at = int32({place})"]
        place = f"(warp_key + eight + low) * {line} + high * 2 + {self.tile_bytes}"
        return [f"values_at = tile_at + int64(int32({place}))"]

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

    # ---- the walk ----

    def _walk(self) -> list[str]:
        form = self.form
        of_warp = [
            f"warp_first = int32(tile * {form.keys} + warp_key)",
            "if warp_first < n:",
            *indented([*self._scores(), *self._softmax(), *self._weighted()], 1),
        ]
        lines = [
            *(f"top_{half} = float32(-math.inf)" for half in self.halves),
            *(f"clear_f32(result_sums_{i}, {self.size // 2})" for i in self.matrices),
            *(f"clear_f32(weight_sums_{i}, 4)" for i in self.matrices),
            "stage = int32(0)",
        ]
        begin = [*self.fill_rows(), *self.fill("tile0", "stage")]
        arrived = ["copy_async_wait(0)", "cuda.syncthreads()"]
        kept = [line for step in self.steps for line in self._rows(step, kept=True)]
        if form.stages == 1:
            return [
                *lines,
                "if tile0 < tiles:",
                *indented([*begin, *arrived, *kept, "tile = tile0", *of_warp], 1),
            ]
        other = f"int32({form.stages * self.tile_bytes} - stage)"
        body = [
            *arrived,
            "if tile == tile0:",
            *indented(kept, 1),
            "if int32(tile + 1) < tiles:",
            *indented(self.fill("int32(tile + 1)", other), 1),
            *of_warp,
            f"stage = {other}",
        ]
        return [
            *lines,
            *(
                f"a{i}_{4 * step + part} = uint32(0)"
                for i in self.matrices
                for step in self._kept_steps(i)
                for part in range(4)
            ),
            "if tile0 < tiles:",
            *indented(begin, 1),
            "for tile in range(tile0, tiles):",
            *indented(body, 1),
        ]

    def _kept_steps(self, matrix: int) -> range:
        """Steps of a matrix of rows that stay in registers; the others are loaded for each tile.

        Those of float32 take twice as many, and places of a mask take some, which many warps do not have.
        """
        if matrix == 0 or self.form.stages == 1:
            return self.steps
        if self.kind == "tf32":
            return self.steps[:0]
        if self.form.threads <= MANY_THREADS:
            return self.steps
        return self.steps[:0] if self.weights.row_lines or self.weights.key_lines else self.steps[1:]

    def _rows(self, step: int, *, kept: bool) -> list[str]:
        """Loads a step of the warp's rows: of those that are kept, or of the others."""
        lines = []
        for i in self.matrices:
            if (step in self._kept_steps(i)) != kept:
                continue
            names = [f"a{i}_{4 * step + part}" for part in range(4)]
            place = i * MATRIX_ROWS * self.pitch * self.itemsize + STEP_BYTES * step
            lines += [f"{', '.join(names)} = load_matrices(rows_at + {place})", *self._rounded(names)]
        return lines

    def _rounded(self, names: Sequence[str]) -> list[str]:
        """Rounds registers to what tensor cores multiply, where memory has more of each number."""
        return [f"{name} = round_tf32(u32_as_f32({name}))" for name in names] if self.kind == "tf32" else []

    def _multiplied(self, sums: str, at: int, a: str, b: str) -> str:
        return f"multiply_add_matrix_{self.kind}({sums}, {at}, {a}, {b})"

    def _multiply(self, sums: str, count: int, load: str, step: int, a: Sequence[str]) -> list[str]:
        """Adds the products of each a and ``count`` matrices, of which ``load`` of an index gives two at a time."""
        lines = []
        for i in range(0, count, 2):
            lines += [f"b0, b1, b2, b3 = {load} + {i // 2 * step})", *self._rounded(["b0", "b1", "b2", "b3"])]
            lines += [
                self._multiplied(f"{sums}_{number}", 4 * i + 4 * j, of_a, of_b)
                for j, of_b in enumerate(("b0, b1", "b2, b3"))
                for number, of_a in zip(self.matrices, a, strict=True)
            ]
        return lines

    def _scores(self) -> list[str]:
        lines = ["stage_at = keys_at + int64(stage)"]
        lines += [f"clear_f32(score_sums_{i}, {self.form.warp_keys // 2})" for i in self.matrices]
        for step in self.steps:
            rows = [", ".join(f"a{i}_{4 * step + part}" for part in range(4)) for i in self.matrices]
            lines += self._rows(step, kept=False)
            load = f"load_matrices(stage_at + {STEP_BYTES * step}"
            lines += self._multiply("score_sums", self.form.warp_keys // 8, load, 16 * self.pitch * self.itemsize, rows)
        return lines

    def _places(self, half: int) -> list[str]:
        """A thread's scores of one of its rows."""
        at = [4 * number + 2 * (half & 1) + i for number in range(self.form.warp_keys // 8) for i in (0, 1)]
        return [f"score_sums_{half >> 1}[{place}]" for place in at]

    def _softmax(self) -> list[str]:
        """Makes weights of the tile's scores, and fits the sums so far to their new maximum."""
        one, keys = self.weights.passes[0], self.form.warp_keys
        lines, beyond = [], []
        for number in range(keys // 8):
            for i in (0, 1):
                at = 2 * number + i
                place = f"int32(warp_first + lane_pair + {8 * number + i})"
                lines += [f"key = int32(min({place}, int32(n - 1)))", *self.weights.key_lines]
                beyond += [f"exists = {place} < n"]
                for half in self.halves:
                    score = self._places(half)[at]
                    lines += [f"row = row_{half}", f"total = {score}", *self.weights.row_lines, *one.lines]
                    lines.append(f"{score} = {one.value}")
                    beyond.append(f"{score} = choose(exists, {score}, float32(-math.inf))")
        lines += [f"if int32(warp_first + {keys}) > n:", *indented(beyond, 1)]
        for half in self.halves:
            scores = self._places(half)
            lines.append(f"most_{half} = {scores[0]}")
            lines += [f"most_{half} = fmax_f32(most_{half}, {score})" for score in scores[1:]]
            lines += [f"most_{half} = fmax_f32(most_{half}, shfl_xor_f32(most_{half}, int32({n})))" for n in (1, 2)]
            lines.append(f"most_{half} = fmax_f32(most_{half}, top_{half})")
        if self.form.stages > 1:
            lines += self._fitted()
        for half in self.halves:
            lines += [f"top_{half} = most_{half}", self._shift(half)]
            lines += [f"{x} = {self._power(x)}" for x in self._places(half)]
        return lines

    def _shift(self, half: int) -> str:
        """What powers of a row's scores lack: its maximum, and nothing where all keys are left out."""
        most = f"choose(most_{half} == float32(-math.inf), float32(0), most_{half})"
        return f"shift = {most}" if self.is_near else f"shift = {most} * {self.log2}"

    def _power(self, score: str) -> str:
        if self.is_near:
            return f"half_exp2(({score} - shift) * {self.log2})"
        return f"half_exp2(fma_f32({score}, {self.log2}, -shift))"

    def _fitted(self) -> list[str]:
        """Fits the sums so far to a new maximum, which most tiles do not have."""
        grown = " or ".join(f"(most_{half} > top_{half} and top_{half} > float32(-math.inf))" for half in self.halves)
        fitted = [
            line
            for half in self.halves
            for line in (
                self._shift(half),
                f"factor_{half} = {self._power(f'top_{half}')}",
            )
        ]
        fitted += [
            f"scale_matrix_f32({sums}_sums_{i}, factor_{2 * i}, factor_{2 * i + 1}, {count})"
            for sums, count in (("result", self.size // 8), ("weight", 1))
            for i in self.matrices
        ]
        return [f"if vote_any({grown}):", *indented(fitted, 1)]

    def _weighted(self) -> list[str]:
        """Adds the products of the tile's weights and values, and of the weights and ones: their sums."""
        ones = f"ones = uint32({ONES[self.kind]:#x})"
        if self.kind == "tf32":
            return [ones, *self._weighted_words()]
        lines = ["stage_at = values_at + int64(stage)", ones]
        for step in range(self.form.warp_keys // 16):
            firsts = [8 * step + 2 * (i & 1) + 4 * (i >> 1) for i in range(4)]
            for number in self.matrices:
                sums = f"score_sums_{number}"
                lines += [
                    f"w{number}_{i} = pair_{self.kind}({sums}[{at}], {sums}[{at + 1}])" for i, at in enumerate(firsts)
                ]
            lines += self._summed_weights()
            load = f"load_matrices_transposed(stage_at + {32 * self.pitch * step}"
            lines += self._multiply("result_sums", self.size // 8, load, 32, self._weight_matrices)
        return lines

    def _weighted_words(self) -> list[str]:
        """As `_weighted`, of float32, which no load transposes.

        A lane has the weights of neighbouring keys: these stand four keys apart in the matrices of both operands.
        """
        lines = ["value_at = int32((values_at + stage) >> 2)"]
        for step in range(self.form.warp_keys // 8):
            for number in self.matrices:
                sums = f"score_sums_{number}"
                lines += [f"w{number}_{i} = round_tf32({sums}[{4 * step + at}])" for i, at in enumerate((0, 2, 1, 3))]
            lines += self._summed_weights()
            for eight in range(self.size // 8):
                at = 8 * step * self.pitch + 8 * eight
                lines += [f"b{i} = round_tf32(tile_c[int64(value_at + {at + i * self.pitch})])" for i in (0, 1)]
                lines += [
                    self._multiplied(f"result_sums_{number}", 4 * eight, of_a, "b0, b1")
                    for number, of_a in zip(self.matrices, self._weight_matrices, strict=True)
                ]
        return lines

    @property
    def _weight_matrices(self) -> list[str]:
        return [", ".join(f"w{number}_{i}" for i in range(4)) for number in self.matrices]

    def _summed_weights(self) -> list[str]:
        return [
            self._multiplied(f"weight_sums_{number}", 0, of_a, "ones, ones")
            for number, of_a in zip(self.matrices, self._weight_matrices, strict=True)
        ]

    # ---- the end ----

    def _end(self) -> list[str]:
        """Gives the threads the factors of rows and parts, and stores the sums of all parts, columns by columns."""
        parts, count = self.form.parts, self.form.m * self.form.parts
        lines = [
            f"{name}_t = array_pointer(cuda.shared.array({parts * self.row_pitch}, float32, 16))"
            for name in ("tops", "weights", "factors")
        ]
        scaled = "" if self.factor == 1.0 else f" * float32({self.factor!r})"
        scaled += f" * {self.weights.unit}" if self.weights.unit else ""
        lines += [
            "if lane_pair == 0:",
            f"    to = int64(int32(part_of_keys * {self.row_pitch} + warp_row + lane_row))",
        ]
        for half in self.halves:
            lines.append(f"    tops_t[to + {8 * half}] = top_{half}{scaled}")
            lines.append(f"    weights_t[to + {8 * half}] = weight_sums_{half >> 1}[{2 * (half & 1)}]")
        each = self._factors()
        lines += [
            "cuda.syncthreads()",
            *([f"if thread < {count}:", *indented(each, 1)] if count < self.form.threads else each),
        ]
        for number in range(self.rounds):
            lines += [
                *(["cuda.syncthreads()"] if number else []),
                *self._placed(number),
                "cuda.syncthreads()",
                *self._added(number),
            ]
        return lines

    def _factors(self) -> list[str]:
        """The factor of each row and part of its keys: neighbouring threads have the parts of a row."""
        parts = self.form.parts
        lanes = [1 << bit for bit in range(log2(parts))]
        sink = "" if self.split else self.range.sink
        lines = [
            f"own_row = int32(row0 + (thread >> {log2(parts)}))",
            f"at = int64(int32((thread & {parts - 1}) * {self.row_pitch} + (thread >> {log2(parts)})))",
            "top = tops_t[at]",
            "most = top",
            *(f"most = fmax_f32(most, shfl_xor_f32(most, int32({lane})))" for lane in lanes),
        ]
        if sink:
            lines += ["row = int32(min(own_row, int32(m - 1)))", *self.range.row_lines]
            lines.append(f"most = fmax_f32(most, {sink})")
        lines += [
            "shift = choose(most == float32(-math.inf), float32(0), most)",
            f"factor = half_exp2((top - shift) * {LOG2_E})",
            "weight = weights_t[at] * factor",
            *(f"weight += shfl_xor_f32(weight, int32({lane}))" for lane in lanes),
        ]
        if sink:
            lines.append(f"weight += half_exp2(({sink} - shift) * {LOG2_E})")
        if self.split:
            place = "(int64(part) * batches + int64(batch)) * int64(m) + int64(own_row)"
            lines += [
                f"if (thread & {parts - 1}) == 0 and own_row < m:",
                f"    maxima[{place}] = most",
                f"    weights[{place}] = weight",
            ]
        elif self.nan:
            lines.append("factor *= half_reciprocal(weight)")
        else:
            lines.append("factor = choose(weight == float32(0), float32(0), factor * half_reciprocal(weight))")
        return [*lines, "factors_t[int64(thread)] = factor"]

    def _placed(self, number: int) -> list[str]:
        """Puts the warps' sums of a round's columns into shared memory."""
        pitch, columns = self.result_pitch, self.round_columns
        place = f"(part_of_keys * {self.form.m} + warp_row + lane_row) * {pitch} + lane_pair"
        return [
            f"to = int64(int32({place}))",
            *(
                f"store_f32x2(tile_c, to + {(MATRIX_ROWS * i + 8 * half) * pitch + 8 * eight - number * columns},"
                f" result_sums_{i}[{4 * eight + 2 * half}], result_sums_{i}[{4 * eight + 2 * half + 1}])"
                for i in self.matrices
                for eight in range(number * columns // 8, min((number + 1) * columns, self.size) // 8)
                for half in (0, 1)
            ),
        ]

    def _added(self, number: int) -> list[str]:
        """Stores the sums of all parts: a thread has four neighbouring columns of some rows, or twice as many."""
        form, pitch, parts = self.form, self.result_pitch, self.form.parts
        lanes = form.width // 2 // LANES
        groups = range(0, self.round_columns, form.width // 2)
        body = [
            f"own_row = int32(row0 + (chunk >> {log2(lanes)}))",
            f"at = int64(int32((chunk >> {log2(lanes)}) * {pitch} + (chunk & {lanes - 1}) * {LANES}))",
            f"of_row = int64(int32((chunk >> {log2(lanes)}) * {parts}))",
        ]
        for i in range(0, parts, 4):
            names = [f"factor_{j}" for j in range(i, min(i + 4, parts))]
            load = "load_f32x4(factors_t, of_row" if parts > 1 else "factors_t[of_row"
            body.append(f"{', '.join(names)} = {load} + {i}{')' if parts > 1 else ']'}")
        stores = ["row = own_row", *self.result.row_lines]
        for group in groups:
            totals = []
            for part in range(parts):
                place = group + part * form.m * pitch
                totals.append(f"x0, x1, x2, x3 = load_f32x4(tile_c, at + {place})")
                for i in range(LANES):
                    product = f"x{i} * factor_{part}" if part == 0 else f"fma_f32(x{i}, factor_{part}, total_{i})"
                    totals.append(f"total_{i} = {product}")
            column = number * self.round_columns + group
            stored = [
                *totals,
                f"column = int32((chunk & {lanes - 1}) * {LANES} + {column})",
                *self.result.stores("column", [f"total_{i}" for i in range(LANES)]),
            ]
            may_end = column + form.width // 2 > self.size
            condition = f"if (chunk & {lanes - 1}) * {LANES} + {column} < {self.size}:"
            stores += [condition, *indented(stored, 1)] if may_end else stored
        chunks = form.m * lanes
        if chunks < form.threads:
            return ["chunk = int32(thread)", f"if chunk < {chunks}:", *indented(self._of_rows(body, stores), 1)]
        return [
            line
            for first in range(0, chunks, form.threads)
            for line in (f"chunk = int32(thread + {first})", *self._of_rows(body, stores))
        ]

    @staticmethod
    def _of_rows(body: Sequence[str], stores: Sequence[str]) -> list[str]:
        return [*body, "if own_row < m:", *indented(stores, 1)]
