"""Judges many mutants in worker processes, and makes what they find small.

    PYTHONPATH=tests/harness python -m mutation [--count 500] [--first 0] [--jobs 1] [--patterns-only] [--check]
                                                  [--out FOLDER]

Exits with 1 where there is a finding. Each is minimised to a model, its feeds and a text in FOLDER.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pickle
import queue
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from mutation.bases import Base, operators, patterns
from mutation.mutants import Mutant, build, mutant
from mutation.oracle import Kind, Outcome
from worker_process import Worker

# ---- smaller ----


def minimise(mutated: Mutant, found: Outcome, judge: Callable[[Mutant], Outcome]) -> Mutant:
    """The fewest steps, tried one by one, that give an outcome of the same kind; without optimisations if they do."""

    def same(candidate: Mutant) -> bool:
        return judge(candidate).kind is found.kind

    smaller = True
    while smaller:
        smaller = False
        for index in range(len(mutated.steps)):
            candidate = replace(mutated, steps=mutated.steps[:index] + mutated.steps[index + 1 :])
            if same(candidate):
                mutated, smaller = candidate, True
                break
    plain = replace(mutated, level=0)
    return plain if mutated.level and same(plain) else mutated


def write(folder: Path, number: int, mutated: Mutant, outcome: Outcome, base: Base) -> Path:
    """The model, its feeds and what was found."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{outcome.kind.name.lower()}_{number}.onnx"
    data, feeds = build(mutated, base)
    path.write_bytes(data)
    arrays = {name: array for name, array in feeds.items() if array.dtype.num < 256}
    np.savez(
        path.with_suffix(".npz"),
        allow_pickle=False,
        **{name.replace("/", "_")[:100]: array for name, array in arrays.items()},
    )
    path.with_suffix(".txt").write_text(f"{mutated}\n{outcome.kind}: {outcome.detail}\n")
    return path


# ---- many ----


@dataclass
class Report:
    counts: Counter[Kind] = field(default_factory=Counter)
    findings: list[tuple[int, Mutant, Outcome]] = field(default_factory=list)
    seconds: float = 0.0
    slowest: float = 0.0


@contextmanager
def stored(bases: Mapping[str, Base]) -> Iterator[Path]:
    """A file with the bases, for workers."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bases.pickle"
        path.write_bytes(pickle.dumps(dict(bases)))
        yield path


def worker_command(bases_file: Path) -> list[str]:
    return [sys.executable, "-m", "mutation.worker", str(bases_file)]


def environment(jobs: int, check: bool = False) -> dict[str, str]:
    """Variables of one worker of ``jobs``."""
    return {
        "ALLOW_RELEASED_ONNX_OPSET_ONLY": "0",
        "ORT_CUDA_PLUGIN_EMULATE_CHECK": str(int(check)),
        "ORT_CUDA_PLUGIN_EMULATE_MEMORY": "1G",
        "ORT_CUDA_PLUGIN_EMULATE_WORKERS": str(max(1, len(os.sched_getaffinity(0)) // jobs)),
    }


def run(
    bases: Mapping[str, Base],
    numbers: Sequence[int],
    *,
    jobs: int = 1,
    check: bool = False,
    out: Path | None = None,
    progress: Callable[[int, Mutant, Outcome], None] = lambda number, mutated, outcome: None,
) -> Report:
    """Judges the mutants with these numbers. With ``out`` findings are minimised and written there."""
    report, start = Report(), time.monotonic()
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in numbers:
        todo.put(number)
    lock = threading.Lock()

    def work(file: Path) -> None:
        worker = Worker(worker_command(file), environment(jobs, check))
        while True:
            try:
                number = todo.get_nowait()
            except queue.Empty:
                break
            mutated = mutant(number, bases)
            outcome = worker.judge(mutated)
            if outcome.is_finding and out is not None:
                mutated = minimise(mutated, outcome, worker.judge)
                again = worker.judge(mutated)
                outcome = again if again.kind is outcome.kind else replace(outcome, detail=f"once: {outcome.detail}")
                write(out, number, mutated, outcome, bases[mutated.base])
            with lock:
                report.counts[outcome.kind] += 1
                report.slowest = max(report.slowest, outcome.seconds)
                if outcome.is_finding:
                    report.findings.append((number, mutated, outcome))
                progress(number, mutated, outcome)
        worker.close()

    with stored(bases) as file:
        threads = [threading.Thread(target=work, args=(file,)) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    report.seconds = time.monotonic() - start
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="mutation", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="the number of the first mutant")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--patterns-only", action="store_true", help="without ONNX's own tests of operators")
    parser.add_argument("--check", action="store_true", help="the emulated device's checking mode")
    parser.add_argument("--out", type=Path, default=Path("build") / "mutants")
    options = parser.parse_args(arguments)
    bases = patterns() | ({} if options.patterns_only else operators())

    done = itertools.count(1)

    def progress(number: int, mutated: Mutant, outcome: Outcome) -> None:
        if outcome.is_finding:
            print(f"{number} {outcome.kind}: {outcome.detail}\n    {mutated}", flush=True)
        if not (count := next(done)) % 1000:
            print(f"{count} of {options.count}", file=sys.stderr, flush=True)

    numbers = range(options.first, options.first + options.count)
    report = run(bases, numbers, jobs=options.jobs, check=options.check, out=options.out, progress=progress)
    rate = options.count / report.seconds
    print(f"{options.count} mutants of {len(bases)} models in {report.seconds:.0f} s ({rate:.1f} a second)")
    for kind, count in report.counts.most_common():
        print(f"{count:8} {kind}")
    return 1 if report.findings else 0
