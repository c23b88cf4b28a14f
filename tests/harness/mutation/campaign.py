"""Judges many mutants in worker processes, and minimizes those with findings.

    PYTHONPATH=tests/harness python -m mutation [--count 500] [--first 0] [--jobs 1] [--patterns-only] [--check]
                                                  [--out FOLDER]

Exits with 1 if there is a finding. FOLDER gets a minimized model of each finding, its inputs, and a text.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from campaign import Campaign
from mutation.bases import Base, operators, patterns
from mutation.mutants import Mutant, build, mutant
from mutation.oracle import Outcome

# ---- minimizing a finding ----


def minimize(mutated: Mutant, found: Outcome, judge: Callable[[Mutant], Outcome]) -> Mutant:
    """Remove mutations, one at a time, and ONNX Runtime's optimizations, while the outcome stays of the same kind."""

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
    """Write the model, its inputs, and a text about the finding."""
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


# ---- judging many mutants ----


@contextmanager
def stored(bases: Mapping[str, Base]) -> Iterator[Path]:
    """Yield the path of a temporary file from which workers read the bases."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bases.pickle"
        path.write_bytes(pickle.dumps(dict(bases)))
        yield path


def worker_command(bases_file: Path) -> list[str]:
    return [sys.executable, "-m", "mutation.worker", str(bases_file)]


def environment(jobs: int, check: bool = False) -> dict[str, str]:
    """Return the environment variables of a worker, if ``jobs`` workers run at once."""
    return {
        "ALLOW_RELEASED_ONNX_OPSET_ONLY": "0",
        "ORT_CUDA_PLUGIN_EMULATE_CHECK": str(int(check)),
        "ORT_CUDA_PLUGIN_EMULATE_MEMORY": "1G",
        "ORT_CUDA_PLUGIN_EMULATE_WORKERS": str(max(1, len(os.sched_getaffinity(0)) // jobs)),
    }


@contextmanager
def campaign(bases: Mapping[str, Base], jobs: int = 1, check: bool = False) -> Iterator[Campaign[Mutant]]:
    """Yield the campaign over the mutants of these bases."""
    with stored(bases) as file:
        yield Campaign(
            worker_command(file),
            environment(jobs, check),
            task=lambda number: mutant(number, bases),
            case=lambda number: mutant(number, bases),
            minimize=minimize,
            write=lambda folder, number, mutated, outcome: write(folder, number, mutated, outcome, bases[mutated.base]),
        )


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

    numbers = range(options.first, options.first + options.count)
    with campaign(bases, options.jobs, options.check) as mutants:
        report = mutants.run(numbers, jobs=options.jobs, out=options.out, loud=True)
    report.print()
    return 1 if report.findings else 0
