"""Widths of attention_mask at which a decoder switches between branches.

Models of onnxruntime-genai's builder choose the factors of LongRoPE by the mask's width. In onnxruntime-genai's
generation loop the width is the number of tokens::

    attention_mask -> Shape -> Gather -> Greater(original length) -> If -> cos and sin of short or long factors

A loop that pads the mask to a fixed width needs these widths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from .wire import fields, message, messages, numbers, text

_KEEPS_VALUE: Final = {"Cast", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze"}
_LAST_BEFORE: Final[Mapping[str, tuple[int, int]]] = {
    "Greater": (0, -1),
    "GreaterOrEqual": (-1, 0),
    "Less": (-1, 0),
    "LessOrEqual": (0, -1),
}
"""Comparison -> offsets from its constant to the last width before its result changes, for the operand orders (width,
constant) and (constant, width)."""
_INTEGERS: Final[Mapping[object, tuple[int, int]]] = {6: (5, 4), 7: (7, 8)}
"""Element type in TensorProto (int32, int64) -> field number of its elements, bytes of an element."""


class _Node(NamedTuple):
    operator: str
    inputs: tuple[str, ...]
    message: memoryview


def width_limits(model: bytes, mask: str, initializer: Callable[[str], int | None]) -> list[int]:
    """Return the widths of the input ``mask`` after which an If or a Where changes its branch, in ascending order.

    ``initializer`` returns the value of an initializer with one integer, None for any other initializer. Raises
    ValueError unless the bytes are an ONNX model.
    """
    producers: dict[str, _Node] = {}
    choices: list[str] = []
    for graph in messages(memoryview(model), 7):
        for data in messages(graph, 1):
            node = _Node(text(data, 4), tuple(str(x, "utf-8") for x in messages(data, 1)), data)
            producers |= {str(name, "utf-8"): node for name in messages(data, 2)}
            if node.operator in ("If", "Where"):
                choices.append(node.inputs[0])

    def origin(name: str) -> tuple[str, _Node | None]:
        """Follow Cast, Gather, Slice and views from ``name`` back to their source; return its name and its producer."""
        seen = set()
        while (node := producers.get(name)) and node.operator in _KEEPS_VALUE and name not in seen:
            seen.add(name)
            name = node.inputs[0]
        return name, producers.get(name)

    def is_width(name: str) -> bool:
        _, node = origin(name)
        return node is not None and node.operator == "Shape" and origin(node.inputs[0])[0] == mask

    def number(name: str) -> int | None:
        name, node = origin(name)
        return initializer(name) if node is None else _constant(node) if node.operator == "Constant" else None

    def comparison(name: str) -> _Node | None:
        """Return the comparison whose result or negated result is the condition ``name``; None for other conditions."""
        _, found = origin(name)
        while found is not None and found.operator == "Not":
            _, found = origin(found.inputs[0])
        return found if found is not None and found.operator in _LAST_BEFORE else None

    limits = set()
    for compared in filter(None, map(comparison, choices)):
        for index, change in enumerate(_LAST_BEFORE[compared.operator]):
            bound = number(compared.inputs[1 - index])
            if bound is not None and is_width(compared.inputs[index]):
                limits.add(bound + change)
    return sorted(limits)


def _constant(node: _Node) -> int | None:
    """Return the value of a Constant node with one integer; None for other Constant nodes."""
    for attribute in messages(node.message, 5):
        entries = dict(fields(attribute))
        if text(attribute, 1) == "value_int" and isinstance(value := entries.get(3), int):
            return _signed(value)
        if text(attribute, 1) == "value":
            return _element(message(attribute, 5))
    return None


def _element(tensor: memoryview) -> int | None:
    """Return the value of an integer tensor with one element and no external data; None for other tensors."""
    known = dict(fields(tensor))
    dims = [x for number, x in fields(tensor) if number == 1]
    if any(x not in (1, b"\x01") for x in dims) or known.get(2) not in _INTEGERS:
        return None
    listed, size = _INTEGERS[known[2]]
    raw, value = known.get(9), known.get(listed)
    if isinstance(raw, memoryview) and len(raw) == size:
        return int.from_bytes(raw, "little", signed=True)
    if isinstance(value, memoryview):
        value = next(numbers(value), None)
    return None if value is None else _signed(value)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
