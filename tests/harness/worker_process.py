"""Worker processes that judge models, so that a crash or hang can be attributed to a model and a provider."""

from __future__ import annotations

import json
import os
import pickle
import select
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mutation.oracle import Kind, Outcome

TIMEOUT_S = 60.0
"""Seconds for one model, compilation of its kernels included."""
_HARNESS = Path(__file__).resolve().parent


class Worker:
    """Runs tasks in a process of `mutation.worker` or `fuzzing.worker`. After a crash or hang a new process is used."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], timeout_s: float = TIMEOUT_S) -> None:
        self._command, self._environment, self._timeout_s = list(command), environment, timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115

    def judge(self, task: object) -> Outcome:
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        stage = "start"
        deadline = time.monotonic() + self._timeout_s
        try:
            pickle.dump(task, process.stdin)
            process.stdin.flush()
            while True:
                message = self._line(process, deadline)
                if message is None:
                    return self._end(stage)
                if "kind" in message:
                    return Outcome(Kind(message["kind"]), message["detail"], message["seconds"])
                stage = message["stage"]
        except BrokenPipeError:
            return self._end(stage)

    def restart(self) -> None:
        """End the process, whose device may be lost. The next task gets a new process."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.restart()
        self._stderr.close()

    def _start(self) -> subprocess.Popen[bytes]:
        self._stderr.truncate(0)
        self._stderr.seek(0)
        folders = [str(_HARNESS), str(_HARNESS.parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders)), **self._environment}
        pipe, stderr = subprocess.PIPE, self._stderr
        return subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=stderr, env=environment, bufsize=0)

    @staticmethod
    def _line(process: subprocess.Popen[bytes], deadline: float) -> dict[str, Any] | None:
        """Return the worker's next message; None if the deadline passes or the worker ends before."""
        assert process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(process.stdout.fileno(), 1) if ready else b""
            if not part:
                return None
            line += part
        message: dict[str, Any] = json.loads(line)
        return message

    def _end(self, stage: str) -> Outcome:
        assert self._process is not None
        try:
            code = self._process.wait(timeout=0.5)
            kind, text = Kind.CRASH, f"exit code {code}"
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            kind, text = Kind.HANG, f"no answer within {self._timeout_s:g} s"
        self._process = None
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - 3000))
        said = self._stderr.read().decode(errors="replace")
        kind = kind if stage in ("plugin", "judge", "start") else Kind.CPU_SLOW
        return Outcome(kind, f"{text} in the stage {stage}; the end of its stderr: {said}")
