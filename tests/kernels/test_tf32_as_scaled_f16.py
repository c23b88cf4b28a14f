"""Operands of TF32 GEMMs stored as float16 with a scale per row: results, and which GEMMs read them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper, parser
from onnx.reference import ReferenceEvaluator

from contributed import Array, noise
from emulator_harness import configured
from kernel_harness import run_model
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.estimate.gather import LIBRARIES, work_of_model
from ort_cuda_plugin.estimate.work import KernelStep, LibraryStep
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.passes.table import KERNELS
from ort_cuda_plugin.program.lowering.context import DeviceProperties, LoweringOptions

GPU = DeviceProperties.gpu((9, 0))
DEPTH, COLUMNS, HEADS = 64, 96, 4
NORM = "n = LayerNormalization(x, scale, shift)"
PRODUCT = f"{NORM} y = MatMul(n, w)"
FEED_FORWARD = f"""{NORM} h = MatMul(n, w) i = Add(h, b) r = Div(i, root) e = Erf(r) o = Add(e, one) g = Mul(i, o)
    f = Mul(g, half) y = MatMul(f, v)"""
LAYER = f"""{NORM}
    q0 = MatMul(n, wq) q1 = Add(q0, bq) q2 = Reshape(q1, split) q = Transpose<perm = [0, 2, 1, 3]>(q2)
    k0 = MatMul(n, wk) k2 = Reshape(k0, split) k = Transpose<perm = [0, 2, 3, 1]>(k2)
    v0 = MatMul(n, wv) v1 = Add(v0, bq) v2 = Reshape(v1, split) v = Transpose<perm = [0, 2, 1, 3]>(v2)
    s0 = MatMul(q, k) s1 = Div(s0, root) s2 = Softmax<axis = -1>(MASKED) a0 = MatMul(s2, v)
    a1 = Transpose<perm = [0, 2, 1, 3]>(a0) a = Reshape(a1, joined) p = MatMul(a, c) y = Add(p, x)"""


def attention(masked: bool) -> str:
    return (
        LAYER.replace("s2 =", "m = Add(s1, mask) s2 =").replace("MASKED", "m")
        if masked
        else LAYER.replace("MASKED", "s1")
    )


def network(body: str = PRODUCT, rows: str = "3, 40", outputs: str = "y", *, depth: int = DEPTH) -> ModelProto:
    """Return a model whose input is x. Weights are constants, some with very different magnitudes, to test scaling."""
    results = ", ".join(f"float {name}" for name in outputs.split())
    text = f'<ir_version: 10, opset_import: ["" : 20]> g (float[{rows}, {depth}] x) => ({results}) {{ {body} }}'
    model = parser.parse_model(text)
    known: dict[str, Array] = {
        "scale": noise(depth, seed=2),
        "shift": noise(depth, seed=4),
        "w": noise(depth, COLUMNS, seed=3),
        "b": noise(COLUMNS, seed=7),
        "v": noise(COLUMNS, DEPTH, seed=5) / 8,
        "c": noise(depth, depth, seed=6),
        "wq": noise(depth, depth, seed=8),
        "wk": noise(depth, depth, seed=9),
        "wv": noise(depth, depth, seed=10),
        "bq": noise(depth, seed=11),
        "mask": np.triu(np.full((40, 40), np.finfo(np.float32).min), 1),
        "root": np.array(np.sqrt(2) if "Erf" in body else depth * 2, np.float32),
        "one": np.array(1, np.float32),
        "half": np.array(0.5, np.float32),
    }
    known["scale"][:2] = (4, 1e-20) if "Softmax" in body else (1e6, 1e-20)
    known["w"][:, 3] *= 1e-30
    sizes = {"split": [0, 0, HEADS, depth // HEADS], "joined": [0, 0, depth]}
    used = {name for node in model.graph.node for name in node.input}
    tensors = {**known, **{name: np.array(size) for name, size in sizes.items()}}
    for name in sorted(used & tensors.keys()):
        model.graph.initializer.append(numpy_helper.from_array(tensors[name], name))
    return model


def kernels(model: ModelProto, **options: Any) -> list[str]:
    return [spec.name for spec in CompiledCluster(read_model(model), GPU, LoweringOptions(**options)).prepare().kernels]


def of_tensor_cores(model: ModelProto, **options: Any) -> list[str]:
    return [name for name in kernels(model, **options) if "_mma" in name or name.startswith("matrix_")]


def weights(model: ModelProto) -> dict[str, Array]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def normalized(x: Array, known: dict[str, Array]) -> Array:
    x = x.astype(np.float64)
    with np.errstate(invalid="ignore"):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * known["scale"] + known["shift"]


def run(monkeypatch: pytest.MonkeyPatch, model: ModelProto, x: Array) -> list[Array]:
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    with configured(check=1):
        return run_model(model, [x])


def as_float64(model: ModelProto, x: Array) -> Array:
    """Return the model's result in float64."""
    wide = ModelProto()
    wide.CopyFrom(model)
    for value in (*wide.graph.input, *wide.graph.output):
        value.type.tensor_type.elem_type = 11
    for tensor in wide.graph.initializer:
        if tensor.data_type == 1:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))
    (result,) = ReferenceEvaluator(wide).run(None, {"x": x.astype(np.float64)})
    return np.asarray(result)


def in_tf32(monkeypatch: pytest.MonkeyPatch, model: ModelProto, x: Array) -> Array:
    """Return the result if each GEMM reads float32 and rounds it to TF32 itself."""
    others = [each for each in KERNELS if each.name != "tf32_as_scaled_f16"]
    monkeypatch.setattr("ort_cuda_plugin.clusters.launches.KERNELS", others)
    (result,) = run(monkeypatch, model, x)
    monkeypatch.undo()
    return result


def test_products_are_those_of_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GEMMs read rows that are stored once; a row has huge values, another one only zeros."""
    model = network(f"{PRODUCT} z = MatMul(n, c)", outputs="y z")
    assert all("_f16" in name and "tf32" not in name for name in of_tensor_cores(model))
    known, x = weights(model), noise(3, 40, DEPTH, seed=1)
    x[0, 0], x[1, 1] = 0, 3e18
    rows = normalized(x, known)
    for found, w in zip(run(monkeypatch, model, x), ("w", "c"), strict=True):
        error, size = np.abs(found - rows @ known[w]), np.abs(rows) @ np.abs(known[w])
        assert (error <= (2**-10 + DEPTH * 2**-22) * size).all(), w


@pytest.mark.parametrize(
    "body", [FEED_FORWARD, attention(False), attention(True)], ids=["feed forward", "attention", "masked attention"]
)
def test_what_follows_products_is_as_exact_as_with_tf32(monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    model, x = network(body), noise(3, 40, DEPTH, seed=1)
    exact = as_float64(model, x)
    rounded = in_tf32(monkeypatch, model, x)
    names = of_tensor_cores(model)
    assert all("_f16" in name and "f32" not in name for name in names), names
    (found,) = run(monkeypatch, model, x)
    errors = [np.abs(each - exact) for each in (found, rounded)]
    assert errors[0].mean() < 1.2 * errors[1].mean()
    assert errors[0].max() < 1.5 * errors[1].max()


@pytest.mark.parametrize("body", [PRODUCT, FEED_FORWARD], ids=["product", "feed forward"])
def test_what_is_no_number_stays_in_its_row(monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    x = noise(3, 40, DEPTH, seed=1)
    x[1, 3, 5], x[2, 4, 6] = np.nan, np.inf
    (found,) = run(monkeypatch, network(body), x)
    lost = ~np.isfinite(found)
    assert lost[1, 3].all()
    assert lost[2, 4].all()
    assert lost.sum() == 2 * found.shape[-1]


def test_other_readers_have_the_rows_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network(f"{NORM} m = MatMul(n, c) y = Add(m, n)")
    known, x = weights(model), noise(3, 40, DEPTH, seed=1)
    assert all("tf32" not in name for name in of_tensor_cores(model))
    rows = normalized(x, known)
    (found,) = run(monkeypatch, model, x)
    size = np.abs(rows) @ np.abs(known["c"])
    assert (
        np.abs(found - (rows @ known["c"] + rows)) <= (2**-10 + DEPTH * 2**-22) * size + 2**-20 * np.abs(rows)
    ).all()


@pytest.mark.parametrize("body", [PRODUCT, attention(False)], ids=["product", "attention"])
def test_sizes_may_be_open(monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    model = network(body, rows="N, M")
    assert all("_f16" in name and "f32" not in name for name in of_tensor_cores(model))
    for shape in ((1, 17), (5, 40)):
        x = noise(*shape, DEPTH, seed=shape[1])
        (found,) = run(monkeypatch, model, x)
        exact = as_float64(model, x)
        assert np.abs(found - exact).mean() < 2**-9 * np.abs(exact).mean()


def divided(factors: str) -> str:
    """Return nodes that divide rows by the root of the mean of the product of ``factors``, then multiply by c."""
    return f"""axes = Constant<value_ints = [-1]>() p = Mul({factors}) m = ReduceMean(p, axes) r = Sqrt(m)
        n = Div(x, r) y = MatMul(n, c)"""


def test_a_root_mean_square_that_nodes_compute_bounds_its_rows() -> None:
    names = of_tensor_cores(network(divided("x, x"), f"{DEPTH}"))
    assert any("_f16" in name and "tf32" not in name for name in names), names


@pytest.mark.parametrize(
    ("body", "options"),
    [
        pytest.param(PRODUCT, {"use_tf32": False}, id="no TF32"),
        pytest.param(PRODUCT, {"fusion": False}, id="each step as it is"),
        pytest.param("n = Relu(x) y = MatMul(n, w)", {}, id="no limits"),
        pytest.param("n = Softmax<axis = 0>(x) y = MatMul(n, w)", {}, id="other rows"),
        pytest.param("n = LayerNormalization(x, scale, shift) y = MatMul(n, x)", {}, id="no known weights"),
        pytest.param("m = LayerNormalization(x, scale, shift) n = Transpose(m) y = MatMul(n, c)", {}, id="columns"),
        pytest.param(divided("x, shift"), {}, id="mean of other products than squares"),
    ],
)
def test_others_are_multiplied_as_they_are(body: str, options: dict[str, Any]) -> None:
    names = of_tensor_cores(network(body, f"{DEPTH}"), **options)
    assert names or not options.get("use_tf32", True)
    assert not any("_f16" in name and "tf32" not in name for name in names), names


def test_half_the_bytes_are_moved() -> None:
    """The GEMM also replaces a library's TF32 call, as it is predicted to take less time."""
    model = network(rows="1, 197", depth=768)
    steps = work_of_model(model, {}, libraries=LIBRARIES).steps
    assert not any(isinstance(step, LibraryStep) for step in steps)
    of_rows, of_product = (step for step in steps if isinstance(step, KernelStep))
    assert of_rows.written_bytes == 197 * 2 * 768
    assert of_product.read_bytes == 197 * 2 * 768 + COLUMNS * (2 * 768 + 4)
