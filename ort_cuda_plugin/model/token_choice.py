"""Appends the choice of the next token to a decoder's model: a Run gives a token, and no logits leave the device.

A model is a message of protocol buffers, where two messages one after the other are one: repeated fields are appended
and embedded messages are joined. So the nodes come as bytes behind the model, which needs no library and leaves the
model as it is. https://onnx.ai/onnx/repo-docs/IR.html has the fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .ir import Array, DType

TOKEN, MASK, POSITION = "ocp.token", "ocp.mask", "ocp.position"
"""Outputs: the token [batch, 1], the mask with that token's place, and the place, [batch, 1]; all int64."""
UNIFORM, TEMPERATURE, TOP_K, TOP_P = "ocp.uniform", "ocp.temperature", "ocp.top_k", "ocp.top_p"
"""Inputs of a model that samples: [batch, n] numbers of [0, 1), one for each place; float32, int64, float32 [1]."""
IDS, ATTENTION, POSITIONS, LOGITS = "input_ids", "attention_mask", "position_ids", "logits"
"""What onnxruntime-genai calls a decoder's inputs and output."""

_ONE_BYTE = 128
_INT, _LEAST_OPSET = 2, 13


@dataclass(frozen=True)
class DecoderInputs:
    """What a model says of itself: the names of its graph's inputs, and its version of ai.onnx."""

    names: tuple[str, ...]
    opset: int


def read_inputs(model: bytes) -> DecoderInputs:
    """Raises ValueError unless the bytes are those of an ONNX model."""
    names, opset = [], 0
    for number, value in _fields(memoryview(model)):
        if number == 7 and isinstance(value, memoryview):
            names += [str(_member(x, 1), "utf-8") for n, x in _fields(value) if n == 11 and isinstance(x, memoryview)]
        elif number == 8 and isinstance(value, memoryview):
            entries = dict(_fields(value))
            if entries.get(1, b"") in (b"", b"ai.onnx") and isinstance(version := entries.get(2), int):
                opset = version
    return DecoderInputs(tuple(names), opset)


def with_token(model: bytes, candidates: int) -> bytes:
    """The model with outputs `TOKEN`, `MASK` and, where it has positions, `POSITION`.

    With ``candidates`` it samples among the so many most probable tokens, else it takes the most probable one. The
    ones of a mask are the places of tokens and come first in each row.

    Raises:
        ValueError: it is no decoder as onnxruntime-genai's builder writes one.
    """
    known = read_inputs(model)
    missing = [name for name in (IDS, ATTENTION) if name not in known.names]
    if missing or known.opset < _LEAST_OPSET:
        raise ValueError(
            f"a decoder has inputs {IDS} and {ATTENTION}, and version {_LEAST_OPSET} or later of ai.onnx: "
            f"this model lacks {', '.join(missing) or 'nothing else'}, and has version {known.opset}"
        )
    graph = _Graph()
    one = graph.constant([1])
    count = graph.node("ReduceSum", ATTENTION, one, keepdims=1)
    rows = graph.node("Gather", graph.node("Shape", LOGITS), one)
    last = graph.node("Sub", graph.node("Min", count, rows), one)
    logits = graph.node("Cast", graph.node("GatherND", LOGITS, last, batch_dims=1), to=DType.FLOAT32.onnx)
    if candidates:
        _sample(graph, logits, graph.node("Sub", count, one), candidates)
    else:
        graph.node("ArgMax", logits, result=TOKEN, axis=1, keepdims=1)
    # What replaces an input depends on the token: a caller may give both the same memory, and the input is read first.
    after = graph.node("Min", TOKEN, graph.constant([0]))
    width = graph.node("Gather", graph.node("Shape", ATTENTION), one)
    place = graph.node("Min", count, graph.node("Sub", width, one))
    graph.node("ScatterElements", ATTENTION, place, graph.node("Add", after, one), result=MASK, axis=1)
    outputs = [TOKEN, MASK]
    if POSITIONS in known.names:
        graph.node("Add", count, after, result=POSITION)
        outputs.append(POSITION)
    inputs = {}
    if candidates:
        inputs = {UNIFORM: DType.FLOAT32, TEMPERATURE: DType.FLOAT32, TOP_K: DType.INT64, TOP_P: DType.FLOAT32}
    return model + graph.message(inputs, outputs)


def _sample(graph: _Graph, logits: str, place: str, candidates: int) -> None:
    """By temperature, top-k and top-p in this order, as Hugging Face and onnxruntime-genai do."""
    zero, axis = graph.constant([0.0]), graph.constant(1)
    scaled = graph.node("Div", logits, TEMPERATURE)
    best, indices = graph.nodes("TopK", 2, scaled, graph.constant([candidates]), axis=1)
    among = graph.node("Less", graph.constant(list(range(candidates))), TOP_K)
    likely = graph.node("Softmax", graph.node("Where", among, best, graph.constant([-np.inf])), axis=1)
    before = graph.node("CumSum", likely, axis, exclusive=1)
    kept = graph.node("Where", graph.node("Less", before, TOP_P), likely, zero)
    sums = graph.node("CumSum", kept, axis)
    whole = graph.node("Gather", sums, graph.constant([candidates - 1]), axis=1)
    drawn = graph.node("Mul", graph.node("GatherElements", UNIFORM, place, axis=1), whole)
    passed = graph.node("Cast", graph.node("LessOrEqual", sums, drawn), to=DType.INT64.onnx)
    chosen = graph.node("ReduceSum", passed, graph.constant([1]), keepdims=1)
    chosen = graph.node("Min", chosen, graph.constant([candidates - 1]))
    graph.node("GatherElements", indices, chosen, result=TOKEN, axis=1)


class _Graph:
    """A part of a GraphProto, as bytes."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._count = 0

    def _name(self) -> str:
        self._count += 1
        return f"ocp.{self._count}"

    def constant(self, values: object) -> str:
        name, array = self._name(), np.asarray(values)
        array = array.astype(np.float32 if array.dtype.kind == "f" else np.int64)
        self._parts.append(_field(5, _tensor(name, array)))
        return name

    def node(self, operator: str, *inputs: str, result: str = "", **attributes: int) -> str:
        return self._node(operator, inputs, (result or self._name(),), attributes)[0]

    def nodes(self, operator: str, results: int, *inputs: str, **attributes: int) -> tuple[str, ...]:
        return self._node(operator, inputs, tuple(self._name() for _ in range(results)), attributes)

    def _node(
        self, operator: str, inputs: Sequence[str], results: tuple[str, ...], attributes: Mapping[str, int]
    ) -> tuple[str, ...]:
        parts = [_field(1, name) for name in inputs] + [_field(2, name) for name in results]
        parts += [_field(3, f"{results[0]}.{operator}"), _field(4, operator)]
        parts += [
            _field(5, _field(1, name) + _field(3, value) + _field(20, _INT)) for name, value in attributes.items()
        ]
        self._parts.append(_field(1, b"".join(parts)))
        return results

    def message(self, inputs: Mapping[str, DType], outputs: Sequence[str]) -> bytes:
        """A ModelProto of the graph. Settings are vectors; all else has a row for each sequence."""
        parts = [*self._parts]
        for name, dtype in inputs.items():
            parts.append(_field(11, _value(name, dtype, rank=2 if name == UNIFORM else 1)))
        parts += [_field(12, _value(name, DType.INT64, rank=2)) for name in outputs]
        return _field(7, b"".join(parts))


def _value(name: str, dtype: DType, rank: int) -> bytes:
    shape = b"".join(_field(1, _field(2, f"{name}.{axis}")) for axis in range(rank))
    return _field(1, name) + _field(2, _field(1, _field(1, dtype.onnx) + _field(2, shape)))


def _tensor(name: str, array: Array) -> bytes:
    dtype = DType.FLOAT32 if array.dtype == np.float32 else DType.INT64
    dims = b"".join(_field(1, dim) for dim in array.shape)
    return dims + _field(2, dtype.onnx) + _field(8, name) + _field(9, array.tobytes())


def _field(number: int, value: int | str | bytes) -> bytes:
    """A field: a number, or bytes with their length."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    groups = bytearray()
    while value >= _ONE_BYTE:
        groups.append(value & 127 | 128)
        value >>= 7
    return bytes([*groups, value])


def _member(data: memoryview, number: int) -> memoryview:
    return next((x for n, x in _fields(data) if n == number and isinstance(x, memoryview)), memoryview(b""))


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """The fields of a message, with the number or the bytes of each. Raises ValueError where it is none."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            if at >= len(data) or shift > 63:
                raise ValueError("the bytes are not those of an ONNX model")
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < _ONE_BYTE:
                return value

    while at < len(data):
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 2: None, 5: 4}.get(kind, -1)
        size = varint() if size is None else size
        if size < 0 or at + size > len(data):
            raise ValueError("the bytes are not those of an ONNX model")
        yield key >> 3, data[at : at + size]
        at += size
