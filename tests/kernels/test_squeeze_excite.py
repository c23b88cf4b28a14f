"""Squeeze-and-excitation: two pointwise convolutions of one output pixel are one kernel on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper, parser

from kernel_harness import run_model
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.lowering.context import DeviceProperties

GPU = DeviceProperties(emulated=False)
WEIGHTED = """p = GlobalAveragePool(x) h = Conv(p, w1, b1) s = Sigmoid(h) a = Mul(h, s) g = Conv(a, w2, b2)
    t = Sigmoid(g) y = Mul(x, t)"""


def model(dtype: str, channels: int, hidden: int, nodes: str = WEIGHTED, rows: int = 0, images: int = 3) -> ModelProto:
    rows = rows or channels
    result = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 20]> weighted
        ({dtype}[{images}, {channels}, 3, 2] x) => ({dtype}[{images}, {rows}, 3, 2] y) {{ {nodes} }}"""
    )
    rng = np.random.default_rng(channels)
    kind = np.float16 if dtype == "float16" else np.float32
    shapes = {"w1": (hidden, channels, 1, 1), "b1": (hidden,), "w2": (rows, hidden, 1, 1), "b2": (rows,)}
    for name, shape in shapes.items():
        values = (rng.standard_normal(shape) / np.sqrt(shape[1] if len(shape) > 1 else 1)).astype(kind)
        result.graph.initializer.append(numpy_helper.from_array(values, name))
    return result


def expected(network: ModelProto, x: np.ndarray) -> np.ndarray:
    w1, b1, w2, b2 = (numpy_helper.to_array(w).astype(np.float64) for w in network.graph.initializer)
    h = x.astype(np.float64).mean((2, 3)) @ w1[:, :, 0, 0].T + b1
    g = (h / (1 + np.exp(-h))) @ w2[:, :, 0, 0].T + b2
    return np.asarray(x / (1 + np.exp(-g))[:, :, None, None])


@pytest.mark.parametrize("dynamic", [False, True], ids=["known", "dynamic"])
@pytest.mark.parametrize(
    ("dtype", "channels", "hidden"),
    [("float16", 144, 6), ("float16", 1152, 48), ("float", 672, 28), ("float", 7, 3), ("float16", 1, 1)],
)
def test_channels_are_weighted(
    dtype: str, channels: int, hidden: int, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    network = model(dtype, channels, hidden)
    kind = np.float16 if dtype == "float16" else np.float32
    x = np.random.default_rng(0).standard_normal((3, channels, 3, 2)).astype(kind)
    (y,) = run_model(network, [x], dynamic)
    tolerance = 1e-2 if dtype == "float16" else 1e-5
    np.testing.assert_allclose(y, expected(network, x), rtol=tolerance, atol=tolerance)


def kernels(network: ModelProto) -> list[str]:
    return [kernel.name for kernel in CompiledCluster(read_model(network), GPU).prepare().kernels]


@pytest.mark.parametrize(
    ("network", "is_chained"),
    [
        (model("float16", 96, 4), True),
        # Every block would load the whole first matrix: large matrices or many blocks take longer than library calls.
        (model("float", 960, 240), False),
        (model("float", 96, 4, images=1000), False),
        # The hidden channels have a second reader: another step, or the second convolution's epilogue.
        (model("float", 8, 8, WEIGHTED.replace("y = Mul(x, t)", "u = Mul(x, t) y = Add(u, a)")), False),
        (
            model(
                "float",
                8,
                8,
                WEIGHTED.replace("Conv(a, w2, b2)", "Conv(a, w2, b2) c = Add(g, a)").replace("(g)", "(c)"),
            ),
            False,
        ),
        (model("float", 8, 2, WEIGHTED.replace("Conv(a", "Conv<strides = [2, 2], pads = [0, 0, 1, 1]>(a")), False),
    ],
    ids=["chained", "large", "many", "read", "added", "padded"],
)
def test_which_are_one_kernel(network: ModelProto, is_chained: bool) -> None:
    found = kernels(network)
    assert any("conv" in name and name.count("conv") == 2 for name in found) == is_chained, found
