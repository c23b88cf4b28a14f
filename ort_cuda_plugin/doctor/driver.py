"""Findings about the driver and its devices, with advice for bare machines, containers, WSL and aarch64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..ep.device.devices import DeviceInfo
from .findings import Finding, Machine, note, ok, problem, warning

_SUBJECT = "CUDA driver"
_NEWER_GPU = "use an Ampere GPU or a newer one, or the emulated device (--emulate)"


def driver_findings(machine: Machine, devices: Sequence[DeviceInfo], why: str) -> Iterator[Finding]:
    """Examine the devices. ``devices`` and ``why`` are those of `ep.device.devices.cuda_devices`."""
    if devices:
        yield ok(_SUBJECT, f"CUDA {devices[0].driver_version}, {len(devices)} devices")
        for device in devices:
            yield _device(device)
        if why:
            yield warning(_SUBJECT, f"not used: {why}", _NEWER_GPU)
    else:
        yield _missing(machine, why)
    yield from _hidden(machine)
    if devices and machine.is_container and not machine.has("sys/class/drm/card0"):
        yield ok(
            "devices in the container",
            "ONNX Runtime itself finds no GPU here (/sys/class/drm is empty); the plugin reports the driver's "
            "GPUs to it",
        )


def _device(device: DeviceInfo) -> Finding:
    major, minor = device.compute_capability
    subject = f"device {device.ordinal}"
    return ok(subject, f"{device.name}, compute capability {major}.{minor}, {device.memory_bytes / 2**30:.1f} GiB")


def _missing(machine: Machine, why: str) -> Finding:
    """Explain why no GPU is offered, and what the user can do on this machine."""
    has_module = bool(machine.text("proc/driver/nvidia/version"))
    has_nodes = machine.has("dev/nvidiactl")
    if "compute capability" in why:  # the driver works, and all GPUs are too old
        return problem(_SUBJECT, why, _NEWER_GPU)
    if machine.has("dev/dxg"):
        folder = "/usr/lib/wsl/lib"
        return problem(
            _SUBJECT,
            f"{why}; this is WSL",
            f"add {folder} to LD_LIBRARY_PATH: the folder has the library of the Windows driver",
            f'export LD_LIBRARY_PATH="{folder}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"',
        )
    if machine.is_container and (has_module or has_nodes):
        given = machine.environment.get("NVIDIA_DRIVER_CAPABILITIES", "")
        capabilities = given.split(",")
        if given and "all" not in capabilities and "compute" not in capabilities:
            return problem(
                _SUBJECT,
                f"{why}; NVIDIA_DRIVER_CAPABILITIES={given}",
                "start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility",
            )
        return problem(
            _SUBJECT,
            f"{why}; the host has a driver, but the container has no access to it",
            "start it with `docker run --gpus all`, or `--device nvidia.com/gpu=all` with CDI; this needs the NVIDIA"
            " Container Toolkit. In Kubernetes ask for the resource nvidia.com/gpu",
        )
    if has_module or has_nodes:
        return problem(
            _SUBJECT,
            why,
            "the machine has the driver's kernel module or device files: install the driver's libraries of the same"
            " version (package libcuda1)",
        )
    return note(
        _SUBJECT,
        why,
        "with a GPU: install a driver of R580 or newer. Without one: --emulate, or"
        " ORT_CUDA_PLUGIN_EMULATE=1" + (". In a container: docker run --gpus all" if machine.is_container else ""),
    )


def _hidden(machine: Machine) -> Iterator[Finding]:
    for variable, empty in (("CUDA_VISIBLE_DEVICES", ("", "-1", "NoDevFiles")), ("NVIDIA_VISIBLE_DEVICES", ("void",))):
        if machine.environment.get(variable) in empty:
            text = f"{variable}={machine.environment[variable]!r} hides all GPUs"
            yield warning(variable, text, f"unset {variable}, or name devices in it", f"unset {variable}")


def machine_findings(machine: Machine) -> Iterator[Finding]:
    """Report the architecture, and known restrictions of boards."""
    if machine.architecture == "x86_64":
        yield ok("architecture", "x86_64")
        return
    if machine.architecture != "aarch64":
        yield problem("architecture", machine.architecture, "use x86_64 or aarch64")
        return
    board = machine.text("proc/device-tree/model")
    if "Jetson" in board or machine.has("etc/nv_tegra_release"):
        release = machine.text("etc/nv_tegra_release").split("\n")[0]
        yield note(
            "architecture",
            f"aarch64, {board or 'Jetson'}{f', {release}' if release else ''}",
            "the driver is part of JetPack: CUDA 13 needs JetPack 7. Host and device share one memory, so limit the"
            " plugin's memory with the option arena.max_mem",
        )
    else:
        yield note(
            "architecture",
            f"aarch64{f', {board}' if board else ''}",
            "use the wheel onnxruntime: PyPI has no onnxruntime-gpu for aarch64, and the plugin does not need it",
        )
