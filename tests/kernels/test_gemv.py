"""GEMV on a GPU: vector loads of weights of any size and address, and when it replaces a library call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from onnx import parser

from kernel_harness import run_model, run_op
from nn_reference import noise
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.compiler.compile import compile_kernel
from ort_cuda_plugin.compiler.targets import Target
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.lowering.context import DeviceProperties

GPU = DeviceProperties(emulated=False)
LIBRARIES = replace(GPU, libraries=frozenset({"cublaslt"}))


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize(
    ("dtype", "rows", "k", "columns"),
    [
        ("float32", 1, 1100, 300),  # a loop with several vectors in flight, then one vector at a time, no scalar tail
        ("float32", 3, 75, 157),  # row lengths that are not multiples of a vector
        ("float16", 2, 264, 40),
        ("float64", 4, 130, 6),
        ("float32", 1, 2, 1),
    ],
    ids=str,
)
def test_rows_of_all_sizes(
    monkeypatch: pytest.MonkeyPatch, dtype: str, rows: int, k: int, columns: int, transposed: int
) -> None:
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    a, b, c = noise(1, (rows, k), dtype), noise(2, (k, columns), dtype), noise(3, (columns,), dtype)
    given = np.ascontiguousarray(b.T) if transposed else b
    (actual,) = run_op("Gemm", [a, given, c], {"transB": transposed}, constant=[1])
    expected = a.astype(np.float64) @ b.astype(np.float64) + c
    tolerance = {"float16": 2e-3, "float32": 1e-5, "float64": 1e-12}[dtype]
    np.testing.assert_allclose(actual, expected, tolerance, 20 * tolerance)


def test_weights_that_begin_between_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    model = parser.parse_model("""<ir_version: 10, opset_import: ["" : 20]> rows
        (float[2, 1, 256] a, float[2, 256, 68] b) => (float[2, 1, 64] y)
        { from = Constant<value_ints = [1]>() to = Constant<value_ints = [65]>() last = Constant<value_ints = [2]>()
          part = Slice(b, from, to, last) y = MatMul(a, part) }""")
    a, b = noise(1, (2, 1, 256)), noise(2, (2, 256, 68))
    (actual,) = run_model(model, [a, b])
    np.testing.assert_allclose(actual, a.astype(np.float64) @ b[:, :, 1:65], 1e-5, 1e-4)


def product_model(rows: int | str, dtype: str, transposed: int) -> Any:
    weights = "[1000, 2048]" if transposed else "[2048, 1000]"
    return parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 20]> product
        ({dtype}[{rows}, 2048] a, {dtype}{weights} b, {dtype}[1000] c) => ({dtype}[{rows}, 1000] y)
        {{ y = Gemm<transB = {transposed}>(a, b, c) }}""")


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_weights_are_read_by_vectors_of_which_several_are_in_flight(dtype: str, transposed: int) -> None:
    plan = CompiledCluster(read_model(product_model(1, dtype, transposed)), GPU).prepare()
    (spec,) = plan.kernels
    image = compile_kernel(spec, Target.cuda(9, 0))
    assert image.metadata["stack_bytes"] == 0
    assert image.metadata.get("spill_store_bytes", 0) == 0
    text = image.ptx.decode()
    first_use = text.index("shfl.sync")
    assert text[:first_use].count("ld.global.v4") >= 4


@pytest.mark.parametrize(("rows", "called"), [(1, False), (2, True), ("N", True)])
def test_one_row_goes_before_a_library(rows: int | str, called: bool) -> None:
    """GEMV replaces the library call only if the number of rows is known to be 1."""
    variant = CompiledCluster(read_model(product_model(rows, "float", 1)), LIBRARIES).prepare()
    assert bool(variant.problems) is called


def test_integers_have_the_general_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    a, b = noise(1, (1, 50), "int32"), noise(2, (50, 70), "int32")
    (actual,) = run_op("MatMul", [a, b])
    np.testing.assert_array_equal(actual, a @ b)


@pytest.mark.parametrize(("rows", "called"), [(1, False), (3, True)])
def test_an_open_number_of_rows_has_a_plan_of_its_own_for_one(rows: int, called: bool) -> None:
    cluster = CompiledCluster(read_model(product_model("N", "float", 1)), LIBRARIES)
    variant = cluster.build([(rows, 2048), (1000, 2048), (1000,)], [])
    assert bool(variant.problems) is called
    assert any(spec.name.startswith("matmul_row") for spec in variant.kernels) is not called


@pytest.mark.parametrize("rows", [1, 3])
def test_accumulators_of_integers_have_their_own_type_in_the_epilogue(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    model = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]>
        g (uint8[{rows}, 40] x, int8[40, 24] w, int32 z) => (int32[m, n] y)
        {{ p = MatMulInteger(x, w) y = Min(p, z) }}"""
    )
    rng = np.random.default_rng(rows)
    x, w = rng.integers(0, 255, (rows, 40)).astype(np.uint8), rng.integers(-128, 127, (40, 24)).astype(np.int8)
    (y,) = run_model(model, [x, w, np.array(77, np.int32)])
    np.testing.assert_array_equal(y, np.minimum(x.astype(np.int32) @ w.astype(np.int32), 77))
