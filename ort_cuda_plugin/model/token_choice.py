"""Greedy and sampling nodes appended to a decoder's model: a Run returns a token, and logits stay on the device.

A model is a Protocol Buffers message, and concatenating two encoded messages merges them: repeated fields are appended,
embedded messages are merged. Therefore the nodes are appended to the model's bytes, without a library and without
changing the bytes before them. https://onnx.ai/onnx/repo-docs/IR.html has the fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .ir import Array, DType
from .wire import field, fields, message, messages, text

TOKEN, MASK, POSITION = "ocp.token", "ocp.mask", "ocp.position"
"""Appended outputs, int64: the token [batch, 1], the mask including the token, and the token's position.

The position has the rank of the model's input `POSITIONS`.
"""
UNIFORM, TEMPERATURE, TOP_K, TOP_P = "ocp.uniform", "ocp.temperature", "ocp.top_k", "ocp.top_p"
"""Appended inputs of a model that samples: random numbers in [0, 1) and three settings.

There is a random number for each position: float32 [batch, n]. Temperature is float32 [1], k of top-k int64 [1], and p
of top-p float32 [1].
"""
IDS, ATTENTION, POSITIONS, LOGITS = "input_ids", "attention_mask", "position_ids", "logits"
"""Names of a decoder's inputs and output in onnxruntime-genai."""

_INT, _LEAST_OPSET, _RANK_WITH_PLANES = 2, 13, 3


@dataclass(frozen=True)
class DecoderInputs:
    """The inputs and outputs of a model.

    ``shapes`` and ``types`` are those of the inputs: None is a dynamic dimension, types are numbers in TensorProto.
    ``opset`` is the version of ai.onnx.
    """

    shapes: Mapping[str, tuple[int | None, ...]]
    types: Mapping[str, int]
    outputs: frozenset[str]
    opset: int

    @property
    def position_planes(self) -> int | None:
        """Return the number of positions per token in multimodal rotary embeddings; None for other models."""
        shape = self.shapes.get(POSITIONS, ())
        return shape[0] or 1 if len(shape) == _RANK_WITH_PLANES else None


def read_inputs(model: bytes) -> DecoderInputs:
    """Read the interface of a model. Raises ValueError unless the bytes are an ONNX model."""
    shapes: dict[str, tuple[int | None, ...]] = {}
    types: dict[str, int] = {}
    outputs: set[str] = set()
    opset = 0
    for number, value in fields(memoryview(model)):
        if number == 7 and isinstance(value, memoryview):
            for x in messages(value, 11):
                tensor = message(message(x, 2), 1)
                types[text(x, 1)] = _number(tensor) or 0
                shapes[text(x, 1)] = tuple(_number(dim) for dim in messages(message(tensor, 2), 1))
            outputs.update(text(x, 1) for x in messages(value, 12))
        elif number == 8 and isinstance(value, memoryview):
            entries = dict(fields(value))
            if entries.get(1, b"") in (b"", b"ai.onnx") and isinstance(version := entries.get(2), int):
                opset = version
    return DecoderInputs(shapes, types, frozenset(outputs), opset)


def _number(part: memoryview) -> int | None:
    """Return field 1 of a message (the size of a dimension, or an element type); None if it is not an integer."""
    value = dict(fields(part)).get(1)
    return value if isinstance(value, int) else None


def with_token(model: bytes, candidates: int) -> bytes:
    """Append nodes and the outputs `TOKEN`, `MASK` and, if the model has an input `POSITIONS`, `POSITION`.

    The model samples from the ``candidates`` most probable tokens; with 0 it takes the most probable token. In each row
    of the mask, ones (for tokens) must come before zeros.

    Raises:
        ValueError: the model is not a decoder in the form of onnxruntime-genai's builder.
    """
    known = read_inputs(model)
    missing = [name for name in (IDS, ATTENTION) if name not in known.shapes]
    missing += [] if LOGITS in known.outputs else [LOGITS]
    if missing or known.opset < _LEAST_OPSET:
        raise ValueError(
            f"the model is not a decoder: got opset {known.opset}, missing: {', '.join(missing) or 'none'}; expected "
            f"inputs {IDS} and {ATTENTION}, an output {LOGITS}, and opset {_LEAST_OPSET} or later"
        )
    for name in (IDS, ATTENTION, POSITIONS):
        if known.types.get(name, DType.INT64.onnx) != DType.INT64.onnx:
            raise ValueError(f"input {name}: got elements of ONNX type {known.types[name]}, expected int64")
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
    # Make MASK and POSITION depend on TOKEN, so that the model writes them after it has read its inputs: callers may
    # bind an input, such as the mask, and its new value to the same memory.
    after = graph.node("Min", TOKEN, graph.constant([0]))
    width = graph.node("Gather", graph.node("Shape", ATTENTION), one)
    column = graph.node("Min", count, graph.node("Sub", width, one))
    graph.node("ScatterElements", ATTENTION, column, graph.node("Add", after, one), result=MASK, axis=1)
    outputs = [TOKEN, MASK]
    if POSITIONS in known.shapes:
        position, planes = graph.node("Add", count, after), known.position_planes
        zeros = graph.constant([0] if planes is None else [[[0]]] * planes)
        graph.node("Add", position, zeros, result=POSITION)
        outputs.append(POSITION)
    inputs = {}
    if candidates:
        inputs = {UNIFORM: DType.FLOAT32, TEMPERATURE: DType.FLOAT32, TOP_K: DType.INT64, TOP_P: DType.FLOAT32}
    ranks = {POSITION: 2 if known.position_planes is None else _RANK_WITH_PLANES}
    return model + graph.message(inputs, {name: ranks.get(name, 2) for name in outputs})


def _sample(graph: _Graph, logits: str, position: str, candidates: int) -> None:
    """Add nodes that apply temperature, top-k and top-p, in the order of Hugging Face and onnxruntime-genai."""
    zero, axis = graph.constant([0.0]), graph.constant(1)
    scaled = graph.node("Div", logits, TEMPERATURE)
    best, indices = graph.nodes("TopK", 2, scaled, graph.constant([candidates]), axis=1)
    among = graph.node("Less", graph.constant(list(range(candidates))), TOP_K)
    likely = graph.node("Softmax", graph.node("Where", among, best, graph.constant([-np.inf])), axis=1)
    before = graph.node("CumSum", likely, axis, exclusive=1)
    kept = graph.node("Where", graph.node("Less", before, TOP_P), likely, zero)
    sums = graph.node("CumSum", kept, axis)
    whole = graph.node("Gather", sums, graph.constant([candidates - 1]), axis=1)
    drawn = graph.node("Mul", graph.node("GatherElements", UNIFORM, position, axis=1), whole)
    passed = graph.node("Cast", graph.node("LessOrEqual", sums, drawn), to=DType.INT64.onnx)
    chosen = graph.node("ReduceSum", passed, graph.constant([1]), keepdims=1)
    chosen = graph.node("Min", chosen, graph.constant([candidates - 1]))
    graph.node("GatherElements", indices, chosen, result=TOKEN, axis=1)


class _Graph:
    """Collects nodes and initializers to append to a GraphProto, as encoded fields."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._count = 0

    def _name(self) -> str:
        self._count += 1
        return f"ocp.{self._count}"

    def constant(self, values: object) -> str:
        name, array = self._name(), np.asarray(values)
        array = array.astype(np.float32 if array.dtype.kind == "f" else np.int64)
        self._parts.append(field(5, _tensor(name, array)))
        return name

    def node(self, operator: str, *inputs: str, result: str = "", **attributes: int) -> str:
        return self._node(operator, inputs, (result or self._name(),), attributes)[0]

    def nodes(self, operator: str, results: int, *inputs: str, **attributes: int) -> tuple[str, ...]:
        return self._node(operator, inputs, tuple(self._name() for _ in range(results)), attributes)

    def _node(
        self, operator: str, inputs: Sequence[str], results: tuple[str, ...], attributes: Mapping[str, int]
    ) -> tuple[str, ...]:
        parts = [field(1, name) for name in inputs] + [field(2, name) for name in results]
        parts += [field(3, f"{results[0]}.{operator}"), field(4, operator)]
        parts += [field(5, field(1, name) + field(3, value) + field(20, _INT)) for name, value in attributes.items()]
        self._parts.append(field(1, b"".join(parts)))
        return results

    def message(self, inputs: Mapping[str, DType], outputs: Mapping[str, int]) -> bytes:
        """Return a ModelProto with the graph. ``outputs`` has ranks; inputs have rank 1, except `UNIFORM` with 2."""
        parts = [*self._parts]
        for name, dtype in inputs.items():
            parts.append(field(11, _value(name, dtype, rank=2 if name == UNIFORM else 1)))
        parts += [field(12, _value(name, DType.INT64, rank=rank)) for name, rank in outputs.items()]
        return field(7, b"".join(parts))


def _value(name: str, dtype: DType, rank: int) -> bytes:
    shape = b"".join(field(1, field(2, f"{name}.{axis}")) for axis in range(rank))
    return field(1, name) + field(2, field(1, field(1, dtype.onnx) + field(2, shape)))


def _tensor(name: str, array: Array) -> bytes:
    dtype = DType.FLOAT32 if array.dtype == np.float32 else DType.INT64
    dims = b"".join(field(1, dim) for dim in array.shape)
    return dims + field(2, dtype.onnx) + field(8, name) + field(9, array.tobytes())
