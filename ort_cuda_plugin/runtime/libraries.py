"""Vendor libraries: what a plan asks of cuBLASLt and cuDNN."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LibraryProblem:
    """One call of a vendor library, as plain data: equal problems share descriptors and algorithm."""

    kind: str
