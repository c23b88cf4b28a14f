"""Cases of com.microsoft's attention, recurrences and n-grams; see contributed_sweep."""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np

from contributed import BFLOAT16, FLOAT, FLOAT16, Array, codes, noise, number, weight_codes
from contributed_sweep import Case

B, S, N, H, PAST = 2, 3, 2, 4, 2
HIDDEN: Final = N * H
KEYS: Final = np.array([[1, 1, 0], [1, 1, 1]], np.int32)
ALL_KEYS: Final = np.array([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]], np.int32)
TWO: Final = (True, True)
THREE: Final = (True, True, True)


def _hidden(count: int, width: int = HIDDEN) -> list[Array]:
    return [noise(B, S, width, seed=i) for i in range(count)]


def _cache(room: int = PAST, seed: int = 4) -> list[Array]:
    return [noise(B, N, room, H, seed=seed + i) for i in range(2)]


def _before(count: int) -> Any:
    """Return a `Case.part` that compares only the first ``count`` positions of present keys and values."""
    return lambda number, y: y[..., :count, :] if number else y


# ---- attention ----

_PROJECTION: Final = [noise(B, S, 6), noise(6, 3 * HIDDEN, seed=1, scale=0.5), noise(3 * HIDDEN, seed=2)]
_SCALED: Final[dict[str, Any]] = {"num_heads": N, "unidirectional": 1, "scale": 0.4, "mask_filter_value": -100.0}


def _in_place(q: Array, k: Array, v: Array, *rest: Array) -> list[Array]:
    """Reference of causal attention with a shared cache buffer: new keys and values follow ``PAST`` cached ones."""

    def split(x: Array) -> Array:
        result: Array = x.reshape(B, S, N, H).transpose(0, 2, 1, 3)
        return result

    present = [cache.copy() for cache in rest[-3:-1]]
    for cache, new in zip(present, (k, v), strict=True):
        cache[:, :, PAST:] = split(new)
    scores = split(q) @ present[0].swapaxes(2, 3) / np.sqrt(H)
    e = np.exp(np.where(np.tri(S, S + PAST, PAST) > 0, scores, -np.inf))
    output = (e / e.sum(-1, keepdims=True)) @ present[1]
    return [output.transpose(0, 2, 1, 3).reshape(B, S, HIDDEN), *present]


def _projected_in_place(x: Array, weights: Array, bias: Array, _: None, past: Array, *rest: Array) -> list[Array]:
    output, *present = _in_place(*np.split(x @ weights + bias, 3, 2), past[0], past[1], rest[-1])
    return [output, np.stack(present)]


ATTENTION: Final = [
    Case("Attention", [*_PROJECTION, ALL_KEYS, noise(2, B, N, PAST, H, seed=3)], _SCALED, TWO, reals=[FLOAT16]),
    Case(
        "Attention",
        [*_PROJECTION[:2], None, None, None, noise(B, N, S, S, seed=4)],
        {"num_heads": N, "qkv_hidden_sizes": [HIDDEN] * 3},
        reals=[BFLOAT16],
        on_cpu={2: np.zeros(3 * HIDDEN, np.float32)},  # the CPU provider crashes without a bias
    ),
    Case(
        "Attention",
        [*_PROJECTION, None, noise(2, B, N, S + PAST, H, seed=3), None, np.array([PAST], np.int32)],
        {"num_heads": N, "unidirectional": 1, "past_present_share_buffer": 1},
        TWO,
        reals=[FLOAT],
        reference=_projected_in_place,
    ),
    Case(
        "MultiHeadAttention",
        [*_hidden(3), noise(3 * HIDDEN, seed=3), ALL_KEYS, noise(B, N, S, S + PAST, seed=7), *_cache()],
        _SCALED,
        THREE,
        reals=[FLOAT16],
    ),
    Case(
        "MultiHeadAttention",
        [noise(B, S, N, 3, H)],
        {"num_heads": N},
        (True, False, False, True),
        own="the CPU provider has no packed queries",
    ),
    Case(
        "MultiHeadAttention",
        [*_hidden(3), None, None, None, *_cache(S + PAST), np.array([PAST], np.int32)],
        {"num_heads": N, "unidirectional": 1},
        THREE,
        reals=[BFLOAT16],
        reference=_in_place,
    ),
    Case(
        "DecoderAttention",
        [
            noise(S, B, HIDDEN), noise(S, B, HIDDEN, seed=1), noise(HIDDEN, HIDDEN, seed=2, scale=0.3),
            noise(HIDDEN, 2 * HIDDEN, seed=3, scale=0.3), noise(3 * HIDDEN, seed=4),
            np.arange(S + PAST) == np.array([[1], [2]]), *_cache(), *(np.array(x) for x in (False, True, True, True)),
        ],
        {"num_heads": N},
        THREE,
        reals=[FLOAT16],
        constant=range(8, 12),
    ),
    Case(
        "DecoderAttention",
        [
            noise(S, B, HIDDEN), noise(S, B, HIDDEN, seed=1), noise(HIDDEN, HIDDEN, seed=2, scale=0.3),
            noise(HIDDEN, 2 * HIDDEN, seed=3, scale=0.3), noise(3 * HIDDEN, seed=4),
            None, None, None, *(np.array(x) for x in (True, False, False, False)),
        ],
        {"num_heads": N, "mask_filter_value": -100.0},
        reals=[FLOAT16],
        constant=range(8, 12),
    ),
    Case(
        "LongformerAttention",
        [
            noise(1, 4, HIDDEN), noise(HIDDEN, 3 * HIDDEN, seed=1, scale=0.3), noise(3 * HIDDEN, seed=2),
            np.array([[0, 0, 0, -1e4]], np.float32), noise(HIDDEN, 3 * HIDDEN, seed=3, scale=0.3),
            noise(3 * HIDDEN, seed=4), np.array([[0, 1, 0, 0]], np.int32),
        ],
        {"num_heads": N, "window": 1},
        tolerance=5e-5,
    ),
    *(
        Case(
            "QAttention",
            [
                codes(B, S, 6, dtype=first),
                weight_codes(6, 3 * HIDDEN) if second is np.int8 else codes(6, 3 * HIDDEN, dtype=second),
                noise(3 * HIDDEN),
                number(0.02), np.abs(noise(3 * HIDDEN, seed=2)) * np.float32(0.01), ALL_KEYS,
                np.array(12, first), np.full(3 * HIDDEN, 5, second), noise(2, B, N, PAST, H, seed=4),
            ],
            {"num_heads": N, "unidirectional": 1, "scale": 0.4, "mask_filter_value": -100.0},
            TWO,
            tolerance=1e-3,
            # The CPU provider takes uint8 only: it gets the int8 codes plus 128, and a zero point plus 128.
            on_cpu={0: codes(B, S, 6, dtype=first).view(np.uint8) ^ 128, 6: np.array(140, np.uint8)}
            if first is np.int8
            else {},
            reals=[real],
        )
        for first, second, real in ((np.int8, np.int8, FLOAT16), (np.uint8, np.uint8, FLOAT))
    ),
    Case(
        "QAttention",
        [codes(B, S, 6), weight_codes(6, 3 * HIDDEN), noise(3 * HIDDEN), number(0.02), number(0.01)],
        {"num_heads": N},
        tolerance=1e-3,
        reals=[FLOAT],
    ),
]  # fmt: skip

# ---- grouped-query attention ----

HEADS, KV_HEADS, SIZE, ROOM = 4, 2, 16, 6
_GROUPED: Final[dict[str, Any]] = {"num_heads": HEADS, "kv_num_heads": KV_HEADS}
_ANGLES: Final = np.outer(np.arange(8), 0.6 ** np.arange(SIZE // 2)).astype(np.float32)
_TURNS: Final = [np.cos(_ANGLES), np.sin(_ANGLES)]
_NEW: Final = [noise(1, S, heads * SIZE, seed=i) for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))]
_LENGTHS: Final = [np.array([PAST + S - 1], np.int32), np.array(PAST + S, np.int32)]


def _stored(dtype: Any) -> list[Array]:
    """Return the keys and values of a quantized cache."""
    shape = (1, KV_HEADS, ROOM, SIZE // 2 if dtype is np.uint8 else SIZE)
    if dtype is ml_dtypes.float8_e4m3fn:
        return [noise(*shape, seed=i).astype(dtype) for i in (7, 8)]
    return [codes(*shape, dtype=dtype, seed=i) for i in (7, 8)]


GROUPED: Final = [
    Case(
        "GroupQueryAttention",
        [
            *_NEW, *(noise(1, KV_HEADS, PAST, SIZE, seed=i) for i in (4, 5)), *_LENGTHS, *_TURNS, None,
            noise(1, HEADS, S, S + PAST, seed=8), noise(HEADS, seed=9),
        ],
        _GROUPED | {"do_rotary": 1, "rotary_interleaved": 1, "softcap": 5.0, "scale": 0.3, "local_window_size": 4},
        THREE,
    ),
    Case(
        "GroupQueryAttention",
        [
            np.concatenate(_NEW, 2), None, None, None, None, np.array([S - 1], np.int32), np.array(S, np.int32),
            *_TURNS, np.array([[2, 3, 4]]), None, None, None, None, noise(SIZE, seed=5), noise(SIZE, seed=6),
        ],
        _GROUPED | {"do_rotary": 1, "qk_norm_epsilon": 1e-3, "qk_output": 2, "causal": 0, "smooth_softmax": 1},
        (True, True, True, True),
        reals=[BFLOAT16],
        own="the CPU provider has no norm of queries",
    ),
    Case(
        "GroupQueryAttention",
        [*_NEW, None, None, np.array([S - 1], np.int32), np.array(S, np.int32)],
        _GROUPED,
        THREE,
        reals=[FLOAT16],
    ),
    *(
        Case(
            "GroupQueryAttention",
            [
                *_NEW, *_stored(dtype), *_LENGTHS, *[None] * 5,
                *(np.full((1, KV_HEADS, 1, SIZE) if "CH" in kind else (1,), x, np.float32) for x in (0.02, 0.03)),
            ],
            _GROUPED
            | {"k_quant_type": kind, "v_quant_type": kind, "kv_cache_bit_width": 4 if dtype is np.uint8 else 8},
            THREE,
            reals=[real],
            part=_before(PAST + S),
            own="rounded inputs may have the next codes" if real == BFLOAT16 else "",
        )
        for dtype, kind, real in (
            (np.int8, "PER_CHANNEL", BFLOAT16),
            (np.uint8, "PER_TENSOR", FLOAT),
            (ml_dtypes.float8_e4m3fn, "PER_TENSOR", FLOAT16),
        )
    ),
]  # fmt: skip

# ---- recurrences ----

_BOUNDS: Final = np.array([0, 1, 6, 9], np.int32)
_COUNTS: Final = np.array([2, 9, -1], np.int32)
_GATED_DELTA: Final = [
    noise(9, 2, 3), noise(9, 2, 3, seed=1), noise(9, 4, 5, seed=2), _BOUNDS, noise(9, 4, seed=3), noise(9, 4, seed=4),
    noise(3, 4, 5, 3, seed=5), noise(4, seed=6), noise(4, seed=7), _COUNTS, np.array([1], np.int32),
]  # fmt: skip

RECURRENCES: Final = [
    Case(
        "CausalConvWithState",
        [noise(2, 3, 5), noise(3, 1, 3, seed=1), noise(3, seed=2), noise(2, 3, 4, seed=3)],
        {"activation": "silu", "dilation": 2},
        TWO,
    ),
    Case(
        "CausalConvWithState",
        [noise(2, 3, 3, 2), noise(6, 1, 3, seed=1)],
        {"channels_last": 1, "state_window": 2, "ndim": 1},
        TWO,
        reals=[FLOAT16],
        own="the CPU provider has no windows",
    ),
    Case(
        "VarlenCausalConvWithState",
        [noise(9, 4), noise(4, 1, 3, seed=1), _BOUNDS, noise(4, seed=2), noise(3, 4, 4, seed=3), _COUNTS],
        {"activation": "swish", "dilation": 2, "state_update_capacity": 2},
        THREE,
    ),
    Case(
        "VarlenCausalConvWithState",
        [noise(9, 4), noise(4, 1, 3, seed=1), _BOUNDS, None, noise(3, 4, 2, seed=3)],
        {},
        TWO,
        reals=[BFLOAT16],
    ),
    Case(
        "LinearAttention",
        [
            noise(2, 3, 6),
            noise(2, 3, 6, seed=1, scale=0.4),
            noise(2, 3, 10, seed=2),
            noise(2, 2, 3, 5, seed=3),
            noise(2, 3, 6, seed=4, scale=0.3),
            noise(2, 3, 2, seed=5, scale=0.3),
        ],
        {"q_num_heads": 2, "kv_num_heads": 2, "update_rule": "gated_delta", "scale": 0.3, "chunk_size": 16},
        TWO,
        tolerance=1e-4,
    ),
    Case(
        "LinearAttention",
        [noise(2, 3, 6), noise(2, 3, 6, seed=1, scale=0.4), noise(2, 3, 10, seed=2)],
        {"q_num_heads": 2, "kv_num_heads": 2, "update_rule": "linear", "state_window": 2},
        TWO,
        reals=[BFLOAT16],
        own="the CPU provider has no windows",
    ),
    Case(
        "GatedDeltaNet",
        _GATED_DELTA,
        {"gate_activation": "qwen", "beta_activation": "sigmoid", "qk_l2_norm": 1, "state_update_capacity": 2},
        THREE,
        reals=[FLOAT16],
    ),
    Case(
        "GatedDeltaNet",
        [noise(2, 3, 26, scale=0.5), None, None, None, None, None, noise(2, 4, 5, 3, seed=1)],
        {"update_rule": "delta", "scale": 0.2, "chunk_size": 16},
        TWO,
        reals=[BFLOAT16],
    ),
    Case(
        "GatedDeltaNet", [*_GATED_DELTA[:4], noise(9, 4, seed=3, scale=0.3)], {"update_rule": "gated"}, reals=[FLOAT16]
    ),
]

# ---- n-grams ----

_SIZES: Final = {"max_ngram_size": 3, "n_head_per_ngram": 2, "pad_id": 7}


def _ids(dtype: type[np.generic], *shape: int) -> Array:
    result: Array = np.random.default_rng(shape).integers(0, 6, shape).astype(dtype)
    return result


def _words(dtype: type[np.generic]) -> list[Array]:
    return [np.array([2**31 - 1, -77777777, 999], dtype), np.array([11, 101, 1009, 10007], dtype)]


def _ngrams(dtype: type[np.generic]) -> list[Case]:
    more = [_ids(dtype, 3, 2), _ids(dtype, 4), np.array(3, dtype), np.array([0, 0, 0, 1, 1, 1, 2, 2, 3], np.int32)]
    update = {"reset_on_eos": 1, "state_update_capacity": 2}
    return [
        Case(
            "NGramHashMapping",
            [
                _ids(dtype, 2, 6),
                *_words(dtype),
                _ids(dtype, 2, 2),
                *more[1:3],
                np.array([[0, 0, 1, 1, 1, 2]] * 2, np.int32),
            ],
            _SIZES | {"reset_on_eos": 1},
            TWO,
        ),
        Case("NGramHashMapping", [_ids(dtype, 2, 6), *_words(dtype)], _SIZES),
        Case(
            "VarlenNGramHashMapping",
            [_ids(dtype, 9), *_words(dtype), _BOUNDS, *more, np.array([[0, 0], [0, 0], [1, 2]], np.int32), _COUNTS],
            _SIZES | update,
            (True, True, True, True),
        ),
        Case("VarlenNGramHashMapping", [_ids(dtype, 9), *_words(dtype), _BOUNDS], _SIZES),
    ]


NGRAMS: Final = [
    Case("NGramRepeatBlock", [_ids(np.int64, 2, 8), noise(2, 6)], {"ngram_size": 2}),
    *_ngrams(np.int32),
    *_ngrams(np.int64),
]
