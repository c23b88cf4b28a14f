"""Cases of com.microsoft's int8 operators with cuBLASLt's matrix orders, and of 8-bit float GEMMs, against NumPy."""

from __future__ import annotations

from math import erf
from typing import Any, Final

import ml_dtypes
import numpy as np
from onnx import TensorProto

from contributed import BFLOAT16, FLOAT, FLOAT16, Array, codes, noise, number
from contributed_codes import packed
from contributed_sweep import Case

COL, ROW, COL32 = 0, 1, 2
INT8: Final = np.int8


def in_order(x: Array, order: int) -> Array:
    if order == COL:
        return np.ascontiguousarray(np.swapaxes(x, -1, -2)).reshape(x.shape)
    if order == COL32:
        parts = x.reshape(*x.shape[:-1], -1, 32)
        return np.ascontiguousarray(np.swapaxes(parts, -2, -3)).reshape(x.shape)
    return x


def quantized(x: Array, scale: float) -> Array:
    result: Array = np.clip(np.rint(x / np.float32(scale)), -128, 127).astype(INT8)
    return result


def _conversions(order: int) -> list[Case]:
    scale, given = 0.03125, codes(2, 3, 64, dtype=INT8)
    return [
        Case(
            "QuantizeWithOrder",
            [noise(2, 3, 64, scale=3.0), number(scale)],
            {"order_input": ROW, "order_output": order},
            reals=[FLOAT, FLOAT16] if order == COL else [FLOAT],
            reference=lambda x, _: in_order(quantized(x, scale), order),
        ),
        *(
            Case(
                "DequantizeWithOrder",
                [in_order(given, order), number(scale)],
                {"order_input": order, "order_output": ROW, "to": kind},
                fixed={"F": kind},
                reference=lambda *_: given.astype(np.float32) * np.float32(scale),
            )
            for kind in ((FLOAT, FLOAT16) if order == COL else (FLOAT,))
        ),
    ]


def _gelu() -> Case:
    x = codes(4, 40, dtype=INT8)

    def reference(*_: Array) -> Array:
        real = x * np.float32(0.03)
        phi = np.vectorize(erf)(real / np.sqrt(2))
        return quantized((0.5 * real * (1 + phi)).astype(np.float32), 0.02)

    orders = {"order_X": ROW, "order_Y": ROW}
    return Case("QOrderedGelu", [x, number(0.03), number(0.02)], orders, reference=reference, steps=True)


def _layer_normalization(shift: Array | None) -> Case:
    def reference(x: Array, by: Array, gamma: Array, beta: Array | None, to: Array) -> Array:
        real = x.astype(np.float64) * by
        normal = (real - real.mean(-1, keepdims=True)) / np.sqrt(real.var(-1, keepdims=True) + 1e-5)
        return quantized((normal * gamma + (0 if beta is None else beta)).astype(np.float32), float(to))

    return Case(
        "QOrderedLayerNormalization",
        [codes(2, 3, 24, dtype=INT8), number(0.05), noise(24), shift, number(0.04)],
        {"order_X": ROW, "order_Y": ROW, "axis": -1, "epsilon": 1e-5} if shift is not None else {},
        reals=None if shift is not None else [FLOAT16],
        reference=reference,
        steps=True,
    )


def _matmul(*, whole: bool) -> Case:
    """Return a QOrderedMatMul; ``whole`` adds a bias, an addend matrix, and a scale for each column of B."""
    a, b = codes(2, 3, 16, dtype=INT8), codes(16, 8, dtype=INT8, seed=1)
    c = codes(1, 3, 8, dtype=INT8, seed=2)
    by_b = np.abs(noise(8)) * np.float32(0.01) + np.float32(0.01) if whole else number(0.02)

    def reference(*_: Array) -> Array:
        total = (a.astype(np.int64) @ b.astype(np.int64)) * (0.02 * by_b.astype(np.float64) / 0.5)
        if whole:
            total = total + noise(8, seed=3) + c * (0.3 / 0.5)
        return quantized(total.astype(np.float32), 1.0)

    more: list[Array | None] = [noise(8, seed=3), c, number(0.3)] if whole else []
    inputs = [a, number(0.02), in_order(b, COL), by_b, number(0.5), *more]
    attributes = {"order_A": ROW, "order_B": COL, "order_Y": ROW}
    return Case("QOrderedMatMul", inputs, attributes, reference=reference, steps=True)


def _attention(*, masked: bool) -> Case:
    """Return a QOrderedAttention, whose GEMM and Softmax results are rounded to int8; ``masked`` masks two keys."""
    batch, rows, width, heads = 2, 4, 16, 2
    x, mask = codes(batch, rows, width, dtype=INT8), np.array([[1] * 4, [1, 1, 0, 0]], np.int32)
    weights = [codes(width, width, dtype=INT8, seed=i) for i in range(1, 4)]
    by = [number(0.01), np.abs(noise(width)) * np.float32(0.01), number(0.02)]
    bias = [noise(width, seed=i) for i in range(3)]
    scales = [0.06, 0.05, 0.04]
    by_x, by_scores, by_softmax, by_values = 0.02, 0.2, 1 / 127, 0.03

    def reference(*_: Array) -> Array:
        parts = []
        for weight, each, added, scale in zip(weights, by, bias, scales, strict=True):
            total = (x.astype(np.int64) @ weight.astype(np.int64)) * (by_x * each) + added
            parts.append(quantized(total, scale).reshape(batch, rows, heads, -1).transpose(0, 2, 1, 3).astype(np.int64))
        q, k, v = parts
        scores = quantized((q @ np.swapaxes(k, -1, -2)) * (scales[0] * scales[1]), by_scores)
        real = scores * by_scores / np.sqrt(width // heads)
        real = real + np.where(mask, 0, -1e4)[:, None, None] if masked else real
        powers = np.exp(real - real.max(-1, keepdims=True))
        shares = quantized(powers / powers.sum(-1, keepdims=True), by_softmax)
        values = quantized((shares.astype(np.int64) @ v) * (by_softmax * scales[2]), by_values)
        result: Array = values.transpose(0, 2, 1, 3).reshape(batch, rows, width)
        return result

    inputs = [
        x, number(by_x), *map(number, scales), *(in_order(w, COL) for w in weights), *by, *bias, number(by_scores),
        number(by_softmax), number(by_values), *[mask] * masked,
    ]  # fmt: skip
    attributes: dict[str, Any] = {"num_heads": heads, "order_input": ROW, "order_weight": COL, "order_output": ROW}
    if not masked:
        attributes["qkv_hidden_sizes"] = [width] * 3
    return Case("QOrderedAttention", inputs, attributes, reference=reference, steps=True)


def _longformer_attention() -> Case:
    """Return a QOrderedLongformerAttention: window of one token to each side, and a global first token."""
    batch, rows, width, heads, window = 1, 6, 8, 2, 1
    x = codes(batch, rows, width, dtype=INT8)
    weights = [codes(width, 3 * width, dtype=INT8, seed=i) for i in (1, 2)]
    bias = [noise(3 * width, seed=i, scale=4.0) for i in (1, 2)]
    mask, flags = np.zeros((batch, rows), np.float32), np.array([[1, 0, 0, 0, 0, 0]], np.int32)
    mask[0, -1] = -1e4

    def reference(*_: Array) -> Array:
        results = []
        for kind, (weight, added) in enumerate(zip(weights, bias, strict=True)):
            total = (x.astype(np.int64) @ weight.astype(np.int64)) * (0.02 * 0.01 / 0.05) + added
            real = (quantized(total, 1.0) * np.float32(0.05)).astype(np.float16).astype(np.float64)
            q, k, v = (y.reshape(batch, rows, heads, -1).transpose(0, 2, 1, 3) for y in np.split(real, 3, -1))
            scores = q @ np.swapaxes(k, -1, -2) / np.sqrt(width // heads) + mask[:, None, None]
            if kind == 0:
                places = np.arange(rows)
                near = (np.abs(places[:, None] - places) <= window) | (flags[0] != 0)
                scores = np.where(near, scores, -np.inf)
            powers = np.exp(scores - scores.max(-1, keepdims=True))
            made = powers / powers.sum(-1, keepdims=True) @ v
            results.append(made.transpose(0, 2, 1, 3).reshape(batch, rows, width))
        return quantized(np.where(flags[..., None] != 0, results[1], results[0]), 0.05)

    inputs = [
        x, number(0.02), in_order(weights[0], COL), number(0.01), bias[0], number(1.0), number(0.05), mask,
        in_order(weights[1], COL), number(0.01), bias[1], number(0.05), flags, number(0.05),
    ]  # fmt: skip
    attributes = {"num_heads": heads, "window": window, "order_input": ROW, "order_output": ROW}
    attributes |= {"order_weight": COL, "order_global_weight": COL}
    fixed = {"F": FLOAT16}
    return Case(
        "QOrderedLongformerAttention", inputs, attributes, fixed=fixed, reference=reference, steps=True
    )  # fmt: skip


ORDERED: Final = [
    *_conversions(COL), *_conversions(COL32), _gelu(), _layer_normalization(noise(24, seed=1)),
    _layer_normalization(None), _matmul(whole=True), _matmul(whole=False), _attention(masked=True),
    _attention(masked=False), _longformer_attention(),
]  # fmt: skip

# ---- 8-bit floats ----

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def _gemm(
    a: Any, b: Any, kind: int, *, whole: bool = True, activation: str = "NONE", reals: tuple[int, ...] = (FLOAT,)
) -> Case:
    """Return a GemmFloat8; ``whole`` adds scales and the addend C."""
    dtype = {int(TensorProto.FLOAT8E4M3FN): E4M3, int(TensorProto.FLOAT8E5M2): E5M2}.get(kind)

    def reference(a: Array, b: Array, c: Array | None = None, *by: Array) -> Array:
        total = 0.5 * (a.astype(np.float64) * (by[0] if by else 1)) @ (b.astype(np.float64) * (by[1] if by else 1)).T
        total = total if c is None or not whole else total + 2.0 * c
        if activation == "GELU":
            total = 0.5 * total * (1 + np.tanh(np.sqrt(2 / np.pi) * (total + 0.044715 * total**3)))
        result: Array = (np.maximum(total, 0) if activation == "RELU" else total) * (by[2] if by else 1)
        return result.astype(np.float32) if dtype is None else result.astype(dtype)

    x, y = noise(3, 16).astype(a), noise(5, 16, seed=1).astype(b)
    more = [noise(3, 5, seed=2), number(0.25), number(2.0), number(1.5)] if whole else []
    return Case(
        "GemmFloat8",
        [x, y, *more],
        {"transB": 1, "transA": 0, "alpha": 0.5, "beta": 2.0, "activation": activation, "dtype": kind},
        reals=reals,
        fixed={"TR": kind},
        reference=reference,
        tolerance=1e-4,
    )


def _fp4_weight(*, whole: bool) -> Case:
    columns, width, block = 6, 40, 16
    values = noise(columns, width, scale=2.0).astype(ml_dtypes.float4_e2m1fn)
    scales = np.abs(noise(columns, -(-width // block), seed=1)).astype(E4M3)
    numbers = values.astype(np.float32) * np.repeat(scales.astype(np.float32), block, 1)[:, :width] * np.float32(0.5)
    given = packed(values.view(np.uint8).astype(np.int64), 4)
    more: list[Array | None] = [number(2.0), noise(columns, seed=3)] if whole else []
    return Case(
        "MatMulBlockQuantizedFp4Weight",
        [noise(3, width), given, scales.view(np.uint8), number(0.5), *more],
        {"block_size": block} if whole else {},
        reals=None if whole else [FLOAT16],
        constant=[1, 2],
        reference=lambda a, *rest: (a @ numbers.T + (rest[-1] if whole else 0)).astype(np.float32),
        tolerance=2e-2,
    )


def _fp8_weight(*, whole: bool) -> Case:
    columns, width, block = 6, 40, 24
    values, scales = noise(columns, width).astype(E4M3), np.abs(noise(columns, 2, seed=1))
    numbers = values.astype(np.float32) * np.repeat(scales, block, 1)[:, :width]

    def reference(a: Array, *rest: Array) -> Array:
        if whole:
            a = (a / rest[2]).astype(E4M3).astype(np.float32) * rest[2]
        result: Array = (a @ numbers.T + (rest[-1] if whole else 0)).astype(np.float32)
        return result

    more = [number(0.125), noise(columns, seed=3)] if whole else []
    return Case(
        "MatMulBlockQuantizedFp8Weight",
        [noise(3, width), values, scales, *more],
        {"block_size": block},
        reals=None if whole else [FLOAT16],
        constant=[1],
        reference=reference,
    )


SMALL_FLOATS: Final = [
    _gemm(E4M3, E5M2, FLOAT),
    _gemm(E4M3, E5M2, FLOAT16, activation="RELU"),
    _gemm(E5M2, E4M3, int(TensorProto.FLOAT8E4M3FN)),
    _gemm(E5M2, E4M3, int(TensorProto.FLOAT8E5M2), activation="GELU"),
    _gemm(np.float32, np.float32, BFLOAT16, reals=(FLOAT16, BFLOAT16)),
    _gemm(np.float32, np.float32, FLOAT16, whole=False),
    *(_fp4_weight(whole=whole) for whole in (True, False)),
    *(_fp8_weight(whole=whole) for whole in (True, False)),
]
