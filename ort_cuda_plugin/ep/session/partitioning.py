"""Reads the session entry that limits the device memory of a model's nodes.

ONNX Runtime applies the entry to the provider named CUDAExecutionProvider only, and rejects a fused node as a whole if
the node exceeds the limit. So the plugin ends its clusters where the budget ends, under either of its names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...clusters.claims.budget import MemoryBudget
from ..device.identity import Identity

#: ``<kilobytes>,<file of statistics>``; without a number, all memory that is available on the device.
KEY = "session.resource_cuda_partitioning_settings"


def read_budget(entries: Mapping[str, str], available: Callable[[], int]) -> MemoryBudget | None:
    """Return the budget of a session; None if it has none, or if ONNX Runtime will refuse the entry."""
    limit, comma, _ = entries.get(KEY, "").partition(",")
    limit = limit.strip()
    if not comma or (limit and not limit.isdecimal()):
        return None
    return MemoryBudget(int(limit) * 1024 if limit else available())


def goes_by_statistics(entries: Mapping[str, str], identity: Identity) -> bool:
    """Return whether ONNX Runtime uses recorded statistics, which are more accurate about a node than the plugin's
    estimate.
    """
    return identity is Identity.CUDA and bool(entries.get(KEY, "").partition(",")[2].strip())
