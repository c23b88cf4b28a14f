"""Device memory of this process: statistics, release of unused memory, and limits.

Sessions of one device share two arenas, one of device memory and one of pinned host memory. Their options are the
``arena.*`` options of sessions and of ONNX Runtime's environment (see docs/options.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from .abi.core import check, core, ffi, lib, new_error
from .api import described_by, devices
from .ep.device.devices import DeviceInfo, open_device
from .ep.options import arena

if TYPE_CHECKING:
    import onnxruntime as ort

DeviceLike: TypeAlias = "ort.OrtEpDevice | DeviceInfo | int"
"""A device as `register` or `devices` returns it, or its ordinal."""

KINDS = {"device": lib.OCP_DEVICE_MEMORY, "pinned": lib.OCP_PINNED_MEMORY}

#: Names of allocator statistics (ONNX Runtime's, and the plugin's own), by member of ``ocp_memory_stats``.
NAMES = {
    "Limit": "limit",
    "InUse": "in_use",
    "TotalAllocated": "total",
    "MaxInUse": "max_in_use",
    "NumAllocs": "num_allocs",
    "NumReserves": "num_reserves",
    "NumArenaExtensions": "num_extensions",
    "NumArenaShrinkages": "num_shrinkages",
    "MaxAllocSize": "max_alloc_size",
    "Weights": "weights",
}


def memory_stats(device: DeviceLike | None = None) -> dict[str, dict[str, int]]:
    """Return statistics of a device's memory and of pinned memory, since the start of this process.

    Args:
        device: a device from `devices` or `register`, or an ordinal; None: the first device.

    Returns:
        A dictionary of statistics for each of ``"device"`` and ``"pinned"``, with the names of
        ``OrtAllocator.GetStats``. Bytes: ``Limit`` (2**63 - 1: no limit), ``InUse`` and ``MaxInUse`` (allocated by the
        arena's users, weights included), ``TotalAllocated`` (obtained from the driver), ``MaxAllocSize``, and
        ``Weights`` (allocations that bypass the arena). Counts: ``NumAllocs``, ``NumReserves`` (allocations that bypass
        the arena), ``NumArenaExtensions`` and ``NumArenaShrinkages``.

    Raises:
        ValueError: there is no such device.
        PluginError: the device cannot be opened.

    Examples:
        >>> sorted(ort_cuda_plugin.memory_stats())
        ['device', 'pinned']
        >>> ort_cuda_plugin.memory_stats(0)["device"]["InUse"] >= 0
        True
    """
    info = find_device(device)
    return {kind: _read(info, memory) for kind, memory in KINDS.items()}


def trim(device: DeviceLike | None = None) -> int:
    """Return memory that no tensor, weight or enqueued work uses to the driver, and return the number of these bytes.

    CUDA's own pool keeps ``arena.cuda_mempool_bytes_to_keep_on_shrink`` bytes. Automatic CUDA graphs that are not
    running are released with the memory of their intermediate tensors, and made again in later Runs.

    Arguments and errors are those of `memory_stats`.

    Examples:
        >>> ort_cuda_plugin.trim() >= 0
        True
    """
    return int(core().device_shrink(open_device(find_device(device))))


def set_limit(device: DeviceLike | None, nbytes: int | str | None) -> None:
    """Limit the device memory that this process may hold from now on, weights included.

    A limit below the bytes that are held releases nothing: see `trim`. A text has the format of ``arena.max_mem``.

    Args:
        device: as for `memory_stats`.
        nbytes: a number of bytes, or a text such as "2G"; None or 0: no limit.

    Raises:
        ValueError: there is no such device, or ``nbytes`` is not a number of bytes.

    Examples:
        >>> ort_cuda_plugin.set_limit(0, "2G")
        >>> ort_cuda_plugin.memory_stats(0)["device"]["Limit"]
        2147483648
        >>> ort_cuda_plugin.set_limit(0, None)
    """
    text = "0" if nbytes is None else str(nbytes)
    try:
        limit = arena.read_limit("" if text == "-1" else text)  # "-1" means the default in the option, not here
    except ValueError as error:
        raise ValueError(f"nbytes={nbytes!r}: {error}") from None
    arena.set_limit(find_device(device), lib.OCP_DEVICE_MEMORY, limit)


def _read(info: DeviceInfo, memory: int) -> dict[str, int]:
    stats, error = ffi.new("ocp_memory_stats *"), new_error()
    core().memory_stats(info.emulated, info.ordinal, memory, stats, error)
    check(error)
    return {name: getattr(stats, member) for name, member in NAMES.items()}


def find_device(device: DeviceLike | None) -> DeviceInfo:
    """Return the description of a device. Raises ValueError if there is no such device."""
    if isinstance(device, DeviceInfo):
        return device
    if hasattr(device, "ep_metadata"):  # an OrtEpDevice
        return described_by(device)
    known = devices()
    for info in known:
        if device is None or info.ordinal == device:
            return info
    names = ", ".join(f"{info.ordinal} ({info.name})" for info in known) or "none"
    raise ValueError(f"device: there is no device{'' if device is None else f' {device}'}. Known devices: {names}")
