"""Fault injection campaign: makes each call of the driver, the vendor libraries and libc fail, one at a time.

``python tests/harness/fault_campaign.py`` counts the calls of each scenario (fault_scenarios.py), then repeats the
scenario for each call and each way in which it can fail. ``--scenario``, ``--function`` and ``--mode`` select faults,
``--sample`` limits the number of faults for each function, picked by ``--seed``, and ``--fault
FUNCTION:AT:ERROR:MODE[:effect]`` repeats one fault and prints all details.

For each fault it checks: there is no crash and no hang. Every step of the scenario gives right results, or fails with
an error that names the call and CUDA's error, or says that memory ran out. After a transient failure the next step is
right. After the device was lost, every step fails and says so. At the end no resource of the device is leaked.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from fault_worker import Outcome  # noqa: E402

HANG_SECONDS = 60
RELEASES = re.compile(r"Close|Destroy|Free|Release|Unload|TrimTo")
"""Pattern of driver functions that release a resource even if they return an error, such as that of earlier work."""


@dataclass
class Report:
    """The results of one scenario."""

    scenario: str
    outcomes: list[Outcome] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    processor_seconds: float = 0.0

    @property
    def wrong(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.wrong]


# ---- the list of faults to inject ----


def faults_of(calls: dict[str, int]) -> Iterator[Any]:
    """Yield every fault for a scenario; ``calls`` has its number of calls of each function."""
    from faults import HOST_FUNCTIONS, LAUNCH_FAILED, OUT_OF_MEMORY, UNKNOWN, Fault, library_functions

    libraries = library_functions()
    for function, count in sorted(calls.items()):
        for at in range(1, count + 1):
            if function in HOST_FUNCTIONS or function in libraries:
                yield from (Fault(function, at, 1, mode) for mode in ("once", "on"))
                continue
            effect = bool(RELEASES.search(function)) or function == "StreamEndCapture"
            for error, mode in ((UNKNOWN, "once"), (OUT_OF_MEMORY, "once"), (UNKNOWN, "on"), (UNKNOWN, "end")):
                yield Fault(function, at, error, mode, effect)
            if "Alloc" in function:
                yield Fault(function, at, OUT_OF_MEMORY, "on")
            if function in ("StreamEndCapture", "GraphLaunch", "LaunchKernel"):
                yield Fault(function, at, UNKNOWN, "once", effect=not effect)
            yield Fault(function, at, LAUNCH_FAILED, "lost")


def sample(faults: Iterable[Any], count: int, seed: int) -> list[Any]:
    """Return ``count`` random faults of each function, or all if ``count`` is 0."""
    if not count:
        return list(faults)
    groups: dict[str, list[Any]] = {}
    for fault in faults:
        groups.setdefault(fault.function, []).append(fault)
    chosen = random.Random(seed)
    return [fault for group in groups.values() for fault in chosen.sample(group, min(count, len(group)))]


# ---- the campaign, in the parent ----


def environment(scenario: str, streams: str, seed: int) -> dict[str, str]:
    import fault_scenarios

    values = {
        "CUDA_VISIBLE_DEVICES": "",
        "ORT_CUDA_PLUGIN_EMULATE_WORKERS": "1",
        "ORT_CUDA_PLUGIN_EMULATE_STREAMS": streams,
        "ORT_CUDA_PLUGIN_EMULATE_SEED": str(seed),
        "OPENBLAS_NUM_THREADS": "1",
    }
    return {**os.environ, **values, **fault_scenarios.SCENARIOS[scenario].environment}


Choice = Callable[[dict[str, int]], Sequence[str]]
"""Type of a function that chooses faults, given the scenario's number of calls of each function."""


def converse(scenario: str, choose: Choice, streams: str, seed: int) -> Iterator[dict[str, Any]]:
    """Start a worker, send it the chosen faults, and yield its messages. The last one says if it died or hung."""
    with tempfile.TemporaryFile("w+") as log:
        worker = subprocess.Popen(
            [sys.executable, str(HERE / "fault_worker.py"), scenario],
            env=environment(scenario, streams, seed),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        lines: queue.Queue[str] = queue.Queue()

        def listen(stdout: Any) -> None:
            for line in stdout:
                lines.put(line)
            lines.put("")

        threading.Thread(target=listen, args=(worker.stdout,), daemon=True).start()
        hangs = False
        try:
            while line := lines.get(timeout=HANG_SECONDS):
                said = json.loads(line)
                yield said
                if "calls" in said:
                    assert worker.stdin is not None
                    modules = [json.dumps(said["modules"])] if "modules" in said else []
                    worker.stdin.write("".join(f"{line}\n" for line in [*modules, *choose(said["calls"])]))
                    worker.stdin.close()
        except queue.Empty:
            hangs = True
            os.killpg(worker.pid, signal.SIGKILL)
        if status := worker.wait():
            log.seek(0)
            yield {"died": f"{'hangs' if hangs else f'exit status {status}'}: {log.read()[-2000:]}"}


def run_scenario(scenario: str, count: int, seed: int, streams: str, matches: Any = lambda fault: True) -> Report:
    """Inject ``count`` faults of each function (0: all), of those that ``matches`` accepts."""
    used = processor_seconds()
    report = Report(scenario)
    left: list[str] = []

    def first(calls: dict[str, int]) -> Sequence[str]:
        report.calls = calls
        left.extend(str(fault) for fault in sample(filter(matches, faults_of(calls)), count, seed))
        return list(left)

    talk(report, left, converse(scenario, first, streams, seed))
    while left:  # a new worker continues after a fault that the last one did not survive
        talk(report, left, converse(scenario, lambda calls: list(left), streams, seed))
    report.processor_seconds = processor_seconds() - used
    return report


def processor_seconds() -> float:
    """Return the CPU seconds of the workers that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def talk(report: Report, left: list[str], said: Iterator[dict[str, Any]]) -> None:
    """Record a worker's messages in ``report``, and remove finished faults from ``left``."""
    current = ""
    for message in said:
        if "begin" in message:
            current = message["begin"]
        elif "outcome" in message:
            name, kind, wrong, errors, callers = message["outcome"]
            report.outcomes.append(Outcome(name, kind, tuple(wrong), tuple(errors), tuple(callers)))
            left.remove(name)
            current = ""
        elif "died" in message:
            if not current:
                raise RuntimeError(f"{report.scenario} does not work without any injection: {message['died']}")
            report.outcomes.append(Outcome(current, "died", (message["died"],)))
            left.remove(current)


def describe(report: Report, verbose: bool) -> str:
    kinds = Counter("wrong" if outcome.wrong else outcome.kind for outcome in report.outcomes)
    lines = [
        f"{report.scenario}: {sum(report.calls.values())} calls of {len(report.calls)} functions, "
        f"{len(report.outcomes)} injections in {report.processor_seconds:.0f} s of a processor: "
        + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    ]
    for outcome in report.outcomes if verbose else report.wrong:
        lines.append(f"  {outcome.fault} ({outcome.kind})")
        lines += [f"    WRONG {text}" for text in outcome.wrong]
        lines += [f"    error {text}" for text in outcome.errors]
        lines += [f"    at    {text}" for text in outcome.callers[:8]]
    return "\n".join(lines)


def main() -> int:
    from fault_scenarios import SCENARIOS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="only these; default: all")
    parser.add_argument("--function", help="only functions whose name matches this expression")
    parser.add_argument("--mode", help="only this mode")
    parser.add_argument("--fault", help="only this injection")
    parser.add_argument("--sample", type=int, default=0, help="number of calls to sample of each function; 0: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--streams", default="inline", choices=["inline", "adversarial"])
    arguments = parser.parse_args()

    def matches(fault: Any) -> bool:
        return (
            (not arguments.fault or str(fault) == arguments.fault)
            and (not arguments.function or re.fullmatch(arguments.function, fault.function) is not None)
            and (not arguments.mode or fault.mode == arguments.mode)
        )

    reports = []
    for scenario in arguments.scenario or SCENARIOS:
        reports.append(run_scenario(scenario, arguments.sample, arguments.seed, arguments.streams, matches))
        print(describe(reports[-1], verbose=bool(arguments.fault)), flush=True)
    total = sum(len(report.outcomes) for report in reports)
    wrong = sum(len(report.wrong) for report in reports)
    seconds = sum(report.processor_seconds for report in reports)
    print(f"{total} injections in {seconds:.0f} s of a processor, {wrong} of them wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
