"""Types and shapes of values as text."""

from __future__ import annotations

from .ir import Value


def type_text(value: Value) -> str:
    """Return type and shape as ``FLOAT[2, n]``; "" if nothing is known."""
    if value.dtype is None:
        return ""
    shape = "[...]" if value.shape is None else "[" + ", ".join("?" if d is None else str(d) for d in value.shape) + "]"
    return f"{value.dtype.name}{shape}"
