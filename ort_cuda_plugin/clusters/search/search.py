"""Token searches of com.microsoft (GreedySearch, BeamSearch, ...) as a `Repetition` of decoder and choice of tokens.

ONNX Runtime's kernels read the decoder's results on the host, so the plugin runs decoder and search together on the
device. ONNX Runtime's C API has helpers for a plugin's kernels of Loop, but not of these operators.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ...model.ir import Node, Unsupported
from ..nodes.repetition import FunctionNode, Repetition
from .search_base import Search, attribute_number
from .search_beam import BeamSearch, WhisperBeamSearch
from .search_encoder import EncoderDecoder
from .search_gpt import GptDecoder
from .search_greedy import GreedySearch, Sampling

_KINDS: Final[Mapping[str, type[Search]]] = {
    "GreedySearch": GreedySearch,
    "Sampling": Sampling,
    "BeamSearch": BeamSearch,
    "WhisperBeamSearch": WhisperBeamSearch,
}
_GPT, _T5, _WHISPER = 0, 1, 2
"""Values of the attribute model_type."""


def is_search(node: Node | None) -> bool:
    """Return whether the plugin may run the node, with its bodies, as a `Repetition`."""
    if node is None or isinstance(node, FunctionNode):
        return False
    return node.domain == "com.microsoft" and node.op_type in _KINDS


def as_repetition(node: Node, opsets: Mapping[str, int]) -> Repetition:
    """Return a search as a `Repetition`. Raises Unsupported or InvalidModel if the plugin cannot run the search."""
    kind = _KINDS[node.op_type](node, dict(opsets))
    model = attribute_number(node, "model_type", _WHISPER if node.op_type == "WhisperBeamSearch" else _GPT)
    if model == _GPT:
        return GptDecoder(kind).repetition()
    if model not in (_T5, _WHISPER) or not isinstance(kind, BeamSearch):
        raise Unsupported("attribute", f"{node.op_type} with model_type {model} is not implemented")
    return EncoderDecoder(kind, has_mask=model == _T5).repetition()
