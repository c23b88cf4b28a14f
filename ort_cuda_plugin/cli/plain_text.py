"""Text output of commands that work without optional packages."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from typing import Any


def json_text(data: Any) -> str:
    """Return data as JSON text, with null for infinities and NaN."""
    return json.dumps(_finite(data), indent=2, allow_nan=False)


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    return [_finite(value) for value in data] if isinstance(data, list | tuple) else data


def styled(text: str, style: str) -> str:
    """Apply an ECMA-48 style to the text, if standard output is a terminal with styles and NO_COLOR is not set."""
    has_styles = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\x1b[{style}m{text}\x1b[0m" if has_styles else text


def aligned(title: str, rows: Sequence[Sequence[str]]) -> str:
    """Return a table of ``rows`` as text, with aligned columns, below a title."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([styled(title, "1"), *(f"  {line}" for line in lines)])
