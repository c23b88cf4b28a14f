"""com.microsoft's decoder attention (one new token, beams), compared with the CPU provider or NumPy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from contributed import DISABLED, FLOAT, FLOAT16, Array, check_in_place, check_node, node_model, noise
from emulator_harness import configured
from session_pair import ep_session

B, N, H, ROOM, PAST = 4, 2, 16, 6, 3
LENGTH = np.array(PAST, np.int32)
MASK = np.array([[1, 1, 1, 1], [0, 1, 1, 1], [1, 1, 0, 1], [1, 1, 1, 1]], np.int32)


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    with configured(adversarial=1, check=1):
        yield


def attended(q: Array, k: Array, v: Array, added: Array | float = 0.0) -> Array:
    """Compute attention of tensors [batch, heads, sequence, size]; the result is [batch, sequence, heads * size]."""
    scores = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1]) + added
    e = np.exp(scores - scores.max(-1, keepdims=True))
    result = (e / e.sum(-1, keepdims=True)) @ v
    merged: Array = result.transpose(0, 2, 1, 3).reshape(len(q), q.shape[2], -1).astype(np.float32)
    return merged


def test_self_attention_equals_the_cpu_provider() -> None:
    """The present is a buffer with unused space at its end. It may be the past's buffer or another one."""
    inputs = [
        *(noise(B, 1, N * H, seed=i) for i in range(3)),
        MASK,
        noise(1, N, 1, PAST + 1, seed=3),
        *(noise(B, N, ROOM, H, seed=i) for i in (4, 5)),
        LENGTH,
        None,
        None,
        noise(3 * N * H, seed=6),
    ]
    attributes = {"num_heads": N, "past_present_share_buffer": 1, "output_qk": 1}
    outputs, reals = [FLOAT] * 4, [FLOAT, FLOAT16]
    check_node(
        "DecoderMaskedMultiHeadAttention", inputs, attributes, outputs, reals=reals, part=valid, wide_outputs=[3]
    )
    model = node_model("DecoderMaskedMultiHeadAttention", inputs, attributes, outputs)
    feed = {f"x{i}": x for i, x in enumerate(inputs) if x is not None}
    check_in_place(ep_session(model, DISABLED), feed, {"x5": "y1", "x6": "y2"}, valid)


def test_cross_attention_equals_the_cpu_provider() -> None:
    """The output of scores may have another element type than the attention output."""
    inputs = [noise(B, 1, N * H), *(noise(B, N, PAST + 1, H, seed=i) for i in (1, 2)), MASK, *[None] * 6]
    attributes = {"num_heads": N, "scale": 0.4, "output_qk": 1}
    name, outputs = "DecoderMaskedMultiHeadAttention", [FLOAT, None, None, FLOAT]
    check_node(name, inputs, attributes, outputs, reals=[FLOAT16], wide_outputs=[3])

    def reference(q: Array, k: Array, v: Array, mask: Array, *_: Array | None) -> list[Array]:
        scores = q.reshape(B, N, 1, H) @ k.swapaxes(2, 3) * 0.4 - 10000.0 * (mask == 0)[:, None, None]
        e = np.exp(scores - scores.max(-1, keepdims=True))
        output = (e / e.sum(-1, keepdims=True)) @ v
        return [output.reshape(B, 1, -1).astype(np.float32), scores.astype(np.float16)]

    outputs = [FLOAT, None, None, FLOAT16]
    check_node(name, inputs, attributes, outputs, reals=[FLOAT], reference=reference, tolerance=4e-3)


def valid(number: int, y: Array) -> Array:
    """Return the defined part of an output: a cache has arbitrary contents after its last key."""
    return y[:, :, : PAST + 1] if number in (1, 2) else y


def of_beams(cache: Array, beams: Array) -> Array:
    """Gather a cache [batch * beams, heads, keys, size] by beam: past key k of a row comes from beam ``beams[..., k]``.

    A key of a nonexistent beam is zero.
    """
    width, result = beams.shape[1], np.zeros_like(cache)
    for row in range(len(cache)):
        for key in range(cache.shape[2]):
            beam = beams[row // width, row % width, key] if key < PAST else row % width
            if 0 <= beam < width:
                result[row, :, key] = cache[row // width * width + beam, :, key]
    return result


BEAMS = np.random.default_rng(2).integers(0, 2, (2, 2, ROOM)).astype(np.int32)
BEAMS[1, 0, :2] = [-1, 1 << 30]


def test_beams_of_a_packed_token() -> None:
    def reference(packed: Array, *others: Array | None) -> list[Array]:
        q, k, v = (x.reshape(B, 1, N, H).transpose(0, 2, 1, 3) for x in np.split(packed, 3, 2))
        present = []
        for past, new in ((others[4], k), (others[5], v)):
            assert past is not None
            cache = past.copy()
            cache[:, :, PAST] = new[:, :, 0]
            present.append(cache)
        return [attended(q, *(of_beams(x[:, :, : PAST + 1], BEAMS) for x in present)), *present]

    caches = [noise(B, N, ROOM, H, seed=i) for i in (4, 5)]
    inputs = [noise(B, 1, 3 * N * H), None, None, None, None, *caches, LENGTH, np.array(2, np.int32), BEAMS]
    attributes = {"num_heads": N, "past_present_share_buffer": 1}
    check_node(
        "DecoderMaskedMultiHeadAttention",
        inputs,
        attributes,
        [FLOAT] * 3,
        reference=reference,
        reals=[FLOAT],
        part=valid,
    )


@pytest.mark.parametrize(("shared", "real"), [(0, FLOAT), (1, FLOAT16)])
def test_decoder_masked_self_attention(shared: int, real: int) -> None:
    """A shared past/present buffer stores keys in 16-byte chunks: [batch, heads, size / 8, keys, 8] in float16.

    The test with a shared buffer has beams, the other one has a bias of the scores.
    """
    room, chunk = ROOM if shared else PAST, 8

    def reference(
        x: Array, weights: Array, bias: Array, mask: Array, past: Array, more: Array | None, *_: Array | None
    ) -> list[Array]:
        projected = x @ weights + bias
        q, k, v = (y.reshape(B, 1, N, H).transpose(0, 2, 1, 3) for y in np.split(projected, 3, 2))
        keys, values = past
        if shared:
            keys = keys.reshape(B, N, H // chunk, room, chunk).transpose(0, 1, 3, 2, 4).reshape(B, N, room, H).copy()
            keys[:, :, PAST], values = k[:, :, 0], values.copy()
            values[:, :, PAST] = v[:, :, 0]
        else:
            keys, values = np.concatenate([keys, k], 2), np.concatenate([values, v], 2)
        added = -10000.0 * (mask == 0)[:, None, None] + (0 if more is None else more)
        k, v = (x[:, :, : PAST + 1] for x in (keys, values))
        output = attended(q, of_beams(k, BEAMS), of_beams(v, BEAMS), added) if shared else attended(q, k, v, added)
        if shared:
            keys = keys.reshape(B, N, room, H // chunk, chunk).transpose(0, 1, 3, 2, 4).reshape(B, N, room, H)
        return [output, np.stack([keys, values])]

    def valid_chunks(number: int, y: Array) -> Array:
        if number == 0 or not shared:
            return y
        keys = y[0].reshape(B, N, H // chunk, room, chunk)[..., : PAST + 1, :]
        return np.concatenate([keys.reshape(-1), y[1, :, :, : PAST + 1].reshape(-1)])

    inputs = [
        noise(B, 1, 6),
        noise(6, 3 * N * H, seed=1, scale=0.5),
        noise(3 * N * H, seed=2),
        MASK,
        noise(2, B, N, room, H, seed=3),
        None if shared else noise(B, N, 1, PAST + 1, seed=4),
        LENGTH,
        *([np.array(2, np.int32), BEAMS] if shared else []),
    ]
    attributes = {"num_heads": N, "past_present_share_buffer": shared}
    check_node(
        "DecoderMaskedSelfAttention",
        inputs,
        attributes,
        [FLOAT, FLOAT],
        reference=reference,
        reals=[real],
        constant=[1, 2],
        part=valid_chunks,
    )


@pytest.mark.parametrize("form", ["self with a past", "cross", "cross with a past"])
def test_decoder_attention(form: str) -> None:
    rows, others, is_cross, has_past = 3, 5, form.startswith("cross"), form.endswith("past")
    size = N * H

    def split(x: Array) -> Array:
        result: Array = x.reshape(*x.shape[:2], N, H).transpose(1, 2, 0, 3)
        return result

    def reference(query: Array, key: Array, wq: Array, wkv: Array, bias: Array, *rest: Array) -> list[Array]:
        mask, *caches = rest[:3]
        q = split(query @ wq + bias[:size])
        k, v = (split(x) for x in np.split((key if is_cross else query) @ wkv + bias[size:], 2, 2))
        if has_past:
            k, v = (
                cache if is_cross else np.concatenate([cache, x], 2) for cache, x in zip(caches, (k, v), strict=True)
            )
        output = attended(q, k, v, np.where(mask, -np.inf, 0.0)[:, None, None]).transpose(1, 0, 2)
        return [output, k, v]

    keys = (others if has_past else 0) + rows if not is_cross else others
    mask = np.arange(keys) == np.array([[1], [2]])
    inputs = [
        noise(rows, 2, size),
        noise(others, 2, size, seed=1),
        noise(size, size, seed=2, scale=0.3),
        noise(size, 2 * size, seed=3, scale=0.3),
        noise(3 * size, seed=4),
        mask,
        *(noise(2, N, others, H, seed=i) for i in (5, 6)),
        *(np.array(x) for x in (is_cross, has_past, True, True)),
    ]
    check_node(
        "DecoderAttention",
        inputs,
        {"num_heads": N},
        [FLOAT] * 3,
        reference=reference,
        reals=[FLOAT],
        tolerance=1e-4,
        constant=[2, 3, 4],
    )
