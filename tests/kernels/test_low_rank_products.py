"""Products of low rank in the accumulators of another product, as LoRA adapters are: results of each kernel."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from contributed import Array, noise
from kernel_harness import run_model
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.kernels.gemm.tile_shapes import TileConfig, tile_configs
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.lowering.context import DeviceProperties
from ort_cuda_plugin.schedule import gemm

GPU = DeviceProperties.gpu((9, 0))
EMULATED = DeviceProperties()
PLAIN = "base = MatMul(x, w) down = MatMul(x, a) up = MatMul(down, b) y = Add(base, up)"
SCALED = "base = MatMul(x, w) down = MatMul(x, a) up = MatMul(down, b) more = Mul(up, s) y = Add(more, base)"
TRANSPOSED = """u = Transpose<perm = [1, 0]>(w) base = MatMul(x, u) down = MatMul(x, a) c = Transpose<perm = [1, 0]>(b)
    up = MatMul(down, c) y = Add(base, up)"""
FINISHED = "base = Gemm(x, w, v) down = MatMul(x, a) up = MatMul(down, b) sum = Add(base, up) y = Relu(sum)"
TYPES = {"float": np.float32, "float16": np.float16}


def lora(body: str, dtype: str, depth: int, columns: int, rank: str = "r") -> onnx.ModelProto:
    """Return a model with constant weights, whose inputs a and b are an adapter of any rank."""
    b = f"{columns}, {rank}" if body == TRANSPOSED else f"{rank}, {columns}"
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 22]> g ({dtype}[rows, {depth}] x, {dtype}[{depth}, {rank}] a,'
        f" {dtype}[{b}] b) => ({dtype}[rows, {columns}] y) {{ {body} }}"
    )
    shape = (columns, depth) if body == TRANSPOSED else (depth, columns)
    constants = {"w": noise(*shape, seed=3), "s": np.array(0.5), "v": noise(columns, seed=4)}
    for name, value in constants.items():
        model.graph.initializer.append(numpy_helper.from_array(value.astype(TYPES[dtype]), name))
    return model


def feeds(dtype: str, rows: int, depth: int, rank: int, columns: int, *, transposed: bool = False) -> list[Array]:
    shapes = [(rows, depth), (depth, rank), (columns, rank) if transposed else (rank, columns)]
    return [noise(*shape, seed=10 * rank + i, scale=0.3).astype(TYPES[dtype]) for i, shape in enumerate(shapes)]


def expected(model: onnx.ModelProto, body: str, inputs: list[Array]) -> Array:
    w, s, v = (numpy_helper.to_array(x).astype(np.float64) for x in model.graph.initializer)
    x, a, b = (one.astype(np.float64) for one in inputs)
    if body == TRANSPOSED:
        w, b = w.T, b.T
    more = x @ a @ b * (s if body == SCALED else 1.0)
    result: Array = x @ w + more
    return np.maximum(result + v, 0.0) if body == FINISHED else result


def names(model: onnx.ModelProto, device: DeviceProperties) -> list[str]:
    """Return the names of the plan's kernels for products with an adapter."""
    found = CompiledCluster(read_model(model), device).prepare().kernels
    return [spec.name for spec in found if "low_rank" in spec.name]


def check(body: str, dtype: str, rows: int, depth: int, rank: int, columns: int) -> None:
    model = lora(body, dtype, depth, columns)
    inputs = feeds(dtype, rows, depth, rank, columns, transposed=body == TRANSPOSED)
    (y,) = run_model(model, inputs)
    tolerance = 2e-5 if dtype == "float" else 6e-3
    np.testing.assert_allclose(y, expected(model, body, inputs), rtol=tolerance, atol=tolerance * np.sqrt(depth))


@pytest.mark.parametrize("body", [PLAIN, SCALED, TRANSPOSED, FINISHED], ids=["plain", "scaled", "transposed", "bias"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [1, 20], ids=["one row", "rows"])
def test_results_are_right_for_each_rank(body: str, dtype: str, rows: int) -> None:
    """Rank 0 is no adapter; rank 20 ends within a k step."""
    assert names(lora(body, dtype, 50, 36), EMULATED)
    for rank in (0, 4, 20):
        check(body, dtype, rows, 50, rank, 36)


@pytest.mark.parametrize("body", [PLAIN, SCALED, TRANSPOSED, FINISHED], ids=["plain", "scaled", "transposed", "bias"])
@pytest.mark.parametrize(
    ("rows", "sliced_k", "engine"),
    [
        pytest.param(1, None, "matmul_row", id="GEMV"),
        pytest.param(20, None, "matmul_mma_", id="tiles"),
        pytest.param(20, 2, "matmul_mma_teams2_", id="sliced-K"),
        pytest.param(20, 4, "matmul_mma_teams4_", id="sliced-K, groups of one warp"),
    ],
)
def test_kernels_for_gpus_are_right_for_each_rank(
    monkeypatch: pytest.MonkeyPatch, body: str, rows: int, sliced_k: int | None, engine: str
) -> None:
    chosen: TileConfig | None = None
    if sliced_k is not None:
        chosen = next(config for config in tile_configs("f16", along_k=False, is_image=False) if fits(config, sliced_k))
    monkeypatch.setattr(gemm, "choose_tile_config", lambda *args, **more: chosen)
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    assert any(name.startswith(engine) for name in names(lora(body, "float16", 64, 40), GPU))
    for rank in (0, 8, 40):
        check(body, "float16", rows, 64, rank, 40)


def fits(config: TileConfig, sliced_k: int) -> bool:
    return config.sliced_k == sliced_k and config.is_even and (config.warps == 1) == (sliced_k == 4)


def coded(rank: int) -> tuple[onnx.ModelProto, list[Array], Array]:
    """Return a model with weights of 4 bits and an adapter, its inputs and the expected result."""
    depth, columns, block = 64, 40, 32
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 16, (columns, depth // block, block))
    scales = rng.uniform(0.02, 0.1, (columns, depth // block)).astype(np.float16)
    body = "base = com.microsoft.MatMulNBits<K = 64, N = 40, bits = 4, block_size = 32>(x, codes, scales)"
    model = lora(PLAIN.replace("base = MatMul(x, w)", body), "float16", depth, columns)
    del model.graph.initializer[:]
    packed = (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)
    model.graph.initializer.extend(
        [numpy_helper.from_array(packed, "codes"), numpy_helper.from_array(scales, "scales")]
    )
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    x, a, b = inputs = feeds("float16", 20, depth, rank, columns)
    weights = ((codes - 8) * scales.astype(np.float64)[..., None]).reshape(columns, depth).T
    wide = [one.astype(np.float64) for one in (x, a, b)]
    return model, inputs, wide[0] @ weights + wide[0] @ wide[1] @ wide[2]


@pytest.mark.parametrize("device", [EMULATED, GPU], ids=["emulated", "GPU"])
@pytest.mark.parametrize("rows", [1, 20])
def test_the_other_product_may_have_weights_of_four_bits(
    monkeypatch: pytest.MonkeyPatch, device: DeviceProperties, rows: int
) -> None:
    monkeypatch.setattr(OpenDevice, "properties", lambda self: device)
    for rank in (0, 8):
        model, inputs, result = coded(rank)
        assert names(model, device)
        (y,) = run_model(model, [inputs[0][:rows], *inputs[1:]])
        np.testing.assert_allclose(y, result[:rows], rtol=1e-2, atol=2e-2)


def test_rows_of_several_sequences_share_an_adapter() -> None:
    """x has a batch and a sequence axis, whose sizes only a Run knows."""
    model = lora(SCALED, "float", 50, 36)
    for value in (model.graph.input[0], model.graph.output[0]):
        shape = value.type.tensor_type.shape
        dims = [dim.dim_param or dim.dim_value for dim in shape.dim]
        value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, onnx.TensorProto.FLOAT, ["batch", *dims]))
    assert names(model, EMULATED)
    x, *others = feeds("float", 12, 50, 8, 36)
    (y,) = run_model(model, [x.reshape(3, 4, 50), *others])
    result = expected(model, SCALED, [x, *others]).reshape(3, 4, 36)
    np.testing.assert_allclose(y, result, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(
            "base = MatMul(x, w) down = MatMul(x, a) up = MatMul(down, b) y = Sub(base, up)", id="a difference"
        ),
        pytest.param(
            "base = MatMul(x, w) down = MatMul(x, a) up = MatMul(down, b) sum = Add(base, up) y = Mul(sum, up)",
            id="a second use",
        ),
        pytest.param(
            "base = MatMul(x, w) t = Tanh(x) down = MatMul(t, a) up = MatMul(down, b) y = Add(base, up)",
            id="another tensor",
        ),
        pytest.param(
            "base = MatMul(x, w) down = MatMul(x, a) up = MatMul(down, b) t = Tanh(up) y = Add(base, t)",
            id="a function of the product",
        ),
        pytest.param(
            "base = MatMul(x, w) down = MatMul(x, a) up = MatMul(down, b) more = Mul(up, v) y = Add(base, more)",
            id="a scale for each column",
        ),
    ],
)
def test_other_sums_stay_apart(body: str) -> None:
    model = lora(body, "float", 50, 36)
    assert not names(model, EMULATED)
    run_model(model, feeds("float", 5, 50, 4, 36))


def test_a_product_that_a_library_computes_stays_apart() -> None:
    """With libraries, one row is a GEMV of the plugin, which adds the adapter. More rows are library calls."""
    device = DeviceProperties.gpu((9, 0), libraries=frozenset({"cublaslt"}))
    for rows, is_fused in ((1, True), (4096, False)):
        model = lora(PLAIN, "float16", 4096, 4096, "8")
        for value in (model.graph.input[0], model.graph.output[0]):
            value.type.tensor_type.shape.dim[0].dim_value = rows
        assert bool(names(model, device)) == is_fused


def test_a_product_that_split_k_computes_stays_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of few tiles and a long k splits k; each split would add the adapter."""
    monkeypatch.setattr(gemm, "choose_tile_config", lambda *args, **more: None)
    for depth, is_fused in ((64, True), (8192, False)):
        model = lora(PLAIN, "float16", depth, 64, "8")
        for value in (model.graph.input[0], model.graph.output[0]):
            value.type.tensor_type.shape.dim[0].dim_value = 20
        assert bool(names(model, GPU)) == is_fused
