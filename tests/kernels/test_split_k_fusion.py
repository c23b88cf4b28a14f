"""Split-K GEMMs whose partial sums the next step adds up: results, and which GEMMs are split."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

from contributed import Array, noise
from emulator_harness import configured
from kernel_harness import run_model
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.estimate.gather import LIBRARIES, work_of_model
from ort_cuda_plugin.estimate.work import KernelStep
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.passes.fusion import split_k_fusion
from ort_cuda_plugin.program.lowering.context import DeviceProperties

GPU = DeviceProperties.gpu((9, 0))
LAYER = "p = MatMul(x, w) b = Add(p, c) s = Add(b, z) y = LayerNormalization(s, c, c)"


def network(body: str, outputs: str, sizes: tuple[int | str, int, int]) -> ModelProto:
    rows, columns, depth = sizes
    results = ", ".join(f"float16[{rows}, {columns}] {name}" for name in outputs.split())
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 20]> g (float16[{rows}, {depth}] x, float16[{rows}, {columns}] z) =>'
        f" ({results}) {{ {body} }}"
    )
    for name, values in (("w", noise(depth, columns, seed=3) / 8), ("c", noise(columns, seed=4))):
        model.graph.initializer.append(numpy_helper.from_array(values.astype(np.float16), name))
    return model


def kernels(model: ModelProto) -> list[str]:
    return [spec.name for spec in CompiledCluster(read_model(model), GPU).prepare().kernels]


def expected(model: ModelProto, x: Array, z: Array) -> tuple[Array, Array]:
    """Return the sums of product, bias and residual, and these normalized, with c as scale and bias."""
    w, c = (numpy_helper.to_array(tensor).astype(np.float64) for tensor in model.graph.initializer)
    sums = x.astype(np.float64) @ w + c + z
    centered = sums - sums.mean(-1, keepdims=True)
    return sums, centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5) * c + c


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("outputs", "rows"), [("y", 40), ("y s", 40), ("y s", "N")])
def test_the_step_after_a_product_adds_up_its_parts(
    monkeypatch: pytest.MonkeyPatch, outputs: str, rows: int | str, transposed: bool
) -> None:
    """That step also stores the sums if other steps read them. With transB, weights are contiguous along k."""
    monkeypatch.setattr(split_k_fusion, "fused_split_k", lambda ctx, step: 3)
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    model = network(LAYER, outputs, (rows, 48, 192))
    x, z = noise(40, 192, seed=1).astype(np.float16), noise(40, 48, seed=2).astype(np.float16)
    sums, y = expected(model, x, z)
    if transposed:
        model.graph.node[0].CopyFrom(helper.make_node("Gemm", ["x", "w"], ["p"], transB=1))
        w = model.graph.initializer[0]
        w.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(numpy_helper.to_array(w).T), "w"))
    names = kernels(model)
    assert names[-1] == f"{'gemm' if transposed else 'matmul'}_add_add_layernormalization"
    assert len(names) == (2 if rows == 40 else 3)  # a dynamic number of rows adds a kernel for few rows
    with configured(check=1):
        results = run_model(model, [x, z])
    for found, exact in zip(results, (y, sums), strict=False):
        np.testing.assert_allclose(found.astype(np.float64), exact, rtol=2**-9, atol=2**-7)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("p = MatMul(x, w) s = Add(p, c) q = MatMul(s, v) y = LayerNormalization(q, c, c)", id="a product"),
        pytest.param("p = MatMul(x, w) i = Identity(p) y = Add(p, i)", id="nothing reads it"),
    ],
)
def test_products_stay_whole_whose_reader_is_no_other_step(monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    monkeypatch.setattr(split_k_fusion, "fused_split_k", lambda ctx, step: 3)
    model = network(body, "y", (40, 48, 192))
    if "v)" in body:
        model.graph.initializer.append(numpy_helper.from_array(np.ones((48, 48), np.float16), "v"))
    reader = kernels(model)[-1]
    assert sum("_mma" in name for name in kernels(model)) == body.count("MatMul"), reader


@pytest.mark.parametrize(
    ("sizes", "is_cut"), [((197, 768, 3072), True), ((197, 768, 768), False), ((4096, 768, 3072), False)]
)
def test_few_tiles_of_long_products_are_cut(sizes: tuple[int, int, int], is_cut: bool) -> None:
    """Split-K, with the reduction in the normalization, is used where a library call is predicted to take longer."""
    steps = work_of_model(network(LAYER, "y s", sizes), {}, libraries=LIBRARIES).steps
    rows, columns, _ = sizes
    parts = max(step.written_bytes for step in steps if isinstance(step, KernelStep)) / (4 * rows * columns)
    assert (parts >= 2) == is_cut


def test_float32_stays_whole() -> None:
    """TF32 GEMMs whose operands have no known bounds are not split."""
    model = network(LAYER, "y s", (197, 768, 3072))
    for info in (*model.graph.input, *model.graph.output):
        info.type.tensor_type.elem_type = TensorProto.FLOAT
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))
    steps = work_of_model(model, {}, libraries=frozenset()).steps
    assert max(step.written_bytes for step in steps) == 4 * 197 * 768
