"""FlashAttention on tensor cores: block setup, the loop of `OnlineSoftmax`, and a reduction across warps.

Several warps may process the same query rows, each with different keys. After the loop they reduce the maxima and
weight sums of each row in shared memory, and then the accumulators, a range of columns at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..codegen.block_mapping import batch_offsets
from ..codegen.epilogue import RowDestination
from ..codegen.simt_fragments import indented, log2
from ..codegen.source import text_property
from .flash_mma_softmax import OnlineSoftmax
from .flash_mma_tiles import MATRIX_ROWS

RESULT_GAP = 8
"""Floats of padding between rows of accumulators in shared memory, to avoid bank conflicts."""
LANES = 4
"""Adjacent columns of the result that a thread stores with one vectorized store."""
MOST_SHARED = 96 << 10
"""Maximum bytes of shared memory for the accumulators in the final reduction, the same limit on every GPU."""
LOG2_E = f"float32({math.log2(math.e)!r})"


@dataclass(frozen=True)
class MatrixStreamKernel(OnlineSoftmax):
    """FlashAttention kernel on tensor cores, for head sizes that are multiples of 16."""

    result: RowDestination = field(default_factory=RowDestination)

    @property
    def name(self) -> str:
        return f"matrix_{super().name}"

    @property
    def rounds(self) -> int:
        """Rounds of the final reduction: 1 if the accumulators of all columns fit in `MOST_SHARED` bytes, else 2."""
        whole = self.form.sharing_warps * self.form.m * (self.form.width + RESULT_GAP) * 4
        return 1 if whole <= MOST_SHARED else 2

    @property
    def round_columns(self) -> int:
        return self.form.width // self.rounds

    @property
    def result_pitch(self) -> int:
        return self.round_columns + RESULT_GAP

    @property
    def row_pitch(self) -> int:
        """Floats from one warp's row statistics to the next warp's in shared memory, padded against bank conflicts."""
        return self.form.m + (32 // self.form.sharing_warps if self.form.sharing_warps > 1 else 0)

    @property
    def shared_bytes(self) -> int:
        """Bytes of dynamic shared memory: for pipeline stages and Q rows, later for the accumulators of all warps."""
        operands = 2 * self.form.stages * self.tile_bytes + self.form.m * self.pitch * self.itemsize
        return max(operands, self.form.sharing_warps * self.form.m * self.result_pitch * 4)

    @text_property
    def body(self) -> str:
        lines = [*self.prologue(), *self._bounds(), *self._key_loop(), *self._end()]
        return "\n".join(indented(lines, 1))

    def block_setup(self) -> list[str]:
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
        parts, line = form.sharing_warps, self.pitch * self.itemsize
        return [
            *self.block_setup(),
            "lane = int32(thread & 31)",
            "warp = int32(thread >> 5)",
            "lane_row = int32(lane >> 2)",
            "lane_pair = int32((lane & 3) * 2)",
            f"part_of_keys = int32(warp & {parts - 1})",
            f"warp_row = int32((warp >> {log2(parts)}) * {form.warp_rows})",
            f"warp_key = int32(part_of_keys * {form.warp_keys})",
            "tile_c = array_pointer(cuda.shared.array(0, float32, 16))",
            "tile_at = shared_address(tile_c)",
            # ldmatrix.x4 loads four 8x8 matrices; each lane passes the address of one of their rows, in Q and in K.
            "eight = int32(lane & 7)",
            "low, high = int32(((lane >> 3) & 1) * 8), int32(((lane >> 4) & 1) * 8)",
            f"rows_at = tile_at + int64(int32((warp_row + eight + low) * {line} + high * 2 + {rows_at}))",
            f"keys_at = tile_at + int64(int32((warp_key + eight + high) * {line} + low * 2))",
            *self._values_address(line),
            *self.copying(),
            *(
                f"row_{half} = int32(min(int32(row0 + warp_row + lane_row + {8 * half}), int32(m - 1)))"
                for half in self.thread_rows
            ),
            *(f"score_sums_{i} = registers_f32({form.warp_keys // 2})" for i in self.row_matrices),
            *(f"result_sums_{i} = registers_f32({self.size // 2})" for i in self.row_matrices),
            *(f"weight_sums_{i} = registers_f32(4)" for i in self.row_matrices),
            *self.weights.block_lines,
        ]

    def _values_address(self, line: int) -> list[str]:
        """Compute the lane's address in V: of a row, or of a float32 element, which ldmatrix cannot transpose."""
        if self.kind == "tf32":
            offset = f"(warp_key + lane_pair) * {line} + lane_row * {self.itemsize} + {self.tile_bytes}"
            return [f"values_at = int32({offset})"]
        offset = f"(warp_key + eight + low) * {line} + high * 2 + {self.tile_bytes}"
        return [f"values_at = tile_at + int64(int32({offset}))"]

    def _bounds(self) -> list[str]:
        """Restrict ``n`` and the loop over tiles to keys that the block's rows attend to, and to the block's split."""
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

    def _end(self) -> list[str]:
        """Reduce the row statistics and the accumulators across warps, and store the result."""
        parts, count = self.form.sharing_warps, self.form.m * self.form.sharing_warps
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
        for half in self.thread_rows:
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
                *self._store_partial(number),
                "cuda.syncthreads()",
                *self._reduce_partials(number),
            ]
        return lines

    def _factors(self) -> list[str]:
        """Compute the factor that rescales each warp's accumulators of a row to the row's maximum over all warps.

        Adjacent threads hold the statistics of the same row from different warps, so that shuffles combine them.
        """
        parts = self.form.sharing_warps
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
            offset = "(int64(part) * batches + int64(batch)) * int64(m) + int64(own_row)"
            lines += [
                f"if (thread & {parts - 1}) == 0 and own_row < m:",
                f"    maxima[{offset}] = most",
                f"    weights[{offset}] = weight",
            ]
        elif self.nan:
            lines.append("factor *= half_reciprocal(weight)")
        else:
            lines.append("factor = choose(weight == float32(0), float32(0), factor * half_reciprocal(weight))")
        return [*lines, "factors_t[int64(thread)] = factor"]

    def _store_partial(self, number: int) -> list[str]:
        """Store all warps' accumulators of the columns of round ``number`` in shared memory."""
        pitch, columns = self.result_pitch, self.round_columns
        offset = f"(part_of_keys * {self.form.m} + warp_row + lane_row) * {pitch} + lane_pair"
        return [
            f"to = int64(int32({offset}))",
            *(
                f"store_f32x2(tile_c, to + {(MATRIX_ROWS * i + 8 * half) * pitch + 8 * eight - number * columns},"
                f" result_sums_{i}[{4 * eight + 2 * half}], result_sums_{i}[{4 * eight + 2 * half + 1}])"
                for i in self.row_matrices
                for eight in range(number * columns // 8, min((number + 1) * columns, self.size) // 8)
                for half in (0, 1)
            ),
        ]

    def _reduce_partials(self, number: int) -> list[str]:
        """Add the rescaled accumulators of all warps and store the results; a thread stores 4 or 8 columns of a row."""
        form, pitch, parts = self.form, self.result_pitch, self.form.sharing_warps
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
                offset = group + part * form.m * pitch
                totals.append(f"x0, x1, x2, x3 = load_f32x4(tile_c, at + {offset})")
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
            return ["chunk = int32(thread)", f"if chunk < {chunks}:", *indented(self._if_row_exists(body, stores), 1)]
        return [
            line
            for first in range(0, chunks, form.threads)
            for line in (f"chunk = int32(thread + {first})", *self._if_row_exists(body, stores))
        ]

    @staticmethod
    def _if_row_exists(body: Sequence[str], stores: Sequence[str]) -> list[str]:
        return [*body, "if own_row < m:", *indented(stores, 1)]
