"""ai.onnx.ml's operators for features, labels and linear models, compared with the CPU provider."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import ort_cuda_plugin
from kernel_harness import run_op
from ort_cuda_plugin.model.ir import InvalidModel, NodeError, Unsupported
from ort_cuda_plugin.ops import registry

Array = np.ndarray[Any, np.dtype[Any]]
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
TRANSFORMS = ("NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO", "PROBIT")


def kind(dtype: Any) -> int:
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def model(op_type: str, inputs: Sequence[Array], outputs: Sequence[int], version: int, **attributes: Any) -> bytes:
    """Return a model of one node whose inputs have dynamic shapes."""
    names = [f"x{i}" for i in range(len(inputs))]
    results = [f"y{i}" for i in range(len(outputs))]
    node = helper.make_node(op_type, names, results, domain="ai.onnx.ml", **attributes)
    graph = helper.make_graph(
        [node],
        "ml",
        [
            helper.make_tensor_value_info(name, kind(x.dtype), [f"{name}_{axis}" for axis in range(x.ndim)])
            for name, x in zip(names, inputs, strict=True)
        ],
        [helper.make_tensor_value_info(name, dtype, None) for name, dtype in zip(results, outputs, strict=True)],
    )
    opsets = [helper.make_opsetid("ai.onnx.ml", version), helper.make_opsetid("", 18)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())


def check(op_type: str, inputs: Sequence[Array], outputs: Sequence[int], version: int = 1, **attributes: Any) -> None:
    source = model(op_type, inputs, outputs, version, **attributes)
    feeds = {f"x{i}": x for i, x in enumerate(inputs)}
    expected = ort.InferenceSession(source, providers=["CPUExecutionProvider"]).run(None, feeds)
    session = ort_cuda_plugin.session(source, emulate=True)
    assert {part.ep_name for part in session.get_provider_graph_assignment_info()} == {ort_cuda_plugin.get_ep_name()}
    for got, wanted in zip(session.run(None, feeds), expected, strict=True):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def numbers(shape: tuple[int, ...], dtype: Any) -> Array:
    return np.random.default_rng(0).integers(-4, 5, shape).astype(dtype)


def test_label_encoder() -> None:
    x = np.array([[1, 2, np.nan], [3, -0.0, 7]], np.float32)
    check("LabelEncoder", [x], [INT64], 2, keys_floats=[3.0, 1.0, 0.0, 3.0], values_int64s=[10, 20, 30, 40])
    check("LabelEncoder", [x], [FLOAT], 2, keys_floats=[3.0, 1.0, np.nan], values_floats=[1.5, 2.5, 3.5])
    labels = np.array([5, 6, 7, -1])
    check("LabelEncoder", [labels], [FLOAT], 3, keys_int64s=[7, 5], values_floats=[1.5, 2.5], default_float=9.0)
    check("LabelEncoder", [labels], [INT64], 2, keys_int64s=[7], values_int64s=[1], default_int64=4)


@pytest.mark.parametrize("default", [None, 3])
def test_label_encoder_of_tensors(default: int | None) -> None:
    pairs = [(a, b) for a in (np.float32, np.float64, np.int64) for b in (a, np.int64)] + [(np.int64, np.float64)]
    for source, target in pairs:
        keys = np.array([7, 5, 7], source)
        if source is not np.int64:
            keys[2] = np.nan
        attributes = {
            "keys_tensor": numpy_helper.from_array(keys, "k"),
            "values_tensor": numpy_helper.from_array(np.array([1, 2, 3], target), "v"),
        }
        if default is not None:
            attributes["default_tensor"] = numpy_helper.from_array(np.array([default], target), "d")
        check("LabelEncoder", [keys.reshape(3, 1)], [kind(target)], 4, **attributes)
        check("LabelEncoder", [np.array([[5, 6], [7, -1]], source)], [kind(target)], 4, **attributes)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.int32])
def test_features(dtype: Any) -> None:
    x = numbers((3, 4), dtype)
    check("ArrayFeatureExtractor", [x, np.array([[3, 1, 0, 1, 2]])], [kind(dtype)])
    check("ArrayFeatureExtractor", [x[0], np.array([3, 1])], [kind(dtype)])
    check("ArrayFeatureExtractor", [x.reshape(3, 2, 2), np.array([1])], [kind(dtype)])
    check("FeatureVectorizer", [x, x[:, :2]], [FLOAT], inputdimensions=[3, 4])
    for part in (x, x[0]):
        check("Scaler", [part], [FLOAT], offset=[1.5], scale=[0.3])
        check("Scaler", [part], [FLOAT], offset=[1.5, 2.0, 3.0, 4.0], scale=[0.3, 0.4, 0.5, 0.6])
        for norm in ("MAX", "L1", "L2"):
            check("Normalizer", [part], [FLOAT], norm=norm)
        if dtype is not np.int32:
            check("OneHotEncoder", [part], [FLOAT], cats_int64s=[0, -2, 3])
        if dtype is np.int64:
            check("Imputer", [part], [INT64], imputed_value_int64s=[9, 8, 7, 6], replaced_value_int64=-1)
        if dtype is np.float32:
            check("Binarizer", [part], [FLOAT], threshold=1.0)
            check("Imputer", [part], [FLOAT], imputed_value_floats=[9.5], replaced_value_float=0.0)
            holes = np.where(part == 1, np.nan, part).astype(dtype)
            values = [9.5, 1.0, 2.0, 3.0]
            check("Imputer", [holes], [FLOAT], imputed_value_floats=values, replaced_value_float=float("nan"))
    check("Scaler", [x.reshape(3, 2, 2)], [FLOAT], offset=[1.5], scale=[0.3])


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_linear_models(transform: str) -> None:
    rng = np.random.default_rng(1)
    x = numbers((5, 3), np.float32)
    for targets in (1, 2, 3):
        attributes: dict[str, Any] = {
            "coefficients": (rng.integers(-5, 6, 3 * targets) / 20).tolist(), "intercepts": [0.1] * targets,
            "post_transform": transform,
        }  # fmt: skip
        check("LinearRegressor", [x], [FLOAT], targets=targets, **attributes)
        if targets > 1 or transform != "PROBIT":
            labels = [5, 7, 9][: max(targets, 2)]
            for dtype in (np.float32, np.int64):
                check("LinearClassifier", [x.astype(dtype)], [INT64, FLOAT], classlabels_ints=labels, **attributes)


@pytest.mark.parametrize("kernel", ["LINEAR", "POLY", "RBF", "SIGMOID"])
def test_support_vector_regression(kernel: str) -> None:
    rng = np.random.default_rng(2)
    x = numbers((5, 3), np.float32)
    attributes: dict[str, Any] = {
        "coefficients": (rng.integers(-5, 6, 4) / 20).tolist(), "rho": [0.1], "n_supports": 4, "kernel_type": kernel,
        "support_vectors": (rng.integers(-5, 6, 12) / 10).tolist(), "kernel_params": [0.3, 0.2, 3.0],
    }  # fmt: skip
    for one_class in (0, 1):
        for transform in ("NONE", "LOGISTIC"):
            check("SVMRegressor", [x], [FLOAT], one_class=one_class, post_transform=transform, **attributes)
    linear: dict[str, Any] = {
        "coefficients": [0.1, 0.2, 0.3],
        "rho": [0.1],
        "kernel_type": kernel,
        "kernel_params": [0.3, 0.2, 3.0],
    }
    check("SVMRegressor", [x], [FLOAT], **linear)


def test_an_index_outside_gives_0() -> None:
    x = np.array([[1, 2], [3, 4]], np.float32)
    (z,) = run_op("ArrayFeatureExtractor", [x, np.array([1, 7, -1])], domain="ai.onnx.ml")
    np.testing.assert_array_equal(z, [[2, 0, 0], [4, 0, 0]])


def test_contradictions_are_refused() -> None:
    x = np.zeros((2, 3), np.float32)
    one = {"coefficients": [1.0] * 3, "intercepts": [0.0]}
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("LabelEncoder", {"keys_floats": [1.0], "values_int64s": [1, 2]}, "values must have 1 entries, got 2"),
        (
            "LabelEncoder",
            {"keys_int64s": [1], "values_int64s": [1]},
            "keys must have the type f32 of",
        ),
        ("LabelEncoder", {"keys_floats": [1.0]}, "one attribute whose name begins with values_, got none"),
        ("LabelEncoder", {"keys_strings": ["a"], "values_int64s": [1]}, "the type of keys is string"),
        ("Scaler", {"offset": [1.0, 2.0], "scale": [1.0]}, "offset must have one entry"),
        ("Scaler", {"scale": [1.0]}, "offset and scale must be given"),
        ("Normalizer", {"norm": "L3"}, "norm must be one of 'MAX', 'L1', 'L2', got 'L3'"),
        ("Imputer", {"imputed_value_int64s": [1]}, "imputed_value_floats must be given for X of type f32"),
        ("OneHotEncoder", {"cats_strings": ["a"]}, "the list of categories is a list of strings"),
        ("OneHotEncoder", {"cats_int64s": [1], "zeros": 0}, "zeros is 0"),
        ("FeatureVectorizer", {"inputdimensions": [1, 2]}, "inputdimensions must have 1 entries, got 2"),
        ("LinearRegressor", {"coefficients": [1.0] * 4, "targets": 3}, "a positive multiple of 3 entries, got 4"),
        ("LinearRegressor", {"coefficients": [1.0] * 4}, "X must have the size 4"),
        ("LinearClassifier", one | {"classlabels_ints": [1]}, "at most one intercept, got 1 labels and 1 intercepts"),
        ("LinearClassifier", one | {"classlabels_strings": ["a", "b"]}, "classlabels_strings is given"),
        (
            "SVMRegressor",
            {"coefficients": [1.0], "rho": [0.0], "n_supports": 2},
            "n_supports = 2 entries, got 1",
        ),
    ]
    for op_type, attributes, text in cases:
        outputs = 2 if op_type == "LinearClassifier" else 1
        with pytest.raises((InvalidModel, NodeError, Unsupported)) as caught:
            run_op(op_type, [x], attributes, domain="ai.onnx.ml", version=2, outputs=outputs)
        assert text in str(caught.value)


def test_what_no_device_has_says_so() -> None:
    with pytest.raises(Unsupported, match=r"ai\.onnx\.ml\.ZipMap is not implemented: it returns a sequence of maps"):
        registry.lookup("ai.onnx.ml", "ZipMap", 1)
