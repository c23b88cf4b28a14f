"""com.microsoft's attention to selected keys in contiguous and paged caches, compared with NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from contributed import BFLOAT16, DISABLED, FLOAT, FLOAT16, Array, check_in_place, check_node, codes, node_model, noise
from emulator_harness import configured
from session_pair import ep_session
from test_contrib_paged import ANGLES, normed, turned

HEADS, KV_HEADS, SIZE, WINDOW = 4, 2, 8, 2
ATTRIBUTES = {"num_heads": HEADS, "kv_num_heads": KV_HEADS}
NEARBY = {"attention_mode": "local_plus_selected", "local_window_size": WINDOW}
LOCAL = NEARBY | {"selected_kv_source": "auxiliary"}
ROTATED = {"do_rotary": 1, "rotary_interleaved": 1, "rotary_offset": 2}


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    with configured(adversarial=1, check=1):
        yield


def int32(values: Any) -> Array:
    return np.array(values, np.int32)


def attended(
    q: Array,
    keys: list[Array],
    values: list[Array],
    sinks: Array | None = None,
    *,
    scale: float = SIZE**-0.5,
    cap: float = 0.0,
) -> Array:
    """Compute attention of one query [heads, size] to a list of selected keys and values [heads, size]."""
    result = np.zeros_like(q)
    for head, row in enumerate(q):
        group = head // (HEADS // KV_HEADS)
        scores = np.array([row @ key[min(group, len(key) - 1)] for key in keys]) * scale
        scores = cap * np.tanh(scores / cap) if cap else scores
        sink = -np.inf if sinks is None else sinks[head]
        largest = max(scores.max(initial=-np.inf), sink)
        if keys and np.isfinite(largest):
            e = np.exp(scores - largest)
            weights = e / (e.sum() + np.exp(sink - largest))
            result[head] = sum(w * v[min(group, len(v) - 1)] for w, v in zip(weights, values, strict=True))
    return result


def chosen(row: Array, count: int, end: int) -> list[int]:
    return [int(index) for index in row[: max(count, 0)] if 0 <= index < end]


@pytest.mark.parametrize(("form", "real"), [("main", FLOAT16), ("auxiliary", BFLOAT16), ("prompt", FLOAT)])
def test_dynamic_sparse_attention(form: str, real: int) -> None:
    """Attention to selected earlier keys of the main cache, or to nearby keys and selected ones of an auxiliary cache.

    The prompt has no past; it has packed QKV, norms, positions and a rotary embedding.
    """
    batch, rows, others, is_prompt = 2, 3, 5, form == "prompt"
    past, room = (0, 3) if is_prompt else (2, 7)
    total, scale = past + rows, 0.4 if is_prompt else SIZE**-0.5
    lengths = [total, total if is_prompt else total - 1]
    counts = int32([2, 3, 0, 1, 99, 2])
    selected = int32([[0, 2, -1], [3, 1, 0], [1, 1, 1], [4, 0, 0], [1, 2, 1 << 30], [-3, 2, 0]])
    positions = np.array([[5, 2, 7], [0, 1, 30]])

    def reference(q: Array, k: Array | None, v: Array | None, *given: Any) -> list[Array]:
        if k is None or v is None:
            q, k, v = np.split(q, [HEADS * SIZE, (HEADS + KV_HEADS) * SIZE], 2)
        q, k, v = (x.reshape(batch, rows, -1, SIZE) for x in (q, k, v))
        if is_prompt:
            norms = ((q, given[11]), (k, given[12]))
            q, k = (np.stack([turned(y, p, 2) for y, p in zip(normed(x, w), positions, strict=True)]) for x, w in norms)
        caches = [np.zeros((batch, KV_HEADS, room, SIZE), np.float32) if x is None else x.copy() for x in given[:2]]
        sinks, output = given[13], np.zeros_like(q)
        for b, length in enumerate(lengths):
            for cache, new in zip(caches, (k, v), strict=True):
                cache[b, :, length - rows : length] = new[b].swapaxes(0, 1)
        keys, values = caches
        for b, length in enumerate(lengths):
            for s in range(rows):
                place, row = length - rows + s, b * rows + s
                picked = chosen(selected[row], counts[row], others if form == "auxiliary" else place + 1)
                if form != "auxiliary":
                    pairs = [(keys[b, :, i], values[b, :, i]) for i in picked]
                else:
                    near = range(max(0, place - WINDOW + 1), place + 1)
                    pairs = [(keys[b, :, i], values[b, :, i]) for i in near]
                    pairs += [(given[2][b, :, i],) * 2 for i in picked]
                output[b, s] = attended(q[b, s], [x[0] for x in pairs], [x[1] for x in pairs], sinks, scale=scale)
        return [output.reshape(batch, rows, -1), keys, values]

    if is_prompt:
        inputs: list[Array | None] = [noise(batch, rows, (HEADS + 2 * KV_HEADS) * SIZE), *[None] * 6]
    else:
        inputs = [noise(batch, rows, HEADS * SIZE)]
        inputs += [noise(batch, rows, KV_HEADS * SIZE, seed=i) for i in (1, 2)]
        inputs += [noise(batch, KV_HEADS, room, SIZE, seed=i) for i in (3, 4)]
        inputs += [noise(batch, KV_HEADS, others, SIZE, seed=5) if form == "auxiliary" else None, None]
    inputs += [selected, counts, int32(lengths) - 1, int32(total)]
    if is_prompt:
        inputs += [np.cos(ANGLES), np.sin(ANGLES), positions, noise(SIZE, seed=7), noise(SIZE, seed=8)]
    else:
        inputs += [None] * 5
    inputs.append(noise(HEADS, seed=6))
    attributes: dict[str, Any] = ATTRIBUTES | (LOCAL | {"auxiliary_kv_shared": 1} if form == "auxiliary" else {})
    attributes |= ROTATED | {"scale": scale} if is_prompt else {}

    def valid(number: int, y: Array) -> Array:
        """Return the defined part of an output: a cache has arbitrary contents after its sequence's last key."""
        if number == 0:
            return y
        return np.concatenate([row[:, :count].reshape(-1) for row, count in zip(y, lengths, strict=True)])

    check_node(
        "DynamicSparseAttention",
        inputs,
        attributes,
        [FLOAT] * 3,
        reference=reference,
        reals=[real],
        part=valid,
    )


@pytest.mark.parametrize(("form", "real"), [("main", FLOAT16), ("auxiliary", FLOAT16), ("quantized", BFLOAT16)])
def test_sparse_paged_attention(form: str, real: int) -> None:
    """Attention to selected keys of the main cache, of an auxiliary cache with one head, or of an int8 cache.

    The auxiliary case has packed QKV, norms and a rotary embedding. In the others one token has slot -1 and is not
    stored. The int8 case also reads nearby keys.
    """
    block, new, past, others = 16, [2, 0, 2], [15, 3, 0], [3, 0, 2]
    table, is_packed, is_integer = int32([[1, 3], [0, 0], [2, 99]]), form == "auxiliary", form == "quantized"
    counts = int32([3, 2, 0, 2])
    selected = int32([[15, 0, 16], [1, 16, -1], [0, 0, 0], [1, 400, 0]])
    scales = [np.array([0.04], np.float32), (0.03 + np.abs(noise(KV_HEADS, 1, SIZE)) * 0.01).astype(np.float32)]
    places = [past[b] + i for b, count in enumerate(new) for i in range(count)]
    slots = int32([table[b, (past[b] + i) // block] * block + (past[b] + i) % block for b in (0, 2) for i in range(2)])
    slots[3] = -1

    def reference(q: Array, k: Array | None, v: Array | None, *given: Any) -> list[Array]:
        if k is None or v is None:
            q, k, v = np.split(q, [HEADS * SIZE, (HEADS + KV_HEADS) * SIZE], 1)
        q, k, v = (x.reshape(len(q), -1, SIZE) for x in (q, k, v))
        if is_packed:
            q, k = (turned(normed(x, w), np.array(places), 2) for x, w in ((q, given[14]), (k, given[15])))
        stored = [x.copy() for x in given[:2]]
        output, sinks = np.zeros((len(q), HEADS, SIZE), np.float32), given[13]
        for cache, x, scale in zip(stored, (k, v), scales, strict=True):
            for row, slot in zip(x, slots, strict=True):
                if slot >= 0:
                    number = np.clip(np.rint(row / scale.reshape(-1, scale.size // KV_HEADS or 1)), -128, 127)
                    cache[slot // block, slot % block] = number if is_integer else row
        keys, values = stored
        if is_integer:
            keys, values = (x * y.reshape(-1, y.size // KV_HEADS or 1) for x, y in zip(stored, scales, strict=True))
        flat = {b: [x[table[b] % len(x)].reshape(-1, KV_HEADS, SIZE) for x in (keys, values)] for b in (0, 2)}
        for token, (b, place) in enumerate(zip((0, 0, 2, 2), places, strict=True)):
            picked = chosen(selected[token], counts[token], others[b] if is_packed else place + 1)
            near = [] if form == "main" else list(range(max(0, place - WINDOW + 1), place + 1))
            wanted = near if is_packed else sorted({*near, *picked})
            pairs = [(flat[b][0][p], flat[b][1][p]) for p in wanted]
            pairs += [(given[8][b, p], given[9][b, p]) for p in picked] if is_packed else []
            cap = 2.0 if is_integer else 0.0
            output[token] = attended(q[token], [x[0] for x in pairs], [x[1] for x in pairs], sinks, cap=cap)
        return [output.reshape(len(q), -1), *stored]

    if is_packed:
        inputs: list[Array | None] = [noise(4, (HEADS + 2 * KV_HEADS) * SIZE), None, None]
    else:
        inputs = [noise(4, HEADS * SIZE), *(noise(4, KV_HEADS * SIZE, seed=i) for i in (1, 2))]
    shape = (4, block, KV_HEADS, SIZE)
    inputs += [codes(*shape, dtype=np.int8, seed=i) if is_integer else noise(*shape, seed=i) for i in (3, 4)]
    if is_packed:
        slots[3] = table[2, 0] * block + 1
    inputs += [int32([0, 2, 2, 4]), int32(past), table, None if is_packed else slots, selected, counts]
    inputs += [*(noise(3, 4, 1, SIZE, seed=i) for i in (5, 6)), int32(others)] if is_packed else [None] * 3
    inputs += [np.cos(ANGLES), np.sin(ANGLES)] if is_packed else [None] * 2
    inputs += [noise(HEADS, seed=9), *([noise(SIZE, seed=7), noise(SIZE, seed=8)] if is_packed else [None] * 2)]
    inputs += [*scales, int32([2, 0, 0, 0, 0])] if is_integer else []
    attributes: dict[str, Any] = ATTRIBUTES | (LOCAL | ROTATED if is_packed else {})
    if is_integer:
        attributes |= NEARBY | {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_CHANNEL", "softcap": 2.0}
    kind = int(TensorProto.INT8) if is_integer else FLOAT
    name, outputs = "SparsePagedAttention", [FLOAT, kind, kind]
    placed: dict[str, Any] = {"constant": [21], "wide": [19, 20]} if is_integer else {"sized": [0]} if is_packed else {}
    check_node(name, inputs, attributes, outputs, reference=reference, reals=[real], **placed)
    if is_integer:
        model = node_model(name, inputs, attributes, outputs, real=real, **placed)
        feed = {f"x{i}": x for i, x in enumerate(inputs[:21]) if x is not None}
        check_in_place(ep_session(model, DISABLED), feed, {"x3": "y1", "x4": "y2"})
