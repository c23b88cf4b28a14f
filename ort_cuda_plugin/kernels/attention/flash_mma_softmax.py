"""Online softmax of flash attention on tensor cores: a loop over tiles of keys, in the registers of a warp.

A warp has 16 or 32 rows and a part of the keys of each tile. Scores, weights and accumulators never leave its
registers, and it needs no other warp in the loop. Keys and values of a tile stand in shared memory in their own type,
in two stages: the next tile is copied while this one is used, and a step needs one barrier. float32 is rounded to TF32
on the way to the tensor cores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..codegen.simt_fragments import indented
from .flash_mma_tiles import MATRIX_ROWS, StreamTiles

STEP_BYTES = 32
"""Bytes of a row that one step of mma along the inner dimension reads."""
MANY_THREADS = 256
"""Maximum threads of a block that can each have 255 registers."""
ONES = {"f16": 0x3C003C00, "bf16": 0x3F803F80, "tf32": 0x3F800000}
"""A register full of ones."""


@dataclass(frozen=True)
class OnlineSoftmax(StreamTiles):
    """The loop over the tiles of keys; ``factor`` multiplies the values of scores (`Reading`)."""

    factor: float = 1.0

    @property
    def steps(self) -> range:
        """Of the first product, along the elements of a head."""
        return range(self.size * self.itemsize // STEP_BYTES)

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
    def matrices(self) -> range:
        """Matrices of rows of a warp."""
        return range(self.form.warp_rows // MATRIX_ROWS)

    @property
    def halves(self) -> range:
        """Rows of a thread: every eighth one."""
        return range(2 * len(self.matrices))

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
        """Names of a thread's scores of one of its rows."""
        at = [4 * number + 2 * (half & 1) + i for number in range(self.form.warp_keys // 8) for i in (0, 1)]
        return [f"score_sums_{half >> 1}[{place}]" for place in at]

    def _softmax(self) -> list[str]:
        """Makes weights of the tile's scores, and rescales the accumulators to the new maximum."""
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
        """Rescales the accumulators to a new maximum, which most tiles do not have."""
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
