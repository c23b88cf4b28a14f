"""Names of a fused node and of its inputs and outputs, as ONNX Runtime's ``OrtNode`` has them."""

from __future__ import annotations

from typing import Any

from ...abi import host
from ...abi.core import ffi


def node_name(node: Any) -> str:
    """Return the name of a node (``const OrtNode *``)."""
    return _text("Node_GetName", node)


def value_names(node: Any, kind: str) -> list[str]:
    """Return the names of a node's inputs or outputs, in its order. ``kind`` is "Inputs" or "Outputs"."""
    count = ffi.new("size_t *")
    host.check_status(getattr(host.api(), f"Node_GetNum{kind}")(node, count))
    values = ffi.new("const OrtValueInfo *[]", count[0])
    host.check_status(getattr(host.api(), f"Node_Get{kind}")(node, values, count[0]))
    return [_text("GetValueInfoName", value) for value in values]


def _text(function: str, owner: Any) -> str:
    out = ffi.new("const char **")
    host.check_status(getattr(host.api(), function)(owner, out))
    return host.text(out[0])
