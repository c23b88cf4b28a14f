"""TfIdfVectorizer, compared with onnx.reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from kernel_harness import make_model, run_op
from ort_cuda_plugin.model.ir import InvalidModel, NodeError


@settings(max_examples=30)
@given(st.data())
def test_counts(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    numbers = [data.draw(st.integers(0, 4)) for _ in range(3)]
    if not any(numbers):
        numbers[0] = 1
    pool: list[int] = []
    starts = []
    for length, count in enumerate(numbers, 1):
        starts.append(len(pool))
        pool += rng.integers(0, 3, length * count).tolist()
    total = sum(numbers)
    columns = rng.permutation(total + 1)[:total].tolist()
    low = data.draw(st.integers(1, 3))
    attributes = {
        "min_gram_length": low,
        "max_gram_length": data.draw(st.integers(low, 3)),
        "max_skip_count": data.draw(st.sampled_from([0, 2])),
        "mode": data.draw(st.sampled_from(["TF", "IDF", "TFIDF"])),
        "ngram_counts": starts,
        "ngram_indexes": columns,
        "pool_int64s": pool,
    }
    if data.draw(st.booleans()):
        attributes["weights"] = rng.uniform(0.5, 2, max(columns) + 1).astype(np.float32).tolist()
    shape = data.draw(st.sampled_from([(12,), (1,), (3, 7), (1, 2)]))
    x = rng.integers(0, 3, shape).astype(data.draw(st.sampled_from([np.int32, np.int64])))
    # onnx.reference lacks the default of weights, which is 1.
    weighted = {"weights": [1.0] * (max(columns) + 1)} | attributes
    (expected,) = ReferenceEvaluator(make_model("TfIdfVectorizer", [x], weighted)).run(None, {"x0": x})
    for dynamic in (False, True):
        (y,) = run_op("TfIdfVectorizer", [x], attributes, dynamic=dynamic)
        np.testing.assert_allclose(y, np.asarray(expected), rtol=1e-6)


VALID = {"min_gram_length": 1, "max_gram_length": 2, "max_skip_count": 0, "mode": "TF"}
VALID |= {"ngram_counts": [0, 2], "ngram_indexes": [0, 1, 2], "pool_int64s": [5, 6, 5, 6]}


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_nothing_occurs_in_nothing(shape: tuple[int, ...]) -> None:
    (y,) = run_op("TfIdfVectorizer", [np.zeros(shape, np.int64)], VALID)
    assert y.shape == (*shape[:-1], 3)
    assert not y.any()


@pytest.mark.parametrize(
    "wrong",
    [
        {"ngram_counts": [0, 9]},
        {"ngram_counts": [2, 0]},
        {"ngram_counts": [0, 3]},
        {"ngram_indexes": [0, 1]},
        {"ngram_indexes": [0, -1, 2]},
        {"weights": [1.0]},
        {"mode": "COUNT"},
        {"min_gram_length": 3},
        {"max_skip_count": -1},
        {"pool_strings": ["a"]},
    ],
)
def test_attributes_that_do_not_fit_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((NodeError, InvalidModel)):
        run_op("TfIdfVectorizer", [np.arange(4)], VALID | wrong)
