"""com.microsoft's n-gram operators, compared with the CPU provider, also with indices and bounds out of range."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from onnx import TensorProto

from contributed import DISABLED, FLOAT, Array, check_in_place, check_node, node_model, noise
from emulator_harness import configured
from session_pair import ep_session

INT32, INT64 = int(TensorProto.INT32), int(TensorProto.INT64)
SIZES = {"max_ngram_size": 3, "n_head_per_ngram": 2, "pad_id": 7}
EOS = 3


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    with configured(adversarial=1, check=1):
        yield


def ids(*shape: int, seed: int = 0, dtype: type[np.generic] = np.int64, below: int = 6) -> Array:
    result: Array = np.random.default_rng([seed, *shape]).integers(0, below, shape).astype(dtype)
    return result


def weights(dtype: type[np.generic]) -> list[Array]:
    """Return multipliers whose products overflow, and the sizes of four vocabularies."""
    return [np.array([2**31 - 1, -77777777, 999], dtype), np.array([11, 101, 1009, 10007], dtype)]


@pytest.mark.parametrize("size", [1, 3])
def test_repeated_ngrams_are_blocked(size: int) -> None:
    text = ids(4, 12, below=3)
    check_node("NGramRepeatBlock", [text, noise(4, 5)], {"ngram_size": size}, reals=[FLOAT])
    # Texts shorter than an n-gram, and tokens outside the vocabulary, block no token.
    session = ep_session(node_model("NGramRepeatBlock", [text, noise(4, 5)], {"ngram_size": size}, [FLOAT]), DISABLED)
    scores = noise(1, 5)
    for short in (np.zeros((1, 0), np.int64), np.array([[2**62, -1, 2**62, -1, 2**62]])):
        np.testing.assert_array_equal(session.run(None, {"x0": short, "x1": scores})[0], scores)


def test_hashes() -> None:
    check_node("NGramHashMapping", [ids(2, 6), *weights(np.int64)], SIZES, [INT64, INT64], reals=[FLOAT])
    dtype = np.int32
    more = [ids(2, 2, seed=1, dtype=dtype), ids(4, seed=2, dtype=dtype), np.array(EOS, dtype)]
    segments = np.array([[0, 0, 1, 1, 1, 2], [5, 5, 5, 5, 4, 4]], dtype)
    given = [ids(2, 6, dtype=dtype), *weights(dtype), *more, segments]
    attributes = SIZES | {"reset_on_eos": 1}
    check_node("NGramHashMapping", given, attributes, [INT32, INT32], reals=[FLOAT])
    session = ep_session(node_model("NGramHashMapping", given, attributes, [INT32, INT32]), DISABLED)
    check_in_place(session, {f"x{i}": x for i, x in enumerate(given)}, {"x3": "y1"})


BOUNDS = np.array([0, 1, 6, 9], np.int32)


def packed(dtype: type[np.generic]) -> list[Array]:
    past, segments = ids(3, 2, seed=1, dtype=dtype), np.array([0, 0, 0, 1, 1, 1, 2, 2, 3], np.int32)
    past_segments = np.array([[0, 0], [0, 0], [1, 2]], np.int32)
    counts = np.array([2, 9, -1], np.int32)
    offsets = ids(4, seed=2, dtype=dtype)
    return [
        ids(9, dtype=dtype),
        *weights(dtype),
        BOUNDS,
        past,
        offsets,
        np.array(EOS, dtype),
        segments,
        past_segments,
        counts,
    ]


def test_packed_hashes() -> None:
    check_node("VarlenNGramHashMapping", [*packed(np.int64)[:4]], SIZES, [INT64, INT64], reals=[FLOAT])
    attributes = SIZES | {"reset_on_eos": 1, "state_update_capacity": 2}
    kinds = [INT32, INT32, INT32, INT32]
    check_node("VarlenNGramHashMapping", packed(np.int32), attributes, kinds, reals=[FLOAT])


def test_wrong_bounds_read_nothing_else() -> None:
    given = packed(np.int32)
    attributes = SIZES | {"reset_on_eos": 1, "state_update_capacity": 2}
    model = node_model("VarlenNGramHashMapping", given, attributes, [INT32, INT32, INT32, INT32])
    session = ep_session(model, DISABLED)
    feed = {f"x{i}": x for i, x in enumerate(given)}
    right = session.run(None, feed)
    check_in_place(session, feed, {"x4": "y1", "x8": "y2"})
    for bounds in ([0, 2**31 - 1, -(2**31), 9], [9, 5, 5, 2], [-3, -2, -1, 0]):
        wrong = session.run(None, feed | {"x3": np.array(bounds, np.int32), "x9": np.full(3, 2**31 - 1, np.int32)})
        assert [x.shape for x in wrong] == [x.shape for x in right]
        assert np.all((wrong[0] >= 0) & (wrong[0] < 10007 + 6))


def test_a_vocabulary_without_words_gives_0() -> None:
    given = [ids(1, 3), weights(np.int64)[0], np.array([0, 5, -4, 7])]
    result = ep_session(node_model("NGramHashMapping", given, SIZES, [INT64]), DISABLED).run(
        None, {f"x{i}": x for i, x in enumerate(given)}
    )[0]
    assert not result[..., [0, 2]].any()
