"""Runs backend tests in worker processes, so that a crash or a hang fails one test and not the whole run."""

from __future__ import annotations

import os
import pickle
import queue
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from ort_cuda_plugin.compiler.library.isolation import COMPILER_DISTRIBUTIONS, python_command
from ort_cuda_plugin.conformance.cases import Case
from ort_cuda_plugin.conformance.mode import Mode
from ort_cuda_plugin.conformance.verdict import Outcome, Verdict

DISTRIBUTIONS = (*COMPILER_DISTRIBUTIONS, "cffi", "ml_dtypes", "onnx", "onnxruntime", "onnxruntime-gpu")
TIMEOUT_S = 120
"""Seconds after which a test counts as hung. A test may compile many kernels."""


def run(
    cases: Sequence[Case], mode: Mode, *, jobs: int, progress: Callable[[Outcome], None] = lambda outcome: None
) -> list[Outcome]:
    """Return one outcome per case, in order. A worker that dies or hangs is replaced; its test fails."""
    todo: queue.SimpleQueue[Case] = queue.SimpleQueue()
    for case in cases:
        todo.put(case)
    outcomes: dict[str, Outcome] = {}
    jobs = min(jobs, len(cases))

    def work() -> None:
        worker: _Worker | None = None
        while True:
            try:
                case = todo.get_nowait()
            except queue.Empty:
                break
            worker = worker or _Worker(mode, jobs)
            outcome = worker.judge(case)
            if outcome is None:
                outcome = Outcome(case.key, Verdict.FAILED, worker.death(), False)
                worker = None
            outcomes[case.key] = outcome
            progress(outcome)
        if worker is not None:
            worker.close()

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcomes[case.key] for case in cases]


class _Worker:
    """A process of `ort_cuda_plugin.conformance.worker`.

    It receives tests pickled, because generating all of them takes seconds.
    """

    def __init__(self, mode: Mode, jobs: int) -> None:
        command = python_command("ort_cuda_plugin.conformance.worker", distributions=DISTRIBUTIONS)
        if command is None:
            raise RuntimeError(
                f"sys.executable is {sys.executable!r}, expected a Python interpreter that can run the tests"
            )
        environment = os.environ | mode.environment(jobs)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, cwd="/"
        )
        self._mode = mode

    def judge(self, case: Case) -> Outcome | None:
        """Let the worker judge a test, and return the outcome; None if the worker died or took too long."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            pickle.dump((self._mode, case), stdin)
            stdin.flush()
        except BrokenPipeError:
            return None
        ready, _, _ = select.select([stdout], [], [], TIMEOUT_S)
        try:
            outcome = pickle.load(stdout) if ready else None
        except (EOFError, pickle.UnpicklingError):
            return None
        return outcome if isinstance(outcome, Outcome) else None

    def death(self) -> str:
        """End the worker and describe how it ended."""
        try:
            code = self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return f"no answer within {TIMEOUT_S} s"
        return f"the process crashed (exit code {code})"

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
