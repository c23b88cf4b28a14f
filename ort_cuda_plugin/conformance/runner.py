"""Runs many tests in worker processes, so that a crash or a hang costs one verdict and not the run."""

from __future__ import annotations

import json
import os
import queue
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from ort_cuda_plugin.conformance.verdict import Outcome, Verdict

TIMEOUT_S = 120
"""A test may compile many kernels; none needs this long."""


def run(
    keys: Sequence[str], *, optimised: bool, jobs: int, progress: Callable[[Outcome], None] = lambda outcome: None
) -> list[Outcome]:
    """One outcome per key, in order. A worker that dies or hangs is replaced; its test has failed."""
    todo: queue.SimpleQueue[str] = queue.SimpleQueue()
    for key in keys:
        todo.put(key)
    outcomes: dict[str, Outcome] = {}

    def work() -> None:
        worker: _Worker | None = None
        while True:
            try:
                key = todo.get_nowait()
            except queue.Empty:
                break
            worker = worker or _Worker(optimised)
            outcome = worker.judge(key)
            if outcome is None:
                outcome = Outcome(key, Verdict.FAILED, worker.death(), False)
                worker = None
            outcomes[key] = outcome
            progress(outcome)
        if worker is not None:
            worker.close()

    threads = [threading.Thread(target=work) for _ in range(min(jobs, len(keys)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcomes[key] for key in keys]


class _Worker:
    def __init__(self, optimised: bool) -> None:
        environment = os.environ | {"ALLOW_RELEASED_ONNX_OPSET_ONLY": "0"}
        command = [
            sys.executable,
            "-m",
            "ort_cuda_plugin.conformance.worker",
            "optimised" if optimised else "as-written",
        ]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )

    def judge(self, key: str) -> Outcome | None:
        """None when the worker died or took too long."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(key).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            return None
        ready, _, _ = select.select([stdout], [], [], TIMEOUT_S)
        line = stdout.readline() if ready else b""
        if not line:
            return None
        fields = json.loads(line)
        return Outcome(fields["key"], Verdict(fields["verdict"]), fields["reason"], fields["cpu_passes"])

    def death(self) -> str:
        """Ends the worker and says how it ended."""
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
