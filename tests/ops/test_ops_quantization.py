"""Quantization operators and quantized GEMMs and convolutions, compared with ONNX's reference."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.numpy_helper import saturate_cast
from onnx.reference import ReferenceEvaluator

from kernel_harness import Input, make_model, run_op
from ort_cuda_plugin.model.ir import NodeError

Array = np.ndarray
few = settings(max_examples=5)
STORED = ["uint8", "int8", "uint16", "int16"]


def reference(name: str, inputs: list[Array | None], attributes: dict[str, Any] | None = None, opset: int = 21) -> Any:
    feeds = {f"x{i}": x for i, x in enumerate(inputs) if x is not None}
    (result,) = ReferenceEvaluator(make_model(name, inputs, attributes, opset)).run(None, feeds)
    return result


def draw(shape: tuple[int, ...], dtype: str, random: np.random.Generator) -> Array:
    info = np.iinfo(dtype)
    return random.integers(info.min, info.max + 1, shape).astype(dtype)


@st.composite
def quantized(draw_from: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], dict[str, int], np.random.Generator]:
    """Draw the shape of x, the shape of scale and zero point, the attributes, and a random generator."""
    shape = tuple(draw_from(st.lists(st.integers(0, 7), min_size=1, max_size=4)))
    axis = draw_from(st.integers(-len(shape), len(shape) - 1))
    kind = draw_from(st.sampled_from(["tensor", "axis", "blocks"]))
    random = np.random.default_rng(draw_from(st.integers(0, 99)))
    if kind == "tensor":
        return shape, (), {"axis": axis}, random
    if kind == "axis":
        return shape, (shape[axis],), {"axis": axis}, random
    # ONNX's reference does not support blockwise quantization of empty tensors.
    shape = tuple(max(dim, 1) for dim in shape)
    block = draw_from(st.integers(1, shape[axis]))
    parameters = list(shape)
    parameters[axis] = -(-shape[axis] // block)
    return shape, tuple(parameters), {"axis": axis, "block_size": block}, random


@pytest.mark.parametrize("dtype", STORED)
@given(case=quantized(), float_type=st.sampled_from(["float32", "float16"]), dynamic=st.booleans())
@few
def test_quantize_linear(dtype: str, case: tuple[Any, ...], float_type: str, dynamic: bool) -> None:
    shape, parameters, attributes, random = case
    scale = random.choice([0.25, 0.5, 1.0, 2.0], parameters).astype(float_type)
    # x / scale includes ties, and values that saturate at both ends of the range.
    x = (random.integers(-700, 700, shape) * 0.25).astype(float_type) * (80 if dtype.endswith("16") else 1)
    zero = draw(parameters, dtype, random)
    expected = reference("QuantizeLinear", [x.astype(float_type), scale, zero], attributes)
    (actual,) = run_op("QuantizeLinear", [x.astype(float_type), scale, zero], attributes, dynamic=dynamic)
    assert actual.dtype == dtype
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("dtype", [*STORED, "int32"])
@given(case=quantized(), float_type=st.sampled_from(["float32", "float16"]), dynamic=st.booleans())
@few
def test_dequantize_linear(dtype: str, case: tuple[Any, ...], float_type: str, dynamic: bool) -> None:
    shape, parameters, attributes, random = case
    scale = random.choice([0.001, 0.02, 1.0], parameters).astype(float_type)
    x = random.integers(-1000, 1000, shape).astype(dtype) if dtype == "int32" else draw(shape, dtype, random)
    zero = np.zeros(parameters, dtype) if dtype == "int32" else draw(parameters, dtype, random)
    expected = reference("DequantizeLinear", [x, scale, zero], attributes)
    (actual,) = run_op("DequantizeLinear", [x, scale, zero], attributes, dynamic=dynamic)
    assert actual.dtype == float_type
    np.testing.assert_array_equal(actual, expected)


def test_quantize_saturates_what_is_not_finite_and_rounds_ties_to_even() -> None:
    x = np.array([np.inf, -np.inf, 1e30, -1e30, 0.5, 1.5, -0.5, -2.5], np.float32)
    (actual,) = run_op("QuantizeLinear", [x, np.float32(1), np.int8(3)])
    assert actual.tolist() == [127, -128, 127, -128, 3, 5, 3, 1]


def test_quantize_takes_its_type_from_the_zero_point_or_output_dtype() -> None:
    x, scale = np.array([-3.0, 300.0], np.float32), np.float32(1)
    assert run_op("QuantizeLinear", [x, scale])[0].dtype == np.uint8
    (actual,) = run_op("QuantizeLinear", [x, scale], {"output_dtype": 5})
    assert actual.dtype == np.int16
    assert actual.tolist() == [-3, 300]
    with pytest.raises(NodeError, match="output_dtype must be 3, the zero point's type INT8, got 5"):
        run_op("QuantizeLinear", [x, scale, np.int8(0)], {"output_dtype": 5})


@pytest.mark.parametrize("parameters", [(), (4,), (500, 2)], ids=["tensor", "axis", "blocks"])
@pytest.mark.parametrize("float_type", ["float16", "bfloat16"])
def test_before_version_23_half_types_are_divided_in_float32(parameters: tuple[int, ...], float_type: str) -> None:
    """Before version 23, x / scale of 16-bit floats is computed in float32, as in the CPU provider.

    Rounding the quotient to the 16-bit type first would change some codes.
    """
    x = np.linspace(-6, 6, 2000, dtype=np.float32).reshape(500, 4).astype(float_type)
    scale, zero = np.full(parameters, 0.05579).astype(float_type), np.full(parameters, 122, np.uint8)
    attributes = {"axis": 1} | ({"block_size": 2} if parameters[1:] else {})
    (actual,) = run_op("QuantizeLinear", [x, scale, zero], attributes, opset=21)
    factor = scale.astype(np.float32)
    exact = np.rint(x.astype(np.float32) / (factor.repeat(2, 1) if parameters[1:] else factor)) + 122
    rounded = np.rint((x.astype(np.float32) / factor.flat[0]).astype(float_type).astype(np.float32)) + 122
    assert np.any(exact != rounded)
    np.testing.assert_array_equal(actual, np.clip(exact, 0, 255))


def test_from_version_23_on_the_division_has_the_precision_of_the_scale() -> None:
    x, scale = np.array([2001.0], np.float32), np.float16(1)
    assert run_op("QuantizeLinear", [x + 1000, scale, np.int16(0)], opset=23)[0].tolist() == [3000]
    assert run_op("QuantizeLinear", [x + 1000, scale, np.int16(0)], {"precision": 1}, 23)[0].tolist() == [3001]


def test_int32_is_quantized_and_dequantize_has_an_output_type() -> None:
    x = np.array([-7, 5, 100], np.int32)
    assert run_op("QuantizeLinear", [x, np.float32(2), np.int8(0)], opset=13)[0].tolist() == [-4, 2, 50]
    (actual,) = run_op("DequantizeLinear", [x, np.float32(0.5)], {"output_dtype": 10}, 23)
    assert actual.dtype == np.float16
    assert actual.tolist() == [-3.5, 2.5, 50.0]


def test_blocks_have_to_fit() -> None:
    x = np.zeros((2, 6), np.float32)
    with pytest.raises(NodeError, match="must have the size 2 in dimension 1"):
        run_op("QuantizeLinear", [x, np.ones((2, 3), np.float32)], {"axis": 1, "block_size": 4})


@given(
    shape=st.lists(st.integers(1, 40), max_size=3), seed=st.integers(0, 99), sign=st.sampled_from([-1, 0, 1]),
    dynamic=st.booleans(),
)  # fmt: skip
@few
def test_dynamic_quantize_linear(shape: list[int], seed: int, sign: int, dynamic: bool) -> None:
    x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    x = np.abs(x) * np.float32(sign) if sign else x
    y, scale, zero = run_op("DynamicQuantizeLinear", [x], outputs=3, dynamic=dynamic)
    low, high = min(x.min(), np.float32(0)), max(x.max(), np.float32(0))
    assert scale.shape == zero.shape == ()
    np.testing.assert_allclose(scale, (high - low) / np.float32(255), rtol=1e-6)
    assert zero == np.rint(np.clip(-low / scale, 0, 255))
    np.testing.assert_array_equal(y, np.clip(np.rint(x / scale) + zero, 0, 255).astype(np.uint8))


def test_the_dynamic_scale_of_zeros_is_one() -> None:
    y, scale, zero = run_op("DynamicQuantizeLinear", [np.zeros((3,), np.float32)], outputs=3)
    assert (y.tolist(), scale.item(), zero.item()) == ([0, 0, 0], 1.0, 0)


products = st.sampled_from(
    [((3, 5), (5, 4)), ((1, 40), (40, 70)), ((2, 6, 9), (9, 3)), ((2, 1, 7, 2), (3, 2, 5)), ((0, 3), (3, 2))]
)
BYTES = st.sampled_from(["uint8", "int8"])


@given(
    shapes=products, a_type=BYTES, b_type=BYTES, zeros=st.sampled_from(["none", "tensor", "lines"]),
    seed=st.integers(0, 99), dynamic=st.booleans(),
)  # fmt: skip
@few
def test_matmul_integer(
    shapes: tuple[tuple[int, ...], ...], a_type: str, b_type: str, zeros: str, seed: int, dynamic: bool
) -> None:
    random = np.random.default_rng(seed)
    a, b = draw(shapes[0], a_type, random), draw(shapes[1], b_type, random)
    inputs = [a, b]
    left, right = a.astype(np.int32), b.astype(np.int32)
    if zeros != "none":
        rows, columns = ((), ()) if zeros == "tensor" else (a.shape[-2:-1], b.shape[-1:])
        inputs += [draw(rows, a_type, random), draw(columns, b_type, random)]
        left -= inputs[2].astype(np.int32).reshape((*rows, 1) if rows else ())
        right -= inputs[3]
    (actual,) = run_op("MatMulInteger", inputs, dynamic=dynamic)
    assert actual.dtype == np.int32
    np.testing.assert_array_equal(actual, left @ right)


@given(shapes=products, dtype=BYTES, lines=st.booleans(), seed=st.integers(0, 99), dynamic=st.booleans())
@few
def test_qlinear_matmul(shapes: tuple[tuple[int, ...], ...], dtype: str, lines: bool, seed: int, dynamic: bool) -> None:
    random = np.random.default_rng(seed)
    a, b = draw(shapes[0], dtype, random), draw(shapes[1], dtype, random)
    rows, columns = ((a.shape[-2],), (b.shape[-1],)) if lines else ((), ())
    a_scale, b_scale, y_scale = (random.choice([0.25, 0.5], n).astype(np.float32) for n in (rows, columns, ()))
    a_zero, b_zero, y_zero = (draw(n, dtype, random) for n in (rows, columns, ()))
    (actual,) = run_op("QLinearMatMul", [a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero], dynamic=dynamic)
    tall = (*rows, 1) if lines else ()
    total = (a.astype(np.int32) - a_zero.astype(np.int32).reshape(tall)) @ (b.astype(np.int32) - b_zero)
    scaled = np.rint(total * (a_scale.reshape(tall) * b_scale / y_scale)) + y_zero
    np.testing.assert_array_equal(actual, np.clip(scaled, np.iinfo(dtype).min, np.iinfo(dtype).max).astype(dtype))


CONVOLUTIONS = [
    ((2, 3, 9, 8), (4, 3, 3, 3), {"pads": [1, 0, 1, 2], "strides": [2, 1]}),
    ((1, 40, 6, 6), (70, 40, 3, 3), {"pads": [1, 1, 1, 1]}),
    ((1, 4, 12), (6, 2, 3), {"group": 2, "dilations": [2]}),
]


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=["small", "tiled", "groups"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_conv_integer(case: tuple[Any, ...], dynamic: bool) -> None:
    shape, weights, attributes = case
    random = np.random.default_rng(3)
    x, w = draw(shape, "uint8", random), draw(weights, "int8", random)
    zero, channels = np.uint8(120), draw(weights[:1], "int8", random)
    shifted = w.astype(np.int32) - channels.astype(np.int32).reshape(-1, *[1] * (w.ndim - 1))
    # float64 computes these integer sums exactly.
    expected = reference("Conv", [x.astype(np.float64) - 120.0, shifted.astype(np.float64)], attributes)
    (actual,) = run_op("ConvInteger", [x, w, zero, channels], attributes, constant=[1, 3], dynamic=dynamic)
    assert actual.dtype == np.int32
    np.testing.assert_array_equal(actual, expected)


def test_qlinear_conv_with_a_scale_per_channel_and_a_bias() -> None:
    random = np.random.default_rng(4)
    x, w, bias = (
        draw((1, 2, 5, 5), "uint8", random),
        draw((3, 2, 3, 3), "int8", random),
        np.array([10, -200, 3000], "i4"),
    )
    scales = np.array([0.25, 0.5, 0.125], np.float32)
    inputs: list[Input] = [
        x,
        np.float32(0.5),
        np.uint8(7),
        w,
        scales,
        np.zeros(3, np.int8),
        np.float32(16),
        np.uint8(100),
        bias,
    ]
    (actual,) = run_op("QLinearConv", inputs, {"pads": [1, 1, 1, 1]})
    total = reference(
        "Conv", [x.astype(np.float64) - 7, w.astype(np.float64), bias.astype(np.float64)], {"pads": [1] * 4}
    )
    expected = np.rint(total * (0.5 * scales[:, None, None] / 16)) + 100
    np.testing.assert_array_equal(actual, expected.clip(0, 255))


FLOATS_8 = {17: ml_dtypes.float8_e4m3fn, 18: ml_dtypes.float8_e4m3fnuz, 19: ml_dtypes.float8_e5m2,
            20: ml_dtypes.float8_e5m2fnuz}  # fmt: skip
CODES = np.arange(256, dtype=np.uint8)


def bits_of_float8(x: Array, number: int) -> Array:
    """Return the 8-bit codes of floats; all NaNs become 0xFFF."""
    x = x.view(FLOATS_8[number])
    return np.where(np.isnan(x.astype(np.float32)), 0xFFF, x.view(np.uint8))


@pytest.mark.parametrize("number", FLOATS_8)
def test_every_8_bit_float_becomes_its_float32(number: int) -> None:
    x = CODES.view(FLOATS_8[number])
    (actual,) = run_op("Cast", [x], {"to": 1}, 19)
    np.testing.assert_array_equal(actual, x.astype(np.float32))


@pytest.mark.parametrize("number", FLOATS_8)
@pytest.mark.parametrize("saturate", [0, 1])
def test_casts_to_8_bit_floats_round_half_to_even_and_saturate(number: int, saturate: int) -> None:
    exact = CODES.view(FLOATS_8[number]).astype(np.float32)
    exact = np.sort(exact[np.isfinite(exact)])
    middle = (exact[1:] + exact[:-1]) / 2
    near = [np.nextafter(middle, np.float32(-np.inf)), np.nextafter(middle, np.float32(np.inf))]
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e9, -1e9, 1e-30, -1e-42], np.float32)
    x = np.concatenate([exact, middle, *near, special, exact * np.float32(1.5)])
    (actual,) = run_op("Cast", [x], {"to": number, "saturate": saturate}, 19)
    dtype = FLOATS_8[number]
    with np.errstate(all="ignore"):
        expected = saturate_cast(x, np.dtype(dtype)) if saturate else x.astype(dtype)
    np.testing.assert_array_equal(bits_of_float8(actual, number), bits_of_float8(expected, number))


@pytest.mark.parametrize("number", FLOATS_8)
def test_8_bit_floats_are_moved_as_they_are(number: int) -> None:
    x = CODES.view(FLOATS_8[number]).reshape(16, 16)
    (actual,) = run_op("Transpose", [x])
    np.testing.assert_array_equal(bits_of_float8(actual, number), bits_of_float8(x.T.copy(), number))


@pytest.mark.parametrize("number", FLOATS_8)
def test_8_bit_floats_are_quantized_types(number: int) -> None:
    x = np.random.default_rng(5).normal(size=(3, 40)).astype(np.float32) * 100
    scale = np.array([0.25, 0.5, 2.0], np.float32)
    zero = np.zeros(3, FLOATS_8[number])
    (actual,) = run_op("QuantizeLinear", [x, scale, zero], {"axis": 0})
    expected = saturate_cast(x / scale[:, None], np.dtype(FLOATS_8[number]))
    np.testing.assert_array_equal(bits_of_float8(actual, number), bits_of_float8(expected, number))
    (back,) = run_op("DequantizeLinear", [expected, scale, zero], {"axis": 0})
    np.testing.assert_array_equal(back, expected.astype(np.float32) * scale[:, None])


@pytest.mark.parametrize(("source", "to"), [("float32", 6), ("int16", 10), ("uint8", 3), ("int64", 11), ("int8", 17)])
def test_bit_cast_keeps_the_bytes(source: str, to: int) -> None:
    x = (
        draw((3, 4), source, np.random.default_rng(6))
        if source != "float32"
        else np.array([1.5, -0.0, np.nan], np.float32)
    )
    (actual,) = run_op("BitCast", [x], {"to": to}, 26)
    assert actual.shape == x.shape
    assert actual.tobytes() == x.tobytes()


def test_bit_cast_between_different_sizes_is_an_error() -> None:
    with pytest.raises(NodeError, match="to must have the 32 bits of FLOAT32, got INT64"):
        run_op("BitCast", [np.zeros(2, np.float32)], {"to": 7}, 26)
