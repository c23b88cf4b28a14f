"""The networks that benchmarks and estimates use."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest

from ort_cuda_plugin import models
from ort_cuda_plugin.cli import common
from ort_cuda_plugin.cli.exit_codes import UserError
from ort_cuda_plugin.networks import DTYPES, build, split_name

CONVOLUTIONS = {"resnet50": 53, "mobilenet_v2": 52, "efficientnet_b0": 81, "unet": 19}
"""Numbers of convolutions in the published networks."""


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_an_image_network_has_its_convolutions_in_each_type(name: str) -> None:
    parameters = set()
    for dtype in DTYPES:
        model = build(f"{name}:{dtype}")
        onnx.checker.check_model(model, full_check=True)
        nodes = Counter(node.op_type for node in model.graph.node)
        assert nodes["Conv"] == CONVOLUTIONS[name]
        assert ("QuantizeLinear" in nodes) == (dtype == "int8")
        large = [int(np.prod(tensor.dims)) for tensor in model.graph.initializer if len(tensor.dims) > 1]
        parameters.add(sum(large))
        elements = {value.type.tensor_type.elem_type for value in model.graph.input}
        assert elements == {onnx.TensorProto.FLOAT16 if dtype == "float16" else onnx.TensorProto.FLOAT}
    assert len(parameters) == 1


def test_the_command_line_writes_a_network_and_knows_its_sizes() -> None:
    path = common.model_path("whisper_tiny_encoder:float16")
    model = onnx.load(path)
    feeds = models.random_inputs(model, dims=common.usual_sizes("whisper_tiny_encoder:float16"))
    (array,) = feeds.values()
    assert (array.shape, array.dtype.name) == ((1, 80, 3000), "float16")
    assert common.usual_sizes("bert_base") == {"sequence": 128}
    assert common.usual_sizes(str(path)) == {}


@pytest.mark.parametrize("name", ["resnet51", "resnet50:float8", "llama_decode:int4", "resnet50:"])
def test_other_names_are_refused(name: str) -> None:
    if name == "resnet50:":
        assert split_name(name) == ("resnet50", "float32")
        return
    assert split_name(name) is None
    with pytest.raises(ValueError, match="NAME or NAME:TYPE with a name of resnet50"):
        build(name)
    with pytest.raises(UserError, match=name):
        common.model_path(name)
