"""com.microsoft's attention operators: masks, packed inputs, past keys and caches, compared with the CPU provider.

These tests use float32; test_contrib_types tests the other types.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import ort_cuda_plugin
from contributed import DISABLED, FLOAT, Array, check_node, node_model, noise
from session_pair import ep_session

B, S, N, H = 2, 5, 2, 4
MASKS: dict[str, Array] = {
    "lengths": np.array([3, 5]),
    "ends and starts": np.array([5, 4, 1, 0]),
    "per key": np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]),
    "per query and key": np.tril(np.ones((B, S, S))),
}
MASKS = {name: mask.astype(np.int32) for name, mask in MASKS.items()}


def padded(mask: Array, past: int) -> Array:
    """Extend a mask for ``past`` visible keys before the new ones. A one-dimensional mask contains lengths."""
    if mask.ndim == 1:
        moved: Array = (mask + past * (np.arange(mask.size) < B)).astype(np.int32)
        return moved
    wider: Array = np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(past, 0)], constant_values=1)
    return wider


@pytest.mark.parametrize("mask", [None, *MASKS])
@pytest.mark.parametrize("past", [0, 3])
def test_attention(mask: str | None, past: int) -> None:
    given = None if mask is None else padded(MASKS[mask], past)
    inputs = [
        noise(B, S, 6),
        noise(6, 3 * N * H, seed=1, scale=0.5),
        noise(3 * N * H, seed=2),
        given,
        noise(2, B, N, past, H, seed=3) if past else None,
    ]
    outputs = [FLOAT, FLOAT] if past else [FLOAT]
    check_node("Attention", inputs, {"num_heads": N}, outputs, reals=[FLOAT], constant=[1, 2])


@pytest.mark.parametrize("past", [0, 2])
@pytest.mark.parametrize("mask", [None, "lengths"])
def test_attention_to_previous_tokens(mask: str | None, past: int) -> None:
    """Attention with unidirectional=1. The CPU provider supports a bias only without past keys."""
    inputs = [
        noise(B, S, 6),
        noise(6, 3 * N * H, seed=1, scale=0.5),
        noise(3 * N * H, seed=2),
        None if mask is None else padded(MASKS[mask], past),
        noise(2, B, N, past, H, seed=3) if past else None,
        None if past else noise(1, N, S, S, seed=4),
    ]
    attributes = {"num_heads": N, "unidirectional": 1, "scale": 0.3, "mask_filter_value": -100.0}
    check_node("Attention", inputs, attributes, [FLOAT, FLOAT] if past else [FLOAT], reals=[FLOAT], constant=[1, 2])


def test_attention_whose_values_have_another_size() -> None:
    attributes = {"num_heads": N, "qkv_hidden_sizes": [8, 8, 12]}
    inputs = [noise(B, S, 6), noise(6, 28, seed=1), noise(28, seed=2)]
    check_node("Attention", inputs, attributes, reals=[FLOAT], constant=[1, 2])


@pytest.mark.parametrize("mask", [None, "lengths", "per key", "per query and key"])
@pytest.mark.parametrize("form", ["separate", "heads"])
def test_multi_head_attention(mask: str | None, form: str) -> None:
    query, key, value = noise(B, S, N * H), noise(B, S, N * H, seed=1), noise(B, S, N * 3, seed=2)
    bias: Array | None = noise(2 * N * H + N * 3, seed=3)
    inputs: list[Array | None] = [query, key, value, bias]
    if form == "heads":  # cross attention: K and V [batch, heads, sequence, size] already include their biases
        heads = [noise(B, N, S, H, seed=4), noise(B, N, S, H, seed=5)]
        inputs = [query, *heads, noise(3 * N * H, seed=3)]
    inputs.append(None if mask is None else MASKS[mask])
    inputs.append(noise(1, N, S, S, seed=7) if form == "separate" else None)
    check_node("MultiHeadAttention", inputs, {"num_heads": N}, reals=[FLOAT])


def attended(q: Array, k: Array, v: Array, mask: Array | None = None, causal: bool = False) -> Array:
    """Compute attention of tensors [batch, sequence, heads, size]; ``mask`` [batch, keys] is 0 for masked keys."""
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores - 10000.0 * (mask == 0)[:, None, None]
    if causal:
        more = max(0, k.shape[1] - q.shape[1])
        scores = np.where(np.tri(q.shape[1], k.shape[1], more) > 0, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    result = np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)
    merged: Array = result.reshape(*q.shape[:2], -1).astype(np.float32)
    return merged


def test_multi_head_attention_over_packed_inputs() -> None:
    def two(q: Array, kv: Array, _: None, __: None, mask: Array) -> Array:
        return attended(q.reshape(B, S, N, H), kv[..., 0, :], kv[..., 1, :], mask)

    def three(qkv: Array) -> Array:
        q, k, v = (qkv[..., number, :] for number in range(3))
        return attended(q, k, v, causal=True)

    attributes = {"num_heads": N}
    inputs = [noise(B, S, N * H), noise(B, S, N, 2, H, seed=6), None, None, MASKS["per key"]]
    check_node("MultiHeadAttention", inputs, attributes, reference=two, reals=[FLOAT])
    packed = [noise(B, S, N, 3, H)]
    check_node("MultiHeadAttention", packed, attributes | {"unidirectional": 1}, reference=three, reals=[FLOAT])


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_the_last_query_sees_all_keys(rows: int) -> None:
    """Causal attention with more keys than queries: the last query sees all keys, as in ONNX Runtime's CUDA provider.

    The CPU provider differs for the other queries, so NumPy is the reference.
    """

    def reference(q: Array, k: Array, v: Array) -> Array:
        q, k, v = (x.reshape(B, -1, N, H) for x in (q, k, v))
        return attended(q, k, v, causal=True)

    inputs = [noise(B, rows, N * H), noise(B, S, N * H, seed=1), noise(B, S, N * H, seed=2)]
    check_node("MultiHeadAttention", inputs, {"num_heads": N, "unidirectional": 1}, reference=reference, reals=[FLOAT])


@pytest.mark.parametrize("masked", [False, True])
def test_multi_head_attention_with_a_past(masked: bool) -> None:
    """Without a mask, also compare the output of attention scores."""
    inputs = [
        *(noise(B, S, N * H, seed=i) for i in range(3)),
        noise(3 * N * H, seed=3),
        np.array([[0, 1, 1, 1, 1, 1, 0], [1] * 7], np.int32) if masked else None,
        None,
        *(noise(B, N, 2, H, seed=i) for i in (4, 5)),
    ]
    attributes = {"num_heads": N, "scale": 0.4, "unidirectional": int(masked)}
    check_node("MultiHeadAttention", inputs, attributes, [FLOAT] * (3 if masked else 4), reals=[FLOAT])


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("form", ["one position", "positions", "heads", "part"])
def test_rotary_embedding(interleaved: int, form: str) -> None:
    size = H if form != "part" else 2 * H
    x = noise(B, N, S, size) if form == "heads" else noise(B, S, N * size)
    at: Array = np.array([3]) if form == "one position" else np.array([[0, 1, 2, 3, 4], [5, 3, 9, 2, 2]])
    angles = np.outer(np.arange(12), [1.0, 0.1]).astype(np.float32)
    attributes: dict[str, Any] = {"interleaved": interleaved}
    if form == "part":
        attributes |= {"num_heads": N, "rotary_embedding_dim": H}
    inputs = [x, at.astype(np.int64), np.cos(angles), np.sin(angles)]
    check_node("RotaryEmbedding", inputs, attributes, reals=[FLOAT])


def grouped_inputs(
    rows: int, past: int, room: int, lengths: list[int], *, packed: bool = False, rotary: bool = True
) -> list[Array | None]:
    """Return GroupQueryAttention's inputs: ``rows`` new tokens after ``past`` cached ones, for 4 query and 2 K/V heads.

    ``room`` is the number of tokens that the cache can hold, 0 for no cache.
    """
    batch, heads, kv_heads, size = len(lengths), 4, 2, 16
    widths = [heads * size, kv_heads * size, kv_heads * size]
    parts: list[Array | None] = [noise(batch, rows, width, seed=i) for i, width in enumerate(widths)]
    if packed:
        parts = [noise(batch, rows, sum(widths), seed=3), None, None]
    cache: list[Array | None] = [noise(batch, kv_heads, room, size, seed=i) for i in (4, 5)] if room else [None, None]
    angles = np.outer(np.arange(32), 0.6 ** np.arange(8)).astype(np.float32)
    return [
        *parts,
        *cache,
        np.array(lengths, np.int32) - 1,
        np.array(past + rows, np.int32),
        *((np.cos(angles), np.sin(angles)) if rotary else (None, None)),
    ]


GROUPED = {"num_heads": 4, "kv_num_heads": 2}


@pytest.mark.parametrize(
    ("rows", "past", "room", "lengths"),
    [
        (5, 0, 0, [5, 5]),  # a prompt
        (5, 0, 12, [5, 5]),  # a prompt into a larger cache
        (1, 6, 6, [7, 7]),  # a token after a past
        (1, 6, 12, [7, 4]),  # a token in a larger cache, two lengths
        (3, 4, 4, [7]),  # several tokens after a past
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_group_query_attention(rows: int, past: int, room: int, lengths: list[int], packed: bool) -> None:
    inputs = grouped_inputs(rows, past, room, lengths, packed=packed)

    def valid(number: int, y: Array) -> Array:
        """Return the defined part of an output: a cache has arbitrary contents after its sequence's last key."""
        if number == 0:
            return y
        return np.concatenate([row[:, :count].reshape(-1) for row, count in zip(y, lengths, strict=True)])

    attributes = GROUPED | {"do_rotary": 1}
    check_node("GroupQueryAttention", inputs, attributes, [FLOAT] * 3, reals=[FLOAT], part=valid, constant=[7, 8])


@pytest.mark.parametrize(
    "attributes",
    [
        {"local_window_size": 3},
        {"softcap": 2.0, "scale": 0.5},
        {"smooth_softmax": 1},
        {"do_rotary": 1, "rotary_interleaved": 1},
        {"causal": 0},
    ],
)
def test_attributes_of_group_query_attention(attributes: dict[str, float]) -> None:
    inputs = grouped_inputs(4, 3, 3, [7], rotary="do_rotary" in attributes)
    check_node("GroupQueryAttention", inputs, GROUPED | attributes, [FLOAT] * 3, reals=[FLOAT])


@pytest.mark.parametrize("kept", [1, 2])
def test_group_query_attention_with_a_sink_a_bias_positions_and_scores(kept: int) -> None:
    """qk_output=1 outputs the scores before the softmax, qk_output=2 those after it."""
    inputs = grouped_inputs(4, 0, 0, [4])
    inputs += [np.array([[2, 3, 4, 5]]), noise(1, 4, 4, 4, seed=8), noise(4, seed=9)]
    attributes = GROUPED | {"do_rotary": 1, "qk_output": kept}
    check_node("GroupQueryAttention", inputs, attributes, [FLOAT] * 4, reals=[FLOAT])


def test_past_and_present_may_be_one_buffer() -> None:
    """One buffer is bound as past and present. After the first step, no step calls Python or captures another graph."""
    room, lengths = 12, [7, 5]
    inputs = grouped_inputs(1, 6, room, lengths, packed=True)
    model = node_model(
        "GroupQueryAttention", inputs, GROUPED | {"do_rotary": 1}, [FLOAT] * 3, constant=[7, 8]
    )  # fmt: skip
    session = ep_session(model, DISABLED)
    cpu = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    memory = ort_cuda_plugin.register(emulate=True)[0].memory_info(ort.OrtDeviceMemoryType.DEFAULT)
    caches = {
        number: ort.OrtValue.ortvalue_from_numpy(inputs[number], "gpu", 0, memory.device_vendor_id) for number in (3, 4)
    }
    expected = {f"x{number}": inputs[number] for number in (3, 4)}
    start = ort_cuda_plugin.counters()
    for step in range(5):
        feed = {
            "x0": noise(2, 1, 128, seed=20 + step),
            "x5": np.array(lengths, np.int32) - 1 + step,
            "x6": np.array(7 + step, np.int32),
        }
        binding = session.io_binding()
        binding.bind_output("y0")
        for name, array in feed.items():
            binding.bind_cpu_input(name, array)
        for number, cache in caches.items():
            binding.bind_ortvalue_input(f"x{number}", cache)
            binding.bind_ortvalue_output(f"y{number - 2}", cache)
        before = ort_cuda_plugin.counters()
        session.run_with_iobinding(binding)
        after = ort_cuda_plugin.counters()
        assert after["python_calls"] - before["python_calls"] == (step == 0)
        wanted, *present = cpu.run(None, feed | expected)
        expected = {f"x{3 + i}": cache for i, cache in enumerate(present)}
        np.testing.assert_allclose(binding.get_outputs()[0].numpy(), wanted, 2e-5, 2e-5)
    end = ort_cuda_plugin.counters()
    assert end["graph_captures"] - start["graph_captures"] == 1
    assert end["graph_replays"] - start["graph_replays"] >= 2
