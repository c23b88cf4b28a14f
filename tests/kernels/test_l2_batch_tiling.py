"""Batch tiling: an expansion and a depthwise convolution run for some images at a time, so that these stay in L2."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from onnx import ModelProto, numpy_helper, parser

from contributed import noise
from kernel_harness import run_model
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.estimate.gather import work_of_model
from ort_cuda_plugin.estimate.work import KernelStep, LibraryStep
from ort_cuda_plugin.passes.layout import l2_batch_tiling
from ort_cuda_plugin.program.lowering.context import DeviceProperties
from pass_programs import DEVICES, programs_after, small_models_count

TEXT = """<ir_version: 10, opset_import: ["" : 20]> images (float16[N, 16, S, S] x) => (float16[N, 16, S, S] y) {
    p = Conv(x, a, ab) q = Relu(p) r = Conv<group = 64, pads = [1, 1, 1, 1]>(q, b, ab) s = Relu(r)
    t = Conv(s, c) y = Add(t, x) }"""
SHAPES = {"a": (64, 16, 1, 1), "ab": (64,), "b": (64, 1, 3, 3), "c": (16, 64, 1, 1)}


def network(images: int | str, side: int) -> ModelProto:
    model = parser.parse_model(TEXT.replace("[N", f"[{images}").replace("S,", f"{side},").replace("S]", f"{side}]"))
    add_weights(model, *SHAPES)
    return model


def add_weights(model: ModelProto, *names: str) -> None:
    for seed, name in enumerate(names):
        data = noise(*SHAPES[name], seed=seed, scale=0.3).astype(np.float16)
        model.graph.initializer.append(numpy_helper.from_array(data, name))


@pytest.mark.parametrize("images", ["N", 5])
def test_each_part_has_its_images(images: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenDevice, "properties", lambda self: DeviceProperties(emulated=False))
    monkeypatch.setattr(l2_batch_tiling, "L2_BYTES", {(9, 0): 300_000})
    x = noise(5, 16, 20, 20, seed=9).astype(np.float16)
    (actual,) = run_model(network(images, 20), [x], images == "N")
    session = ort.InferenceSession(network(5, 20).SerializeToString(), providers=["CPUExecutionProvider"])
    (wanted,) = session.run(None, {"x": x})
    np.testing.assert_allclose(actual.astype(np.float32), np.asarray(wanted, np.float32), 1e-2, 1e-2)


@pytest.mark.parametrize(("images", "parts"), [(16, [4, 4, 4, 4]), (10, [3, 3, 4]), (4, [4]), (400, [400])])
def test_parts_fit_the_cache_if_few_do(images: int, parts: list[int]) -> None:
    """The tensor between the convolutions has 52 MB with 16 images; with 400, even a quarter would not fit L2."""
    work = work_of_model(network("N", 160), {"x": (images, 16, 160, 160)})
    first = [step.sizes[0] for step in work.steps if isinstance(step, LibraryStep) and step.sizes[1:3] == (16, 64)]
    assert first == parts
    kernels = [step.kernel for step in work.steps if isinstance(step, KernelStep) and "taps" in step.kernel.source]
    assert len(kernels) == len(parts)
    assert len(set(kernels)) == 1


@pytest.mark.parametrize(
    ("outputs", "tail", "is_tiled"),
    [
        pytest.param("y", "y = Identity(s)", True, id="one reader"),
        pytest.param("y, q", "y = Identity(s)", False, id="an output"),
        pytest.param("y, z", "y = Identity(s) z = CumSum(q, axis)", False, id="another reader"),
        pytest.param("y", "y = Add(s, q)", False, id="read by the epilogue"),
    ],
)
def test_only_a_tensor_that_one_convolution_alone_reads_is_tiled(outputs: str, tail: str, is_tiled: bool) -> None:
    results = ", ".join(f"float16[5, 64, 20, 20] {name}" for name in outputs.split(", "))
    body = "p = Conv(x, a, ab) q = Relu(p) s = Conv<group = 64, pads = [1, 1, 1, 1]>(q, b, ab)"
    model = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 20]> images (float16[5, 16, 20, 20] x) => ({results}) {{
        axis = Constant<value_int = 3>() {body} {tail} }}"""
    )
    add_weights(model, "a", "ab", "b")
    with small_models_count():
        programs = programs_after(model, DEVICES["gpu"])
    steps = {name: text.partition("\n")[2] for name, text in programs.items()}  # without the line that names the pass
    names = list(steps)
    before = names[names.index("l2_batch_tiling") - 1]
    assert (steps["l2_batch_tiling"] != steps[before]) == is_tiled
