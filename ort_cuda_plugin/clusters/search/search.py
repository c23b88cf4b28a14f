"""Token searches of com.microsoft (GreedySearch, BeamSearch, ...): decoder and choice of tokens in one loop.

If a decoder cannot be a part of such a loop, the search is a `Repetition`.

ONNX Runtime's kernels read the decoder's results on the host, so the plugin runs decoder and search together on the
device. ONNX Runtime's C API has helpers for a plugin's kernels of Loop, but not of these operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ...model.ir import Graph, Node, Unsupported
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
    """Return whether the node is a token search, which the plugin may run together with its bodies."""
    if node is None or isinstance(node, FunctionNode):
        return False
    return node.domain == "com.microsoft" and node.op_type in _KINDS


def as_repetition(node: Node, opsets: Mapping[str, int]) -> Repetition:
    """Return a search as a `Repetition`. Raises Unsupported or InvalidModel if the plugin cannot run the search."""
    return _decoder(node, opsets).repetition()


def as_loop(node: Node, opsets: Mapping[str, int]) -> Graph:
    """Return a search as nodes of one cluster, with a loop on the device. Raises the errors of `as_repetition`."""
    return _decoder(node, opsets).loop()


def order_ports(loop: Graph, node: Node, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Set the inputs and outputs of the graph of `as_loop` to values of ``node``, in the order of their names.

    Values in the bodies may have equal names, so the function looks names up among the values of ``node`` only.
    """
    own = {value.name: value for value in (*node.reads(), *node.outputs) if value is not None}
    loop.inputs, loop.outputs = [own[name] for name in inputs], [own[name] for name in outputs]


def _decoder(node: Node, opsets: Mapping[str, int]) -> GptDecoder | EncoderDecoder:
    kind = _KINDS[node.op_type](node, dict(opsets))
    model = attribute_number(node, "model_type", _WHISPER if node.op_type == "WhisperBeamSearch" else _GPT)
    if model == _GPT:
        return GptDecoder(kind)
    if model not in (_T5, _WHISPER) or not isinstance(kind, BeamSearch):
        supported = "0 (GPT-2); with BeamSearch and WhisperBeamSearch also 1 (T5) and 2 (Whisper)"
        raise Unsupported("attribute", f"{node.op_type}: model_type is {model}; supported: {supported}")
    return EncoderDecoder(kind, has_mask=model == _T5)
