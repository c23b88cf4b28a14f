"""The worker process of fault_campaign.py: repeats one scenario, with one injected fault each time.

``python fault_worker.py SCENARIO`` writes lines of JSON: first the scenario's number of calls of each function. Then it
reads faults, one per line, and writes the outcome of each.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a fault.

    ``kind`` is "absorbed" (no step failed), "reported" (a step failed with an error) or "not reached" (the call was not
    made). ``wrong`` has the violated checks. If there are any, ``callers`` has the stack of the call that failed.
    """

    fault: str
    kind: str
    wrong: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    callers: tuple[str, ...] = ()


class Worker:
    """Repeats a scenario in this process."""

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
        """Run the scenario until caches are warm, and return its number of calls of each function."""
        rounds = 1 if self.kind.fresh_process else 3
        for _ in range(rounds):
            use = self.kind()
            use.prepare()
            if use.fake is not None:
                self.faults.may_fail(use.fake)
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
        """Return the resources that must be unchanged after all sessions are gone."""
        from emulator_harness import apply, current
        from ort_cuda_plugin.abi.core import core
        from ort_cuda_plugin.ep import boundary
        from ort_cuda_plugin.ep.device import open_device
        from ort_cuda_plugin.ep.nodes import fused_node

        gc.collect()
        apply(current())  # runs deferred work of the emulator
        alive = self.kind().alive()
        devices = self.scenarios.plugin_devices()
        apply(current())
        for device in devices:
            core().device_trim(device)
        apply(current())
        usages = [self.faults.usage(device) for device in devices]
        kept = ("_in_use", "_live", "weight_bytes")
        found: dict[str, Any] = {k: v for k, v in self.plugin.counters().items() if k.endswith(kept)}
        found.update(alive)
        found["objects of the emulator"] = usages[0].objects
        found["device bytes"] = [usage.device_bytes for usage in usages]
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
            works = not (lost and fired and any(map(self.faults.is_lost, self.scenarios.plugin_devices())))
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
            if not works and what.startswith("step"):
                wrong.append(f"{what} works on a lost device")
            return True

        created = attempt("create", use.create)
        struck = self.faults.fired > 0
        if created:
            for index, step in enumerate(use.steps()):
                # A fault of mode "once" affects one step: the later ones must work.
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
            for device in self.scenarios.plugin_devices():
                self.faults.heal(device)
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
    """Return whether the fault keeps resources from being freed, because no thread can enter the device's context."""
    return fault.function == "CtxSetCurrent" and fault.mode in ("on", "end")


def names(fault: Any, text: str) -> bool:
    """Return whether an error message names the failed call."""
    from faults import ERROR_NAMES, HOST_FUNCTIONS, OUT_OF_MEMORY

    if fault.function in HOST_FUNCTIONS:
        return re.search("memory|thread", text, flags=re.I) is not None
    if fault.function.startswith(("cublasLt", "cudnn")):
        return re.search(rf"{fault.function}\b.* failed: not supported", text) is not None
    error = ERROR_NAMES[fault.error]
    if re.search(r"cublasLt\w+ failed", text):
        return True  # cuBLASLt hides the error of the driver call that it makes
    if fault.mode == "lost" and error in text and re.search(r"\bcu[A-Z]|is lost", text):
        return True  # the loss of the device may be reported by any later call
    if fault.error == OUT_OF_MEMORY and re.search(r"out of memory on|out of memory of pinned", text):
        return True
    return error in text and re.search(rf"(cu)?{fault.function}", text) is not None


def work(scenario: str) -> None:
    """Count the calls of a scenario, then inject the faults on stdin; print a line of JSON for each event."""
    from faults import Fault

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**values: Any) -> None:
        print(json.dumps(values), file=out, flush=True)

    def inject(worker: Worker, fault: str) -> None:
        outcome = worker.inject(Fault.parse(fault))
        say(outcome=[outcome.fault, outcome.kind, outcome.wrong, outcome.errors, outcome.callers])

    worker = Worker(scenario)
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
    for name in modules:  # imports once what each forked child would import
        importlib.import_module(name)
    for line in sys.stdin:
        say(begin=line.strip())
        in_child(partial(inject, worker, line.strip()))


def in_child(action: Callable[[], None]) -> None:
    """Run the action in a forked child. If the child dies, end this process with its signal or exit status."""
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


if __name__ == "__main__":
    work(sys.argv[1])
