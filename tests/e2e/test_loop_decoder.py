"""Language models as one ONNX model with the loop over tokens: tokens, launches, copies and calls of a request."""

from __future__ import annotations

import gc

import numpy as np
import onnxruntime as ort
import pytest

import ort_cuda_plugin
from loop_decoder import loop_decoder, prompt_feed

PROMPT, MOST = [3, 7, 9, 11], 10
END = 20
"""A token that the model generates as its fifth."""


def pair(end: int | None) -> tuple[ort.InferenceSession, ort.InferenceSession]:
    gc.collect()  # sessions of earlier tests must not free memory later: addresses would change, and graphs with them
    model = loop_decoder(end=end).SerializeToString()
    cpu = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    return ort_cuda_plugin.session(model, emulate=True), cpu


@pytest.mark.parametrize("end", [None, END])
def test_a_request_is_one_launch_of_a_graph(end: int | None) -> None:
    session, cpu = pair(end)
    ort_cuda_plugin.require(session)
    feed = prompt_feed(PROMPT, MOST)
    (expected,) = cpu.run(None, feed)
    assert np.count_nonzero(expected) == len(PROMPT) + (1 + MOST if end is None else 5)
    found = []
    for _ in range(5):
        before = ort_cuda_plugin.counters()
        np.testing.assert_array_equal(session.run(None, feed)[0], expected)
        after = ort_cuda_plugin.counters()
        found.append({name: after[name] - before[name] for name in after})
    # Without a graph the host reads the loop's condition before each iteration, if an iteration computes it.
    assert found[1]["device_loop_iterations"] == (0 if end is None else 4)
    assert found[1]["graph_replays"] == 0
    for steady in found[3:]:
        assert (steady["graph_replays"], steady["graph_captures"], steady["device_loops"]) == (1, 0, 1)
        assert (steady["python_calls"], steady["device_loop_iterations"]) == (0, 0)
        # Inputs: the prompt, the mask, the first tokens, and the number of tokens, which the host reads back.
        assert (steady["copies_h2d"], steady["copies_d2h"], steady["host_value_reads"]) == (4, 1, 1)


def test_prompts_of_other_lengths_and_numbers_of_tokens_need_no_further_plan() -> None:
    session, cpu = pair(END)
    session.run(None, prompt_feed(PROMPT, MOST))
    before = ort_cuda_plugin.counters()["plan_variants_built"]
    for prompt, most in (([5, 6], 6), ([1, 2, 3, 4, 5, 6, 7], 12), (PROMPT, 0), (PROMPT, 1)):
        feed = prompt_feed(prompt, most)
        np.testing.assert_array_equal(session.run(None, feed)[0], cpu.run(None, feed)[0])
    assert ort_cuda_plugin.counters()["plan_variants_built"] == before
