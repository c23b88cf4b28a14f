"""Judges many random networks in worker processes, and makes what they find small.

    PYTHONPATH=tests/harness python -m fuzzing {sizes,graphs} [--count 500] [--first 0] [--jobs 1] [--lowering sm_90]
                                               [--check] [--adversarial] [--out FOLDER]

Exits with 1 where there is a finding. Each is minimised to a model, its inputs and outputs, and a text in FOLDER.
"""

from __future__ import annotations

import argparse
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fuzzing.minimise import minimise, write
from fuzzing.profiles import Profile, make_case
from mutation.oracle import Kind, Outcome
from ort_cuda_plugin.conformance.mode import Mode
from worker_process import Worker

TIMEOUT_S = 300.0
"""Of one network, whose kernels are compiled within it."""


@dataclass
class Report:
    counts: Counter[Kind] = field(default_factory=Counter)
    findings: list[tuple[int, Outcome]] = field(default_factory=list)
    seconds: float = 0.0


def run(
    profile: Profile,
    numbers: Sequence[int],
    *,
    mode: Mode,
    jobs: int = 1,
    out: Path | None = None,
    variables: Mapping[str, str] | None = None,
    progress: Callable[[int, Outcome], None] = lambda number, outcome: None,
) -> Report:
    """Judges the networks with these numbers. With ``out`` findings are minimised and written there."""
    report, start, lock = Report(), time.monotonic(), threading.Lock()
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in numbers:
        todo.put(number)
    environment = mode.environment(jobs) | {"ORT_CUDA_PLUGIN_EMULATE_MEMORY": "1G"} | dict(variables or {})

    def work() -> None:
        worker = Worker((sys.executable, "-m", "fuzzing.worker"), environment, TIMEOUT_S)

        def judge(task: object) -> Outcome:
            outcome = worker.judge(task)
            if outcome.is_finding:
                worker.restart()
            return outcome

        while True:
            try:
                number = todo.get_nowait()
            except queue.Empty:
                break
            outcome = judge((profile, number))
            if outcome.is_finding and out is not None:
                case = minimise(make_case(profile, number), outcome, judge)
                again = judge(case)
                outcome = again if again.kind is outcome.kind else replace(outcome, detail=f"once: {outcome.detail}")
                with lock:
                    write(out, f"{profile}_{number}", case, outcome)
            with lock:
                report.counts[outcome.kind] += 1
                if outcome.is_finding:
                    report.findings.append((number, outcome))
                progress(number, outcome)
        worker.close()

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report.seconds = time.monotonic() - start
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fuzzing", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("profile", type=Profile, choices=list(Profile))
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="the number of the first network")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--lowering", default="", metavar="GPU", help="kernels of this GPU, as sm_90 or sm_90:132")
    parser.add_argument("--check", action="store_true", help="the emulated device's checking mode")
    parser.add_argument("--adversarial", action="store_true", help="streams that defer and interleave work")
    parser.add_argument("--out", type=Path, default=Path("build") / "fuzzing")
    options = parser.parse_args(arguments)

    def progress(number: int, outcome: Outcome) -> None:
        if outcome.is_finding:
            print(f"{number} {outcome.kind}: {outcome.detail}", flush=True)

    mode = Mode(check=options.check, seed=options.first if options.adversarial else None, lowering=options.lowering)
    numbers = range(options.first, options.first + options.count)
    report = run(options.profile, numbers, mode=mode, jobs=options.jobs, out=options.out, progress=progress)
    print(f"{options.count} networks in {report.seconds:.0f} s ({options.count / report.seconds:.2f} a second)")
    for kind, count in report.counts.most_common():
        print(f"{count:8} {kind}")
    return 1 if report.findings else 0
