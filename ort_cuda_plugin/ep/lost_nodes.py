"""Declined nodes that probably nobody runs: ONNX Runtime's own error would not say why.

ONNX Runtime asks its CPU provider after us, so the plugin cannot know. Operators of ONNX have CPU kernels or an error
of ONNX Runtime that names them. A contrib operator may have neither; a node that holds a compiled model never has.
"""

from __future__ import annotations

import sys
from functools import cache

from ..model.ir import Node
from .identity import EP_NAME

_ONNX_DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "ai.onnx.preview.training")


def is_compiled_model(node: Node) -> bool:
    """Whether the node is a model that an execution provider compiled before."""
    return (node.domain, node.op_type) == ("com.microsoft", "EPContext")


def why_not_loaded(node: Node) -> str:
    """The reason for which the plugin declines a compiled model of another source."""
    made_by = str(node.attributes.get("source", "")) or "a provider that it does not name"
    return f"it holds a model that {made_by} compiled, and {EP_NAME} loads its own only: use the original model"


def is_probably_lost(node: Node) -> bool:
    """Whether no provider of this ONNX Runtime is known to run such a node."""
    if node.domain in _ONNX_DOMAINS:
        return False
    known = _operators_of_host()
    return is_compiled_model(node) or known is None or (node.domain, node.op_type) not in known


def described(node: Node) -> str:
    """The node's operator, with its version and the types of its inputs."""
    types = ("none" if x is None else "unknown" if x.dtype is None else x.dtype.name for x in node.inputs)
    return f"{node.domain or 'ai.onnx'}.{node.op_type}-{node.since_version} of ({', '.join(types)})"


@cache
def _operators_of_host() -> frozenset[tuple[str, str]] | None:
    """The operators of the built-in providers, by domain; None where the host is not ONNX Runtime's Python package."""
    package = sys.modules.get("onnxruntime.capi._pybind_state")
    listed = getattr(package, "get_all_opkernel_def", None)
    return None if listed is None else frozenset((known.domain, known.op_name) for known in listed())
