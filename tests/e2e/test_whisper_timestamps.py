"""WhisperBeamSearch with timestamps: the tokens are those of the CPU provider."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import searches
from ort_cuda_plugin.ep.provider import last_verdicts
from searches import Array, encoder_decoder, search_model
from session_pair import ep_session

VOCABULARY, ROOM = 70, 24
TOKENS = {
    "eos_token_id": 4,
    "decoder_start_token_id": 6,
    "translate_token_id": 7,
    "transcribe_token_id": 8,
    "start_of_lm_token_id": 9,
    "no_timestamps_token_id": 10,
    "beginning_timestamp_token_id": 12,
}
INPUTS = (
    "input_ids max_length min_length num_beams num_return_sequences length_penalty repetition_penalty vocab_mask "
    "prefix_vocab_mask attention_mask decoder_input_ids logits_processor"
)


def inputs(seed: int, processor: int) -> dict[str, Array | None]:
    """Return the inputs of a search for one prompt, whose decoder begins with three tokens."""
    rng = np.random.default_rng(seed)
    given: dict[str, Array] = {
        "input_ids": rng.standard_normal((1, VOCABULARY, 6)).astype(np.float32),
        "max_length": np.array([ROOM], np.int32),
        "min_length": np.array([1], np.int32),
        "num_beams": np.array([3], np.int32),
        "num_return_sequences": np.array([2], np.int32),
        "length_penalty": np.array([1.0], np.float32),
        "repetition_penalty": np.array([1.0], np.float32),
        "decoder_input_ids": np.array([[6, 9, 8]], np.int32),
        "logits_processor": np.array([processor], np.int32),
    }
    return {name: given.get(name) for name in INPUTS.split()}


def model(monkeypatch: pytest.MonkeyPatch, *, constant: tuple[str, ...] = (), **changes: Any) -> bytes:
    monkeypatch.setattr(searches, "VOCABULARY", VOCABULARY)
    bodies, weights = encoder_decoder(whisper=True, decodes_first=True, hidden=True)
    weights["after"] *= 3  # probable tokens, also timestamps, differ from step to step
    return search_model(
        "WhisperBeamSearch", inputs(0, 1), ["sequences", "sequences_scores"], bodies, weights,
        outer=False, constant=constant, pad_token_id=3, early_stopping=1, **TOKENS | changes,
    )  # fmt: skip


def test_tokens_are_those_of_the_cpu_provider_with_and_without_timestamps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether timestamps are wanted is an input: one plan serves both."""
    text = model(monkeypatch)
    session = ep_session(text)
    on_cpu = ort.InferenceSession(text, providers=["CPUExecutionProvider"])
    chosen: set[int] = set()
    for seed in range(6):
        for processor in (1, 0):
            feeds = {name: x for name, x in inputs(seed, processor).items() if x is not None}
            tokens, scores = session.run(None, feeds)
            expected = on_cpu.run(None, feeds)
            np.testing.assert_array_equal(tokens, expected[0])
            np.testing.assert_allclose(scores, expected[1], rtol=1e-5)
            if processor:
                chosen.update(np.unique(tokens).tolist())
    assert len([token for token in chosen if token >= 12]) > 3


def test_timestamps_may_be_a_constant_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    text = model(monkeypatch, constant=("logits_processor",))
    feeds = {name: x for name, x in inputs(1, 1).items() if x is not None and name != "logits_processor"}
    expected = ort.InferenceSession(text, providers=["CPUExecutionProvider"]).run(None, feeds)
    np.testing.assert_array_equal(ep_session(text).run(None, feeds)[0], expected[0])
    assert next(verdict for verdict in last_verdicts() if verdict.op_type == "WhisperBeamSearch").supported


def test_a_search_without_the_first_timestamp_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    text = model(monkeypatch, beginning_timestamp_token_id=-1)
    with pytest.raises(Exception, match="beginning_timestamp_token_id must be at least 1 with a logits_processor"):
        ep_session(text)
