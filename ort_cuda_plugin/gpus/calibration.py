"""Calibration: replaces the rates in a GPU's description by rates measured with short probes.

A probe is a small program with a name, such as "copy of 268435456 bytes"; ``clusters/probes.py`` makes the programs.
The calibration cache keeps the median seconds of each probe for a `ProbedDevice`. `derive` computes the rates from
these seconds, and refuses rates that no GPU has.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from . import Gpu, recognized
from .constants import Constants
from .library_times import Rates, library_time, tile_exponent

logger = logging.getLogger("ort_cuda_plugin")

LAUNCHES = 17
"""Launches in one CUDA graph of a probe of short kernels: inside a graph, kernels do not wait for the host."""
OPERATIONS = 256
"""Dependent multiply-adds per thread in the probe that measures the issue rate."""
MAX_FACTOR = 8.0
"""Maximum factor between a plausible measured rate and the rate in the GPU's description."""
MAX_SHARE = 1.3
"""Maximum plausible fraction of a peak rate; above 1, since a GPU may clock higher than its data sheet says."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the probes.

    ``memory`` and ``cache`` are bytes of copies through DRAM and within the L2; ``elements`` is the number of
    elements in the probe of the issue rate; ``mma`` is m = n = k of the plugin's own GEMM; ``products`` are (type, m,
    n, k) of library GEMMs.
    """

    memory: int
    cache: int
    elements: int
    mma: int
    products: tuple[tuple[str, int, int, int], ...]

    @staticmethod
    def of(gpu: Gpu) -> Sizes:
        """Return the sizes for a GPU; the bytes of the copies follow from the capacity of its L2."""
        shapes = [(256, 256, 256), (512, 512, 256), (256, 1024, 512), (512, 768, 768), (2048, 2048, 1024), (4096,) * 3]
        products = tuple((kind, m, n, k) for kind in ("f16", "tf32") for m, n, k in shapes)
        return Sizes(4 * gpu.l2_bytes, gpu.l2_bytes // 8, 1 << 24, 4096, products)

    @staticmethod
    def tiny() -> Sizes:
        """Return sizes at which the emulated device runs all probes quickly, for tests; the times mean nothing."""
        return Sizes(1 << 12, 1 << 10, 1 << 8, 64, (("f16", 32, 32, 32), ("tf32", 32, 32, 32)))


@dataclass(frozen=True)
class ProbedDevice:
    """A GPU whose probes were measured, as its driver names it.

    ``versions`` are those of the measurement, by name: "driver", "plugin", and the libraries.
    """

    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    versions: tuple[tuple[str, str], ...]

    @staticmethod
    def of(
        name: str, compute_capability: tuple[int, int], multiprocessors: int, versions: Mapping[str, str]
    ) -> ProbedDevice:
        """Return the device with these versions, in the order of their names."""
        return ProbedDevice(name, compute_capability, multiprocessors, tuple(sorted(versions.items())))

    @property
    def described(self) -> Gpu:
        """Return the description of the GPU, or of the most similar one."""
        return recognized(self.name, self.compute_capability, self.multiprocessors)

    def version(self, name: str) -> str:
        """Return the version of ``name``, "" if it is not known."""
        return dict(self.versions).get(name, "")

    def is_same_gpu(self, other: ProbedDevice) -> bool:
        """Return whether the devices differ in versions only."""
        return replace(self, versions=()) == replace(other, versions=())

    def differences(self, other: ProbedDevice) -> list[str]:
        """Return the versions that are not those of ``other``, as texts such as "driver 12.8 (now 13.0)"."""
        pairs = ((name, version, other.version(name)) for name, version in self.versions)
        return [f"{name} {version} (now {now or 'absent'})" for name, version, now in pairs if version != now]

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(f'{name} {version}' for name, version in self.versions)})"


@dataclass(frozen=True)
class Calibration:
    """Rates of a GPU, measured or as described.

    ``launch_seconds`` is the gap between two kernels of a CUDA graph. ``start_seconds`` is the fixed time of a
    library's GEMM, besides its arithmetic and the gap before it. ``dram`` and ``l2`` are the bytes per second, read
    plus written, of a copy. The others are fractions of peak rates: ``issue`` of the instruction issue rate, ``mma`` of
    the plugin's own float16 GEMMs, ``library`` and ``tf32`` of a library's float16 and TF32 GEMMs.
    """

    launch_seconds: float
    start_seconds: float
    dram: float
    l2: float
    issue: float
    mma: float
    library: float
    tf32: float

    def constants(self, gpu: Gpu) -> Constants:
        """Return the constants of the performance model for the calibrated GPU."""
        known = Constants.at(gpu.clock)
        scale = self.start_seconds / (known.product_seconds + known.library_seconds)
        return replace(
            known,
            launch_seconds=self.launch_seconds,
            product_seconds=known.product_seconds * scale,
            library_seconds=known.library_seconds * scale,
            dram=self.dram / gpu.dram,
            l2=self.l2 / _copied_in_l2(gpu),
            issue=self.issue,
            tensor_kernel=self.mma / self.library,
        )

    def gpu(self, gpu: Gpu) -> Gpu:
        """Return the GPU's description with the measured fractions of the tensor-core peak."""
        return replace(gpu, tensor_share=self.library, tf32_share=self.tf32)


def names(sizes: Sizes) -> dict[str, str]:
    """Return the names of the probes that call no library, by short keys that do not depend on the sizes."""
    return {
        "one": "one launch",
        "chain": f"{LAUNCHES} launches",
        "dram": f"copy of {sizes.memory} bytes",
        "l2": f"{LAUNCHES} copies of {sizes.cache} bytes",
        "issue": f"{OPERATIONS} operations on {sizes.elements} elements",
        "mma": f"own gemm f16 {sizes.mma}x{sizes.mma}x{sizes.mma}",
    }


def product_name(product: tuple[str, int, int, int]) -> str:
    kind, m, n, k = product
    return f"{LAUNCHES} library gemms {kind} {m}x{n}x{k}"


def derive(gpu: Gpu, sizes: Sizes, seconds: Mapping[str, float]) -> Calibration | None:
    """Compute the rates from the probes' ``seconds``, by probe name; None if a probe is missing or a rate implausible.

    The probes of GEMMs may be missing, since a device may lack the library: their rates are those of the description.
    """
    wanted = names(sizes)
    times = {kind: seconds.get(name, math.nan) for kind, name in wanted.items()}
    if not all(0 < times[kind] < math.inf for kind in ("one", "chain", "dram", "l2", "issue")):
        return None
    gap = (times["chain"] - times["one"]) / (LAUNCHES - 1)
    known, started = described(gpu), times["one"]
    rates = {
        "launch_seconds": gap,
        "dram": _rate(2.0 * sizes.memory, times["dram"] - started),
        "l2": _rate(2.0 * sizes.cache * LAUNCHES, times["l2"] - times["chain"]),
        "issue": _rate(
            sizes.elements * OPERATIONS / 32.0 / (4 * gpu.multiprocessors * gpu.clock), times["issue"] - started
        ),
    }
    products = [
        (product, seconds[name] / LAUNCHES - gap)
        for product in sizes.products
        if 0 < seconds.get(name := product_name(product), math.nan) < math.inf
    ]
    start = _start(gpu, products) or known.start_seconds
    rates["start_seconds"] = start
    if 0 < times["mma"] < math.inf:
        rates["mma"] = _rate(2.0 * sizes.mma**3 / gpu.flops["float16"], times["mma"] - gap - start)
    for field, kind, key in (("library", "f16", "float16"), ("tf32", "tf32", "tf32")):
        large = [(2.0 * m * n * k / gpu.flops[key], taken) for (of, m, n, k), taken in products if of == kind]
        if large:
            work, taken = max(large)
            rates[field] = _rate(work, taken - start)
    return _checked(gpu, known, rates)


def described(gpu: Gpu) -> Calibration:
    """Return the rates that a GPU's description and the model's default constants imply."""
    constants = Constants.at(gpu.clock)
    return Calibration(
        constants.launch_seconds,
        constants.product_seconds + constants.library_seconds,
        gpu.dram * constants.dram,
        _copied_in_l2(gpu) * constants.l2,
        constants.issue,
        gpu.tensor_share * constants.tensor_kernel,
        gpu.tensor_share,
        gpu.tf32_share,
    )


def _copied_in_l2(gpu: Gpu) -> float:
    """Return the bytes per second, read plus written, of a copy within the L2."""
    return 2.0 / gpu.l2_seconds(1.0, 1.0)


def _rate(work: float, seconds: float) -> float:
    return work / seconds if seconds > 0 else math.nan


def _start(gpu: Gpu, products: list[tuple[tuple[str, int, int, int], float]]) -> float | None:
    """Return the median of measured minus modeled seconds over the shorter half of the GEMMs; None without GEMMs."""
    rest = []
    for (kind, m, n, k), taken in sorted(products, key=lambda entry: entry[1])[: max(1, len(products) // 2)]:
        key, itemsize = ("tf32", 4) if kind == "tf32" else ("float16", 2)
        operations = gpu.flops[key] / gpu.multiprocessors * gpu.library_share(key)
        rates = Rates(gpu.multiprocessors, operations, gpu.l2_read, gpu.sharing, tile_exponent(key))
        rest.append(taken - library_time(m, n, k, 1, itemsize, rates)[0])
    return statistics.median(rest) if rest else None


def _checked(gpu: Gpu, known: Calibration, rates: Mapping[str, float]) -> Calibration | None:
    """Return ``known`` with the measured ``rates`` in place of its own; None if a rate is implausible."""
    for field in fields(Calibration):
        value, expected = rates.get(field.name, getattr(known, field.name)), getattr(known, field.name)
        is_share = field.name in ("issue", "mma", "library", "tf32")
        if not expected / MAX_FACTOR <= value <= min(expected * MAX_FACTOR, MAX_SHARE if is_share else math.inf):
            logger.warning(
                "calibration of %s: %s is not plausible: got %.3g, expected about %.3g. The plugin's built-in rates"
                " are used; run ort-cuda-plugin calibrate again",
                gpu.name,
                field.name,
                value,
                expected,
            )
            return None
    return replace(known, **rates)
