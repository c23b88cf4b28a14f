"""Schedules: how a GEMM, a convolution or attention is computed, as data.

``schedule/`` chooses one for each step (`Choice`), and the step carries it. The emitter reads it and decides nothing
more. `schedule_data` and `parse_schedule` are its form on disk, `describe` is the text that people read.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..expressions.symbolic import Dim, ceildiv


class Engine(enum.Enum):
    """What computes a contraction."""

    LIBRARY = "library"  # cuBLASLt or cuDNN
    MMA = "mma"  # tiles on tensor cores; of a convolution, an implicit GEMM
    SIMT = "simt"  # tiles on the other cores
    GEMV = "gemv"  # a block for each row and a few columns
    DIRECT = "direct"  # a convolution whose threads own strips of output pixels
    DEPTHWISE = "depthwise"  # depthwise convolution, channels last
    IM2COL = "im2col"  # a convolution whose patches are stored for a GEMM
    PHASES = "phases"  # a transposed convolution as plain ones, one for each pixel within a stride
    FLASH = "flash"  # attention with an online softmax
    FLASH_MMA = "flash_mma"  # the same on tensor cores
    MULTI_PASS = "multi_pass"  # attention that passes over the keys once for each reduction
    DECOMPOSED = "decomposed"  # attention as a GEMM, a row program and a GEMM


class WeightLayout(enum.Enum):
    """How a kernel reads the second operand of a GEMM or a convolution."""

    STORED = "stored"
    ALONG_K = "along_k"  # a copy whose rows run along k
    F16_ALONG_K = "f16_along_k"  # float16 with a power of two for each column, rows along k
    F16_ALONG_N = "f16_along_n"  # the same, rows along n


@dataclass(frozen=True)
class Tile:
    """Sizes of a block's tile. Each thread has ``thread_m`` x ``thread_n`` accumulators.

    All are powers of two, but in products on tensor cores, whose threads have as many accumulators in other shapes.

    A thread moves ``chunk`` neighbouring elements at a time when it fills a tile. ``gap`` elements stand between the
    lines of the operands' tiles in shared memory, so that a line's elements, which neighbours store where k is
    contiguous, are in several banks.
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
        """Elements from line to line of a's tile."""
        return self.m + self.gap

    @property
    def b_pitch(self) -> int:
        """Elements from line to line of b's tile."""
        return self.n + self.gap

    @property
    def b_first(self) -> int:
        """Where b's tiles begin."""
        return 2 * self.k * self.a_pitch

    @property
    def operands(self) -> int:
        """Elements of the operands' tiles."""
        return 2 * self.k * (self.a_pitch + self.b_pitch)

    @property
    def columns(self) -> int:
        """Threads along n; thread t owns column t % columns of the block's grid of thread tiles."""
        return self.n // self.thread_n

    @property
    def threads(self) -> int:
        return self.columns * (self.m // self.thread_m)

    @property
    def name(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"


@dataclass(frozen=True)
class AttentionTile:
    """Sizes of a block of attention: ``m`` rows, tiles of ``keys`` keys, ``width`` columns of the result.

    A ``resident`` block keeps its scores of all keys in shared memory. There ``gap`` stands between the scores of
    keys; it is odd, so that threads of neighbouring keys use all banks. ``tile_gap`` is that of the operands' tiles.
    On tensor cores a warp has ``warp_rows`` rows, and tiles of keys have ``stages`` in shared memory.
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
        """The product of keys and rows."""
        return self._tile(self.keys, self.m)

    @property
    def result(self) -> Tile:
        """The product of weights and values."""
        return self._tile(self.m, self.width)

    def _tile(self, m: int, n: int) -> Tile:
        return Tile(m, n, thread_m=m * n // 8 // self.threads, thread_n=8, gap=self.tile_gap)

    @property
    def pitch(self) -> int:
        """Elements from key to key of a tile of scores."""
        return self.m + self.gap

    def score_bytes(self, keys: Dim) -> Dim:
        """Shared memory of the scores of a resident block."""
        return ceildiv(keys, self.keys) * (self.keys * self.pitch * 4)

    @property
    def sharing_warps(self) -> int:
        """Warps that have the same rows, and share the keys of a tile."""
        return self.threads // 32 * self.warp_rows // self.m if self.warp_rows else 1

    @property
    def has_multiprocessor(self) -> bool:
        """Whether a block has a multiprocessor for itself, and more than four warps."""
        return self.threads > 128

    @property
    def warp_keys(self) -> int:
        """Keys of a tile that a warp has."""
        return self.keys // self.sharing_warps

    @property
    def name(self) -> str:
        endings = ("_resident" if self.resident else "", f"_{self.sharing_warps}" if self.sharing_warps > 1 else "")
        return f"{self.m}x{self.keys}x{self.width}{''.join(endings)}{'_once' if self.stages == 1 else ''}"


@dataclass(frozen=True)
class Schedule:
    """How a contraction is computed.

    ``operands`` is the type that tensor cores multiply ("f16", "bf16", "tf32", "i8", "u8"). Split-K: ``split_k``
    blocks share k, or the keys; another launch adds up. Sliced-K: ``sliced_k`` groups of warps of a
    block do. ``weights`` is the layout of the second operand. ``is_transposed`` computes (b^T @ a^T)^T.

    Where the sizes of a Run decide, a plan holds two launches, and one has an empty grid: a GEMV for up to
    ``gemv_rows`` rows, or im2col for up to ``im2col_pixels`` output pixels.
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
        """The tile of a GEMM or a convolution."""
        assert isinstance(self.tile, Tile)
        return self.tile

    @property
    def attention_tile(self) -> AttentionTile:
        """The tile of attention."""
        assert isinstance(self.tile, AttentionTile)
        return self.tile


@dataclass(frozen=True)
class Choice:
    """A schedule that a step may have, the reason for it, and the conditions on sizes under which it may be taken.

    Who takes it guards the plan on these (`Lowering.take`).
    """

    schedule: Schedule
    why: str
    guards: tuple[Dim, ...] = ()


# ---- as data, and as text ----


def _data(record: Any) -> dict[str, Any]:
    """The fields of a record that are not as by default."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {field.name: values[field.name] for field in fields(record) if values[field.name] != field.default}


def schedule_data(schedule: Schedule) -> dict[str, Any]:
    """The schedule as JSON has it: its fields that are not as by default."""
    data = _data(schedule) | {"engine": schedule.engine.value}
    if schedule.tile is not None:
        data["tile"] = _data(schedule.tile)
    if schedule.weights is not WeightLayout.STORED:
        data["weights"] = schedule.weights.value
    return data


def schedule_of(data: Mapping[str, Any]) -> Schedule:
    """The schedule of `schedule_data`. Raises TypeError, ValueError or KeyError for other data."""
    values = dict(data)
    values["engine"] = Engine(values["engine"])
    if "weights" in values:
        values["weights"] = WeightLayout(values["weights"])
    if "tile" in values:
        values["tile"] = (AttentionTile if "keys" in values["tile"] else Tile)(**values["tile"])
    return Schedule(**values)


def schedule_text(schedule: Schedule) -> str:
    """The schedule as one line of JSON: its key in the timing cache."""
    return json.dumps(schedule_data(schedule), sort_keys=True, separators=(",", ":"))


def parse_schedule(text: str) -> Schedule:
    """The schedule of a line of JSON. Raises ValueError for another text."""
    try:
        return schedule_of(json.loads(text))
    except (TypeError, KeyError) as error:
        raise ValueError(f"schedule: expected the fields of Schedule, got {text!r}") from error


def explained(schedule: Schedule, why: str) -> str:
    """The schedule and the reason for it, in words."""
    return f"{describe(schedule)}: {why}"


def describe(schedule: Schedule) -> str:
    """The schedule in words, such as "mma 64x64x32, sliced_k=4"."""
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
