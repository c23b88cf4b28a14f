"""Operators that select elements by value (TopK, Unique, NonZero, ...), compared with the CPU provider."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import ort_cuda_plugin
from kernel_harness import make_model, run_op

Array = np.ndarray[Any, np.dtype[Any]]


def on_cpu(model: onnx.ModelProto, inputs: list[Array]) -> list[Array]:
    model.ir_version = 10
    for output in model.graph.output:
        output.type.CopyFrom(onnx.TypeProto())
    model = onnx.shape_inference.infer_shapes(model)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    results: list[Array] = session.run(None, dict(zip(names, inputs, strict=True)))
    return results


def check(
    op_type: str,
    inputs: list[Array | None],
    *,
    opset: int = 21,
    outputs: int = 1,
    constant: tuple[int, ...] = (),
    **attributes: Any,
) -> None:
    """Compare an operator with the CPU provider, with static and with dynamic shapes.

    With dynamic shapes, the inputs in ``constant`` are initializers.
    """
    present = [x for x in inputs if x is not None]
    expected = on_cpu(make_model(op_type, inputs, attributes, opset, outputs=outputs), present)
    for dynamic in (False, True):
        fixed = constant if dynamic else ()
        actual = run_op(op_type, inputs, attributes, opset, outputs=outputs, dynamic=dynamic, constant=fixed)
        for y, reference in zip(actual, expected, strict=True):
            assert y.shape == reference.shape
            np.testing.assert_array_equal(y, reference)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def numbers(shape: tuple[int, ...], dtype: Any) -> Array:
    """Return random integers from a small range, so that values repeat."""
    return rng().integers(0 if np.dtype(dtype).kind == "u" else -9, 10, shape).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64])
@pytest.mark.parametrize(
    ("shape", "axis", "k"), [((7,), 0, 3), ((3, 600), 1, 5), ((4, 5, 3), 1, 5), ((2, 5, 3), -3, 1), ((0, 4), 1, 2)]
)
@pytest.mark.parametrize("largest", [0, 1])
def test_top_k(dtype: type[np.generic], shape: tuple[int, ...], axis: int, k: int, largest: int) -> None:
    check("TopK", [numbers(shape, dtype), np.array([k])], outputs=2, constant=(1,), axis=axis, largest=largest)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.uint8, np.int8, np.int16, np.uint16, np.uint32])
def test_top_k_of_types_that_the_cpu_lacks(dtype: type[np.generic]) -> None:
    x = numbers((3, 70), dtype)
    values, indices = run_op("TopK", [x, np.array([70])], opset=24, outputs=2, constant=(1,))
    expected = np.argsort(-x.astype(np.float64), axis=1, kind="stable")
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(values.view(dtype), np.take_along_axis(x, expected, 1))


@pytest.mark.parametrize("largest", [0, 1])
def test_top_k_takes_nan_for_the_largest_value(largest: int) -> None:
    x = np.array([1, np.nan, -np.inf, 3, np.nan, np.inf, -0.0, 0.0], np.float32)
    _, indices = run_op("TopK", [x, np.array([8])], {"largest": largest}, outputs=2)
    assert indices.tolist() == ([1, 4, 5, 3, 0, 6, 7, 2] if largest else [2, 6, 7, 0, 3, 5, 1, 4])


def test_top_k_of_earlier_versions() -> None:
    x = numbers((3, 6), np.float32)
    check("TopK", [x], opset=9, outputs=2, k=2)
    check("TopK", [x, np.array([2])], opset=10, outputs=2, constant=(1,), axis=0)


def test_top_k_with_a_k_that_the_device_computes() -> None:
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["f"], ["k"], to=TensorProto.INT64),
            helper.make_node("TopK", ["x", "k"], ["v", "i"]),
        ],
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["a", "b"]),
            helper.make_tensor_value_info("f", TensorProto.FLOAT, [1]),
        ],
        [
            helper.make_tensor_value_info("v", TensorProto.FLOAT, None),
            helper.make_tensor_value_info("i", TensorProto.INT64, None),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    session = ort_cuda_plugin.session(model.SerializeToString(), emulate=True)
    assert {part.ep_name for part in session.get_provider_graph_assignment_info()} == {ort_cuda_plugin.get_ep_name()}
    x = numbers((2, 9), np.float32)
    for k in (1, 9, 0):
        feeds = {"x": x, "f": np.array([k], np.float32)}
        for y, expected in zip(session.run(None, feeds), on_cpu(model, list(feeds.values())), strict=True):
            np.testing.assert_array_equal(y, expected)
    with pytest.raises(Exception, match="k must be in"):
        session.run(None, {"x": x, "f": np.array([10], np.float32)})


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8, np.bool_])
@pytest.mark.parametrize("shape", [(5,), (3, 1, 4), (700,), (0, 3), (2, 2, 2, 2)])
def test_non_zero(dtype: type[np.generic], shape: tuple[int, ...]) -> None:
    check("NonZero", [rng().integers(0, 2, shape).astype(dtype)])


def test_non_zero_finds_nan_and_nothing_in_zeros() -> None:
    check("NonZero", [np.array([0.0, np.nan, -0.0, np.inf], np.float32)])
    check("NonZero", [np.zeros((3, 4), np.float32)])


@pytest.mark.parametrize("axis", [None, 0, 1, -1])
@pytest.mark.parametrize("kept", [[1, 0, 1], [0, 0, 0], [1], [0, 1, 1]])
def test_compress(axis: int | None, kept: list[int]) -> None:
    attributes: dict[str, Any] = {} if axis is None else {"axis": axis}
    check("Compress", [numbers((3, 4, 5), np.float32), np.array(kept, np.bool_)], **attributes)


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.int8, np.float64])
@pytest.mark.parametrize("sorted_", [0, 1])
@pytest.mark.parametrize(("shape", "axis"), [((50,), None), ((4, 5), None), ((6, 2), 0), ((2, 9, 2), 1), ((1,), 0)])
def test_unique(dtype: type[np.generic], sorted_: int, shape: tuple[int, ...], axis: int | None) -> None:
    attributes: dict[str, Any] = {} if axis is None else {"axis": axis}
    x = rng().integers(0, 3, shape).astype(dtype)
    check("Unique", [x], outputs=4, sorted=sorted_, **attributes)


def test_unique_takes_all_nan_for_one_value() -> None:
    x = np.array([np.nan, 1, np.nan, 0], np.float32)
    y, indices, inverse, counts = run_op("Unique", [x], outputs=4)
    np.testing.assert_array_equal(y, np.array([0, 1, np.nan], np.float32))
    assert (indices.tolist(), inverse.tolist(), counts.tolist()) == ([3, 1, 0], [2, 1, 2, 0], [1, 1, 2])


@pytest.mark.parametrize("center", [0, 1])
@pytest.mark.parametrize("limit", [0, 3, 300])
@pytest.mark.parametrize("threshold", [None, 0.3])
def test_non_max_suppression(center: int, limit: int, threshold: float | None) -> None:
    boxes = rng().random((2, 300, 4), np.float32)
    scores = rng().integers(0, 50, (2, 3, 300)).astype(np.float32) / 50
    score = None if threshold is None else np.array([threshold], np.float32)
    inputs: list[Array | None] = [boxes, scores, np.array([limit]), np.array([0.4], np.float32), score]
    check("NonMaxSuppression", inputs, constant=(2, 3), center_point_box=center)


def test_non_max_suppression_keeps_nothing_without_a_limit() -> None:
    boxes, scores = rng().random((1, 4, 4), np.float32), rng().random((1, 1, 4), np.float32)
    check("NonMaxSuppression", [boxes, scores])


@pytest.mark.parametrize("dtype", [np.float32, np.int16, np.bool_])
@pytest.mark.parametrize(("shape", "batch", "time"), [((5, 3), 1, 0), ((3, 5, 2), 0, 1)])
def test_reverse_sequence(dtype: type[np.generic], shape: tuple[int, ...], batch: int, time: int) -> None:
    x = rng().integers(0, 2, shape).astype(dtype)
    check("ReverseSequence", [x, np.array([1, 5, 3])], batch_axis=batch, time_axis=time)


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint64])
@pytest.mark.parametrize(("exclusive", "reverse"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_cum_prod(dtype: type[np.generic], exclusive: int, reverse: int) -> None:
    x = (rng().integers(1, 4, (3, 6))).astype(dtype)
    (y,) = run_op("CumProd", [x, np.array(1)], {"exclusive": exclusive, "reverse": reverse}, 26, constant=(1,))
    expected = x[:, ::-1] if reverse else x
    expected = np.cumprod(expected, 1, dtype=dtype)
    if exclusive:
        expected = np.concatenate([np.ones((3, 1), dtype), expected[:, :-1]], axis=1)
    np.testing.assert_array_equal(y, expected[:, ::-1] if reverse else expected)


def test_non_zero_of_a_scalar_has_no_coordinates() -> None:
    # ONNX specifies shape [0, n] for a scalar; ONNX Runtime's CPU kernel returns one coordinate.
    assert run_op("NonZero", [np.array(3, np.float32)])[0].shape == (0, 1)
    assert run_op("NonZero", [np.array(0, np.float32)])[0].shape == (0, 0)


def test_bfloat16_is_selected_by_value() -> None:
    x = np.array([3, -1, 3, 2, -1], ml_dtypes.bfloat16)
    y, *_ = run_op("Unique", [x], outputs=4)
    assert y.view(ml_dtypes.bfloat16).tolist() == [-1, 2, 3]
    (y,) = run_op("Compress", [x, np.array([True, False, False, True])])
    assert y.view(ml_dtypes.bfloat16).tolist() == [3, 2]
