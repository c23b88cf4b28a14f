"""The factory: which devices the execution provider offers to ONNX Runtime."""

from __future__ import annotations

from typing import Any

from ..abi import host
from ..abi.core import check, core, ffi, lib, new_error
from ..context.compatibility import Fit, fit
from .context_session import allows_host_code
from .devices import DeviceInfo, cuda_devices, emulated_devices, emulation_requested, pci_bus_id_of_card
from .identity import VIRTUAL_SUFFIX, Identity, identity_of_registration
from .open_device import target_of

NVIDIA_VENDOR_ID = 0x10DE

#: The kinds of memory for which ORT may ask for an allocator: OCP_INFO_... of ``csrc_shim/ort/allocator.h``.
DEVICE_MEMORY, PINNED_MEMORY, INITIALIZER_MEMORY = range(3)

#: What `register(emulate=False)` sets while it registers: it goes before the environment.
emulate_override: bool | None = None

#: What `register(as_=...)` sets while it registers: it goes before the registration name and the environment.
identity_override: Identity | None = None


class Factory:
    """One registration of the library.

    Attributes:
        registered_name: the name that it was registered under.
        identity: the name of the execution provider.
        devices: what it offers, in order; filled by `supported_devices`.
        why_no_cuda: why it offers no GPU; "" where it does, or where none was looked for.

    Raises:
        ValueError: the host has a provider of this name.
    """

    def __init__(self, registered_name: str) -> None:
        self.registered_name = registered_name
        self.identity = identity_of_registration(registered_name) if identity_override is None else identity_override
        _refuse_to_replace(self.identity)
        self.devices: list[DeviceInfo] = []
        self.why_no_cuda = ""
        self._owned_hardware: list[Any] = []
        self._offered: dict[Any, DeviceInfo] = {}

    def close(self) -> None:
        """Releases the hardware devices that ORT did not know of; ORT has dropped its OrtEpDevices before."""
        for device in self._owned_hardware:
            host.ep_api().ReleaseHardwareDevice(device)
        self._owned_hardware.clear()
        self._offered.clear()

    def find_devices(self) -> list[DeviceInfo]:
        """GPUs first, then emulated devices; each only where this registration is to offer it."""
        if self.registered_name.endswith(VIRTUAL_SUFFIX):
            return emulated_devices()
        devices, self.why_no_cuda = cuda_devices()
        emulate = emulation_requested() if emulate_override is None else emulate_override
        return devices + emulated_devices() if emulate else devices

    def supported_devices(self, ort_factory: Any, hardware: list[Any], out: Any, max_out: int) -> int:
        """Fills ``out`` (``OrtEpDevice **``, ``max_out`` long) and returns how many devices there are."""
        self.devices = self.find_devices()
        if len(self.devices) > max_out:
            host.log("WARNING", f"{len(self.devices)} devices, of which ONNX Runtime takes the first {max_out}")
            del self.devices[max_out:]
        if not self.devices:
            host.log("WARNING", f"no CUDA device: {self.why_no_cuda}; the emulated one is offered on request only")
        matched = _match(self.devices, hardware)
        for index, (info, device) in enumerate(zip(self.devices, matched, strict=True)):
            hardware_device = device or self._create_hardware(info)
            self._offered[hardware_device] = info
            out[index] = self._ep_device(ort_factory, info, hardware_device)
        return len(self.devices)

    def fit_of(self, hardware: list[Any], info: str) -> int:
        """How well a compiled model fits devices (``OrtCompiledModelCompatibility``): the worst of them counts."""
        fits = [
            fit(info, target_of(self._offered[device]), allows_host_code(), self._offered[device].driver_version)
            for device in hardware
            if device in self._offered
        ]
        return max(fits, default=Fit.NOT_APPLICABLE)

    def describe_incompatibility(self, hardware: Any, details: Any) -> None:
        """Says in ``details`` why this registration does not offer a hardware device; nothing where it does."""
        reason, notes = self._incompatibility(hardware)
        if reason:
            text = notes.encode(errors="replace")
            host.check_status(host.ep_api().DeviceEpIncompatibilityDetails_SetDetails(details, reason, 0, text))

    def _incompatibility(self, hardware: Any) -> tuple[int, str]:
        api = host.api()
        if hardware in self._owned_hardware:
            return lib.OrtDeviceEpIncompatibility_NONE, ""
        if api.HardwareDevice_Type(hardware) != lib.OrtHardwareDeviceType_GPU:
            return lib.OrtDeviceEpIncompatibility_DEVICE_INCOMPATIBLE, "it is not a GPU"
        if api.HardwareDevice_VendorId(hardware) != NVIDIA_VENDOR_ID:
            return lib.OrtDeviceEpIncompatibility_DEVICE_INCOMPATIBLE, "it is not a GPU of NVIDIA"
        if any(match is not None for match in _match(self.devices, [hardware])):
            return lib.OrtDeviceEpIncompatibility_NONE, ""
        devices, why = cuda_devices()
        if not devices:
            return lib.OrtDeviceEpIncompatibility_DRIVER_INCOMPATIBLE, why
        if any(match is not None for match in _match(devices, [hardware])):
            return lib.OrtDeviceEpIncompatibility_NONE, ""
        return lib.OrtDeviceEpIncompatibility_DRIVER_INCOMPATIBLE, "the CUDA driver does not show it to this process"

    def _create_hardware(self, info: DeviceInfo) -> Any:
        metadata = {"name": info.name}
        if info.pci_bus_id:
            metadata["pci_bus_id"] = info.pci_bus_id
        if info.emulated:
            metadata["emulated"] = "1"
        created = ffi.new("OrtHardwareDevice **")
        with host.KeyValuePairs(metadata) as pairs:
            host.check_status(
                host.ep_api().CreateHardwareDevice(
                    lib.OrtHardwareDeviceType_GPU, NVIDIA_VENDOR_ID, info.ordinal, b"NVIDIA", pairs, created
                )
            )
        self._owned_hardware.append(created[0])
        return created[0]

    def _ep_device(self, ort_factory: Any, info: DeviceInfo, hardware: Any) -> Any:
        api = host.ep_api()
        created = ffi.new("OrtEpDevice **")
        # Without device_id here ORT would compare a session's device_id with the PCI model.
        options = {"device_id": str(info.ordinal)}
        with host.KeyValuePairs(info.metadata()) as metadata, host.KeyValuePairs(options) as ep_options:
            host.check_status(api.CreateEpDevice(ort_factory, hardware, metadata, ep_options, created))
        try:
            for kind in (DEVICE_MEMORY, PINNED_MEMORY, INITIALIZER_MEMORY):
                host.check_status(api.EpDevice_AddAllocatorInfo(created[0], memory_info(info, kind)))
        except BaseException:
            api.ReleaseEpDevice(created[0])
            raise
        return created[0]


def _refuse_to_replace(identity: Identity) -> None:
    """Two providers of one name would leave open which of them a session gets."""
    if identity is Identity.OWN:
        return
    names, count = ffi.new("char ***"), ffi.new("int *")
    host.check_status(host.api().GetAvailableProviders(names, count))
    try:
        built_in = [host.text(names[0][i]) for i in range(count[0])]
    finally:
        host.check_status(host.api().ReleaseAvailableProviders(names[0], count[0]))
    if identity.ep_name in built_in:
        raise ValueError(
            f"this ONNX Runtime has a {identity.ep_name} of its own: register the plugin under its own name, "
            f"{Identity.OWN.ep_name}, or use a wheel without CUDA (onnxruntime)"
        )


def memory_info(info: DeviceInfo, kind: int = DEVICE_MEMORY) -> Any:
    """``const OrtMemoryInfo *`` of one kind of a device's memory; lives as long as the process."""
    out, error = ffi.new("const OrtMemoryInfo **"), new_error()
    core().memory_info(info.emulated, info.ordinal, kind, out, error)
    check(error)
    return out[0]


def _match(devices: list[DeviceInfo], hardware: list[Any]) -> list[Any]:
    """For each device ORT's hardware device, by PCI bus id, or None where ORT found none."""
    api = host.api()
    by_bus_id: dict[str, Any] = {}
    for device in hardware:
        if api.HardwareDevice_Type(device) != lib.OrtHardwareDeviceType_GPU:
            continue
        metadata = host.key_value_pairs(api.HardwareDevice_Metadata(device))
        bus_id = metadata.get("pci_bus_id", "").lower() or pci_bus_id_of_card(metadata.get("card_idx", ""))
        if bus_id:
            by_bus_id[bus_id] = device
    return [None if info.emulated else by_bus_id.get(info.pci_bus_id) for info in devices]
