"""Every failure of every call: what an application sees of it, what is left behind, and whether the next Run is right.

``python tests/fault_campaign.py`` counts the calls of each scenario (fault_scenarios.py) and makes each of them fail in
each way, one at a time. ``--scenario``, ``--function`` and ``--mode`` choose some, ``--sample`` takes so many of each
function, picked by ``--seed``, and ``--fault FUNCTION:AT:ERROR:MODE[:effect]`` repeats one and says all about it.

What has to hold for each: no crash, no hang; every step succeeds with right results or fails with an error that names
the call and CUDA's error, or for memory says so; after a failure that passes, the next step is right; after a lost
device every step says that it is lost; and nothing of the device's is alive afterwards.
"""

from __future__ import annotations

import argparse
import gc
import importlib
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
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

HANG_SECONDS = 60
RELEASES = re.compile(r"Destroy|Free|Release|Unload|TrimTo")
"""Such a call gives something up even where it reports an error, as one of earlier work."""


@dataclass(frozen=True)
class Outcome:
    """What one injection led to: `kind` is absorbed, reported or not reached, unless `faults` says what was wrong."""

    fault: str
    kind: str
    wrong: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    callers: tuple[str, ...] = ()


@dataclass
class Report:
    """Of one scenario."""

    scenario: str
    outcomes: list[Outcome] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    processor_seconds: float = 0.0

    @property
    def wrong(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.wrong]


# ---- which injections ----


def faults_of(calls: dict[str, int]) -> Iterator[Any]:
    """Every injection for a scenario that makes these calls."""
    from faults import HOST_FUNCTIONS, LAUNCH_FAILED, OUT_OF_MEMORY, UNKNOWN, Fault

    for function, count in sorted(calls.items()):
        for at in range(1, count + 1):
            if function in HOST_FUNCTIONS:
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
    """So many of each function; all for 0."""
    if not count:
        return list(faults)
    groups: dict[str, list[Any]] = {}
    for fault in faults:
        groups.setdefault(fault.function, []).append(fault)
    chosen = random.Random(seed)
    return [fault for group in groups.values() for fault in chosen.sample(group, min(count, len(group)))]


# ---- one injection, in the worker ----


class Worker:
    """A process that uses the plugin in one way, again and again."""

    def __init__(self, scenario: str) -> None:
        import onnxruntime as ort

        import fault_scenarios
        import ort_cuda_plugin as plugin
        from faults import Faults

        self.plugin = plugin
        self.scenarios = fault_scenarios
        self.kind = fault_scenarios.SCENARIOS[scenario]
        ort.set_default_logger_severity(4)
        self.faults = Faults()
        if self.kind.is_registered:
            plugin.register(emulate=True)

    def count(self) -> dict[str, int]:
        """The calls of one use, once everything is warm."""
        rounds = 1 if self.kind.fresh_process else 3
        for _ in range(rounds):
            use = self.kind()
            use.prepare()
            self.faults.arm(None)
            use.create()
            for step in use.steps():
                step()
            use.close()
            calls = self.faults.calls()
            use.finish()
        gc.collect()
        gc.freeze()
        return calls

    def in_use(self) -> dict[str, Any]:
        """What must be as before once all sessions are gone."""
        from emulator_harness import apply, current
        from ort_cuda_plugin.abi.core import core
        from ort_cuda_plugin.ep import boundary, fused_node, open_device

        gc.collect()
        device = self.scenarios.plugin_device()
        apply(current())  # runs what is deferred
        core().device_trim(device)
        apply(current())
        usage = self.faults.usage(device)
        kept = ("_in_use", "_live", "weight_bytes")
        found: dict[str, Any] = {k: v for k, v in self.plugin.counters().items() if k.endswith(kept)}
        found["objects of the emulator"], found["device bytes"] = usage.objects, usage.device_bytes
        found["sessions in Python"] = len(boundary.PROVIDERS) + len(fused_node.FUSED_NODES)
        found["loaded kernels"] = sum(len(opened._loaded) for opened in open_device._open.values())
        return found

    def inject(self, fault: Any) -> Outcome:
        before = None if self.kind.fresh_process else self.in_use()
        wrong: list[str] = []
        errors: list[str] = []
        use = self.kind()
        use.prepare()
        self.faults.arm(fault)
        lost = fault.mode == "lost"

        def attempt(what: str, action: Any, must_work: bool = False) -> bool:
            fired = self.faults.fired
            try:
                action()
            except self.scenarios.ValueWithoutMemory as error:
                errors.append(f"{what}: {error}")
                if must_work:
                    wrong.append(f"{what}: {error}")
                return False
            except self.scenarios.WrongResult as error:
                wrong.append(f"{what}: wrong result: {error}")
                return True
            except Exception as error:
                texts = [str(one) for one in getattr(error, "exceptions", [error])]
                errors.extend(f"{what}: {text}" for text in texts)
                if must_work:
                    wrong.append(f"{what} fails afterwards: {texts[0][:600]}")
                elif not fired and not self.faults.fired:
                    wrong.append(f"{what} fails before the injection: {texts[0][:600]}")
                else:
                    wrong.extend(f"{what}: not named: {text[:600]}" for text in texts if not names(fault, text))
                return False
            return True

        created = attempt("create", use.create)
        struck = self.faults.fired > 0
        if created:
            for index, step in enumerate(use.steps()):
                # Once struck, a failure that does not last is over.
                attempt(f"step {index}", step, must_work=fault.mode == "once" and struck)
                struck = self.faults.fired > 0
        if struck and fault.mode in ("once", "on"):
            self.faults.disarm()
            use.recover()
            if not created:
                use.close()
                created = attempt("create again", use.create, must_work=True)
            if created:
                for index, step in enumerate(use.steps()):
                    attempt(f"step {index} again", step, must_work=True)
        attempt("close", use.close)
        fired = self.faults.fired
        self.faults.disarm()
        try:
            use.close()
        except Exception as error:
            wrong.append(f"close fails afterwards: {error}")
        callers = self.faults.frames()
        use.finish()
        if before is not None:
            after = self.in_use()
            wrong.extend(
                f"{name}: {before[name]} before, {after[name]} after" for name in before if before[name] != after[name]
            )
        if lost and fired:
            self.faults.heal(self.scenarios.plugin_device())
            use = self.kind()
            use.prepare()
            if attempt("create after healing", use.create, must_work=True):
                for index, step in enumerate(use.steps()):
                    attempt(f"step {index} after healing", step, must_work=True)
            use.close()
            use.finish()
        if cannot_release(fault):
            wrong = [text for text in wrong if " before, " not in text]
        kind = "not reached" if not fired else "reported" if errors else "absorbed"
        places = tuple(self.faults.places(callers)) if wrong else ()
        return Outcome(str(fault), kind, tuple(wrong), tuple(errors), places)


def cannot_release(fault: Any) -> bool:
    """Whether nothing can be given back, because no thread gets the device's context."""
    return fault.function == "CtxSetCurrent" and fault.mode in ("on", "end")


def names(fault: Any, text: str) -> bool:
    """Whether an error says what failed."""
    from faults import ERROR_NAMES, HOST_FUNCTIONS, OUT_OF_MEMORY

    if fault.function in HOST_FUNCTIONS:
        return re.search("memory|thread", text, flags=re.I) is not None
    error = ERROR_NAMES[fault.error]
    if re.search(r"cublasLt\w+ failed|looking at the memory", text):
        return True  # the library tells nothing of the driver's error
    if fault.mode == "lost" and error in text and re.search(r"\bcu[A-Z]|is lost", text):
        return True  # by whichever call met it
    if fault.error == OUT_OF_MEMORY and re.search(r"out of memory on|out of memory of pinned", text):
        return True
    return error in text and re.search(rf"(cu)?{fault.function}", text) is not None


def work(arguments: argparse.Namespace) -> None:
    """The worker's side: a line of JSON for everything that the parent has to know."""
    from faults import Fault

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**values: Any) -> None:
        print(json.dumps(values), file=out, flush=True)

    def inject(worker: Worker, fault: str) -> None:
        outcome = worker.inject(Fault.parse(fault))
        say(outcome=[outcome.fault, outcome.kind, outcome.wrong, outcome.errors, outcome.callers])

    worker = Worker(arguments.worker)
    if not worker.kind.fresh_process:
        say(calls=worker.count())
        for line in sys.stdin:
            say(begin=line.strip())
            inject(worker, line.strip())
        return

    def first_use() -> None:
        calls = worker.count()
        say(modules=[name for name in sys.modules if name.startswith("ort_cuda_plugin.")], calls=calls)

    in_child(first_use)
    modules = json.loads(sys.stdin.readline())
    for name in modules:  # so that the children need not
        importlib.import_module(name)
    for line in sys.stdin:
        say(begin=line.strip())
        in_child(partial(inject, worker, line.strip()))


def in_child(action: Callable[[], None]) -> None:
    """Runs the action in a process of its own, and dies as that does."""
    child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status < 0:
        os.kill(os.getpid(), -status)
    if status:
        sys.exit(status)


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
"""The injections, given the calls of the scenario."""


def converse(scenario: str, choose: Choice, streams: str, seed: int) -> Iterator[dict[str, Any]]:
    """What a worker says; at its end its exit status, where that is not 0, or that it hung."""
    with tempfile.TemporaryFile("w+") as log:
        worker = subprocess.Popen(
            [sys.executable, __file__, "--worker", scenario],
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
    """Injects the faults that `matches` accepts, or `count` of each function."""
    used = processor_seconds()
    report = Report(scenario)
    left: list[str] = []

    def first(calls: dict[str, int]) -> Sequence[str]:
        report.calls = calls
        left.extend(str(fault) for fault in sample(filter(matches, faults_of(calls)), count, seed))
        return list(left)

    talk(report, left, converse(scenario, first, streams, seed))
    while left:  # what comes after one that the worker did not survive
        talk(report, left, converse(scenario, lambda calls: list(left), streams, seed))
    report.processor_seconds = processor_seconds() - used
    return report


def processor_seconds() -> float:
    """Of the workers that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def talk(report: Report, left: list[str], said: Iterator[dict[str, Any]]) -> None:
    """Notes what a worker says, and takes what it has done from what is left."""
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
    parser.add_argument("--sample", type=int, default=0, help="so many of each function; 0: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--streams", default="inline", choices=["inline", "adversarial"])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return 0

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
