"""The kernels that the chapters of the architecture name in their examples are those that the examples get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from onnx import numpy_helper, parser

from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.model.ir import Array, DType
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.lowering.context import DeviceProperties
from ort_cuda_plugin.program.steps.trace import Launch, LibraryCall, Step

CHAPTERS = Path(__file__).resolve().parents[2] / "docs" / "architecture"
LIBRARY = "library call"
DEVICES = {
    "H100": DeviceProperties.gpu((9, 0), 132),
    "H100 with libraries": DeviceProperties.gpu((9, 0), 132, frozenset({"cublaslt", "cudnn"})),
    "emulated": DeviceProperties(),
}


@dataclass(frozen=True)
class Example:
    """A model, and the kernel that a chapter names for it; ``weights`` are the shapes of its initializers."""

    chapter: str
    device: str
    kernel: str
    text: str
    weights: Mapping[str, Sequence[int]] = field(default_factory=dict)
    dtype: DType = DType.FLOAT16


def product(rows: int, depth: int, columns: int, dtype: str = "float16") -> str:
    return f"m ({dtype}[{rows}, {depth}] x) => ({dtype}[{rows}, {columns}] y) {{ y = MatMul (x, w) }}"


def convolution(images: int, channels: int, side: int, stride: int, dtype: str) -> str:
    return (
        f"m ({dtype}[{images}, {channels}, {side}, {side}] x) => ({dtype}[{images}, n, a, b] y) "
        f"{{ y = Conv <pads = [1, 1, 1, 1], strides = [{stride}, {stride}]> (x, w) }}"
    )


ATTENTION = """m (float16[1, 12, 128, 64] q, float16[1, 12, 128, 64] k, float16[1, 12, 128, 64] v)
    => (float16[1, 12, 128, 64] y) {
        turned = Transpose <perm = [0, 1, 3, 2]> (k)
        scores = MatMul (q, turned)
        scaled = Mul (scores, scale)
        weights = Softmax <axis = -1> (scaled)
        y = MatMul (weights, v)
    }"""
TOP = """m (float[4, 50000] x) => (float[4, 8] y, int64[4, 8] i) {
        count = Constant <value_ints = [8]> ()
        y, i = TopK (x, count)
    }"""
LSTM = "m (float[128, 4, 256] x) => (float[128, 1, 4, 256] y) { y = LSTM <hidden_size = 256> (x, w, r) }"
GATES = {"w": (1, 1024, 256), "r": (1, 1024, 256)}
IMAGE = {"w": (64, 64, 3, 3)}
EXAMPLES = [
    Example("gemm", "H100 with libraries", "matmul_row_n16_f16", product(1, 768, 3072), {"w": (768, 3072)}),
    Example("gemm", "H100 with libraries", "matmul_mma_teams8_32x32x32_f16", product(128, 768, 768), {"w": (768, 768)}),
    Example("gemm", "H100 with libraries", LIBRARY, product(4096, 4096, 4096), {"w": (4096, 4096)}),
    Example(
        "gemm",
        "H100",
        "matmul_mma_teams8_32x32x32_tf32",
        product(128, 768, 768, "float"),
        {"w": (768, 768)},
        DType.FLOAT32,
    ),
    Example("gemm", "emulated", "matmul_lanes_k32_f32", product(4096, 64, 1, "float"), {"w": (64, 1)}, DType.FLOAT32),
    Example(
        "emulated_device",
        "emulated",
        "matmul_64x64x16_f32",
        product(4096, 64, 64, "float"),
        {"w": (64, 64)},
        DType.FLOAT32,
    ),
    Example("schedules", "H100 with libraries", LIBRARY, product(8192, 768, 768), {"w": (768, 768)}),
    Example("convolution", "H100 with libraries", LIBRARY, convolution(32, 64, 56, 1, "float16"), IMAGE),
    Example("convolution", "H100", "conv2d_mma_teams2_192x64x32_f16", convolution(32, 64, 56, 1, "float16"), IMAGE),
    Example(
        "convolution",
        "H100 with libraries",
        "conv2d_mma_teams8_48x32x32_f16",
        convolution(1, 64, 56, 1, "float16"),
        IMAGE,
    ),
    Example("convolution", "emulated", "conv2d_64x64x16_f32", convolution(1, 64, 56, 1, "float"), IMAGE, DType.FLOAT32),
    Example(
        "convolution",
        "emulated",
        "conv2d_8x16_f32",
        convolution(1, 3, 224, 2, "float"),
        {"w": (16, 3, 3, 3)},
        DType.FLOAT32,
    ),
    Example("attention", "H100", "matrix_stream_16x128x64_8", ATTENTION, {"scale": ()}),
    Example("attention", "emulated", "attention_32x64x64_resident", ATTENTION, {"scale": ()}),
    Example("reductions", "H100", "select_f32_4096", TOP),
    Example("recurrences", "H100", "matmul_mma_teams2_64x64x32_tf32", LSTM, GATES, DType.FLOAT32),
    Example("recurrences", "emulated", "matmul_64x64x16_f32", LSTM, GATES, DType.FLOAT32),
]
NOT_NAMED = {LIBRARY, "select_f32_4096"}
"""Kernels that a chapter describes but does not name."""


def kernels(example: Example) -> set[str]:
    """Return the names of all kernels that the example launches."""
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["" : 20]> {example.text}')
    for name, shape in example.weights.items():
        array: Array = np.asarray(np.random.default_rng(0).standard_normal(shape)).astype(example.dtype.numpy)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    found: set[str] = set()

    def watch(name: str, steps: Sequence[Step]) -> None:
        found.update(step.kernel.name for step in steps if isinstance(step, Launch))
        found.update(LIBRARY for step in steps if isinstance(step, LibraryCall))

    cluster = CompiledCluster(read_model(model), DEVICES[example.device])
    cluster.watch = watch
    cluster.prepare()
    return found


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: f"{one.chapter}-{one.kernel}-{one.device}")
def test_an_example_gets_the_kernel_that_its_chapter_names(example: Example) -> None:
    assert any(name.startswith(example.kernel) for name in kernels(example))
    assert example.kernel in NOT_NAMED or example.kernel in (CHAPTERS / f"{example.chapter}.md").read_text()
