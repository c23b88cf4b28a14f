"""Earlier versions of operators, the registry's lookup by version, and some com.microsoft operators."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import pytest

from kernel_harness import run_model, run_op
from ort_cuda_plugin.model.ir import DType, InvalidModel, NodeError, Unsupported
from ort_cuda_plugin.model.onnx_graph import MICROSOFT
from ort_cuda_plugin.ops import registry
from ort_cuda_plugin.ops.registry import Operator

Array = np.ndarray


def floats(*shape: int) -> Array:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def softmax(x: Array, axis: Any) -> Array:
    e: Array = np.exp(x - x.max(axis, keepdims=True))
    total: Array = e.sum(axis, keepdims=True)
    result: Array = e / total
    return result


X = floats(2, 3, 4)
STATISTICS = [floats(3), floats(3), floats(3), np.abs(floats(3)) + 0.5]
SCALE, BIAS, MEAN, VARIANCE = (value[:, None] for value in STATISTICS)
NORMALIZED = (X - MEAN) / np.sqrt(VARIANCE + 1e-5) * SCALE + BIAS

EARLIER = [
    ("Unsqueeze", 7, [X], {"axes": [0, 4]}, X[None, ..., None]),
    ("Squeeze", 7, [X[:1]], {"axes": [0]}, X[0]),
    ("Slice", 7, [X], {"starts": [1, -3], "ends": [9, -1], "axes": [1, 2]}, X[:, 1:9, -3:-1]),
    ("Pad", 7, [X], {"pads": [0, 0, 1, 0, 0, 2], "value": 3.0}, np.pad(X, [(0, 0), (0, 0), (1, 2)], constant_values=3)),
    ("Clip", 7, [X], {"min": -0.5, "max": 0.25}, X.clip(-0.5, 0.25)),
    ("Clip", 7, [X], {"min": 0.0}, np.maximum(X, 0)),
    ("Softmax", 7, [X], {}, softmax(X, (1, 2))),
    ("Softmax", 12, [X], {"axis": -1}, softmax(X, 2)),
    ("LogSoftmax", 9, [X], {"axis": 0}, np.log(softmax(X, (0, 1, 2)))),
    ("ReduceSum", 9, [X], {"axes": [1]}, X.sum(1, keepdims=True)),
    ("ReduceMean", 11, [X], {"axes": [-1], "keepdims": 0}, X.mean(-1)),
    ("ReduceMean", 17, [X], {}, X.mean(keepdims=True)),
    ("ReduceMax", 12, [X], {"axes": [0, 2]}, X.max((0, 2), keepdims=True)),
    ("ReduceMin", 12, [X], {"axes": [1, -2]}, X.min(1, keepdims=True)),  # both are axis 1
    ("BatchNormalization", 7, [X, *STATISTICS], {}, NORMALIZED),
    ("BatchNormalization", 9, [X, *STATISTICS], {}, NORMALIZED),
    ("Dropout", 7, [X], {"ratio": 0.3}, X),
    ("Dropout", 10, [X], {"ratio": 0.3}, X),
    ("Sum", 7, [X, X[:, :1], X], {}, X + X[:, :1] + X),
    ("Sum", 8, [X] * 9, {}, X * 9),
    ("Mean", 8, [X, X[0], X[0, 0]], {}, (X + X[0] + X[0, 0]) / 3),
    ("Max", 8, [X, X[0]], {}, np.maximum(X, X[0])),
    ("Pow", 7, [np.abs(X), np.full((4,), 2.5, np.float32)], {}, np.abs(X) ** 2.5),
    ("Concat", 7, [X, X], {"axis": -1}, np.concatenate([X, X], -1)),
    ("Flatten", 9, [X], {"axis": 2}, X.reshape(6, 4)),
    ("ArgMax", 7, [X], {"axis": 2}, X.argmax(2)[..., None]),
    ("Scatter", 10, [X, np.zeros((2, 3, 1), np.int64), X[..., 3:]], {"axis": 2}, np.dstack([X[..., 3:], X[..., 1:]])),
    ("Gather", 7, [X, np.array([2, 0])], {"axis": 1}, X[:, [2, 0]]),
    ("Cast", 7, [X], {"to": 7}, X.astype(np.int64)),
]


@pytest.mark.parametrize("case", EARLIER, ids=lambda case: f"{case[0]}-{case[1]}-{sorted(case[3])}")
@pytest.mark.parametrize("dynamic", [False, True])
def test_earlier_definitions(case: tuple[Any, ...], dynamic: bool) -> None:
    name, opset, inputs, attributes, expected = case
    (actual,) = run_op(name, inputs, attributes, opset, dynamic=dynamic)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-6)


def test_squeeze_of_every_dimension_of_size_1_is_decided_by_the_sizes_of_the_run() -> None:
    for dynamic in (False, True):
        assert run_op("Squeeze", [X[:1, :, :1]], dynamic=dynamic)[0].shape == (3,)
        assert run_op("Squeeze", [X], dynamic=dynamic)[0].shape == X.shape
    computed = """
    <ir_version: 8, opset_import: ["": 18]>
    computed (float[n] x) => (int64[m] y) { found = NonZero (x)  y = Squeeze (found) }
    """
    with pytest.raises(NodeError, match="size 1 that Squeeze drops is computed on the device"):
        run_model(onnx.parser.parse_model(computed), [X[0, 0]])


def test_split_takes_its_parts_from_attribute_input_or_number_of_outputs() -> None:
    x = np.arange(7)
    for got in (
        run_op("Split", [x], {"split": [2, 5]}, 11, outputs=2),
        run_op("Split", [x, np.array([2, 5])], {}, 13, outputs=2, constant=[1]),
    ):
        assert [part.tolist() for part in got] == [[0, 1], [2, 3, 4, 5, 6]]
    assert [part.tolist() for part in run_op("Split", [x[:6]], {}, 11, outputs=3)] == [[0, 1], [2, 3], [4, 5]]
    got = run_op("Split", [x], {"num_outputs": 3}, 18, outputs=3)
    assert [part.tolist() for part in got] == [[0, 1, 2], [3, 4, 5], [6]]


def test_dropout_says_in_its_mask_that_everything_stays() -> None:
    _, mask = run_op("Dropout", [X], {}, 12, outputs=2)
    assert mask.dtype == bool
    assert mask.all()
    assert mask.shape == X.shape


def gelu(x: Array) -> Array:
    result: Array = 0.5 * x * (1 + np.vectorize(math.erf)(x * math.sqrt(0.5)))
    return result


def fast_gelu(x: Array) -> Array:
    result: Array = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return result


@pytest.mark.parametrize(
    ("name", "inputs", "expected"),
    [
        ("Gelu", [X], gelu(X)),
        ("BiasGelu", [X, X[0, 0]], gelu(X + X[0, 0])),
        ("FastGelu", [X], fast_gelu(X)),
        ("FastGelu", [X, X[0, 0]], fast_gelu(X + X[0, 0])),
        ("QuickGelu", [X], X / (1 + np.exp(-1.702 * X))),
    ],
)
def test_operators_of_com_microsoft(name: str, inputs: list[np.ndarray], expected: np.ndarray) -> None:
    (actual,) = run_op(name, inputs, domain=MICROSOFT)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


# ---- the registry ----


def serving(name: str, version: int) -> registry.Operator:
    return registry.lookup("", name, version)


def test_a_version_is_served_by_the_latest_row_not_after_it() -> None:
    assert serving("Softmax", 1).since == serving("Softmax", 11).since == 1
    assert serving("Softmax", 13).since == 13
    assert serving("LayerNormalization", 17).since == 17


@pytest.mark.parametrize(
    ("domain", "name", "version", "kind"),
    [
        ("", "NoSuchOperator", 1, "op"),
        ("com.example", "Add", 1, "op"),
        ("", "Celu", 11, "version"),
        ("", "Reshape", 9999, "version"),
    ],
)
def test_a_lookup_that_fails_says_whether_the_operator_or_its_version_is_missing(
    domain: str, name: str, version: int, kind: str
) -> None:
    with pytest.raises(Unsupported) as caught:
        registry.lookup(domain, name, version)
    assert caught.value.kind == kind


def test_unknown_attributes_and_types_are_declined_and_missing_inputs_are_errors() -> None:
    operator = serving("LeakyRelu", 16)
    with pytest.raises(Unsupported, match="'beta'") as caught:
        operator.bind_attributes({"beta": 0.5})
    assert caught.value.kind == "attribute"
    with pytest.raises(Unsupported, match=r"the type of input 0 \(type constraint T\) is i32") as caught:
        operator.check_inputs([DType.INT32])
    assert caught.value.kind == "dtype"
    with pytest.raises(InvalidModel, match="the required input 0 is missing"):
        operator.check_inputs([None])
    with pytest.raises(Unsupported, match="the number of inputs is 2; supported: at most 1"):
        operator.check_inputs([DType.FLOAT32] * 2)
    with pytest.raises(InvalidModel, match="'to'"):
        serving("Cast", 13).bind_attributes({})


def test_a_second_declaration_of_a_version_is_refused() -> None:
    with pytest.raises(ValueError, match="two functions declare since=1"):
        registry.op("Relu", since=1)(lambda ctx, x: x)


def declared() -> list[Any]:
    return [operator for operator in registry.operators() if operator.domain == ""]


def schema(operator: registry.Operator) -> onnx.defs.OpSchema:
    """Return the newest ONNX schema that the registered operator serves."""
    later = [o.since for o in declared() if o.name == operator.name and o.since > operator.since]
    last = min([*later, registry.NEWEST_OPSETS[""] + 1]) - 1
    return onnx.defs.get_schema(operator.name, min(last, operator.until or last), "")


CONTRIBUTED = {("LayerNormalization", 1), ("SimplifiedLayerNormalization", 1), ("MeanVarianceNormalization", 1)}
CONTRIBUTED |= {(name, 1) for name in ("Affine", "Crop", "DynamicSlice", "ImageScaler", "ParametricSoftplus")}
CONTRIBUTED |= {(name, 1) for name in ("Scale", "ScaledTanh")}
"""Operators that ORT adds to the domain ai.onnx; ONNX has no schemas of them."""


@pytest.mark.parametrize("operator", declared(), ids=lambda o: f"{o.name}-{o.since}")
def test_declarations_agree_with_the_schemas_of_onnx(operator: Operator) -> None:
    if (operator.name, operator.since) in CONTRIBUTED:
        pytest.skip("not in ONNX")
    defined = schema(operator)
    assert len(operator.inputs) == len(defined.inputs)
    for parameter, input in zip(operator.inputs, defined.inputs, strict=True):
        kind = onnx.defs.OpSchema.FormalParameterOption
        assert (parameter.kind == parameter.VAR_POSITIONAL) == (input.option == kind.Variadic), parameter
        assert (parameter.default is None) == (input.option == kind.Optional), parameter
    names = {constraint.type_param_str for constraint in defined.type_constraints}
    assert set(operator.types) <= names
    for index, input in enumerate(defined.inputs):
        used = operator.constraint(index)
        assert not used or used == input.type_str, f"{input.name} is {input.type_str}"
    for name, attribute in defined.attributes.items():
        # If an operator's row lacks one of these attributes, the plugin declines any node that has the attribute.
        if name in {"sparse_value", "value_string", "value_strings", "layout", "output_dtype"}:
            continue
        if name in registry.IGNORED_ATTRIBUTES:
            continue
        assert name in operator.attributes, name
        if attribute.required:
            assert operator.attributes[name].default is operator.attributes[name].empty, name
