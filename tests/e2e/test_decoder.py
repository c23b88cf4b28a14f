"""A GPT-2-like decoder with a K/V cache: launches and results of each step."""

from __future__ import annotations

import onnxruntime as ort
import pytest

import ort_cuda_plugin
from decoder import decoder, decoder_inputs
from ort_cuda_plugin import models
from session_pair import assert_planned_tightly, ep_session

LAYERS = 3


@pytest.mark.parametrize(
    "level", [ort.GraphOptimizationLevel.ORT_ENABLE_ALL, ort.GraphOptimizationLevel.ORT_DISABLE_ALL]
)
def test_a_step_takes_eight_launches_a_layer_and_matches_the_cpu_provider(level: ort.GraphOptimizationLevel) -> None:
    """A layer has four GEMMs, two normalizations, attention, and a copy of the new keys and values.

    One more launch copies the past keys and values of all layers.
    """
    model = decoder(LAYERS)
    session = ep_session(model.SerializeToString(), level)
    cpu = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    variants = 0
    for batch, sequence, past in [(2, 1, 7), (1, 1, 20), (2, 5, 9), (1, 4, 0), (3, 1, 200)]:
        feeds = decoder_inputs(model, batch, sequence, past)
        before = ort_cuda_plugin.counters()
        actual = session.run(None, feeds)
        after = ort_cuda_plugin.counters()
        for a, e in zip(actual, cpu.run(None, feeds), strict=True):
            assert models.relative_error(a, e) <= 1e-5
        counted = sum(after[kind] - before[kind] for kind in ("launches", "library_calls", "copies_d2d"))
        assert counted <= 8 * LAYERS + 3
        assert_planned_tightly()
        variants += after["plan_variants_built"] - before["plan_variants_built"]
    assert variants == 1
