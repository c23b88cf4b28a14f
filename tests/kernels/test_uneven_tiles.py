"""Tiles of 96 rows or 80 and 96 columns: convolutions have them whose tiles fill a GPU's multiprocessors once."""

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
from ort_cuda_plugin.ep.open_device import OpenDevice
from ort_cuda_plugin.estimate import sass
from ort_cuda_plugin.estimate.count import count_all
from ort_cuda_plugin.estimate.gather import work_of_model
from ort_cuda_plugin.estimate.work import KernelStep
from ort_cuda_plugin.kernels.tile_shapes import Team, block_bytes, operand_sizes, team_forms
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.lowering import DeviceProperties
from team_choice import use_team

GPU = DeviceProperties.gpu((9, 0))


def uneven(kind: str) -> list[Team]:
    """Of each tile, the most teams."""
    even = team_forms(kind)
    return list({team.tile: team for team in team_forms(kind, along_k=True) if team not in even}.values())


def convolution(dtype: type, images: int, channels: int, size: int, rows: int) -> ModelProto:
    """Of weights that are known."""
    w: Array = noise(rows, channels, 3, 3, seed=2).astype(dtype)
    model = make_model("Conv", [np.zeros((images, channels, size, size), dtype), w], {"pads": [1] * 4})
    model.graph.input.pop()
    model.graph.initializer.append(numpy_helper.from_array(w, "x1"))
    return model


@pytest.mark.parametrize("number", range(3))
def test_weights_in_16_bits_have_pieces_for_some_threads_only(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    team = uneven("tf32")[number]
    use_team(monkeypatch, team)
    model = convolution(np.float32, 2, 16, 9, 100)
    names = [spec.name for spec in CompiledCluster(read_model(model), GPU).prepare().kernels]
    assert any(f"mma_teams{team.teams}_{team.tile.name}_tf32_f16" in name for name in names), names
    x, w = noise(2, 16, 9, 9, seed=1), noise(100, 16, 3, 3, seed=2)
    (exact,) = run_op("Conv", [x.astype(np.float64), w.astype(np.float64)], {"pads": [1] * 4})
    (size,) = run_op("Conv", [np.abs(x).astype(np.float64), np.abs(w).astype(np.float64)], {"pads": [1] * 4})
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    with configured(check=1):
        (actual,) = run_model(model, [x])
    assert (np.abs(actual - exact) <= (2**-10 + 144 * 2**-22) * size).all()


def test_their_code_has_no_spills_and_few_bank_conflicts(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = []
    for dtype, kind in ((np.float16, "f16"), (np.float32, "tf32")):
        for team in uneven(kind):
            use_team(monkeypatch, team)
            work = work_of_model(convolution(dtype, 1, 64, 14, 160), {}, libraries=frozenset())
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
        forms = team_forms("f16", along_k=True, capability=capability)
        assert (
            max(block_bytes("f16", operand_sizes("f16", False), team.tile, team.teams) for team in forms) <= most << 10
        )
    assert len(team_forms("f16", capability=(12, 0))) < len(team_forms("f16"))


@pytest.mark.parametrize(("rows", "called"), [(160, False), (1024, True)])
def test_they_go_before_a_library_that_would_fill_waves_in_part(rows: int, called: bool) -> None:
    """6272 places and 160 channels are 132 tiles of 96 x 80."""
    device = replace(GPU, libraries=frozenset({"cublaslt", "cudnn"}))
    variant = CompiledCluster(read_model(convolution(np.float32, 32, 128, 14, rows)), device).prepare()
    assert bool(variant.problems) is called
    assert any("_96x80x" in spec.name for spec in variant.kernels) is not called
