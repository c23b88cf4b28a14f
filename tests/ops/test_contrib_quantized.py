"""com.microsoft's quantized operators, compared with the CPU provider. test_contrib_types has the others."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto

from contributed import FLOAT, Array, check_node, codes, node_model, noise, number, weight_codes

UINT8 = int(TensorProto.UINT8)


@pytest.mark.parametrize("channels_last", [0, 1])
def test_pooling(channels_last: int) -> None:
    x = codes(2, 6, 5, 3) if channels_last else codes(2, 3, 6, 5)
    inputs = [x, number(0.02), number(100, np.uint8), number(0.015), number(60, np.uint8)]
    window = {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1], "channels_last": channels_last}
    for padded in (0, 1):
        attributes = window | {"count_include_pad": padded}
        check_node("QLinearAveragePool", inputs, attributes, [UINT8], reals=[FLOAT], step=True, constant=[1, 2, 3, 4])
    attributes = {"channels_last": channels_last}
    check_node("QLinearGlobalAveragePool", inputs, attributes, [UINT8], reals=[FLOAT], step=True, constant=[1, 2, 3, 4])


@pytest.mark.parametrize(("quantized", "per_column"), [(False, True), (True, False)])
def test_gemm(quantized: bool, per_column: bool) -> None:
    b_scale = np.array([0.01, 0.02, 0.03, 0.04, 0.05], np.float32) if per_column else number(0.02)
    b_zero = np.array([3, -4, 5, 0, 1], np.int8) if per_column else number(3, np.int8)
    inputs = [
        codes(4, 7),
        number(0.02),
        number(100, np.uint8),
        weight_codes(5, 7, seed=1),
        b_scale,
        b_zero,
        np.array([10, -2000, 300, 4, 0], np.int32),
    ]
    inputs += [number(0.2), number(120, np.uint8)] if quantized else []
    outputs = [UINT8 if quantized else FLOAT]
    constant = [1, 2, 3, 4, 5, 6, 7, 8]
    attributes = {"transB": 1, "alpha": 0.5}
    check_node("QGemm", inputs, attributes, outputs, reals=[FLOAT], step=True, constant=constant, tolerance=1e-4)


def test_products_to_floats() -> None:
    b = weight_codes(7, 5, seed=1)
    b_scale, b_zero = np.array([0.01, 0.02, 0.03, 0.04, 0.05], np.float32), np.array([3, -4, 5, 0, 1], np.int8)
    bias = noise(5, seed=2)
    integers = [codes(2, 3, 7), b, number(0.02), b_scale, number(100, np.uint8), b_zero, bias]
    constant = [1, 3, 5, 6]
    check_node("MatMulIntegerToFloat", integers, reals=[FLOAT], constant=constant, tolerance=1e-4)
    reals = [noise(2, 3, 7), b, b_scale, b_zero, bias]
    check_node("DynamicQuantizeMatMul", reals, reals=[FLOAT], constant=[1, 2, 3, 4], tolerance=1e-4)


@pytest.mark.parametrize("per_gate", [False, True])
def test_dynamic_quantize_lstm(per_gate: bool) -> None:
    """The result is that of an LSTM with dequantized weights. The CPU provider also rounds activations to 8 bits.

    The case with a scale per gate also has sequence lengths and peepholes.
    """
    steps, batch, depth, size, directions = 4, 2, 3, 8, 2
    gates = 4 * size
    w, r = weight_codes(directions, depth, gates), weight_codes(directions, size, gates, seed=1)
    shape = (directions, gates) if per_gate else (directions,)
    scales = [np.abs(noise(*shape, seed=i, scale=0.002)) + np.float32(0.001) for i in (2, 3)]
    zeros = [np.zeros(shape, np.int8) if per_gate else np.array([3, -5], np.int8)] * 2
    state = [noise(directions, batch, size, seed=i) for i in (5, 6)]
    attributes = {"hidden_size": size, "direction": "bidirectional"}
    bias, lengths = noise(directions, 2 * gates, seed=4, scale=0.1), np.array([3, 4], np.int32) if per_gate else None
    peepholes = noise(directions, 3 * size, seed=7) if per_gate else None
    inputs = [noise(steps, batch, depth), w, r, bias, lengths, *state, peepholes]
    inputs += [scales[0], zeros[0], scales[1], zeros[1]]

    def reference(x: Array, w: Array, r: Array, b: Array, lengths: Array | None, *rest: Array) -> list[Array]:
        def real(code: Array, number: int) -> Array:
            scale, zero = (y.reshape(directions, 1, -1) for y in (scales[number], zeros[number]))
            wide: Array = ((code.astype(np.int32) - zero) * scale).transpose(0, 2, 1).astype(np.float32)
            return np.ascontiguousarray(wide)

        given = [x, real(w, 0), real(r, 1), b, lengths, *rest[:3]]
        model = node_model("LSTM", given, attributes, [FLOAT] * 3, domain="")
        session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
        result: list[Array] = session.run(None, {f"x{i}": y for i, y in enumerate(given) if y is not None})
        return result

    weights = [1, 2, 8, 9, 10, 11]
    check_node(
        "DynamicQuantizeLSTM", inputs, attributes, [FLOAT] * 3, reals=[FLOAT], reference=reference, constant=weights
    )
    check_node("DynamicQuantizeLSTM", inputs, attributes, [FLOAT] * 3, reals=[FLOAT], constant=weights, tolerance=0.03)
