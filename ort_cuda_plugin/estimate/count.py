"""Counts the instructions and memory requests of kernels, by running some of their blocks on the emulated device.

Accesses of a warp by one execution of an instruction form one request. A request loads 32-byte sectors of global
memory; in shared memory the number of wavefronts is the largest number of distinct words in one bank. Blocks outside
the sample, and executions that were not recorded, are extrapolated.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..abi.core import core, ffi
from ..abi.device import Device, DeviceArray, Module
from ..compiler.host.matrices import COPY_WAIT
from ..compiler.kernel import KernelSpec
from ..compiler.library.kernel_library import KernelLibrary
from ..compiler.targets import KernelImage, Target
from ..progress.events import Task
from .sass import Code
from .work import KernelStep, Pointer, Region, Work

SECTOR, LINE, BANKS, WARP = 32, 128, 32, 32
KINDS = ("issued", "float", "double", "special", "matrix", "matrix_tf32", "matrix_int8", "barriers", "shuffles")
"""Kinds of instructions, in the order of `compiler.host.counts`."""
MAX_BLOCKS = 5
MAX_TURNS = 24
MAX_ACCESSES = 3_000_000
_STORE, _ATOMIC, _GLOBAL, _SHARED, _COPY = 1 << 16, 1 << 17, 1 << 18, 1 << 19, 1 << 20
_ALIGNMENT = 256

logger = logging.getLogger("ort_cuda_plugin")

_record = np.dtype(
    [("address", "u8"), ("what", "u4"), ("turn", "u4"), ("block", "u4"), ("thread", "u2"), ("place", "u2")]
)
Records = NDArray[np.void]
_scalars = {"i32": np.int32, "i64": np.int64, "f32": np.float32, "f64": np.float64}


@dataclass(frozen=True)
class Site:
    """A memory instruction of a kernel: ``units`` are the sectors, or in shared memory the wavefronts, of a request.

    ``least`` is the minimum number of units for the bytes that the lanes access.
    """

    kind: str
    nbytes: int
    requests: float
    units: float
    least: float


@dataclass(frozen=True)
class CopyWait:
    """A wait for cp.async copies: each thread executes it ``times`` times; ``left`` groups may stay in flight.

    The other fields count what a thread executes from one wait to the next.
    """

    left: int
    times: float
    issued: float
    barriers: float
    shared_rounds: float


@dataclass(frozen=True)
class Counted:
    """Totals of a launch, extrapolated from some blocks.

    ``requests`` and ``shared_requests`` are the warps' requests to global and to shared memory, ``wavefronts`` and
    ``shared_wavefronts`` the wavefronts that these take in the L1 and in shared memory.
    ``read`` and ``written`` are bytes between the multiprocessors and the L2, in whole sectors; a sector that a block
    reads several times counts once, as if it stayed in the L1. ``instructions`` are those of threads, by kind; a
    warp's inactive lanes count too.

    The other fields are per thread: ``loads`` from global memory to registers; executed basic blocks with such loads
    (``load_rounds``) and with loads from shared memory (``shared_rounds``); ``copy_waits``, waits for cp.async copies.
    """

    requests: float
    shared_requests: float
    wavefronts: float
    shared_wavefronts: float
    read: float
    written: float
    instructions: Mapping[str, float]
    loads: float
    load_rounds: float
    shared_rounds: float
    sites: tuple[Site, ...]
    copy_waits: tuple[CopyWait, ...] = ()


class BlockCounter:
    """Counts what the launches of a Run execute. Only one thread of the process can count at a time."""

    def __init__(self, work: Work, images: Mapping[KernelSpec, KernelImage], code: Mapping[KernelSpec, Code]) -> None:
        self._code = code
        self._device = Device.emulated(0)
        self._images = images
        self._modules: dict[KernelSpec, Module] = {}
        self._memory, self._addresses = _allocate(self._device, work.regions)
        self._accesses: Records = np.empty(MAX_ACCESSES, _record)

    def close(self) -> None:
        """Unload the kernels and free the device memory."""
        for module in self._modules.values():
            module.unload()
        for array in self._memory:
            array.free()

    def count(self, step: KernelStep) -> Counted:
        image = self._images[step.kernel]
        blocks = step.grid[0] * step.grid[1] * step.grid[2]
        chosen, weights = sample(blocks)
        records, executed, issued = self._launch(step, image, chosen)
        code = self._code[step.kernel]
        widest = {name: code.widest(name) for name in ("LDG", "STG", "LDS", "STS")}
        return summary(records, executed, issued, image.metadata, weights, step.block, widest, code.uses_stack)

    def _launch(
        self, step: KernelStep, image: KernelImage, blocks: NDArray[np.uint64]
    ) -> tuple[Records, NDArray[np.uint64], NDArray[np.uint64]]:
        places = image.metadata["accesses"] + image.metadata["parts"]
        executed = np.zeros(max(places, 1), np.uint64)
        issued = np.zeros(max(places, 1), np.uint64)
        turns = np.zeros(max(places, 1) * 1024, np.uint32)
        count = ffi.new("ocp_emu_count *")
        count.blocks, count.num_blocks = ffi.from_buffer("uint64_t[]", blocks), len(blocks)
        count.num_places, count.max_turns = places, MAX_TURNS
        count.accesses = ffi.cast("ocp_emu_access *", self._accesses.ctypes.data)
        count.max_accesses = len(self._accesses)
        count.executed = ffi.from_buffer("uint64_t[]", executed)
        count.issued = ffi.from_buffer("uint64_t[]", issued)
        count.turns = ffi.from_buffer("uint32_t[]", turns)
        if step.kernel not in self._modules:
            self._modules[step.kernel] = self._device.load(image.data)
        arguments: list[DeviceArray | np.generic] = []
        for argument in step.arguments:
            if isinstance(argument, Pointer):
                address = self._addresses[argument.region] + argument.offset
                arguments.append(_View(self._device, address))
            else:
                arguments.append(_scalars[argument.kind](argument.value))  # type: ignore[arg-type]
        module = self._modules[step.kernel]
        if step.shared_bytes:
            self._device.call("FuncSetAttribute", module.function(step.kernel.symbol), 8, step.shared_bytes)
        with _counting(count):
            module.launch(step.kernel.symbol, step.grid, step.block, arguments, shared=step.shared_bytes)
            self._device.synchronize()
        if count.num_left:
            logger.warning(
                "kernel %s: %d of %d sampled blocks are counted incompletely, because they use indices that blocks"
                " outside of the sample would have written. Give the inputs values by --values",
                step.kernel.name,
                count.num_left,
                len(blocks),
            )
        return self._accesses[: count.num_accesses], executed, issued


class _View(DeviceArray):
    """Device memory at an address, which `free` leaves allocated."""

    def __init__(self, device: Device, address: int) -> None:
        super().__init__(device, address, (1,), np.dtype(np.uint8))

    def free(self) -> None:
        self.address = 0


_one_at_a_time = threading.Lock()


@contextmanager
def _counting(count: object) -> Iterator[None]:
    with _one_at_a_time:
        core().emu_count_launches(count)
        try:
            yield
        finally:
            core().emu_count_launches(ffi.NULL)


def _allocate(device: Device, regions: Sequence[Region]) -> tuple[list[DeviceArray], list[int]]:
    """Allocate one array for each kind of memory; return the arrays, and the address of each region."""
    ends: dict[str, int] = {}
    for region in regions:
        ends[region.kind] = max(ends.get(region.kind, 0), region.offset + region.nbytes)
    arrays = {kind: device.alloc(end + _ALIGNMENT) for kind, end in ends.items()}
    addresses = []
    for region in regions:
        address = arrays[region.kind].address + region.offset
        addresses.append(address)
        if region.contents:
            times = -(-region.nbytes // len(region.contents))
            data = np.frombuffer((region.contents * times)[: region.nbytes], np.uint8)
            view = _View(device, address)
            device.call("MemcpyHtoDAsync", view.address, ffi.from_buffer(data), data.nbytes, ffi.NULL)
            device.synchronize()
    return list(arrays.values()), addresses


def count_all(work: Work, code: Mapping[KernelSpec, Code], library: KernelLibrary | None = None) -> dict[int, Counted]:
    """Return the counts of each launch, by the number of its step. Equal launches are counted once.

    Raises KernelCompileError, and CudaError where a kernel fails.
    """
    steps = {number: step for number, step in enumerate(work.steps) if isinstance(step, KernelStep)}
    specs = list(dict.fromkeys(step.kernel for step in steps.values()))
    library = library or KernelLibrary(count=lambda name, by: None)
    images = dict(zip(specs, library.get_many(specs, Target.counted()), strict=True))
    counter, known, found = BlockCounter(work, images, code), dict[object, Counted](), {}
    keys = {
        number: (step.kernel, step.grid, step.block, step.shared_bytes, _count_key(step))
        for number, step in steps.items()
    }
    task = Task("counting instructions of launches", len(set(keys.values())))
    try:
        for number, step in steps.items():
            if keys[number] not in known:
                known[keys[number]] = counter.count(step)
                task.advance(step.kernel.name)
            found[number] = known[keys[number]]
    finally:
        counter.close()
    return found


def _count_key(step: KernelStep) -> tuple[object, ...]:
    """Return a key of the arguments: launches with equal keys are assumed to have equal counts.

    It has the numbers, and the offsets of pointers within a cache line.
    """
    return tuple(a.offset % LINE if isinstance(a, Pointer) else a for a in step.arguments)


def sample(blocks: int) -> tuple[NDArray[np.uint64], NDArray[np.float64]]:
    """Choose some of ``blocks`` blocks; return their indices, and the number of blocks that each represents.

    The last block, which may do less work, represents only itself.
    """
    if blocks <= MAX_BLOCKS:
        return np.arange(blocks, dtype=np.uint64), np.ones(blocks)
    inner = MAX_BLOCKS - 1
    # Every second index is made odd, to avoid aliasing with patterns of the grid, which repeat at powers of two.
    places = np.unique((np.arange(inner) * (blocks - 1) // inner) | np.arange(inner) % 2)
    places = places[places < blocks - 1]
    weights = np.full(len(places) + 1, (blocks - 1) / len(places))
    weights[-1] = 1
    return np.append(places, blocks - 1).astype(np.uint64), weights


def summary(
    records: Records,
    executed: NDArray[np.uint64],
    issued: NDArray[np.uint64],
    metadata: Mapping[str, int],
    weights: NDArray[np.float64],
    block: tuple[int, int, int],
    widest: Mapping[str, int] | None = None,
    uses_stack: bool = True,
) -> Counted:
    """Extrapolate the records of the sampled blocks to the grid.

    ``executed``, ``issued``: executions by threads and by warps, of each memory instruction, then of each basic block.
    ``widest``: an instruction's maximum bytes per access. Without ``uses_stack`` no access to a local array counts.
    """
    accesses, parts = metadata["accesses"], metadata["parts"]
    # The counters are totals of all sampled blocks; only the recorded accesses tell which block made them.
    scale = float(weights.sum() / len(weights))
    threads = block[0] * block[1] * block[2]
    total = issued.astype(np.float64) * scale * WARP
    instructions: defaultdict[str, float] = defaultdict(float)
    for part in range(parts):
        for kind in KINDS:
            instructions[kind] += float(total[accesses + part]) * metadata.get(f"part{part}.{kind}", 0)
        if not uses_stack:
            instructions["issued"] -= float(total[accesses + part]) * metadata.get(f"part{part}.stack", 0)
    noted = np.bincount(records["place"], minlength=accesses).astype(np.float64)[:accesses]
    grown = np.where(noted > 0, executed[:accesses] / np.maximum(noted, 1), 1.0)
    records = records[np.argsort(records["place"], kind="stable")]
    ends = np.searchsorted(records["place"], np.arange(accesses + 1))
    widths = _widths(records, ends, metadata, widest or {})
    sites: list[Site] = []
    sums: defaultdict[str, float] = defaultdict(float)
    loading: dict[str, set[int]] = {"load": set(), "shared load": set()}
    rounds: defaultdict[str, float] = defaultdict(float)
    loads_made = 0.0
    for place in range(accesses):
        one = records[ends[place] : ends[place + 1]]
        if not len(one):
            continue
        what = int(one["what"][0])
        nbytes = widths[place]
        if not nbytes:  # NVVM merges the access into a wider one
            instructions["issued"] -= float(total[place])
            continue
        factor = float(grown[place]) * weights[one["block"]]
        key = _keys(one["block"], one["turn"], one["thread"] // WARP)
        asked = float(factor[np.unique(key, return_index=True)[1]].sum())
        wanted = float((factor * nbytes).sum())
        if what & _SHARED:
            units, least = _wavefronts(one, key, nbytes, factor)
            kind = "shared store" if what & _STORE else "shared load"
            sums["shared_requests"] += asked
            sums["shared_wavefronts"] += units
        elif what & _GLOBAL:
            units = _distinct(one, key, nbytes, SECTOR, factor)
            least = max(asked, wanted / SECTOR)
            lines = _distinct(one, key, nbytes, LINE, factor)
            kind = "atomic" if what & _ATOMIC else "store" if what & _STORE else "load"
            if not what & _COPY:  # copies bypass the L1; their stores count as shared-memory accesses
                sums["requests"] += asked
                sums["wavefronts"] += max(lines, wanted / LINE)
            if kind != "load":
                sums["written"] += units * SECTOR * (2 if kind == "atomic" else 1)
            else:
                sums["asked"] += units * SECTOR
                loads_made += float(executed[place]) * (not what & _COPY)
        else:
            continue
        part = metadata[f"access{place}.part"]
        if kind in loading and part not in loading[kind] and not what & _COPY:
            loading[kind].add(part)
            rounds[kind] += float(executed[accesses + part]) / (threads * len(weights))
        sites.append(Site(kind, nbytes, asked, units / max(asked, 1e-9), least / max(asked, 1e-9)))
    loads = records[records["what"] & (_STORE | _ATOMIC | _GLOBAL) == _GLOBAL]
    once = _once(loads, weights[loads["block"]] * grown[loads["place"]]) if len(loads) else 0.0
    return Counted(
        requests=sums["requests"],
        shared_requests=sums["shared_requests"],
        wavefronts=sums["wavefronts"],
        shared_wavefronts=sums["shared_wavefronts"],
        read=min(float(sums["asked"]), once * SECTOR),
        written=sums["written"],
        instructions=dict(instructions),
        loads=loads_made / (threads * len(weights)),
        load_rounds=rounds["load"],
        shared_rounds=rounds["shared load"],
        sites=tuple(sites),
        copy_waits=tuple(_copy_waits(metadata, issued[accesses:] / (threads / WARP * len(weights)), loading)),
    )


def _copy_waits(
    metadata: Mapping[str, int], times: NDArray[np.float64], loading: Mapping[str, set[int]]
) -> Iterator[CopyWait]:
    """Yield the waits for cp.async copies. ``times``: the number of times that a thread executes each basic block.

    The basic blocks that are executed at least as often as the one with the wait are assumed to be the wait's loop.
    """
    for place, often in enumerate(times):
        for left in range(len(COPY_WAIT)):
            waits = metadata.get(f"part{place}.waits{left}", 0)
            if not waits or not often:
                continue
            number = float(often) * waits
            loop = [part for part, each in enumerate(times) if each >= often]
            issued, barriers = (
                float(sum(times[part] * metadata.get(f"part{part}.{kind}", 0) for part in loop)) / number
                for kind in ("issued", "barriers")
            )
            shared = float(sum(times[part] for part in loop if part in loading["shared load"])) / number
            yield CopyWait(left, number, issued, barriers, shared)


def _widths(
    records: Records, ends: NDArray[np.int64], metadata: Mapping[str, int], widest: Mapping[str, int]
) -> list[int]:
    """Return the bytes of each memory instruction; 0 for one that NVVM merges into the access to the bytes before.

    NVVM merges contiguous accesses of one basic block if the result is aligned.
    """
    places = range(metadata["accesses"])
    widths = [int(records["what"][ends[place]]) & 0xFFFF if ends[place] < ends[place + 1] else 0 for place in places]
    together: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
    for place in places:
        if widths[place]:
            what = int(records["what"][ends[place]]) & ~0xFFFF
            count = int(ends[place + 1] - ends[place])
            if not what & _ATOMIC:
                together[metadata[f"access{place}.part"], what, count].append(place)
    for (_, what, _), group in together.items():
        name = ("ST" if what & _STORE else "LD") + ("S" if what & _SHARED else "G")
        limit = widest.get(name, 0)
        group.sort(key=lambda place: int(records["address"][ends[place]]))
        start = group[0]
        for place in group[1:]:
            delta = records["address"][ends[place] : ends[place + 1]] - _addresses(records, ends, start)
            joined = widths[start] + widths[place]
            fits = joined <= limit and bool((delta == widths[start]).all())
            if fits and widths[start] & (widths[start] - 1) == 0:
                needed = min(limit, 1 << (joined - 1).bit_length())
                fits = not bool((_addresses(records, ends, start) % needed).any())
            if fits:
                widths[start], widths[place] = joined, 0
            else:
                start = place
    return widths


def _addresses(records: Records, ends: NDArray[np.int64], place: int) -> NDArray[np.uint64]:
    return records["address"][ends[place] : ends[place + 1]]


def _keys(*columns: NDArray[Any]) -> NDArray[np.int64]:
    """Return an integer for each row of the ``columns``: equal integers for equal rows, different ones for others."""
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        key = key * (int(column.max(initial=0)) + 1) + column.astype(np.int64)
    return key


def _distinct(one: Records, key: NDArray[np.int64], nbytes: int, unit: int, factor: NDArray[np.float64]) -> float:
    """Return the number of memory units of ``unit`` bytes that the requests touch, each unit once per request."""
    first = (one["address"] // unit).astype(np.int64)
    last = ((one["address"] + nbytes - 1) // unit).astype(np.int64)
    low = first.min()
    span = int(last.max() - low) + 1
    both = np.concatenate([key * span + (first - low), key * span + (last - low)])
    _, index = np.unique(both, return_index=True)
    return float(np.concatenate([factor, factor])[index].sum())


def _once(records: Records, factor: NDArray[np.float64]) -> float:
    """Return the number of sectors that blocks read; a sector counts once for each block that reads it."""
    sector = (records["address"] // SECTOR).astype(np.int64)
    sector -= sector.min()
    _, index = np.unique(records["block"].astype(np.int64) * (int(sector.max()) + 1) + sector, return_index=True)
    return float(factor[index].sum())


def _wavefronts(one: Records, key: NDArray[np.int64], nbytes: int, factor: NDArray[np.float64]) -> tuple[float, float]:
    """Return the wavefronts of shared-memory requests, and their minimum.

    Each group of lanes that together access 128 bytes takes one wavefront for each distinct 4-byte word that it
    accesses in its busiest bank. The minimum is one wavefront per group.
    """
    words = max(nbytes // 4, 1)
    groups = max(nbytes * WARP // LINE, 1)
    group = one["thread"] % WARP // (WARP // groups)
    key = key * groups + group
    word = (one["address"] // 4).astype(np.int64)
    every = np.concatenate([word + i for i in range(words)])
    keys, factors = np.tile(key, words), np.tile(factor, words)
    span = int(every.max()) + 1
    _, index = np.unique(keys * span + every, return_index=True)
    keys, every, factors = keys[index], every[index], factors[index]
    banks, index, times = np.unique(keys * BANKS + every % BANKS, return_index=True, return_counts=True)
    requests = banks // BANKS
    order = np.argsort(requests, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(requests[order]) > 0])
    most = np.maximum.reduceat(times[order], starts)
    weight = factors[index][order][starts]
    return float((most * weight).sum()), float(weight.sum())
