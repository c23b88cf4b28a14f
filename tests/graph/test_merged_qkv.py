"""Horizontal fusion of Q, K and V projections whose biases and scales differ."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from onnx import ModelProto, TensorProto, numpy_helper, parser
from onnx.reference import ReferenceEvaluator

from contexts import compile_model, load
from contributed import Array, noise
from kernel_harness import run_model
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.lowering.context import DeviceProperties
from ort_cuda_plugin.program.steps.steps import Contract

TYPES = {"float": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
QUERIES = "q0 = MatMul(x, wq) q = Add(q0, bq)"
KEYS = "k = MatMul(x, wk)"
VALUES = "v0 = MatMul(x, wv) v = Add(v0, bv)"
ATTENTION = """qh = Reshape(q, heads) qt = Transpose<perm = [0, 2, 1, 3]>(qh) kh = Reshape(k, heads)
    kt = Transpose<perm = [0, 2, 3, 1]>(kh) vh = Reshape(v, heads) vt = Transpose<perm = [0, 2, 1, 3]>(vh)
    s = MatMul(qt, kt) p = Softmax(s) y = MatMul(p, vt)"""
"""Attention with two heads over q, k and v."""


def network(*lines: str, dtype: str = "float", widths: tuple[int, int, int] = (16, 16, 16)) -> ModelProto:
    body = " ".join((*lines, ATTENTION))
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 22]> g ({dtype}[2, 9, 24] x)'
        f" => ({dtype}[2, 2, 9, {widths[2] // 2}] y) {{ {body} }}"
    )
    for seed, (name, width) in enumerate(zip("qkv", widths, strict=True)):
        for kind, shape in (("w", (24, width)), ("b", (width,)), ("c", (width,)), ("d", ())):
            values = (noise(*shape, seed=4 * seed + len(shape)) / 6).astype(TYPES[dtype])
            if kind + name in body:
                model.graph.initializer.append(numpy_helper.from_array(values, kind + name))
    model.graph.initializer.append(numpy_helper.from_array(np.array([2, 9, 2, -1]), "heads"))
    return model


def products_of_x(model: ModelProto) -> list[Contract]:
    found: list[Contract] = []

    def watch(name: str, steps: object) -> None:
        if name == "horizontal_gemm":
            assert isinstance(steps, (list, tuple))
            found[:] = [step for step in steps if isinstance(step, Contract) and step.b.is_constant]

    cluster = CompiledCluster(read_model(model), DeviceProperties())
    cluster.watch = watch
    cluster.prepare()
    return found


def expected(model: ModelProto, x: Array) -> Array:
    wide = ModelProto()
    wide.CopyFrom(model)
    for tensor in wide.graph.initializer:
        if tensor.data_type != TensorProto.INT64:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))
    for info in (*wide.graph.input, *wide.graph.output):
        info.type.tensor_type.elem_type = TensorProto.DOUBLE
    (y,) = ReferenceEvaluator(wide).run(None, {"x": x.astype(np.float64)})
    return np.asarray(y)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "lines",
    [
        pytest.param((QUERIES, KEYS, VALUES), id="keys without a bias"),
        pytest.param((KEYS, VALUES, QUERIES), id="the first one without a bias"),
        pytest.param((QUERIES + " ", KEYS, "v = MatMul(x, wv)"), id="queries alone with a bias"),
        pytest.param(("q0 = MatMul(x, wq) q1 = Add(q0, bq) q = Mul(q1, cq)", KEYS, VALUES), id="a bias and factors"),
    ],
)
def test_what_some_lack_is_added_without_a_change(lines: tuple[str, ...], dtype: str) -> None:
    model = network(*lines, dtype=dtype)
    assert len(products_of_x(model)) == 1
    x = noise(2, 9, 24, seed=20).astype(TYPES[dtype])
    tolerance = {"float": 1e-5, "float16": 4e-3, "bfloat16": 4e-2}[dtype]
    (y,) = run_model(model, [x])
    y = y.view(TYPES[dtype])  # run_model returns bfloat16 as uint16
    np.testing.assert_allclose(y.astype(np.float64), expected(model, x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("lines", "count"),
    [
        pytest.param((QUERIES, "k0 = MatMul(x, wk) k = Relu(k0)", VALUES), 2, id="another function"),
        pytest.param((QUERIES, "k0 = MatMul(x, wk) k = Mul(k0, ck)", VALUES), 2, id="a factor in place of a bias"),
        pytest.param(("q0 = MatMul(x, wq) q = Sub(q0, bq)", KEYS, VALUES), 2, id="a difference"),
    ],
)
def test_what_differs_otherwise_stays_apart(lines: tuple[str, ...], count: int) -> None:
    model = network(*lines)
    assert len(products_of_x(model)) == count
    x = noise(2, 9, 24, seed=20)
    np.testing.assert_allclose(run_model(model, [x])[0], expected(model, x), rtol=1e-5, atol=1e-5)


def test_widths_may_differ() -> None:
    """The weights wq and wk have 16 columns, wv has 40. All three become one GEMM."""
    model = network(QUERIES, KEYS, "v = MatMul(x, wv)", widths=(16, 16, 40))
    assert len(products_of_x(model)) == 1
    x = noise(2, 9, 24, seed=20)
    np.testing.assert_allclose(run_model(model, [x])[0], expected(model, x), rtol=1e-5, atol=1e-5)


def test_a_compiled_model_has_what_was_added(tmp_path: Path) -> None:
    model = network(QUERIES, KEYS, VALUES)
    compile_model(model.SerializeToString(), tmp_path / "m_ctx.onnx")
    x = noise(2, 9, 24, seed=20)
    (y,) = load(tmp_path / "m_ctx.onnx").run(None, {"x": x})
    np.testing.assert_allclose(np.asarray(y), expected(model, x), rtol=1e-5, atol=1e-5)
