"""com.microsoft's sparse-attention indexers, compared with NumPy implementations of their documentation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from contributed import (
    BFLOAT16,
    DISABLED,
    FLOAT,
    FLOAT16,
    Array,
    check_in_place,
    check_node,
    node_model,
    noise,
    rounded,
)
from emulator_harness import configured
from session_pair import ep_session

INT32 = TensorProto.INT32
B, S, N, D, R = 2, 3, 2, 8, 2
PLACES = 40


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    with configured(adversarial=1, check=1):
        yield


def tables(width: int) -> list[Array]:
    angles = np.outer(np.arange(PLACES), 0.6 ** np.arange(width)).astype(np.float32)
    return [np.cos(angles), np.sin(angles)]


def normed(x: Array, weight: Array) -> Array:
    result: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight
    return result


def turned(x: Array, place: int, cos: Array, sin: Array, leading: bool) -> Array:
    """Apply the rotary embedding of position ``place``.

    ``leading``: the first elements in two halves, with an angle for each element. Otherwise: the last elements in
    adjacent pairs, with an angle for each pair.
    """
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
    """Return the tokens of the best-scored blocks, then the tokens after the last complete block.

    ``q`` [heads, size] is the normalized query at position ``place``, ``keys`` are [tokens, size].
    """
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
    """Policy qsa: with keys in a buffer for more tokens, or in a growing tensor with a mask and a packed query."""
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
    # A buffer has arbitrary contents after its last key, which ``part`` cuts off.
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


def compressed(keys: Array, gates: Array, bias: Array, overlap: int, windows: int, ratio: int = R) -> Array:
    """Compress each window of ``ratio`` tokens, with the window before it, to an entry; return [windows, size].

    ``keys`` and ``gates`` are [tokens, 2 * size]. Their first ``overlap`` tokens are the last complete earlier window.
    """
    entries = np.zeros((windows, D), np.float32)
    for w in range(windows):
        begin = overlap + w * ratio
        values, logits = keys[begin : begin + ratio, D:], gates[begin : begin + ratio, D:] + bias[:, D:]
        if begin >= ratio:
            values = np.concatenate([keys[begin - ratio : begin, :D], values])
            logits = np.concatenate([gates[begin - ratio : begin, :D] + bias[:, :D], logits])
        e = np.exp(logits - logits.max(0))
        entries[w] = (e / e.sum(0) * values).sum(0)
    return entries


@pytest.mark.parametrize(("waiting", "real"), [(0, BFLOAT16), (3, FLOAT16)])
def test_compressed_entries(waiting: int, real: int) -> None:
    """Policy csa: the buffer of waiting tokens is empty, or holds a complete window and a further token."""
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
        "SparseAttentionIndexer", inputs, attributes, [INT32, FLOAT, FLOAT], reference=reference, reals=[real]
    )  # fmt: skip


# ---- packed tokens ----

NEW = [5, 0, 1, 2, 2, 1]
STARTS = np.array(np.cumsum([0, *NEW]), np.int32)
W, ENTRIES = 3, 4
ROOM, PICKED = 2 * W - 1, 2 * W
LENGTHS = np.array([[1, 2], [1, 0], [0, 1], [3, 1], [4, 1], [1, 1]], np.int32)
"""(entries, waiting tokens) of each sequence. The state of sequence 4 is full; sequence 5's past (`BEFORE`) is longer
than its entries and waiting tokens."""
BEFORE = np.array([5, 3, 1, 10, 13, 5], np.int32)
CHANGES = range(4)
COUNTS = np.array([9, 1, -1, 1, 3, 3], np.int32)


@pytest.mark.parametrize("real", [FLOAT, BFLOAT16])
def test_packed_tokens(real: int) -> None:
    """Policy qsa. In bfloat16, the query also contains the key, and each sequence has its own rotary angles."""
    packed = real == BFLOAT16

    def reference(query: Array, key: Array | None, q_norm: Array, k_norm: Array, *given: Any) -> list[Array]:
        cos, sin, state, buffer = given[0], given[1], given[8].copy(), given[9].copy()
        if key is None:
            query, key = np.split(query, [N * D], 1)
        selected, counts = np.full((len(query), PICKED + W - 1), -1, np.int32), np.zeros(len(query), np.int32)
        lengths, update = LENGTHS.copy(), np.zeros((len(NEW), 2, D), np.float32)
        for b in CHANGES:
            angles = (cos[b], sin[b]) if cos.ndim == 3 else (cos, sin)
            entries, waiting = lengths[b]
            first, end = STARTS[b], STARTS[b + 1]
            all_keys = np.concatenate([buffer[b, :waiting], key[first:end]])
            payload = key[first:end].copy()
            for block in range(len(all_keys) // W):
                pooled = normed(all_keys[block * W : block * W + W].mean(0), k_norm)
                state[b, entries + block] = rounded(turned(pooled, int(entries + block) * W, *angles, True), real)
                payload[block * W + W - 1 - waiting] = state[b, entries + block]
            left = all_keys[len(all_keys) // W * W :]
            buffer[b, : len(left)] = left
            lengths[b] = entries + len(all_keys) // W, len(left)
            captured = payload[: int(np.clip(COUNTS[b], 0, 2))]
            update[b, : len(captured)] = captured
            for token in range(first, end):
                place = int(BEFORE[b]) + token - int(first)
                q = turned(normed(query[token].reshape(N, D), q_norm), place, *angles, True)
                whole = (place + 1) // W
                best = ranked(np.maximum(state[b, :whole] @ q.T, 0).sum(1), PICKED // W)
                row = [t for number in best for t in range(number * W, number * W + W)]
                row += range(whole * W, place + 1)
                selected[token], counts[token] = filled(row, PICKED + W - 1), len(row)
        return [selected, counts, state, buffer, lengths, update]

    count = int(STARTS[-1])
    cos_sin = [np.stack([x * f for f in np.linspace(0.5, 1, len(NEW), dtype=np.float32)]) for x in tables(4)]
    inputs = [
        noise(count, (N + packed) * D),
        None if packed else noise(count, D, seed=1),
        noise(D, seed=2),
        noise(D, seed=3),
        *(cos_sin if packed else tables(4)),
        STARTS,
        BEFORE,
        *[None] * 4,
        noise(len(NEW), ENTRIES, D, seed=4),
        noise(len(NEW), ROOM, D, seed=5),
        None,
        LENGTHS,
        COUNTS,
        None if packed else np.array([1], np.int32),
    ]
    attributes = {"policy_mode": "qsa", "compress_ratio": W, "token_budget": PICKED, "state_capacity": ENTRIES}
    attributes["state_update_capacity"] = 2
    outputs = [INT32, INT32, FLOAT, FLOAT, None, INT32, FLOAT]
    check_node("PackedSparseAttentionIndexer", inputs, attributes, outputs, reference=reference, reals=[real])
    if real == FLOAT:
        model = node_model("PackedSparseAttentionIndexer", inputs, attributes, outputs)
        check_hostile(model, {f"x{i}": x for i, x in enumerate(inputs) if x is not None}, {12: 2, 13: 3, 15: 5})


@pytest.mark.parametrize("real", [FLOAT, FLOAT16])
def test_packed_compressed_entries(real: int) -> None:
    """Policy csa. Sequences have 0 to 5 waiting tokens; sequences with invalid lengths stay unchanged."""
    top = 2
    given_lengths = np.array([[1, 5], [1, 0], [0, 2], [2, 5], [4, 1], [-1, 1]], np.int32)
    positions = np.array([4, 8, 6, 2**63 - 1, -9, 3, 11, 8, 4, 5, 6])

    def reference(query: Array, key: Array, q_norm: Array, k_norm: Array, *given: Any) -> list[Array]:
        cos, sin, _, _, gate, bias, weights, ids = given[:8]
        state, buffers, lengths = given[8].copy(), [x.copy() for x in given[9:11]], given_lengths.copy()
        selected, counts = np.full((len(query), top), -1, np.int32), np.zeros(len(query), np.int32)
        for b in CHANGES:
            (entries, waiting), first, end = lengths[b], STARTS[b], STARTS[b + 1]
            rows = [np.concatenate([x[b, :waiting], y[first:end]]) for x, y in zip(buffers, (key, gate), strict=True)]
            overlap = W if waiting >= W else 0
            windows = (len(rows[0]) - overlap) // W
            for w, x in enumerate(normed(compressed(rows[0], rows[1], bias, overlap, windows, W), k_norm)):
                state[b, entries + w] = rounded(turned(x, int(entries + w) * W, cos, sin, False), real)
            start = overlap + (windows - 1) * W if windows else 0
            for x, y in zip(buffers, rows, strict=True):
                x[b, : len(y) - start] = y[start:]
            lengths[b] = entries + windows, len(rows[0]) - start
            for token in range(first, end):
                place = int(ids[token])
                q = turned(normed(query[token].reshape(N, D), q_norm), place, cos, sin, False)
                limit = min(max(place + 1, 0) // W, int(lengths[b, 0]))
                scores = (np.maximum(state[b, :limit] @ q.T, 0) * weights[token]).sum(1)
                selected[token], counts[token] = filled(ranked(scores, top), top), min(limit, top)
        return [selected, counts, state, *buffers, lengths]

    count = int(STARTS[-1])
    inputs = [
        noise(count, N * D),
        noise(count, 2 * D, seed=1),
        noise(D, seed=2),
        noise(D, seed=3),
        *tables(2),
        STARTS,
        np.zeros(len(NEW), np.int32),
        noise(count, 2 * D, seed=5),
        noise(W, 2 * D, seed=6),
        noise(count, N, seed=7),
        positions,
        noise(len(NEW), ENTRIES, D, seed=4),
        *(noise(len(NEW), ROOM, 2 * D, seed=i) for i in (8, 9)),
        given_lengths,
    ]
    attributes = {"policy_mode": "csa", "compress_ratio": W, "index_topk": top, "state_capacity": ENTRIES}
    attributes |= {"head_weight_scale": 0.5, "scale": 2.0} if real == FLOAT16 else {}
    outputs = [INT32, INT32, FLOAT, FLOAT, FLOAT, INT32]
    check_node("PackedSparseAttentionIndexer", inputs, attributes, outputs, reference=reference, reals=[real])
    if real == FLOAT:
        model = node_model("PackedSparseAttentionIndexer", inputs, attributes, outputs)
        check_hostile(model, {f"x{i}": x for i, x in enumerate(inputs)}, {12: 2, 13: 3, 14: 4, 15: 5})


def check_hostile(model: bytes, feed: dict[str, Array], shared: dict[int, int]) -> None:
    """Check that past and present may share memory, and that hostile bounds and lengths touch no other memory.

    ``shared`` maps inputs (past) to outputs (present).
    """
    session = ep_session(model, DISABLED)
    check_in_place(session, feed, {f"x{past}": f"y{present}" for past, present in shared.items()})
    states = {f"y{number}": feed[f"x{past}"] for past, number in shared.items()}
    huge, count = 2**31 - 1, int(STARTS[-1])
    wrong: list[dict[str, Any]] = [{"x6": starts} for starts in ([1, *STARTS[1:]], [*STARTS[:-1], count - 1])]
    pairs = ([huge, 0], [-1, 0], [1, 2 * W], [1, huge], [1, -1], [1, -huge])
    wrong += [{"x15": np.tile(x, (len(NEW), 1))} for x in pairs] + [{"x7": np.full_like(BEFORE, -1)}]
    names = [x.name for x in session.get_outputs()]
    if "x17" in feed:
        assert not session.run(["y6"], feed | {"x17": np.zeros(1, np.int32)})[0].any()
    for change in wrong:
        found = dict(zip(names, session.run(None, feed | {k: np.int32(v) for k, v in change.items()}), strict=True))
        assert (found["y0"] == -1).all()
        assert not found["y1"].any()
        for name, past in (states | ({"y5": change["x15"]} if "x15" in change else {})).items():
            np.testing.assert_array_equal(found[name], past)
    for starts in ([0, huge, -huge, 3, huge, 0, count], [0, 9, 1, 1, 10, 2, count], [0, 5, 6, 1, 9, 9, count]):
        found = dict(zip(names, session.run(None, feed | {"x6": np.array(starts, np.int32)}), strict=True))
        assert found["y0"].min() >= -1
        assert found["y0"].max() < 2 * count + BEFORE.max()
        assert (found["y5"][:, 0] <= ENTRIES).all()
        for b, (first, end) in enumerate(pairwise(starts)):
            if not 0 <= first <= end <= count:
                for name, past in states.items():
                    np.testing.assert_array_equal(found[name][b], past[b])
