"""GPUs by their public figures: a JSON file for each, with the sources of its figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Gpu:
    """A GPU; rates are those at the boost clock, of all multiprocessors together.

    ``float32_lanes`` and ``special_lanes`` are results per clock of a multiprocessor; ``tflops`` are those of tensor
    cores without sparsity, of int8 in operations, and of float32 and float64 without tensor cores. ``tensor_share`` is
    the part of that which the largest products reach in long runs, where the power limit holds the clock down.
    ``l2_read`` and ``l2_written`` are bytes of the L2 in a second, as benchmarks reach them.
    """

    key: str
    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    clock: float
    dram: float
    l2_bytes: int
    l2_read: float
    l2_written: float
    shared_bytes: int
    max_warps: int
    max_blocks: int
    flops: Mapping[str, float]
    float32_lanes: int
    special_lanes: int
    tensor_share: float
    sources: Mapping[str, str]
    registers: int = 65536

    def l2_seconds(self, read: float, written: float) -> float:
        """That the L2 takes for so many bytes."""
        return read / self.l2_read + written / self.l2_written


@cache
def names() -> tuple[str, ...]:
    """The GPUs that are known."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


@cache
def gpu(key: str) -> Gpu:
    """The GPU of that name. Raises KeyError."""
    if key not in names():
        raise KeyError(key)
    data: dict[str, Any] = json.loads((FOLDER / f"{key}.json").read_text(encoding="utf-8"))
    major, minor = data["compute_capability"]
    return Gpu(
        key=key,
        name=data["name"],
        compute_capability=(major, minor),
        multiprocessors=data["multiprocessors"],
        clock=data["clock_ghz"] * 1e9,
        dram=data["dram_gb_per_s"] * 1e9,
        l2_bytes=data["l2_mib"] << 20,
        l2_read=data["l2_bytes_per_clock"]["read"] * data["clock_ghz"] * 1e9,
        l2_written=data["l2_bytes_per_clock"]["written"] * data["clock_ghz"] * 1e9,
        shared_bytes=data["shared_kib"] << 10,
        max_warps=data["max_warps"],
        max_blocks=data["max_blocks"],
        flops={kind: value * 1e12 for kind, value in data["tflops"].items()},
        float32_lanes=data["float32_lanes"],
        special_lanes=data["special_lanes"],
        tensor_share=data["tensor_share"],
        sources=data["sources"],
    )
