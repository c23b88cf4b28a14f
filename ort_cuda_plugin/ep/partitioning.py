"""The session entry that limits how much device memory a model's nodes may take.

ONNX Runtime keeps to it for the provider named CUDAExecutionProvider only, and drops a fused node that exceeds it as a
whole. So the plugin cuts its clusters where the budget ends, under either name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..clusters.budget import MemoryBudget
from .identity import Identity

#: ``<kilobytes>,<file of statistics>``; without a number what the device has available.
KEY = "session.resource_cuda_partitioning_settings"


def read_budget(entries: Mapping[str, str], available: Callable[[], int]) -> MemoryBudget | None:
    """The budget of a session; None where it has none, or where ONNX Runtime will refuse the entry."""
    limit, comma, _ = entries.get(KEY, "").partition(",")
    limit = limit.strip()
    if not comma or (limit and not limit.isdecimal()):
        return None
    return MemoryBudget(int(limit) * 1024 if limit else available())


def goes_by_statistics(entries: Mapping[str, str], identity: Identity) -> bool:
    """Whether ONNX Runtime counts with recorded statistics, which say of a node more than the plugin knows."""
    return identity is Identity.CUDA and bool(entries.get(KEY, "").partition(",")[2].strip())
