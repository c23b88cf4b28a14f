"""Rooflines: the minimum time of a Run, by its model alone and by its steps. docs/estimates.md explains both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ..gpus import Gpu
from ..gpus.constants import Constants
from .cache_model import Served
from .libraries import arithmetic, peak_kind
from .work import KernelStep, LibraryStep, Step, Work


def model_roofline(work: Work, device: Gpu) -> tuple[float, float, float]:
    """Return the model's compulsory bytes, the operations of its GEMMs and convolutions, and its roofline in seconds.

    The roofline is the longer of the times that the bytes and the operations take, at the GPU's peak rates. It does not
    include intermediate tensors and launches.
    """
    touched: dict[int, int] = {}
    for step in work.steps:
        for access in (*step.reads, *step.writes):
            region = work.regions[access.region]
            if region.kind != "scratch":
                known = touched.get(access.region, 0)
                touched[access.region] = min(region.nbytes, max(known, access.nbytes))
    compulsory = float(sum(touched.values()))
    seconds = sum(flops / device.flops[kind] for kind, flops, _ in work.products)
    return compulsory, sum(flops for _, flops, _ in work.products), max(compulsory / device.dram, seconds)


def step_rooflines(
    work: Work,
    device: Gpu,
    constants: Constants,
    memory: Sequence[Served],
    counted: Mapping[int, float],
) -> list[float]:
    """Return the roofline of each step in seconds.

    It is the time of a launch, plus the longest of four times: of the DRAM traffic, of the L2 traffic, of the GEMMs and
    convolutions, and of one access to memory. The rates are those that benchmarks reach, not peaks. ``memory`` has each
    step's traffic as the model of the L2 predicts it; ``counted`` maps a step's number to its kernel's operations.
    """
    found = []
    for moved, tensor in zip(memory, _product_seconds(work, device, constants, counted), strict=True):
        fetched = min(moved.dram / moved.touched, 1.0) if moved.touched else 0.0
        least = max(
            moved.dram / (device.dram * constants.dram),
            device.l2_seconds(moved.read, moved.written) / constants.l2,
            constants.l2_latency + fetched * (constants.dram_latency - constants.l2_latency),
            tensor,
        )
        found.append(constants.launch_seconds + least)
    return found


def _product_seconds(work: Work, device: Gpu, constants: Constants, counted: Mapping[int, float]) -> list[float]:
    """Return the seconds of each step's GEMMs and convolutions: on tensor cores if these support the operands' type."""
    found = [0.0] * len(work.steps)
    done: Counter[str] = Counter()
    for number, step in enumerate(work.steps):
        if isinstance(step, LibraryStep):
            flops = arithmetic(step)
            found[number] = flops / _rate(peak_kind(step.dtype, "TF32" in step.flags), device, constants)
            done.update(dict.fromkeys(step.nodes, flops))
    for kind, flops, nodes in work.products:
        if sum(done[node] for node in nodes) < flops / 2:
            # The arithmetic of a node counts for one of its kernels: the one with the most operations, or the last one
            # if no operations are counted.
            launches = [number for number, step in enumerate(work.steps) if _computes(step, nodes)]
            if launches:
                number = max(launches, key=lambda one: (counted.get(one, 0.0), one))
                found[number] += flops / _rate(kind, device, constants)
    return found


def _computes(step: Step, nodes: Sequence[str]) -> bool:
    return isinstance(step, KernelStep) and not set(nodes).isdisjoint(step.nodes)


def _rate(kind: str, device: Gpu, constants: Constants) -> float:
    tensor = kind not in ("float32", "float64")
    return device.flops[kind] * (device.tensor_share if tensor else constants.float32_library)
