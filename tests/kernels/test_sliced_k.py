"""Sliced-K GEMMs and convolutions: results, machine code, and when they are preferred to a library."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper, parser

from contributed import Array, noise
from emulator_harness import configured
from kernel_harness import make_model, run_model, run_op
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.targets import Target
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.estimate import sass
from ort_cuda_plugin.estimate.count import count_all
from ort_cuda_plugin.estimate.gather import work_of_model
from ort_cuda_plugin.estimate.work import KernelStep
from ort_cuda_plugin.kernels.gemm.tile_shapes import TileConfig, tile_configs
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.lowering.context import DeviceProperties
from team_choice import use_team

GPU = DeviceProperties.gpu((9, 0))
LIBRARIES = replace(GPU, libraries=frozenset({"cublaslt", "cudnn"}))


def kernels(model: ModelProto, device: DeviceProperties = GPU) -> list[KernelSpec]:
    return CompiledCluster(read_model(model), device).prepare().kernels


def most_teams(kind: str, *, is_image: bool = False) -> list[TileConfig]:
    """Return for each tile the schedule with the most warp groups along k."""
    forms = tile_configs(kind, along_k=is_image, is_image=is_image)
    return list({team.tile: team for team in forms if team.sliced_k > 1}.values())


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(
    ("sizes", "transposed", "first"),
    [
        pytest.param((40, 300, 70), (0, 0), 0, id="steps that only some teams have"),
        pytest.param((17, 136, 72), (0, 1), 3, id="the last step has whole pieces only"),
        pytest.param((33, 77, 130), (1, 0), 2, id="no rows begin at a multiple of 16 bytes"),
        pytest.param((200, 24, 200), (0, 1), 1, id="a single step"),
    ],
)
def test_products_are_sums_of_all_teams(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int], transposed: tuple[int, int], first: int, dtype: type
) -> None:
    """Each case tests every fourth schedule, beginning with number ``first``."""
    m, k, n = sizes
    attributes = dict(zip(("transA", "transB"), transposed, strict=True))
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    for number, team in enumerate(most_teams("f16" if dtype is np.float16 else "tf32")[first::4]):
        # Each schedule has its own operands: reused memory may still contain the previous schedule's result.
        shapes = ((m, k), (k, n), (n,))
        operands: list[Array] = [noise(*shape, seed=3 * number + i).astype(dtype) for i, shape in enumerate(shapes)]
        a, b, c = operands
        given: list[Array] = [
            np.ascontiguousarray(x.T) if flag else x for x, flag in zip((a, b), transposed, strict=True)
        ]
        wide = [x.astype(np.float64) for x in operands]
        size = np.abs(wide[0]) @ np.abs(wide[1]) + np.abs(wide[2])
        use_team(monkeypatch, team)
        names = [spec.name for spec in kernels(make_model("Gemm", [*given, c], attributes))]
        assert any(f"mma_teams{team.sliced_k}_{team.tile.name}" in name for name in names), names
        with configured(check=1):
            (actual,) = run_op("Gemm", [*given, c], attributes)
        assert (np.abs(actual - (wide[0] @ wide[1] + wide[2])) <= (2**-10 + k * 2**-22) * size).all(), team


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_convolutions_are_sums_of_all_teams(monkeypatch: pytest.MonkeyPatch, dtype: type) -> None:
    """Windows exceed the edges, have strides and dilations, and channels do not fill a k step.

    Each data type tests every other schedule, beginning with a different one.
    """
    w: Array = noise(36, 24, 3, 3, seed=2).astype(dtype)
    attributes = {"pads": [2, 1, 0, 3], "strides": [2, 1], "dilations": [1, 2]}
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    forms = most_teams("f16" if dtype is np.float16 else "tf32", is_image=True)[dtype is np.float16 :: 2]
    for number, config in enumerate(forms):
        x: Array = noise(2, 24, 9, 11, seed=number + 10).astype(dtype)
        (expected,) = run_op("Conv", [x.astype(np.float64), w.astype(np.float64)], attributes)
        (size,) = run_op("Conv", [abs(x).astype(np.float64), abs(w).astype(np.float64)], attributes)
        use_team(monkeypatch, config)
        names = [spec.name for spec in kernels(make_model("Conv", [x, w], attributes))]
        assert any(f"mma_teams{config.sliced_k}_{config.tile.name}" in name for name in names), names
        with configured(check=1):
            (actual,) = run_op("Conv", [x, w], attributes)
        assert (np.abs(actual - expected) <= (2**-10 + 216 * 2**-22) * size).all(), config


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_their_code_has_no_spills_and_fits_each_gpu(monkeypatch: pytest.MonkeyPatch, dtype: type) -> None:
    """Also, no access to shared memory has more than two-way bank conflicts."""
    kind = "f16" if dtype is np.float16 else "tf32"
    specs = []
    for team in most_teams(kind)[::3]:
        use_team(monkeypatch, team)
        model = make_model("MatMul", [np.zeros((128, 128), dtype), np.zeros((128, 192), dtype)], {})
        work = work_of_model(model, {}, libraries=frozenset())
        (step,) = work.steps
        assert isinstance(step, KernelStep)
        small = tile_configs(kind, capability=(12, 0))
        assert step.shared_bytes <= (99 << 10 if team in small else 227 << 10)
        assert f"teams{team.sliced_k}_{team.tile.name}" in step.kernel.name
        sites = count_all(work, {step.kernel: sass.Code(32, 0, 0, {}, 1.0)})[0].sites
        shared = [site for site in sites if site.kind.startswith("shared")]
        assert all(site.units <= 2.01 * site.least for site in shared), (team, shared)
        specs.append(step.kernel)
    for capability in ((8, 0), (9, 0)) if dtype is np.float16 else ((9, 0), (12, 0)):
        for spec, code in zip(specs, sass.code_of(specs, Target.cuda(*capability)), strict=True):
            assert code.spilled == 0, (spec.name, capability)
            assert code.uses_tensor_cores or sass.disassembler() is None, (spec.name, capability)


def product(rows: int | str, k: int = 384, n: int = 384) -> ModelProto:
    return parser.parse_model(
        f"<ir_version: 10, opset_import: ['' : 20]> g (float16[{rows}, {k}] x, float16[{k}, {n}] w) =>"
        f" (float16[{rows}, {n}] y) {{ y = MatMul(x, w) }}".replace("'", '"')
    )


@pytest.mark.parametrize(
    ("rows", "k", "n", "called"),
    [
        (128, 384, 384, False),
        (8192, 384, 384, True),
        (128, 4096, 384, False),
        (128, 384, 388, True),
        (3, 384, 384, True),
    ],
)
def test_small_products_go_before_a_library(rows: int, k: int, n: int, called: bool) -> None:
    """The library is called if there are many tiles or few rows, or if rows of w are not whole 16-byte chunks."""
    assert bool(CompiledCluster(read_model(product(rows, k, n)), LIBRARIES).prepare().problems) is called


@pytest.mark.parametrize("constant", [False, True])
def test_weights_of_float32_are_laid_along_k_once(monkeypatch: pytest.MonkeyPatch, constant: bool) -> None:
    """If contiguous along k, weights are loaded from shared memory by ``ldmatrix``, else element by element."""
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> g (float[128, 388] x, float[388, 192] w) => (float[128, 192] y)'
        " { y = MatMul(x, w) }"
    )
    x, w = noise(128, 388, seed=1), noise(388, 192, seed=2)
    inputs: list[Array] = [x] if constant else [x, w]
    if constant:
        model.graph.input.pop()
        model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    variant = CompiledCluster(read_model(model), LIBRARIES).prepare()
    assert not variant.problems
    assert variant.plan is not None
    assert len(variant.plan.records) == 1
    assert any("b0_3 = load_matrices(" in spec.source for spec in variant.kernels) is constant
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    (actual,) = run_model(model, inputs)
    exact = x.astype(np.float64) @ w
    assert (np.abs(actual - exact) <= 2**-9 * (np.abs(x).astype(np.float64) @ np.abs(w))).all()


@pytest.mark.parametrize(("rows", "called"), [(128, False), (8192, True)])
def test_an_open_number_of_rows_has_a_plan_for_few_blocks(rows: int, called: bool) -> None:
    variant = CompiledCluster(read_model(product("N")), LIBRARIES).build([(rows, 384), (384, 384)], [])
    assert bool(variant.problems) is called
    assert any("teams" in spec.name for spec in variant.kernels) is not called


def test_small_convolutions_go_before_a_library() -> None:
    for size, channels, called in ((14, 64, False), (224, 64, True), (14, 1024, False)):
        given = [np.zeros(shape, np.float16) for shape in ((1, channels, size, size), (64, channels, 3, 3))]
        model = make_model("Conv", given, {"pads": [1] * 4})
        assert bool(CompiledCluster(read_model(model), LIBRARIES).prepare().problems) is called, (size, channels)
