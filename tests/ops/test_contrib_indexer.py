"""The indexers of sparse attention of com.microsoft against NumPy, as their documentation has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from contributed import FLOAT, Array, check_node, noise

INT32 = TensorProto.INT32
B, S, N, D, R = 2, 3, 2, 8, 2
PLACES = 40


def tables(width: int) -> list[Array]:
    angles = np.outer(np.arange(PLACES), 0.6 ** np.arange(width)).astype(np.float32)
    return [np.cos(angles), np.sin(angles)]


def normed(x: Array, weight: Array) -> Array:
    result: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight
    return result


def turned(x: Array, place: int, cos: Array, sin: Array, leading: bool) -> Array:
    """The leading elements in halves, each with its angle; or the last ones in pairs, which share an angle."""
    result, place = x.copy(), min(max(place, 0), PLACES - 1)
    c, s, width = cos[place], sin[place], cos.shape[1]
    if leading:
        half = width // 2
        first, second = x[..., :half], x[..., half:width]
        result[..., :half] = first * c[:half] - second * s[:half]
        result[..., half:width] = second * c[half:] + first * s[half:]
    else:
        first, second = x[..., -2 * width :: 2], x[..., 1 - 2 * width :: 2]
        result[..., -2 * width :: 2] = first * c - second * s
        result[..., 1 - 2 * width :: 2] = second * c + first * s
    return result


def ranked(scores: Array, count: int) -> list[int]:
    return [int(i) for i in np.argsort(-scores, kind="stable")[:count]]


def filled(values: list[int], room: int) -> Array:
    return np.array([*values, *[-1] * (room - len(values))], np.int32)


BUDGET = 2 * R


def tokens_of_blocks(
    q: Array, keys: Array, place: int, visible: list[int], k_norm: Array, cos: Array, sin: Array
) -> list[int]:
    """``q`` [heads, size] after its norm, ``keys`` [tokens, size]."""
    seen = [t for t in visible if t <= place]
    blocks = [seen[i : i + R] for i in range(0, len(seen) // R * R, R)]
    query, scores = turned(q, place, cos, sin, True), []
    for block in blocks:
        pooled = turned(normed(keys[block].mean(0), k_norm), block[0], cos, sin, True)
        scores.append(np.maximum(query @ pooled, 0).sum() / np.sqrt(D))
    best = ranked(np.array(scores), BUDGET // R)
    return [t for number in best for t in blocks[number]] + seen[len(blocks) * R :]


@pytest.mark.parametrize("form", ["growing", "buffer"])
def test_tokens(form: str) -> None:
    """The buffer has room for more keys than there are; the other form has a mask and a packed query."""
    past = 4
    mask = np.ones((B, past + S), np.int64)
    mask[0, [1, 4]] = 0
    room = BUDGET + R - 1

    def reference(query: Array, key: Array | None, q_norm: Array, k_norm: Array, *given: Any) -> list[Array]:
        cos, sin, mask, old = given[:4]
        if key is None:
            query, key = np.split(query, [N * D], 2)
        keys = np.concatenate([old[:, :past], key], 1)
        selected = np.zeros((B, S, room), np.int32)
        for b in range(B):
            visible = [t for t in range(past + S) if mask is None or mask[b, t]]
            for row in range(S):
                q = normed(query[b, row].reshape(N, D), q_norm)
                selected[b, row] = filled(tokens_of_blocks(q, keys[b], past + row, visible, k_norm, cos, sin), room)
        return [selected, np.pad(keys, [(0, 0), (0, old.shape[1] - past - S), (0, 0)]) if not packed else keys]

    packed = form == "growing"
    inputs = [
        noise(B, S, (N + packed) * D),
        None if packed else noise(B, S, D, seed=1),
        noise(D, seed=2),
        noise(D, seed=3),
        *tables(4),
        mask if packed else None,
        noise(B, past if packed else 12, D, seed=4),
        *([] if packed else [None] * 4 + [np.array([past], np.int32)]),
    ]
    # What lies behind the last key of a buffer is anything.
    attributes = {"policy_mode": "qsa", "compress_ratio": R, "token_budget": BUDGET}
    check_node(
        "SparseAttentionIndexer",
        inputs,
        attributes,
        [INT32, FLOAT],
        reference=reference,
        reals=[FLOAT],
        part=lambda number, y: y if number == 0 else y[:, : past + S],
        sized=[12],
    )


def compressed(keys: Array, gates: Array, bias: Array, overlap: int, windows: int) -> Array:
    """``keys`` and ``gates`` [tokens, 2 * size], which begin with ``overlap`` tokens of the last complete window."""
    entries = np.zeros((windows, D), np.float32)
    for w in range(windows):
        begin = overlap + w * R
        values, logits = keys[begin : begin + R, D:], gates[begin : begin + R, D:] + bias[:, D:]
        if begin >= R:
            values = np.concatenate([keys[begin - R : begin, :D], values])
            logits = np.concatenate([gates[begin - R : begin, :D] + bias[:, :D], logits])
        e = np.exp(logits - logits.max(0))
        entries[w] = (e / e.sum(0) * values).sum(0)
    return entries


@pytest.mark.parametrize("waiting", [0, 3])
def test_compressed_entries(waiting: int) -> None:
    """The buffer is empty, or has a complete window and a token."""
    past, top = 2, 2
    positions = np.array([[2, 5, 7], [6, 0, 40]])

    def reference(query: Array, key: Array, q_norm: Array, k_norm: Array, *given: Any) -> list[Array]:
        cos, sin, _, old, gate, bias, weights, ids = given[:8]
        buffer = given[9]
        overlap = R if waiting >= R else 0
        pending = waiting - overlap + S
        windows = pending // R
        rows = [np.concatenate(pair, 1) for pair in zip(buffer, (key, gate), strict=True)]
        start = overlap + (windows - 1) * R
        selected, entries = np.full((B, S, top), -1, np.int32), []
        for b in range(B):
            fresh = normed(compressed(rows[0][b], rows[1][b], bias, overlap, windows), k_norm)
            last = [turned(x, (past + w) * R, cos, sin, False) for w, x in enumerate(fresh)]
            entries.append(np.concatenate([old[b], last]))
            for row in range(S):
                q = turned(normed(query[b, row].reshape(N, D), q_norm), int(ids[b, row]), cos, sin, False)
                scores = (np.maximum(entries[b] @ q.T, 0) * weights[b, row]).sum(1)
                limit = min((int(ids[b, row]) + 1) // R, len(scores))
                selected[b, row] = filled(ranked(scores[:limit], top), top)
        return [selected, np.stack(entries), np.stack(rows)[:, :, start:]]

    inputs = [
        noise(B, S, N * D),
        noise(B, S, 2 * D, seed=1),
        noise(D, seed=2),
        noise(D, seed=3),
        *tables(2),
        None,
        noise(B, past, D, seed=4),
        noise(B, S, 2 * D, seed=5),
        noise(R, 2 * D, seed=6),
        noise(B, S, N, seed=7),
        positions,
        None,
        noise(2, B, waiting, 2 * D, seed=8),
    ]
    attributes = {"policy_mode": "csa", "compress_ratio": R, "index_topk": top}
    check_node(
        "SparseAttentionIndexer", inputs, attributes, [INT32, FLOAT, FLOAT], reference=reference, reals=[FLOAT]
    )  # fmt: skip
