"""Fused attention: bit-identical to GEMM, Softmax and GEMM as separate steps, in every block configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest

from fused_bits import uncontracted
from kernel_harness import make_model, run_model
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.lowering.context import DeviceProperties, LoweringOptions
from ort_cuda_plugin.program.steps.schedule import AttentionTile
from ort_cuda_plugin.schedule import attention as attention_schedule
from pass_programs import programs_after

FORMS = {
    "few threads": AttentionTile(32, 64, 64, 32, resident=False),
    "few threads, scores kept": AttentionTile(16, 64, 128, 32, resident=True),
    "large blocks": AttentionTile(32, 128, 64, 128, resident=False, tile_gap=4),
    "large blocks, scores kept": AttentionTile(16, 64, 64, 64, resident=True),
    "one warp": AttentionTile(8, 64, 128, 32, resident=False, tile_gap=4),
}
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
SIZES = {"a tile and a bit": (5, 67, 5), "several blocks": (70, 130, 40), "one key": (9, 1, 16), "wide": (6, 20, 136)}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": 1},
    "window": {"is_causal": 1, "left_window_size": 5, "softcap": 3.0},
    "scaled": {"scale": 0.3},
}


@pytest.fixture
def without_contraction() -> Iterator[None]:
    with uncontracted():
        yield


def numbers(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def is_one_step(model: Any) -> bool:
    """Whether attention is a single step after fusion."""
    return " attention " in programs_after(model)["attention_fusion"]


def compare(model: Any, inputs: list[np.ndarray], *, dynamic: bool = False) -> None:
    fused, plain = (run_model(model, inputs, dynamic, LoweringOptions(fusion=fusion)) for fusion in (True, False))
    for one, other in zip(fused, plain, strict=True):
        first, second = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (one, other))
        np.testing.assert_array_equal(first, second)


@pytest.mark.usefixtures("without_contraction")
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_block_has_the_bits_of_three_steps(
    form: str, sizes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_schedule, "choose_multi_pass_tile", lambda ctx, rows, keys, width: (FORMS[form], ()))
    rows, keys, size = SIZES[sizes]
    q, k, v = (numbers(2, 3, length, size, seed=i) for i, length in enumerate((rows, keys, keys)))
    mask = numbers(rows, keys, seed=3)
    mask[1] = -np.inf
    model = make_model("Attention", [q, k, v, mask], {"is_causal": 0}, 23)
    assert is_one_step(model)
    compare(model, [q, k, v, mask])


@pytest.mark.usefixtures("without_contraction")
@pytest.mark.parametrize(
    ("dtype", "mode", "dynamic"),
    [
        ("float32", "plain", False),
        ("float32", "causal", True),
        ("float32", "scaled", True),
        ("float16", "window", False),
        ("bfloat16", "causal", False),
    ],
)
def test_attention_has_the_bits_of_three_steps(dtype: str, mode: str, dynamic: bool) -> None:
    """Four query heads share two K/V heads; past keys and values precede the new ones."""
    q = numbers(2, 4, 6, 24, dtype=TYPES[dtype])
    k, v, past_k, past_v = (numbers(2, 2, length, 24, dtype=TYPES[dtype], seed=length) for length in (6, 6, 9, 9))
    mask = np.random.default_rng(1).random((2, 1, 6, 15)) < 0.7
    inputs = [q, k, v, mask, past_k, past_v]
    model = make_model("Attention", inputs, MODES[mode], 24 if mode == "window" else 23, outputs=3)
    assert is_one_step(model)
    compare(model, inputs, dynamic=dynamic)


@pytest.mark.usefixtures("without_contraction")
def test_attention_has_the_bits_of_three_steps_up_to_so_many_keys() -> None:
    """The documentation promises equal bits from 5 queries on and up to 1024 keys."""
    q, k, v = (numbers(1, 2, length, 16, seed=i) for i, length in enumerate((5, 1024, 1024)))
    compare(make_model("Attention", [q, k, v], {}, 23), [q, k, v])


def test_scores_that_are_an_output_are_stored() -> None:
    q, k, v = (numbers(1, 2, 5, 8, seed=i) for i in range(3))
    model = make_model("Attention", [q, k, v], {"qk_matmul_output_mode": 3}, 23, outputs=4)
    assert not is_one_step(model)
    scores = np.exp(q @ k.swapaxes(2, 3) / np.sqrt(8))
    scores /= scores.sum(-1, keepdims=True)
    output, _, _, probabilities = run_model(model, [q, k, v])
    np.testing.assert_allclose(probabilities, scores, rtol=2e-5)
    np.testing.assert_allclose(output, scores @ v, rtol=1e-4, atol=1e-5)


def test_attention_over_many_keys() -> None:
    """A row has more scores than shared memory holds, so blocks pass over the keys' tiles several times."""
    q, k, v = (numbers(1, 4, length, 16, seed=i) for i, length in enumerate((64, 20_000, 20_000)))
    model = make_model("Attention", [q, k, v], {}, 23)
    assert is_one_step(model)
    scores = np.exp(q.astype(np.float64) @ k.swapaxes(2, 3) / 4)
    expected = scores / scores.sum(-1, keepdims=True) @ v
    np.testing.assert_allclose(run_model(model, [q, k, v])[0], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "keys", "block"),
    [
        (4, 1300, "8x64x64_resident"),
        (4, 1400, "8x64x64"),
        (64, 300, "32x64x64_resident"),
        (64, 700, "16x64x64_resident"),
        (64, 800, "32x64x64"),
        (64, 8192, "32x64x64"),
    ],
)
def test_blocks_have_as_many_rows_as_scores_that_fit_or_many(rows: int, keys: int, block: str) -> None:
    """Scores kept in shared memory are computed once; if not even 16 rows fit, larger blocks read keys less often."""
    q, k, v = (numbers(1, 1, length, 16) for length in (rows, keys, keys))
    cluster = CompiledCluster(read_model(make_model("Attention", [q, k, v], {}, 23)), DeviceProperties(emulated=True))
    assert f"attention_{block}_f32" in [kernel.name for kernel in cluster.prepare().kernels]


@pytest.mark.parametrize(("biases", "is_one"), [(4, True), (24, False)])
def test_attention_takes_in_no_more_tensors_than_a_kernel_has_parameters_for(biases: int, is_one: bool) -> None:
    """Half of the factors multiply the scores, half the result; their strides differ."""
    half = biases // 2
    names = [f"b{i}" for i in range(biases)]
    size = {"q": (3, 4, 9, 5), "k": (3, 4, 5, 11), "v": (3, 4, 11, 6)}
    size |= {name: ((3, 1, 9, 1), (1, 4, 9, 1))[i % 2] for i, name in enumerate(names)}
    lines = ["s0 = MatMul (q, k)", *(f"s{i + 1} = Mul (s{i}, b{i})" for i in range(half))]
    lines += [f"p = Softmax <axis = -1> (s{half})", "t0 = MatMul (p, v)"]
    lines += [f"t{i + 1} = Mul (t{i}, b{half + i})" for i in range(half)]
    declared = ", ".join(f"float{list(shape)} {name}" for name, shape in size.items())
    text = f"attends ({declared}) => (float[3, 4, 9, 6] t{half}) {{ {' '.join(lines)} }}"
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]> {text}')
    model = onnx.shape_inference.infer_shapes(model)
    assert is_one_step(model) == is_one
    fed = [numbers(*shape, seed=i) for i, shape in enumerate(size.values())]
    fused, plain = (run_model(model, fed, options=LoweringOptions(fusion=fusion)) for fusion in (True, False))
    np.testing.assert_allclose(fused[0], plain[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3])
def test_decoding_with_an_open_number_of_rows_launches_one_kernel_per_gemm(rows: int) -> None:
    """A GEMM that is no part of attention also has a tile kernel there, whose grid is empty for few rows."""
    body = "s = MatMul(q, k) p = Softmax(s) y = MatMul(p, v)"
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> g (float[1, 2, rows, 80] q, float[1, 2, 80, 512] k,'
        f" float[1, 2, 512, 80] v) => (float[1, 2, rows, 80] y) {{ {body} }}"
    )
    cluster = CompiledCluster(read_model(model), DeviceProperties.gpu((9, 0)))
    variant = cluster.build([(1, 2, rows, 80), (1, 2, 80, 512), (1, 2, 512, 80)], [])
    kinds = [kernel.name.partition("_n")[0] for kernel in variant.kernels]
    assert kinds == ["matmul_row", "softmax", "matmul_row"]


@pytest.mark.parametrize("weight", ["w", "v"])
def test_layers_of_a_network_are_not_attention(weight: str) -> None:
    """If GEMM, LayerNormalization and GEMM were one kernel, each of its tiles would compute the first GEMM again."""
    body = "h = MatMul(x, w) n = LayerNormalization(h, b, b) y = MatMul(n, v)"
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> g (float[40, 16] x, float[16, 24] w, float[24] b, float[24, 32] v)'
        f" => (float[40, 32] y) {{ {body} }}"
    )
    shape = {"w": (16, 24), "v": (24, 32)}[weight]
    model.graph.input.remove(next(info for info in model.graph.input if info.name == weight))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, np.float32), weight))
    plan = CompiledCluster(read_model(model), DeviceProperties(), LoweringOptions()).prepare().plan
    assert plan is not None
    assert len(plan.records) == 3
