"""Every operator with inputs of ranks that it has no meaning for: declined with a reason, not by a mistake of ours."""

from __future__ import annotations

import onnx

from mutation.bases import operators
from ort_cuda_plugin.graph.claims import analyze
from ort_cuda_plugin.graph.lowering import DeviceProperties
from ort_cuda_plugin.graph.onnx_graph import read_model


def with_shape(model: onnx.ModelProto, number: int, dims: list[int | str]) -> onnx.ModelProto:
    """A copy whose input of that number has this shape, and whose outputs have any."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    shape = copy.graph.input[number].type.tensor_type.shape
    shape.ClearField("dim")
    for dim in dims:
        field = "dim_value" if isinstance(dim, int) else "dim_param"
        setattr(shape.dim.add(), field, dim)
    for output in copy.graph.output:
        output.type.tensor_type.ClearField("shape")
    return copy


def has_subgraphs(model: onnx.ModelProto) -> bool:
    return any(attribute.type == onnx.AttributeProto.GRAPH for node in model.graph.node for attribute in node.attribute)


def test_an_input_of_any_rank_gives_a_verdict_with_a_reason():
    mistakes = []
    for key, base in operators(per_operator=1).items():
        model = onnx.load_model_from_string(base.model)
        if has_subgraphs(model):  # which the reader of tests has not
            continue
        for number, value in enumerate(model.graph.input):
            own = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            for rank in range(6):
                for dims in ([1] * rank, [f"n{axis}" for axis in range(rank)], (own + [1] * rank)[:rank]):
                    verdicts = analyze(read_model(with_shape(model, number, dims)), DeviceProperties())
                    mistakes += [(key, number, dims, v.reason) for v in verdicts if "internal error" in v.reason]
    assert not mistakes
