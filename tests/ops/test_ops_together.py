"""One model with a node of each operator whose other tests run only in the second (slower) tier of tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from kernel_harness import run_model

Array = np.ndarray
OPSET = 24
X = np.random.default_rng(0).normal(scale=2.0, size=(3, 35)).astype(np.float32)
Y = np.random.default_rng(1).normal(scale=2.0, size=(3, 1)).astype(np.float32)
SMALL = np.tanh(X)
POSITIVE = np.abs(X) + 1
BITS, OTHERS = (np.random.default_rng(seed).integers(0, 30, (3, 35)).astype(np.uint32) for seed in (2, 3))
P, Q = X > 0, X > Y
N = np.array(10)
TURNS = 2 * np.pi * np.arange(10) / 10

Row = tuple[str, Sequence[Array], dict[str, Any], Array]
ROWS: list[Row] = [
    ("Acos", [SMALL], {}, np.arccos(SMALL)),
    ("Acosh", [POSITIVE], {}, np.arccosh(POSITIVE)),
    ("Asin", [SMALL], {}, np.arcsin(SMALL)),
    ("Asinh", [X], {}, np.arcsinh(X)),
    ("Atan", [X], {}, np.arctan(X)),
    ("Atanh", [SMALL], {}, np.arctanh(SMALL)),
    ("BitShift", [BITS, OTHERS % 8], {"direction": "LEFT"}, BITS << OTHERS % 8),
    ("BitwiseAnd", [BITS, OTHERS], {}, BITS & OTHERS),
    ("BitwiseNot", [BITS], {}, ~BITS),
    ("BitwiseOr", [BITS, OTHERS], {}, BITS | OTHERS),
    ("BitwiseXor", [BITS, OTHERS], {}, BITS ^ OTHERS),
    ("Ceil", [X], {}, np.ceil(X)),
    ("Celu", [X], {"alpha": 2.0}, np.maximum(X, 0) + np.minimum(0, 2 * np.expm1(X / 2))),
    ("Cosh", [X], {}, np.cosh(X)),
    ("Elu", [X], {}, np.where(X < 0, np.expm1(X), X)),
    ("HammingWindow", [N], {}, 25 / 46 - 21 / 46 * np.cos(TURNS)),
    ("HannWindow", [N], {}, 0.5 - 0.5 * np.cos(TURNS)),
    ("HardSwish", [X], {}, X * np.clip(X / 6 + 0.5, 0, 1)),
    ("Mean", [X, Y], {}, (X + Y) / 2),
    ("Mish", [X], {}, X * np.tanh(np.log1p(np.exp(X)))),
    ("Not", [P], {}, ~P),
    ("RMSNormalization", [X, X[0]], {"epsilon": 0.0}, X / np.sqrt((X**2).mean(-1, keepdims=True)) * X[0]),
    ("Reciprocal", [X], {}, 1 / X),
    ("Sinh", [X], {}, np.sinh(X)),
    ("Softplus", [X], {}, np.logaddexp(X, 0)),
    ("Softsign", [X], {}, X / (1 + np.abs(X))),
    ("Tan", [SMALL], {}, np.tan(SMALL)),
    ("Xor", [P, Q], {}, P ^ Q),
]


def model_of(rows: Sequence[Row]) -> tuple[onnx.ModelProto, list[Array]]:
    """Return a model with a node for each row, and its inputs. An array of several rows is one input."""
    fed: dict[int, tuple[str, Array]] = {}
    nodes, results = [], []
    for i, (name, inputs, attributes, expected) in enumerate(rows):
        names = [fed.setdefault(id(x), (f"x{len(fed)}", x))[0] for x in inputs]
        nodes.append(helper.make_node(name, names, [f"y{i}"], **attributes))
        results.append(info(f"y{i}", single(expected)))
    graph = helper.make_graph(nodes, "rows", [info(name, x) for name, x in fed.values()], results)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    return model, [x for _, x in fed.values()]


def info(name: str, like: Array) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(like.dtype), like.shape)


def single(x: Array) -> Array:
    return x.astype(np.float32) if x.dtype == np.float64 else x


def test_a_node_of_each_operator_is_what_numpy_computes() -> None:
    wrong = []
    for (name, _, _, expected), actual in zip(ROWS, run_model(*model_of(ROWS)), strict=True):
        if actual.dtype != single(expected).dtype or not np.allclose(actual, expected, rtol=2e-6, atol=2e-6):
            wrong.append(f"{name}: {actual.ravel()[:4]} instead of {expected.ravel()[:4]}")
    assert not wrong, "\n".join(wrong)
