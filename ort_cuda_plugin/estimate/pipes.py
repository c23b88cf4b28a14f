"""Performance model of a kernel: its time is the longest of the times of its pipes, and of its exposed latency.

Pipes inside a multiprocessor are counted for the multiprocessor with the most blocks: with few blocks, others are idle.
The latency bound is the time that one thread takes for its dependent instructions and loads, once per wave of blocks.
It covers Little's law: with too few bytes in flight, a kernel cannot reach the bandwidth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..gpus import Gpu
from ..gpus.constants import Constants
from .count import SECTOR, WARP, Counted
from .sass import Code
from .work import KernelStep

HOP = 3
"""L2 latencies between a block's write and another block's read of it: a fence, an atomic update, a poll."""
RESERVED_SHARED = 1024
"""Bytes of shared memory per block that the system reserves, on sm_80 and later."""
REGISTER_UNIT = 256
FROM_L2 = 64
"""Bytes per clock that a multiprocessor reads from the L2: Nsight Compute's peak of l1tex__m_xbar2l1tex_read_bytes."""
MATRIX_FLOPS = {"matrix": 16 * 8 * 16 * 2, "matrix_tf32": 16 * 8 * 8 * 2, "matrix_int8": 16 * 8 * 32 * 2}
MATRIX_RATES = {"matrix": "float16", "matrix_tf32": "tf32", "matrix_int8": "int8"}
OPERATIONS_IN_FLIGHT = 2.5
"""Independent instructions of one thread in flight at once."""


@dataclass(frozen=True)
class Occupancy:
    """Resident ``blocks`` and ``warps`` of a multiprocessor, the resource that limits them, and the waves of blocks."""

    blocks: int
    warps: int
    waves: int
    limit: str


def occupancy(step: KernelStep, code: Code, device: Gpu) -> Occupancy:
    threads = step.block[0] * step.block[1] * step.block[2]
    warps = -(-threads // WARP)
    registers = -(-max(code.registers, 16) * WARP // REGISTER_UNIT) * REGISTER_UNIT * warps
    shared = code.static_shared + step.shared_bytes
    shared += 0 if shared and code.static_shared >= RESERVED_SHARED else RESERVED_SHARED
    limits = {
        "blocks": device.max_blocks,
        "warps": device.max_warps // warps,
        "registers": device.registers // registers,
        "shared memory": device.shared_bytes // shared,
    }
    limit = min(limits, key=lambda name: limits[name])
    blocks = max(limits[limit], 1)
    grid = step.grid[0] * step.grid[1] * step.grid[2]
    return Occupancy(blocks, blocks * warps, -(-grid // (blocks * device.multiprocessors)), limit)


def kernel_seconds(
    step: KernelStep, counted: Counted, code: Code, device: Gpu, constants: Constants, dram_bytes: float
) -> tuple[dict[str, float], Occupancy]:
    """Return the seconds of each pipe alone, by its name ("waiting": the latency bound), and the occupancy."""
    fits = occupancy(step, code, device)
    grid = step.grid[0] * step.grid[1] * step.grid[2]
    threads = step.block[0] * step.block[1] * step.block[2]
    # Fraction of the grid's blocks that the busiest multiprocessor executes.
    busiest = -(-grid // device.multiprocessors) / grid
    cycle = 1.0 / device.clock
    issued = counted.instructions["issued"] / WARP
    per_lane = busiest * cycle
    shared_requests = counted.requests + counted.shared_requests
    moved = counted.read + counted.written
    # Seconds of the mma instructions at the tensor cores' peak rates, on the busiest multiprocessor.
    matrix = (
        busiest
        * device.multiprocessors
        * sum(
            counted.instructions[kind] / WARP * flops / device.flops[MATRIX_RATES[kind]]
            for kind, flops in MATRIX_FLOPS.items()
        )
    )
    parts = {
        "dram": dram_bytes / (device.dram * constants.dram),
        "l2": max(
            device.l2_seconds(counted.read, counted.written) / constants.l2,
            counted.read / FROM_L2 * per_lane,
        ),
        "issue": issued / (4 * constants.issue) * per_lane,
        "float32": counted.instructions["float"] / device.float32_lanes * per_lane,
        "float64": counted.instructions["double"] * 2 / device.flops["float64"],
        "special": counted.instructions["special"] / device.special_lanes * per_lane,
        "lsu": shared_requests * per_lane,
        "shared": (counted.wavefronts + counted.shared_wavefronts) * per_lane,
        "tensor": matrix / (device.tensor_share * constants.tensor_kernel),
    }
    fetched = min(dram_bytes / moved, 1.0) if moved else 0.0
    latency = constants.l2_latency + fetched * (constants.dram_latency - constants.l2_latency)
    each = grid * threads
    chain = _chain(
        counted.instructions["issued"] / each,
        counted.instructions["barriers"] / each,
        counted.shared_rounds,
        device,
        constants,
    )
    rounds = counted.load_rounds if not code.mix else counted.loads * code.rounds
    loaded = max(rounds, 0.0 if counted.copy_waits else 1.0) * latency + _copied(counted, device, constants, latency)
    parts["waiting"] = max(fits.waves, step.turns) * (chain + loaded)
    if step.turns > 1:  # blocks read results of other blocks of the grid
        parts["waiting"] += (step.turns - 1) * HOP * constants.l2_latency
    return {name: seconds for name, seconds in parts.items() if seconds}, fits


def operations(counted: Counted) -> float:
    """Return the approximate number of multiplications and additions of a launch."""
    found = 2 * (counted.instructions["float"] + counted.instructions["double"])
    return found + sum(counted.instructions[kind] / WARP * flops for kind, flops in MATRIX_FLOPS.items())


def uses_tensor_cores(counted: Counted) -> bool:
    return any(counted.instructions[kind] for kind in MATRIX_FLOPS)


def _chain(issued: float, barriers: float, shared_rounds: float, device: Gpu, constants: Constants) -> float:
    """Return the seconds that a thread takes for its instructions, barriers and loads from shared memory."""
    cycles = issued * constants.dependent_cycles / OPERATIONS_IN_FLIGHT
    cycles += barriers * constants.barrier_cycles + shared_rounds * constants.shared_cycles
    return cycles / device.clock


def _copied(counted: Counted, device: Gpu, constants: Constants, latency: float) -> float:
    """Return the seconds that a thread waits for cp.async copies: for the first group, and then by Little's law.

    A wait that leaves n groups of copies in flight begins with n + 1 groups: one arrives every latency / (n + 1).
    The work between two waits hides part of that time.
    """
    seconds = 0.0
    most = max((wait.times for wait in counted.copy_waits), default=0.0)
    for wait in counted.copy_waits:
        between = _chain(wait.issued, wait.barriers, wait.shared_rounds, device, constants)
        stall = max(latency / (wait.left + 1) - between, 0.0)
        first = min(wait.times, 1.0) if wait.times == most else 0.0
        seconds += first * latency + (wait.times - first) * stall
    return seconds


def described(counted: Counted, code: Code, fits: Occupancy, useful: float) -> Mapping[str, object]:
    """Return the counts of a launch for `StepEstimate.details`, by their names."""
    worst = sorted(counted.sites, key=lambda site: (site.least - site.units) * site.requests)
    return {
        "registers": code.registers,
        "shared_bytes": code.static_shared,
        "spilled_bytes": code.spilled,
        "warps": fits.warps,
        "occupancy_limit": fits.limit,
        "waves": fits.waves,
        "read_bytes": counted.read,
        "written_bytes": counted.written,
        "useful_bytes": useful,
        "instructions": {name: count for name, count in counted.instructions.items() if count},
        "mix": dict(code.mix),
        "loads_of_a_thread": counted.loads,
        "waits_for_a_load": code.rounds,
        "sites": [
            f"{site.kind} of {site.nbytes} bytes: {site.units:.1f} {_unit(site.kind)} for each request of a "
            f"warp, at best {site.least:.1f}; {site.requests:.0f} requests"
            for site in worst[:6]
            if site.units > 1.2 * site.least
        ],
    }


def _unit(kind: str) -> str:
    return "wavefronts" if kind.startswith("shared") else f"sectors of {SECTOR} bytes"
