"""Fused programs give the bits of unfused ones, and take the launches that they should."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from kernel_harness import run_model
from ort_cuda_plugin.ep.open_device import OpenDevice
from ort_cuda_plugin.graph.lowering import LoweringOptions
from ort_cuda_plugin.graph.onnx_graph import storage
from ort_cuda_plugin.runtime.targets import Target
from random_models import ModelMaker, feed

TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}


@pytest.fixture
def uncontracted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product and a sum that fusing brings together stay two operations with a rounding each."""
    monkeypatch.setattr(OpenDevice, "target", property(lambda self: Target.emulated(contract=False)))


def as_type(model: onnx.ModelProto, dtype: int) -> onnx.ModelProto:
    """The model with another type in place of float32."""
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = dtype
    for initializer in model.graph.initializer:
        if initializer.data_type == TensorProto.FLOAT:
            array = numpy_helper.to_array(initializer).astype(onnx.helper.tensor_dtype_to_np_dtype(dtype))
            initializer.CopyFrom(numpy_helper.from_array(array, initializer.name))
    return model


def bits(arrays: list[np.ndarray]) -> list[np.ndarray]:
    return [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]


def compare(model: onnx.ModelProto, inputs: list[np.ndarray], *, dynamic: bool = False) -> None:
    fused, plain = (run_model(model, inputs, dynamic, LoweringOptions(fusion=fusion)) for fusion in (True, False))
    for one, other in zip(bits(fused), bits(plain), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.usefixtures("uncontracted")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("seed", range(8))
def test_a_random_model_has_the_same_bits_fused(seed: int, dtype: str) -> None:
    maker = ModelMaker(seed + 100 * list(TYPES).index(dtype), foreign=False)
    model = as_type(maker.model(20), TYPES[dtype])
    arrays = feed(2, 3, seed)
    inputs = [
        arrays[value.name].astype(onnx.helper.tensor_dtype_to_np_dtype(TYPES[dtype])) for value in model.graph.input
    ]
    assert all(storage(x)[1].name == dtype.upper() for x in inputs)
    compare(model, inputs, dynamic=bool(seed % 2))
