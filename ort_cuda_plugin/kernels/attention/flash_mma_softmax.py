"""Online softmax of FlashAttention on tensor cores: the loop over tiles of keys, in the registers of a warp.

A warp owns 16 or 32 rows and a slice of the keys of each tile. Scores, weights and accumulators stay in its registers;
warps exchange nothing in the loop. K and V tiles are in shared memory in their storage type. With two pipeline stages,
the next tile is copied while the current one is multiplied, with one barrier per tile. A kernel with one stage
processes a single tile of keys. float32 operands are rounded to TF32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..codegen.simt_fragments import indented
from .flash_mma_tiles import MATRIX_ROWS, StreamTiles

STEP_BYTES = 32
"""Bytes of an operand's row that one mma instruction consumes along k (m16n8k16 of 16 bits, m16n8k8 of TF32)."""
MANY_THREADS = 256
"""Maximum threads of a block whose threads can each have the maximum of 255 registers (65,536 per block)."""
ONES = {"f16": 0x3C003C00, "bf16": 0x3F803F80, "tf32": 0x3F800000}
"""By operand type, the bits of a register that holds ones. The mma product weights @ ones sums each row's weights."""


@dataclass(frozen=True)
class OnlineSoftmax(StreamTiles):
    """The kernel's loop over tiles of keys. ``factor`` multiplies the modified scores (`Reading.factor`)."""

    factor: float = 1.0

    @property
    def steps(self) -> range:
        """k steps of Q @ K^T, along the elements of a head."""
        return range(self.size * self.itemsize // STEP_BYTES)

    @property
    def log2(self) -> str:
        """Expression of the factor that converts a modified score to an exponent for exp2: all factors * log2(e)."""
        known = f"float32({self.factor * math.log2(math.e)!r})"
        return f"({self.weights.unit} * {known})" if self.weights.unit else known

    @property
    def is_near(self) -> bool:
        """Whether the kernel subtracts a row's maximum before it multiplies by `log2`; if not, one FMA does both.

        True without factors: then a score may include a large mask value, whose product with log2(e) is too inexact.
        """
        return self.factor == 1.0 and not self.weights.unit

    @property
    def row_matrices(self) -> range:
        """Indices of the 16-row mma operands (m16) that a warp's rows consist of."""
        return range(self.form.warp_rows // MATRIX_ROWS)

    @property
    def thread_rows(self) -> range:
        """Indices of the rows whose scores a thread holds: every eighth row of its warp."""
        return range(2 * len(self.row_matrices))

    def _key_loop(self) -> list[str]:
        form = self.form
        of_warp = [
            f"warp_first = int32(tile * {form.keys} + warp_key)",
            "if warp_first < n:",
            *indented([*self._scores(), *self._softmax(), *self._multiply_values()], 1),
        ]
        lines = [
            *(f"top_{half} = float32(-math.inf)" for half in self.thread_rows),
            *(f"clear_f32(result_sums_{i}, {self.size // 2})" for i in self.row_matrices),
            *(f"clear_f32(weight_sums_{i}, 4)" for i in self.row_matrices),
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
                for i in self.row_matrices
                for step in self._kept_steps(i)
                for part in range(4)
            ),
            "if tile0 < tiles:",
            *indented(begin, 1),
            "for tile in range(tile0, tiles):",
            *indented(body, 1),
        ]

    def _kept_steps(self, matrix: int) -> range:
        """Return the k steps whose Q fragments of a 16-row matrix stay in registers in the loop over tiles of keys.

        The fragments of all other k steps are loaded again for each tile. Those of matrix 0 all stay. For matrix 1 the
        number of free registers decides: float32 fragments take twice as many as 16-bit ones, offsets of mask elements
        take some, and a thread has fewer than 255 if the block has more than `MANY_THREADS` threads.
        """
        if matrix == 0 or self.form.stages == 1:
            return self.steps
        if self.kind == "tf32":
            return self.steps[:0]
        if self.form.threads <= MANY_THREADS:
            return self.steps
        return self.steps[:0] if self.weights.row_lines or self.weights.key_lines else self.steps[1:]

    def _rows(self, step: int, *, kept: bool) -> list[str]:
        """Load Q fragments of a k step: with ``kept`` those of `_kept_steps`, else those that are reloaded per tile."""
        lines = []
        for i in self.row_matrices:
            if (step in self._kept_steps(i)) != kept:
                continue
            names = [f"a{i}_{4 * step + part}" for part in range(4)]
            offset = i * MATRIX_ROWS * self.pitch * self.itemsize + STEP_BYTES * step
            lines += [f"{', '.join(names)} = load_matrices(rows_at + {offset})", *self._rounded(names)]
        return lines

    def _rounded(self, names: Sequence[str]) -> list[str]:
        """Return lines that round float32 registers to TF32; none for other types."""
        return [f"{name} = round_tf32(u32_as_f32({name}))" for name in names] if self.kind == "tf32" else []

    def _multiplied(self, sums: str, at: int, a: str, b: str) -> str:
        return f"multiply_add_matrix_{self.kind}({sums}, {at}, {a}, {b})"

    def _multiply(self, sums: str, count: int, load: str, step: int, a: Sequence[str]) -> list[str]:
        """Add the products of each ``a`` matrix and ``count`` b matrices to accumulators ``sums``.

        ``load`` begins an ldmatrix call that reads two b matrices; ``step`` is the distance of its addresses, in bytes.
        """
        lines = []
        for i in range(0, count, 2):
            lines += [f"b0, b1, b2, b3 = {load} + {i // 2 * step})", *self._rounded(["b0", "b1", "b2", "b3"])]
            lines += [
                self._multiplied(f"{sums}_{number}", 4 * i + 4 * j, of_a, of_b)
                for j, of_b in enumerate(("b0, b1", "b2, b3"))
                for number, of_a in zip(self.row_matrices, a, strict=True)
            ]
        return lines

    def _scores(self) -> list[str]:
        lines = ["stage_at = keys_at + int64(stage)"]
        lines += [f"clear_f32(score_sums_{i}, {self.form.warp_keys // 2})" for i in self.row_matrices]
        for step in self.steps:
            rows = [", ".join(f"a{i}_{4 * step + part}" for part in range(4)) for i in self.row_matrices]
            lines += self._rows(step, kept=False)
            load = f"load_matrices(stage_at + {STEP_BYTES * step}"
            lines += self._multiply("score_sums", self.form.warp_keys // 8, load, 16 * self.pitch * self.itemsize, rows)
        return lines

    def _row_scores(self, half: int) -> list[str]:
        """Return the expressions of a thread's scores of row ``half``, an index of `thread_rows`."""
        at = [4 * number + 2 * (half & 1) + i for number in range(self.form.warp_keys // 8) for i in (0, 1)]
        return [f"score_sums_{half >> 1}[{index}]" for index in at]

    def _softmax(self) -> list[str]:
        """Convert the tile's scores to weights, and rescale the accumulators if a row's maximum has grown."""
        one, keys = self.weights.passes[0], self.form.warp_keys
        lines, beyond = [], []
        for number in range(keys // 8):
            for i in (0, 1):
                at = 2 * number + i
                index = f"int32(warp_first + lane_pair + {8 * number + i})"
                lines += [f"key = int32(min({index}, int32(n - 1)))", *self.weights.key_lines]
                beyond += [f"exists = {index} < n"]
                for half in self.thread_rows:
                    score = self._row_scores(half)[at]
                    lines += [f"row = row_{half}", f"total = {score}", *self.weights.row_lines, *one.lines]
                    lines.append(f"{score} = {one.value}")
                    beyond.append(f"{score} = choose(exists, {score}, float32(-math.inf))")
        lines += [f"if int32(warp_first + {keys}) > n:", *indented(beyond, 1)]
        for half in self.thread_rows:
            scores = self._row_scores(half)
            lines.append(f"most_{half} = {scores[0]}")
            lines += [f"most_{half} = fmax_f32(most_{half}, {score})" for score in scores[1:]]
            lines += [f"most_{half} = fmax_f32(most_{half}, shfl_xor_f32(most_{half}, int32({n})))" for n in (1, 2)]
            lines.append(f"most_{half} = fmax_f32(most_{half}, top_{half})")
        if self.form.stages > 1:
            lines += self._rescale()
        for half in self.thread_rows:
            lines += [f"top_{half} = most_{half}", self._shift(half)]
            lines += [f"{x} = {self._power(x)}" for x in self._row_scores(half)]
        return lines

    def _shift(self, half: int) -> str:
        """Assign ``shift``, which is subtracted from a row's scores: the maximum score, 0 if all keys are masked.

        Unless `is_near`, ``shift`` is multiplied by `log2`, like the scores from which `_power` subtracts it.
        """
        most = f"choose(most_{half} == float32(-math.inf), float32(0), most_{half})"
        return f"shift = {most}" if self.is_near else f"shift = {most} * {self.log2}"

    def _power(self, score: str) -> str:
        if self.is_near:
            return f"half_exp2(({score} - shift) * {self.log2})"
        return f"half_exp2(fma_f32({score}, {self.log2}, -shift))"

    def _rescale(self) -> list[str]:
        """Rescale the accumulators if any row of the warp has a new maximum, which is rare after the first tiles."""
        grown = " or ".join(
            f"(most_{half} > top_{half} and top_{half} > float32(-math.inf))" for half in self.thread_rows
        )
        fitted = [
            line
            for half in self.thread_rows
            for line in (
                self._shift(half),
                f"factor_{half} = {self._power(f'top_{half}')}",
            )
        ]
        fitted += [
            f"scale_matrix_f32({sums}_sums_{i}, factor_{2 * i}, factor_{2 * i + 1}, {count})"
            for sums, count in (("result", self.size // 8), ("weight", 1))
            for i in self.row_matrices
        ]
        return [f"if vote_any({grown}):", *indented(fitted, 1)]

    def _multiply_values(self) -> list[str]:
        """Accumulate weights @ V, and the sum of each row's weights as weights @ ones."""
        ones = f"ones = uint32({ONES[self.kind]:#x})"
        if self.kind == "tf32":
            return [ones, *self._multiply_float32_values()]
        lines = ["stage_at = values_at + int64(stage)", ones]
        for step in range(self.form.warp_keys // 16):
            firsts = [8 * step + 2 * (i & 1) + 4 * (i >> 1) for i in range(4)]
            for number in self.row_matrices:
                sums = f"score_sums_{number}"
                lines += [
                    f"w{number}_{i} = pair_{self.kind}({sums}[{at}], {sums}[{at + 1}])" for i, at in enumerate(firsts)
                ]
            lines += self._sum_weights()
            load = f"load_matrices_transposed(stage_at + {32 * self.pitch * step}"
            lines += self._multiply("result_sums", self.size // 8, load, 32, self._weight_matrices)
        return lines

    def _multiply_float32_values(self) -> list[str]:
        """Accumulate weights @ V for float32, which ldmatrix cannot transpose.

        A lane holds the weights of adjacent keys, while mma expects keys 4 apart. Loading V with the same permutation
        of keys gives the same sum without a shuffle.
        """
        lines = ["value_at = int32((values_at + stage) >> 2)"]
        for step in range(self.form.warp_keys // 8):
            for number in self.row_matrices:
                sums = f"score_sums_{number}"
                lines += [f"w{number}_{i} = round_tf32({sums}[{4 * step + at}])" for i, at in enumerate((0, 2, 1, 3))]
            lines += self._sum_weights()
            for eight in range(self.size // 8):
                at = 8 * step * self.pitch + 8 * eight
                lines += [f"b{i} = round_tf32(tile_c[int64(value_at + {at + i * self.pitch})])" for i in (0, 1)]
                lines += [
                    self._multiplied(f"result_sums_{number}", 4 * eight, of_a, "b0, b1")
                    for number, of_a in zip(self.row_matrices, self._weight_matrices, strict=True)
                ]
        return lines

    @property
    def _weight_matrices(self) -> list[str]:
        return [", ".join(f"w{number}_{i}" for i in range(4)) for number in self.row_matrices]

    def _sum_weights(self) -> list[str]:
        return [
            self._multiplied(f"weight_sums_{number}", 0, of_a, "ones, ones")
            for number, of_a in zip(self.row_matrices, self._weight_matrices, strict=True)
        ]
