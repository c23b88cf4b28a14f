"""TF32 weights stored as scaled float16: results, bytes, and the kernels that read them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

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
from ort_cuda_plugin.kernels.gemm.tile_shapes import TileConfig, tile_configs
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.lowering.context import DeviceProperties, LoweringOptions
from team_choice import use_team

GPU = DeviceProperties.gpu((9, 0))
TEAMS: list[TileConfig | None] = [None, *{team.tile: team for team in tile_configs("tf32", compact=True)}.values()]
"""One schedule for each sliced-K tile; None: the tiles without sliced-K."""


def with_weights(op_type: str, x: Array, w: Array, attributes: dict[str, Any] | None = None) -> onnx.ModelProto:
    """Return a model of one operator, whose input is x and whose weights are constant."""
    model = make_model(op_type, [x, w], attributes or {})
    model.graph.input.pop()
    model.graph.initializer.append(numpy_helper.from_array(w, "x1"))
    return model


def kernels(model: onnx.ModelProto, **options: Any) -> list[str]:
    return [spec.name for spec in CompiledCluster(read_model(model), GPU, LoweringOptions(**options)).prepare().kernels]


def result(monkeypatch: pytest.MonkeyPatch, model: onnx.ModelProto, x: Array) -> Array:
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    with configured(check=1):
        (actual,) = run_model(model, [x])
    return actual


def identity(w: Array, rows: int) -> Array:
    return np.eye(rows, w.shape[0], dtype=np.float32)


def rounded(w: Array) -> Array:
    """Return ``w`` rounded to TF32, with ties to even."""
    bits = w.view(np.uint32).astype(np.uint64)
    return ((bits + 0xFFF + (bits >> 13 & 1)) & 0xFFFFE000).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("first", range(2))
def test_products_are_those_of_tf32(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """Each case tests every fifth schedule. Columns have very different magnitudes, or zeros only.

    The steps of k do not divide evenly among the warp groups.
    """
    w = noise(304, 72, seed=2)
    w[:, 3] *= 1e-30
    w[:, 5] = 0
    w[:, 7] *= 1e25
    model = with_weights("MatMul", np.zeros((40, 304), np.float32), w)
    for number, team in enumerate(TEAMS[first::5]):
        # Each schedule has its own x: reused memory may still contain the previous schedule's result.
        x = noise(40, 304, seed=number + 10)
        exact, size = x.astype(np.float64) @ w, np.abs(x).astype(np.float64) @ np.abs(w)
        use_team(monkeypatch, team)
        assert any("_tf32_f16" in name for name in kernels(model)), team
        actual = result(monkeypatch, model, x)
        assert (np.abs(actual - exact) <= (2**-10 + 304 * 2**-22) * size).all(), team


@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_are_those_of_tf32(monkeypatch: pytest.MonkeyPatch, groups: int) -> None:
    """Windows exceed the edges, have strides and dilations, and channels do not fill a k step."""
    w = noise(36 * groups, 16, 3, 3, seed=2)
    attributes = {"pads": [2, 1, 0, 3], "strides": [2, 1], "dilations": [1, 2], "group": groups}
    model = with_weights("Conv", np.zeros((2, 16 * groups, 9, 11), np.float32), w, attributes)
    for number, team in enumerate(TEAMS[groups + 1 :: 5]):
        x = noise(2, 16 * groups, 9, 11, seed=number + 10)
        (exact,) = run_op("Conv", [x.astype(np.float64), w.astype(np.float64)], attributes)
        (size,) = run_op("Conv", [np.abs(x).astype(np.float64), np.abs(w).astype(np.float64)], attributes)
        use_team(monkeypatch, team)
        assert any("_tf32_f16" in name for name in kernels(model)), team
        actual = result(monkeypatch, model, x)
        assert (np.abs(actual - exact) <= (2**-10 + 144 * 2**-22) * size).all(), team


@pytest.mark.parametrize("rows", [1, 16], ids=["few rows", "tensor cores"])
def test_each_weight_is_rounded_as_tf32_rounds(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Magnitudes in a column may differ; only values below 2**-24 of its largest one lose bits."""
    numbers = np.random.default_rng(3)
    w = numbers.standard_normal((16, 64)).astype(np.float32)
    w *= np.exp2(numbers.integers(-24, 1, w.shape)).astype(np.float32)
    w[0, :4] = [np.inf, -np.inf, np.nan, 3e38]
    w[1, 4:7] = [1e-38, 1e-42, 0]
    model = with_weights("MatMul", identity(w, rows), w)
    assert any("f16" in name for name in kernels(model))
    for row in range(0, 16, rows):
        x = np.roll(identity(w, rows), row, axis=1)
        with np.errstate(invalid="ignore"):
            expected = rounded(w[row : row + rows])
        found = result(monkeypatch, model, x)
        finite = np.isfinite(w).all(axis=0)
        largest = np.abs(w[:, finite]).max(axis=0)
        error = np.abs(found[:, finite].astype(np.float64) - expected[:, finite])
        assert (error <= np.where(np.abs(expected[:, finite]) < 2**-24 * largest, 2**-35 * largest, 0)).all()
        if row == 0:
            assert found[0, 0] == np.inf
            assert found[0, 1] == -np.inf
            assert np.isnan(found[0, 2])


def test_each_weight_that_is_not_known_or_whole_is_read_as_it_is() -> None:
    x = noise(40, 304, seed=1)
    whole = with_weights("MatMul", x, noise(304, 72, seed=2))
    assert any("f16" in name for name in kernels(whole))
    assert not any("f16" in name for name in kernels(whole, use_tf32=False))
    assert not any("f16" in name for name in kernels(whole, fusion=False))
    assert not any("f16" in name for name in kernels(make_model("MatMul", [x, noise(304, 72, seed=2)], {})))
    odd = noise(40, 300, seed=1)
    assert not any("f16" in name for name in kernels(with_weights("MatMul", odd, noise(300, 72, seed=2))))
    image = noise(1, 12, 9, 9, seed=1)
    assert not any("f16" in name for name in kernels(with_weights("Conv", image, noise(16, 12, 3, 3, seed=2))))


@pytest.mark.parametrize("rows", [1, 40])
def test_half_the_bytes_are_kept_and_read(rows: int) -> None:
    """A Run is one launch, which reads 2 bytes per weight, and a power of two per column, once."""
    x, w = noise(rows, 320, seed=1), noise(320, 512, seed=2)
    steps = work_of_model(with_weights("MatMul", x, w), {}, libraries=frozenset()).steps
    (step,) = (step for step in steps if isinstance(step, KernelStep))
    assert step.nbytes == 4 * rows * (320 + 512) + 2 * 320 * 512 + 4 * 512


def test_their_code_has_no_spills_and_few_bank_conflicts(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = []
    for team in TEAMS[1::4]:
        use_team(monkeypatch, team)
        model = with_weights("MatMul", noise(128, 128, seed=1), noise(128, 192, seed=2))
        work = work_of_model(model, {}, libraries=frozenset())
        (step,) = (step for step in work.steps if isinstance(step, KernelStep))
        sites = count_all(work, {step.kernel: sass.Code(32, 0, 0, {}, 1.0)})[0].sites
        shared = [site for site in sites if site.kind.startswith("shared")]
        assert shared
        assert all(site.units <= 2.01 * site.least for site in shared), (team, shared)
        specs.append(step.kernel)
    for capability in ((8, 0), (9, 0)):
        for spec, code in zip(specs, sass.code_of(specs, Target.cuda(*capability)), strict=True):
            assert code.spilled == 0, (spec.name, capability)
