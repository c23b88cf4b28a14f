"""Models fused by ONNX Runtime's transformer optimizer (BERT and GPT-2): the plugin runs all of their nodes."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

from encoder import encoder, encoder_inputs
from fused_models import assert_runs_whole, contributed, optimized
from gpt import gpt

# find_spec does not import sympy, which would take most of a second in each process that collects tests.
pytestmark = pytest.mark.skipif(
    find_spec("sympy") is None, reason="the optimizer's shape inference needs sympy: pip install sympy"
)

TOLERANCE = 1e-5
HEADS, HIDDEN, VOCABULARY = 4, 32, 64


def test_a_fused_bert_runs_whole() -> None:
    model = encoder(1, HIDDEN, HEADS, VOCABULARY, decomposed=True)
    fused = optimized(model, "bert", HEADS, HIDDEN)
    assert contributed(fused) == {"EmbedLayerNormalization", "Attention", "SkipLayerNormalization", "BiasGelu"}
    feeds = [encoder_inputs(*shape, vocabulary=VOCABULARY) for shape in ((2, 9), (3, 5))]
    assert_runs_whole(fused, model, feeds, TOLERANCE)


def test_a_fused_gpt_runs_whole() -> None:
    model = gpt(1, HIDDEN, HEADS, VOCABULARY)
    fused = optimized(model, "gpt2", HEADS, HIDDEN)
    assert contributed(fused) == {"EmbedLayerNormalization", "Attention", "SkipLayerNormalization", "FastGelu"}
    rng = np.random.default_rng(0)
    feeds = [{"input_ids": rng.integers(0, VOCABULARY, shape)} for shape in ((2, 9), (3, 5))]
    assert_runs_whole(fused, model, feeds, TOLERANCE)
