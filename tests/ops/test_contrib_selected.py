"""Attention of com.microsoft to selected keys, against NumPy: of contiguous caches and of pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from contributed import FLOAT, FLOAT16, Array, check_node, noise

HEADS, KV_HEADS, SIZE, WINDOW = 4, 2, 8, 2
ATTRIBUTES = {"num_heads": HEADS, "kv_num_heads": KV_HEADS}
LOCAL = {"attention_mode": "local_plus_selected", "selected_kv_source": "auxiliary", "local_window_size": WINDOW}


def int32(values: Any) -> Array:
    return np.array(values, np.int32)


def attended(q: Array, keys: list[Array], values: list[Array], sinks: Array | None = None) -> Array:
    """One query [heads, size]; ``keys`` and ``values`` [heads, size] are those that count."""
    result = np.zeros_like(q)
    for head, row in enumerate(q):
        group = head // (HEADS // KV_HEADS)
        scores = np.array([row @ key[min(group, len(key) - 1)] for key in keys]) * SIZE**-0.5
        sink = -np.inf if sinks is None else sinks[head]
        largest = max(scores.max(initial=-np.inf), sink)
        if keys and np.isfinite(largest):
            e = np.exp(scores - largest)
            weights = e / (e.sum() + np.exp(sink - largest))
            result[head] = sum(w * v[min(group, len(v) - 1)] for w, v in zip(weights, values, strict=True))
    return result


def chosen(row: Array, count: int, end: int) -> list[int]:
    return [int(index) for index in row[: max(count, 0)] if 0 <= index < end]


@pytest.mark.parametrize("source", ["main", "auxiliary"])
def test_dynamic_sparse_attention(source: str) -> None:
    """Selected keys of the main cache, which may not come later; or nearby keys and those of another cache."""
    batch, rows, past, room, others = 2, 3, 2, 7, 5
    total = past + rows
    lengths = [total, total - 1]
    counts = int32([2, 3, 0, 1, 99, 2])
    selected = int32([[0, 2, -1], [3, 1, 0], [1, 1, 1], [4, 0, 0], [1, 2, 1 << 30], [-3, 2, 0]])

    def reference(q: Array, k: Array, v: Array, *given: Any) -> list[Array]:
        q, k, v = (x.reshape(batch, rows, -1, SIZE) for x in (q, k, v))
        caches = [x.copy() for x in given[:2]]
        sinks, output = given[13], np.zeros_like(q)
        for b, length in enumerate(lengths):
            for cache, new in zip(caches, (k, v), strict=True):
                cache[b, :, length - rows : length] = new[b].swapaxes(0, 1)
        keys, values = caches
        for b, length in enumerate(lengths):
            for s in range(rows):
                place, row = length - rows + s, b * rows + s
                picked = chosen(selected[row], counts[row], place + 1 if source == "main" else others)
                if source == "main":
                    pairs = [(keys[b, :, i], values[b, :, i]) for i in picked]
                else:
                    near = range(max(0, place - WINDOW + 1), place + 1)
                    pairs = [(keys[b, :, i], values[b, :, i]) for i in near]
                    pairs += [(given[2][b, :, i],) * 2 for i in picked]
                output[b, s] = attended(q[b, s], [x[0] for x in pairs], [x[1] for x in pairs], sinks)
        return [output.reshape(batch, rows, -1), keys, values]

    inputs: list[Array | None] = [noise(batch, rows, HEADS * SIZE)]
    inputs += [noise(batch, rows, KV_HEADS * SIZE, seed=i) for i in (1, 2)]
    inputs += [noise(batch, KV_HEADS, room, SIZE, seed=i) for i in (3, 4)]
    inputs += [noise(batch, KV_HEADS, others, SIZE, seed=5) if source == "auxiliary" else None, None]
    inputs += [selected, counts, int32(lengths) - 1, int32(total), *[None] * 5]
    inputs.append(noise(HEADS, seed=6) if source == "auxiliary" else None)
    attributes = ATTRIBUTES | (LOCAL | {"auxiliary_kv_shared": 1} if source == "auxiliary" else {})

    def valid(number: int, y: Array) -> Array:
        """What lies behind a sequence's keys in its cache is anything."""
        if number == 0:
            return y
        return np.concatenate([row[:, :count].reshape(-1) for row, count in zip(y, lengths, strict=True)])

    check_node(
        "DynamicSparseAttention",
        inputs,
        attributes,
        [FLOAT] * 3,
        reference=reference,
        reals=[FLOAT],
        part=valid,
    )


@pytest.mark.parametrize("source", ["main", "auxiliary"])
def test_sparse_paged_attention(source: str) -> None:
    """The auxiliary cache has one head for all."""
    block, new, past, others = 16, [2, 0, 2], [15, 3, 0], [3, 0, 2]
    table = int32([[1, 3], [0, 0], [2, 99]])
    counts = int32([3, 2, 0, 2])
    selected = int32([[15, 0, 16], [1, 16, -1], [0, 0, 0], [1, 400, 0]])

    def reference(q: Array, k: Array, v: Array, *given: Any) -> list[Array]:
        keys, values = (x.copy() for x in given[:2])
        output, token = np.zeros((len(q), HEADS, SIZE), np.float32), 0
        for b, count in enumerate(new):
            for cache, x in ((keys, k), (values, v)):
                for i in range(count):
                    place = past[b] + i
                    cache[table[b, place // block], place % block] = x[token + i].reshape(KV_HEADS, SIZE)
            flat = [x[table[b] % len(x)].reshape(-1, KV_HEADS, SIZE) for x in (keys, values)]
            for i in range(count):
                place = past[b] + i
                picked = chosen(selected[token], counts[token], place + 1 if source == "main" else others[b])
                if source == "main":
                    pairs = [(flat[0][p], flat[1][p]) for p in picked]
                else:
                    pairs = [(flat[0][p], flat[1][p]) for p in range(max(0, place - WINDOW + 1), place + 1)]
                    pairs += [(given[8][b, p], given[9][b, p]) for p in picked]
                query = q[token].reshape(HEADS, SIZE)
                output[token] = attended(query, [x[0] for x in pairs], [x[1] for x in pairs])
                token += 1
        return [output.reshape(len(q), -1), keys, values]

    inputs: list[Array | None] = [noise(4, HEADS * SIZE), *(noise(4, KV_HEADS * SIZE, seed=i) for i in (1, 2))]
    inputs += [noise(4, block, KV_HEADS, SIZE, seed=i) for i in (3, 4)]
    inputs += [int32([0, 2, 2, 4]), int32(past), table, None, selected, counts]
    if source == "auxiliary":
        inputs += [noise(3, 4, 1, SIZE, seed=i) for i in (5, 6)] + [int32(others)]
    attributes = ATTRIBUTES | (LOCAL if source == "auxiliary" else {})
    check_node(
        "SparsePagedAttention", inputs, attributes, [FLOAT] * 3, reference=reference, reals=[FLOAT16]
    )  # fmt: skip
