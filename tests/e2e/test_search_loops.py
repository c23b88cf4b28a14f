"""Searches (com.microsoft) as loops on the device: a request is one launch of a CUDA graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import ort_cuda_plugin
from ort_cuda_plugin.ep.provider import last_verdicts
from search_decoders import attention_bodies
from searches import VOCABULARY, WIDTH, Array, encoder_decoder, gpt_decoder, search_model

END, PAD, ROOM = 4, 3, 14
ON_DEVICE = "a loop on the device; without a CUDA graph the host reads a flag before each iteration"

COPIES_OF_A_STEP = 4
"""Copies within the device for each token of BeamSearch, whatever the number of layers."""

Feeds = dict[str, Array]


def whisper(
    bodies: dict[str, onnx.GraphProto], weights: dict[str, Array], beams: int, *, prompts: int = 2, **changes: Array
) -> tuple[bytes, Feeds]:
    """Return a WhisperBeamSearch for ``prompts`` prompts, with ``beams`` beams, and its inputs."""
    width = WIDTH if "head" in weights else VOCABULARY
    order = "input_ids max_length min_length num_beams num_return_sequences length_penalty repetition_penalty"
    order = f"{order} vocab_mask prefix_vocab_mask attention_mask decoder_input_ids"
    feeds: Feeds = {
        "input_ids": np.random.default_rng(1).standard_normal((prompts, width, 6)).astype(np.float32),
        "max_length": np.array([ROOM], np.int32),
        "min_length": np.array([9], np.int32),
        "num_beams": np.array([beams], np.int32),
        "num_return_sequences": np.array([beams], np.int32),
        "length_penalty": np.array([1.0], np.float32),
        "repetition_penalty": np.array([1.2], np.float32),
        "decoder_input_ids": np.array([[7, 9, 2]] * prompts, np.int32),
    } | changes
    model = search_model(
        "WhisperBeamSearch", {name: feeds.get(name) for name in order.split()}, ["sequences", "sequences_scores"],
        bodies, weights, outer=False, eos_token_id=END, pad_token_id=PAD, decoder_start_token_id=6, early_stopping=1,
        no_repeat_ngram_size=3,
    )  # fmt: skip
    return model, feeds


def note() -> str:
    """Return the note in the verdict on the search node of the last session."""
    (found,) = [verdict.note for verdict in last_verdicts() if "Search" in verdict.op_type]
    return found


def session_of(model: bytes, **options: str) -> ort.InferenceSession:
    session: ort.InferenceSession = ort_cuda_plugin.session(model, emulate=True, provider_options=options)
    return session


def on_cpu(model: bytes, feeds: Feeds) -> list[Any]:
    results: list[Any] = ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, feeds)
    return results


def assert_same(found: list[Any], expected: list[Any]) -> None:
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-4)


def counted(session: ort.InferenceSession, feeds: Feeds) -> tuple[list[Any], dict[str, int]]:
    """Return the results of a Run, and what it adds to the counters."""
    before = ort_cuda_plugin.counters()
    results = session.run(None, feeds)
    after = ort_cuda_plugin.counters()
    return results, {name: after[name] - before[name] for name in after}


@pytest.mark.parametrize("beams", [1, 3])
def test_a_whisper_request_is_one_launch_of_a_graph(beams: int) -> None:
    model, feeds = whisper(*attention_bodies(), beams)
    expected = on_cpu(model, feeds)
    session = session_of(model)
    assert note() == ON_DEVICE
    runs = []
    for _ in range(5):
        found, change = counted(session, feeds)
        assert_same(found, expected)
        runs.append(change)
    steps = ROOM - 3 - 1
    assert (runs[1]["device_loop_iterations"], runs[1]["graph_replays"]) == (steps, 0)
    # Each step copies the tokens and hypotheses so far, which kernels read to write the next ones, but no cache.
    assert (runs[1]["copies_d2d"] - runs[3]["copies_d2d"]) // steps == COPIES_OF_A_STEP
    for steady in runs[3:]:
        assert (steady["graph_replays"], steady["graph_captures"], steady["device_loops"]) == (1, 0, 1)
        assert (steady["python_calls"], steady["device_loop_iterations"]) == (0, 0)
        # The host reads max_length, num_beams and num_return_sequences, which the application has in host memory.
        assert (steady["copies_h2d"], steady["copies_d2h"], steady["host_value_reads"]) == (len(feeds), 2, 3)


@pytest.mark.parametrize("attention", ["DecoderMaskedMultiHeadAttention", "MatMul"])
def test_other_kinds_of_self_attention(attention: str) -> None:
    """The decoders compute the same. ONNX Runtime's search accepts DecoderMaskedMultiHeadAttention only with a shared
    buffer, so compare with MultiHeadAttention.
    """
    model, feeds = whisper(*attention_bodies(attention, layers=2), 3)
    expected = on_cpu(whisper(*attention_bodies(layers=2), 3)[0], feeds)
    session = session_of(model)
    assert note() == ON_DEVICE
    for _ in range(3):
        assert_same(session.run(None, feeds), expected)


@pytest.mark.parametrize("attention", ["DecoderMaskedMultiHeadAttention", "MultiHeadAttention"])
def test_past_and_present_that_share_buffers(attention: str) -> None:
    """Exports for CUDAExecutionProvider have such decoders. The CPU provider returns NaN for them, so compare with the
    same decoder without shared buffers.
    """
    model, feeds = whisper(*attention_bodies(attention, is_shared=True), 3)
    expected = on_cpu(whisper(*attention_bodies(), 3)[0], feeds)
    session = session_of(model)
    assert note() == ON_DEVICE
    for _ in range(3):
        assert_same(session.run(None, feeds), expected)
    with pytest.raises(Exception, match=r"share buffers; .* on the device either: the option device_loops is 0"):
        session_of(model, device_loops="0")


def test_t5_with_a_relative_position_bias() -> None:
    """The CPU provider has no RelativePositionBias, so compare with the search as three clusters."""
    bodies, weights = attention_bodies(t5=True)
    feeds: Feeds = {
        "input_ids": np.random.default_rng(2).integers(5, VOCABULARY, (2, 6)).astype(np.int32),
        "max_length": np.array([ROOM], np.int32),
        "min_length": np.array([9], np.int32),
        "num_beams": np.array([3], np.int32),
        "num_return_sequences": np.array([2], np.int32),
        "length_penalty": np.array([1.0], np.float32),
    }
    model = search_model(
        "BeamSearch", feeds, ["sequences", "sequences_scores"], bodies, weights, outer=False, model_type=1,
        eos_token_id=END, pad_token_id=PAD, decoder_start_token_id=6, early_stopping=1,
    )  # fmt: skip
    expected = session_of(model, device_loops="0").run(None, feeds)
    assert note() == "the host reads a flag after each token: the option device_loops is 0"
    session = session_of(model)
    assert note() == ON_DEVICE
    for _ in range(3):
        assert_same(session.run(None, feeds), expected)


def test_gpt_greedy_search() -> None:
    decoder, weights = gpt_decoder()
    prompt = np.random.default_rng(0).integers(5, VOCABULARY, (2, 5)).astype(np.int32)
    prompt[0, :2] = PAD
    inputs: dict[str, Array | None] = {"input_ids": prompt, "max_length": np.array([ROOM], np.int32)}
    model = search_model(
        "GreedySearch", inputs, ["sequences"], {"decoder": decoder}, weights, constant=["max_length"],
        eos_token_id=END, pad_token_id=PAD, no_repeat_ngram_size=2,
    )  # fmt: skip
    feeds = {"input_ids": prompt}
    expected = on_cpu(model, feeds)
    session = session_of(model)
    assert note() == ON_DEVICE
    for run in range(4):
        found, change = counted(session, feeds)
        np.testing.assert_array_equal(found[0], expected[0])
        assert change["graph_replays"] == (run >= 2)
    assert (change["python_calls"], change["host_value_reads"], change["copies_d2h"]) == (0, 0, 1)


def test_other_sizes_need_no_further_plan() -> None:
    bodies, weights = encoder_decoder(whisper=True, hidden=True)
    model, feeds = whisper(bodies, weights, 3)
    session = session_of(model)
    session.run(None, feeds)
    before = ort_cuda_plugin.counters()["plan_variants_built"]
    for changes in (
        {"max_length": np.array([20], np.int32)},
        {"max_length": np.array([5], np.int32)},
        {"num_beams": np.array([2], np.int32), "num_return_sequences": np.array([1], np.int32)},
        {
            "input_ids": np.resize(feeds["input_ids"], (3, VOCABULARY, 4)),
            "decoder_input_ids": np.full((3, 2), 7, np.int32),
        },
    ):
        assert_same(session.run(None, feeds | changes), on_cpu(model, feeds | changes))
    assert ort_cuda_plugin.counters()["plan_variants_built"] == before


def test_a_search_with_room_for_one_token_has_no_step() -> None:
    """The CPU provider fails, since it calls the decoder nevertheless."""
    model, feeds = whisper(*encoder_decoder(whisper=True, hidden=True), 1)
    session = session_of(model)
    expected, _ = session.run(None, feeds)
    for _ in range(4):
        (tokens, _), change = counted(session, feeds | {"max_length": np.array([4], np.int32)})
        np.testing.assert_array_equal(tokens, expected[:, :, :4])
    assert (change["graph_replays"], change["device_loops"]) == (1, 1)


def test_max_length_beyond_the_positions_is_an_error() -> None:
    """The decoder has 40 positions. ONNX Runtime fails in the step that needs another one."""
    model, feeds = whisper(*attention_bodies(), 1)
    session = session_of(model)
    assert session.run(None, feeds | {"max_length": np.array([41], np.int32)})[0].shape[2] == 41
    with pytest.raises(Exception, match="max_length must be at most 1 more than the number of rows"):
        session.run(None, feeds | {"max_length": np.array([42], np.int32)})


# ---- rules of operators ----

RULES = {
    "means, sums and smallest": """
        mean = ReduceMean <axes = [2], keepdims = 0> (present)
        axes = Constant <value_ints = [2, 1]> ()
        sum = ReduceSum (present, axes)  row = Squeeze (sum, axes)  some = Unsqueeze (row, one)
        least = ReduceMin <axes = [2], keepdims = 0> (present)
        part = Sum (mean, some, least)""",
    "the last row": """
        last = Constant <value_ints = [-1]> ()  far = Constant <value_ints = [9223372036854775807]> ()
        axis = Constant <value_ints = [2]> ()
        row = Slice (present, last, far, axis)
        part = Squeeze (row, one)""",
    "the row at the past's length": """
        sizes = Shape (past)  two = Constant <value_int = 2> ()
        length = Gather (sizes, two)  zero = Constant <value_ints = [0]> ()
        start = Unsqueeze (length, zero)  end = Add (start, one)
        axis = Constant <value_ints = [2]> ()
        row = Slice (present, start, end, axis)
        part = Squeeze (row, one)""",
    "weights by index": """
        sizes = Shape <start = 2, end = 3> (present)  zero = Constant <value_ints = [0]> ()
        total = Squeeze (sizes, zero)
        none = Constant <value_int = 0> ()  step = Constant <value_int = 1> ()
        index = Range (none, total, step)
        real = Cast <to = 1> (index)  count = Cast <to = 1> (total)
        share = Div (real, count)  column = Unsqueeze (share, one)
        weighed = Mul (present, column)
        part = ReduceMax <axes = [2], keepdims = 0> (weighed)""",
    "attention": """
        query = Unsqueeze (x, one)  keys = Transpose <perm = [0, 1, 3, 2]> (present)
        scores = MatMul (query, keys)  shares = Softmax <axis = -1> (scores)
        mixed = MatMul (shares, present)  part = Squeeze (mixed, one)""",
    "other shapes": """
        shape = Constant <value_ints = [0, -1, 17]> ()
        rows = Reshape (present, shape)
        sizes = Shape (present)  order = Constant <value_ints = [0, 2, 3]> ()
        wanted = Gather (sizes, order)
        same = Reshape (present, wanted)  both = Mul (rows, same)
        part = ReduceMax <axes = [1], keepdims = 1> (both)""",
    "a mask by index": """
        sizes = Shape <start = 2, end = 3> (present)  zero = Constant <value_ints = [0]> ()
        total = Squeeze (sizes, zero)  none = Constant <value_int = 0> ()  step = Constant <value_int = 1> ()
        index = Range (none, total, step)  before = Sub (total, step)  next = Range (before, total, step)
        is_past = Less (index, next)  column = Unsqueeze (is_past, one)
        low = Constant <value_float = -3.0> ()
        masked = Where (column, present, low)
        part = ReduceMax <axes = [2], keepdims = 0> (masked)""",
}
REFUSED = {
    "CumSum": (
        "axis = Constant <value_int = 2> ()  sums = CumSum (present, axis)"
        "  part = ReduceMax <axes = [2], keepdims = 0> (sums)",
        "node sums (CumSum): it reads 'present_key_self_0', which depends on the number of cached keys; supported: ",
    ),
    "ReduceMax": (
        "most = ReduceMax <keepdims = 0> (present)  part = Add (x, most)",
        "node most (ReduceMax): axes is missing or empty, and input 0 grows in each iteration; supported: ",
    ),
    "Range": (
        "sizes = Shape <start = 2, end = 3> (present)  none = Constant <value_int = 0> ()"
        "  more = Add (sizes, sizes)  end = Squeeze (more)  step = Constant <value_int = 1> ()"
        "  index = Range (none, end, step)  most = ReduceMax <keepdims = 0> (index)"
        "  real = Cast <to = 1> (most)  part = Add (x, real)",
        "node index (Range): its elements are from 0 to (2*past + 2) (past: ",
    ),
    "Slice": (
        "sizes = Shape <start = 2, end = 3> (present)  two = Constant <value_ints = [2]> ()"
        "  rows = Slice (present, one, sizes, two)  part = ReduceMax <axes = [2], keepdims = 0> (rows)",
        "node rows (Slice): slice [1:(past + 1)] of an axis that grows in each iteration",
    ),
    "Gather": (
        "at = Constant <value_int = 0> ()  row = Gather <axis = 2> (present, at)  part = Identity (row)",
        "node row (Gather): input 0 ('present_key_self_0') is a tensor that grows in each iteration",
    ),
}


def with_part(nodes: str) -> tuple[dict[str, onnx.GraphProto], dict[str, Array]]:
    """Return Whisper's bodies, whose decoder adds ``part`` to the logits, and their weights.

    ``nodes`` compute ``part`` [rows, 1, 17] from the last tokens' ``x`` [rows, 1, 17] and the cache ``present`` [rows,
    1, keys, 17].
    """
    bodies, weights = encoder_decoder(whisper=True, hidden=True)
    inputs = "float[b, 1, k, 17] past, float[b, 1, l, 17] present, float[b, 1, 17] x"
    made = list(onnx.parser.parse_graph(f"decoder ({inputs}) => (float part) {{ {nodes} }}").node)
    decoder = bodies["decoder"]
    names = {"past": "past_key_self_0", "present": "present_key_self_0", "one": "first"}
    for node in made:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.name = node.output[0]
    rest = list(decoder.node)
    assert rest[-1].op_type == "Sum"
    rest[-1].input.append("part")
    del decoder.node[:]
    decoder.node.extend([*rest[:-1], *made, rest[-1]])
    return bodies, weights


@pytest.mark.parametrize("name", RULES)
def test_rules_of_operators_on_growing_tensors(name: str) -> None:
    model, feeds = whisper(*with_part(RULES[name]), 2)
    session = session_of(model)
    assert note() == ON_DEVICE
    assert_same(session.run(None, feeds), on_cpu(model, feeds))


@pytest.mark.parametrize("operator", REFUSED)
def test_a_decoder_without_a_rule_runs_as_three_clusters(operator: str) -> None:
    nodes, reason = REFUSED[operator]
    model, feeds = whisper(*with_part(nodes), 2)
    session = session_of(model)
    assert note().startswith(f"the host reads a flag after each token: in its decoder, {reason}")
    found, change = counted(session, feeds)
    assert_same(found, on_cpu(model, feeds))
    assert (change["device_loops"], change["host_value_reads"] > 3) == (0, True)
