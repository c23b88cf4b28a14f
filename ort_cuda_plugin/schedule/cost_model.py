"""Cost model of sliced-K GEMMs: selects the tile and the sliced-K factor, and compares the kernel with a library call.

Times are cycles of a multiprocessor, from the performance model of docs/estimates.md with the rates of the GPU's
description (`gpus`). With the option ``autotune``, measurements decide instead of this model.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

from ..gpus import closest
from ..gpus.calibration import Calibration
from ..gpus.constants import Constants
from ..gpus.library_times import CONVOLUTION, Rates, library_time
from ..kernels.codegen.epilogue import VECTOR
from ..kernels.codegen.simt_fragments import VECTORS
from ..kernels.gemm.tile_shapes import SIZES, STEP, TileConfig, tile_configs
from ..program.expressions.scalar import reachable
from ..program.expressions.symbolic import Dim, ceildiv, hint, le, product
from ..program.lowering.context import DeviceProperties
from ..program.steps.schedule import Tile
from ..program.steps.steps import Sums

NEARLY = 0.98
"""Maximum time, relative to a library call, for which rules prefer the plugin's kernel, which must be compiled."""
LOAD_CYCLES = 400.0
"""Latency of a group of concurrent loads of epilogue operands, cycles."""
REGISTERS = 90
"""Registers per thread besides its accumulators."""
PIPELINE_CYCLES = 800.0
"""Latency of a block's first copies and of its final barriers, cycles."""
STEP_CYCLES = 200.0
"""Cycles from the arrival of one k step's copies to that of the next, with two k steps in flight."""
MAX_SPLIT_K = 8
"""Maximum split-K factor."""
SPLIT_CYCLES = 100.0
"""Cycles that a thread of the reduction takes to add the accumulators of one more split of k."""
INDEPENDENT = 2.5
"""Instructions of one thread that are in flight at once (instruction-level parallelism)."""
CHUNK_FLOPS = {"f16": 64.0, "bf16": 64.0, "tf32": 32.0, "i8": 128.0, "u8": 128.0}
"""Floating-point operations per accumulator for 64 bytes along k of both operands, by operand type."""
FLOPS_OF = {"f16": "float16", "bf16": "bfloat16", "tf32": "tf32", "i8": "int8", "u8": "int8"}
"""Key of a GPU's peak rate, by operand type."""
_instructions_of = {"div": 8, "sqrt": 8, "exp": 8, "log": 10, "sigmoid": 16, "tanh": 16, "erf": 25, "pow": 40}


@dataclass(frozen=True)
class _Rates:
    """Throughput of a GPU per multiprocessor and cycle, and latencies in cycles."""

    multiprocessors: int
    product_cycles: float  # fixed time of a tensor-core kernel
    library_cycles: float  # pipeline fill and last tile of a library's kernel
    launch_cycles: float  # gap between successive kernels
    library_flops: dict[str, float]  # operations per cycle of a library's largest tiles, by operand type
    chunks: dict[str, float]  # accumulators updated per cycle with 64 bytes along k, by operand type
    dram_bytes: float
    l2_read: float
    l2_written: float
    sharing: int  # multiprocessors that one load from the L2 serves
    instructions: float
    dependent_cycles: float  # latency of a dependent instruction in a lone warp
    round_cycles: float  # latency of loading a 64-byte chunk along k from shared memory, or of a barrier


@functools.cache
def _rates(capability: tuple[int, int], multiprocessors: int, calibration: Calibration | None) -> _Rates:
    gpu = closest(capability, multiprocessors)
    constants = Constants.at(gpu.clock)
    if calibration is not None:
        gpu, constants = calibration.gpu(gpu), calibration.constants(gpu)
    # Without calibration, assume that a library reaches `tensor_share` for each type, even TF32: a kernel of the plugin
    # should not win only because the library's time was overestimated.
    share = gpu.library_share if calibration is not None else lambda name: gpu.tensor_share
    ours = gpu.tensor_share * constants.tensor_kernel
    return _Rates(
        multiprocessors,
        constants.product_seconds * gpu.clock,
        constants.library_seconds * gpu.clock,
        constants.launch_seconds * gpu.clock,
        {kind: gpu.flops_per_clock(name) * share(name) * constants.tensor_library for kind, name in FLOPS_OF.items()},
        {kind: gpu.flops_per_clock(FLOPS_OF[kind]) * ours / flops for kind, flops in CHUNK_FLOPS.items()},
        gpu.per_clock(gpu.dram),
        gpu.per_clock(gpu.l2_read) * constants.l2,
        gpu.per_clock(gpu.l2_written) * constants.l2,
        gpu.sharing,
        4 * constants.issue,
        constants.dependent_cycles / INDEPENDENT,
        constants.shared_cycles,
    )


def _rates_of(device: DeviceProperties) -> _Rates:
    return _rates(device.compute_capability, device.multiprocessors, device.calibration)


@dataclass(frozen=True)
class Problem:
    """A GEMM at the expected sizes; ``kind`` is the operand type.

    With ``taps`` the first operand is im2col patches, with ``taps`` elements per channel. With ``is_compact`` the
    weights of a TF32 GEMM are stored as float16. ``along_k``: both operands are contiguous along k. The epilogue has
    ``finish`` instructions per element; with ``reads`` it reads a tensor of the result's size. With ``is_part`` the
    kernel stores 4-byte accumulators for a split-K reduction.
    """

    kind: str
    rows: int
    columns: int
    batch: int
    depth: int
    taps: int
    is_compact: bool
    along_k: bool
    finish: int
    reads: bool
    is_part: bool = False


def choose_tile_config(
    device: DeviceProperties,
    kind: str,
    rows: Dim,
    columns: Dim,
    batch: Dim,
    depth: Dim,
    *,
    taps: int = 0,
    is_compact: bool = False,
    along_k: bool = False,
    finish: int = 0,
    reads: bool = False,
    products: int = 1,
    left: int = 0,
    library: str | None = None,
) -> TileConfig | None:
    """Return the fastest tile for a GEMM, None if a library is faster. For most parameters see `Problem`.

    The alternative is ``products`` library calls, and a separate kernel that applies the epilogue to ``left`` bytes of
    the result or copies them. ``library`` is the operand type of the calls, by default ``kind``; "" if no library can
    compute the GEMM.
    """
    sizes = (hint(rows), hint(columns), hint(batch), hint(depth))
    problem = Problem(kind, *sizes, taps, is_compact, along_k, finish, reads)
    rates = _rates_of(device)
    config, cycles = fastest(device, problem)
    if library == "" or not device.libraries:
        return config
    called = replace(problem, kind=library or kind)
    another = rates.launch_cycles + rates.product_cycles + rates.library_cycles
    limit = _library_cycles(rates, called) + _left_cycles(rates, called, left) + (products - 1) * another
    return config if cycles <= NEARLY * limit else None


def choose_split_k(
    device: DeviceProperties,
    kind: str,
    rows: Dim,
    columns: Dim,
    depth: int,
    *,
    along_k: bool = False,
    finish: int = 0,
    reads: bool = False,
    left: int = 0,
    library: str | None = None,
) -> int:
    """Return the fastest split-K factor of a GEMM with 16-bit operands whose next step reduces the splits.

    Returns 1 if no split, or a library, is faster. The parameters are those of `choose_tile_config`.
    """
    rates, sizes = _rates_of(device), (hint(rows), hint(columns))
    problem = Problem(kind, *sizes, 1, depth, 0, False, along_k, finish, reads)
    _, whole = fastest(device, problem)
    if library != "":
        whole = min(whole, _library_cycles(rates, problem) + _left_cycles(rates, problem, left))
    best = (whole, 1)
    for split_k in range(2, MAX_SPLIT_K + 1):
        if depth % (split_k * STEP):
            continue
        part = replace(problem, batch=split_k, depth=depth // split_k, finish=0, reads=False, is_part=True)
        _, cycles = fastest(device, part)
        moved = sizes[0] * sizes[1] * split_k / device.multiprocessors
        cycles += moved * 4 / rates.l2_read + SPLIT_CYCLES * split_k
        best = min(best, (cycles, split_k))
    return best[1]


def _left_cycles(rates: _Rates, problem: Problem, left: int) -> float:
    """Return the cycles of a kernel that copies ``left`` bytes of the result, or applies the epilogue to them."""
    if not left:
        return 0.0
    finished = left / SIZES[problem.kind] / 32 * problem.finish / rates.instructions
    return rates.launch_cycles + max(2 * left / rates.dram_bytes, finished) / rates.multiprocessors


def epilogue_cost(step: Sums, columns: Dim) -> dict[str, Any]:
    """Return the epilogue's estimated cost as the parameters ``finish`` and ``reads`` of `choose_tile_config`."""
    results = reachable(value for value, _ in step.outputs)
    instructions = sum(_instructions_of.get(x.op, 1) for x in results if x.op not in ("leaf", "constant", "cast"))
    return {"finish": instructions, "reads": any(hint(product(x.shape)) > hint(columns) for _, x in step.inputs)}


def count_blocks(tile: Tile, rows: Dim, columns: Dim, batch: Dim) -> Dim:
    return ceildiv(rows, tile.m) * ceildiv(columns, tile.n) * batch


def no_more_blocks(device: DeviceProperties, tile: Tile, rows: Dim, columns: Dim, batch: Dim) -> Dim:
    """Return the condition that the number of waves of blocks is not larger than for the expected sizes."""
    blocks, multiprocessors = count_blocks(tile, rows, columns, batch), device.multiprocessors
    return le(blocks, -(-hint(blocks) // multiprocessors) * multiprocessors)


def fastest(device: DeviceProperties, problem: Problem) -> tuple[TileConfig, float]:
    """Return the fastest tile with its sliced-K factor, and the kernel's duration in cycles."""
    return _fastest(device.compute_capability, device.multiprocessors, device.calibration, problem)


@functools.lru_cache(maxsize=1024)
def _fastest(
    capability: tuple[int, int], multiprocessors: int, calibration: Calibration | None, problem: Problem
) -> tuple[TileConfig, float]:
    """Compute `fastest`; cached, since passes and emission ask for the same step, and networks repeat layers."""
    more = {"along_k": problem.along_k, "is_image": problem.taps > 0}
    configs = tile_configs(problem.kind, problem.is_compact, capability=capability, **more)
    rates = _rates(capability, multiprocessors, calibration)
    times = ((_cycles(rates, problem, config), config) for config in configs)
    (cycles, _), config = min(times, key=lambda entry: entry[0])
    return config, cycles


def _cycles(rates: _Rates, problem: Problem, config: TileConfig) -> tuple[float, float]:
    """Return (the kernel's duration, the latency of a thread) in cycles. The latter decides between equal durations."""
    tile = config.tile
    parts = _parts(problem, config)
    steps = -(-problem.depth // tile.k)
    blocks = hint(count_blocks(tile, problem.rows, problem.columns, problem.batch))
    each = -(-blocks // rates.multiprocessors)
    loads = _loads(problem, config)
    columns = tile.n / (2 if problem.is_compact else 1)  # weights as float16 have half the bytes
    begin, own_steps, step = _instructions(problem, config)
    issued = begin + own_steps * step
    wavefronts = steps * ((tile.m + columns) * parts / 2 + 4 * loads * config.warps)
    # In tiles of at most 16 columns, several rows of accumulators conflict in banks of shared memory.
    wavefronts += (config.sliced_k + 1) * tile.m * tile.n / (16 if tile.n > 16 else 10) + 100
    # The L1 serves repeated loads of elements that several windows of a block contain.
    fetched = tile.m * min(1.0, 3 / max(1, problem.taps)) + columns
    read = blocks * fetched * STEP * parts * steps
    written = problem.rows * problem.columns * problem.batch * (4 if problem.is_part else SIZES[problem.kind])
    height, width = config.warp
    registers = height * width // 32 + REGISTERS
    resident = (
        config.resident if config.sliced_k == 1 else max(1, (1 << 16) // registers // (tile.threads * config.sliced_k))
    )
    step_waits = max(
        rates.dependent_cycles * step + rates.round_cycles * (parts + (config.warps > 1)), STEP_CYCLES * parts
    )
    waits = rates.dependent_cycles * begin + PIPELINE_CYCLES + own_steps * step_waits
    if problem.reads:
        waits += LOAD_CYCLES * math.ceil(tile.m * tile.n / (tile.threads * config.sliced_k) / (VECTOR * VECTORS))
    waits *= -(-each // resident)
    pipes = (
        each * config.warps * config.sliced_k * issued / rates.instructions,
        each * wavefronts,
        each * steps * parts * tile.m * tile.n / rates.chunks[problem.kind],
        (read / rates.l2_read + written / rates.l2_written) / rates.multiprocessors,
    )
    return rates.product_cycles + max(*pipes, waits), waits


def _loads(problem: Problem, config: TileConfig) -> float:
    """Return the number of ldmatrix instructions per warp and k step."""
    height, width = config.warp
    return (height * 2 + width * (1 if problem.is_compact else 2)) / 16 * _parts(problem, config)


def _parts(problem: Problem, config: TileConfig) -> int:
    """Return the number of 64-byte chunks along k in a k step."""
    return config.tile.k * SIZES[problem.kind] // STEP


def _instructions(problem: Problem, config: TileConfig) -> tuple[float, float, float]:
    """Return a thread's (instructions outside of the loop over k, number of k steps, instructions per k step)."""
    tile = config.tile
    height, width = config.warp
    steps = max(1.0, -(-problem.depth // tile.k) / config.sliced_k)
    if config.warps > 1:  # all warp groups have equally many k steps, each with a barrier
        steps = math.ceil(steps)
    parts = _parts(problem, config)
    chunks = parts * STEP // 16 / tile.threads  # 16-byte chunks per tile row and thread
    loads, copies = _loads(problem, config), (tile.m + tile.n / (2 if problem.is_compact else 1)) * chunks
    step = 27 + 2.5 * (loads + copies) + parts * height * width / 64  # the last term: mma instructions
    if problem.kind == "tf32":
        step += parts * (4 * height / 8 + (13 * width / 16 if problem.is_compact else 4 * width / 8))
    begin = 135 + height * width / 8 + problem.finish * height * width / 32 / config.sliced_k
    if problem.taps > 1:
        step += 5 + 4.5 * tile.m * chunks
        begin += 25 + 12 * tile.m * chunks
    return begin, steps, step


def _library_cycles(rates: _Rates, problem: Problem) -> float:
    size = SIZES[problem.kind]
    flops = rates.library_flops[problem.kind] * (CONVOLUTION if problem.taps else 1.0)
    l2_bytes = rates.l2_read * rates.multiprocessors
    library = Rates(rates.multiprocessors, flops, l2_bytes, rates.sharing)
    cycles, _ = library_time(problem.rows, problem.columns, problem.depth, problem.batch, size, library)
    return rates.product_cycles + rates.library_cycles + cycles
