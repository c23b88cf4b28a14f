"""All operators with invalid ranks and attribute values: nodes are declined with a reason, without internal errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import pytest
from onnx import AttributeProto, ModelProto, helper

from mutation.bases import Base, operators
from ort_cuda_plugin.clusters.claims.claims import analyze
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.lowering.context import DeviceProperties


def with_shape(model: ModelProto, number: int, dims: Sequence[int | str]) -> ModelProto:
    """Return a copy of a model in which input ``number`` has the shape ``dims``, and outputs have no shape."""
    copy = ModelProto()
    copy.CopyFrom(model)
    shape = copy.graph.input[number].type.tensor_type.shape
    shape.ClearField("dim")
    for dim in dims:
        field = "dim_value" if isinstance(dim, int) else "dim_param"
        setattr(shape.dim.add(), field, dim)
    for output in copy.graph.output:
        output.type.tensor_type.ClearField("shape")
    return copy


PARTS = 4
"""Number of cases over which the operators are spread, so that the first tier takes a part of them."""
in_parts = pytest.mark.parametrize("part", range(PARTS))


def part_of_operators(part: int) -> list[tuple[str, Base]]:
    return list(operators(per_operator=1).items())[part::PARTS]


@in_parts
def test_an_input_of_any_rank_gives_a_verdict_with_a_reason(part: int) -> None:
    mistakes = []
    for key, base in part_of_operators(part):
        model = onnx.load_model_from_string(base.model)
        for number, value in enumerate(model.graph.input):
            own = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            for rank in range(6):
                shapes: list[Sequence[int | str]] = [
                    [1] * rank,
                    [f"n{axis}" for axis in range(rank)],
                    (own + [1] * rank)[:rank],
                ]
                for dims in shapes:
                    verdicts = analyze(read_model(with_shape(model, number, dims)), DeviceProperties())
                    mistakes += [(key, number, dims, v.reason) for v in verdicts if "internal error" in v.reason]
    assert not mistakes


INTEGERS = (0, -1, 2, 100, 2**31, 2**62, -(2**63))
NUMBERS = (0.0, -1.0, float("nan"), float("inf"), 1e30)
TEXTS = ("", "x", "NOTSET", "SAME_UPPER", "VALID")
VALUES: dict[str, list[Any]] = {
    "INT": [*INTEGERS],
    "FLOAT": [*NUMBERS],
    "STRING": [*TEXTS],
    "INTS": [[], *([value] * length for value in INTEGERS for length in (1, 2, 4))],
    "FLOATS": [[], *([value] * length for value in NUMBERS for length in (1, 3))],
    "STRINGS": [[], *([value] for value in TEXTS)],
}


def with_attribute(model: ModelProto, name: str, kind: str, value: Any) -> ModelProto:
    """Return a copy of a model in which the last node has an attribute value, and outputs have no shape."""
    copy = ModelProto()
    copy.CopyFrom(model)
    node = copy.graph.node[-1]
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    empty = AttributeProto(name=name, type=getattr(AttributeProto, kind))
    del node.attribute[:]
    node.attribute.extend([*kept, empty if value == [] else helper.make_attribute(name, value)])
    for output in copy.graph.output:
        output.type.tensor_type.ClearField("shape")
    return copy


@in_parts
def test_an_attribute_of_any_value_gives_a_verdict_with_a_reason(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # ONNX's shape inference reads out of bounds for some of these values, so the test replaces it.
    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", lambda model: model)
    mistakes = []
    for key, base in part_of_operators(part):
        model = onnx.load_model_from_string(base.model)
        node, opsets = model.graph.node[-1], {entry.domain: entry.version for entry in model.opset_import}
        schema = onnx.defs.get_schema(node.op_type, opsets[node.domain], node.domain)
        for name, attribute in schema.attributes.items():
            kind: str = attribute.type.name  # type: ignore[attr-defined]
            for value in VALUES.get(kind, []):
                graph = read_model(with_attribute(model, name, kind, value), dynamic=len(name) % 2 == 0)
                verdicts = analyze(graph, DeviceProperties())
                mistakes += [(key, name, value, v.reason) for v in verdicts if "internal error" in v.reason]
    assert not mistakes
