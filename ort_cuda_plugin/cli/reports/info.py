"""Show versions, devices, the libraries that were found, and the kernel cache."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
from typing import Any

import ort_cuda_plugin
from ort_cuda_plugin.abi.message_texts import printable
from ort_cuda_plugin.cli.exit_codes import ExitCode
from ort_cuda_plugin.cli.plain_text import aligned

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
    "nvidia-cuda-runtime",
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
    """Collect the report as plain data. ``problem`` is the reason why the plugin cannot be registered, or ""."""
    from ort_cuda_plugin.compiler.caches.cache_folder import cache_folder, open_folder
    from ort_cuda_plugin.compiler.caches.trusted_files import Untrusted

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
        "why_not_used": "",
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
        from ort_cuda_plugin.ep.device.devices import cuda_devices

        found, why = cuda_devices()
        report["why_not_used" if found else "why_no_cuda_device"] = why
        ort_cuda_plugin.register(emulate=True)
        emulated = [device for device in ort_cuda_plugin.devices() if device.emulated]
        report["devices"] = [device.metadata() for device in (*found, *emulated)]
        report["library"] = ort_cuda_plugin.get_library_path()
        from ort_cuda_plugin.ep.device.libraries import library_places

        report["libraries"] = {name: place.path for name, place in library_places().items()}
    except Exception as error:  # ONNX Runtime raises errors of its own types
        report["problem"] = str(error)
    return report


def print_report(report: dict[str, Any]) -> None:
    versions = {"ort-cuda-plugin": report["ort_cuda_plugin"], "python": report["python"], **report["packages"]}
    print(aligned("versions", [(name, version or "-") for name, version in versions.items()]))
    devices = [("name", "id", "compute capability", "memory", "driver")]
    for device in report["devices"]:
        kind = " (emulated)" if device["emulated"] == "1" else ""
        memory = f"{int(device['memory_bytes']) / 2**30:.1f} GiB"
        devices.append(
            (
                device["name"] + kind,
                device["cuda_device_id"],
                device["compute_capability"],
                memory,
                device["driver_version"],
            )
        )
    print(aligned("devices", devices))
    if report["why_no_cuda_device"]:
        print(printable(f"no CUDA device: {report['why_no_cuda_device']}"))
    if report["why_not_used"]:
        print(printable(f"not used: {report['why_not_used']}"))
    for name, place in report["libraries"].items():
        missing = 'not found, the plugin uses its own kernels; `pip install "ort-cuda-plugin[libs]"` installs it'
        print(printable(f"{name}: {place or missing}"))
    cache = report["cache"]
    problem = f" (not used: {cache['problem']})" if cache["problem"] else ""
    size = f"{cache['entries']} files, {cache['bytes'] / 2**20:.1f} MiB"
    print(printable(f"kernel cache: {cache['folder']}, {size}{problem}"))
    if report["problem"]:
        print(printable(f"the plugin cannot be registered: {report['problem']}"))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
