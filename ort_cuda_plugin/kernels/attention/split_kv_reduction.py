"""Split-KV reduction: combines the partial attention results of blocks that each processed a range of the keys."""

from __future__ import annotations

from dataclasses import dataclass

from ..codegen.epilogue import Epilogue
from ..codegen.simt_fragments import indented
from ..codegen.source import text_property
from .flash_kernel import Range

MERGED_ROWS = 4
"""Query rows per block; each warp combines one row."""


@dataclass(frozen=True)
class MergeKernel:
    """Kernel that combines ``splits`` <= 32 unnormalized results ``parts`` [split][row][column].

    ``maxima`` and ``weights`` [split][row] are each row's maximum score and sum of weights. The kernel rescales the
    results and weights of a row to its maximum over all splits, adds them, and divides result by weight. A row that
    attends to no key gets NaN with ``nan``, else 0.
    """

    splits: int
    epilogue: Epilogue
    range: Range
    nan: bool

    @property
    def name(self) -> str:
        return f"merge_{self.splits}_parts"

    @text_property
    def body(self) -> str:
        parts = range(self.splits)
        lines = [
            "lane = int32(cuda.threadIdx.x & 31)",
            f"place = int32(int32(cuda.blockIdx.x) * {MERGED_ROWS} + int32(cuda.threadIdx.x >> 5))",
            "if place >= rows:",
            "    return",
            "batch = int32(place // m)",
            "row = int32(place - batch * m)",
            *(f"most_{i} = maxima[int64(place) + {i} * int64(rows)]" for i in parts),
            *(f"weight_{i} = weights[int64(place) + {i} * int64(rows)]" for i in parts),
            "most = most_0",
            *(f"most = max(most, most_{i})" for i in parts[1:]),
        ]
        sink = self.range.sink
        if sink:
            lines += [*self.range.block_lines, *self.range.row_lines, f"most = max(most, {sink})"]
        lines += [
            "shift = choose(most == float32(-math.inf), float32(0), most)",
            "weight = float32(0)",
        ]
        for i in parts:
            lines += [f"factor_{i} = libdevice.expf(most_{i} - shift)", f"weight += weight_{i} * factor_{i}"]
        if sink:
            lines.append(f"weight += libdevice.expf({sink} - shift)")
        if not self.nan:
            lines.append("weight = choose(weight == float32(0), float32(1), weight)")
        columns = [
            "column_0 = int32(first + lane)",
            "at = int64(place) * int64(d) + int64(int32(min(column_0, int32(d - 1))))",
            "distance = int64(rows) * int64(d)",
            *(f"x{i} = parts[at + {i} * distance]" for i in parts),
            "total_0 = float32(0)",
            *(f"total_0 += x{i} * factor_{i}" for i in parts),
            "total_0 /= weight",
            "if column_0 < d:",
            *indented([*self.epilogue.elements("_0"), *self.epilogue.stores("_0")], 1),
        ]
        lines += [*self.epilogue.rows(), "for first in range(0, d, 32):", *indented(columns, 1)]
        return "\n".join(indented(lines, 1))
