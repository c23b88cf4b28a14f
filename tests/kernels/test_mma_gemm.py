"""GEMM on tensor cores: results on the emulated device, and machine code for GPUs."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from contributed import FLOAT, FLOAT16, Array, check_node, node_model, noise, rounded
from kernel_harness import make_model, run_model, run_op
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.targets import Target
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.estimate import sass
from ort_cuda_plugin.estimate.count import count_all
from ort_cuda_plugin.estimate.gather import work_of_model
from ort_cuda_plugin.estimate.work import KernelStep
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.lowering.context import DeviceProperties
from team_choice import use_team
from test_mma_attention import prompt

GPU = DeviceProperties.gpu((8, 0))
SMALL_GPU = DeviceProperties.gpu((8, 0), 1)
"""With one multiprocessor the rules choose the largest tile and no split-K."""


def kernels(model: onnx.ModelProto, device: DeviceProperties = GPU) -> list[KernelSpec]:
    return CompiledCluster(read_model(model), device).prepare().kernels


@pytest.mark.parametrize(
    ("sizes", "transposed", "dtype", "device"),
    [
        pytest.param((40, 75, 70), (0, 0), np.float16, GPU, id="no rows begin at a multiple of 16 bytes"),
        pytest.param((24, 72, 64), (1, 0), ml_dtypes.bfloat16, GPU, id="a transposed"),
        pytest.param((20, 2080, 72), (0, 1), np.float16, GPU, id="b transposed, in parts of k"),
        pytest.param((136, 40, 72), (1, 1), np.float16, SMALL_GPU, id="large tiles, both transposed"),
    ],
)
def test_products_of_halves(
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, int, int],
    transposed: tuple[int, int],
    dtype: Any,
    device: DeviceProperties,
) -> None:
    """A bias is added to each element once, also with split-K."""
    m, n, k = sizes[0], sizes[2], sizes[1]
    a, b, c = (noise(*shape, seed=i).astype(dtype) for i, shape in enumerate(((m, k), (k, n), (n,))))
    given = [np.ascontiguousarray(x.T) if flag else x for x, flag in zip((a, b), transposed, strict=True)]
    attributes = dict(zip(("transA", "transB"), transposed, strict=True))
    monkeypatch.setattr(OpenDevice, "properties", lambda self: device)
    use_team(monkeypatch, None)
    names = [spec.name for spec in kernels(make_model("Gemm", [*given, c], attributes), device)]
    assert any(name.startswith("matmul_mma_split" if k > 1000 else "matmul_mma_") for name in names)
    (actual,) = run_op("Gemm", [*given, c], attributes)
    if dtype is not np.float16:
        actual = actual.view(dtype)
    expected = a.astype(np.float64) @ b.astype(np.float64) + c.astype(np.float64)
    tolerance = 1e-3 if dtype is np.float16 else 8e-3
    np.testing.assert_allclose(actual.astype(np.float64), expected, tolerance, tolerance)


def coded(rows: int, depth: int, columns: int) -> tuple[list[Array], dict[str, Any], Array]:
    """Return the inputs and attributes of MatMulNBits, and the dequantized weights as [columns, depth]."""
    block = 32
    blocks = -(-depth // block)
    numbers = np.random.default_rng(0).integers(0, 16, (columns, blocks, block))
    stored = (numbers[..., ::2] | numbers[..., 1::2] << 4).astype(np.uint8)
    scales = rounded(np.abs(noise(columns, blocks, seed=1, scale=0.1)), FLOAT16)
    wide = ((numbers - 8) * scales[..., None]).reshape(columns, -1)[:, :depth].astype(np.float64)
    attributes = {"N": columns, "K": depth, "bits": 4, "block_size": block}
    return [rounded(noise(rows, depth), FLOAT16), stored, scales], attributes, wide


@pytest.mark.parametrize("real", [FLOAT16, FLOAT])
def test_codes_of_four_bits_are_multiplied_by_tensor_cores(monkeypatch: pytest.MonkeyPatch, real: int) -> None:
    """Rows of codes end within a word, a 16-byte chunk and a quantization block."""
    inputs, attributes, wide = coded(40, 75, 20)
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)

    def reference(a: Array, *_: Array) -> Array:
        result: Array = (a @ wide.T).astype(np.float32)
        return result

    check_node("MatMulNBits", inputs, attributes, reals=[real], reference=reference, constant=[1, 2], tolerance=1e-2)


@pytest.mark.parametrize("real", [FLOAT16, FLOAT])
def test_rows_of_each_expert_are_multiplied(monkeypatch: pytest.MonkeyPatch, real: int) -> None:
    """As tokens are sorted by expert, tiles are not full and their rows are not contiguous."""
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    check_node("MoE", mixture(45), MIXTURE, reals=[real], constant=[2, 3, 4, 5], tolerance=1e-2)


MIXTURE = {"k": 2, "activation_type": "relu"}


def mixture(tokens: int) -> list[Array]:
    experts, width, inner = 3, 40, 24
    weights = [noise(experts, inner, width, seed=2, scale=0.2), noise(experts, inner, seed=3)]
    weights += [noise(experts, width, inner, seed=4, scale=0.2), noise(experts, width, seed=5)]
    return [noise(tokens, width), noise(tokens, experts, seed=1), *weights]


# ---- machine code ----


def test_products_of_halves_use_tensor_cores_without_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tiles of a GEMM with two batch dimensions, of MatMulNBits and of MoE; and flash attention."""
    use_team(monkeypatch, None)
    halves = [np.zeros(shape, np.float16) for shape in ((4, 12, 512, 512), (4, 12, 512, 64))]
    inputs, attributes, _ = coded(2048, 64, 2048)
    of_codes = node_model("MatMulNBits", inputs, attributes, [FLOAT], constant=[1, 2], real=FLOAT16, sized=[0])
    of_experts = node_model("MoE", mixture(384), MIXTURE, [FLOAT], constant=[2, 3, 4, 5], real=FLOAT16, sized=[0, 1])
    models = [
        make_model("MatMul", halves, {}),
        onnx.load_from_string(of_codes),
        onnx.load_from_string(of_experts),
        prompt(128, FLOAT16)[0],
    ]
    specs = []
    for model, name in zip(models, ("matmul_mma_128x64", "matmul_mma", "grouped_mma_128x64", "matrix_st"), strict=True):
        specs.append(next(spec for spec in kernels(model) if spec.name.startswith(name)))
    assert specs[1].name.endswith("4bits")
    for capability, chosen in (((8, 0), specs), ((9, 0), specs[:1]), ((10, 0), specs[:1]), ((12, 0), specs)):
        for spec, code in zip(chosen, sass.code_of(chosen, Target.cuda(*capability)), strict=True):
            assert code.spilled == 0, (spec.name, capability)
            assert code.uses_tensor_cores or sass.disassembler() is None, (spec.name, capability)


@pytest.mark.parametrize("transposed", [0, 1])
def test_no_access_to_shared_memory_has_bank_conflicts_above_two_way(
    transposed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_team(monkeypatch, None)
    halves = [np.zeros(shape, np.float16) for shape in ((2048, 64), (64, 2048))]
    given = [np.ascontiguousarray(x.T) if transposed else x for x in halves]
    model = make_model("Gemm", given, {"transA": transposed, "transB": transposed})
    work = work_of_model(model, {}, libraries=frozenset())
    (step,) = work.steps
    assert isinstance(step, KernelStep)
    assert step.kernel.name.startswith("matmul_mma_128x64")
    sites = count_all(work, {step.kernel: sass.Code(32, 0, 0, {}, 1.0)})[0].sites
    shared = [site for site in sites if site.kind.startswith("shared")]
    assert {(site.kind, site.nbytes) for site in shared} >= {("shared load", 16), ("shared store", 16)}
    assert all(site.units <= 2.01 * site.least for site in shared), shared


@pytest.mark.parametrize("divisor", [3.0, 2**0.5, 968.0, 6e-8])
def test_quotients_of_halves_are_products(monkeypatch: pytest.MonkeyPatch, divisor: float) -> None:
    """A thread computes a column's reciprocal once and multiplies by it. Subnormal quotients may be one unit off."""
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    x: Array = np.resize(every[np.isfinite(every)], (1024, 64))
    c = np.float16(divisor)
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> g (float16[1024, 64] x, float16[64, 64] w, float16 c) =>'
        " (float16[1024, 64] y) { p = MatMul(x, w)  y = Div(p, c) }"
    )
    model.graph.input.pop()
    model.graph.initializer.append(numpy_helper.from_array(np.array(c), "c"))
    (spec,) = kernels(model)
    assert not re.search(r"e_\w+ = e_\w+ / e_", spec.source)
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    (actual,) = run_model(model, [x, np.eye(64, dtype=np.float16)])
    with np.errstate(over="ignore"):
        expected = (x.astype(np.float64) / np.float64(c)).astype(np.float16)
    normal = np.abs(expected) >= 2.0**-14
    np.testing.assert_array_equal(actual[normal], expected[normal])
    assert (np.abs(actual[~normal].astype(np.float64) - expected[~normal]) <= 2.0**-24).all()
