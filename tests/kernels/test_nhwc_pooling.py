"""The kernels that pool NHWC images on a GPU: bit-identical to the NCHW kernel."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from contributed import noise
from kernel_harness import run_model, run_op
from ort_cuda_plugin.compiler.targets import Target
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.estimate import sass
from ort_cuda_plugin.program.lowering.context import DeviceProperties
from test_mma_gemm import kernels

GPU = DeviceProperties.gpu((9, 0))
FEW = dataclasses.replace(GPU, multiprocessors=1)
"""With one multiprocessor even a small image fills the device, so threads compute several output pixels."""
TYPES = {np.float32: TensorProto.FLOAT, np.float16: TensorProto.FLOAT16, ml_dtypes.bfloat16: TensorProto.BFLOAT16}
PADDED = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
STEPS = {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}
CASES: dict[str, tuple[str, tuple[int, ...], dict[str, Any], int]] = {
    "average": ("AveragePool", (2, 64, 28, 30), PADDED, 8),
    "average with pads": ("AveragePool", (2, 64, 28, 30), {**PADDED, "count_include_pad": 1}, 8),
    "average with pads at one end": (
        "AveragePool",
        (2, 64, 28, 29),
        {"kernel_shape": [2, 3], "pads": [0, 2, 1, 0], "count_include_pad": 1, "ceil_mode": 1, "strides": [1, 2]},
        8,
    ),
    "average of places apart": ("AveragePool", (2, 64, 28, 29), {**PADDED, "dilations": [2, 1]}, 4),
    "maximum": ("MaxPool", (2, 64, 27, 31), PADDED, 8),
    "maximum with steps": ("MaxPool", (2, 64, 55, 57), STEPS, 4),
    "maximum in few places": ("MaxPool", (1, 32, 7, 7), PADDED, 1),
    "wide maximum": ("MaxPool", (2, 64, 40, 40), {"kernel_shape": [5, 5], "pads": [2, 2, 2, 2]}, 2),
    "line": ("MaxPool", (2, 96, 801), {"kernel_shape": [3], "pads": [1, 1]}, 4),
    "volume": ("AveragePool", (1, 64, 5, 20, 21), {"kernel_shape": [2, 2, 2], "pads": [0, 1, 0, 1, 0, 1]}, 8),
}
"""The operator, its image's shape, attributes, and how many results a thread computes for each of its channels."""


def model_between_convolutions(operator: str, x: Any, attributes: dict[str, Any]) -> Any:
    """Return a model in which identity convolutions before and after the pooling make its image NHWC."""
    channels, rank = x.shape[1], x.ndim - 2
    ones = numpy_helper.from_array(np.ones((channels, 1, *[1] * rank), x.dtype), "ones")
    nodes = [
        helper.make_node("Conv", ["x", "ones"], ["before"], group=channels),
        helper.make_node(operator, ["before"], ["after"], **attributes),
        helper.make_node("Conv", ["after", "ones"], ["y"], group=channels),
    ]
    x_info = helper.make_tensor_value_info("x", TYPES[x.dtype.type], x.shape)
    y_info = helper.make_tensor_value_info("y", TYPES[x.dtype.type], None)
    graph = helper.make_graph(nodes, "between", [x_info], [y_info], [ones])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)


def special(x: Any) -> Any:
    """Return x with a NaN, infinities, a number whose sums overflow float16, and subnormal numbers."""
    flat = x.reshape(-1)
    flat[5], flat[70], flat[131], flat[257] = np.nan, np.inf, -np.inf, 6e4
    flat[400:420] = np.float32(3e-39)
    return x


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *itertools.product(CASES, (np.float32, np.float16)),
        ("average", ml_dtypes.bfloat16),
        ("maximum", ml_dtypes.bfloat16),
    ],
)
def test_bits_are_those_of_the_order_of_the_model(case: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, shape, attributes, results = CASES[case]
    monkeypatch.setattr(OpenDevice, "properties", lambda self: FEW)
    x = special(noise(*shape, seed=3)).astype(dtype)
    model = model_between_convolutions(operator, x, attributes)
    (source,) = [spec.source for spec in kernels(model, FEW) if spec.name == operator.lower()]
    sums = re.findall(r"total = registers_f32\((\d+)\)", source)
    assert sums == [str(results * 4)] if dtype is np.float32 else sums
    (actual,) = run_model(model, [x])
    (wanted,) = run_op(operator, [x], attributes)
    np.testing.assert_array_equal(actual.view(wanted.dtype), wanted)


def test_what_no_thread_can_have_is_pooled_element_by_element() -> None:
    """Large windows, channels that are not a multiple of a vector, and dilated MaxPool use the general kernel."""
    for shape, attributes in (
        ((2, 64, 28, 28), {"kernel_shape": [6, 6]}),
        ((2, 6, 28, 28), {"kernel_shape": [3, 3]}),
        ((2, 64, 28, 28), {"kernel_shape": [3, 3], "dilations": [2, 2]}),
    ):
        x = np.zeros(shape, np.float32)
        specs = kernels(model_between_convolutions("MaxPool", x, attributes), GPU)
        (source,) = [spec.source for spec in specs if spec.name == "maxpool"]
        assert "registers_f32" not in source


@pytest.mark.parametrize(("operator", "attributes"), [("MaxPool", STEPS), ("AveragePool", PADDED)])
def test_loads_are_vectors_and_in_flight_together(operator: str, attributes: dict[str, Any]) -> None:
    x = np.zeros((32, 192, 56, 56), np.float32)
    specs = kernels(model_between_convolutions(operator, x, attributes), GPU)
    specs = [spec for spec in specs if spec.name == operator.lower()]
    for capability in ((8, 0), (9, 0), (10, 0), (12, 0)):
        (code,) = sass.code_of(specs, Target.cuda(*capability))
        assert code.spilled == 0
        if sass.disassembler() is not None:
            assert {name for name in code.mix if name.startswith(("LDG", "LDL"))} == {"LDG.128"}, code.mix
            assert code.rounds < 0.3
