"""Text generation with `ort_cuda_plugin.generate`: the tokens, and the launches and device traffic of each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper, parser

import ort_cuda_plugin
from genai_decoder import CpuDecoder, compulsory_bytes, genai_decoder
from hybrid_decoder import greedy
from ort_cuda_plugin.ep.provider import last_provider
from ort_cuda_plugin.generate import Decoder
from ort_cuda_plugin.model.token_choice import read_inputs, with_token

PROMPT = np.array([[1, 5, 9, 33]])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a decoder whose weights are in a separate file, as onnxruntime-genai's builder stores them."""
    path: Path = tmp_path_factory.mktemp("decoder") / "model.onnx"
    onnx.save(genai_decoder(), path, save_as_external_data=True, location="model.onnx.data", size_threshold=512)
    return path


def test_128_tokens_are_those_of_the_cpu_provider_and_each_is_one_graph(model: Path) -> None:
    decoder = Decoder(model, max_length=136, emulate=True)
    placed = {part.ep_name for part in decoder.session.get_provider_graph_assignment_info()}
    assert placed == {ort_cuda_plugin.get_ep_name()}
    tokens = []
    for number, token in enumerate(decoder.generate(PROMPT, new_tokens=128)):
        tokens.append(token)
        if number == 8:
            before = ort_cuda_plugin.counters()
    after = ort_cuda_plugin.counters()
    changed = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert {name: changed.pop(name) for name in ("runs", "graph_replays", "copies_d2h", "plan_hits")} == dict.fromkeys(
        ("runs", "graph_replays", "copies_d2h", "plan_hits"), 119
    )
    # Only two other counters change: they count the launches of the replayed graph, and a copy of the mask onto itself.
    assert set(changed) <= {"launches", "copies_d2d"}
    assert np.array_equal(np.stack(tokens, 1), CpuDecoder(model).greedy(PROMPT, 128))
    assert np.array_equal(decoder.tokens, np.concatenate([PROMPT, np.stack(tokens, 1)], 1))


def test_a_token_reads_weights_and_cache_once(tmp_path: Path) -> None:
    """The kernels of a token read each weight and the K/V cache about once. 4-bit weights stay packed on the device."""
    made = genai_decoder(1, 256, 8, 2)
    path = tmp_path / "model.onnx"
    onnx.save(made, path)
    before = ort_cuda_plugin.counters()["weight_bytes"]
    decoder = Decoder(path, max_length=256, emulate=True)
    next(decoder.generate([[1]], new_tokens=1))
    provider = last_provider()
    assert provider is not None
    (traffic,) = (fused.traffic for fused in provider.fused_nodes)
    assert traffic is not None
    least = compulsory_bytes(made, 256)
    assert least <= traffic.asked.total <= 1.15 * least
    stored = sum(len(x.raw_data) for x in made.graph.initializer)
    assert ort_cuda_plugin.counters()["weight_bytes"] - before <= 1.01 * stored


def test_generation_goes_on_stops_and_goes_back(model: Path) -> None:
    decoder = Decoder(model, max_length=32, emulate=True, batch=2)
    prompt = np.array([[1, 5, 9, 33], [1, 8, 8, 2]])
    first = np.stack(list(decoder.generate(prompt, new_tokens=5)), 1)
    assert np.array_equal(first, CpuDecoder(model, batch=2).greedy(prompt, 5))
    more = np.array([[44, 45, 46], [7, 6, 5]])
    second = np.stack(list(decoder.generate(more, new_tokens=100)), 1)
    assert second.shape[1] == 32 - 12 + 1, "the last token needs no place in the cache"
    whole = np.concatenate([prompt, first, more], 1)  # CpuDecoder has no second prompt
    assert np.array_equal(second[:, :6], CpuDecoder(model, batch=2).greedy(whole, 6))
    decoder.rewind(9)
    assert np.array_equal(np.stack(list(decoder.generate(more, new_tokens=6)), 1), second[:, :6])
    decoder.rewind(9)
    stop = set(map(int, second[:, 2]))
    stopped = list(decoder.generate(more, new_tokens=6, stop=stop))
    assert len(stopped) == 3


def test_a_generation_whose_tokens_were_changed_ends_with_an_error(model: Path) -> None:
    decoder = Decoder(model, max_length=32, emulate=True)
    generation = decoder.generate(PROMPT, new_tokens=5)
    first = [int(next(generation)[0]) for _ in range(2)]
    decoder.rewind(PROMPT.shape[1])
    with pytest.raises(RuntimeError, match="token 2 of 5 cannot be generated: after the token before, rewind"):
        next(generation)
    assert decoder.tokens == PROMPT.tolist()
    decoder.rewind(0)
    assert [int(token[0]) for token in decoder.generate(PROMPT, new_tokens=2)] == first
    earlier = decoder.generate([[3]], new_tokens=5)
    next(earlier)
    assert len(list(decoder.generate([[4]], new_tokens=2))) == 2
    with pytest.raises(RuntimeError, match="another call of generate changed the sequences"):
        next(earlier)


def test_prompts_of_several_lengths(model: Path) -> None:
    """Each sequence of a batch gets the tokens that it gets alone, also after a second prompt and after rewinding."""
    prompts, more = [[1, 5, 9, 33, 8], [4, 2]], [[44], [7, 6, 5]]
    decoder = Decoder(model, max_length=16, emulate=True, batch=2)
    for expected in ([*prompts], [*prompts]):
        for new, count in ((prompts, 4), (more, 3)):
            got = np.stack(list(decoder.generate(new, new_tokens=count)), 1)
            for number, row in enumerate(new):
                expected[number] = expected[number] + (row if new is more else [])
                tokens = CpuDecoder(model).greedy(np.array([expected[number]]), count)[0].tolist()
                assert got[number].tolist() == tokens
                expected[number] = expected[number] + tokens
        assert decoder.tokens == expected
        decoder.rewind(0)


def sampled(logits: np.ndarray, draw: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Return the tokens [batch] sampled from logits [batch, vocabulary] with random numbers [batch] in [0, 1)."""
    chosen = []
    for row, number in zip(logits / np.float32(temperature), draw, strict=True):
        order = np.argsort(-row, kind="stable")[:top_k]
        probabilities = np.exp(row[order] - row[order[0]])
        probabilities /= probabilities.sum()
        kept = np.where(np.cumsum(probabilities) - probabilities < top_p, probabilities, 0)
        chosen.append(order[np.searchsorted(np.cumsum(kept), number * kept.sum(), side="right")])
    return np.array(chosen)


def test_tokens_are_sampled(model: Path) -> None:
    decoder = Decoder(model, max_length=32, emulate=True, batch=2, candidates=20)
    prompt = np.array([[1, 5, 9], [1, 8, 2]])
    settings = {"temperature": 1.5, "top_k": 9, "top_p": 0.8}

    def generated(**options: float) -> np.ndarray:
        decoder.rewind(0)
        return np.stack(list(decoder.generate(prompt, new_tokens=12, **options)), 1)  # type: ignore[arg-type]

    first = generated(seed=3, **settings)
    assert np.array_equal(generated(seed=3, **settings), first)
    assert not np.array_equal(generated(seed=4, **settings), first)
    cpu = CpuDecoder(model, batch=2)
    draws = np.random.default_rng(3).random((2, 32), np.float32)
    tokens = prompt
    for number in range(12):
        tokens = sampled(cpu.logits(tokens), draws[:, 2 + number], 1.5, 9, 0.8)[:, None]
        assert np.array_equal(tokens[:, 0], first[:, number]), number
    assert np.array_equal(generated(top_k=1), CpuDecoder(model, batch=2).greedy(prompt, 12))


@pytest.mark.parametrize(
    ("real", "cache_type"),
    [
        (TensorProto.BFLOAT16, None),
        (TensorProto.BFLOAT16, TensorProto.FLOAT8E4M3FN),
        (TensorProto.FLOAT, TensorProto.INT8),
    ],
    ids=["bfloat16", "float8", "int8"],
)
def test_caches_have_any_type_of_the_builder(real: int, cache_type: int | None, tmp_path: Path) -> None:
    """The first four tokens are those of a float32 decoder, since rounding of the cache does not change them."""
    made = genai_decoder(1, real=real, cache_type=cache_type)
    path, plain = tmp_path / "model.onnx", tmp_path / "plain.onnx"
    onnx.save(made, path)
    onnx.save(genai_decoder(1), plain)
    decoder = Decoder(path, max_length=16, emulate=True)
    tokens = np.stack(list(decoder.generate(PROMPT, new_tokens=4)), 1)
    assert np.array_equal(tokens, CpuDecoder(plain).greedy(PROMPT, 4))
    placed = {part.ep_name for part in decoder.session.get_provider_graph_assignment_info()}
    assert placed == {ort_cuda_plugin.get_ep_name()}


def test_positions_are_on_the_device(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(genai_decoder(1, positions=True), path)
    decoder = Decoder(path, max_length=32, emulate=True)
    for _ in range(2):
        decoder.rewind(0)
        tokens = np.stack(list(decoder.generate(PROMPT, new_tokens=9)), 1)
    assert np.array_equal(tokens, CpuDecoder(path).greedy(PROMPT, 9))


@pytest.mark.parametrize("max_length", [8, 24])
def test_tokens_and_not_the_mask_decide_which_factors_of_longrope_there_are(tmp_path: Path, max_length: int) -> None:
    """The number of tokens selects LongRoPE's short or long factors, although the mask is padded to ``max_length``.

    As in onnxruntime-genai, keys in the cache are computed again when the factors change.
    """
    path = tmp_path / "model.onnx"
    onnx.save(genai_decoder(1, longrope=8), path)
    decoder = Decoder(path, max_length=max_length, emulate=True)
    expected = PROMPT[0].tolist()
    for more in ([], [44, 45]) if max_length > 8 else ([],):
        prompt = more or expected
        expected = expected + more
        tokens = [int(token[0]) for token in decoder.generate([prompt], new_tokens=8)]
        assert tokens == greedy(path, expected, 8)[: len(tokens)]
        assert len(tokens) == (8 if max_length > 8 else 5)
        expected += tokens
    decoder.rewind(5)
    tokens = [int(token[0]) for token in decoder.generate([[7]], new_tokens=2)]
    assert tokens == greedy(path, [*expected[:5], 7], 2)


def test_longrope_changes_where_the_longest_sequence_does(tmp_path: Path) -> None:
    """A batch has one mask, so its longest sequence decides when all sequences change to the long factors."""
    path = tmp_path / "model.onnx"
    onnx.save(genai_decoder(1, longrope=8), path)
    plain = tmp_path / "long.onnx"
    onnx.save(genai_decoder(1, longrope=0), plain)
    decoder = Decoder(path, max_length=16, emulate=True, batch=2)
    first, second = np.stack(list(decoder.generate([[1, 5, 9, 33, 8, 4], [4, 2]], new_tokens=4)), 1).tolist()
    assert first == greedy(path, [1, 5, 9, 33, 8, 4], 4)
    assert second[:3] == greedy(path, [4, 2], 3)
    assert second[3:] == greedy(plain, [4, 2, *second[:3]], 1)


def test_errors_say_what_is_wrong(model: Path, tmp_path: Path) -> None:
    data = model.read_bytes()
    assert list(read_inputs(data).shapes)[:2] == ["input_ids", "attention_mask"]
    for damaged in (data[:200], b"\xff" * 40, data[:-1]):
        with pytest.raises(ValueError, match="not those of an ONNX model"):
            read_inputs(damaged)
    other = genai_decoder(1)
    other.graph.input[1].name = "mask"
    with pytest.raises(ValueError, match="missing: attention_mask"):
        with_token(other.SerializeToString(), 0)
    path = tmp_path / "model.onnx"
    unknown = genai_decoder(1)
    for value in unknown.graph.input[2:]:
        value.type.tensor_type.shape.dim[3].dim_param = "head_size"
    onnx.save(unknown, path)
    with pytest.raises(ValueError, match="Pass head_size"):
        Decoder(path, max_length=8, emulate=True)
    with pytest.raises(ValueError, match="max_length=0"):
        Decoder(path, max_length=0)
    decoder = Decoder(model, max_length=8, emulate=True)
    for prompt, wrong in (([[]], "0 new tokens"), ([[1] * 9], "9 new tokens"), ([[1], [2]], "2 sequences, expected 1")):
        with pytest.raises(ValueError, match=wrong):
            next(decoder.generate(prompt, new_tokens=1))
    for name, value in (("top_k", 2), ("top_p", 0.0), ("temperature", 0.0)):
        with pytest.raises(ValueError, match=f"{name}={value}"):
            next(decoder.generate([[1]], new_tokens=1, **{name: value}))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="length=1: expected 0 to 0"):
        decoder.rewind(1)


TINY = """<ir_version: 8, opset_import: ["" : 17]>
    tiny (int64[b, s] input_ids, int64[b, t] attention_mask, float[b, 2, p, d] past)
    => (float[b, s, 7] logits, float[b, 2, q, d] present)
    { eye = EyeLike <dtype = 1> (square)  logits = Gather(eye, input_ids)  present = Identity(past) }"""
NAMES = {"past": "past_key_values.0.key", "present": "present.0.key"}


def tiny(folder: Path, *changes: tuple[str, str]) -> Path:
    """Write the decoder `TINY` after replacing parts of its text, and return the file's path."""
    text = TINY
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    model = parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((7, 7), np.float32), "square"))
    for value in (*model.graph.input, *model.graph.output):
        value.name = NAMES.get(value.name, value.name)
    for node in model.graph.node:
        node.input[:] = [NAMES.get(name, name) for name in node.input]
        node.output[:] = [NAMES.get(name, name) for name in node.output]
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize(
    "text",
    [
        *("[]", "null", "3", '{"model": []}', '{"model": {"decoder": {}}}', "[" * 100_000, "{", "\udcff"),
        *(f'{{"model": {{"decoder": {{"head_size": {size}}}}}}}' for size in ("true", "0", "-4", "4.0", '"4"', "null")),
    ],
    ids=lambda text: ascii(text[:50]),
)
def test_a_configuration_without_a_head_size_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "genai_config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"genai_config.json: .*, or pass head_size"):
        Decoder(tiny(tmp_path), max_length=8, emulate=True)


def test_the_head_size_is_the_argument_or_that_of_the_configuration(tmp_path: Path) -> None:
    path, config = tiny(tmp_path), tmp_path / "genai_config.json"
    config.write_text('{"model": {"decoder": {"head_size": 4}}}')
    (token,) = Decoder(path, max_length=8, emulate=True).generate([[5]], new_tokens=1)
    assert token == [5]
    config.unlink()
    config.mkdir()
    Decoder(path, max_length=8, head_size=4, emulate=True)
    with pytest.raises(ValueError, match="cannot be read as JSON"):
        Decoder(path, max_length=8, emulate=True)
    with pytest.raises(ValueError, match="head_size=0"):
        Decoder(path, max_length=8, head_size=0, emulate=True)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (("float[b, s, 7] logits", "float[b, s, 7] scores"), "missing: logits"),
        (("float[b, 2, p, d] past", "float[b, 2, p] past"), r"shape \['b', 2, 'p'\], expected \[batch, heads"),
        (("float[b, 2, p, d] past", "float past"), r"shape \[\], expected \[batch, heads"),
        (
            ("float[b, 2, p, d]", "float[b, h, p, 4]"),
            r"past_key_values.0.key: got the shape \[.*\], expected numbers for heads and head size",
        ),
        (
            ("int64[b, t] attention", "int32[b, t] attention"),
            "attention_mask: got elements of ONNX type 6",
        ),
        (("d] past)", "d] past, float[b, s, 4] extra)"), "input extra: a Decoder cannot supply"),
        (("present", "next"), "no output with its new value, expected one named present.0.key"),
    ],
)
def test_a_model_that_is_no_decoder_is_an_error_that_says_why(
    tmp_path: Path, change: tuple[str, str], wrong: str
) -> None:
    changes = [change]
    if "scores" in change[1]:
        changes.append(("logits = Gather", "scores = Gather"))
    if "float past" in change[1] or "p] past" in change[1]:
        changes.append(("float[b, 2, q, d] present", "float present"))
    path = tiny(tmp_path, *changes)
    with pytest.raises(ValueError, match=wrong):
        Decoder(path, max_length=8, head_size=4 if "b, h" not in change[1] else None, emulate=True)
