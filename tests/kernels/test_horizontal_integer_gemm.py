"""Horizontal fusion: integer GEMMs with the same left operand in one launch; each result keeps its own tensor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from contexts import compile_model, load, nothing_compiled
from emulator_harness import configured
from kernel_harness import run_model
from ort_cuda_plugin.ep.device.devices import LOWERING_VARIABLE
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.estimate.gather import LIBRARIES, work_of_model
from ort_cuda_plugin.estimate.work import KernelStep, LibraryStep
from ort_cuda_plugin.program.lowering.context import DeviceProperties
from test_integer_gemm import Model, by_onnx_runtime, codes, is_near

GPU = DeviceProperties.gpu((9, 0))
ROWS, DEPTH = 1100, 64
COLUMNS = (48, 160, 48)


def network(
    scales: tuple[float, ...] = (0.02,) * 3, *, shared: bool = True, outputs: int = 0, stored: tuple[float, ...] = ()
) -> onnx.ModelProto:
    """Return a model with one product of x and weights for each scale.

    x is quantized with each of the scales, or if ``shared`` once with the first. The first results are quantized with
    the scales in ``stored``. The model returns each result's maxima, and the first ``outputs`` results themselves.
    """
    model = Model()
    x = model.node("Relu", "x")
    once = model.quantized(x, scales[0], np.int8(-3))[1]
    results = []
    for number, (scale, columns) in enumerate(zip(scales, COLUMNS, strict=True)):
        codes_of_x = once if shared else model.quantized(x, scale, np.int8(-3))[1]
        w = model.weights(codes((DEPTH, columns), "int8", number), 1, seed=number)
        bias = model.constant(np.random.default_rng(number).normal(0, 1, columns).astype(np.float32))
        results.append(model.node("Add", model.node("MatMul", codes_of_x, w), bias))
    for number, scale in enumerate(stored):
        results[number] = model.quantized(results[number], scale, np.int8(number))[1]
    last = [model.node("ReduceMax", result, axes=[1]) for result in results]
    return model.proto({"x": np.zeros((ROWS, DEPTH), np.float32)}, [*last, *results[:outputs]])


def products(model: onnx.ModelProto, libraries: frozenset[str] = frozenset()) -> int:
    steps = work_of_model(model, {}, libraries=libraries).steps
    assert not any(isinstance(step, LibraryStep) for step in steps)
    return sum(isinstance(step, KernelStep) and step.kernel.name.startswith("matmul_mma") for step in steps)


def feed() -> np.ndarray:
    return np.random.default_rng(5).normal(0, 1, (ROWS, DEPTH)).astype(np.float32)


@pytest.mark.parametrize("outputs", [0, 1])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("scales", "shared", "count"),
    [
        pytest.param((0.02, 0.02, 0.02), True, 1, id="codes of one operator"),
        pytest.param((0.02, 0.02, 0.02), False, 1, id="codes of several that quantize alike"),
        pytest.param((0.02, 0.03, 0.02), False, 2, id="other codes of one"),
    ],
)
def test_products_of_the_same_codes_are_one(
    monkeypatch: pytest.MonkeyPatch, scales: tuple[float, ...], shared: bool, count: int, dynamic: bool, outputs: int
) -> None:
    model = network(scales, shared=shared, outputs=outputs)
    assert products(model) == count
    assert products(model, LIBRARIES) == count
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    if dynamic:
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "rows"
    with configured(check=1):
        actual = run_model(model, [feed()])
    for one, wanted in zip(actual, by_onnx_runtime(model, {"x": feed()}), strict=True):
        is_near(one, wanted)


def test_results_may_have_scales_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    scales = (0.1, 0.15, 0.2)
    model = network(stored=scales)
    assert products(model) == 1
    monkeypatch.setattr(OpenDevice, "properties", lambda self: GPU)
    with configured(check=1):
        actual = run_model(model, [feed()])
    for one, wanted, scale in zip(actual, by_onnx_runtime(model, {"x": feed()}), scales, strict=True):
        far = np.abs(one - wanted) > scale / 2
        assert far.mean() < 1e-2
        assert np.abs(one - wanted).max() < 1.01 * scale


def test_a_compiled_model_has_their_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOWERING_VARIABLE, "sm_90")
    model = network()
    compile_model(model.SerializeToString(), tmp_path / "m_ctx.onnx")
    with nothing_compiled():
        actual = load(tmp_path / "m_ctx.onnx").run(None, {"x": feed()})
    for one, wanted in zip(actual, by_onnx_runtime(model, {"x": feed()}), strict=True):
        is_near(np.asarray(one), wanted)
