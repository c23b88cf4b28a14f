"""Runs the sections of the selftest in a process of their own, so that a crash or a hang fails one check.

A process that dies, or that does not end a check in time, is replaced: the check fails, and the section goes on with
the next check, but ends after `MAX_DEATHS` such processes.
"""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..compiler.library.isolation import python_command
from ..conformance.runner import DISTRIBUTIONS
from .device import Device
from .sections.case import Result, Verdict
from .worker import Event, Request

TIMEOUT_S = 120.0
"""Seconds after which a check counts as hung. A check may compile many kernels."""
START_TIMEOUT_S = 120.0
"""Seconds after which a process that has not opened the device counts as hung."""
MAX_DEATHS = 3
"""Number of process deaths after which a section is given up."""


@dataclass
class SectionReport:
    """The results of a section. ``ended`` is the reason why checks are missing; "" if none is missing."""

    name: str
    results: list[Result] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    ended: str = ""


class WorkerDied(Exception):
    """The process ended or gave no answer; the message says which."""


class DeviceLost(WorkerDied):
    """The process has lost the device; the check that caused it is already reported as failed."""


class Worker:
    """A process of `ort_cuda_plugin.selftest.worker`. ``device`` describes the device that it has opened.

    Raises: WorkerDied: the device cannot be opened.
    """

    def __init__(self, device: Device) -> None:
        arguments = (str(int(device.is_emulated)), str(device.ordinal))
        command = python_command("ort_cuda_plugin.selftest.worker", *arguments, distributions=DISTRIBUTIONS)
        if command is None:
            raise RuntimeError(
                "selftest: sys.executable is not a Python interpreter. Run it with `python -m ort_cuda_plugin`"
            )
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/", text=True
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._errors: list[str] = []
        for target in (self._read, self._read_errors):
            threading.Thread(target=target, daemon=True).start()
        self.device: Event = self._answer(START_TIMEOUT_S)["device"]

    def events(self, request: Request) -> Iterator[Event]:
        """Yield the events of a request. Raises: WorkerDied."""
        assert self._process.stdin is not None
        try:
            print(json.dumps(asdict(request)), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise WorkerDied(self._death()) from None
        event: Event = {}
        while "end" not in event:
            event = self._answer(TIMEOUT_S)
            yield event
            if "lost" in event:
                self.close()
                raise DeviceLost(event["lost"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors = [*self._errors[-20:], line.strip()]

    def _answer(self, seconds: float) -> Event:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            self._process.kill()
            self._process.wait()
            raise WorkerDied(f"the process of the checks gave no answer within {seconds:.0f} s") from None
        if not line:
            raise WorkerDied(self._death())
        found: Event = json.loads(line)
        return found

    def _death(self) -> str:
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        said = next((line for line in reversed(self._errors) if line), "")
        return f"the process ended with exit code {code}{f': {said}' if said else ''}"[:400]


class Runner:
    """Runs checks, in one process as long as it lives.

    Raises: WorkerDied: the device cannot be opened.
    """

    def __init__(self, device: Device, progress: Callable[[str], None] = lambda text: None) -> None:
        self._target, self._progress = device, progress
        self._worker: Worker | None = Worker(device)
        self._ran: Result | None = None  # reported if the Run that began last ends the process
        self.device = self._worker.device

    def run(self, request: Request) -> SectionReport:
        """Return the results of a request."""
        begun, report = time.monotonic(), SectionReport(request.section)
        known = [*request.skip]
        for death in range(MAX_DEATHS):
            try:
                self._worker = self._worker or Worker(self._target)
                self._run(self._worker, replace(request, skip=tuple(known)), report, known)
                break
            except WorkerDied as died:
                self._worker = None
                check = known[-1] if known else "opening the device"
                if not isinstance(died, DeviceLost):
                    ran = self._ran or Result(check, Verdict.FAIL, case=check)
                    report.results.append(replace(ran, reason=str(died)))
                if death == MAX_DEATHS - 1 or not known:
                    report.ended = f"the process of this section ended in check {check!r}: {died}"
                    break
        report.seconds = time.monotonic() - begun
        return report

    def close(self) -> None:
        """End the process."""
        if self._worker is not None:
            self._worker.close()

    def _run(self, worker: Worker, request: Request, report: SectionReport, known: list[str]) -> None:
        """Run the checks of a request, and add each to ``known`` when it begins."""
        for event in worker.events(request):
            if "begin" in event:
                known.append(event["begin"])
                self._ran = None
                self._progress(f"{report.name}: {event['begin']}")
            elif "run" in event:
                self._ran = result_of(event["run"])
            elif "result" in event:
                report.results.append(result_of(event["result"]))
            report.cpu_seconds += event.get("cpu_seconds", 0.0)


def result_of(data: dict[str, Any]) -> Result:
    """Return the result in an event."""
    return Result(**{**data, "verdict": Verdict(data["verdict"]), "operators": tuple(data["operators"])})
