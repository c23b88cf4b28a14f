"""Fault injection: puts one fault at a time into the emulated device, and checks that the selftest finds it.

    python bench/selftest_faults.py [--kinds kernel library driver] [--full] [--sections NAME ...] [--only PATTERN]

Faults: each kernel that the selftest launches is wrong in one element, and some kernels of each section write nothing;
each library call with its epilogue and type is refused, fails, is wrong in one element or slow (stand-in libraries of
the tests compute the calls); each newer call of the driver is unsupported. For each fault the selftest runs checks that
use the faulty kernel or call. A fault gets four marks: *found* if a check fails, *named* if the report names the
schedule, operator, call or driver function, *quarantined* if the next session avoids the fault, and *right* if the same
models have right results in the next session, although the fault persists. If there is no alternative to a driver call,
the error of the next session has to name the call.

A line for each fault has its marks. The table has the totals by kind and by section, and a line for each fault that
lacks a mark. The exit code is 1 if a fault lacks a mark.
"""

from __future__ import annotations

import argparse
import ctypes
import fnmatch
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("kernel", "library", "driver")
HOW = ("refused", "failing", "wrong", "slow")
"""Faults of a library call: see tests/c/fake_library.h."""
KERNEL_HOW = {"wrong": "kernel", "idle": "idle"}
"""Faults of a kernel, with their settings of the emulated device: see csrc_shim/emulator/fault.h."""
IDLE_KERNELS = 4
"""Number of kernels in each section that a fault makes write nothing, one kernel at a time."""
MOST_CHECKS = 2
"""Maximum number of checks that run for a fault of a kernel or of a library call."""
HANG_SECONDS = 300
"""Seconds after which a process with an unsupported driver call counts as hung."""
NEWER = (
    "MemHostAlloc",
    "MemPoolCreate",
    "MemPoolSetAttribute",
    "MemPoolGetAttribute",
    "MemPoolTrimTo",
    "MemAllocFromPoolAsync",
    "MemFreeAsync",
    "MemsetD8Async",
    "PointerGetAttribute",
    "StreamGetCtx",
    "StreamQuery",
    "StreamWaitEvent",
    "StreamBeginCapture",
    "StreamEndCapture",
    "StreamIsCapturing",
    "EventQuery",
    "EventElapsedTime",
    "FuncSetAttribute",
    "GraphCreate",
    "GraphAddKernelNode",
    "GraphAddMemcpyNode",
    "GraphAddMemsetNode",
    "GraphAddChildGraphNode",
    "GraphConditionalHandleCreate",
    "GraphAddNode",
    "GraphGetNodes",
    "GraphNodeGetType",
    "GraphInstantiate",
    "GraphExecKernelNodeSetParams",
    "GraphExecMemcpyNodeSetParams",
    "GraphExecMemsetNodeSetParams",
    "GraphExecChildGraphNodeSetParams",
    "GraphLaunch",
)
"""Driver functions that older drivers, virtual GPUs or MIG slices may lack: pools, graphs, captures, pinned memory."""


@dataclass
class Outcome:
    """The marks of one fault.

    ``section`` has the check that found it, and ``named`` says what the report names: a schedule, operators, a refused
    call, or a driver call; "" if it names nothing. ``is_told``: the next session fails, with an error that names the
    call, which has no alternative. ``why`` has the first failed check, or the reason why a mark is missing.
    """

    kind: str
    fault: str
    section: str = ""
    is_found: bool = False
    named: str = ""
    is_quarantined: bool = False
    is_right: bool = False
    is_told: bool = False
    why: str = ""
    quarantined: list[str] = field(default_factory=list)

    @property
    def is_named(self) -> bool:
        return bool(self.named)

    @property
    def is_complete(self) -> bool:
        return self.is_found and self.is_named and (self.is_told or (self.is_quarantined and self.is_right))


@dataclass
class Campaign:
    """The sections and checks of the selftest that are used, and the faults that are injected.

    ``kernels`` limits the number of wrong kernels in each section; 0: no limit.
    """

    sections: Sequence[str]
    checks: str
    is_quick: bool
    faults: str
    number: int
    count: int
    kernels: int = 0
    seen: int = 0

    def has(self, fault: str) -> bool:
        """Return whether this process injects the fault."""
        if not fnmatch.fnmatch(fault, self.faults):
            return False
        self.seen += 1
        return self.seen % self.count == self.number % self.count


Uses = dict[str, list[tuple[str, str]]]
"""Checks by the kernel or library call that they use: name -> [(section, check), ...]."""


class Local:
    """Runs checks of the selftest in this process. ``only`` selects checks by section; None selects all."""

    def __init__(self) -> None:
        from ort_cuda_plugin.selftest.device import Device, describe

        self.target = Device(True)
        self.only: dict[str, tuple[str, ...]] | None = None
        self.device = describe(self.target)

    def run(self, request: Any) -> Any:
        from ort_cuda_plugin.selftest.runner import SectionReport, result_of
        from ort_cuda_plugin.selftest.worker import run_section

        report = SectionReport(request.section)
        if self.only is not None and not request.only:
            request = replace(request, only=self.only.get(request.section, ("",)))
        for event in run_section(self.target, request):
            if "result" in event:
                report.results.append(result_of(event["result"]))
            if "lost" in event:
                report.ended = event["lost"]
        return report


class Isolated(Local):
    """Runs checks as the command does, in processes of their own, which a fault may end."""

    def run(self, request: Any) -> Any:
        from ort_cuda_plugin.selftest.runner import Runner

        if self.only is not None and not request.only:
            request = replace(request, only=self.only.get(request.section, ("",)))
        runner = Runner(self.target)
        report = runner.run(request)
        runner.close()
        return report


def uses_of(campaign: Campaign, local: Local, used: Callable[[], Iterable[str]]) -> Uses:
    """Run the checks without a fault, and return which kernels or calls each uses.

    ``used`` returns the names of the kernels or calls that were used since its last call.
    """
    from ort_cuda_plugin.selftest.sections.case import Verdict
    from ort_cuda_plugin.selftest.table import SECTIONS

    found: Uses = {}
    used()
    for section in SECTIONS:
        if section.name not in campaign.sections or section.name == "driver":
            continue  # the driver's section checks no kernel and no library
        for check, run in section.checks(local.target, campaign.is_quick):
            if not fnmatch.fnmatch(check, campaign.checks):
                continue
            failed = [result for result in run(lambda result: None) if result.verdict is Verdict.FAIL]
            for result in failed:
                print(f"fails without a fault: {result.name}: {result.reason}", flush=True)
            for name in dict.fromkeys(used()):
                found.setdefault(name, []).append((section.name, check))
    return found


def check_fault(local: Local, outcome: Outcome, checks: Sequence[tuple[str, str]], is_quick: bool) -> Outcome:
    """Run the selftest, and then the same models in new sessions, while the fault persists."""
    from ort_cuda_plugin import counters
    from ort_cuda_plugin.selftest.quarantining import failures
    from ort_cuda_plugin.selftest.selftest import selftest
    from ort_cuda_plugin.selftest.worker import Request

    local.only = {}
    for section, check in checks:
        local.only[section] = (*local.only.get(section, ()), check)
    report = selftest(local, [*local.only], is_quick)
    failed = failures(report.results)
    outcome.is_found = bool(failed)
    outcome.why = f"{failed[0].name}: {failed[0].reason}" if failed else f"no check of {checks} failed"
    outcome.section = checks[0][0]
    outcome.named = next(filter(None, map(named_by, failed)), "")
    outcome.quarantined = [str(entry) for entry in report.quarantined]
    outcome.is_quarantined = bool(report.quarantined) and report.is_stored
    wrong = []
    if any(result.is_refusal for result in failed):  # drops cached refusals, as a new process reads them from disk
        vars(local.target.opened).pop("refusals", None)
        outcome.quarantined.append("the refused call")
        outcome.is_quarantined = True
    refused = counters()["library_refusals"]
    for section, names in local.only.items():
        again = local.run(Request(section, is_quick, only=names, with_quarantine=True))
        wrong += [result for result in failures(again.results) if not result.engine]
    outcome.is_quarantined &= counters()["library_refusals"] == refused
    outcome.is_right = not wrong
    if wrong:
        outcome.why = f"the next session is wrong: {wrong[0].name}: {wrong[0].reason}"
    forget(local)
    return outcome


def named_by(result: Any) -> str:
    """Return what a failed check names; "" if nothing."""
    if result.is_refusal:
        return "refused call"
    if result.schedule:
        return f"schedule {result.family} {result.operand} {result.schedule}"
    return f"operators {', '.join(result.operators)} {result.type}" if result.operators else ""


def forget(local: Local) -> None:
    """Forget the quarantine and the refusals of the device."""
    from ort_cuda_plugin.compiler.caches.cache_folder import cache_folder
    from ort_cuda_plugin.ep.device import quarantined

    quarantined.store(local.device["identity"], [])
    for file in (cache_folder() / "refusals").glob("*"):
        file.unlink()
    vars(local.target.opened).pop("refusals", None)


# ---- kernels ----


@dataclass(frozen=True)
class KernelFault:
    """A fault of a kernel, and the checks that launch it."""

    how: str
    kernel: str
    checks: tuple[tuple[str, str], ...]

    @property
    def outcome(self) -> Outcome:
        return Outcome("kernel", f"{self.how}:{self.kernel}")

    @property
    def setting(self) -> str:
        return f"{KERNEL_HOW[self.how]}={self.kernel}"


def kernel_faults(campaign: Campaign, local: Local) -> Iterator[KernelFault]:
    """Yield the faults of kernels that the checks launch."""
    profile = Path(os.environ["ORT_CUDA_PLUGIN_EMULATE_PROFILE"])
    begin = 0

    def launched() -> list[str]:
        nonlocal begin
        lines = profile.read_text().splitlines() if profile.exists() else []
        names = [line.split()[0] for line in lines[begin:]]
        begin = len(lines)
        return names

    uses = uses_of(campaign, local, launched)
    sections: dict[str, list[str]] = {}
    for kernel, checks in sorted(uses.items()):
        sections.setdefault(checks[0][0], []).append(kernel)
    for kernels in sections.values():
        for how, count in (("wrong", campaign.kernels), ("idle", IDLE_KERNELS)):
            for kernel in spread(kernels, count):
                if campaign.has(f"{how}:{kernel}"):
                    yield KernelFault(how, kernel, tuple(uses[kernel][:MOST_CHECKS]))


def kernel_outcomes(campaign: Campaign, given: argparse.Namespace) -> Iterator[Outcome]:
    """Yield the outcome of each fault of a kernel.

    A kernel that gives wrong indices may crash the process of the emulated device, where a GPU would be lost. So a
    child process injects the faults, and `Isolated` injects again a fault that has ended the child.
    """
    local = Isolated()
    faults = [*kernel_faults(campaign, local)]
    options = ["--full"] if given.full else []
    while faults:
        child = subprocess.Popen(
            [sys.executable, __file__, "--put-in", *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert child.stdin is not None
        assert child.stdout is not None
        with child.stdin as stdin, child.stdout as stdout:
            json.dump([asdict(fault) for fault in faults], stdin)
            stdin.close()
            for text in stdout:
                yield Outcome(**json.loads(text))
                faults.pop(0)
        child.wait()
        if faults:
            fault = faults.pop(0)
            os.environ["ORT_CUDA_PLUGIN_EMULATE_FAULTS"] = fault.setting
            yield check_fault(local, fault.outcome, fault.checks, campaign.is_quick)
            del os.environ["ORT_CUDA_PLUGIN_EMULATE_FAULTS"]


def put_in(is_quick: bool) -> int:
    """Inject the kernel faults that the input lists, one after the other, and print the outcome of each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print
    local = Local()
    for data in json.load(sys.stdin):
        fault = KernelFault(data["how"], data["kernel"], tuple((section, check) for section, check in data["checks"]))
        set_faults(fault.setting)
        outcome = check_fault(local, fault.outcome, fault.checks, is_quick)
        set_faults("")
        print(json.dumps(asdict(outcome)), file=answers, flush=True)
    return 0


def spread(names: Sequence[str], count: int) -> list[str]:
    """Return ``count`` of the sorted names at even distances, so that all sorts of kernels are among them; 0: all."""
    taken = min(count or len(names), len(names))
    return [names[position * len(names) // taken] for position in range(taken)]


# ---- library calls ----


def library_faults(campaign: Campaign, local: Local) -> Iterator[Outcome]:
    fakes = stand_ins()
    calls = Path(os.environ["FAKE_CALLS"])
    begin = 0

    def called() -> list[str]:
        nonlocal begin
        lines = calls.read_text().splitlines() if calls.exists() else []
        found, begin = lines[begin:], len(lines)
        return found

    uses = uses_of(campaign, local, called)
    for call, using in sorted(uses.items()):
        checks = (*using[:MOST_CHECKS], *others(call, uses))
        for how in HOW:
            fault = f"{how}:{call}"
            if not campaign.has(fault):
                continue
            for fake in fakes:
                (ctypes.c_char * 128).in_dll(fake, "fake_fault").value = fault.encode()
            try:
                yield check_fault(local, Outcome("library", fault), checks, campaign.is_quick)
            finally:
                for fake in fakes:
                    (ctypes.c_char * 128).in_dll(fake, "fake_fault").value = b""


def others(call: str, uses: Uses) -> list[tuple[str, str]]:
    """Return a check of another call of the same kind and type, if any. It passes: the quarantine spares that call."""
    kind, element = call.split("_")[0], call.rsplit("_", 1)[1]
    same = (name for name in sorted(uses) if name.split("_")[0] == kind and name.rsplit("_", 1)[1] == element)
    checks = (check for name in same if name != call for check in uses[name] if check not in uses[call])
    return [*checks][:1]


def stand_ins() -> list[ctypes.CDLL]:
    """Return the loaded stand-in libraries. Their variable ``fake_fault`` selects a fault."""
    folder = Path(os.environ["ORT_CUDA_PLUGIN_EMULATE_LIBRARIES"])
    return [ctypes.CDLL(str(path)) for path in sorted(folder.glob("*.so"))]


# ---- driver calls ----


def driver_faults(campaign: Campaign) -> Iterator[Outcome]:
    """Yield the outcome of each fault of a driver call.

    Each fault gets new processes, because pools, graphs and streams live as long as the device.
    """

    for member in NEWER:
        if campaign.has(member):
            yield driver_fault(member, campaign)


def driver_fault(member: str, campaign: Campaign) -> Outcome:
    outcome = Outcome("driver", f"unsupported={member}")
    found = in_child(lambda: driver_selftest(outcome.fault, campaign))
    told = "; ".join(found["failed"]) or found["error"]
    outcome.is_found = bool(told)
    outcome.section = "driver"
    outcome.named = f"cu{member}" if names_call(member, told) else ""
    outcome.quarantined = found.get("quarantined", [])
    error = in_child(lambda: driver_session(outcome.fault))["error"]
    outcome.is_right = not error
    outcome.is_quarantined = outcome.is_right  # a right session avoids the call or the feature that needs it
    outcome.is_told = bool(error) and names_call(member, error)
    outcome.why = (told if outcome.is_right or outcome.is_told else f"the next session fails: {error}")[:400]
    return outcome


def driver_selftest(fault: str, campaign: Campaign) -> dict[str, Any]:
    """Run the selftest's driver section with a fault; return the failed checks and what is quarantined."""
    from ort_cuda_plugin.selftest.quarantining import failures
    from ort_cuda_plugin.selftest.selftest import selftest

    set_faults(fault)
    local = Local()
    report = selftest(local, [name for name in campaign.sections if name == "driver"], campaign.is_quick)
    forget(local)
    failed = [f"{result.name}: {result.reason}" for result in failures(report.results)]
    return {"failed": failed, "error": "", "quarantined": [str(entry) for entry in report.quarantined]}


def driver_session(fault: str) -> dict[str, Any]:
    """Run a session while a driver call fails as ``fault`` says."""
    set_faults(fault)
    run_session()
    return {"failed": [], "error": ""}


def set_faults(text: str) -> None:
    from ort_cuda_plugin.abi.emulation import configuration, configure

    config = configuration()
    config.faults = text.encode()
    configure(config)


def in_child(action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run ``action`` in a forked child and return its result. "error" has the reason if it fails, dies or hangs."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            found = action()
        except BaseException as error:
            found = {"failed": [], "error": " ".join(f"{type(error).__name__}: {error}".split()) or "an error"}
        with os.fdopen(writing, "w") as file:
            json.dump(found, file)
        os._exit(0)
    os.close(writing)
    signal.alarm(HANG_SECONDS)
    try:
        with os.fdopen(reading) as file:
            text = file.read()
    except TimeoutError:
        os.kill(child, signal.SIGKILL)
        text = '{"failed": [], "error": "the process hangs"}'
    signal.alarm(0)
    _, status = os.waitpid(child, 0)
    died = {"failed": [], "error": f"the process ended with exit code {os.waitstatus_to_exitcode(status)}"}
    result: dict[str, Any] = json.loads(text) if text else died
    return result


def names_call(member: str, text: str) -> bool:
    return re.search(rf"\bcu{member}(_v\d|WithFlags)?\b", text) is not None


def run_session() -> None:
    """Run a session until a CUDA graph replays, with the defaults of its options."""
    import numpy as np
    from onnx import parser

    import ort_cuda_plugin

    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20]> next (float[8, 16] x, float[16, 16] w) => (float[8, 16] y)'
        " { p = MatMul(x, w) q = Relu(p) y = Softmax(q) }"
    )
    session = ort_cuda_plugin.session(model.SerializeToString(), emulate=True)
    for seed in range(5):
        random = np.random.default_rng(seed)
        x, w = random.standard_normal((8, 16), np.float32), random.standard_normal((16, 16), np.float32)
        (found,) = session.run(None, {"x": x, "w": w})
        powers = np.exp(np.maximum(x @ w, 0))
        np.testing.assert_allclose(found, powers / powers.sum(-1, keepdims=True), rtol=1e-4, atol=1e-5)


# ---- the campaign ----


def outcomes(given: argparse.Namespace) -> Iterator[Outcome]:
    from ort_cuda_plugin.selftest.table import SECTIONS

    number, _, count = given.share.partition("/")
    names = [section.name for section in SECTIONS if not given.sections or section.name in given.sections]
    campaign = Campaign(names, given.checks, not given.full, given.only, int(number), int(count or 1), given.kernels)
    if "driver" in given.kinds:
        yield from driver_faults(campaign)
    if "kernel" in given.kinds:
        yield from kernel_outcomes(campaign, given)
    if "library" in given.kinds:
        yield from library_faults(campaign, Local())


def line(outcome: Outcome) -> str:
    """Return the line of a fault."""
    state = "ok" if outcome.is_complete else "MISSED"
    found = f"named {outcome.named or 'by nothing'}" if outcome.is_found else "not found"
    quarantined = ", ".join(outcome.quarantined) if outcome.is_quarantined else "nothing"
    after = "right" if outcome.is_right else "an error that names the call" if outcome.is_told else "WRONG"
    where = f"{outcome.kind} {outcome.section} {outcome.fault}"
    return f"{state} {where}: {found}; quarantined: {quarantined}; the next session: {after}"


def table(found: Sequence[Outcome]) -> Iterator[str]:
    """Yield the lines of the table: totals, and what is missing."""
    marks = ("found", "named", "quarantined", "right")
    yield f"{'faults':30} {'number':>7} " + " ".join(f"{mark:>12}" for mark in marks)
    groups: dict[str, list[Outcome]] = {}
    for outcome in found:
        how = outcome.fault.partition(":")[0] if ":" in outcome.fault else "unsupported"
        groups.setdefault(f"{outcome.kind} {how} {outcome.section}".strip(), []).append(outcome)
    for kind in KINDS:
        groups[f"{kind}, all"] = [outcome for outcome in found if outcome.kind == kind]
    groups["all"] = [*found]
    for name, group in groups.items():
        if group:
            counts = (sum(bool(getattr(outcome, f"is_{mark}")) for outcome in group) for mark in marks)
            yield f"{name:30} {len(group):7} " + " ".join(f"{count:12}" for count in counts)
    told = [outcome.fault for outcome in found if outcome.is_told]
    if told:
        yield f"the next session fails with an error that names the call, which has no alternative: {', '.join(told)}"
    for outcome in found:
        if not outcome.is_complete:
            missing = ", ".join(mark for mark in marks if not getattr(outcome, f"is_{mark}"))
            yield f"not {missing}: {outcome.kind} {outcome.fault}: {outcome.why[:400]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--sections", nargs="+", help="sections of the selftest; default: all")
    parser.add_argument("--full", action="store_true", help="run the checks of the full selftest, not of the quick one")
    parser.add_argument("--share", default="1/1", metavar="I/N", help="inject only every N-th fault, from the I-th on")
    parser.add_argument("--only", default="*", help="inject only faults that match this pattern")
    parser.add_argument("--checks", default="*", help="run only checks whose names match this pattern")
    parser.add_argument("--kernels", type=int, default=0, help="inject at most this number of wrong kernels a section")
    parser.add_argument("--put-in", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--one-kind", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    signal.signal(signal.SIGALRM, hang)
    if given.put_in:
        return put_in(not given.full)
    with tempfile.TemporaryDirectory() as folder:
        if not given.one_kind:
            use_own_cache(Path(folder, "cache"))
        if "library" in given.kinds and len(given.kinds) > 1:
            return in_processes(given)
        if given.kinds == ["library"]:
            sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "harness")]
            from c_programs import stand_ins as build

            os.environ["ORT_CUDA_PLUGIN_EMULATE_LIBRARIES"] = str(build(Path(folder)))
        os.environ["ORT_CUDA_PLUGIN_EMULATE_PROFILE"] = str(Path(folder, "launches"))
        os.environ["FAKE_CALLS"] = str(Path(folder, "calls"))
        found = []
        for outcome in outcomes(given):
            found.append(outcome)
            print(line(outcome), flush=True)
    return finish(given, found)


def use_own_cache(folder: Path) -> None:
    """Give this process a cache folder of its own, with the compiled kernels of the present one.

    The quarantine and the refusals are kept in the cache folder: those that the faults cause must not reach other
    processes, such as another share of the same campaign, and the campaign deletes them after each fault.
    """
    from ort_cuda_plugin.compiler.caches.cache_folder import CACHE_DIR_VARIABLE, cache_folder

    folder.mkdir(mode=0o700)
    for kernel in cache_folder().glob("*.kernel"):
        shutil.copy2(kernel, folder)
    os.environ[CACHE_DIR_VARIABLE] = str(folder)


def hang(number: int, frame: Any) -> None:
    raise TimeoutError


def in_processes(given: argparse.Namespace) -> int:
    """Run each kind of faults in processes of its own: stand-in libraries must be offered when the process starts."""
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in given.kinds:
            file = Path(folder, kind)
            command = [sys.executable, __file__, "--one-kind", "--kinds", kind, "--share", given.share]
            command += ["--only", given.only, "--checks", given.checks, "--kernels", str(given.kernels)]
            command += ["--json", str(file), *(["--full"] if given.full else [])]
            command += ["--sections", *given.sections] if given.sections else []
            subprocess.run(command, check=False)
            found += [Outcome(**each) for each in json.loads(file.read_text())]
    return finish(given, found)


def finish(given: argparse.Namespace, found: Sequence[Outcome]) -> int:
    if given.json:
        given.json.write_text(json.dumps([asdict(outcome) for outcome in found], indent=1))
    print(*table(found), sep="\n")
    return int(not all(outcome.is_complete for outcome in found))


if __name__ == "__main__":
    sys.exit(main())
