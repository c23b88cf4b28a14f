"""Schedules: the engine, tile and split-K of a GEMM, a convolution or attention, as data.

The package ``schedule`` selects a schedule for each step (`Choice`) and stores it in the step; emission makes no
further decision. `schedule_data` converts schedules to JSON, `describe` to readable text.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, fields
from typing import Any

from ..expressions.symbolic import Dim, ceildiv


class Engine(enum.Enum):
    """The kind of kernel, or the library, that computes a contraction."""

    LIBRARY = "library"  # cuBLASLt or cuDNN
    MMA = "mma"  # GEMM tiles on tensor cores; for a convolution, implicit GEMM
    SIMT = "simt"  # GEMM tiles on CUDA cores
    GEMV = "gemv"  # a block per row and group of columns
    DIRECT = "direct"  # convolution in which a thread computes a strip of output pixels
    DEPTHWISE = "depthwise"  # depthwise convolution, channels-last
    IM2COL = "im2col"  # convolution as a GEMM over an im2col matrix that is stored in memory
    PHASES = "phases"  # transposed convolution as one convolution per phase (output position modulo stride)
    FLASH = "flash"  # attention with an online softmax
    FLASH_MMA = "flash_mma"  # attention with an online softmax on tensor cores
    MULTI_PASS = "multi_pass"  # attention with one pass over the keys per reduction
    DECOMPOSED = "decomposed"  # attention as separate steps: a GEMM, a row program and a GEMM


class WeightLayout(enum.Enum):
    """Memory layout of the second operand of a GEMM or a convolution."""

    STORED = "stored"
    ALONG_K = "along_k"  # a copy that is contiguous along k
    F16_ALONG_K = "f16_along_k"  # float16 with a power-of-two scale per column, contiguous along k
    F16_ALONG_N = "f16_along_n"  # float16 with a power-of-two scale per column, contiguous along n


@dataclass(frozen=True)
class Tile:
    """Tile of a block in a GEMM: sizes in elements. Each thread has ``thread_m`` x ``thread_n`` accumulators.

    All sizes are powers of two, except in tiles for tensor cores, where the instructions fix which accumulators a
    thread has. A thread copies ``chunk`` adjacent elements at a time. The rows of the operands' tiles in shared memory
    are padded by ``gap`` elements, against bank conflicts of threads that store a column.
    """

    m: int
    n: int
    k: int = 16
    thread_m: int = 8
    thread_n: int = 8
    chunk: int = 4
    gap: int = 0

    @property
    def a_pitch(self) -> int:
        """Return the row pitch of operand a's tile in shared memory, elements."""
        return self.m + self.gap

    @property
    def b_pitch(self) -> int:
        """Return the row pitch of operand b's tile in shared memory, elements."""
        return self.n + self.gap

    @property
    def b_first(self) -> int:
        """Return the offset of operand b's tiles in shared memory, elements; a's double-buffered tiles come first."""
        return 2 * self.k * self.a_pitch

    @property
    def operands(self) -> int:
        """Return the number of elements of both operands' double-buffered tiles."""
        return 2 * self.k * (self.a_pitch + self.b_pitch)

    @property
    def columns(self) -> int:
        """Return the number of threads along n; thread t has column ``t % columns`` in the grid of threads."""
        return self.n // self.thread_n

    @property
    def threads(self) -> int:
        return self.columns * (self.m // self.thread_m)

    @property
    def name(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"


@dataclass(frozen=True)
class AttentionTile:
    """Tile of a block in attention: ``m`` query rows, ``keys`` keys at a time, ``width`` result columns.

    With ``resident``, a block keeps the scores of all keys in shared memory, with ``gap`` elements of padding per key,
    an odd number against bank conflicts. ``tile_gap`` pads the rows of the operands' tiles. On tensor cores each warp
    computes ``warp_rows`` query rows, and key tiles go through a pipeline of ``stages`` stages.
    """

    m: int
    keys: int
    width: int
    threads: int
    resident: bool = False
    gap: int = 1
    tile_gap: int = 0
    warp_rows: int = 0
    stages: int = 0

    @property
    def scores(self) -> Tile:
        """Return the tile of the GEMM that computes scores, keys x query rows."""
        return self._tile(self.keys, self.m)

    @property
    def result(self) -> Tile:
        """Return the tile of the GEMM that multiplies softmax weights by values."""
        return self._tile(self.m, self.width)

    def _tile(self, m: int, n: int) -> Tile:
        return Tile(m, n, thread_m=m * n // 8 // self.threads, thread_n=8, gap=self.tile_gap)

    @property
    def pitch(self) -> int:
        """Return the distance between adjacent keys in a tile of scores in shared memory, elements."""
        return self.m + self.gap

    def score_bytes(self, keys: Dim) -> Dim:
        """Return the bytes of shared memory for the scores of all ``keys`` in a `resident` block."""
        return ceildiv(keys, self.keys) * (self.keys * self.pitch * 4)

    @property
    def sharing_warps(self) -> int:
        """Return the number of warps that share the same query rows, and split the keys of a tile among them."""
        return self.threads // 32 * self.warp_rows // self.m if self.warp_rows else 1

    @property
    def warp_keys(self) -> int:
        """Return the number of keys of a tile that each warp processes."""
        return self.keys // self.sharing_warps

    @property
    def name(self) -> str:
        endings = ("_resident" if self.resident else "", f"_{self.sharing_warps}" if self.sharing_warps > 1 else "")
        return f"{self.m}x{self.keys}x{self.width}{''.join(endings)}{'_once' if self.stages == 1 else ''}"


@dataclass(frozen=True)
class Schedule:
    """Engine, tile and splits of a contraction.

    ``operands`` is the operand type on tensor cores ("f16", "bf16", "tf32", "i8", "u8"). ``split_k`` is the number of
    blocks that split k (or the keys: split-KV); a second launch reduces their results. ``sliced_k`` is the number of
    groups of warps in a block that split k; they reduce in shared memory. ``weights`` is the layout of the second
    operand. ``is_transposed`` computes (b^T @ a^T)^T.

    With ``gemv_rows`` or ``im2col_pixels`` a plan holds two launches, and in each Run one has an empty grid: a GEMV
    serves up to ``gemv_rows`` rows, im2col up to ``im2col_pixels`` output pixels.
    """

    engine: Engine
    tile: Tile | AttentionTile | None = None
    operands: str = ""
    split_k: int = 1
    sliced_k: int = 1
    weights: WeightLayout = WeightLayout.STORED
    is_transposed: bool = False
    gemv_rows: int = 0
    im2col_pixels: int = 0

    @property
    def gemm_tile(self) -> Tile:
        """Return the tile of a GEMM's or a convolution's schedule."""
        assert isinstance(self.tile, Tile)
        return self.tile

    @property
    def attention_tile(self) -> AttentionTile:
        """Return the tile of an attention schedule."""
        assert isinstance(self.tile, AttentionTile)
        return self.tile


@dataclass(frozen=True)
class Choice:
    """A candidate schedule of a step, the reason for it, and the size conditions under which it applies.

    The conditions become guards of the plan in `Lowering.take`.
    """

    schedule: Schedule
    why: str
    guards: tuple[Dim, ...] = ()


# ---- JSON and text ----


def _data(record: Any) -> dict[str, Any]:
    """Return those fields of a dataclass object that differ from their defaults."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {field.name: values[field.name] for field in fields(record) if values[field.name] != field.default}


def schedule_data(schedule: Schedule) -> dict[str, Any]:
    """Return the schedule as JSON data: the fields that differ from their defaults."""
    data = _data(schedule) | {"engine": schedule.engine.value}
    if schedule.tile is not None:
        data["tile"] = _data(schedule.tile)
    if schedule.weights is not WeightLayout.STORED:
        data["weights"] = schedule.weights.value
    return data


def schedule_text(schedule: Schedule) -> str:
    """Return the schedule as one line of JSON, which is also its key in the timing cache."""
    return json.dumps(schedule_data(schedule), sort_keys=True, separators=(",", ":"))


def describe(schedule: Schedule) -> str:
    """Return a short text for the schedule, such as "mma 64x64x32, sliced_k=4"."""
    parts = [f"{schedule.engine.value}{'' if schedule.tile is None else f' {schedule.tile.name}'}"]
    parts += [f"{name}={getattr(schedule, name)}" for name in ("split_k", "sliced_k") if getattr(schedule, name) > 1]
    if schedule.operands in ("i8", "u8"):
        parts.append(f"{schedule.operands} operands, exact sums")
    if schedule.weights is not WeightLayout.STORED:
        parts.append(f"weights {schedule.weights.value}")
    if schedule.is_transposed:
        parts.append("transposed")
    if schedule.gemv_rows:
        parts.append(f"gemv up to {schedule.gemv_rows} rows")
    if schedule.im2col_pixels:
        parts.append(f"im2col up to {schedule.im2col_pixels} pixels")
    return ", ".join(parts)
