"""Transformer encoders with dynamic batch and sequence length."""

from __future__ import annotations

import functools

import numpy as np
import onnxruntime as ort
import pytest

import ort_cuda_plugin
from encoder import encoder, encoder_inputs
from ort_cuda_plugin import models
from session_pair import assert_planned_tightly, ep_session

TOLERANCE = 1e-3


@functools.lru_cache
def serialized(decomposed: bool, layers: int = 6) -> bytes:
    return bytes(encoder(layers=layers, decomposed=decomposed).SerializeToString())


@pytest.mark.parametrize(
    "level", [ort.GraphOptimizationLevel.ORT_ENABLE_ALL, ort.GraphOptimizationLevel.ORT_DISABLE_ALL]
)
@pytest.mark.parametrize("decomposed", [False, True], ids=["layer_norm", "decomposed"])
def test_encoder_runs_whole_on_the_ep_and_matches_the_cpu_provider(
    decomposed: bool, level: ort.GraphOptimizationLevel
) -> None:
    session = ep_session(serialized(decomposed), level)
    cpu = ort.InferenceSession(serialized(decomposed), providers=["CPUExecutionProvider"])
    for seed, (batch, sequence) in enumerate([(2, 16), (1, 33)]):
        feeds = encoder_inputs(batch, sequence, seed)
        before = ort_cuda_plugin.counters()
        actual = session.run(None, feeds)[0]
        after = ort_cuda_plugin.counters()
        assert models.relative_error(actual, cpu.run(None, feeds)[0]) <= TOLERANCE
        # Each of the 6 layers has four GEMMs, two normalizations and attention: 7 launches. The other nodes have 4.
        counted = sum(after[name] - before[name] for name in ("launches", "library_calls", "copies_d2d"))
        assert counted <= 6 * 7 + 4
        assert_planned_tightly()


def test_unseen_batch_and_sequence_sizes_make_no_python_call() -> None:
    session = ep_session(serialized(False, layers=2))
    cpu = ort.InferenceSession(serialized(False, layers=2), providers=["CPUExecutionProvider"])
    session.run(None, encoder_inputs(2, 16))
    rng = np.random.default_rng(7)
    sizes = {(1, 1), (1, 7), (3, 1), *((int(b), int(s)) for b, s in rng.integers((1, 1), (6, 48), (60, 2)))} - {(2, 16)}
    before = ort_cuda_plugin.counters()
    for seed, (batch, sequence) in enumerate(sorted(sizes)[:50]):
        feeds = encoder_inputs(batch, sequence, seed)
        assert models.relative_error(session.run(None, feeds)[0], cpu.run(None, feeds)[0]) <= TOLERANCE
    after = ort_cuda_plugin.counters()
    assert after["python_calls"] == before["python_calls"]
    assert after["plan_variants_built"] == before["plan_variants_built"]
