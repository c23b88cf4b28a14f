"""L2 model: splits the accesses of a Run into L2 hits and device memory traffic, by an LRU cache of address chunks.

All cache lines of a chunk hit or miss together. Regions have the addresses of a Run: intermediate tensors share a slab,
so a result that overwrites a dead one in the L2 costs no memory traffic. The Run is simulated twice and only the second
pass counts, so that the cache is warm. Within a step all tensors are traversed at the same relative speed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .work import Access, Region, Step, distinct

_ALIGNMENT = 1 << 21
CHUNKS = 1 << 11
"""The modeled L2 has this number of chunks, or up to twice as many: a chunk's size is a power of two.

A chunk has at least 4096 bytes, so that a small L2 has fewer chunks."""


@dataclass(frozen=True)
class Served:
    """Bytes that a step reads and writes, and bytes that are read from and written to device memory for it."""

    read: float
    written: float
    fetched: float
    written_back: float

    @property
    def touched(self) -> float:
        return self.read + self.written

    @property
    def dram(self) -> float:
        return self.fetched + self.written_back


def served(regions: Sequence[Region], steps: Sequence[Step], cache_bytes: float) -> list[Served]:
    """Return the L2 and device memory traffic of each step, for an L2 of ``cache_bytes``."""
    chunk = max(4096, 1 << int(cache_bytes / CHUNKS).bit_length() - 1)
    capacity = int(cache_bytes // chunk)
    bases = _bases(regions)
    cached: OrderedDict[int, bool] = OrderedDict()  # by chunk number: whether the chunk must be written back
    found: list[Served] = []
    for _ in range(2):
        found = []
        for step in steps:
            read = written = fetched = written_back = 0.0
            for number, nbytes, writes in _touches(step, bases, chunk):
                read += 0.0 if writes else nbytes
                written += nbytes if writes else 0.0
                if number in cached:
                    cached.move_to_end(number)
                    cached[number] |= writes
                    continue
                if not writes:
                    fetched += nbytes
                cached[number] = writes
                if len(cached) > capacity:
                    _, dirty = cached.popitem(last=False)
                    written_back += chunk if dirty else 0
            found.append(Served(read, written, fetched, written_back))
    return found


def _bases(regions: Sequence[Region]) -> list[int]:
    """Return the address at which each region begins."""
    ends: dict[str, int] = {}
    for region in regions:
        ends[region.kind] = max(ends.get(region.kind, 0), region.offset + region.nbytes)
    starts, total = {}, 0
    for kind, end in ends.items():
        starts[kind] = total
        total += -(-end // _ALIGNMENT) * _ALIGNMENT
    return [starts[region.kind] + region.offset for region in regions]


def _touches(step: Step, bases: Sequence[int], chunk: int) -> Iterator[tuple[int, float, bool]]:
    """Yield (chunk number, accessed bytes, whether they are written) in the order of the step's accesses.

    The step traverses all its tensors in parallel, each at a speed proportional to its size.
    """
    lines: list[tuple[float, int, float, bool]] = []
    for accesses, writes in ((step.reads, False), (step.writes, True)):
        for access in distinct(accesses):
            lines += _chunks(access, bases, chunk, writes)
    lines.sort(key=lambda line: line[0])
    for _, number, nbytes, writes in lines:
        yield number, nbytes, writes


def _chunks(access: Access, bases: Sequence[int], chunk: int, writes: bool) -> list[tuple[float, int, float, bool]]:
    if access.nbytes <= 0:
        return []
    start = bases[access.region] + access.offset
    first, last = start // chunk, (start + access.nbytes - 1) // chunk
    count = last - first + 1
    nbytes = access.nbytes / count
    return [((index + writes) / count, first + index, nbytes, writes) for index in range(count)]
