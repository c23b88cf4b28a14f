"""Operators that ONNX Runtime's fusions create, compared with the CPU provider if it has a kernel, else with NumPy.

These tests use float32; test_contrib_types tests the other types.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from contributed import FLOAT, Array, check_node, noise

INT32, BOOL = TensorProto.INT32, TensorProto.BOOL


def gelu(x: Array) -> Array:
    result: Array = 0.5 * x * (1 + np.vectorize(math.erf)(x * math.sqrt(0.5)))
    return result.astype(np.float32)


def silu(x: Array) -> Array:
    result: Array = x / (1 + np.exp(-x))
    return result


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    result: Array = e / e.sum(-1, keepdims=True)
    return result


@pytest.mark.parametrize(
    ("a", "b", "attributes"),
    [
        ((2, 3, 4), (4, 5), {"alpha": 0.5}),
        ((2, 4, 3), (2, 5, 4), {"transA": 1, "transB": 1}),
        ((4,), (4, 5), {"transA": 1}),
        ((3, 2, 4), (2, 4, 5), {"transBatchA": 1}),
        ((4, 2, 3), (5, 2, 4), {"transBatchA": 1, "transA": 1, "transBatchB": 1, "transB": 1, "alpha": 2.0}),
    ],
)
def test_fused_matmul(a: tuple[int, ...], b: tuple[int, ...], attributes: dict[str, float]) -> None:
    check_node("FusedMatMul", [noise(*a), noise(*b, seed=1)], attributes, reals=[FLOAT])


def test_transpose_matmul() -> None:
    inputs = [noise(2, 4, 3), noise(4, 5, seed=1)]
    check_node("TransposeMatMul", inputs, {"transA": 1, "alpha": 0.25}, reals=[FLOAT])


@pytest.mark.parametrize(
    ("activation", "parameters"),
    [("Relu", {}), ("LeakyRelu", {"activation_alpha": 0.3}), ("HardSigmoid", {"activation_beta": 0.4}), ("Tanh", {})],
)
def test_fused_gemm(activation: str, parameters: dict[str, float]) -> None:
    attributes = {"activation": activation, "transB": 1, "alpha": 0.5, "beta": 2.0, **parameters}
    inputs = [noise(3, 4), noise(5, 4, seed=1), noise(5, seed=2)]
    # The CPU provider uses 0 for a missing activation_alpha instead of the activation's default.
    attributes |= {"activation_alpha": 0.3} if activation == "HardSigmoid" else {}
    check_node("FusedGemm", inputs, attributes, reals=[FLOAT])


@pytest.mark.parametrize("with_bias", [False, True])
def test_gemm_fast_gelu(with_bias: bool) -> None:
    def reference(x: Array, w: Array, b: Array | None) -> Array:
        y = x @ w if b is None else x @ w + b
        result: Array = 0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        return result

    inputs = [noise(2, 3, 4), noise(4, 5, seed=1), noise(5, seed=2) if with_bias else None]
    check_node("GemmFastGelu", inputs, reference=reference, reals=[FLOAT])


@pytest.mark.parametrize(
    ("activation", "parameters"),
    [("Relu", ()), ("LeakyRelu", (0.2,)), ("Clip", (-0.5, 0.75)), ("HardSigmoid", (0.3, 0.4)), ("", ())],
)
def test_fused_conv(activation: str, parameters: tuple[float, ...]) -> None:
    attributes: dict[str, Any] = {"pads": [1, 1, 1, 1], "strides": [2, 2]}
    if activation:
        attributes |= {"activation": activation}
    if parameters:
        attributes |= {"activation_params": list(parameters)}
    x, w, b, z = noise(2, 3, 7, 6), noise(4, 3, 3, 3, seed=1), noise(4, seed=2), noise(2, 4, 4, 3, seed=3)
    check_node("FusedConv", [x, w, b, z], attributes, constant=[1, 2], reals=[FLOAT], tolerance=5e-5)
    check_node("FusedConv", [x, w], attributes, constant=[1], reals=[FLOAT], tolerance=5e-5)


def test_nhwc_conv() -> None:
    from onnx.reference import ReferenceEvaluator

    from contributed import loaded, node_model

    attributes = {"pads": [1, 0, 1, 0], "group": 2}
    x, w, b = noise(2, 6, 5, 4), noise(6, 3, 3, 2, seed=1), noise(6, seed=2)

    def reference(x: Array, w: Array, b: Array) -> Array:
        first = [np.ascontiguousarray(x.transpose(0, 3, 1, 2)), np.ascontiguousarray(w.transpose(0, 3, 1, 2)), b]
        model = loaded(node_model("Conv", first, attributes, [FLOAT], domain=""))
        (y,) = ReferenceEvaluator(model).run(None, {f"x{i}": value for i, value in enumerate(first)})
        result: Array = np.asarray(y).transpose(0, 2, 3, 1)
        return result

    check_node("NhwcConv", [x, w, b], attributes, constant=[1, 2], reference=reference, reals=[FLOAT], tolerance=5e-5)


@pytest.mark.parametrize(("bias", "inner"), [((3, 4, 5), 0), ((2, 1, 1, 5), 1), ((5,), 0)])
def test_bias_softmax(bias: tuple[int, ...], inner: int) -> None:
    inputs = [noise(2, 3, 4, 5), noise(*bias, seed=1)]
    attributes = {"axis": 3, "is_inner_broadcast": inner}
    check_node("BiasSoftmax", inputs, attributes, reference=lambda x, b: softmax(x + b), reals=[FLOAT])


def test_bias_softmax_makes_one_row_of_the_dimensions_from_its_axis_on() -> None:
    def reference(x: Array, b: Array) -> Array:
        return softmax((x + b).reshape(2, 12)).reshape(2, 3, 4)

    attributes = {"axis": 1, "is_inner_broadcast": 0}
    check_node("BiasSoftmax", [noise(2, 3, 4), noise(3, 4)], attributes, reference=reference, reals=[FLOAT])


def test_bias_dropout_of_inference_keeps_everything() -> None:
    inputs = [noise(2, 3, 4), noise(4, seed=1), noise(2, 3, 4, seed=2), np.array(0.5, np.float32), np.array(False)]

    def reference(x: Array, b: Array, r: Array, *_: Array) -> list[Array]:
        return [x + b + r, np.ones_like(x, bool)]

    check_node("BiasDropout", inputs, outputs=[FLOAT, BOOL], reference=reference, constant=[4], reals=[FLOAT])
    check_node("BiasDropout", inputs[:2], reference=lambda x, b: x + b, reals=[FLOAT])


def test_bias_dropout_of_training_drops_before_it_adds() -> None:
    def reference(x: Array, b: Array, r: Array, *_: Array) -> Array:
        return r

    inputs = [noise(2, 3), noise(3, seed=1), noise(2, 3, seed=2), np.array(1.0, np.float32), np.array(True)]
    check_node("BiasDropout", inputs, reference=reference, reals=[FLOAT])


def test_bias_add() -> None:
    inputs = [noise(2, 3, 4), noise(4, seed=1), noise(2, 3, 4, seed=2)]
    check_node("BiasAdd", inputs, reference=lambda x, b, r: x + b + r, reals=[FLOAT])


def test_bias_split_gelu() -> None:
    def reference(x: Array, b: Array) -> Array:
        left, right = np.split(x + b, 2, -1)
        return left * gelu(right)

    check_node("BiasSplitGelu", [noise(2, 3, 8), noise(8, seed=1)], reference=reference, reals=[FLOAT])


@pytest.mark.parametrize("skip", [(2, 3, 8), (1, 3, 8), (3, 8)])
def test_skip_layer_normalization(skip: tuple[int, ...]) -> None:
    inputs = [noise(2, 3, 8), noise(*skip, seed=1), noise(8, seed=2), noise(8, seed=3), noise(8, seed=4)]
    check_node("SkipLayerNormalization", inputs, {"epsilon": 1e-5}, [FLOAT, None, None, FLOAT], reals=[FLOAT])
    check_node("SkipLayerNormalization", [*inputs[:3], None, inputs[4]], {}, reals=[FLOAT])


def test_skip_layer_normalization_gives_mean_and_deviation() -> None:
    def reference(x: Array, skip: Array, gamma: Array) -> list[Array]:
        total = x + skip
        mean = total.mean(-1, keepdims=True)
        reciprocal = 1 / np.sqrt(((total - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
        return [(total - mean) * reciprocal * gamma, mean, reciprocal.astype(np.float32)]

    inputs = [noise(2, 3, 8), noise(2, 3, 8, seed=1), noise(8, seed=2)]
    check_node("SkipLayerNormalization", inputs, {"epsilon": 1e-5}, [FLOAT] * 3, reference=reference, reals=[FLOAT])


@pytest.mark.parametrize("with_bias", [False, True])
def test_skip_simplified_layer_normalization(with_bias: bool) -> None:
    inputs = [noise(2, 3, 8), noise(2, 3, 8, seed=1), noise(8, seed=2), noise(8, seed=4) if with_bias else None]
    outputs = [FLOAT, None, None, FLOAT]
    check_node("SkipSimplifiedLayerNormalization", inputs, {"epsilon": 1e-6}, outputs, reals=[FLOAT])


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("positions", [None, 1, 2])
def test_embed_layer_normalization(segments: bool, masked: bool, positions: int | None) -> None:
    rng = np.random.default_rng(3)

    def ids(rows: int, limit: int) -> Array:
        return rng.integers(0, limit, (rows, 5)).astype(np.int32)

    inputs = [
        ids(2, 11),
        ids(2, 2) if segments else None,
        noise(11, 8),
        noise(6, 8, seed=1),
        noise(2, 8, seed=2) if segments else None,
        noise(8, seed=3),
        noise(8, seed=4),
        np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32) if masked else None,
        ids(positions, 6) if positions else None,
    ]
    check_node("EmbedLayerNormalization", inputs, {}, [FLOAT, INT32, FLOAT], reals=[FLOAT], constant=[2, 3, 4, 5, 6])


def grouped(x: Array, gamma: Array, beta: Array, groups: int, activation: int, channels_last: int) -> Array:
    first = x.transpose(0, 3, 1, 2) if channels_last else x
    split = first.reshape(first.shape[0], groups, -1).astype(np.float64)
    normalized = (split - split.mean(2, keepdims=True)) / np.sqrt(split.var(2, keepdims=True) + 1e-5)
    result = normalized.reshape(first.shape) * gamma[:, None, None] + beta[:, None, None]
    result = silu(result) if activation else result
    return (result.transpose(0, 2, 3, 1) if channels_last else result).astype(np.float32)


@pytest.mark.parametrize(("channels_last", "activation"), [(0, 0), (1, 1)])
def test_group_norm(channels_last: int, activation: int) -> None:
    shape = (2, 3, 4, 6) if channels_last else (2, 6, 3, 4)
    attributes = {"channels_last": channels_last, "activation": activation, "groups": 3}

    def reference(x: Array, gamma: Array, beta: Array) -> Array:
        return grouped(x, gamma, beta, 3, activation, channels_last)

    inputs = [noise(*shape), noise(6, seed=1), noise(6, seed=2)]
    check_node("GroupNorm", inputs, attributes, reference=reference, reals=[FLOAT])


@pytest.mark.parametrize(("channels_last", "skip"), [(0, (2, 6, 3, 4)), (1, (2, 6)), (1, (2, 1, 1, 6)), (0, (2, 6))])
def test_skip_group_norm(channels_last: int, skip: tuple[int, ...]) -> None:
    shape = (2, 3, 4, 6) if channels_last else (2, 6, 3, 4)
    attributes = {"channels_last": channels_last, "activation": 1, "groups": 2}

    def reference(x: Array, gamma: Array, beta: Array, skip: Array, bias: Array) -> list[Array]:
        if skip.ndim == 2:
            skip = skip[:, None, None] if channels_last else skip[:, :, None, None]
        total = x + skip + (bias if channels_last else bias[:, None, None])
        return [grouped(total, gamma, beta, 2, 1, channels_last), total]

    inputs = [noise(*shape), noise(6, seed=1), noise(6, seed=2), noise(*skip, seed=3), noise(6, seed=4)]
    check_node("SkipGroupNorm", inputs, attributes, [FLOAT, FLOAT], reference=reference, reals=[FLOAT])
