"""Tiles whose sizes are not powers of two, for GEMMs and convolutions that fill the multiprocessors in one wave."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper

from contributed import Array, noise
from emulator_harness import configured
from kernel_harness import make_model, run_model, run_op
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.compiler.targets import Target
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.estimate import sass
from ort_cuda_plugin.estimate.count import count_all
from ort_cuda_plugin.estimate.gather import work_of_model
from ort_cuda_plugin.estimate.work import KernelStep
from ort_cuda_plugin.kernels.gemm.gemm_mma import form_name
from ort_cuda_plugin.kernels.gemm.tile_shapes import TileConfig, block_bytes, operand_sizes, tile_configs
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.lowering.context import DeviceProperties
from team_choice import use_team

GPU = DeviceProperties.gpu((9, 0))


def uneven(kind: str, *, is_image: bool) -> list[TileConfig]:
    """Return for each tile whose m or n is not a power of two the schedule with the most warp groups along k."""
    forms = tile_configs(kind, kind == "tf32", along_k=True, is_image=is_image)
    return list({team.tile: team for team in forms if not team.is_even}.values())


def product(dtype: type, m: int, k: int, n: int, seed: int = 2) -> ModelProto:
    """Return a product of x and constant weights that are contiguous along n."""
    model = make_model("MatMul", [np.zeros((m, k), dtype), np.zeros((k, n), dtype)], {})
    model.graph.input.pop()
    model.graph.initializer.append(numpy_helper.from_array(noise(k, n, seed=seed).astype(dtype), "x1"))
    return model


def convolution(dtype: type, images: int, channels: int, size: int, rows: int) -> ModelProto:
    """Return a convolution of x with constant weights."""
    w: Array = noise(rows, channels, 3, 3, seed=2).astype(dtype)
    model = make_model("Conv", [np.zeros((images, channels, size, size), dtype), w], {"pads": [1] * 4})
    model.graph.input.pop()
    model.graph.initializer.append(numpy_helper.from_array(w, "x1"))
    return model


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_products_lay_weights_along_k(monkeypatch: pytest.MonkeyPatch, dtype: type) -> None:
    """The last k step is partial, but has whole 16-byte chunks; the last tiles exceed the result."""
    kind = "f16" if dtype is np.float16 else "tf32"
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    for number, team in enumerate(uneven(kind, is_image=False)):
        use_team(monkeypatch, team)
        model = product(dtype, 150, 304, 104, seed=number)
        x: Array = noise(150, 304, seed=number + 20).astype(dtype)
        names = [spec.name for spec in CompiledCluster(read_model(model), GPU).prepare().kernels]
        assert any(f"mma{form_name(1, team.sliced_k)}_{team.tile.name}_{kind}" in name for name in names), names
        w = noise(304, 104, seed=number).astype(dtype).astype(np.float64)
        exact, size = x.astype(np.float64) @ w, np.abs(x).astype(np.float64) @ np.abs(w)
        with configured(check=1):
            (actual,) = run_model(model, [x])
        assert (np.abs(actual - exact) <= (2**-10 + 304 * 2**-22) * size).all(), team


@pytest.mark.parametrize("first", range(3))
def test_weights_in_16_bits_have_pieces_for_some_threads_only(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    model, w = convolution(np.float32, 2, 16, 9, 100), noise(100, 16, 3, 3, seed=2)
    for team in uneven("tf32", is_image=True)[first::3]:
        use_team(monkeypatch, team)
        names = [spec.name for spec in CompiledCluster(read_model(model), GPU).prepare().kernels]
        assert any(f"mma{form_name(1, team.sliced_k)}_{team.tile.name}_tf32_f16" in name for name in names), names
        x = noise(2, 16, 9, 9, seed=team.tile.m * team.tile.n)
        (exact,) = run_op("Conv", [x.astype(np.float64), w.astype(np.float64)], {"pads": [1] * 4})
        (size,) = run_op("Conv", [np.abs(x).astype(np.float64), np.abs(w).astype(np.float64)], {"pads": [1] * 4})
        with configured(check=1):
            (actual,) = run_model(model, [x])
        assert (np.abs(actual - exact) <= (2**-10 + 144 * 2**-22) * size).all(), team


@pytest.mark.parametrize("is_image", [False, True])
def test_their_code_has_no_spills_and_few_bank_conflicts(monkeypatch: pytest.MonkeyPatch, is_image: bool) -> None:
    specs = []
    for number, (dtype, kind) in enumerate(((np.float16, "f16"), (np.float32, "tf32"))):
        forms = uneven(kind, is_image=is_image)
        # Each data type tests every other tile, beginning with a different one, and the last tile.
        for team in [*forms[number:-1:2], forms[-1]]:
            use_team(monkeypatch, team)
            model = convolution(dtype, 1, 64, 14, 160) if is_image else product(dtype, 128, 256, 192)
            work = work_of_model(model, {}, libraries=frozenset())
            (step,) = (step for step in work.steps if isinstance(step, KernelStep) and "mma" in step.kernel.name)
            code = sass.Code(32, 0, 0, {}, 1.0)
            counted = count_all(work, {one.kernel: code for one in work.steps if isinstance(one, KernelStep)})
            sites = counted[work.steps.index(step)].sites
            shared = [site for site in sites if site.kind.startswith("shared")]
            assert shared
            assert all(site.units <= 2.01 * site.least for site in shared), (team, shared)
            specs.append(step.kernel)
    for spec, code in zip(specs, sass.code_of(specs, Target.cuda(9, 0)), strict=True):
        assert code.spilled == 0, spec.name


def test_a_gpu_has_shared_memory_for_its_forms() -> None:
    for capability, most in (((8, 0), 163), ((8, 6), 99), ((9, 0), 227), ((12, 0), 99)):
        forms = tile_configs("f16", along_k=True, capability=capability)
        sizes = operand_sizes("f16", False)
        assert max(block_bytes("f16", sizes, team.tile, team.sliced_k) for team in forms) <= most << 10
    assert len(tile_configs("f16", capability=(12, 0))) < len(tile_configs("f16"))


@pytest.mark.parametrize(("rows", "called"), [(160, False), (1024, True)])
def test_they_go_before_a_library_that_would_fill_waves_in_part(rows: int, called: bool) -> None:
    """6272 output pixels and 160 channels are 132 tiles of 96 x 80: one for each multiprocessor."""
    device = replace(GPU, libraries=frozenset({"cublaslt", "cudnn"}))
    variant = CompiledCluster(read_model(convolution(np.float32, 32, 128, 14, rows)), device).prepare()
    assert bool(variant.problems) is called
    assert any("_96x80x" in spec.name for spec in variant.kernels) is not called
