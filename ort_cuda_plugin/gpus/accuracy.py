"""Accuracy of the performance model: compares its estimates with published measurements, by size class.

published.json has the measurements with their sources; docs/estimates.md shows the table of `errors`. The largest
errors also give the ranges of times that the plugin prints for an estimated step or Run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from . import gpu
from .constants import Constants
from .library_times import Rates, attention_time, library_time, tile_exponent

FILE = Path(__file__).with_name("published.json")
BOUNDS = (0.0, 10e-6, 30e-6, 100e-6, math.inf)
"""Limits between the size classes of GEMMs, by measured time, seconds."""
BYTES = {"float16": 2, "bfloat16": 2, "tf32": 4}
TOKENS, HIDDEN = 16384, 2048
"""Sizes of the published attention benchmarks: tokens of all sequences together, and heads * head size."""
NETWORK = "network"


@dataclass(frozen=True)
class Comparison:
    """One published measurement, in ``seconds``, and the model's ``estimate`` for the same work, in seconds.

    ``work`` is "product", "attention", "memory", "launch" or "network". ``type`` is the operand type of a product,
    else "". The time of a kernel does not include the gap to the next kernel.
    """

    work: str
    type: str
    seconds: float
    estimate: float

    @property
    def ratio(self) -> float:
        return self.estimate / self.seconds


@dataclass(frozen=True)
class Error:
    """Errors of a class of ``count`` measurements: geometric mean, minimum and maximum of estimate / measured time."""

    name: str
    count: int
    mean: float
    least: float
    most: float

    @property
    def factor(self) -> float:
        """Return the largest factor between estimate and measured time, in either direction, at least 1."""
        return max(self.most, 1 / self.least, 1.0)


def comparisons() -> list[Comparison]:
    """Return all published measurements with their estimates; those of networks are stored in published.json."""
    published = json.loads(FILE.read_text(encoding="utf-8"))
    found = [_product(entry) for entry in published["products"]]
    found += [_attention(entry) for entry in published["attention"]]
    for entry in published["memory"]:
        reached = gpu(entry["gpu"]).dram * Constants.dram
        found.append(Comparison("memory", "", 1e9 / (entry["tb_per_s"] * 1e12), 1e9 / reached))
    for entry in published["launches"]:
        found.append(Comparison("launch", "", entry["microseconds"] * 1e-6, Constants.launch_seconds))
    for entry in published["networks"]:
        found.append(Comparison(NETWORK, "", entry["milliseconds"] * 1e-3, entry["estimated"] * 1e-3))
    return found


def _product(entry: dict[str, Any]) -> Comparison:
    device, kind, (m, n, k) = gpu(entry["gpu"]), entry["type"], (entry[axis] for axis in "mnk")
    constants = Constants.at(device.clock)
    itemsize = BYTES[kind]
    operations = device.flops[kind] / device.multiprocessors * device.library_share(kind) * constants.tensor_library
    rates = Rates(
        device.multiprocessors, operations, device.l2_read * constants.l2, device.sharing, tile_exponent(kind)
    )
    seconds, _ = library_time(m, n, k, 1, itemsize, rates)
    memory = (m * k + k * n + m * n) * itemsize / (device.dram * constants.dram)
    start = constants.product_seconds + constants.library_seconds
    return Comparison("product", kind, entry["microseconds"] * 1e-6, start + max(seconds, memory))


def _attention(entry: dict[str, Any]) -> Comparison:
    device, size, rows = gpu(entry["gpu"]), entry["head_size"], entry["sequence"]
    constants = Constants.at(device.clock)
    heads = TOKENS // rows * (HIDDEN // size)
    rate = device.flops["float16"] / device.multiprocessors * device.tensor_share * constants.tensor_library
    seconds = attention_time(heads, rows, rows, 2 * size, device.multiprocessors, rate)
    start = constants.product_seconds + constants.library_seconds
    return Comparison("attention", "", 4.0 * heads * rows * rows * size / (entry["tflops"] * 1e12), start + seconds)


@cache
def errors() -> tuple[Error, ...]:
    """Return the errors of each class: GEMMs by type and measured time, attention, memory, launch gaps, networks."""
    found = comparisons()
    classes: list[tuple[str, list[Comparison]]] = []
    for kinds, name in ((("float16", "bfloat16"), "GEMM, 16 bits"), (("tf32",), "GEMM, TF32")):
        for low, high in pairwise(BOUNDS):
            chosen = [one for one in found if one.type in kinds and low <= one.seconds < high]
            classes.append((f"{name}, {_size(low, high)}", chosen))
    for work, name in (
        ("attention", "attention of cuDNN"),
        ("memory", "long rows from memory"),
        ("launch", "gap between kernels of a CUDA graph"),
        (NETWORK, "network"),
    ):
        classes.append((name, [one for one in found if one.work == work]))
    return tuple(_error(name, chosen) for name, chosen in classes)


def _size(low: float, high: float) -> str:
    if not low:
        return f"below {high * 1e6:.0f} us"
    return f"{low * 1e6:.0f} us and more" if math.isinf(high) else f"{low * 1e6:.0f} to {high * 1e6:.0f} us"


def _error(name: str, chosen: list[Comparison]) -> Error:
    ratios = [one.ratio for one in chosen]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return Error(name, len(ratios), mean, min(ratios), max(ratios))


@cache
def _factors() -> tuple[float, float]:
    """Return the largest error factors of kernels and of networks."""
    kernels, networks = (max(e.factor for e in errors() if (e.name == NETWORK) == whole) for whole in (False, True))
    return kernels, networks


def step_range(seconds: float) -> tuple[float, float]:
    """Return the range of times, in seconds, of a step whose estimate is ``seconds``.

    The range is as wide as the largest error of any kernel, since most kinds of steps have no published times.
    """
    kernels, _ = _factors()
    return seconds / kernels, seconds * kernels


def run_range(seconds: float) -> tuple[float, float]:
    """Return the range of times, in seconds, of a Run whose estimate is ``seconds``.

    The range is at least as wide as `step_range`, since few networks have published times.
    """
    widest = max(_factors())
    return seconds / widest, seconds * widest


def range_text(seconds: tuple[float, float], digits: int = 1) -> str:
    """Format a range of times in seconds as microseconds, such as "3.1-4.5"."""
    return "-".join(f"{each * 1e6:.{digits}f}" for each in seconds)


def error_text() -> str:
    """Return the sentence about errors that stands above each table of estimates."""
    kernels, networks = _factors()
    return (
        f"Estimates, not measurements: compared with {sum(error.count for error in errors())} published times, the"
        f" performance model is wrong by a factor of up to {kernels:.2f} for kernels and {networks:.2f} for networks"
        " (docs/estimates.md). Each time is a range: a step's is as wide as the error of kernels, a Run's as the larger"
        " of both errors."
    )


def markdown() -> Iterator[str]:
    """Yield the lines of the table of errors in docs/estimates.md."""
    yield "| work, by measured time | times | mean ratio | lowest | highest |"
    yield "|---|---:|---:|---:|---:|"
    for error in errors():
        yield f"| {error.name} | {error.count} | {error.mean:.2f} | {error.least:.2f} | {error.most:.2f} |"
