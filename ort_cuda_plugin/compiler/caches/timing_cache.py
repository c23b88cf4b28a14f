"""The disk cache of measured times, for the autotuner.

A problem is a computation on a device, with element types and size buckets. Its candidates are schedules or library
calls that implement it, each with its median time. Entries are in the folder ``timings`` of the kernel cache, one file
for each problem. Only files that this user or root wrote are read. They contain names and numbers: a wrong entry can at
worst select a slow candidate.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ort_cuda_plugin.compiler.caches.cache_folder import CacheFolder, cache_folder

max_cache_bytes = 4 << 20
max_problems_in_memory = 4096
max_candidates = 256
max_name_characters = 512
_MOST_SECONDS = 1e9


def size_bucket(size: int) -> int:
    """Return the bucket of a size: the size rounded up to a number with at most three significant bits.

    The buckets are 0 to 8, 10, 12, 14, 16, 20, 24, 28, 32 and so on, four per power of two. So a bucket is less than a
    quarter larger than each size in it. Raises ValueError for a negative size.
    """
    if size < 0:
        raise ValueError(f"expected a size of at least 0, got {size}")
    step = 1 << max(size.bit_length() - 3, 0)
    return -(-size // step) * step


@dataclass(frozen=True)
class TimedProblem:
    """A computation whose candidates are timed.

    Attributes:
        timing_id: names the computation, with every property that affects its time except types and sizes.
        device: a text from `device_identity`.
        types: element types of the operands, such as "f16".
        sizes: buckets, see `of`.
    """

    timing_id: str
    device: str
    types: tuple[str, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def of(timing_id: str, device: str, types: Iterable[str], sizes: Iterable[int]) -> TimedProblem:
        """Return the problem for ``sizes``, rounded up to their buckets."""
        return TimedProblem(timing_id, device, tuple(types), tuple(map(size_bucket, sizes)))

    @property
    def key(self) -> str:
        """Return the key of the entry: the hex SHA-256 of all fields."""
        return hashlib.sha256(json.dumps(self._parts()).encode()).hexdigest()

    def _parts(self) -> list[object]:
        return [self.timing_id, self.device, list(self.types), list(self.sizes)]


def device_identity(
    name: str, compute_capability: tuple[int, int], multiprocessors: int, versions: Mapping[str, str] | None = None
) -> str:
    """Return the text that identifies a device in the cache.

    It has the name, the compute capability, the number of multiprocessors, and ``versions`` of the driver and of the
    libraries that candidates use.
    """
    major, minor = compute_capability
    rest = "".join(f", {what} {version}" for what, version in sorted((versions or {}).items()))
    return f"{name}, {major}.{minor}, {multiprocessors} multiprocessors{rest}"


class TimingCache(CacheFolder):
    """Times of candidates, in memory and in one folder. Thread safe; several processes may share one folder.

    A read-only folder is read. ``folder`` defaults to ``timings`` in `cache_folder`. ``max_bytes`` limits the sum of
    the entries' sizes: the least recently used entries are removed.
    """

    name = "timing cache"
    suffix = ".times"
    magic = b"OCPT\x02\n"
    consequence = "Each process measures candidate kernels again"
    remedy = "the process measures the candidate kernels again"
    max_entry_bytes = 256 << 10

    def __init__(self, folder: Path | None = None, max_bytes: int = max_cache_bytes) -> None:
        super().__init__(cache_folder() / "timings" if folder is None else folder, max_bytes)
        self._times: dict[TimedProblem, dict[str, float]] = {}
        self._lock = threading.Lock()

    def times(self, problem: TimedProblem) -> dict[str, float]:
        """Return the median seconds of each measured candidate of a problem; infinity for one that cannot run."""
        with self._lock:
            return dict(self._known(problem))

    def missing(self, problem: TimedProblem, candidates: Sequence[str]) -> list[str]:
        """Return those of ``candidates`` that have not been measured for the problem."""
        times = self.times(problem)
        return [candidate for candidate in candidates if candidate not in times]

    def best(self, problem: TimedProblem, candidates: Sequence[str]) -> str | None:
        """Return the fastest of ``candidates``, or the first of several equally fast ones.

        Returns None if one of them has not been measured, or if none of them can run.
        """
        times = self.times(problem)
        if not candidates or not all(candidate in times for candidate in candidates):
            return None
        fastest = min(candidates, key=times.__getitem__)
        return fastest if math.isfinite(times[fastest]) else None

    def record(self, problem: TimedProblem, times: Mapping[str, float]) -> None:
        """Add the median seconds of candidates to the stored times; infinity for a candidate that cannot run.

        Raises ValueError for other numbers, and for an empty name or one of more than `max_name_characters`.
        """
        for candidate, seconds in times.items():
            if not (_is_name(candidate) and _is_time(seconds)):
                raise ValueError(
                    f"candidate {candidate!r} of {problem.timing_id}: expected a time above 0 s, and a name of 1 to "
                    f"{max_name_characters} characters, got {seconds!r}"
                )
        with self._lock:
            known = self._known(problem, of_disk=True)
            # Drop the oldest candidates beyond the maximum. When kernels change, their candidates get new names, and
            # old ones remain.
            for candidate, seconds in times.items():
                known.pop(candidate, None)
                known[candidate] = float(seconds)
            for candidate in list(known)[:-max_candidates]:
                del known[candidate]
            self.write(problem.key, _encode(problem, known))

    def _known(self, problem: TimedProblem, of_disk: bool = False) -> dict[str, float]:
        """Return the stored times of a problem. With ``of_disk``, read its file again, since another process may have
        written it.
        """
        known = self._times.get(problem, {})
        if not known or of_disk:
            if len(self._times) >= max_problems_in_memory:
                self._times.clear()
            known = self._times[problem] = _decode(self.read(problem.key) or b"", problem) | known
        return known


@lru_cache(maxsize=4)
def _cache_in(folder: Path) -> TimingCache:
    return TimingCache(folder)


def timing_cache() -> TimingCache:
    """Return this process's timing cache, in the folder ``timings`` of `cache_folder`."""
    return _cache_in(cache_folder() / "timings")


# ---- contents of entries: JSON, in which null stands for infinity ----


def _encode(problem: TimedProblem, times: Mapping[str, float]) -> bytes:
    finite = {name: seconds if math.isfinite(seconds) else None for name, seconds in times.items()}
    return json.dumps([*problem._parts(), finite]).encode()


def _decode(body: bytes, problem: TimedProblem) -> dict[str, float]:
    """Decode the times in an entry; empty if the bytes are malformed, or belong to another problem."""
    try:
        *parts, found = json.loads(body)
        if parts != problem._parts() or not isinstance(found, dict) or len(found) > max_candidates:
            return {}
        times = {name: math.inf if seconds is None else seconds for name, seconds in found.items()}
    except (ValueError, TypeError, RecursionError):
        return {}
    return times if all(_is_name(name) and _is_time(seconds) for name, seconds in times.items()) else {}


def _is_name(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) <= max_name_characters


def _is_time(seconds: object) -> bool:
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        return False
    return 0 < seconds < _MOST_SECONDS or seconds == math.inf
