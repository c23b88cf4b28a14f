"""Mixture of experts (MoE), compared with the CPU provider, or with NumPy for options that it lacks."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import ort_cuda_plugin
from contributed import DISABLED, FLOAT, Array, check_node, loaded, node_model, noise
from emulator_harness import configured
from ort_cuda_plugin.abi.emulation import findings
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.lowering.context import DeviceProperties, LoweringOptions
from ort_versions import api_version
from session_pair import ep_session

EXPERTS, WIDTH, INNER = 6, 24, 20
FEW, MANY = 3, 40
"""Numbers of tokens. For few tokens, kernels have a block per choice of an expert; many are sorted by expert."""
SIZED = range(2)
"""Inputs with static shapes: the tokens and their scores. The plan then has kernels for this number of tokens only."""


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    """Run each test in the checking mode with adversarial streams; fail if there are findings."""
    with configured(adversarial=1, check=1, seed=7):
        yield
        assert findings() == []


def weights(parts: int = 1, third: bool = False) -> list[Array | None]:
    """Return MoE's inputs from fc1_experts_weights on; ``parts`` is 2 for swiglu's gate and linear part."""
    made: list[Array | None] = [
        noise(EXPERTS, parts * INNER, WIDTH, seed=2, scale=0.3),
        noise(EXPERTS, parts * INNER, seed=3),
        noise(EXPERTS, WIDTH, INNER, seed=4, scale=0.3),
        noise(EXPERTS, WIDTH, seed=5),
    ]
    return made + [noise(EXPERTS, INNER, WIDTH, seed=6, scale=0.3), noise(EXPERTS, INNER, seed=7)] if third else made


def tokens(count: int) -> list[Array | None]:
    return [noise(count, WIDTH), noise(count, EXPERTS, seed=1)]


@pytest.mark.parametrize(
    ("activation", "count"),
    [("relu", FEW), ("gelu", FEW), ("silu", FEW), ("identity", FEW), ("swiglu", FEW), ("swiglu", MANY)],
)
def test_moe_equals_the_cpu_provider(activation: str, count: int) -> None:
    attributes: dict[str, Any] = {"k": 3, "activation_type": activation, "normalize_routing_weights": count == FEW}
    parts = 1
    if activation == "swiglu":
        parts = 2
        attributes |= {"swiglu_fusion": 1, "activation_alpha": 1.7, "activation_beta": 1.0, "swiglu_limit": 0.5}
    given = [*tokens(count), *weights(parts)]
    check_node(
        "MoE",
        given,
        attributes,
        reals=[FLOAT],
        constant=[2, 3, 4, 5],
        tolerance=5e-5,
        sized=() if activation == "swiglu" else SIZED,
    )


def reference(
    x: Array,
    scores: Array,
    w1: Array,
    b1: Array | None,
    w2: Array,
    b2: Array | None,
    w3: Array | None = None,
    b3: Array | None = None,
    *,
    sparse: bool = False,
    fusion: int = 0,
    limit: float = np.inf,
) -> Array:
    """Compute MoE with two experts per token in float64, with the activation silu, or swiglu if ``fusion`` is not 0.

    ``fusion`` is the attribute swiglu_fusion. ``limit`` clamps the activated gate and the linear part.
    """
    rows = x.reshape(-1, x.shape[-1]).astype(np.float64)
    result = np.zeros_like(rows)
    for token, (row, score) in enumerate(zip(rows, scores.astype(np.float64), strict=True)):
        chosen = np.argsort(-score, kind="stable")[:2]
        powers = np.exp(score - score.max())
        counts = (powers / powers.sum())[chosen]
        if sparse:
            for place in range(2):
                best, left = score[chosen[place]], score.copy()
                far = best - score > 0.02 * np.maximum(np.abs(score), best)
                left[far] = -np.inf
                left[chosen[:place]] = -np.inf
                counts[place] = 1 / np.exp(left - best).sum()
        for expert, count in zip(chosen, counts, strict=True):
            first = w1[expert] @ row + (0 if b1 is None else b1[expert])
            if fusion:
                gate, linear = np.split(first, 2) if fusion == 2 else (first[::2], first[1::2])
            else:
                gate = first
                linear = 1.0 if w3 is None else w3[expert] @ row + (0 if b3 is None else b3[expert])
            between = np.minimum(gate / (1 + np.exp(-gate)), limit) * np.clip(linear, -limit, limit)
            result[token] += count * (w2[expert] @ between + (0 if b2 is None else b2[expert]))
    made: Array = result.reshape(x.shape).astype(np.float32)
    return made


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("count", [FEW, MANY])
def test_moe_with_third_weights(count: int, sparse: bool) -> None:
    """Some scores differ by less than the sparse mixer's threshold of 2 %, others by more."""
    x, scores = tokens(count)
    assert x is not None
    assert scores is not None
    given = [x.reshape(1, count, WIDTH), scores * np.float32(0.1) + 2, *weights(third=True)]
    attributes = {"k": 2, "activation_type": "silu", "use_sparse_mixer": int(sparse)}
    made = lambda *inputs: reference(*inputs, sparse=sparse)  # noqa: E731
    check_node("MoE", given, attributes, reference=made, reals=[FLOAT], tolerance=5e-5, sized=SIZED)


def in_older_shape(weights: Array | None) -> Array:
    """Return weights [experts, outputs, inputs] declared as [experts, inputs, outputs], without moving bytes."""
    assert weights is not None
    experts, outputs, inputs = weights.shape
    return weights.reshape(experts, inputs, outputs)


@pytest.mark.parametrize("sized", [SIZED, (1,)], ids=["known width", "any width"])
@pytest.mark.parametrize(
    ("activation", "inner"), [("relu", INNER), ("swiglu", INNER), ("swiglu", WIDTH), ("relu", WIDTH)]
)
def test_weights_may_declare_the_older_shape(activation: str, inner: int, sized: Collection[int]) -> None:
    """Models may declare weights as [experts, inputs, outputs]. Square weights have the same shape in both orders."""
    parts = 2 if activation == "swiglu" else 1
    first = noise(EXPERTS, parts * inner, WIDTH, seed=2, scale=0.3)
    second = noise(EXPERTS, WIDTH, inner, seed=4, scale=0.3)
    shifts = noise(EXPERTS, parts * inner, seed=3), noise(EXPERTS, WIDTH, seed=5)
    given = [*tokens(FEW), in_older_shape(first), shifts[0], in_older_shape(second), shifts[1]]
    attributes = {"k": 2, "activation_type": activation, "swiglu_fusion": parts - 1}
    check_node("MoE", given, attributes, reals=[FLOAT], constant=[2, 3, 4, 5], tolerance=5e-5, sized=sized)


def test_third_weights_may_declare_the_older_shape() -> None:
    first, _, second, _, third, _ = weights(third=True)
    given = [*tokens(FEW), first, None, second, None, third]
    attributes = {"k": 2, "activation_type": "silu"}
    older = [*given[:2], in_older_shape(first), None, in_older_shape(second), None, in_older_shape(third)]
    made = lambda *_: reference(*given)  # type: ignore[arg-type]  # noqa: E731
    check_node("MoE", older, attributes, reference=made, reals=[FLOAT], tolerance=5e-5, sized=SIZED)


def test_swiglu_without_third_weights_is_interleaved_where_nothing_says_so() -> None:
    """Without swiglu_fusion, gate and linear part are interleaved, as in CUDAExecutionProvider.

    Older models lack the attribute; the CPU provider rejects them.
    """
    first, _, second, _ = weights(2)
    given = [*tokens(FEW), first, None, second, None]
    made = lambda *inputs: reference(*inputs, fusion=1)  # noqa: E731
    attributes = {"k": 2, "activation_type": "swiglu", "activation_alpha": 1.0}
    check_node("MoE", given, attributes, reference=made, reals=[FLOAT], tolerance=5e-5, sized=SIZED)


@pytest.mark.parametrize("fusion", [0, 2])
def test_moe_whose_swiglu_is_in_two_products_or_in_halves(fusion: int) -> None:
    first, _, second, _, *third = weights(2 if fusion else 1, third=fusion == 0)
    given = [*tokens(FEW), first, None, second, None, *third[:1]]
    attributes = {"k": 2, "activation_type": "swiglu", "swiglu_fusion": fusion}
    made = lambda *inputs: reference(*inputs, fusion=fusion)  # noqa: E731
    check_node("MoE", given, attributes, reference=made, reals=[FLOAT], tolerance=5e-5, sized=SIZED)


@pytest.mark.skipif(api_version(ort.__version__) < 32, reason="a limit of the activated gate needs ONNX Runtime 1.32")
def test_the_limit_of_swiglu_may_follow_the_activation() -> None:
    given = [*tokens(FEW), *weights(2)]
    attributes = {
        "k": 2,
        "activation_type": "swiglu",
        "swiglu_fusion": 1,
        "swiglu_limit": 0.25,
        "swiglu_limit_after_activation": 1,
    }
    made = lambda *inputs: reference(*inputs, fusion=1, limit=0.25)  # noqa: E731
    check_node("MoE", given, attributes, reference=made, reals=[FLOAT], tolerance=5e-5, sized=SIZED)


@pytest.mark.parametrize("count", [FEW, MANY])
def test_any_scores_choose_experts_that_there_are(count: int) -> None:
    """With equal, infinite or NaN scores, a token still gets distinct experts, all within the weights."""
    model = node_model("MoE", [*tokens(count), *weights()], {"k": 4}, [FLOAT], constant=[2, 3, 4, 5])
    session = ep_session(model, DISABLED)
    scores = np.zeros((count, EXPERTS), np.float32)
    scores[0], scores[1], scores[2] = np.nan, -np.inf, np.inf
    (result,) = session.run(None, {"x0": noise(count, WIDTH), "x1": scores})
    assert np.isnan(result[:3]).all()
    assert np.isfinite(result[3:]).all()
    (result,) = session.run(None, {"x0": noise(0, WIDTH), "x1": scores[:0]})
    assert result.shape == (0, WIDTH)


def test_traffic_is_that_of_the_chosen_experts() -> None:
    """A token with two experts reads the weights of two experts only."""
    given = [*tokens(1), *weights()]
    model = node_model("MoE", given, {"k": 2}, [FLOAT], constant=[2, 3, 4, 5], sized=SIZED)
    cluster = CompiledCluster(read_model(loaded(model)), DeviceProperties(), LoweringOptions())
    texts: list[str] = []
    cluster.show_program = texts.append
    cluster.prepare()
    (summary,) = (line for text in texts for line in text.splitlines() if line.startswith("after emission"))
    experts = 2 * 2 * INNER * WIDTH * 4
    read = float(summary.split(" steps, ")[1].split(" kB read")[0]) * 1000
    assert experts < read < 1.6 * experts


def test_more_choices_than_experts_are_an_error() -> None:
    model = node_model("MoE", [*tokens(FEW), *weights()], {"k": EXPERTS + 1}, [FLOAT])
    feed = {f"x{i}": x for i, x in enumerate([*tokens(FEW), *weights()])}
    with pytest.raises(Exception, match="k must be at most"):
        ort_cuda_plugin.session(model, emulate=True).run(None, feed)
