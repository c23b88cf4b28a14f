"""Findings about the calibration of each GPU."""

from __future__ import annotations

from collections.abc import Iterator

from ..compiler.caches.calibration_cache import calibrated_devices, stored_calibration
from ..ep.device.devices import DeviceInfo
from ..ep.device.open_device import use_device
from ..gpus.calibration import ProbedDevice
from .findings import Finding, note, ok

_COMMAND = "ort-cuda-plugin calibrate"
_DESCRIBED = "Sessions use the packaged rates of this kind of GPU"


def calibration_findings(devices: list[DeviceInfo]) -> Iterator[Finding]:
    """Say whether each GPU is calibrated. A device that cannot be opened has no finding here."""
    for info in devices:
        try:
            device = use_device(info).probed
        except Exception:  # other findings say why the device does not work
            continue
        yield of_device(device, info.ordinal)


def of_device(device: ProbedDevice, ordinal: int) -> Finding:
    """Return the finding about a GPU with its present versions; ``ordinal`` is its number among the GPUs."""
    subject = f"calibration of {device.name}"
    # The command calibrates the first GPU that the process sees.
    advice = f"run `{f'CUDA_VISIBLE_DEVICES={ordinal} ' if ordinal else ''}{_COMMAND}`"
    stored = [each for each in calibrated_devices() if each.is_same_gpu(device)]
    if device in stored:
        if stored_calibration(device) is not None:
            return ok(subject, f"sessions and estimates use the rates that `{_COMMAND}` has measured")
        reason = "the measured rates are not used, because measurements are missing or a rate is not plausible"
        return note(subject, f"{reason}. {_DESCRIBED}", f"{advice} while nothing else uses the GPU")
    if stored:
        changed = ", ".join(stored[0].differences(device))
        return note(subject, f"measured with other versions: {changed}. {_DESCRIBED}", advice)
    return note(subject, "not calibrated: sessions choose kernels by the packaged rates of this kind of GPU", advice)
