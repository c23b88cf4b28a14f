"""Operand prologues: a GEMM or convolution with quantized operands is one launch and computes the unfused bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

import ort_cuda_plugin
from session_pair import info

Array = np.ndarray
BFLOAT16 = ml_dtypes.bfloat16


def node(kind: str, *names: str, **attributes: Any) -> NodeProto:
    """Return a node; the last of ``names`` is its output, the others are its inputs."""
    return helper.make_node(kind, names[:-1], names[-1:], **attributes)


def run(model: bytes, x: Array, **options: object) -> tuple[list[Array], int]:
    """Run a model twice. Return the results, and the number of launches of the second Run."""
    settings = ort.SessionOptions()
    settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort_cuda_plugin.session(model, emulate=True, sess_options=settings, provider_options=options)
    session.run(None, {"x": x})
    before = ort_cuda_plugin.counters()["launches"]
    results: list[Array] = session.run(None, {"x": x})
    return results, ort_cuda_plugin.counters()["launches"] - before


def check(
    nodes: Sequence[NodeProto], x: Array, constants: dict[str, Array], launches: int, result: int = TensorProto.INT8
) -> list[Array]:
    """Check that fusion keeps the bits of the result y, and that the fused model has ``launches`` launches."""
    initializers = [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = helper.make_graph(nodes, "g", [info("x", kind, [*x.shape])], [info("y", result, None)], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10).SerializeToString()
    fused, count = run(model, x)
    plain, _ = run(model, x, fusion=0)
    for actual, expected in zip(fused, plain, strict=True):
        np.testing.assert_array_equal(actual.view(np.uint8), expected.view(np.uint8), strict=True)
        assert len(np.unique(actual)) > 10
    assert count == launches
    return fused


class Quantized:
    """Weights, and scales and zero points of x, w and y, from a seed.

    ``before`` dequantizes x and w to xf and wf; ``after`` quantizes Relu(p) to y.
    """

    def __init__(self, weights: tuple[int, ...], axis: int | None, dtype: type, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.axis = axis
        channels = () if axis is None else (weights[axis],)
        bias = weights[0] if len(weights) > 2 else weights[1]
        self.constants: dict[str, Array] = {
            "w": rng.integers(-127, 128, weights).astype(np.int8),
            "ws": (rng.random(channels) / 30 + 0.003).astype(dtype),
            "wz": np.asarray(rng.integers(-5, 6, channels)).astype(np.int8),
            "xs": np.asarray(0.021).astype(dtype),
            "xz": np.asarray(119, np.uint8),
            "ys": np.asarray(0.9).astype(dtype),
            "yz": np.asarray(-11, np.int8),
            "b": rng.standard_normal(bias).astype(dtype),
        }

    @property
    def before(self) -> list[NodeProto]:
        axis = {} if self.axis is None else {"axis": self.axis}
        return [
            node("DequantizeLinear", "x", "xs", "xz", "xf"),
            node("DequantizeLinear", "w", "ws", "wz", "wf", **axis),
        ]

    after = (node("Relu", "p", "r"), node("QuantizeLinear", "r", "ys", "yz", "y"))


def bytes_of(*shape: int) -> Array:
    return np.random.default_rng(len(shape)).integers(0, 256, shape).astype(np.uint8)


@pytest.mark.parametrize(("dtype", "rows", "axis"), [(np.float32, 3, 1), (np.float16, 3, None), (BFLOAT16, 37, 1)])
def test_a_quantized_product_is_one_launch(dtype: type, rows: int, axis: int | None) -> None:
    q = Quantized((96, 72), axis, dtype)
    nodes = [*q.before, node("MatMul", "xf", "wf", "s"), node("Add", "s", "b", "p"), *q.after]
    check(nodes, bytes_of(rows, 96), q.constants, 1)


@pytest.mark.parametrize(("rows", "axis"), [(2, 0), (21, 1)])
def test_scales_may_belong_to_either_dimension_of_the_weights(rows: int, axis: int) -> None:
    q = Quantized((64, 64), axis, np.float32)
    nodes = [*q.before, node("Gemm", "xf", "wf", "b", "p", transB=1), *q.after]
    check(nodes, bytes_of(rows, 64), q.constants, 1)


@pytest.mark.parametrize("axis", [1, 2])
def test_scales_of_rows_in_batches_are_applied_before(axis: int) -> None:
    """Scales along k (axis 2) fuse into the GEMM. Scales of rows (axis 1) do not: the GEMM's rows span all batches."""
    q = Quantized((32, 40), 1, np.float32)
    size = (5, 32)[axis - 1]
    q.constants |= {"xs": np.linspace(0.01, 0.05, size).astype(np.float32), "xz": np.arange(size).astype(np.uint8)}
    nodes = [
        node("DequantizeLinear", "x", "xs", "xz", "xf", axis=axis),
        *q.before[1:],
        node("MatMul", "xf", "wf", "p"),
        *q.after,
    ]
    check(nodes, bytes_of(3, 5, 32), q.constants, 1 if axis == 2 else 2)


@pytest.mark.parametrize(
    ("dtype", "axis", "group", "kernel"), [(np.float32, None, 2, 3), (np.float16, 0, 2, 1), (BFLOAT16, 0, 1, 3)]
)
def test_a_quantized_convolution_is_one_launch(dtype: type, axis: int | None, group: int, kernel: int) -> None:
    q = Quantized((40, 8 // group, kernel, kernel), axis, dtype)
    pads = [kernel // 2] * 4
    nodes = [*q.before, node("Conv", "xf", "wf", "b", "p", group=group, pads=pads), *q.after]
    check(nodes, bytes_of(2, 8, 9, 7), q.constants, 1)


@pytest.mark.parametrize(("kind", "strides"), [("Conv", 1), ("Conv", 2), ("ConvTranspose", 2)])
def test_a_convolution_of_few_outputs_reads_bytes(kind: str, strides: int) -> None:
    """A depthwise convolution loads x as uint8. Its weights are dequantized once, not in each Run."""
    q = Quantized((8, 1, 3, 3), 0, np.float32)
    nodes = [*q.before, node(kind, "xf", "wf", "b", "p", group=8, pads=[1] * 4, strides=[strides] * 2), *q.after]
    check(nodes, bytes_of(2, 8, 19, 21), q.constants, 1)


def test_between_two_convolutions_bytes_are_stored() -> None:
    """The first convolution stores int8. The second one and the Add dequantize its result when they load it."""
    first, second = Quantized((24, 8, 3, 3), 0, np.float32, 1), Quantized((24, 24, 1, 1), 0, np.float32, 2)
    nodes = [
        *first.before,
        node("Conv", "xf", "wf", "b", "p", pads=[1] * 4),
        node("Relu", "p", "r"),
        node("QuantizeLinear", "r", "ys", "yz", "q"),
        node("DequantizeLinear", "q", "ys", "yz", "qf"),
        node("DequantizeLinear", "q", "ys", "yz", "again"),
        node("DequantizeLinear", "w2", "ws2", "wz2", "w2f", axis=0),
        node("Conv", "qf", "w2f", "b2", "p2"),
        node("Add", "p2", "again", "sum"),
        node("QuantizeLinear", "sum", "ys2", "yz2", "y"),
    ]
    constants = first.constants | {f"{name}2": array for name, array in second.constants.items()}
    check(nodes, bytes_of(2, 8, 9, 7), constants, 2)


def test_integer_products_convert_as_they_load() -> None:
    rng = np.random.default_rng(3)
    nodes = [node("MatMulInteger", "x", "w", "xz", "wz", "y")]
    w, wz = rng.integers(-127, 128, (48, 40)).astype(np.int8), rng.integers(-9, 9, 40).astype(np.int8)
    x = bytes_of(3, 48)
    (y,) = check(nodes, x, {"w": w, "wz": wz, "xz": np.asarray(7, np.uint8)}, 1, TensorProto.INT32)
    np.testing.assert_array_equal(y, (x.astype(np.int32) - 7) @ (w.astype(np.int32) - wz))


def test_a_cast_float_is_read_as_it_is() -> None:
    rng = np.random.default_rng(4)
    nodes = [node("Cast", "x", "wide", to=TensorProto.FLOAT), node("MatMul", "wide", "w", "y")]
    x = rng.standard_normal((9, 48)).astype(np.float16)
    check(nodes, x, {"w": rng.standard_normal((48, 40)).astype(np.float32)}, 1, TensorProto.FLOAT)


def test_weights_that_were_transposed_before_are_multiplied_in_the_same_order() -> None:
    """The order of summation in a GEMM of few rows depends on the layout of the weights; fusion must not change it."""
    q = Quantized((72, 96), 1, np.float32)
    nodes = [
        q.before[0],
        node("Transpose", "w", "wt"),
        node("DequantizeLinear", "wt", "ws", "wz", "wf", axis=0),
        node("MatMul", "xf", "wf", "p"),
        *q.after,
    ]
    check(nodes, bytes_of(3, 96), q.constants, 1)
