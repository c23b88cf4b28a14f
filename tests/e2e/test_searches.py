"""com.microsoft's search operators (GreedySearch, Sampling, BeamSearch): search and decoder run as one node."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import ort_cuda_plugin
from contexts import settings
from contributed import on_device
from emulator_harness import configured
from ort_cuda_plugin.ep.provider import last_verdicts
from searches import VOCABULARY, Array, encoder_decoder, gpt_decoder, search_model, small_decoder
from session_pair import ep_session

END, PAD, ROOM = 4, 3, 14
ROWS = 2


def greedy_inputs(seed: int = 0, left_out: Collection[str] = ()) -> dict[str, Array | None]:
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, VOCABULARY, (ROWS, 5)).astype(np.int32)
    prompt[0, :2] = PAD
    counts = np.ones_like(prompt)
    counts[1, 0] = 0
    inputs = {
        "input_ids": prompt,
        "max_length": np.array([ROOM], np.int32),
        "min_length": np.array([9], np.int32),
        "repetition_penalty": np.array([1.2], np.float32),
        "vocab_mask": (rng.random(VOCABULARY) > 0.2).astype(np.int32),
        "prefix_vocab_mask": (rng.random((ROWS, VOCABULARY)) > 0.3).astype(np.int32),
        "attention_mask": counts,
    }
    return {name: None if name in left_out else array for name, array in inputs.items()}


def fed(inputs: dict[str, Array | None], constant: Collection[str] = ()) -> dict[str, Array]:
    return {name: array for name, array in inputs.items() if array is not None and name not in constant}


def on_cpu(model: bytes, feeds: dict[str, Array]) -> list[Any]:
    results: list[Any] = ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, feeds)
    return results


def assert_same_tokens(found: Array, expected: Array) -> None:
    """Compare tokens up to the last one that is not padding; the rest of ``found`` must be padding.

    ONNX Runtime leaves some of these elements of ``expected`` uninitialized.
    """
    last = 1 + max(np.flatnonzero(row != PAD).max(initial=-1) for row in found)
    np.testing.assert_array_equal(found[:, : last + 1], expected[:, : last + 1])
    assert (found[:, last + 1 :] == PAD).all()


RULES = ("min_length", "repetition_penalty", "vocab_mask", "prefix_vocab_mask", "attention_mask")


@pytest.mark.parametrize(("left_out", "ngram", "outer"), [((), 2, True), (RULES, 0, False)])
def test_greedy_search(left_out: Collection[str], ngram: int, outer: bool) -> None:
    """Compare several prompts, with all rules (such as min_length) and with none. Some rows end early."""
    decoder, weights = small_decoder(seed=1)
    sizes: Any = {"eos_token_id": END, "pad_token_id": PAD, "no_repeat_ngram_size": ngram, "outer": outer}
    model = search_model(
        "GreedySearch", greedy_inputs(0, left_out), ["sequences"], {"decoder": decoder}, weights, **sizes
    )
    session = ep_session(model)
    for seed in range(4):
        feeds = fed(greedy_inputs(seed, left_out))
        assert_same_tokens(session.run(None, feeds)[0], on_cpu(model, feeds)[0])


def test_steady_runs_call_no_python_and_read_back_one_flag_an_iteration() -> None:
    """Without loops on the device a search is three clusters."""
    decoder, weights = gpt_decoder()
    inputs, known = greedy_inputs(left_out=RULES), ["max_length"]
    model = search_model(
        "GreedySearch", inputs, ["sequences"], {"decoder": decoder}, weights,
        constant=known, eos_token_id=VOCABULARY, pad_token_id=PAD,
    )  # fmt: skip
    session = ort_cuda_plugin.session(model, emulate=True, provider_options={"device_loops": "0"})
    feeds = fed(inputs, known)
    expected = on_cpu(model, feeds)[0]
    session.run(None, feeds)
    before = ort_cuda_plugin.counters()
    np.testing.assert_array_equal(session.run(None, feeds)[0], expected)
    change = {name: after - before[name] for name, after in ort_cuda_plugin.counters().items()}
    iterations = ROOM - 5
    assert change["python_calls"] == 0
    assert change["host_value_reads"] == iterations
    assert change["copies_d2d"] == 1  # the search's result to the output
    assert change["copies_d2h"] == 1  # the output to NumPy
    assert change["device_bytes_in_use"] == 0
    assert all(verdict.supported for verdict in last_verdicts())


def test_half_precision_and_another_decoder_for_the_prompt() -> None:
    """The CPU provider supports neither float16 nor init_decoder; its float32 tokens are the same.

    Adversarial streams reveal a missing synchronization.
    """
    inputs = greedy_inputs(left_out=RULES)
    sizes: Any = {"eos_token_id": END, "pad_token_id": PAD}
    decoder, weights = small_decoder(seed=2)
    model = search_model("GreedySearch", inputs, ["sequences"], {"decoder": decoder}, weights, **sizes)
    expected = on_cpu(model, fed(inputs))[0]
    decoder, weights = small_decoder(seed=2, dtype=10)
    bodies = {"decoder": decoder, "init_decoder": small_decoder(dtype=10)[0]}
    half = search_model("GreedySearch", inputs, ["sequences"], bodies, weights, **sizes)
    with configured(adversarial=1, seed=3):
        found = ep_session(half).run(None, fed(inputs))[0]
    assert_same_tokens(found, expected)


SAMPLING: dict[str, Any] = {
    "from the worst": {"top_p": 0.6, "min_tokens_to_keep": 2, "temperature": 0.8},
    "from the best": {"top_p": 0.6, "custom": 1, "temperature": 0.8},
}


@pytest.mark.parametrize("how", SAMPLING)
def test_sampling_draws_the_tokens_of_the_cpu_provider(how: str) -> None:
    """Compare several seeds and prompts, without filtered_logits and presence_mask, which ONNX Runtime ignores."""
    decoder, weights = small_decoder(seed=3, scale=0.6)
    inputs = greedy_inputs(0, RULES)
    inputs |= {"presence_mask": None, "seed": np.array([0], np.int32)}
    model = search_model(
        "Sampling", inputs, ["sequences"], {"decoder": decoder}, weights,
        eos_token_id=END, pad_token_id=PAD, **SAMPLING[how],
    )  # fmt: skip
    session = ep_session(model)
    for seed in (0, 1, 77, 2**31 - 1):
        prompt = greedy_inputs(seed)["input_ids"]
        assert prompt is not None
        feeds = fed(inputs) | {"input_ids": prompt, "seed": np.array([seed], np.int32)}
        assert_same_tokens(session.run(None, feeds)[0], on_cpu(model, feeds)[0])


def test_sampling_takes_the_presence_penalty_off() -> None:
    """The presence penalty is so large that only the two tokens without it can be sampled in each row."""
    decoder, weights = small_decoder()
    inputs = greedy_inputs(0, RULES)
    left = np.array([[2, 5], [7, 16]])
    presence = np.ones((ROWS, VOCABULARY), np.int32)
    np.put_along_axis(presence, left, 0, axis=1)
    inputs |= {"presence_mask": presence}
    model = search_model(
        "Sampling", inputs, ["sequences"], {"decoder": decoder}, weights,
        eos_token_id=VOCABULARY, pad_token_id=PAD, presence_penalty=1000.0, top_p=1.0,
    )  # fmt: skip
    found = ep_session(model).run(None, fed(inputs))[0]
    for row, allowed in zip(found, left, strict=True):
        assert set(row[5:]) <= set(allowed)


def beam_inputs(prompts: int, beams: int, results: int, penalty: float, masks: bool) -> dict[str, Array | None]:
    inputs = greedy_inputs()
    inputs = {name: x if x is None or x.shape[0] != ROWS else x[:prompts] for name, x in inputs.items()}
    if not masks:
        inputs |= {"vocab_mask": None, "prefix_vocab_mask": None, "attention_mask": None}
    more: dict[str, Array | None] = {
        "num_beams": np.array([beams], np.int32),
        "num_return_sequences": np.array([results], np.int32),
        "length_penalty": np.array([penalty], np.float32),
    }
    order = (
        "input_ids max_length min_length num_beams num_return_sequences length_penalty repetition_penalty vocab_mask"
    )
    given = inputs | more
    return {name: given[name] for name in f"{order} prefix_vocab_mask attention_mask".split()}


@pytest.mark.parametrize(("prompts", "beams", "results", "early"), [(1, 3, 2, 0), (2, 4, 4, 1)])
def test_beam_search(prompts: int, beams: int, results: int, early: int) -> None:
    """Without early_stopping, compare one prompt only: the CPU provider mixes up several."""
    decoder, weights = small_decoder(scale=0.6)
    inputs = beam_inputs(prompts, beams, results, 1.5, masks=True)
    model = search_model(
        "BeamSearch", inputs, ["sequences", "sequences_scores"], {"decoder": decoder}, weights,
        eos_token_id=END, pad_token_id=PAD, early_stopping=early, no_repeat_ngram_size=2,
    )  # fmt: skip
    with configured(adversarial=1):
        session = ep_session(model)
        for seed in range(4):
            prompt = greedy_inputs(seed)["input_ids"]
            assert prompt is not None
            feeds = fed(inputs) | {"input_ids": prompt[:prompts]}
            tokens, scores = session.run(None, feeds)
            expected_tokens, expected_scores = on_cpu(model, feeds)
            np.testing.assert_array_equal(tokens, expected_tokens)
            np.testing.assert_allclose(scores, expected_scores, rtol=1e-5)


@pytest.mark.parametrize(
    ("op_type", "whisper", "decodes_first", "hidden", "prompts"),
    [
        ("BeamSearch", False, True, True, 2),
        ("BeamSearch", False, False, False, 2),
        ("WhisperBeamSearch", True, True, True, 2),
    ],
)
def test_beam_search_with_an_encoder(
    op_type: str, whisper: bool, decodes_first: bool, hidden: bool, prompts: int
) -> None:
    bodies, weights = encoder_decoder(whisper=whisper, decodes_first=decodes_first, hidden=hidden)
    inputs = beam_inputs(prompts, 3, 2, 1.0, masks=False)
    inputs["prefix_vocab_mask"] = greedy_inputs()["prefix_vocab_mask"][:prompts]  # type: ignore[index]
    sizes: dict[str, Any] = {"decoder_start_token_id": 6, "early_stopping": int(prompts > 1)}
    if op_type == "BeamSearch":
        sizes["model_type"] = 2 if whisper else 1
    if whisper:
        inputs["input_ids"] = np.random.default_rng(1).standard_normal((prompts, VOCABULARY, 6)).astype(np.float32)
        inputs["decoder_input_ids"] = np.array([[7, 9, 2]] * prompts, np.int32)
    model = search_model(
        op_type, inputs, ["sequences", "sequences_scores"], bodies, weights,
        outer=False, eos_token_id=END, pad_token_id=PAD, **sizes,
    )  # fmt: skip
    tokens, scores = ep_session(model).run(None, fed(inputs))
    expected_tokens, expected_scores = on_cpu(model, fed(inputs))
    np.testing.assert_array_equal(tokens, expected_tokens)
    np.testing.assert_allclose(scores, expected_scores, rtol=1e-5)


def test_beams_come_in_any_number_and_wrong_numbers_are_errors() -> None:
    decoder, weights = small_decoder(scale=0.6)
    inputs = beam_inputs(2, 4, 2, 1.0, masks=True)
    model = search_model(
        "BeamSearch", inputs, ["sequences"], {"decoder": decoder}, weights,
        eos_token_id=END, pad_token_id=PAD, early_stopping=1, no_repeat_ngram_size=2,
    )  # fmt: skip
    session = ep_session(model)
    for beams, results in ((1, 1), (5, 3)):
        feeds = fed(inputs) | {"num_beams": np.array([beams], np.int32)}
        feeds["num_return_sequences"] = np.array([results], np.int32)
        np.testing.assert_array_equal(session.run(None, feeds)[0], on_cpu(model, feeds)[0])
    for name, value, message in (
        ("num_beams", 129, r"num_beams must be in \[1, 128\]"),
        ("num_return_sequences", 5, r"num_return_sequences must be in \[1, num_beams\]"),
    ):
        with pytest.raises(Exception, match=message):
            session.run(None, fed(inputs) | {name: np.array([value], np.int32)})


def test_a_prompt_without_room_for_a_token_is_an_error() -> None:
    decoder, weights = small_decoder()
    inputs = greedy_inputs(left_out=RULES)
    model = search_model(
        "GreedySearch", inputs, ["sequences"], {"decoder": decoder}, weights, eos_token_id=END, pad_token_id=PAD
    )
    session = ep_session(model)
    with pytest.raises(Exception, match=r"GreedySearch.*max_length must be greater"):
        session.run(None, fed(inputs) | {"max_length": np.array([5], np.int32)})
    assert session.run(None, fed(inputs))[0].shape == (ROWS, ROOM)


def test_a_search_cannot_be_captured() -> None:
    """The host reads from the device whether the loop continues, so capture is an error, also in the checking mode."""
    decoder, weights = small_decoder()
    inputs = greedy_inputs(left_out=RULES)
    model = search_model(
        "GreedySearch", inputs, ["sequences"], {"decoder": decoder}, weights,
        constant=["max_length"], eos_token_id=VOCABULARY, pad_token_id=PAD,
    )  # fmt: skip
    with configured(check=1):
        session = ort_cuda_plugin.session(model, emulate=True, provider_options={"enable_cuda_graph": "1"})
        binding = session.io_binding()
        binding.bind_ortvalue_input("input_ids", on_device(fed(inputs)["input_ids"]))
        binding.bind_ortvalue_output("sequences", on_device(np.zeros((ROWS, ROOM), np.int32)))
        with pytest.raises(Exception, match="whether the loop continues, and a CUDA graph cannot capture"):
            session.run_with_iobinding(binding)


def test_tokens_outside_of_the_vocabulary_touch_no_other_memory() -> None:
    """The search's rules skip prompt tokens outside of the vocabulary. The decoder here does not read the tokens."""
    decoder, weights = small_decoder()
    decoder.node[0].input[1] = "position_ids"
    inputs = greedy_inputs(left_out=("attention_mask",))
    prompt = inputs["input_ids"]
    assert prompt is not None
    prompt[1, :3] = [-7, VOCABULARY, 2**31 - 1]
    model = search_model(
        "GreedySearch", inputs, ["sequences"], {"decoder": decoder}, weights,
        eos_token_id=END, pad_token_id=PAD, no_repeat_ngram_size=1,
    )  # fmt: skip
    found = ep_session(model).run(None, fed(inputs))[0]
    np.testing.assert_array_equal(found[:, :5], prompt)
    assert ((found[:, 5:] >= 0) & (found[:, 5:] < VOCABULARY)).all()


def test_a_search_that_is_left_to_the_cpu_has_its_bodies_there() -> None:
    """If the CPU provider runs a search, its bodies must run there too: the search reads their results on the host."""
    decoder, weights = gpt_decoder()
    decoder.node[-1].output[0] = "scores"
    decoder.node.append(helper.make_node("Cast", ["scores"], ["text"], to=TensorProto.STRING))
    decoder.node.append(helper.make_node("Cast", ["text"], ["logits"], to=TensorProto.FLOAT))
    inputs = greedy_inputs(left_out=("vocab_mask", "prefix_vocab_mask", "attention_mask"))
    model = search_model(
        "GreedySearch", inputs, ["sequences"], {"decoder": decoder}, weights, eos_token_id=END, pad_token_id=PAD
    )
    options = ort.SessionOptions()
    options.log_severity_level = 3
    ort_cuda_plugin.register(emulate=True)
    session = ort.InferenceSession(model, options, providers=["CudaPluginExecutionProvider", "CPUExecutionProvider"])
    assert_same_tokens(session.run(None, fed(inputs))[0], on_cpu(model, fed(inputs))[0])
    search, *body = last_verdicts()
    assert (search.op_type, search.supported) == ("GreedySearch", False)
    assert "in its bodies, node" in search.reason
    assert not any(verdict.supported for verdict in body)


def test_a_compiled_model_leaves_a_search_to_the_cpu(tmp_path: Path) -> None:
    decoder, weights = small_decoder()
    inputs = greedy_inputs()
    source = search_model(
        "GreedySearch", inputs, ["sequences"], {"decoder": decoder}, weights, eos_token_id=END, pad_token_id=PAD
    )
    ort_cuda_plugin.register(emulate=True)
    target = str(tmp_path / "m_ctx.onnx")
    ort.InferenceSession(source, settings({"ep.context_enable": "1", "ep.context_file_path": target}))
    assert [verdict.reason for verdict in last_verdicts() if verdict.op_type == "GreedySearch"] == [
        "a compiled model cannot contain BeamSearch, GreedySearch or similar operators"
    ]
