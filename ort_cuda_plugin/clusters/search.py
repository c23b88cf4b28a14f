"""Searches for tokens of com.microsoft: the decoder and what chooses tokens, as a repetition.

ONNX Runtime's own kernels read on the host what the decoder gives, so a decoder on the device has to come with the
search around it. The C API has no kernel of these operators for plugins as it has one of Loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..model.ir import Node
from .repetition import FunctionNode, Repetition
from .search_beam import BeamSearch
from .search_gpt import GptSearch
from .search_greedy import GreedySearch, Sampling

_KINDS: Final[Mapping[str, type[GptSearch]]] = {
    "GreedySearch": GreedySearch,
    "Sampling": Sampling,
    "BeamSearch": BeamSearch,
}


def is_search(node: Node | None) -> bool:
    """Whether the plugin may run the node, with its bodies, as a repetition."""
    if node is None or isinstance(node, FunctionNode):
        return False
    return node.domain == "com.microsoft" and node.op_type in _KINDS


def as_repetition(node: Node, opsets: Mapping[str, int]) -> Repetition:
    """What is repeated for a node of which `is_search` holds.

    Raises:
        Unsupported, InvalidModel: it cannot be run.
    """
    return _KINDS[node.op_type](node, dict(opsets)).repetition()
