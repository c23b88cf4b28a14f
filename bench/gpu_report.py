"""Collects a full report about a GPU, by one command and without a network, as a Markdown and a JSON file.

    python bench/gpu_report.py [--output docs/gpu/NAME] [--seconds 540] [--device cuda|emulated] [--sections NAME ...]

The sections are: the machine; the tests that need a GPU; ONNX's backend tests on it; compute-sanitizer on a model;
kernels and models timed against their estimates, two thirds of which fit the constants of the performance model while
the last third is held out; models beside CUDAExecutionProvider, with and without CUDA graphs; layers beside PyTorch,
where it is installed. A section that fails, or runs out of time, says so and the next ones run. With
``--device emulated`` it is a rehearsal: its times mean nothing.

It exits with 1 where a section failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("onnxruntime-gpu", "onnxruntime", "numba", "numba-cuda", "cuda-bindings", "nvidia-cublas", "torch", "onnx")
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
    """The result of a section: ``data`` for the JSON file, ``lines`` for the Markdown file, and the reason of a
    failure.
    """

    data: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    failure: str = ""


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
        section.failure = f"no end within {seconds:.0f} s"
    elif not good(code):
        section.failure = f"exit code {code}"
    return section


def machine(device: str, clock: Clock) -> Section:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "-"
    section = Section({"versions": versions, "python": platform.python_version(), "cores": os.cpu_count()})
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
        return Section({}, [], "" if device == "emulated" else "there is no compute-sanitizer")
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
        return Section({}, ["PyTorch is measured on a GPU only."])
    script = Path(__file__).with_name("pytorch_layers.py")
    return checked([sys.executable, str(script)], clock.left(60))


SECTIONS: dict[str, Callable[[str, Clock], Section]] = {
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
        try:
            found[name] = SECTIONS[name](device, clock)
        except Exception as error:  # the next sections still run
            found[name] = Section(failure=f"{type(error).__name__}: {error}")
        found[name].data["seconds"] = round(time.monotonic() - begun, 1)
        print(f"{name}: {found[name].failure or 'done'} ({found[name].data['seconds']} s)", flush=True)
    return found


def markdown(device: str, found: dict[str, Section]) -> str:
    lines = ["# What a GPU does with this plugin", "", f"Written by `bench/gpu_report.py --device {device}`.", ""]
    if device == "emulated":
        lines += ["A rehearsal on the emulated device: its times mean nothing for a GPU.", ""]
    for name, section in found.items():
        lines += [f"## {name}", ""]
        lines += [f"**Failed:** {section.failure}", ""] if section.failure else []
        lines += [*section.lines, ""]
    return "\n".join(lines)


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
    sections = {name: {"failure": section.failure, **section.data} for name, section in found.items()}
    arguments.output.with_suffix(".json").write_text(json.dumps({"device": arguments.device, **sections}, indent=1))
    return int(any(section.failure for section in found.values()))


if __name__ == "__main__":
    sys.exit(main())
