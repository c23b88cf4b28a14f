"""GPU descriptions: one JSON file per GPU with published peak rates and sizes, and their sources.

Schedules and estimates read the same descriptions. For a GPU without a file, `closest` scales the most similar
description, since rates per clock and multiprocessor are properties of an architecture.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

LINK_SHARE = 0.8
"""Fraction of a link's peak rate that large copies from pinned host memory reach: about 25 of 31.5 GB/s on PCIe 4.0."""

FOLDER = Path(__file__).parent / "devices"


@dataclass(frozen=True)
class Gpu:
    """Description of a GPU. Rates are per second at the boost clock, for all multiprocessors together.

    ``float32_lanes`` and ``special_lanes`` are float32 results and special-function results (such as exp2) per clock
    and multiprocessor. ``flops`` are peak operations per second by type: those of dense tensor-core instructions, or
    for float32 and float64 those of the other units. ``tensor_share`` is the fraction of the tensor-core peak that the
    largest GEMMs sustain, since the power limit lowers the clock; ``tf32_share`` is this fraction for a library's TF32
    GEMMs. ``l2_read`` and ``l2_written`` are measured L2 bandwidths, in bytes per second. ``link`` is the peak rate of
    copies from host memory, in bytes per second.
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
    tf32_share: float
    sources: Mapping[str, str]
    link: float
    registers: int = 65536

    @property
    def copied_per_second(self) -> float:
        """Return the bytes per second that copies from pinned host memory reach."""
        return self.link * LINK_SHARE

    @property
    def sharing(self) -> int:
        """Return how many multiprocessors one load from the L2 serves: 2 with multicast in thread block clusters."""
        return 2 if self.compute_capability[0] in (9, 10) else 1

    def flops_per_clock(self, kind: str) -> float:
        """Return the peak operations per clock of one multiprocessor for ``kind``, a key of ``flops``."""
        return self.flops[kind] / self.multiprocessors / self.clock

    def library_share(self, kind: str) -> float:
        """Return the fraction of ``flops[kind]`` that a library's largest GEMMs sustain on tensor cores."""
        return self.tf32_share if kind == "tf32" else self.tensor_share

    def per_clock(self, rate: float) -> float:
        """Convert a rate of the whole GPU in bytes per second to bytes per clock and multiprocessor."""
        return rate / self.multiprocessors / self.clock

    def l2_seconds(self, read: float, written: float) -> float:
        """Return the seconds that the L2 takes to deliver ``read`` bytes and to accept ``written`` bytes."""
        return read / self.l2_read + written / self.l2_written


@cache
def names() -> tuple[str, ...]:
    """Return the names of the described GPUs."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


@cache
def gpu(key: str) -> Gpu:
    """Return the description of the GPU ``key``, one of `names`. Raises KeyError for other keys."""
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
        tf32_share=data.get("tf32_share", data["tensor_share"]),
        sources=data["sources"],
        link=data["link_gb_per_s"] * 1e9,
    )


@cache
def typical_multiprocessors(compute_capability: tuple[int, int]) -> int:
    """Return the number of multiprocessors of a large GPU of this capability; for an unknown capability, of an H100."""
    known = json.loads(FOLDER.with_name("multiprocessors.json").read_text(encoding="utf-8"))
    major, minor = compute_capability
    return int(known.get(f"{major}.{minor}", known["9.0"])["multiprocessors"])


@cache
def closest(compute_capability: tuple[int, int], multiprocessors: int) -> Gpu:
    """Return the description of a GPU with these properties, derived from that of the most similar GPU.

    Bandwidths, L2 capacity and peak rates are scaled in proportion to the number of multiprocessors.
    """

    def distance(known: Gpu) -> tuple[int, int, int]:
        (major, minor), (own_major, own_minor) = known.compute_capability, compute_capability
        return abs(major - own_major), abs(minor - own_minor), abs(known.multiprocessors - multiprocessors)

    known = min(map(gpu, names()), key=distance)
    share = multiprocessors / known.multiprocessors
    if share == 1.0:
        return replace(known, compute_capability=compute_capability)
    return replace(
        known,
        key="",
        name=f"{multiprocessors} multiprocessors like those of {known.name}",
        compute_capability=compute_capability,
        multiprocessors=multiprocessors,
        dram=known.dram * share,
        l2_bytes=int(known.l2_bytes * share),
        l2_read=known.l2_read * share,
        l2_written=known.l2_written * share,
        flops={kind: rate * share for kind, rate in known.flops.items()},
    )


def recognized(name: str, compute_capability: tuple[int, int], multiprocessors: int) -> Gpu:
    """Return the description of the GPU that its driver calls ``name``, else that of the most similar GPU.

    Compute capability and multiprocessors do not tell an H100 from an H200. A driver's name, such as "NVIDIA H200",
    contains the key of the description.
    """
    model = "".join(filter(str.isalnum, name.lower()))
    shape = compute_capability, multiprocessors
    known = (each for each in map(gpu, names()) if (each.compute_capability, each.multiprocessors) == shape)
    return next((each for each in known if each.key in model), closest(*shape))
