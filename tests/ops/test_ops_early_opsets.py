"""Definitions of opsets 1 to 8, operators that ONNX has removed, and BatchNormalization in all its versions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

import ort_cuda_plugin
from kernel_harness import run_op
from ort_cuda_plugin.abi.core import PluginError
from ort_cuda_plugin.model.ir import InvalidModel, NodeError

Array = np.ndarray[Any, np.dtype[Any]]

REFUSED = (NodeError, InvalidModel, PluginError)


def floats(*shape: int, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


X = floats(2, 3, 4, 5)

ARITHMETIC = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Pow": np.power}
COMPARISONS = {"Less": np.less, "Greater": np.greater, "Equal": np.equal}
LOGIC = {"And": np.logical_and, "Or": np.logical_or, "Xor": np.logical_xor}


@settings(max_examples=40)
@given(st.data())
def test_the_second_input_is_placed_in_the_first(data: st.DataObject) -> None:
    name, fn = data.draw(st.sampled_from([*ARITHMETIC.items(), *COMPARISONS.items(), *LOGIC.items()]))
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    axis = data.draw(st.integers(0, len(shape)))
    length = data.draw(st.integers(0, len(shape) - axis))
    part = [data.draw(st.sampled_from([dim, 1])) for dim in shape[axis : axis + length]]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    dtype = np.bool_ if name in LOGIC else np.int64 if name == "Equal" else np.float32
    a, b = (rng.integers(1, 4, dims).astype(dtype) for dims in (shape, tuple(part)))
    attributes = {"broadcast": 1}
    if axis + length < len(shape) or data.draw(st.booleans()):
        attributes["axis"] = axis if axis < len(shape) else -1
        if axis == len(shape):
            b = b.reshape(())
    expected = fn(a, b.reshape(b.shape + (1,) * (a.ndim - (axis if axis < a.ndim else a.ndim) - b.ndim)))
    opset = 6 if name not in LOGIC else data.draw(st.sampled_from([1, 6]))
    for dynamic in (False, True):
        (y,) = run_op(name, [a, b], attributes, opset, dynamic=dynamic)
        np.testing.assert_allclose(y, expected, rtol=1e-6)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("shape", "attributes"),
    [
        ((5,), {}),
        ((4,), {"broadcast": 1}),
        ((3, 4), {"broadcast": 1}),
        ((4, 5), {"broadcast": 1, "axis": 3}),
        ((1, 1, 2, 3, 4, 5), {"broadcast": 1}),
        ((2, 3, 4, 1), {}),
    ],
)
def test_a_second_input_that_does_not_fit_is_refused(
    shape: tuple[int, ...], attributes: dict[str, int], dynamic: bool
) -> None:
    with pytest.raises(REFUSED, match=r"the second input must (have|broadcast)|axis must"):
        run_op("Add", [X, floats(*shape)], attributes, 6, dynamic=dynamic)


HINT = {"consumed_inputs": [0]}

UNARY: dict[str, Callable[[Array], Array]] = {
    "Abs": np.abs,
    "Neg": np.negative,
    "Exp": np.exp,
    "Floor": np.floor,
    "Ceil": np.ceil,
    "Relu": lambda x: np.maximum(x, 0),
    "Tanh": np.tanh,
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "LeakyRelu": lambda x: np.where(x < 0, np.float32(0.01) * x, x),
    "Elu": lambda x: np.where(x < 0, np.exp(x) - 1, x),
    "Selu": lambda x: 1.0507 * np.where(x < 0, 1.6732 * (np.exp(x) - 1), x),
    "HardSigmoid": lambda x: np.clip(0.2 * x + 0.5, 0, 1),
    "Clip": lambda x: x,
    "Dropout": lambda x: x,
}


@pytest.mark.parametrize("name", UNARY)
def test_functions_of_opset_1(name: str) -> None:
    attributes = HINT | ({"is_test": 1} if name == "Dropout" else {})
    (y,) = run_op(name, [X], attributes, 1)
    np.testing.assert_allclose(y, UNARY[name](X), rtol=1e-5, atol=1e-6)


MOVED = [
    ("Sum", 1, [X, X], HINT, X + X),
    ("Mean", 1, [X, X], HINT, X),
    ("Max", 6, [X, -X], {}, np.abs(X)),
    ("Reshape", 1, [X], {"shape": [0, -1]}, X.reshape(2, 60)),
    ("Pad", 1, [X], {"paddings": [0, 0, 1, 0, 0, 0, 0, 2]}, np.pad(X, [(0, 0), (0, 0), (1, 0), (0, 2)])),
    ("Concat", 1, [X, X], {}, np.concatenate([X, X], 1)),
    ("Split", 1, [X], {"axis": 1, "split": [3]}, X),
    ("Upsample", 1, [X], {"height_scale": 2.0, "width_scale": 3.0}, X.repeat(2, 2).repeat(3, 3)),
    ("GlobalLpPool", 1, [X], {"p": 2.0}, np.sqrt((X**2).sum((2, 3), keepdims=True))),
    ("LpPool", 1, [X], {"p": 1.0, "kernel_shape": [4, 5]}, np.abs(X).sum((2, 3), keepdims=True)),
    ("PRelu", 6, [X, floats(3)], {}, np.where(X < 0, X * floats(3)[:, None, None], X)),
    ("PRelu", 1, [X, floats(1)], HINT, np.where(X < 0, X * floats(1), X)),
    ("Gemm", 6, [X[0, 0], X[0, 1].T, floats(4)], {"broadcast": 1}, X[0, 0] @ X[0, 1].T + floats(4)),
]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", MOVED, ids=lambda case: f"{case[0]}-{case[1]}")
def test_earlier_definitions(case: tuple[Any, ...], dynamic: bool) -> None:
    name, opset, inputs, attributes, expected = case
    (y,) = run_op(name, inputs, attributes, opset, dynamic=dynamic)
    assert y.dtype == expected.dtype
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("to", "dtype"), [("DOUBLE", np.float64), ("INT32", np.int32), ("BOOL", np.bool_)])
def test_cast_of_opset_1_names_the_type(to: str, dtype: type[np.generic]) -> None:
    graph = helper.make_graph(
        [helper.make_node("Cast", ["x"], ["y"], to=to)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, X.shape)],
        [helper.make_tensor_value_info("y", getattr(TensorProto, to), X.shape)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 1)], ir_version=3).SerializeToString()
    (y,) = ort_cuda_plugin.session(model, emulate=True).run(None, {"x": X})
    np.testing.assert_array_equal(y, X.astype(dtype))


@pytest.mark.parametrize("constant", [(1, 2), (2,)])
def test_tile_of_opset_1_along_one_axis(constant: tuple[int, ...]) -> None:
    (y,) = run_op("Tile", [X, np.float32(3), np.float32(2)], {}, 1, constant=constant)
    np.testing.assert_array_equal(y, np.concatenate([X] * 3, 2))


@pytest.mark.parametrize("constant", [(1,), ()])
def test_split_of_opset_1_by_an_input(constant: tuple[int, ...]) -> None:
    parts = run_op("Split", [X, np.array([1, 3], np.float32)], {"axis": 2}, 1, outputs=2, constant=constant)
    np.testing.assert_array_equal(np.concatenate(parts, 2), X)
    assert parts[0].shape[2] == 1


@pytest.mark.parametrize(("name", "gates"), [("RNN", 1), ("GRU", 3), ("LSTM", 4)])
@pytest.mark.parametrize("opset", [1, 3, 6])
def test_recurrent_operators_are_those_of_version_7(name: str, gates: int, opset: int) -> None:
    inputs = [floats(3, 2, 4), floats(1, gates * 5, 4), floats(1, gates * 5, 5)]
    now = run_op(name, inputs, {"hidden_size": 5}, 7, outputs=2)
    then = run_op(name, inputs, {"hidden_size": 5, "output_sequence": 1}, opset, outputs=2)
    for a, b in zip(now, then, strict=True):
        np.testing.assert_array_equal(a, b)


# ---- BatchNormalization ----


def normalized(x: Array, axes: tuple[int, ...], scale: Array, bias: Array, epsilon: float) -> tuple[Array, ...]:
    mean, variance = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return (x - mean) / np.sqrt(variance + epsilon) * scale + bias, mean, variance


VERSIONS = [(1, {"is_test": 0, "consumed_inputs": [0, 0, 0, 1, 1]}), (6, {"is_test": 0}), (7, {}), (9, {})]
VERSIONS += [(14, {"training_mode": 1}), (15, {"training_mode": 1})]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("spatial", [1, 0])
@pytest.mark.parametrize(("opset", "attributes"), VERSIONS)
@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (2, 3, 4, 5)])
def test_batch_normalization_in_training(
    shape: tuple[int, ...], opset: int, attributes: dict[str, Any], spatial: int, dynamic: bool
) -> None:
    if not spatial and opset >= 9:
        pytest.skip("spatial ended with version 9")
    x = floats(*shape, dtype=np.float64)
    size = shape[1:2] if spatial else shape[1:]
    scale, bias, mean, variance = floats(4, *size, dtype=np.float64)
    variance = np.abs(variance)
    axes = (0, *range(2, x.ndim)) if spatial else (0,)
    lined = [value.reshape(size + (1,) * (x.ndim - 1 - len(size))) for value in (scale, bias)]
    y, batch_mean, batch_variance = normalized(x, axes, lined[0], lined[1], 1e-3)
    batch_mean, batch_variance = batch_mean.reshape(size), batch_variance.reshape(size)
    expected = [y, mean * 0.7 + batch_mean * 0.3, variance * 0.7 + batch_variance * 0.3, batch_mean, batch_variance]
    attributes = attributes | {"epsilon": 1e-3, "momentum": 0.7} | ({} if spatial else {"spatial": 0})
    outputs = 3 if opset >= 14 else 5
    actual = run_op("BatchNormalization", [x, scale, bias, mean, variance], attributes, opset, outputs=outputs,
                    dynamic=dynamic)  # fmt: skip
    for a, b in itertools.zip_longest(actual, expected[:outputs]):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)  # epsilon and momentum are float32


@pytest.mark.parametrize(("opset", "attributes"), [(1, {"is_test": 1}), (6, {"is_test": 1}), (7, {}), (15, {})])
@pytest.mark.parametrize("spatial", [1, 0])
def test_batch_normalization_in_inference(opset: int, attributes: dict[str, Any], spatial: int) -> None:
    if not spatial and opset > 7:
        pytest.skip("spatial ended with version 9")
    size = (3,) if spatial else (3, 4)
    x, (scale, bias, mean, variance) = floats(2, 3, 4), floats(4, *size)
    variance = np.abs(variance)
    attributes = attributes | ({} if spatial else {"spatial": 0})
    if opset == 1:
        attributes |= {"consumed_inputs": [0, 0, 0, 1, 1]}
    a, b, m, v = (value.reshape(3, -1) for value in (scale, bias, mean, variance))
    expected = (x - m) / np.sqrt(v + 1e-5) * a + b
    for constant in ((), (1, 2, 3, 4)):
        (y,) = run_op("BatchNormalization", [x, scale, bias, mean, variance], attributes, opset, constant=constant)
        np.testing.assert_allclose(y, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_batch_statistics_do_not_cancel(dtype: type[np.generic]) -> None:
    x = (floats(64, 2, 3) * 0.1 + 100).astype(dtype)
    ones = np.ones(2, np.float32)
    _, _, variance = run_op(
        "BatchNormalization", [x, ones.astype(dtype), ones.astype(dtype), ones, ones],
        {"training_mode": 1, "momentum": 0.0}, 15, outputs=3,
    )  # fmt: skip
    np.testing.assert_allclose(variance, x.astype(np.float64).var((0, 2)), rtol=1e-5)


@pytest.mark.parametrize("training", [0, 1])
@pytest.mark.parametrize("dynamic", [False, True])
def test_parameters_of_another_size_are_refused(training: int, dynamic: bool) -> None:
    with pytest.raises(REFUSED, match="must have"):
        run_op("BatchNormalization", [floats(2, 1, 4), *floats(4, 3)], {"training_mode": training}, 15, dynamic=dynamic)


# ---- operators that ONNX has removed: ONNX Runtime still has them on the CPU ----


REMOVED = [
    ("Affine", {"alpha": 2.0, "beta": -1.0}, []),
    ("Scale", {"scale": 3.0}, []),
    ("ScaledTanh", {"alpha": 2.0, "beta": 0.5}, []),
    ("ParametricSoftplus", {"alpha": 2.0, "beta": 0.5}, []),
    ("ThresholdedRelu", {"alpha": 0.25}, []),
    ("ImageScaler", {"scale": 2.0, "bias": [1.0, 2.0, 3.0]}, []),
    ("Crop", {"border": [1, 0, 2, 1]}, []),
    ("Crop", {"border": [1, 1, 0, 0], "scale": [2, 3]}, []),
    ("MeanVarianceNormalization", {}, []),
    ("MeanVarianceNormalization", {"across_channels": 1, "normalize_variance": 1}, []),
    ("MeanVarianceNormalization", {"normalize_variance": 0}, []),
    ("DynamicSlice", {}, [np.array([1, -3]), np.array([9, -1]), np.array([1, 3])]),
    ("DynamicSlice", {}, [np.array([0, 1]), np.array([1, 3])]),
]


@pytest.mark.every_case
@pytest.mark.parametrize(("name", "attributes", "more"), REMOVED)
@pytest.mark.parametrize("known", [False, True])
def test_removed_operators(name: str, attributes: dict[str, Any], more: list[np.ndarray], known: bool) -> None:
    names = ["x", *(f"i{k}" for k in range(len(more)))]
    graph = helper.make_graph(
        [helper.make_node(name, names, ["y"], **attributes)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, X.shape if known else ["a", "b", "c", "d"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(value, name) for name, value in zip(names[1:], more, strict=True)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 7)], ir_version=8).SerializeToString()
    (expected,) = ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, {"x": X})
    (y,) = ort_cuda_plugin.session(model, emulate=True).run(None, {"x": X})
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_crop_of_more_than_there_is_is_refused() -> None:
    graph = helper.make_graph(
        [helper.make_node("Crop", ["x"], ["y"], border=[1, 1, 0, 0], scale=[4, 3])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["a", "b", "c", "d"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 7)], ir_version=8).SerializeToString()
    with pytest.raises(Exception, match="Crop"):
        ort_cuda_plugin.session(model, emulate=True).run(None, {"x": X})
