"""Devices that the plugin offers: CUDA GPUs, and emulated devices on request."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ...abi.core import PluginError, check, core, ffi, lib, new_error
from ...abi.errors import Error
from ...program.lowering.context import DeviceProperties

#: Environment variable. With "1", "true", "yes" or "on", `register` without the argument ``emulate`` offers emulated
#: devices too.
EMULATE_VARIABLE = "ORT_CUDA_PLUGIN_EMULATE"

#: Environment variable: "sm_90", or "sm_90:114" with a number of multiprocessors. The emulated devices run the kernels
#: of that GPU.
LOWERING_VARIABLE = "ORT_CUDA_PLUGIN_EMULATE_LOWERING"
PTX_SUFFIX = ":ptx"
"""Suffix of the value of `LOWERING_VARIABLE` with which emulated devices execute the PTX of the GPU's kernels."""

#: Maximum number of devices of one kind in C's tables (``OCP_MAX_DEVICES``).
_MOST_DEVICES = 64


class DriverError(Error, RuntimeError):
    """A call of the CUDA driver (or of the emulator) failed."""

    ort_code = 6  # ORT_RUNTIME_EXCEPTION


METADATA_KEYS = frozenset(
    [
        "compute_capability",
        "cuda_device_id",
        "driver_version",
        "emulated",
        "max_shared_bytes",
        "memory_bytes",
        "multiprocessors",
        "name",
        "pci_bus_id",
    ]
)
"""Metadata keys that `DeviceInfo.from_metadata` reads."""


@dataclass(frozen=True)
class DeviceInfo:
    """One device.

    Attributes:
        ordinal: the CUDA ordinal; emulated devices are counted on their own, from 0.
        compute_capability: (major, minor).
        memory_bytes: total memory.
        driver_version: CUDA version of the driver, as "13.0".
        pci_bus_id: as "0000:65:00.0"; "" for emulated devices.
        multiprocessors: streaming multiprocessors, or workers of the emulator.
        max_shared_bytes: the most shared memory that a block can opt in to.

    Examples:
        >>> devices = ort_cuda_plugin.register(emulate=True)
        >>> ort_cuda_plugin.devices()[-1].compute_capability
        (9, 0)
    """

    ordinal: int
    emulated: bool
    name: str
    compute_capability: tuple[int, int]
    memory_bytes: int
    driver_version: str
    pci_bus_id: str
    multiprocessors: int
    max_shared_bytes: int

    def metadata(self) -> dict[str, str]:
        """Return the contents of ``OrtEpDevice.ep_metadata``. Keys that begin with ``cuda_`` are those of ONNX
        Runtime's own CUDA plugin.
        """
        major, minor = self.driver_version.split(".")
        info = ffi.new("ocp_device_info *")
        info.emulated, info.ordinal, info.memory_bytes = self.emulated, self.ordinal, self.memory_bytes
        info.name, info.pci_bus_id = self.name.encode(errors="replace")[:255], self.pci_bus_id.encode()
        info.cc_major, info.cc_minor = self.compute_capability
        info.driver_version = 1000 * int(major) + 10 * int(minor)
        info.multiprocessors, info.max_shared_bytes = self.multiprocessors, self.max_shared_bytes
        return _metadata(info)

    @staticmethod
    def from_metadata(metadata: dict[str, str]) -> DeviceInfo:
        """Return the device that ``ep_metadata`` describes."""
        major, _, minor = metadata["compute_capability"].partition(".")
        return DeviceInfo(
            ordinal=int(metadata["cuda_device_id"]),
            emulated=metadata["emulated"] == "1",
            name=metadata["name"],
            compute_capability=(int(major), int(minor)),
            memory_bytes=int(metadata["memory_bytes"]),
            driver_version=metadata["driver_version"],
            pci_bus_id=metadata["pci_bus_id"],
            multiprocessors=int(metadata["multiprocessors"]),
            max_shared_bytes=int(metadata["max_shared_bytes"]),
        )

    @staticmethod
    def from_c(info: Any) -> DeviceInfo:
        """Return the device that a ``const ocp_device_info *`` describes."""
        return DeviceInfo.from_metadata(_metadata(info))


def _metadata(info: Any) -> dict[str, str]:
    entries = ffi.new("ocp_device_metadata[]", lib.OCP_DEVICE_METADATA)
    core().describe_device(info, entries)
    return {ffi.string(entry.key).decode(): ffi.string(entry.value).decode(errors="replace") for entry in entries}


def emulation_requested() -> bool:
    """Return whether ``ORT_CUDA_PLUGIN_EMULATE`` asks for emulated devices.

    Raises:
        ValueError: the variable has another value than 1 or 0 (or a synonym such as "true").
    """
    error = new_error()
    requested = core().emulation_requested(error)
    if error.code:
        raise ValueError(ffi.string(error.text).decode(errors="replace"))
    return bool(requested)


def emulated_properties() -> DeviceProperties:
    """Return the properties for which kernels of emulated devices are generated: those of the emulated device, or of
    the GPU that ``ORT_CUDA_PLUGIN_EMULATE_LOWERING`` names.

    Raises: ValueError: the variable does not name a GPU.
    """
    value = os.environ.get(LOWERING_VARIABLE, "").strip()
    try:
        return replace(lowering_gpu(value)[0], runs_cubins=False, tf32=False) if value else DeviceProperties()
    except ValueError as error:
        raise ValueError(f"{LOWERING_VARIABLE}: {error}") from None


def executed_ptx() -> tuple[int, int]:
    """Return the compute capability whose PTX emulated devices execute, or (0, 0) for LLVM IR."""
    value = os.environ.get(LOWERING_VARIABLE, "").strip()
    gpu, ptx = lowering_gpu(value) if value else (DeviceProperties(), False)
    return gpu.compute_capability if ptx else (0, 0)


def lowering_gpu(text: str) -> tuple[DeviceProperties, bool]:
    """Return the GPU that ``text`` names, such as "sm_90" or "sm_90:ptx", and whether its PTX is executed.

    Raises: ValueError: the text does not name a GPU.
    """
    return gpu_properties(text.removesuffix(PTX_SUFFIX)), text.endswith(PTX_SUFFIX)


def gpu_properties(text: str) -> DeviceProperties:
    """Return the properties of the GPU that ``text`` names, such as "sm_90" or "sm_90:132", with no vendor library.

    Raises: ValueError: the text does not name a GPU.
    """
    match = re.fullmatch(r"sm_(\d{1,2})(\d)(?::([1-9]\d{0,3}))?", text)
    if match is None:
        raise ValueError(
            "expected a GPU such as sm_90, sm_90:132 with a number of multiprocessors, or sm_90:ptx to execute PTX, "
            f"got {text!r}"
        )
    return DeviceProperties.gpu((int(match[1]), int(match[2])), int(match[3] or 0))


def cuda_devices() -> tuple[list[DeviceInfo], str]:
    """Return the GPUs, and the reason if there are none, or if some are not used; else ""."""
    try:
        devices, refused = _list(emulated=False)
    except PluginError as error:
        return [], str(error)
    return devices, refused if devices else "the CUDA driver reports no device"


def emulated_devices() -> list[DeviceInfo]:
    """Return the emulated devices as configured (``ORT_CUDA_PLUGIN_EMULATE_DEVICES``, default 1).

    Raises:
        PluginError: the configuration has an error.
    """
    return _list(emulated=True)[0]


def _list(*, emulated: bool) -> tuple[list[DeviceInfo], str]:
    """Return the devices, and text that names the GPUs that are too old."""
    infos, count, error = ffi.new("ocp_device_info[]", _MOST_DEVICES), ffi.new("uint32_t *"), new_error()
    core().list_devices(emulated, infos, len(infos), count, error)
    check(error)
    devices = [DeviceInfo.from_c(infos + index) for index in range(min(count[0], len(infos)))]
    return devices, ffi.string(error.text).decode(errors="replace")


def no_such_device(ordinal: object, known: Iterable[DeviceInfo]) -> str:
    """Return a message that there is no device with this ordinal, with the devices that there are."""
    names = ", ".join(f"{info.ordinal} ({info.name})" for info in known)
    return f"there is no device {ordinal}. Choose one of {names}"


def open_device(info: DeviceInfo) -> Any:
    """Open a device and return its ``ocp_device *``.

    Raises:
        PluginError: the device does not exist or cannot be opened.
    """
    error = ffi.new("ocp_error *")
    device = core().device_open(info.emulated, info.ordinal, error)
    if device == ffi.NULL:
        raise PluginError(ffi.string(error.text).decode(errors="replace"), error.code)
    return device
