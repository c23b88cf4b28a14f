"""Collects a full report about a GPU, by one command and without a network, as a Markdown and a JSON file.

    python bench/gpu_report.py [--output docs/gpu/NAME] [--seconds 540] [--device cuda|emulated] [--sections NAME ...]

The sections are: the selftest; calibration; the machine; the tests that need a GPU; ONNX's backend tests on it;
compute-sanitizer on a model; times of kernels and models against their estimates (two thirds of the measurements fit
the performance model's constants, one third is held out); models compared with CUDAExecutionProvider, with and without
CUDA graphs; layers compared with PyTorch, if it is installed. Each section runs in a process of its own. If a section
fails, crashes or runs out of time, the report says so, and the next sections run. The report ends with a page about all
sections, which is also printed. With ``--device emulated`` it is a rehearsal: its times mean nothing.

The exit code is 1 if a section failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("onnxruntime-gpu", "onnxruntime", "numba", "numba-cuda", "cuda-bindings", "nvidia-cublas", "torch", "onnx")
CHECKS_VARIABLE = "GPU_REPORT_SELFTEST_SECTIONS"
"""Environment variable: names the sections of the selftest that a rehearsal runs; default: all sections."""
MOST_SECONDS, GRACE_SECONDS = 200.0, 20.0
"""Seconds: time limit of a section's commands, and the further time after which the section's process is killed."""
COMPARED = (
    "light_resnet50",
    "resnet50:float16",
    "mobilenet_v2:float16",
    "bert_base:float16",
    "whisper_tiny_encoder:float16",
    "llama_decode:float16",
)


@dataclass
class Section:
    """The result of a section: ``data`` for the JSON file, ``lines`` for the Markdown file, the reason of a failure,
    and the reason why the section could not run at all.
    """

    data: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    failure: str = ""
    left_out: str = ""


@dataclass
class Clock:
    """The remaining time of all sections."""

    end: float

    def left(self, most: float) -> float:
        return max(1.0, min(most, self.end - time.monotonic()))


def call(command: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Return the exit code (None if the time ran out) and the output of a command."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            timeout=seconds,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or b""
        return None, printed.decode(errors="replace") if isinstance(printed, bytes) else printed
    return done.returncode, done.stdout


def plugin(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ort_cuda_plugin", *arguments]


def checked(command: Sequence[str], seconds: float, good: Callable[[int], bool] = lambda code: code == 0) -> Section:
    """Return a section that passes if a command succeeds; shows its last lines."""
    code, printed = call(command, seconds)
    tail = printed.strip().splitlines()[-25:]
    section = Section({"command": list(command), "exit_code": code, "output": tail}, ["```", *tail, "```"])
    if code is None:
        section.failure = f"did not end within {seconds:.0f} s"
    elif not good(code):
        section.failure = f"exit code {code}{f': {tail[-1]}' if tail else ''}"
    return section


def selftest(device: str, clock: Clock) -> Section:
    """Check the kernels, library calls and driver features, and quarantine what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "selftest.json")
        names = os.environ.get(CHECKS_VARIABLE, "").split()
        chosen = ["--quick", *(["--sections", *names] if names else [])]
        section = checked(plugin("selftest", "--device", device, "--json", str(file), *chosen), clock.left(180))
        found = json.loads(file.read_text()) if file.exists() else None
    section.data["report"] = found
    if found and section.failure:
        wrong = [check for each in found["sections"] for check in each["checks"] if check["result"] == "FAIL"]
        first = f": {wrong[0]['name']}: {wrong[0]['reason']}" if wrong else ""
        section.failure = f"{found['counts']['FAIL']} of {sum(found['counts'].values())} checks failed{first}"
    return section


def calibration(device: str, clock: Clock) -> Section:
    """Measure the rates of the device."""
    if call(plugin("calibrate", "--help"), clock.left(30))[0] != 0:
        return Section(left_out="this version of the plugin has no command `calibrate`")
    return checked(plugin("calibrate", "--device", device), clock.left(120))


def machine(device: str, clock: Clock) -> Section:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "-"
    section = Section({"versions": versions, "python": platform.python_version(), "cores": os.cpu_count()})
    _, printed = call(plugin("info", "--json"), clock.left(60))
    with contextlib.suppress(ValueError):
        section.data["info"] = json.loads(printed[printed.find("{") :])
    if shutil.which("nvidia-smi"):
        query = "--query-gpu=name,driver_version,memory.total,clocks.max.sm,clocks.max.memory,power.limit"
        _, printed = call(["nvidia-smi", query, "--format=csv,noheader"], clock.left(30))
        section.data["gpu"] = printed.strip()
        section.lines.append(f"GPU (name, driver, memory, clocks, power): {printed.strip()}")
    elif device == "cuda":
        section.failure = "there is no nvidia-smi"
    section.lines.append(", ".join(f"{name} {version}" for name, version in versions.items() if version != "-"))
    return section


def gpu_tests(device: str, clock: Clock) -> Section:
    jobs = str(max(1, (os.cpu_count() or 2) // 2))
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-n", jobs, "-r", "fE", "tests"]
    section = checked(command, clock.left(150))
    if device == "cuda" and not section.failure and "passed" not in section.lines[-2]:
        section.failure = "every test was skipped"
    return section


def operators(device: str, clock: Clock) -> Section:
    patterns = [] if device == "cuda" else ["node/relu*"]
    jobs = str(os.cpu_count() or 2)
    return checked(plugin("conformance", *patterns, "--device", device, "--jobs", jobs), clock.left(150))


def sanitizer(device: str, clock: Clock) -> Section:
    found = shutil.which("compute-sanitizer")
    if found is None:
        return Section(left_out="there is no compute-sanitizer")
    run = plugin("run", "light_squeezenet", "--runs", "1", "--device", device)
    return checked([found, "--error-exitcode", "9", *run], clock.left(90))


def estimates(device: str, clock: Clock) -> Section:
    """Time a hundred kernels and three models, and compare with their estimates."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "measurements.json")
        small = [] if device == "cuda" else ["--runs", "1", "--largest", str(1 << 20), "--models"]
        script = str(Path(__file__).with_name("gpu_measurements.py"))
        section = checked([sys.executable, script, "--device", device, "--output", str(file), *small], clock.left(200))
        section.data["measurements"] = json.loads(file.read_text()) if file.exists() else None
    return section


def comparison(device: str, clock: Clock) -> Section:
    """Compare models with the other available providers."""
    models = COMPARED if device == "cuda" else ("light_squeezenet",)
    section, reports = Section(), []
    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "bench.json")
            batches = ["--batch", "1", "--batch", "16"] if device == "cuda" and ":" in model else []
            runs = ["--runs", "50" if device == "cuda" else "2"]
            bench = plugin("bench", model, "--device", device, "--no-creation", *runs, *batches, "--json", str(file))
            code, printed = call(bench, clock.left(60))
            if code != 0 or not file.exists():
                section.failure = f"{model}: {printed.strip().splitlines()[-1:]}"
            if file.exists():
                reports += json.loads(file.read_text())
    section.data["reports"] = reports
    section.lines += ["| model | batch | side | p50 ms | times the plugin's | error |", "|---|---|---|---|---|---|"]
    for report in reports:
        for side, found in report["sides"].items():
            figures = f"{found['p50']:.3f} | {found['ratio']:.2f} | {found['error']:.1e}"
            section.lines.append(f"| {report['model']} | {report['batch']} | {side} | {figures} |")
    return section


def pytorch(device: str, clock: Clock) -> Section:
    """Compare layers with PyTorch's, each as a model of one node."""
    if device != "cuda":
        return Section(left_out="PyTorch is measured on a GPU only")
    script = Path(__file__).with_name("pytorch_layers.py")
    return checked([sys.executable, str(script)], clock.left(60))


SECTIONS: dict[str, Callable[[str, Clock], Section]] = {
    "selftest": selftest,
    "calibration": calibration,
    "machine": machine,
    "gpu-tests": gpu_tests,
    "operators": operators,
    "sanitizer": sanitizer,
    "estimates": estimates,
    "comparison": comparison,
    "pytorch": pytorch,
}


def report(device: str, seconds: float, names: Sequence[str]) -> dict[str, Section]:
    clock, found = Clock(time.monotonic() + seconds), {}
    for name in names:
        begun = time.monotonic()
        found[name] = in_process(name, device, clock)
        found[name].data["seconds"] = round(time.monotonic() - begun, 1)
        state = found[name].failure or found[name].left_out or "done"
        print(f"{name}: {state} ({found[name].data['seconds']} s)", flush=True)
    return found


def in_process(name: str, device: str, clock: Clock) -> Section:
    """Run a section in a process of its own, which may crash or hang. Ends it, and its children, at the time limit."""
    context = multiprocessing.get_context("fork")  # nothing has started CUDA or threads here
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=send_section, args=(sending, name, device, clock))
    process.start()
    sending.close()
    limit = clock.left(MOST_SECONDS) + GRACE_SECONDS
    try:
        section = Section(failure=f"did not end within {limit:.0f} s")
        if receiving.poll(limit):
            section = receiving.recv()
    except EOFError:
        process.join()
        section = Section(failure=f"its process ended with exit code {process.exitcode}")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    return section


def send_section(sending: Any, name: str, device: str, clock: Clock) -> None:
    os.setpgrp()  # one process group with its children, so that all of them can be killed
    try:
        section = SECTIONS[name](device, clock)
    except Exception as error:
        section = Section(failure=f"{type(error).__name__}: {error}")
    sending.send(section)


# ---- the page ----


def page(found: dict[str, Section]) -> list[str]:
    """Return a one-page summary: the device, passed and failed sections, speeds, the accuracy of estimates."""
    passed = [name for name, section in found.items() if not (section.failure or section.left_out)]
    rows = [
        ("device", device_line(found)),
        ("libraries", libraries_line(found)),
        ("passed", ", ".join(passed) or "nothing"),
        ("selftest", selftest_line(found)),
        ("speed", speed_line(found)),
        ("estimates", estimates_line(found)),
    ]
    lines = ["## Summary", "", "| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows), ""]
    lines += list_of("Failed", [f"{name}: {short(each.failure)}" for name, each in found.items() if each.failure])
    lines += list_of("Left out", [f"{name}: {short(each.left_out)}" for name, each in found.items() if each.left_out])
    quarantined = (selftest_report(found) or {"quarantined": []})["quarantined"]
    lines += list_of("Quarantined", [f"{entry['what']}: {short(entry['reason'])}" for entry in quarantined])
    return lines


MOST_ENTRIES = 8
"""Maximum entries of a list on the summary page; the report has the others."""


def list_of(title: str, entries: Sequence[str]) -> Iterator[str]:
    if not entries:
        return
    yield from (f"**{title}:**", "", *(f"- {entry}" for entry in entries[:MOST_ENTRIES]))
    if len(entries) > MOST_ENTRIES:
        yield f"- and {len(entries) - MOST_ENTRIES} more"
    yield ""


def short(text: str) -> str:
    """Return text on one line. The middle of a long text is left out, because an error's cause is at its end."""
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:100]} ... {line[-200:]}"


def selftest_report(found: dict[str, Section]) -> dict[str, Any] | None:
    report: dict[str, Any] | None = found["selftest"].data.get("report") if "selftest" in found else None
    return report


def device_line(found: dict[str, Section]) -> str:
    if report := selftest_report(found):
        device = report["device"]
        return (
            f"{device['name']}, compute capability {device['compute_capability']}, {device['multiprocessors']} "
            f"multiprocessors, {device['memory_bytes'] / 2**30:.1f} GiB, driver for CUDA {device['driver']}"
        )
    machine = found["machine"].data if "machine" in found else {}
    if "gpu" in machine:
        return f"{machine['gpu']} (name, driver, memory, clocks, power); the plugin cannot use it"
    info = machine.get("info", {})
    names = [f"{one['name']}, compute capability {one['compute_capability']}" for one in info.get("devices", [])]
    return short("; ".join(names) or info.get("problem") or info.get("why_no_cuda_device") or "unknown")


def libraries_line(found: dict[str, Section]) -> str:
    report = selftest_report(found)
    libraries = report["device"]["libraries"] if report else {}
    versions = found["machine"].data.get("versions", {}) if "machine" in found else {}
    packages = [f"{name} {version}" for name, version in versions.items() if version != "-"]
    return ", ".join([*(f"{name} {version}" for name, version in libraries.items()), *packages]) or "unknown"


def selftest_line(found: dict[str, Section]) -> str:
    report = selftest_report(found)
    if report is None:
        return "no report"
    counts = ", ".join(f"{count} {name}" for name, count in report["counts"].items())
    return f"{counts} in {report['seconds']:.0f} s; {len(report['quarantined'])} quarantined"


def speed_line(found: dict[str, Section]) -> str:
    """Compare the times of CUDAExecutionProvider with those of the plugin."""
    reports = found["comparison"].data.get("reports", []) if "comparison" in found else []
    ratios = {
        f"{report['model']} (batch {report['batch']})": side["ratio"]
        for report in reports
        for name, side in report["sides"].items()
        if name.startswith("cuda")
    }
    if not ratios:
        return f"{len(reports)} models ran; none was compared with CUDAExecutionProvider"
    mean = math.exp(sum(math.log(ratio) for ratio in ratios.values()) / len(ratios))
    worst, best = min(ratios, key=lambda name: ratios[name]), max(ratios, key=lambda name: ratios[name])
    return (
        f"CUDAExecutionProvider takes {mean:.2f} times the plugin's time (geometric mean of {len(ratios)}); "
        f"from {ratios[worst]:.2f} for {worst} to {ratios[best]:.2f} for {best}"
    )


def estimates_line(found: dict[str, Section]) -> str:
    output = found["estimates"].data.get("output", []) if "estimates" in found else []
    errors = [match[0] for line in output if (match := re.search(r"\d+ measurements, .*", line))]
    return errors[-1] if errors else "not measured"


def markdown(device: str, found: dict[str, Section]) -> str:
    lines = ["# What a GPU does with this plugin", "", f"Written by `bench/gpu_report.py --device {device}`.", ""]
    if device == "emulated":
        lines += ["A rehearsal on the emulated device: its times mean nothing for a GPU.", ""]
    for name, section in found.items():
        lines += [f"## {name}", ""]
        lines += [f"**Failed:** {section.failure}", ""] if section.failure else []
        lines += [f"Left out: {section.left_out}.", ""] if section.left_out else []
        lines += [*section.lines, ""]
    return "\n".join([*lines, *page(found)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "gpu" / "report")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--device", choices=["cuda", "emulated"], default="cuda")
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    arguments = parser.parse_args()
    found = report(arguments.device, arguments.seconds, arguments.sections)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.with_suffix(".md").write_text(markdown(arguments.device, found))
    sections = {
        name: {"failure": section.failure, "left_out": section.left_out, **section.data}
        for name, section in found.items()
    }
    arguments.output.with_suffix(".json").write_text(json.dumps({"device": arguments.device, **sections}, indent=1))
    print(*page(found), sep="\n")
    return int(any(section.failure for section in found.values()))


if __name__ == "__main__":
    sys.exit(main())
