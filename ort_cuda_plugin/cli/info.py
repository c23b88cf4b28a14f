"""Show versions, devices, the libraries that were found, and the kernel cache."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
from typing import Any

from rich.table import Table

import ort_cuda_plugin
from ort_cuda_plugin.cli.common import output_console
from ort_cuda_plugin.cli.exit_codes import ExitCode

PACKAGES = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnx",
    "numpy",
    "cffi",
    "numba",
    "numba-cuda",
    "llvmlite",
    "cuda-core",
    "cuda-bindings",
    "nvidia-nvvm",
    "nvidia-nvjitlink",
    "nvidia-cuda-nvrtc",
    "nvidia-cublas",
    "nvidia-cudnn-cu13",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def execute(arguments: argparse.Namespace) -> int:
    report = collect()
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        print_report(report)
    return ExitCode.UNAVAILABLE if report["problem"] else ExitCode.OK


def collect() -> dict[str, Any]:
    """Everything as plain data. ``problem`` is why the plugin cannot be registered, or empty."""
    from ort_cuda_plugin.compiler.cache_folder import cache_folder, open_folder
    from ort_cuda_plugin.compiler.trusted_files import Untrusted

    folder, entries, cache_problem = cache_folder(), [], ""
    try:
        entries = [status.st_size for _, status in open_folder(folder).files()]
    except Untrusted as problem:
        cache_problem = str(problem)
    report: dict[str, Any] = {
        "ort_cuda_plugin": ort_cuda_plugin.__version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "devices": [],
        "why_no_cuda_device": "",
        "libraries": {},
        "cache": {
            "folder": str(folder),
            "entries": len(entries),
            "bytes": sum(entries),
            "problem": cache_problem,
        },
        "problem": "",
    }
    try:
        from ort_cuda_plugin.ep.devices import cuda_devices

        found, why = cuda_devices()
        report["why_no_cuda_device"] = why
        ort_cuda_plugin.register(emulate=True)
        emulated = [device for device in ort_cuda_plugin.devices() if device.emulated]
        report["devices"] = [device.metadata() for device in (*found, *emulated)]
        report["library"] = ort_cuda_plugin.get_library_path()
        from ort_cuda_plugin.ep.libraries import library_places

        report["libraries"] = {name: place.path for name, place in library_places().items()}
    except Exception as error:  # ONNX Runtime has types of its own
        report["problem"] = str(error)
    return report


def print_report(report: dict[str, Any]) -> None:
    console = output_console()
    versions = Table("package", "version", title="versions", title_justify="left")
    versions.add_row("ort-cuda-plugin", report["ort_cuda_plugin"])
    versions.add_row("python", report["python"])
    for name, version in report["packages"].items():
        versions.add_row(name, version or "-")
    console.print(versions)
    devices = Table("device", "id", "compute capability", "memory", "driver", title="devices", title_justify="left")
    for device in report["devices"]:
        kind = " (emulated)" if device["emulated"] == "1" else ""
        memory = f"{int(device['memory_bytes']) / 2**30:.1f} GiB"
        devices.add_row(
            device["name"] + kind,
            device["cuda_device_id"],
            device["compute_capability"],
            memory,
            device["driver_version"],
        )
    console.print(devices)
    if report["why_no_cuda_device"]:
        console.print(f"no CUDA device: {report['why_no_cuda_device']}", markup=False)
    for name, place in report["libraries"].items():
        missing = 'not found, kernels of this package take its place; `pip install "ort-cuda-plugin[libs]"` brings it'
        console.print(f"{name}: {place or missing}", markup=False)
    cache = report["cache"]
    problem = f" (not used: {cache['problem']})" if cache["problem"] else ""
    console.print(
        f"kernel cache: {cache['folder']}, {cache['entries']} files, {cache['bytes'] / 2**20:.1f} MiB{problem}",
        markup=False,
    )
    if report["problem"]:
        console.print(f"the plugin cannot be registered: {report['problem']}", markup=False)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
