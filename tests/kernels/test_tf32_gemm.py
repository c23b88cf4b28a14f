"""TF32 GEMM on tensor cores: results, and machine code for GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from contributed import Array, noise
from emulator_harness import configured
from kernel_harness import make_model, run_model
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.targets import Target
from ort_cuda_plugin.ep.device.devices import LOWERING_VARIABLE
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.estimate import sass
from ort_cuda_plugin.estimate.count import count_all
from ort_cuda_plugin.estimate.gather import work_of_model
from ort_cuda_plugin.estimate.work import KernelStep
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.lowering.context import DeviceProperties, LoweringOptions
from team_choice import use_team

GPU = DeviceProperties.gpu((8, 0))


def kernels(model: onnx.ModelProto, device: DeviceProperties = GPU, **options: Any) -> list[KernelSpec]:
    return CompiledCluster(read_model(model), device, LoweringOptions(**options)).prepare().kernels


# ---- products ----


def close_to_exact(actual: Array, a: Array, b: Array) -> None:
    """Assert that errors are within the bounds for operands rounded to TF32 and products added in float32."""
    exact = a.astype(np.float64) @ b.astype(np.float64)
    size = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)
    assert actual.shape == exact.shape
    assert (np.abs(actual - exact) <= (2**-10 + a.shape[-1] * 2**-22) * size + 1e-30).all()


SHAPES = {
    "tiny": ((5, 7), (7, 3)),
    "no rows begin at a multiple of 16 bytes": ((40, 75), (75, 70)),
    "whole pieces, and half a step": ((24, 72), (72, 64)),
    "in parts of k": ((20, 1104), (1104, 72)),
    "broadcast batches": ((3, 2, 20, 12), (2, 12, 36)),
    "batches of two dimensions": ((4, 1, 33, 9), (1, 3, 9, 17)),
    "no products": ((8, 0), (0, 8)),
    "no rows": ((0, 8), (8, 4)),
}
TRANSPOSED = [(0, 0), (1, 0), (0, 1), (1, 1)]


def model_of(a: Array, b: Array, transposed: Sequence[int]) -> tuple[onnx.ModelProto, list[Array]]:
    """Return a product of ``a`` and ``b``, each of which may be stored transposed, and its inputs."""
    given = [np.ascontiguousarray(x.swapaxes(-1, -2)) if t else x for x, t in zip((a, b), transposed, strict=True)]
    model = make_model("MatMul", [a, b])
    for value, x in zip(model.graph.input, given, strict=True):
        value.CopyFrom(helper.make_tensor_value_info(value.name, TensorProto.FLOAT, x.shape))
    for number, x in enumerate(given):
        if transposed[number]:
            order = [*range(x.ndim - 2), x.ndim - 1, x.ndim - 2]
            model.graph.node.insert(0, helper.make_node("Transpose", [f"x{number}"], [f"t{number}"], perm=order))
            model.graph.node[-1].input[number] = f"t{number}"
    return model, given


def check_product(a: Array, b: Array, transposed: Sequence[int], device: DeviceProperties, part: str) -> None:
    model, given = model_of(a, b, transposed)
    assert any(part in spec.name for spec in kernels(model, device)), part
    (actual,) = run_model(model, given)
    close_to_exact(actual, a, b)


@pytest.mark.parametrize("transposed", TRANSPOSED)
def test_products_of_all_shapes_are_those_of_tf32(monkeypatch: pytest.MonkeyPatch, transposed: tuple[int, int]) -> None:
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    use_team(monkeypatch, None)
    with configured(check=1):
        for name, (a_shape, b_shape) in SHAPES.items():
            part = "" if "no pr" in name or name == "no rows" else "mma_split" if "parts" in name else "mma"
            check_product(noise(*a_shape, seed=1), noise(*b_shape, seed=2), transposed, GPU, part)


@pytest.mark.parametrize(
    ("rows", "multiprocessors", "transposed", "tile"),
    [
        pytest.param(250, 1, (0, 0), "128x64x16", id="b along n"),
        pytest.param(250, 1, (1, 1), "128x64x16", id="a along m"),
        pytest.param(64, 2, (1, 0), "64x64x16", id="both along the result"),
        pytest.param(40, 3, (1, 0), "32x64x16", id="small tiles"),
    ],
)
def test_tiles_of_all_sizes(
    monkeypatch: pytest.MonkeyPatch, rows: int, multiprocessors: int, transposed: tuple[int, int], tile: str
) -> None:
    device = DeviceProperties.gpu((8, 0), multiprocessors)
    monkeypatch.setattr(OpenDevice, "properties", lambda self: device)
    use_team(monkeypatch, None)
    with configured(check=1):
        check_product(noise(rows, 40, seed=1), noise(40, 72, seed=2), transposed, device, f"mma_{tile}_tf32")


@pytest.mark.parametrize("dynamic", [False, True])
def test_products_of_random_shapes(monkeypatch: pytest.MonkeyPatch, dynamic: bool) -> None:
    """Sizes are static or dynamic, matrices stored in either order, and batch dimensions broadcast."""
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    numbers = np.random.default_rng(5)
    with configured(check=1):
        for _ in range(12):
            m, n, k = (int(numbers.integers(1, most)) for most in (90, 90, 200))
            a_batch, b_batch = (((), ()), ((2,), ()), ((3,), (1,)), ((1, 3), (2, 1)))[numbers.integers(4)]
            a, b = noise(*a_batch, m, k, seed=1), noise(*b_batch, k, n, seed=2)
            transposed = TRANSPOSED[numbers.integers(4)]
            model, given = model_of(a, b, transposed)
            (actual,) = run_model(model, given, dynamic)
            close_to_exact(actual, a, b)


# ---- machine code ----


@pytest.mark.parametrize("transposed", [(1, 0), (0, 1)])
def test_products_use_tensor_cores_without_spills(transposed: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tiles of a GEMM with two batch dimensions; operands are contiguous along m and n, or along k."""
    use_team(monkeypatch, None)
    a, b = (np.zeros(shape, np.float32) for shape in ((4, 12, 512, 512), (4, 12, 512, 64)))
    (spec,) = kernels(model_of(a, b, transposed)[0])
    assert (spec.name, spec.resident) == ("matmul_mma_128x64x16_tf32", 3)
    for capability in ((8, 0), (9, 0), (10, 0), (12, 0)):
        (code,) = sass.code_of([spec], Target.cuda(*capability))
        assert code.spilled == 0, capability
        assert code.registers <= 65536 // (spec.resident * spec.launch_bounds), capability
        assert code.uses_tensor_cores or sass.disassembler() is None, capability


@pytest.mark.parametrize("transposed", [(1, 0), (0, 1)])
def test_no_access_to_shared_memory_has_bank_conflicts_above_two_way(
    transposed: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_team(monkeypatch, None)
    model, _ = model_of(np.zeros((2048, 64), np.float32), np.zeros((64, 2048), np.float32), transposed)
    work = work_of_model(model, {}, libraries=frozenset())
    (step,) = work.steps
    assert isinstance(step, KernelStep)
    assert step.kernel.name.startswith("matmul_mma_128x64x16_tf32")
    counted = count_all(work, {step.kernel: sass.Code(32, 0, 0, {}, 1.0)})[0]
    shared = [site for site in counted.sites if site.kind.startswith("shared")]
    assert {(site.kind, site.nbytes) for site in shared} >= {
        ("shared load", 16 if transposed[1] else 4),
        ("shared store", 16),
    }
    assert counted.instructions["matrix_tf32"] == pytest.approx(32 * 2048 * 2048 * 64 / (16 * 8 * 8))
    assert all(site.units <= 2.01 * site.least for site in shared), shared


def test_the_option_keeps_float32() -> None:
    model, _ = model_of(np.zeros((64, 64), np.float32), np.zeros((64, 64), np.float32), (0, 0))
    assert [spec.name for spec in kernels(model)] == ["matmul_mma_teams4_16x16x16_tf32"]
    for device, use_tf32 in ((GPU, False), (DeviceProperties.gpu((7, 5)), True), (replace(GPU, tf32=False), True)):
        assert [spec.name for spec in kernels(model, device, use_tf32=use_tf32)] == ["matmul_64x64x16_f32"]


def test_an_emulated_device_keeps_float32_with_the_kernels_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOWERING_VARIABLE, "sm_90")
    a, b = noise(40, 60, seed=1), noise(60, 50, seed=2)
    (actual,) = run_model(make_model("MatMul", [a, b]), [a, b])
    np.testing.assert_allclose(actual, a @ b, 1e-5, 1e-5)
