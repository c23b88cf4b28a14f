"""The nine light models of the onnx wheel with random weights, compared with the CPU provider."""

from __future__ import annotations

import functools
import threading

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import ort_cuda_plugin
from ort_cuda_plugin import models
from session_pair import assert_planned_tightly, ep_session

TOLERANCE = 1e-3
LAUNCHES = {
    "light_bvlc_alexnet": 14,
    "light_densenet121": 191,
    "light_inception_v1": 75,
    "light_inception_v2": 84,
    "light_resnet50": 57,
    "light_shufflenet": 59,
    "light_squeezenet": 31,
    "light_vgg19": 25,
    "light_zfnet512": 14,
}
"""Maximum number of launches, library calls and device copies of a Run, by model."""
COUNTED = ("launches", "library_calls", "copies_d2d")
LEVELS = [ort.GraphOptimizationLevel.ORT_ENABLE_ALL, ort.GraphOptimizationLevel.ORT_DISABLE_ALL]


@functools.lru_cache(maxsize=1)
def noisy(name: str) -> tuple[onnx.ModelProto, str, bytes]:
    model, output = models.before_softmax(onnx.load(models.wheel_models()[name]))
    model = models.with_noise_weights(model)
    return model, output, model.SerializeToString()


@functools.lru_cache(maxsize=1)
def reference(name: str) -> tuple[list[dict[str, np.ndarray]], list[np.ndarray]]:
    model, output, serialized = noisy(name)
    feeds = [models.random_inputs(model, seed) for seed in (1, 2)]
    cpu = ort.InferenceSession(serialized, providers=["CPUExecutionProvider"])
    return feeds, [cpu.run([output], feed)[0] for feed in feeds]


@pytest.mark.parametrize("level", LEVELS, ids=["optimized", "as_written"])
@pytest.mark.parametrize("name", sorted(models.wheel_models()))
def test_every_node_runs_on_the_ep_and_outputs_match_the_cpu_provider(
    name: str, level: ort.GraphOptimizationLevel
) -> None:
    _, output, serialized = noisy(name)
    feeds, expected = reference(name)
    session = ep_session(serialized, level)
    before = ort_cuda_plugin.counters()
    first = session.run([output], feeds[0])[0]
    after = ort_cuda_plugin.counters()
    assert sum(after[kind] - before[kind] for kind in COUNTED) <= LAUNCHES[name]
    assert_planned_tightly()
    actual = [first, session.run([output], feeds[1])[0]]
    errors = [models.relative_error(a, e) for a, e in zip(actual, expected, strict=True)]
    assert max(errors) <= TOLERANCE
    assert models.relative_error(actual[0], actual[1]) > 10 * TOLERANCE, "the inputs must lead to different outputs"
    before = ort_cuda_plugin.counters()
    session.run([output], feeds[0])
    after = ort_cuda_plugin.counters()
    assert after["python_calls"] == before["python_calls"]
    assert after["graph_replays"] == before["graph_replays"] + 1
    assert after["launches"] > before["launches"]


def test_steady_runs_and_runs_from_new_threads_make_no_python_call() -> None:
    _, output, serialized = noisy("light_squeezenet")
    feeds, expected = reference("light_squeezenet")
    session = ep_session(serialized)
    session.run([output], feeds[0])
    before = ort_cuda_plugin.counters()["python_calls"]
    for _ in range(20):
        session.run([output], feeds[0])
    results: list[np.ndarray] = []
    threads = [threading.Thread(target=lambda: results.append(session.run([output], feeds[1])[0])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ort_cuda_plugin.counters()["python_calls"] == before
    assert len(results) == 4
    assert max(models.relative_error(result, expected[1]) for result in results) <= TOLERANCE
