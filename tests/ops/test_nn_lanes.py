"""GEMV and GEMMs with few rows or columns, in the emulated device's vectorized kernels and in a GPU's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from kernel_harness import Array, run_model, run_op
from nn_reference import noise
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.expressions.symbolic import hint
from ort_cuda_plugin.program.lowering.context import DeviceProperties
from ort_cuda_plugin.program.steps.steps import Contract


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize(
    ("dtype", "rows", "columns", "emulated"),
    [("float32", 3, 157, True), ("float16", 2, 10, True), ("float64", 1, 70, True), ("float32", 3, 157, False)],
)
def test_products_of_few_rows(
    monkeypatch: pytest.MonkeyPatch, dtype: str, rows: int, columns: int, emulated: bool, transposed: int
) -> None:
    """Compare sizes that are not multiples of the kernels' strips of columns and k. The bias must be added once."""
    monkeypatch.setattr(OpenDevice, "properties", lambda self: DeviceProperties(emulated=emulated))
    a, b, c = noise(1, (rows, 75), dtype), noise(2, (75, columns), dtype), noise(3, (columns,), dtype)
    given = np.ascontiguousarray(b.T) if transposed else b
    (actual,) = run_op("Gemm", [a, given, c], {"transB": transposed}, constant=[1])
    expected = a.astype(np.float64) @ b.astype(np.float64) + c
    tolerance = {"float16": 2e-3, "float32": 1e-5, "float64": 1e-12}[dtype]
    np.testing.assert_allclose(actual, expected, tolerance, 10 * tolerance)


def parsed(text: str, **constants: Array) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 21]>{text}')
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    return model


def compiled(model: onnx.ModelProto) -> tuple[list[str], list[Contract]]:
    """Return the sources of the model's kernels, and its GEMM steps after the last pass."""
    products: list[Contract] = []

    def watch(name: str, steps: Sequence[object]) -> None:
        if name == "fold_dequantize":
            products[:] = [step for step in steps if isinstance(step, Contract)]

    cluster = CompiledCluster(read_model(model, False), DeviceProperties(emulated=True))
    cluster.watch = watch
    return [spec.source for spec in cluster.prepare().kernels], products


@pytest.mark.parametrize("columns", [157, 9])
@pytest.mark.parametrize("transposed", ["", "Transpose"])
def test_quantized_operands_of_few_rows_meet_no_barrier(transposed: str, columns: int) -> None:
    """The kernels have no barrier: on the emulated device, each barrier costs a fiber switch per thread."""
    rng = np.random.default_rng(columns)
    codes, weights = rng.integers(0, 256, (3, 75)).astype(np.uint8), rng.integers(-127, 128, (75, columns))
    scales, zeros = rng.random(columns).astype(np.float32), rng.integers(-9, 9, columns).astype(np.int8)
    w = weights.astype(np.int8)
    body = "f = DequantizeLinear(x, xs, xz) v = DequantizeLinear<axis = -1>(w, ws, wz) y = MatMul(f, v)"
    if transposed:
        w = np.ascontiguousarray(w.T)
        body = body.replace("<axis = -1>(w,", "<axis = 0>(w,").replace("MatMul(f, v)", "Gemm<transB = 1>(f, v)")
    model = parsed(
        f"g (uint8[3, 75] x) => (float[3, {columns}] y) {{ {body} }}",
        w=w, ws=scales, wz=zeros, xs=np.asarray(0.3, np.float32), xz=np.asarray(119, np.uint8),
    )  # fmt: skip
    sources, (product,) = compiled(model)
    assert all(product.conversions)
    assert all("syncthreads" not in source for source in sources)
    (actual,) = run_model(model, [codes])
    expected = 0.3 * (codes.astype(float) - 119) @ (scales * (weights - zeros.astype(float)))
    np.testing.assert_allclose(actual, expected, 1e-5, 1e-4 * np.abs(expected).max())


def test_rows_behind_a_transposition_stay_those_of_one_product() -> None:
    """The transposed uint8 input is copied to a contiguous layout; otherwise the product would be a GEMV per batch."""
    constants = {"w": noise(1, (24, 40)), "xs": np.asarray(0.3, np.float32), "xz": np.asarray(119, np.uint8)}
    body = "t = Transpose<perm = [1, 0, 2]>(x) f = DequantizeLinear(t, xs, xz) y = MatMul(f, w)"
    model = parsed(f"g (uint8[3, 14, 24] x) => (float[14, 3, 40] y) {{ {body} }}", **constants)
    _, (product,) = compiled(model)
    assert product.a.is_contiguous
    codes = np.random.default_rng(3).integers(0, 256, (3, 14, 24)).astype(np.uint8)
    (actual,) = run_model(model, [codes])
    expected = 0.3 * (codes.astype(float) - 119).transpose(1, 0, 2) @ constants["w"].astype(float)
    np.testing.assert_allclose(actual, expected, 1e-5, 1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_the_inputs_of_a_recurrence_are_multiplied_in_the_order_of_memory(kind: str) -> None:
    """The input projections of all steps are one GEMM of shape [sequences, steps], although a Transpose precedes."""
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[kind]
    w, r = noise(1, (1, gates * 5, 12)), noise(2, (1, gates * 5, 5))
    body = f"t = Transpose<perm = [2, 0, 1]>(x) y, h = {kind}<hidden_size = 5>(t, w, r)"
    model = parsed(f"g (float[3, 12, 14] x) => (float[14, 1, 3, 5] y, float[1, 3, 5] h) {{ {body} }}", w=w, r=r)
    _, products = compiled(model)
    assert [[hint(dim) for dim in product.shape[:-1]] for product in products] == [[3, 14]]
    x = noise(3, (3, 12, 14))
    wanted = run_op(kind, [np.ascontiguousarray(x.transpose(2, 0, 1)), w, r], {"hidden_size": 5}, 21, outputs=2)
    for actual, expected in zip(run_model(model, [x]), wanted, strict=True):
        np.testing.assert_allclose(actual, expected, 1e-5, 1e-6)


@pytest.mark.parametrize(
    ("a", "b"),
    [((3, 50, 75), (75, 1)), ((60, 75), (75, 3)), ((2, 40, 33), (2, 33, 2)), ((2, 1, 9, 40), (1, 4, 40, 1))],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_products_of_few_columns_meet_no_barrier(a: tuple[int, ...], b: tuple[int, ...], dynamic: bool) -> None:
    """A GEMM with few columns is computed as the transposed GEMM with few rows, and has no barrier either."""
    x, w = noise(1, a), noise(2, b)
    (actual,) = run_op("MatMul", [x, w], constant=[1], dynamic=dynamic)
    np.testing.assert_allclose(actual, x.astype(float) @ w.astype(float), 1e-5, 1e-5)
    rank = f"[{', '.join(f'd{axis}' for axis in range(len(a)))}]"
    model = parsed(f"g (float{[*a]} x) => (float{rank} y) {{ y = MatMul(x, w) }}", w=w)
    sources, _ = compiled(model)
    assert all("syncthreads" not in source for source in sources)


def test_few_columns_of_quantized_operands_have_a_bias() -> None:
    rng = np.random.default_rng(5)
    x, weights = rng.integers(0, 256, (2, 30, 64)).astype(np.uint8), rng.integers(-127, 128, (64, 2)).astype(np.int8)
    scales, bias = rng.random(2).astype(np.float32), rng.random((30, 2)).astype(np.float32)
    model = parsed(
        """g (uint8[2, 30, 64] x) => (float[2, 30, 2] y) {
        f = DequantizeLinear(x, xs, xz) v = DequantizeLinear<axis = -1>(w, ws) p = MatMul(f, v) y = Add(p, b) }""",
        w=weights, ws=scales, b=bias, xs=np.asarray(0.3, np.float32), xz=np.asarray(119, np.uint8),
    )  # fmt: skip
    sources, _ = compiled(model)
    assert all("syncthreads" not in source for source in sources)
    (actual,) = run_model(model, [x])
    expected = 0.3 * (x.astype(float) - 119) @ (scales * weights.astype(float)) + bias
    np.testing.assert_allclose(actual, expected, 1e-5, 1e-4 * np.abs(expected).max())
