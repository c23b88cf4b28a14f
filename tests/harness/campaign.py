"""Runner of fuzzing campaigns: worker processes judge numbered cases, and findings are minimized."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

from mutation.oracle import Kind, Outcome
from worker_process import TIMEOUT_S, Worker

Case = TypeVar("Case")
PROGRESS_EVERY = 500  # cases


@dataclass
class Report:
    counts: Counter[Kind] = field(default_factory=Counter)
    findings: list[tuple[int, Outcome]] = field(default_factory=list)
    seconds: float = 0.0

    def print(self) -> None:
        judged = sum(self.counts.values())
        print(f"{judged} cases in {self.seconds:.0f} s ({judged / self.seconds:.2f} a second)")
        for kind, count in self.counts.most_common():
            print(f"{count:8} {kind}")


@dataclass(frozen=True)
class Campaign(Generic[Case]):
    """The parameters of a campaign.

    Attributes:
        command, environment: those of a worker process.
        task: returns the task that a worker gets for a case number.
        case: returns the case with this number, for the minimizer.
        minimize: returns a smaller case with an outcome of the same kind.
        write: writes the files of a finding.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    task: Callable[[int], object]
    case: Callable[[int], Case]
    minimize: Callable[[Case, Outcome, Callable[[Case], Outcome]], Case]
    write: Callable[[Path, int, Case, Outcome], object]
    timeout_s: float = TIMEOUT_S

    def run(self, numbers: Sequence[int], *, jobs: int = 1, out: Path | None = None, loud: bool = False) -> Report:
        """Judge the cases with these numbers; ``loud`` prints findings and progress.

        With ``out`` findings are minimized and written to this folder.
        """
        report, start, lock = Report(), time.monotonic(), threading.Lock()
        todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in numbers:
            todo.put(number)

        def work() -> None:
            worker = Worker(self.command, self.environment, self.timeout_s)
            while True:
                try:
                    number = todo.get_nowait()
                except queue.Empty:
                    break
                outcome = _judge(worker, self.task(number))
                if outcome.is_finding and out is not None:
                    outcome = self._minimized(worker, number, outcome, out)
                with lock:
                    report.counts[outcome.kind] += 1
                    if outcome.is_finding:
                        report.findings.append((number, outcome))
                        if loud:
                            print(f"{number} {outcome.kind}: {outcome.detail}", flush=True)
                    judged = sum(report.counts.values())
                    if loud and judged % PROGRESS_EVERY == 0:
                        seconds = time.monotonic() - start
                        print(f"{judged} of {len(numbers)} in {seconds:.0f} s", file=sys.stderr, flush=True)
            worker.close()

        threads = [threading.Thread(target=work) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        report.seconds = time.monotonic() - start
        return report

    def _minimized(self, worker: Worker, number: int, outcome: Outcome, out: Path) -> Outcome:
        case = self.minimize(self.case(number), outcome, lambda candidate: _judge(worker, candidate))
        again = _judge(worker, case)
        outcome = again if again.kind is outcome.kind else replace(outcome, detail=f"once: {outcome.detail}")
        self.write(out, number, case, outcome)
        return outcome


def _judge(worker: Worker, task: object) -> Outcome:
    """Return the outcome of a task. After a finding, restart the worker, because its device may be lost."""
    outcome = worker.judge(task)
    if outcome.is_finding:
        worker.restart()
    return outcome
