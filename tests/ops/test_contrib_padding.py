"""com.microsoft's operators on padded and packed sequences, compared with NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from onnx import TensorProto

from contributed import FLOAT, FLOAT16, Array, check_node, noise
from emulator_harness import configured

INT32 = TensorProto.INT32
B, S, N, H = 3, 4, 2, 8
LENGTHS = [3, 0, 4]
TOKENS = sum(LENGTHS)
STARTS = np.cumsum([0, *LENGTHS]).astype(np.int32)
IS_TOKEN = np.arange(S) < np.array(LENGTHS)[:, None]
PLACES = np.concatenate([np.flatnonzero(IS_TOKEN), np.flatnonzero(~IS_TOKEN)]).astype(np.int32).reshape(B, S)
REALS = [FLOAT, FLOAT16]


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    with configured(adversarial=1, check=1):
        yield


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    result: Array = e / e.sum(-1, keepdims=True)
    return result


def packed_attention(q: Array, k: Array, v: Array, bias: Array | None = None, scale: float = H**-0.5) -> Array:
    """Compute attention of packed tokens [tokens, heads, size] within each sequence."""
    results = []
    for batch, (start, end) in enumerate(itertools.pairwise(STARTS)):
        scores = np.einsum("qhd,khd->hqk", q[start:end], k[start:end]) * scale
        if bias is not None:
            scores = scores + bias[batch % len(bias), :, : end - start, : end - start]
        results.append(np.einsum("hqk,khd->qhd", softmax(scores), v[start:end]) if end > start else v[:0])
    merged: Array = np.concatenate(results).reshape(len(q), -1).astype(np.float32)
    return merged


def test_remove_padding() -> None:
    """Invalid lengths are clamped: -7 counts as 0, 900 as the padded length."""

    def reference(x: Array, _: Array) -> list[Array]:
        return [x[IS_TOKEN], PLACES, STARTS, np.array([max(LENGTHS)], np.int32)]

    inputs = [noise(B, S, 5), np.array([3, -7, 900], np.int32)]
    check_node("RemovePadding", inputs, {}, [FLOAT, INT32, INT32, INT32], reference=reference, reals=REALS)


def test_restore_padding() -> None:
    def reference(x: Array, places: Array) -> Array:
        result = np.zeros((B * S, x.shape[1]), np.float32)
        for row, place in zip(x, places.reshape(-1), strict=False):
            if 0 <= place < B * S:
                result[place] = row
        return result.reshape(B, S, -1)

    check_node("RestorePadding", [noise(TOKENS, 5), PLACES], reference=reference, reals=REALS)
    outside = np.array([[5, -1], [4000000, -3]], np.int32)
    check_node(
        "RestorePadding", [noise(6, 5), outside], reference=lambda *_: np.zeros((2, 2, 5), np.float32), reals=[FLOAT]
    )


def test_packed_attention() -> None:
    hidden = N * H

    def reference(x: Array, weights: Array, bias: Array, _: Array, __: Array, added: Array) -> Array:
        q, k, v = np.split((x @ weights + bias).reshape(TOKENS, 3 * N, H), 3, 1)
        return packed_attention(q, k, v, added)

    inputs = [noise(TOKENS, 6), noise(6, 3 * hidden, seed=1, scale=0.5), noise(3 * hidden, seed=2), PLACES, STARTS]
    inputs.append(noise(1, N, S, S, seed=3))
    check_node("PackedAttention", inputs, {"num_heads": N}, reference=reference, reals=[FLOAT16], constant=[1, 2])


def test_packed_multi_head_attention() -> None:
    def separate(q: Array, k: Array, v: Array, bias: Array, _: Array, __: Array, added: Array) -> Array:
        sizes = np.cumsum([N * H, N * H])
        q, k, v = (x + b for x, b in zip((q, k, v), np.split(bias, sizes), strict=True))
        q, k, v = (x.reshape(TOKENS, N, -1) for x in (q, k, v))
        return packed_attention(q, k, v, added)

    def together(x: Array, *_: Array | None) -> Array:
        return packed_attention(x[:, :, 0], x[:, :, 1], x[:, :, 2], scale=0.5)

    inputs = [noise(TOKENS, N * H), noise(TOKENS, N * H, seed=1), noise(TOKENS, N * 4, seed=2), noise(40, seed=3)]
    inputs += [PLACES, STARTS, noise(B, N, S, S, seed=4)]
    name, attributes = "PackedMultiHeadAttention", {"num_heads": N}
    check_node(name, inputs, attributes, reference=separate, reals=[FLOAT])
    packed = [noise(TOKENS, N, 3, H), None, None, None, PLACES, STARTS]
    check_node(name, packed, attributes | {"scale": 0.5}, reference=together, reals=[FLOAT16])


def test_packed_attention_reads_nothing_outside() -> None:
    """Invalid sequence starts and token offsets give zeros. The checking mode reports reads out of bounds."""
    starts, places = np.array([-5, 3, 1 << 30, 7], np.int32), PLACES.copy()
    places[0, :3] = [-1, 1 << 30, 2]

    def reference(q: Array, *_: Array | None) -> Array:
        return np.zeros((TOKENS, N * H), np.float32)

    inputs = [noise(TOKENS, N, 3, H), None, None, None, places, starts]
    check_node(
        "PackedMultiHeadAttention",
        inputs,
        {"num_heads": N},
        reference=reference,
        reals=[FLOAT],
        part=lambda number, y: y[:2],
    )
