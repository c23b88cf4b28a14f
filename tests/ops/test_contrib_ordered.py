"""Matrices of int8 in orders of cuBLASLt's, and products of floats of 8 bits, against NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from math import erf

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto

from contributed import FLOAT, FLOAT16, Array, check_node, codes, noise, number
from emulator_harness import configured
from ort_cuda_plugin.conformance.mode import findings

INT8 = int(TensorProto.INT8)
COL, ROW, COL32 = 0, 1, 2


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    """Kernels check every access, and streams run at any time."""
    with configured(adversarial=1, check=1, seed=7):
        yield
        assert findings() == []


def in_order(x: Array, order: int) -> Array:
    if order == COL:
        return np.ascontiguousarray(np.swapaxes(x, -1, -2)).reshape(x.shape)
    if order == COL32:
        parts = x.reshape(*x.shape[:-1], -1, 32)
        return np.ascontiguousarray(np.swapaxes(parts, -2, -3)).reshape(x.shape)
    return x


def quantized(x: Array, scale: float) -> Array:
    result: Array = np.clip(np.rint(x / np.float32(scale)), -128, 127).astype(np.int8)
    return result


@pytest.mark.parametrize("order", [COL, COL32])
def test_quantize_and_dequantize_with_order(order: int) -> None:
    x = noise(2, 3, 64, scale=3.0)
    scale = 0.03125
    check_node(
        "QuantizeWithOrder",
        [x, number(scale)],
        {"order_input": ROW, "order_output": order},
        [INT8],
        wide=[1],
        reals=[FLOAT, FLOAT16] if order == COL else [FLOAT],
        reference=lambda x, _: in_order(quantized(x, scale), order),
    )
    given = codes(2, 3, 64, dtype=np.int8)
    check_node(
        "DequantizeWithOrder",
        [in_order(given, order), number(scale)],
        {"order_input": order, "order_output": ROW, "to": FLOAT},
        reals=[FLOAT],
        reference=lambda *_: given.astype(np.float32) * np.float32(scale),
    )


def test_qordered_gelu() -> None:
    x = codes(4, 40, dtype=np.int8)

    def reference(*_: Array) -> Array:
        real = x * np.float32(0.03)
        phi = np.vectorize(erf)(real / np.sqrt(2))
        return quantized((0.5 * real * (1 + phi)).astype(np.float32), 0.02)

    check_node(
        "QOrderedGelu", [x, number(0.03), number(0.02)], {}, [INT8], reals=[FLOAT], reference=reference, step=True
    )


def test_qordered_layer_normalization() -> None:
    x = codes(2, 3, 24, dtype=np.int8)

    def reference(x: Array, by: Array, gamma: Array, beta: Array, to: Array) -> Array:
        real = x.astype(np.float64) * by
        normal = (real - real.mean(-1, keepdims=True)) / np.sqrt(real.var(-1, keepdims=True) + 1e-5)
        return quantized((normal * gamma + beta).astype(np.float32), float(to))

    inputs = [x, number(0.05), noise(24), noise(24, seed=1), number(0.04)]
    check_node(
        "QOrderedLayerNormalization",
        inputs,
        {},
        [INT8],
        reals=[FLOAT, FLOAT16],
        wide=[1, 4],
        reference=reference,
        step=True,
        sized=range(14),
    )


@pytest.mark.parametrize("whole", [False, True])
def test_qordered_matmul(whole: bool) -> None:
    """With a bias, a matrix to add and a scale for each column, and without."""
    a, b = codes(2, 3, 16, dtype=np.int8), codes(16, 8, dtype=np.int8, seed=1)
    c = codes(1, 3, 8, dtype=np.int8, seed=2)
    by_b = np.abs(noise(8)) * np.float32(0.01) + np.float32(0.01) if whole else number(0.02)

    def reference(*_: Array) -> Array:
        total = (a.astype(np.int64) @ b.astype(np.int64)) * (0.02 * by_b.astype(np.float64) / 0.5)
        if whole:
            total = total + noise(8, seed=3) + c * (0.3 / 0.5)
        return quantized(total.astype(np.float32), 1.0)

    more: list[Array | None] = [noise(8, seed=3), c, number(0.3)] if whole else []
    inputs = [a, number(0.02), in_order(b, COL), by_b, number(0.5), *more]
    attributes = {"order_A": ROW, "order_B": COL, "order_Y": ROW}
    check_node("QOrderedMatMul", inputs, attributes, [INT8], reals=[FLOAT], reference=reference, step=True)


def test_qordered_attention() -> None:
    """Every product and the softmax are rounded to codes; the second sequence has two keys that do not count."""
    batch, rows, width, heads = 2, 4, 16, 2
    x, mask = codes(batch, rows, width, dtype=np.int8), np.array([[1] * 4, [1, 1, 0, 0]], np.int32)
    weights = [codes(width, width, dtype=np.int8, seed=i) for i in range(1, 4)]
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
        real = scores * by_scores / np.sqrt(width // heads) + np.where(mask, 0, -1e4)[:, None, None]
        powers = np.exp(real - real.max(-1, keepdims=True))
        shares = quantized(powers / powers.sum(-1, keepdims=True), by_softmax)
        values = quantized((shares.astype(np.int64) @ v) * (by_softmax * scales[2]), by_values)
        result: Array = values.transpose(0, 2, 1, 3).reshape(batch, rows, width)
        return result

    inputs = [
        x, number(by_x), *map(number, scales), *(in_order(w, COL) for w in weights), *by, *bias, number(by_scores),
        number(by_softmax), number(by_values), mask,
    ]  # fmt: skip
    attributes = {"num_heads": heads, "order_input": ROW, "order_weight": COL, "order_output": ROW}
    sized = range(len(inputs))
    check_node(
        "QOrderedAttention", inputs, attributes, [INT8], reals=[FLOAT], reference=reference, step=True, sized=sized
    )


def test_qordered_longformer_attention() -> None:
    """A window of one place to both sides, and the first token is global."""
    batch, rows, width, heads, window = 1, 6, 8, 2, 1
    x = codes(batch, rows, width, dtype=np.int8)
    weights = [codes(width, 3 * width, dtype=np.int8, seed=i) for i in (1, 2)]
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
    wide = [i for i in range(14) if i != 7]
    check_node(
        "QOrderedLongformerAttention",
        inputs,
        attributes,
        [INT8],
        reals=[FLOAT16],
        wide=wide,
        reference=reference,
        step=True,
        sized=range(14),
    )


@pytest.mark.parametrize("activation", ["NONE", "GELU"])
def test_gemm_of_floats_of_8_bits(activation: str) -> None:
    a, b = noise(3, 16).astype(ml_dtypes.float8_e4m3fn), noise(5, 16, seed=1).astype(ml_dtypes.float8_e5m2)

    def reference(*given: Array) -> Array:
        total = 0.5 * (a.astype(np.float32) * 0.25) @ (b.astype(np.float32) * 2).T
        if activation == "GELU":
            total = 0.5 * total * (1 + np.tanh(np.sqrt(2 / np.pi) * (total + 0.044715 * total**3)))
        else:
            total = total + 2.0 * given[2]
        result: Array = (total * np.float32(1.5)).astype(np.float32)
        return result

    addend = None if activation == "GELU" else noise(3, 5, seed=2)
    inputs = [a, b, addend, number(0.25), number(2.0), number(1.5)]
    attributes = {"transB": 1, "alpha": 0.5, "beta": 2.0, "activation": activation}
    constant = [0, 1]
    check_node("GemmFloat8", inputs, attributes, constant=constant, reals=[FLOAT], reference=reference, tolerance=1e-4)
