"""com.microsoft's PagedAttention, compared with NumPy: packed tokens, pages, quantized and latent caches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
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
    codes,
    node_model,
    noise,
)
from contributed_codes import packed
from emulator_harness import configured
from kernel_harness import run_op
from ort_cuda_plugin.model.ir import NodeError, Unsupported
from session_pair import ep_session

QUANTIZED = {"int8": int(TensorProto.INT8), "int4": int(TensorProto.UINT8), "float8e4m3fn": FLOAT}
HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS = 4, 2, 8, 16, 6
TABLE = np.array([[4, 0], [5, 2], [1, 3]], np.int32)
ANGLES = np.outer(np.arange(40), [1.0, 0.3]).astype(np.float32)
NEW, PAST = [3, 0, 2], [15, 9, 0]


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    with configured(adversarial=1, check=1):
        yield


def int32(values: Any) -> Array:
    return np.array(values, np.int32)


def starts(new: list[int]) -> Array:
    return int32(np.cumsum([0, *new]))


def turned(x: Array, places: Array, offset: int) -> Array:
    """Apply the interleaved rotary embedding to elements ``offset`` to ``offset + 3`` of x [tokens, heads, size].

    ``places`` are the positions of the tokens.
    """
    result = x.copy()
    cos, sin = (f(ANGLES)[places][:, None] for f in (np.cos, np.sin))
    first, second = x[..., offset : offset + 4 : 2], x[..., offset + 1 : offset + 4 : 2]
    result[..., offset : offset + 4 : 2] = first * cos - second * sin
    result[..., offset + 1 : offset + 4 : 2] = second * cos + first * sin
    return result


def normed(x: Array, weight: Array) -> Array:
    result: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight
    return result


def softmax(scores: Array, sink: float | None) -> Array:
    largest = max(scores.max(initial=-np.inf), -np.inf if sink is None else sink)
    e = np.exp(scores - largest)
    result: Array = e / (e.sum() + (0 if sink is None else np.exp(sink - largest)))
    return result


def paged(
    q: Array,
    keys: Array,
    values: Array,
    new: list[int],
    past: list[int],
    *,
    sinks: Array | None = None,
    window: int = 0,
    cap: float = 0.0,
    causal: bool = True,
    scale: float = SIZE**-0.5,
) -> Array:
    """Compute attention over caches [blocks, tokens per block, heads, size], which include the new keys and values."""
    result = np.zeros((len(q), HEADS, values.shape[-1]), np.float32)
    token = 0
    for sequence, count in enumerate(new):
        total = past[sequence] + count
        k, v = (x[TABLE[sequence]].reshape(-1, *x.shape[2:])[:total] for x in (keys, values))
        for place in range(past[sequence], total):
            last = place + 1 if causal else total
            first = max(0, place + 1 - window) if window else 0
            for head in range(HEADS):
                group = head // (HEADS // k.shape[1])
                scores = k[first:last, group] @ q[token, head] * scale
                scores = cap * np.tanh(scores / cap) if cap else scores
                weights = softmax(scores, None if sinks is None else float(sinks[head]))
                result[token, head] = weights @ v[first:last, group]
            token += 1
    return result.reshape(len(q), -1)


def stored(cache: Array, x: Array, slots: Array) -> Array:
    result = cache.copy()
    for row, slot in zip(x, slots, strict=True):
        if slot >= 0:
            result[slot // BLOCK, slot % BLOCK] = row
    return result


def places_of(new: list[int], past: list[int]) -> Array:
    return np.concatenate([np.arange(before, before + count) for count, before in zip(new, past, strict=True)])


def slots_of(new: list[int], places: Array) -> Array:
    sequences = np.repeat(np.arange(len(new)), new)
    result: Array = TABLE[sequences, places // BLOCK] * BLOCK + places % BLOCK
    return result


def caches() -> list[Array]:
    return [noise(BLOCKS, BLOCK, KV_HEADS, SIZE, seed=i) for i in (3, 4)]


ATTRIBUTES = {"num_heads": HEADS, "kv_num_heads": KV_HEADS}


@pytest.mark.parametrize(("new", "real"), [(NEW, FLOAT16), ([1, 1, 1], BFLOAT16)], ids=["prompts", "decode"])
def test_everything_at_once(new: list[int], real: int) -> None:
    """Combine packed QKV, rotary embedding, norms, sinks, window and softcap. Slot -1: one token is not stored."""
    count, places = sum(new), places_of(new, PAST)
    slots = slots_of(new, places)
    slots[1] = -1

    def reference(packed: Array, *given: Any) -> list[Array]:
        q, k, v = np.split(packed.reshape(count, -1, SIZE), [HEADS, HEADS + KV_HEADS], 1)
        _, _, keys, values = given[:4]
        sinks, q_norm, k_norm = given[10:13]
        q, k = (turned(normed(x, weight), places, 0) for x, weight in ((q, q_norm), (k, k_norm)))
        keys, values = stored(keys, k, slots), stored(values, v, slots)
        return [paged(q, keys, values, new, PAST, sinks=sinks, window=5, cap=2.0), keys, values]

    inputs = [
        noise(count, (HEADS + 2 * KV_HEADS) * SIZE),
        None,
        None,
        *caches(),
        starts(new),
        int32(PAST),
        TABLE,
        np.cos(ANGLES),
        np.sin(ANGLES),
        int32(slots),
        noise(HEADS, seed=5),
        noise(SIZE, seed=6),
        noise(SIZE, seed=7),
    ]
    attributes = {"do_rotary": 1, "rotary_interleaved": 1, "softcap": 2.0, "local_window_size": 5}
    check_node(
        "PagedAttention", inputs, ATTRIBUTES | attributes, [FLOAT] * 3, reals=[real], reference=reference, sized=[0]
    )


@pytest.mark.parametrize(("kind", "real"), [("int8", FLOAT16), ("int4", BFLOAT16), ("float8e4m3fn", FLOAT16)])
def test_quantized_caches_and_bounds_of_the_caller(kind: str, real: int) -> None:
    """Quantized caches with one scale for keys and a scale per channel for values, without causal mask.

    With int4 and heads of seven elements, the last half byte of a head is unused.
    """
    count, places, size = sum(NEW), places_of(NEW, PAST), 7 if kind == "int4" else SIZE
    slots, onnx_type = slots_of(NEW, places), QUANTIZED[kind]
    k_scale, v_scale = np.array([0.03], np.float32), np.abs(noise(KV_HEADS, 1, size)) * np.float32(0.02) + 0.01
    if kind == "int4":
        k_scale, v_scale = k_scale * 10, v_scale * 10

    def code(x: Array, scale: Array) -> Array:
        if kind == "float8e4m3fn":
            return (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        low, high = (-8, 7) if kind == "int4" else (-128, 127)
        return np.clip(np.round(x / scale), low, high).astype(np.int8)

    def in_memory(x: Array) -> Array:
        return packed(np.pad(x + 8, [(0, 0)] * 3 + [(0, 1)], constant_values=8), 4) if kind == "int4" else x

    def reference(q: Array, k: Array, v: Array, *_: Array | None) -> list[Array]:
        q, k, v = (x.reshape(count, -1, size) for x in (q, k, v))
        keys = stored(pages[0], code(k, k_scale), slots)
        values = stored(pages[1], code(v, v_scale[:, 0]), slots)
        wide = [(keys * k_scale).astype(np.float32), (values * v_scale[:, 0]).astype(np.float32)]
        output = paged(q, wide[0], wide[1], NEW, PAST, causal=False, scale=size**-0.5)
        return [output, in_memory(keys), in_memory(values)]

    pages = [codes(BLOCKS, BLOCK, KV_HEADS, size, dtype=np.int8, seed=i) for i in (1, 2)]
    if kind != "int8":
        pages = [code(x.astype(np.float32) / 16, np.ones(1, np.float32)) for x in pages]
    hidden = KV_HEADS * size
    inputs: list[Array | None] = [
        noise(count, HEADS * size),
        noise(count, hidden, seed=1),
        noise(count, hidden, seed=2),
    ]
    inputs += [*(in_memory(x) for x in pages), starts(NEW), int32(PAST), TABLE, *[None] * 6]
    inputs += [k_scale, v_scale, int32([4, 0, 0])]
    attributes = ATTRIBUTES | {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_CHANNEL", "is_causal": 0}
    attributes |= {"k_cache_dtype": kind, "v_cache_dtype": kind if kind == "int4" else ""}
    outputs, is_float = [FLOAT, onnx_type, onnx_type], onnx_type == FLOAT
    check_node(
        "PagedAttention",
        inputs,
        attributes,
        outputs,
        reals=[real],
        reference=reference,
        constant=[16],
        wide=[14, 15],
        small=dict.fromkeys([3, 4], int(TensorProto.FLOAT8E4M3FN)) if is_float else None,
        small_outputs=[1, 2] if is_float else [],
    )
    if kind == "int4":
        model = node_model("PagedAttention", inputs, attributes, outputs, constant=[16], real=real, wide=[14, 15])
        feed = {f"x{i}": x for i, x in enumerate(inputs[:16]) if x is not None}
        check_in_place(ep_session(model, DISABLED), feed, {"x3": "y1", "x4": "y2"})


def test_bytes_without_a_meaning() -> None:
    """A cache of type uint8 needs its element type in k_cache_dtype; float4e2m1 is not supported."""
    inputs: list[Array | None] = [np.ones((1, heads * SIZE), np.float16) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    inputs += [codes(BLOCKS, BLOCK, KV_HEADS, SIZE // 2, seed=i) for i in (1, 2)]
    inputs += [starts([1]), int32([0]), TABLE[:1], *[None] * 6, *[np.ones(1, np.float32)] * 2]
    for name, reason in (
        ("", "key_cache must not be u8 without k_cache_dtype, got u8"),
        ("float4e2m1", "the element type of key_cache is float4e2m1"),
    ):
        attributes = ATTRIBUTES | {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR"}
        attributes |= {"k_cache_dtype": name, "v_cache_dtype": name}
        with pytest.raises((Unsupported, NodeError), match=reason):
            run_op("PagedAttention", inputs, attributes, domain="com.microsoft", outputs=3)


def test_latent_cache() -> None:
    """Layout LATENT: values are the first elements of the cached keys; rotary elements follow them."""
    count, places, width = sum(NEW), places_of(NEW, PAST), 4
    slots = slots_of(NEW, places)

    def reference(q: Array, k: Array, _: None, keys: Array, *__: Array | None) -> list[Array]:
        q, k = (turned(x.reshape(count, -1, 12), places, 8) for x in (q, k))
        keys = stored(keys, k, slots)
        return [paged(q, keys, keys[..., :width], NEW, PAST, scale=0.2), keys]

    inputs = [
        noise(count, HEADS * 12),
        noise(count, 12, seed=1),
        None,
        noise(BLOCKS, BLOCK, 1, 12, seed=2),
        None,
        starts(NEW),
        int32(PAST),
        TABLE,
        np.cos(ANGLES),
        np.sin(ANGLES),
    ]
    attributes = {"num_heads": HEADS, "kv_num_heads": 1, "kv_cache_layout": "LATENT", "v_head_size": width}
    attributes |= {"do_rotary": 1, "rotary_interleaved": 1, "rotary_offset": 8, "scale": 0.2}
    check_node("PagedAttention", inputs, attributes, [FLOAT, FLOAT], reals=[FLOAT16], reference=reference)


def test_pages_that_do_not_exist() -> None:
    """Invalid lengths, starts and pages cause no access out of bounds; the attention output is 0."""
    count = 5
    table = int32([[1 << 30, -1], [6, -7], [1 << 20, 99]])

    def reference(q: Array, k: Array, v: Array, keys: Array, values: Array, *_: Array) -> list[Array]:
        return [np.zeros((count, HEADS * SIZE), np.float32), keys, values]

    hidden = KV_HEADS * SIZE
    inputs = [noise(count, HEADS * SIZE), noise(count, hidden, seed=1), noise(count, hidden, seed=2), *caches()]
    for cumulated, past in ((starts(NEW), int32([15, -9, 1 << 30])), (int32([-5, 1 << 30, 2, -8]), int32([1, 2, 3]))):
        check_node(
            "PagedAttention",
            [*inputs, cumulated, past, table],
            ATTRIBUTES,
            [FLOAT] * 3,
            reals=[FLOAT16],
            reference=reference,
        )
