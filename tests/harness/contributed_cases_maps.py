"""Cases of com.microsoft's elementwise maps, row operators, transforms, embeddings and GEMMs; see contributed_sweep."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from contributed import BFLOAT16, FLOAT, FLOAT16, Array, noise, number
from contributed_sweep import Case

X: Final = noise(2, 3, 8)
ROW: Final = noise(8, seed=1)
OTHER: Final = noise(2, 3, 8, seed=2)
KEEP: Final = np.array(False)
"""Input training_mode of dropout: inference, so that no element is dropped."""
WIDE: Final = {"M": FLOAT}
TWO: Final = (True, True)

_INTEGERS: Final = (
    np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64, np.bool_,
)  # fmt: skip


def _complex_product(a: Array, b: Array) -> Array:
    z = (a[..., 0] + 1j * a[..., 1]) * (b[..., 0] + 1j * b[..., 1])
    result: Array = np.stack([z.real, z.imag], -1).astype(np.float32)
    return result


MAPS: Final = [
    Case("BiasAdd", [X, ROW, OTHER]),
    Case("BiasGelu", [X, ROW]),
    Case("BiasSplitGelu", [X, ROW]),
    Case("FastGelu", [X, ROW]),
    Case("FastGelu", [X], reals=[FLOAT]),
    Case("Gelu", [X]),
    Case("QuickGelu", [X], {"alpha": 1.3}),
    Case("ScaledSiLU", [X], {"alpha": 0.7}, reals=[FLOAT]),
    Case("ScaledSiLU", [X, number(1.5)]),
    Case("GatedAdd", [X, OTHER, noise(2, 3, 1, seed=2)]),
    Case("ComplexMul", [noise(2, 3, 2), noise(3, 2, seed=1)], reference=_complex_product),
    Case(
        "ComplexMulConj",
        [noise(2, 3, 2), noise(3, 2, seed=1)],
        reference=lambda a, b: _complex_product(a, b * np.array([1, -1], np.float32)),
    ),
    Case("BiasDropout", [X, ROW, OTHER, number(0.5), KEEP], {"seed": 3}, TWO),
    Case("BiasDropout", [X, ROW], reals=[FLOAT16]),
    Case("BitmaskDropout", [X, number(0.5), KEEP], {"seed": 3}, TWO),
    Case("BitmaskDropout", [X], reals=[FLOAT16]),
    Case("BitmaskBiasDropout", [X, ROW, OTHER, number(0.5), KEEP], {"seed": 3}, TWO),
    Case("BitmaskBiasDropout", [X, ROW], reals=[FLOAT16]),
    Case("LinearAttentionGate", [X, ROW, noise(8, seed=3), OTHER], {}, TWO),
    Case("LinearAttentionGate", [X, ROW, noise(8, seed=3)], reals=[FLOAT16]),
    Case("HyperConnectionPreMix", [noise(2, 3, 8, 4), X], {"reduction_scale": 0.4}),
    Case("HyperConnectionPreMix", [X, noise(2, 3, 2)], {"num_branches": 2}, reals=[BFLOAT16], fixed=WIDE),
    Case("HyperConnectionPostMix", [noise(2, 3, 2, 4), noise(2, 3, 4), noise(2, 3, 2), noise(2, 3, 2, 2)]),
    Case(
        "HyperConnectionPostMix", [X, noise(2, 3, 4), noise(2, 3, 2)], {"num_branches": 2}, reals=[FLOAT16], fixed=WIDE
    ),
    Case("Trilu", [X, np.array(-1)], {"upper": 0}),
    Case("Trilu", [X], reals=[FLOAT]),
    Case("UnfoldTensor", [X], {"dim": -2, "size": 2, "step": 1}),
    *(Case("Trilu", [np.arange(12).reshape(3, 4).astype(dtype)], reference=np.triu) for dtype in _INTEGERS),
    *(
        Case("UnfoldTensor", [x], {"size": 3}, reference=lambda x: np.lib.stride_tricks.sliding_window_view(x, 3, 1))
        for x in (np.arange(12).reshape(3, 4).astype(dtype) for dtype in _INTEGERS)
    ),
]

# ---- normalizations of rows ----

_CHANNELS: Final = noise(2, 6, 3, 4)
_GROUPS: Final = {"groups": 3, "activation": 1, "epsilon": 1e-4, "channels_last": 0}


def _ids(limit: int, *shape: int) -> Array:
    result: Array = np.random.default_rng(3).integers(0, limit, shape).astype(np.int32)
    return result


ROWS: Final = [
    Case("BiasSoftmax", [X, OTHER], {"axis": 2, "is_inner_broadcast": 0}),
    Case("GatedRMSNorm", [X, noise(4, seed=1), OTHER], {"activation": "sigmoid", "epsilon": 1e-3}),
    Case("BranchwiseRMSNorm", [noise(2, 3, 2, 4), noise(4, seed=1)], {"epsilon": 1e-3}),
    Case("BranchwiseRMSNorm", [X], {"num_branches": 2}, reals=[BFLOAT16]),
    Case(
        "EngramGate",
        [noise(2, 3, 2, 4), noise(2, 3, 2, 4, seed=1), noise(2, 3, 4), *(noise(2, 4, seed=i) for i in range(3))],
        {"epsilon": 1e-3},
        TWO,
    ),
    Case(
        "EngramGate",
        [noise(2, 3, 2, 4), noise(2, 3, 2, 4, seed=1), noise(2, 3, 4), *(noise(2, 4, seed=i) for i in range(2))],
        reals=[BFLOAT16],
    ),
    Case(
        "SkipLayerNormalization",
        [X, OTHER, ROW, noise(8, seed=3), noise(8, seed=4)],
        {"epsilon": 1e-5},
        (True, False, False, True),
    ),
    Case("SkipLayerNormalization", [X, OTHER, ROW], {}, (True, True, True), reals=[FLOAT16], own="gives no mean"),
    Case(
        "SkipSimplifiedLayerNormalization",
        [X, OTHER, ROW, noise(8, seed=4)],
        {"epsilon": 1e-6},
        (True, False, False, True),
    ),
    Case(
        "SkipSimplifiedLayerNormalization",
        [X, OTHER, ROW],
        {},
        (True, False, True),
        reals=[FLOAT16],
        own="gives no mean",
    ),
    Case(
        "EmbedLayerNormalization",
        [
            _ids(5, 2, 3), _ids(2, 2, 3), noise(5, 8), noise(4, 8, seed=1), noise(2, 8, seed=2), ROW, noise(8, seed=3),
            np.array([[1, 1, 0], [1, 1, 1]], np.int32), _ids(4, 2, 3),
        ],
        {"epsilon": 1e-5, "mask_index_type": 1},
        (True, True, True),
    ),
    Case(
        "EmbedLayerNormalization",
        [_ids(5, 2, 3), None, noise(5, 8), noise(4, 8, seed=1), None, ROW, noise(8, seed=3)],
        {},
        (True, True),
        reals=[FLOAT16],
    ),
    Case("GroupNorm", [_CHANNELS, noise(6, seed=1), noise(6, seed=2)], _GROUPS),
    Case(
        "GroupNorm",
        [_CHANNELS, noise(4, seed=1), noise(4, seed=2)],
        {"groups": 2, "activation": 0},
        reals=[FLOAT16],
        fixed={"M": FLOAT},
    ),
    Case(
        "SkipGroupNorm",
        [_CHANNELS, noise(6, seed=1), noise(6, seed=2), noise(2, 6, 3, 4, seed=3), noise(6, seed=4)],
        _GROUPS,
        TWO,
    ),
    Case(
        "SkipGroupNorm",
        [_CHANNELS, noise(4, seed=1), noise(4, seed=2), noise(2, 4, seed=3)],
        {"groups": 2, "activation": 1},
        reals=[FLOAT16],
        fixed={"M": FLOAT},
    ),
]  # fmt: skip

# ---- positions ----

_ANGLES: Final = np.outer(np.arange(6), [1.0, 0.1]).astype(np.float32)
_TURNS: Final = [np.cos(_ANGLES), np.sin(_ANGLES)]
_PLACES: Final = np.array([[0, 1, 4], [5, 2, 2]], np.int32)
_OF_TOKENS: Final = np.array([[0, 1, 2], [4, 5, 3]], np.int32)
_GATED: Final = [
    ROW, noise(1, 2, 3, 3, seed=2), noise(4, 6, seed=3), noise(6, seed=4), noise(1, 2, 1, 1, seed=5),
]  # fmt: skip


def _gemma(emb: Array, *states: Array) -> list[Array]:
    cos, sin = (f(emb)[:, None].astype(np.float16).astype(np.float32) for f in (np.cos, np.sin))
    q, q_rot, k, k_rot = (x.astype(np.float32) for x in states)
    return [q * cos + q_rot * sin, k * cos + k_rot * sin]


PLACES: Final = [
    Case("RotaryEmbedding", [X, _PLACES.astype(np.int64), *_TURNS], {"interleaved": 1}),
    Case(
        "RotaryEmbedding",
        [noise(2, 3, 12), np.array(1), *_TURNS],
        {"num_heads": 2, "rotary_embedding_dim": 4, "is_packed_batching": 1},
        reals=[FLOAT16],
    ),
    Case(
        "MRotaryEmbedding",
        [X, np.stack([_PLACES, _PLACES[::-1], _PLACES]).astype(np.int64), *_TURNS],
        {"mrope_section": [1, 1, 0], "mrope_layout": 1, "interleaved": 1, "num_heads": 2},
    ),
    Case(
        "MRotaryEmbedding",
        [noise(2, 3, 12), np.stack([_PLACES, _PLACES[::-1], _PLACES]).astype(np.int64), *_TURNS],
        {"mrope_section": [1, 1, 0], "num_heads": 2, "rotary_embedding_dim": 4, "scale": 0.5}
        | {"is_packed_batching": 1},
        reals=[FLOAT16],
    ),
    Case(
        "GemmaRotaryEmbedding",
        [noise(2, 3, 4), *(noise(2, 2, 3, 4, seed=i) for i in range(4))],
        {},
        TWO,
        fixed={"T": FLOAT16},
        reference=_gemma,
        tolerance=4e-3,
    ),
    Case("RemovePadding", [X, np.array([1, 3], np.int32)], {}, (True, True, True, True)),
    Case("RestorePadding", [noise(5, 8), _OF_TOKENS]),
    Case(
        "RelativePositionBias",
        [noise(4, 2), np.array(3), np.array(3)],
        {"is_bidirectional": 1, "max_distance": 8},
        constant=[1, 2],
    ),
    Case("GatedRelativePositionBias", [X, *_GATED], {"num_heads": 2}, tolerance=1e-4),
    Case("GatedRelativePositionBias", [noise(4, 8), *_GATED, _OF_TOKENS], {"num_heads": 2}, reals=[FLOAT16]),
]

# ---- transforms ----

TRANSFORMS: Final = [
    Case("GridSample", [noise(1, 2, 3, 4), noise(1, 3, 3, 2, seed=1)], {"mode": "nearest", "align_corners": 1}),
    Case("GridSample", [noise(1, 2, 3, 4), noise(1, 3, 3, 2, seed=1)], {"padding_mode": "border"}, reals=[FLOAT16]),
    Case("Inverse", [noise(2, 3, 3) + 3 * np.eye(3, dtype=np.float32)]),
    Case("Rfft", [noise(2, 3, 8)], {"signal_ndim": 1, "onesided": 1, "normalized": 0}),
    Case("Irfft", [noise(2, 3, 5, 2)], {"signal_ndim": 1, "onesided": 1, "normalized": 0}),
    Case("DynamicTimeWarping", [np.abs(noise(3, 4))]),
    Case(
        "ConvTransposeWithDynamicPads",
        [noise(1, 2, 3, 4), noise(2, 2, 3, 3, seed=1), np.array([1, 0, 1, 1]), noise(4, seed=2)],
        {"strides": [2, 1], "output_padding": [1, 0], "group": 2, "dilations": [1, 1], "kernel_shape": [3, 3]},
        constant=[2],
    ),
    Case(
        "ConvTransposeWithDynamicPads",
        [noise(1, 2, 3, 4), noise(2, 2, 3, 3, seed=1)],
        {"auto_pad": "VALID"},
        reals=[FLOAT16],
        own="the CPU provider needs pads",
    ),
]

# ---- products ----

_WINDOW: Final[dict[str, Any]] = {
    "pads": [1, 1, 1, 1], "strides": [2, 1], "dilations": [1, 1], "kernel_shape": [3, 3], "group": 2,
}  # fmt: skip
_GEMM: Final = {"transA": 1, "transB": 1, "alpha": 0.5}

PRODUCTS: Final = [
    Case("FusedMatMul", [noise(2, 4, 3), noise(2, 5, 4, seed=1)], _GEMM),
    Case("FusedMatMul", [noise(3, 2, 4), noise(2, 4, 5)], {"transBatchA": 1, "transBatchB": 0}, reals=[FLOAT16]),
    Case("TransposeMatMul", [noise(2, 4, 3), noise(2, 5, 4, seed=1)], _GEMM),
    Case(
        "FusedGemm",
        [noise(4, 3), noise(5, 4, seed=1), noise(5, seed=2)],
        _GEMM | {"beta": 2.0, "activation": "Selu", "activation_alpha": 1.2, "activation_gamma": 0.9},
        own="the CPU provider has no Selu here",
    ),
    Case(
        "FusedGemm",
        [noise(3, 4), noise(4, 5, seed=1)],
        {"activation": "HardSigmoid", "activation_alpha": 0.3, "activation_beta": 0.4},
        reals=[FLOAT16],
    ),
    Case("GemmFastGelu", [X, noise(8, 5, seed=1), noise(5, seed=2)]),
    Case("GemmFastGelu", [X, noise(8, 5, seed=1)], reals=[BFLOAT16]),
    Case(
        "FusedConv",
        [noise(1, 4, 5, 4), noise(4, 2, 3, 3, seed=1), noise(4, seed=2), noise(1, 4, 3, 4, seed=3)],
        _WINDOW | {"activation": "LeakyRelu", "activation_params": [0.2]},
    ),
    Case("FusedConv", [noise(1, 4, 5, 4), noise(4, 4, 3, 3, seed=1)], {"auto_pad": "SAME_UPPER"}, reals=[FLOAT16]),
    Case("NhwcConv", [noise(1, 5, 4, 4), noise(4, 3, 3, 2, seed=1), noise(4, seed=2)], _WINDOW),
    Case("NhwcConv", [noise(1, 5, 4, 4), noise(4, 3, 3, 4, seed=1)], {"auto_pad": "SAME_LOWER"}, reals=[FLOAT16]),
]
