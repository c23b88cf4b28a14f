"""Packed data in a page: JSON, deflated, in base64. The page's script unpacks the data with DecompressionStream.

Kernel sources and graphs are repetitive: packed, a page of a thousand nodes stays below 500 kB.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from typing import Any

_START = '<script type="application/octet-stream" id="packed">'


def packed(data: Any) -> str:
    """Return an HTML element that contains ``data``, of the types that JSON has."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    raw = zlib.compress(text.encode("utf-8", errors="backslashreplace"), 9)
    return f"{_START}{base64.b64encode(raw).decode()}</script>"


def unpacked(page: str) -> Any:
    """Return the data in a page; None for a page without packed data."""
    found = re.search(re.escape(_START) + r"([A-Za-z0-9+/=]*)</script>", page)
    return None if found is None else json.loads(zlib.decompress(base64.b64decode(found[1])))
