"""Measures how far two results differ, against a tolerance for their element type."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..models import relative_error

TOLERANCES: Mapping[str, float] = {"float64": 1e-9, "float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
"""Largest accepted max|a-b| / max|b| by element type. Values of other types must be equal."""

UNROUNDED_INPUTS = ("session.qdq_matmulnbits_accuracy_level", "1")
"""Session entry that makes ONNX Runtime multiply by dequantized low-bit weights, as the model says. Without it the CPU
provider rounds the other operand to 8 bits.
"""


@dataclass(frozen=True)
class Difference:
    """The difference of one output between two providers.

    ``error`` is max|a-b| / max|b|, infinite if shapes, types or positions of NaN differ.
    ``tolerance`` is the maximum error that is accepted.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    error: float
    tolerance: float

    @property
    def is_small(self) -> bool:
        return self.error <= self.tolerance


def differences(
    names: Sequence[str], actual: Sequence[Any], expected: Sequence[Any], tolerances: Mapping[str, float]
) -> list[Difference]:
    """Return a difference for each output.

    A sequence has one for each of its tensors or maps, and an optional value that both sides lack has none.
    """
    return [
        difference
        for name, a, b in zip(names, actual, expected, strict=True)
        for difference in _of_value(name, a, b, tolerances)
    ]


def _of_value(name: str, actual: Any, expected: Any, tolerances: Mapping[str, float]) -> list[Difference]:
    if isinstance(expected, list):
        if not isinstance(actual, list) or len(actual) != len(expected):
            return [Difference(name, "sequence", (len(expected),), math.inf, 0.0)]
        pairs = enumerate(zip(actual, expected, strict=True))
        return [found for i, (a, b) in pairs for found in _of_value(f"{name}[{i}]", a, b, tolerances)]
    if isinstance(expected, dict):
        if not isinstance(actual, dict) or actual.keys() != expected.keys():
            return [Difference(name, "map", (len(expected),), math.inf, 0.0)]
        actual, expected = (_map_values(side, expected) for side in (actual, expected))
    if expected is None:
        return [] if actual is None else [Difference(name, "optional", (), math.inf, 0.0)]
    a, b = np.asarray(actual), np.asarray(expected)
    tolerance = tolerances.get(b.dtype.name, 0.0)
    return [Difference(name, b.dtype.name, b.shape, _error(a, b), tolerance)]


def _map_values(values: Mapping[Any, Any], keys: Iterable[Any]) -> np.ndarray[Any, Any]:
    """Return the values in the order of ``keys``. ONNX Runtime returns a map's float32 values as Python's floats."""
    array = np.array([values[key] for key in keys])
    return array.astype(np.float32) if array.dtype.kind == "f" else array


def _error(actual: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    if actual.dtype != expected.dtype:
        return math.inf
    if expected.dtype.kind in "biu":  # float64 does not represent all 64-bit integers
        if actual.shape != expected.shape:
            return math.inf
        return 0.0 if np.array_equal(actual, expected) else max(relative_error(actual, expected), np.finfo(float).tiny)
    return relative_error(actual, expected)
