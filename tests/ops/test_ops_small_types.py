"""Element types of at most 8 bits (int4, float8, ...) and rounding of casts, compared with ml_dtypes and NumPy."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import TensorProto, helper, numpy_helper

import ort_cuda_plugin
from kernel_harness import make_model, run_model, run_op
from ort_cuda_plugin.conformance.values import from_ort_value, to_ort_value

Array = np.ndarray
few = settings(max_examples=6)
INTEGERS = {
    "int4": ml_dtypes.int4,
    "uint4": ml_dtypes.uint4,
    "int2": ml_dtypes.int2,
    "uint2": ml_dtypes.uint2,
}
PACKED = {**INTEGERS, "float4e2m1": ml_dtypes.float4_e2m1fn}
SMALL = {**PACKED, "float8e4m3fn": ml_dtypes.float8_e4m3fn, "float8e8m0": ml_dtypes.float8_e8m0fnu}
NUMBER = {name: getattr(TensorProto, name.upper()) for name in SMALL}
shapes = hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5)
packed_types = st.sampled_from(sorted(PACKED))
small_types = st.sampled_from(sorted(SMALL))


def values_of(name: str) -> list[float]:
    """Return all values of an integer type or float4e2m1, and some powers of two for other types."""
    if name in INTEGERS:
        info = ml_dtypes.iinfo(INTEGERS[name])
        return list(range(info.min, info.max + 1))
    if name == "float4e2m1":
        return [sign * x for sign in (1, -1) for x in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
    return [2.0**i for i in range(-6, 8)]


def numbered(shape: tuple[int, ...], name: str) -> Array:
    """Return a tensor in which adjacent elements differ."""
    numbers = np.array(values_of(name), np.float32)
    return numbers[np.arange(math.prod(shape)) * 7 % len(numbers)].reshape(shape).astype(SMALL[name])


def numbers(x: Array, name: str) -> Array:
    """Return the numbers that stored codes represent."""
    x = x.astype(SMALL[name]) if name in INTEGERS else x.view(SMALL[name])
    return x.astype(np.float32)


def assert_same(actual: Array, expected: Array, name: str) -> None:
    assert actual.shape == expected.shape
    np.testing.assert_array_equal(numbers(actual, name), expected.astype(np.float32))


@given(shape=shapes, name=small_types, data=st.data(), dynamic=st.booleans())
@few
def test_what_moves_elements_moves_small_ones(
    shape: tuple[int, ...], name: str, data: st.DataObject, dynamic: bool
) -> None:
    x = numbered(shape, name)
    axis = data.draw(st.integers(0, len(shape) - 1))
    (y,) = run_op("Transpose", [x], dynamic=dynamic)
    assert_same(y, x.T, name)
    step = data.draw(st.sampled_from([-2, -1, 1, 2]))
    index = [slice(None)] * axis + [slice(None, None, step)]
    limits = [-1, -(2**62)] if step < 0 else [0, 2**62]
    bounds = [np.array([value], np.int64) for value in (*limits, axis, step)]
    (y,) = run_op("Slice", [x, *bounds], constant=[1, 2, 3, 4], dynamic=dynamic, opset=24)
    assert_same(y, x[tuple(index)], name)
    (y,) = run_op("Concat", [x, x[tuple(index)], x], {"axis": axis}, dynamic=dynamic)
    assert_same(y, np.concatenate([x, x[tuple(index)], x], axis), name)
    wide = (3, *shape)
    (y,) = run_op("Expand", [x, np.array(wide)], constant=[1], dynamic=dynamic)
    assert_same(y, np.broadcast_to(x, wide), name)
    (y,) = run_op("Reshape", [x, np.array([x.size, 1])], {"allowzero": 1}, 24, constant=[1], dynamic=dynamic)
    assert_same(y, x.reshape(-1, 1), name)


@given(shape=shapes, name=packed_types, data=st.data(), dynamic=st.booleans())
@few
def test_views_of_packed_tensors_are_outputs(
    shape: tuple[int, ...], name: str, data: st.DataObject, dynamic: bool
) -> None:
    """Split packed tensors into outputs that may start in the middle of a byte, and pad them."""
    x = numbered((5, *shape), name)
    parts = run_op("Split", [x, np.array([1, 3, 1])], {"axis": 0}, opset=24, outputs=3, constant=[1], dynamic=dynamic)
    for part, expected in zip(parts, np.split(x, [1, 4]), strict=True):
        assert_same(part, expected, name)
    pads = [1, 0] * x.ndim
    (y,) = run_op("Pad", [x, np.array(pads)], constant=[1], opset=24, dynamic=dynamic)
    pairs = list(zip(pads[: x.ndim], pads[x.ndim :], strict=True))
    assert_same(y, np.pad(x.astype(np.float32), pairs).astype(x.dtype), name)


@pytest.mark.parametrize("name", PACKED)
def test_packed_weights_and_constants(name: str) -> None:
    x, w = numbered((7,), name), numbered((2, 7), name)
    (y,) = run_op("Concat", [x[None], w], {"axis": 0}, constant=[1], opset=24)
    assert_same(y, np.concatenate([x[None], w]), name)
    (y,) = run_op("Identity", [x], constant=[0], opset=24)
    assert_same(y, x, name)
    one = x[3:4]
    for shape in ([3, 5], [0], []):
        for constant in ([0], []):
            value = numpy_helper.from_array(one, "value")
            (y,) = run_op("ConstantOfShape", [np.array(shape, np.int64)], {"value": value}, 24, constant=constant)
            assert_same(y, np.full(shape, one[0]), name)
    (y,) = run_op("Constant", [], {"value": numpy_helper.from_array(w, "value")}, 24)
    assert_same(y, w, name)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("source", ["int8", "uint8", "int64", "float32", "float16", "bool"])
def test_casts_to_few_bits_keep_the_low_ones(name: str, source: str) -> None:
    info = np.iinfo(source) if np.dtype(source).kind in "iu" else None
    values = np.arange(max(-300, info.min), min(300, info.max) + 1) if info else np.array(values_of(name)) + 0.5
    x = values.astype(source)
    (y,) = run_op("Cast", [x], {"to": NUMBER[name]}, 25)
    bits = ml_dtypes.iinfo(INTEGERS[name]).bits
    low = x.astype(np.int64) & ((1 << bits) - 1)
    signed = np.where((low >> (bits - 1) == 1) & (not name.startswith("u")), low - (1 << bits), low)
    np.testing.assert_array_equal(y, signed)


@pytest.mark.parametrize(
    ("source", "target"),
    [("int4", "uint4"), ("uint4", "int4"), ("int2", "uint2"), ("int4", "float4e2m1"), ("float4e2m1", "int4")],
)
def test_bits_of_packed_elements_are_cast(source: str, target: str) -> None:
    """A Cast after BitCast in the same cluster reads the sign-extended element, not its packed bits."""
    x = np.array(values_of(source)).astype(SMALL[source])
    mask = (1 << ml_dtypes.iinfo(INTEGERS[source]).bits) - 1 if source in INTEGERS else 15
    codes = x.astype(np.int8).view(np.uint8) & mask if source in INTEGERS else x.view(np.uint8)
    expected = codes.view(SMALL[target])
    if target in ("int4", "int2"):
        expected = (codes.astype(np.int8) - np.where(codes > mask // 2, mask + 1, 0)).astype(SMALL[target])
    nodes = [
        helper.make_node("BitCast", ["x"], ["b"], to=NUMBER[target]),
        helper.make_node("Cast", ["b"], ["y"], to=TensorProto.FLOAT),
    ]
    graph = helper.make_graph(
        nodes,
        "bits",
        [helper.make_tensor_value_info("x", NUMBER[source], x.shape)],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, x.shape),
            helper.make_tensor_value_info("b", NUMBER[target], x.shape),
        ],
    )
    y, bits = run_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 26)]), [x])
    np.testing.assert_array_equal(y, expected.astype(np.float32))
    assert_same(bits, expected, target)


@given(shape=shapes, name=packed_types, to=st.sampled_from(["float32", "float16", "int32", "uint8", "bool"]))
@few
def test_casts_from_few_bits(shape: tuple[int, ...], name: str, to: str) -> None:
    x = numbered(shape, name)
    (y,) = run_op("Cast", [x], {"to": helper.np_dtype_to_tensor_dtype(np.dtype(to))}, 25)
    expected = x.astype(np.float32)
    if to == "uint8":
        expected = expected.astype(np.int8)
    np.testing.assert_array_equal(y, expected.astype(to))


def test_a_cast_of_a_constant_to_few_bits_wraps() -> None:
    (y,) = run_op("Cast", [np.array([9, -9, 3])], {"to": TensorProto.INT4}, 21, constant=[0])
    assert y.tolist() == [-7, 7, 3]


def test_shapes_are_computed_from_packed_integers() -> None:
    x = np.arange(6, dtype=np.float32)
    nodes = [
        helper.make_node("Cast", ["s"], ["t"], to=TensorProto.INT64),
        helper.make_node("Reshape", ["x", "t"], ["y"]),
    ]
    infos = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [6]),
        helper.make_tensor_value_info("s", TensorProto.INT4, [2]),
    ]
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, None])
    model = helper.make_model(helper.make_graph(nodes, "g", infos, [y]), opset_imports=[helper.make_opsetid("", 21)])
    (actual,) = run_model(model, [x, np.array([-1, 3]).astype(ml_dtypes.int4)])
    np.testing.assert_array_equal(actual, x.reshape(2, 3))


@pytest.mark.parametrize("source", ["float32", "float64", "float16"])
def test_float4_rounds_half_to_even_and_saturates(source: str) -> None:
    exact = np.array(sorted(values_of("float4e2m1")))
    middle = (exact[1:] + exact[:-1]) / 2
    x = np.concatenate([exact, middle, middle + 2**-9, middle - 2**-9, [7.0, -9.0, np.inf, -np.inf, 1e-3]])
    x = x.astype(source)
    (y,) = run_op("Cast", [x], {"to": TensorProto.FLOAT4E2M1}, 24)
    np.testing.assert_array_equal(y.view(ml_dtypes.float4_e2m1fn).astype(float), x.astype(ml_dtypes.float4_e2m1fn))
    (y,) = run_op("Cast", [np.array([np.nan], np.float32)], {"to": TensorProto.FLOAT4E2M1}, 24)
    assert y[0] & 7 == 0


TINY, HUGE = 2.0**-127, 2.0**127


@pytest.mark.parametrize(
    ("mode", "saturate", "expected"),
    [
        ("up", 1, [TINY, TINY, 2 * TINY, 0.5, 2.0, 2.0, 4.0, HUGE, HUGE, HUGE, np.nan]),
        ("down", 1, [TINY, TINY, TINY, 0.5, 1.0, 1.0, 2.0, HUGE, HUGE, HUGE, np.nan]),
        ("nearest", 1, [TINY, TINY, TINY, 0.5, 1.0, 2.0, 4.0, HUGE, HUGE, HUGE, np.nan]),
        ("nearest", 0, [np.nan, TINY, TINY, 0.5, 1.0, 2.0, 4.0, HUGE, np.nan, np.nan, np.nan]),
        ("up", 0, [np.nan, TINY, 2 * TINY, 0.5, 2.0, 2.0, 4.0, HUGE, np.nan, np.nan, np.nan]),
    ],
)
def test_powers_of_two(mode: str, saturate: int, expected: list[float]) -> None:
    x = np.array([0, TINY, 1.25 * TINY, 0.5, 1.1, 1.5, 3.9, HUGE, 1.9 * HUGE, np.inf, np.nan], np.float32)
    attributes = {"to": TensorProto.FLOAT8E8M0, "saturate": saturate, "round_mode": mode}
    (y,) = run_op("Cast", [x], attributes, 24)
    np.testing.assert_array_equal(y.view(ml_dtypes.float8_e8m0fnu).astype(np.float32), np.array(expected, np.float32))


def test_every_power_of_two_becomes_its_float32() -> None:
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu)
    (y,) = run_op("Cast", [codes], {"to": TensorProto.FLOAT}, 24)
    np.testing.assert_array_equal(y, codes.astype(np.float32))


HALVES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float8e5m2": ml_dtypes.float8_e5m2}


@pytest.mark.parametrize("name", HALVES)
def test_float64_is_rounded_once(name: str) -> None:
    """Cast float64 values so close to a midpoint that rounding to float32 first would give another result."""
    dtype = HALVES[name]
    largest = float(ml_dtypes.finfo(dtype).max)
    exact = np.array([1.0, 1.5, 3.0, -0.75, float(ml_dtypes.finfo(dtype).smallest_subnormal)], dtype)
    codes = exact.view(f"u{exact.itemsize}")
    exact, after = exact.astype(np.float64), (codes + 1).view(dtype).astype(np.float64)
    middle = (exact + after) / 2
    x = np.concatenate([middle, middle * (1 + 1e-12), middle * (1 - 1e-12), exact])
    x = np.concatenate([x, [1e-300, -1e-300, 0.0, -0.0, np.inf, -np.inf, largest]])
    (y,) = run_op("Cast", [x], {"to": getattr(TensorProto, name.upper()), "saturate": 0}, 19)
    actual = y.view(dtype).astype(np.float64)
    candidates = np.array([exact, after])
    for i, a in enumerate(actual[: len(exact) * 3]):
        pair = candidates[:, i % len(exact)]
        wanted = pair[np.argmin(np.abs(pair - x[i]))] if i >= len(exact) else None
        assert a in pair
        assert wanted is None or a == wanted
    # Midpoints round to even. Exact values stay, and zeros keep their signs.
    even = np.where(codes % 2 == 0, exact, after)
    np.testing.assert_array_equal(actual[: len(exact)], even)
    np.testing.assert_array_equal(actual[3 * len(exact) : -7], exact)
    np.testing.assert_array_equal(actual[-7:], [0.0, -0.0, 0.0, -0.0, np.inf, -np.inf, largest])
    assert np.signbit(actual[-7:-3]).tolist() == [False, True, False, True]


@given(shape=shapes.filter(math.prod), name=packed_types, zero=st.booleans(), data=st.data())
@few
def test_quantized_numbers_of_few_bits(shape: tuple[int, ...], name: str, zero: bool, data: st.DataObject) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    scale = random.choice([0.25, 0.5, 2.0], shape[axis]).astype(np.float32)
    x = (random.integers(-40, 40, shape) * 0.125).astype(np.float32)
    offset = numbered((shape[axis],), name) if zero and name in INTEGERS else np.zeros(shape[axis], SMALL[name])
    (actual,) = run_op("QuantizeLinear", [x, scale, offset], {"axis": axis}, 25)
    along = [-1 if i == axis else 1 for i in range(len(shape))]
    quotient = x / scale.reshape(along)
    if name in INTEGERS:
        info = ml_dtypes.iinfo(INTEGERS[name])
        quotient = np.rint(quotient) + offset.astype(np.float32).reshape(along)
        expected = np.clip(quotient, info.min, info.max).astype(SMALL[name])
    else:
        expected = quotient.astype(SMALL[name])
    assert_same(actual, expected, name)
    (back,) = run_op("DequantizeLinear", [expected, scale, offset], {"axis": axis}, 25)
    distance = expected.astype(np.float32) - offset.astype(np.float32).reshape(along)
    np.testing.assert_array_equal(back, distance * scale.reshape(along))


def test_blocks_of_packed_numbers_are_scaled_by_powers_of_two() -> None:
    x = numbered((3, 5), "float4e2m1")
    scale = np.array([[0.5, 2.0]] * 3).astype(ml_dtypes.float8_e8m0fnu)
    attributes = {"axis": 1, "block_size": 3, "output_dtype": TensorProto.FLOAT}
    model = make_model("DequantizeLinear", [x, scale], attributes, 24)
    (y,) = run_model(model, [x, scale])
    wide = np.repeat(scale.astype(np.float32), 3, axis=1)[:, :5]
    np.testing.assert_array_equal(y, x.astype(np.float32) * wide)


@functools.cache
def options() -> ort.SessionOptions:
    result = ort.SessionOptions()
    result.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return result


@pytest.mark.parametrize("external", [False, True])
def test_onnx_runtime_hands_over_packed_tensors(tmp_path: Path, external: bool) -> None:
    """int4 inputs, outputs and initializers (in the model or an external file) with an odd number of elements."""
    w, x = numbered((3, 67), "int4"), numbered((67, 3), "int4")
    nodes = [
        helper.make_node("Transpose", ["x"], ["y"]),
        helper.make_node("Flatten", ["w"], ["f"], axis=0),
        helper.make_node("DequantizeLinear", ["w", "scale"], ["d"]),
    ]
    graph = helper.make_graph(
        nodes,
        "packed",
        [helper.make_tensor_value_info("x", TensorProto.INT4, ["n", 3])],
        [
            helper.make_tensor_value_info("y", TensorProto.INT4, [3, "n"]),
            helper.make_tensor_value_info("f", TensorProto.INT4, [1, 201]),
            helper.make_tensor_value_info("d", TensorProto.FLOAT, [3, 67]),
        ],
        [numpy_helper.from_array(w, "w"), numpy_helper.from_array(np.array(0.5, np.float32), "scale")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    path = tmp_path / "packed.onnx"
    onnx.save(model, path, save_as_external_data=external, size_threshold=0)
    session = ort_cuda_plugin.session(path, emulate=True, sess_options=options())
    y, f, d = map(from_ort_value, session.run_with_ort_values(["y", "f", "d"], {"x": to_ort_value(x)}))
    np.testing.assert_array_equal(y.astype(int), x.T.astype(int))
    np.testing.assert_array_equal(f.astype(int), w.reshape(1, -1).astype(int))
    np.testing.assert_array_equal(d, w.astype(np.float32) / 2)
    assert session.get_provider_graph_assignment_info()[0].ep_name == ort_cuda_plugin.get_ep_name()
