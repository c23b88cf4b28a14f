"""The devices that the plugin can offer: CUDA GPUs from the driver, and emulated devices where they were asked for."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..abi.core import PluginError, core, driver_error_text, ffi, lib
from ..program.lowering import DeviceProperties

#: "1", "true", "yes", "on": a plain registration offers the emulated devices as well.
EMULATE_VARIABLE = "ORT_CUDA_PLUGIN_EMULATE"

#: "sm_90", or "sm_90:114" with a number of multiprocessors: the emulated devices run what is lowered for that GPU.
LOWERING_VARIABLE = "ORT_CUDA_PLUGIN_EMULATE_LOWERING"

#: That of CUDA 13.0, whose toolkit makes the kernels: an earlier driver loads none of them.
_LEAST_DRIVER_VERSION = 13000

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"", "0", "false", "no", "off"}


class DriverError(RuntimeError):
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
"""What `DeviceInfo.from_metadata` reads."""


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
        """What ``OrtEpDevice.ep_metadata`` holds; keys with ``cuda_`` are those of ONNX Runtime's own plugin."""
        major, minor = self.compute_capability
        return {
            "cuda_device_id": str(self.ordinal),
            "name": self.name,
            "compute_capability": f"{major}.{minor}",
            "cuda_compute_capability": f"{major}.{minor}",
            "cuda_device_name": self.name,
            "memory_bytes": str(self.memory_bytes),
            "driver_version": self.driver_version,
            "pci_bus_id": self.pci_bus_id,
            "emulated": "1" if self.emulated else "0",
            "multiprocessors": str(self.multiprocessors),
            "max_shared_bytes": str(self.max_shared_bytes),
            # ONNX Runtime's names of what compiled models can leave out: any initializer.
            "weightless_support": "all",
            "weightless_supported_modes": "all",
        }

    @staticmethod
    def from_metadata(metadata: dict[str, str]) -> DeviceInfo:
        """The device that ``ep_metadata`` describes."""
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


def emulation_requested() -> bool:
    """Whether the environment asks for emulated devices.

    Raises:
        ValueError: the variable holds neither a yes nor a no.
    """
    value = os.environ.get(EMULATE_VARIABLE, "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ValueError(f"{EMULATE_VARIABLE}={value!r}: use 1 or 0")


def emulated_properties() -> DeviceProperties:
    """What lowering takes the emulated devices for: what they are, or the GPU that the environment names.

    Raises:
        ValueError: the variable names no GPU.
    """
    value = os.environ.get(LOWERING_VARIABLE, "").strip()
    try:
        return replace(gpu_properties(value), runs_cubins=False, tf32=False) if value else DeviceProperties()
    except ValueError as error:
        raise ValueError(f"{LOWERING_VARIABLE}: {error}") from None


def gpu_properties(text: str) -> DeviceProperties:
    """The GPU, without NVIDIA's libraries, that ``text`` names as "sm_90" or "sm_90:132".

    Raises:
        ValueError: it names none.
    """
    match = re.fullmatch(r"sm_(\d{1,2})(\d)(?::([1-9]\d{0,3}))?", text)
    if match is None:
        raise ValueError(f"{text!r} is no GPU: use sm_90, or sm_90:132 with a number of multiprocessors")
    return DeviceProperties.gpu((int(match[1]), int(match[2])), int(match[3] or 0))


def cuda_devices() -> tuple[list[DeviceInfo], str]:
    """The GPUs, and why there are none ("" where there are)."""
    why = ffi.new("const char **")
    driver = core().driver_cuda(why)
    if driver == ffi.NULL:
        return [], ffi.string(why[0]).decode(errors="replace") if why[0] != ffi.NULL else "no CUDA driver"
    try:
        devices = _enumerate(driver, emulated=False)
    except DriverError as error:
        return [], str(error)
    return devices, "" if devices else "the CUDA driver reports no device"


def emulated_devices() -> list[DeviceInfo]:
    """The emulated devices as configured (``ORT_CUDA_PLUGIN_EMULATE_DEVICES``, default 1)."""
    return _enumerate(core().driver_emulator(), emulated=True)


def open_device(info: DeviceInfo) -> Any:
    """``ocp_device *`` of a device.

    Raises:
        PluginError: the device does not exist or cannot be opened.
    """
    error = ffi.new("ocp_error *")
    device = core().device_open(info.emulated, info.ordinal, error)
    if device == ffi.NULL:
        raise PluginError(ffi.string(error.text).decode(errors="replace"), error.code)
    return device


def _enumerate(driver: Any, *, emulated: bool) -> list[DeviceInfo]:
    def call(name: str, *arguments: Any) -> None:
        result = getattr(driver, name)(*arguments)
        if result != lib.CUDA_SUCCESS:
            raise DriverError(f"cu{name} failed: {driver_error_text(driver, result)}")

    def attribute(device: int, number: int) -> int:
        value = ffi.new("int *")
        call("DeviceGetAttribute", value, number, device)
        return int(value[0])

    def one(ordinal: int) -> DeviceInfo:
        device, name, memory = ffi.new("CUdevice *"), ffi.new("char[256]"), ffi.new("size_t *")
        bus_id = ffi.new("char[32]")
        call("DeviceGet", device, ordinal)
        call("DeviceGetName", name, len(name), device[0])
        call("DeviceTotalMem", memory, device[0])
        if not emulated:
            call("DeviceGetPCIBusId", bus_id, len(bus_id), device[0])
        return DeviceInfo(
            ordinal=ordinal,
            emulated=emulated,
            name=ffi.string(name).decode(errors="replace"),
            compute_capability=(
                attribute(device[0], lib.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                attribute(device[0], lib.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
            ),
            memory_bytes=int(memory[0]),
            driver_version=f"{version[0] // 1000}.{version[0] % 1000 // 10}",
            pci_bus_id=ffi.string(bus_id).decode().lower(),
            multiprocessors=attribute(device[0], lib.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
            max_shared_bytes=attribute(device[0], lib.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
        )

    version, count = ffi.new("int *"), ffi.new("int *")
    call("Init", 0)
    call("DriverGetVersion", version)
    if version[0] < _LEAST_DRIVER_VERSION:
        raise DriverError(
            f"the driver is for CUDA {version[0] // 1000}.{version[0] % 1000 // 10}; kernels and libraries are for "
            "CUDA 13, which needs R580 or newer"
        )
    call("DeviceGetCount", count)
    return [one(ordinal) for ordinal in range(count[0])]


def pci_bus_id_of_card(card_index: str, root: Path = Path("/sys/class/drm")) -> str:
    """The PCI bus id of /dev/dri/card<card_index>, which is all that ORT's metadata say of a GPU; "" if unknown."""
    try:
        return (root / f"card{card_index}" / "device").resolve(strict=True).name.lower()
    except OSError:
        return ""
