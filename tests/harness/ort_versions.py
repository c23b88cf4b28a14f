"""Version numbers of ONNX Runtime."""

from __future__ import annotations


def api_version(version: str) -> int:
    """Return the N of ONNX Runtime 1.N.x, which is its API version."""
    return int(version.split(".")[1])
