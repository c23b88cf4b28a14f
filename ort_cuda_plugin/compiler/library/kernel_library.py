"""Returns compiled kernels from memory, from the disk cache, or by compiling them, in parallel if that is faster."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ort_cuda_plugin import uninterrupted
from ort_cuda_plugin.compiler.cache import KernelCache
from ort_cuda_plugin.compiler.caches.trusted_files import append_to_file, read_file
from ort_cuda_plugin.compiler.foreign import ForeignKernel
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.library.foreign_code import compile_for
from ort_cuda_plugin.compiler.library.isolation import import_compiler
from ort_cuda_plugin.compiler.targets import KernelImage, Target
from ort_cuda_plugin.compiler.toolchain import kernel_key
from ort_cuda_plugin.progress.events import Task, is_watched

if TYPE_CHECKING:
    from ort_cuda_plugin.compiler.library.compile_worker import WorkerClient

Job: TypeAlias = tuple[KernelSpec, Target]
Done: TypeAlias = Callable[[int, KernelImage, bool], None]
MANIFEST_VARIABLE = "ORT_CUDA_PLUGIN_KERNEL_MANIFEST"
worker_pays_seconds = 2.5
"""Seconds of compilation from which on a worker process is worthwhile; importing Numba takes it over a second."""
max_workers = 8
lock_poll_seconds = 0.02
"""Seconds between polls for a kernel that another process is compiling."""
patience = 30.0
"""Multiple of a kernel's expected compile time for which to wait for another process that is compiling the kernel."""
least_patience_seconds = 60.0
"""Minimum seconds to wait for a kernel that another process is compiling: that process may have to import the compiler
first, and may share its core.
"""
look_seconds = 1.0
"""Seconds between checks whether a worker has finished."""
seconds_to_mention = 4.0
"""Expected seconds of compilation from which on a warning is logged, so that a waiting user knows the reason. The
seconds of smaller compilations add up in a process until they are mentioned.
"""
logger = logging.getLogger("ort_cuda_plugin")


class _Unmentioned:
    """The kernels of a process whose compilation no warning has mentioned yet. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kernels, self._seconds = 0, 0.0

    def mention(self, kernels: int, seconds: float) -> tuple[bool, str]:
        """Add a compilation. Return whether to warn now, and a text about the earlier ones that is "" without any."""
        with self._lock:
            earlier = f", after {self._kernels} kernels that took about {self._seconds:.0f} s" if self._kernels else ""
            is_news = self._seconds + seconds >= seconds_to_mention
            self._kernels = 0 if is_news else self._kernels + kernels
            self._seconds = 0.0 if is_news else self._seconds + seconds
            return is_news, earlier


_unmentioned = _Unmentioned()


def count_kernels(name: str, by: int) -> None:
    """Add ``by`` to a counter of the C library."""
    from ort_cuda_plugin.abi.core import count

    count(name, by)


class KernelLibrary:
    """The compiled kernels of this process. Methods may be called from any thread.

    ``count(name, by)`` is called with the counter names KERNELS_COMPILED and KERNEL_CACHE_HITS. Compilation reports its
    progress as a `Task`.
    """

    log: Callable[[str], None] | None = None
    """If set, gets a line of text before kernels are compiled, and one for each compiled kernel, from any thread."""

    def __init__(self, cache: KernelCache | None = None, count: Callable[[str, int], None] = count_kernels) -> None:
        self.cache = cache if cache is not None else KernelCache()
        self.count = count
        self.images: dict[str, KernelImage] = {}
        self.lock = threading.Lock()

    def get(self, spec: KernelSpec, target: Target) -> KernelImage:
        """Return one compiled kernel, see `get_many`."""
        return self.get_many([spec], target)[0]

    def get_many(self, specs: Sequence[KernelSpec], target: Target) -> list[KernelImage]:
        """Return the compiled kernels, in the order of ``specs``.

        Raises KernelCompileError (of `ort_cuda_plugin.compiler.compile`) for the first kernel that does not compile.
        """
        return self.get_jobs([(spec, target) for spec in specs])

    def get_jobs(self, jobs: Sequence[Job], progress: Callable[[int], None] = lambda done: None) -> list[KernelImage]:
        """Return the compiled kernels as `get_many` does, with a target for each kernel.

        ``progress`` is called from any thread, with the number of jobs that have finished since the last call.
        """

        record_specs(spec for spec, _ in jobs)
        keys = [kernel_key(spec, target) for spec, target in jobs]
        with self.lock:
            missing: dict[str, Job] = {}
            hits = 0
            for key, job in dict(zip(keys, jobs, strict=True)).items():
                if key not in self.images and (image := self.cache.load_made(*job)) is not None:
                    self.images[key] = image
                if key in self.images:
                    hits += 1
                else:
                    missing[key] = job
            if hits:
                self.count("KERNEL_CACHE_HITS", hits)
                progress(hits)
            if missing:
                missing_keys = list(missing)
                begun, done = time.monotonic(), 0
                weights = [expected_seconds(spec) for spec, _ in missing.values()]
                task = Task("compiling kernels", len(missing), sum(weights), sum(weights))
                self._tell(f"compiling kernels: {len(missing)} of {len(missing) + hits} are not in the cache")

                def keep(index: int, image: KernelImage, compiled: bool) -> None:
                    nonlocal done
                    # Store each kernel at once, so that the next call finds it if this one is interrupted.
                    self.images[missing_keys[index]] = image
                    if compiled:
                        self.cache.note_tools(image.target.is_emulated)
                        self.cache.store(missing_keys[index], image)
                    self.count("KERNELS_COMPILED" if compiled else "KERNEL_CACHE_HITS", 1)
                    progress(1)
                    task.advance(image.entry, weights[index])
                    done += 1
                    how = "compiled" if compiled else "taken from another process"
                    self._tell(
                        f"kernel {image.entry} was {how}: {done} of {len(missing)} after"
                        f" {time.monotonic() - begun:.1f} s"
                    )

                compile_many(list(missing.values()), keep, self.cache, is_told=is_watched())
            return [self.images[key] for key in keys]

    def _tell(self, line: str) -> None:
        if self.log is not None:
            self.log(line)


def expected_seconds(spec: KernelSpec) -> float:
    """Return the expected CPU seconds to compile the kernel. Numba's front end takes about half of this time,
    which is linear in the length of the source.
    """
    return 0.03 + len(spec.source) / 20000


class Compilation:
    """A list of jobs that this process and its workers share, the longest first; the jobs of one kernel stay together.

    Kernels that another process is compiling come last, and are loaded from the cache when that process is done.
    ``done(index, image, compiled)`` is called when a job ends, from one thread at a time.
    """

    def __init__(self, jobs: Sequence[Job], done: Done, cache: KernelCache) -> None:
        self.jobs = jobs
        self.done = done
        self.cache = cache
        self.lock = threading.Lock()
        self.abandoned = False
        self.workers: list[WorkerClient] = []
        self.images: list[KernelImage | None] = [None] * len(jobs)
        kernels: dict[KernelSpec, list[int]] = {}
        for index, (spec, _) in enumerate(jobs):
            kernels.setdefault(spec, []).append(index)
        self.seconds = sum(map(expected_seconds, kernels))
        longest_first = sorted(kernels, key=expected_seconds, reverse=True)
        self.todo = deque(kernels[spec] for spec in longest_first)
        self.elsewhere: deque[int] = deque()

    def run(self) -> None:
        """Compile all jobs, with workers if that is faster. Raises KernelCompileError."""
        self.workers = start_workers(self.seconds, self.cache)
        threads = [threading.Thread(target=self.run_in, args=(worker,)) for worker in self.workers]
        try:
            for thread in threads:
                thread.start()
            if not self.workers or compiler_is_imported():
                self.run_here()
            else:  # the workers take over this process's share, so that it need not import the compiler
                for worker, thread in zip(self.workers, threads, strict=True):
                    worker.due = min(worker.due, time.monotonic() + least_patience_seconds)
                    self.await_worker(worker, thread)
        finally:
            self.todo.clear()
            for worker in self.workers:
                worker.stop_unless_ready()
            for worker, thread in zip(self.workers, threads, strict=True):
                self.await_worker(worker, thread)
                worker.close()
        elsewhere = list(self.elsewhere)
        self.todo.extend([i] for i, image in enumerate(self.images) if image is None and i not in elsewhere)
        self.run_here()
        for index in elsewhere:
            self.await_other(index)

    def await_other(self, index: int) -> None:
        """Wait for a kernel that another process is compiling. If that process fails or is slow, compile the kernel."""
        deadline = self.due(index)
        while not self.abandoned and self.images[index] is None:
            with self.cache.lock(kernel_key(*self.jobs[index])) as held:
                if (image := self.cache.load_made(*self.jobs[index])) is not None:
                    self.finish(index, image, compiled=False)
                elif held or time.monotonic() > deadline:
                    self.compile_here(index)
            if self.images[index] is None:
                time.sleep(lock_poll_seconds)

    def due(self, index: int) -> float:
        """Return the deadline for a kernel whose compilation another process begins now."""
        return time.monotonic() + least_patience_seconds + patience * expected_seconds(self.jobs[index][0])

    @staticmethod
    def await_worker(worker: WorkerClient, thread: threading.Thread) -> None:
        """Wait for the thread that serves a worker. If the worker exceeds its kernel's deadline, kill all workers."""
        while thread.is_alive():
            thread.join(look_seconds)
            if thread.is_alive() and time.monotonic() > worker.due:
                logger.warning(
                    "a child process that compiles kernels does not answer: this process compiles the child's kernels"
                )
                worker.kill()

    def abandon(self) -> None:
        """Kill the workers, and stop after the kernel that this process is compiling: the caller was interrupted."""
        self.abandoned = True
        for worker in self.workers:
            worker.kill()

    def run_here(self) -> None:
        """Compile the remaining jobs in this process. Raises KernelCompileError."""
        if self.abandoned or not self.todo:
            return
        for index in self.take():
            self.compile_here(index)

    def compile_here(self, index: int) -> None:
        self.finish(index, compile_for(import_compiler(), *self.jobs[index], self.cache))

    def run_in(self, worker: WorkerClient) -> None:
        """Let a worker compile jobs. If a job fails there, `run` compiles it again in this process, which raises its
        error.
        """
        if not worker.wait_ready():
            return
        worker.due = math.inf
        for index in self.take():
            worker.due = self.due(index)
            image = worker.compile(*self.jobs[index])
            if image is None:
                return
            self.finish(index, image)

    def finish(self, index: int, image: KernelImage, compiled: bool = True) -> None:
        with self.lock:
            self.images[index] = image
            self.done(index, image, compiled)

    def take(self) -> Iterator[int]:
        """Yield the index of each job to compile; its kernel stays locked until the next index is requested.

        Kernels that other processes have compiled are loaded from the cache, and those that others are compiling are
        put off.
        """
        while True:
            try:
                indices = self.todo.popleft()
            except IndexError:
                return
            for index in indices:
                if self.abandoned:
                    return
                with self.cache.lock(kernel_key(*self.jobs[index])) as held:
                    if not held:
                        self.elsewhere.append(index)
                    elif (image := self.cache.load_made(*self.jobs[index])) is not None:
                        self.finish(index, image, compiled=False)
                    else:
                        yield index


def compile_many(jobs: Sequence[Job], done: Done, cache: KernelCache, *, is_told: bool = False) -> list[KernelImage]:
    """Compile all jobs, with worker processes if there is enough work.

    Raises KernelCompileError. ``done`` (see `Compilation`) is called when a job ends, from one thread at a time.
    ``cache`` is used for LLVM IR. A long compilation is logged as a warning, unless the user knows of it already
    (``is_told``). If a signal handler raises an exception, the kernel that this process is compiling is finished first,
    and its ``done`` is called.
    """
    compilation = Compilation(jobs, done, cache)
    is_news, earlier = (False, "") if is_told else _unmentioned.mention(len(jobs), compilation.seconds)
    logger.log(
        logging.WARNING if is_news else logging.INFO,
        "compiling %d kernels, about %.0f s on one core%s; %s",
        len(jobs),
        compilation.seconds,
        earlier,
        f"they are stored in {cache.folder} for later processes"
        if cache.writable
        else "they are not stored, because no kernel cache can be written",
    )
    started = time.monotonic()
    uninterrupted.call(compilation.run, compilation.abandon)
    logger.info("compiled %d kernels in %.1f s", len(jobs), time.monotonic() - started)
    return [image for image in compilation.images if image is not None]


def start_workers(seconds: float, cache: KernelCache) -> list[WorkerClient]:
    """Start worker processes: one for each `worker_pays_seconds` of an estimated ``seconds`` of compilation, and one
    more if this process has not imported Numba and so does not compile itself.

    Start at most `max_workers`, and at most one less than the number of cores. The additional worker does not count.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = min(cores - 1, max_workers, int(seconds / worker_pays_seconds))
    if wanted <= 0:
        return []
    from ort_cuda_plugin.compiler.library.compile_worker import WorkerClient

    return WorkerClient.start(cache, wanted if compiler_is_imported() else wanted + 1)


def compiler_is_imported() -> bool:
    """Return whether this process has imported Numba, so that it can compile at once."""
    return "ort_cuda_plugin.compiler.compile" in sys.modules


# ---- manifest: a file that lists the requested kernels ----

recorded: set[KernelSpec] = set()


def record_specs(specs: Iterable[KernelSpec]) -> None:
    """Append the specs, one JSON object per line, to the file that $ORT_CUDA_PLUGIN_KERNEL_MANIFEST names."""
    path = os.environ.get(MANIFEST_VARIABLE)
    if not path:
        return
    ours = [spec for spec in dict.fromkeys(specs) if not isinstance(spec, ForeignKernel)]
    new = [spec for spec in ours if spec not in recorded]
    recorded.update(new)
    if new:
        lines = "".join(json.dumps(asdict(spec)) + "\n" for spec in new)
        # in a single write, so that the processes of a test run do not mix their lines
        append_to_file(Path(path), lines.encode())


def read_manifest(path: Path) -> list[KernelSpec]:
    """Return the distinct specs in a manifest, sorted by name.

    The file must be trustworthy, because the kernel sources in it will be executed: its owner and mode are checked.
    Raises ValueError for a line that is not a spec, and OSError if another user could have written the file.
    """
    specs = set()
    for number, line in enumerate(read_file(path).decode().splitlines(), 1):
        try:
            fields = json.loads(line)
            fields["signature"] = tuple(fields["signature"])
            specs.add(KernelSpec(**fields))
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return sorted(specs, key=lambda spec: (spec.name, spec.digest))
