"""Random models, compared with ONNX Runtime's CPU provider. One plan per cluster serves several shapes."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest

import ort_cuda_plugin
from emulator_harness import configured
from ort_cuda_plugin.ep.device.devices import LOWERING_VARIABLE
from random_models import ModelMaker, feed

SHAPES = [(2, 3), (1, 1), (3, 1), (1, 4), (2, 2), (5, 7)]


def check_model(seed: int, nodes: int) -> None:
    ort_cuda_plugin.register(emulate=True)
    data = ModelMaker(seed, foreign=seed % 3 == 0).model(nodes).SerializeToString()
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if seed % 2:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    reference = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    session = ort.InferenceSession(data, options, providers=["CudaPluginExecutionProvider", "CPUExecutionProvider"])
    built = None
    for batch, sequence in SHAPES:
        inputs = feed(batch, sequence, seed)
        for actual, expected in zip(session.run(None, inputs), reference.run(None, inputs), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-5, strict=True)
        variants = ort_cuda_plugin.counters()["plan_variants_built"]
        assert built in (None, variants)
        built = variants


@pytest.mark.parametrize("seed", range(10))
def test_a_random_model_computes_what_the_cpu_does_at_every_shape(seed: int) -> None:
    check_model(seed, nodes=14)


def test_a_random_model_is_right_with_a_gpus_kernels_in_the_checking_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOWERING_VARIABLE, "sm_90")
    with configured(check=1):
        check_model(11, nodes=8)
