"""Hybrid decoders: layers with states of fixed size (convolution, linear attention) and layers with K/V caches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import ort_cuda_plugin
from hybrid_decoder import NAMES, greedy, hybrid_decoder
from ort_cuda_plugin.generate import Decoder

PROMPT = [1, 5, 9, 33]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("hybrid") / "model.onnx"
    onnx.save(hybrid_decoder(), path)
    return path


def generated(decoder: Decoder, prompt: list[list[int]], count: int) -> list[list[int]]:
    rows: list[list[int]] = np.stack(list(decoder.generate(prompt, new_tokens=count)), 1).tolist()
    return rows


def test_tokens_are_those_of_the_cpu_provider_and_each_is_one_graph(model: Path) -> None:
    decoder = Decoder(model, max_length=40, emulate=True)
    placed = {part.ep_name for part in decoder.session.get_provider_graph_assignment_info()}
    assert placed == {ort_cuda_plugin.get_ep_name()}
    tokens = []
    for number, token in enumerate(decoder.generate([PROMPT], new_tokens=24)):
        tokens.append(int(token[0]))
        if number == 8:
            before = ort_cuda_plugin.counters()
    after = ort_cuda_plugin.counters()
    steady = ("runs", "graph_replays", "copies_d2h", "plan_hits")
    assert {name: after[name] - before[name] for name in steady} == dict.fromkeys(steady, 15)
    assert after["python_calls"] == before["python_calls"]
    assert tokens == greedy(model, PROMPT, 24)


@pytest.mark.parametrize("version", NAMES)
def test_states_have_the_names_of_any_version_of_the_builder(version: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(hybrid_decoder(version, planes=version == "before"), path)
    decoder = Decoder(path, max_length=16, emulate=True)
    assert generated(decoder, [PROMPT], 8) == [greedy(path, PROMPT, 8)]


def test_states_may_hold_several_positions(model: Path, tmp_path: Path) -> None:
    """For speculative decoding, a state may hold several positions; the tokens are those of a model with one."""
    path = tmp_path / "model.onnx"
    onnx.save(hybrid_decoder(window=3), path)
    decoder = Decoder(path, max_length=16, emulate=True, batch=2)
    prompts = [[*PROMPT, 8], [4, 2]]
    assert generated(decoder, prompts, 6) == [greedy(model, prompt, 6) for prompt in prompts]


def test_generation_goes_on_and_goes_back(model: Path) -> None:
    decoder = Decoder(model, max_length=32, emulate=True)
    first = generated(decoder, [PROMPT], 5)[0]
    before = ort_cuda_plugin.counters()["runs"]
    second = generated(decoder, [[44, 45]], 3)[0]
    assert ort_cuda_plugin.counters()["runs"] - before == 3
    assert second == greedy(model, [*PROMPT, *first, 44, 45], 3)
    for length in (6, 0):
        decoder.rewind(length)
        kept = [*PROMPT, *first][:length]
        assert generated(decoder, [[7, 3]], 4)[0] == greedy(model, [*kept, 7, 3], 4)


def test_padding_of_shorter_prompts_does_not_reach_states(model: Path) -> None:
    """Prompts of different lengths are padded. The padding changes no state, in the first prompt and in later ones."""
    prompts, more = [[1, 5, 9, 33, 8], [4, 2], [6, 6]], [[44], [7, 6, 5], [3]]
    decoder = Decoder(model, max_length=20, emulate=True, batch=3)
    expected = [*prompts]
    for new in (prompts, more):
        if new is more:
            expected = [known + tokens for known, tokens in zip(expected, more, strict=True)]
        got = generated(decoder, new, 4)
        assert got == [greedy(model, known, 4) for known in expected]
        expected = [known + tokens for known, tokens in zip(expected, got, strict=True)]
    assert decoder.tokens == expected


def test_sampling_draws_for_each_sequence_alone(model: Path) -> None:
    """With the same seed, a sequence gets the same tokens alone and in a batch with a longer one."""
    short, long = [1, 5, 9], [4, 2, 7, 7]
    alone = Decoder(model, max_length=16, emulate=True, candidates=8)
    together = Decoder(model, max_length=16, emulate=True, batch=2, candidates=8)
    expected = np.stack(list(alone.generate([short], new_tokens=5, seed=3)), 1)
    got = np.stack(list(together.generate([short, long], new_tokens=5, seed=3)), 1)
    assert np.array_equal(got[0], expected[0])
    assert got[0].tolist() != greedy(model, short, 5)


def test_a_past_without_a_present_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    made = hybrid_decoder()
    made.graph.input[2].name = "past.0.other"
    for node in made.graph.node:
        node.input[:] = ["past.0.other" if name == "past.0.conv" else name for name in node.input]
    onnx.save(made, path)
    with pytest.raises(
        ValueError,
        match=r"past\.0\.other: the model has no output with its new value, expected one named present\.0\.other",
    ):
        Decoder(path, max_length=8, emulate=True)
