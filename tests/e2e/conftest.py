"""End-to-end tests through stock ONNX Runtime. They run with inline streams, and once more with adversarial ones by
tests/streams/test_adversarial_streams.py."""

from __future__ import annotations

from collections.abc import Callable

import onnxruntime as ort
import pytest

import ort_cuda_plugin


@pytest.fixture
def ep_session() -> Callable[..., ort.InferenceSession]:
    """Makes a session on the emulated device and asserts that every node of it runs on the execution provider."""

    def make(
        model: bytes, level: ort.GraphOptimizationLevel = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    ) -> ort.InferenceSession:
        options = ort.SessionOptions()
        options.graph_optimization_level = level
        session = ort_cuda_plugin.session(model, emulate=True, sess_options=options)
        placed = {part.ep_name for part in session.get_provider_graph_assignment_info()}
        assert placed == {ort_cuda_plugin.get_ep_name()}
        return session

    return make
