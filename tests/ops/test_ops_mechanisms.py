"""Mechanisms that operators share, over element types, strided views, empty tensors and scalars.

float32 computes the chosen values exactly, so a result differs from NumPy's only by one rounding to its type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import NodeProto, helper, numpy_helper

from kernel_harness import run_model
from ort_cuda_plugin.model.onnx_graph import storage

Array = np.ndarray
FLOATS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float64": np.float64}
NUMBERS = {**FLOATS, "int8": np.int8, "uint8": np.uint8, "int64": np.int64}
PLAIN = {**NUMBERS, "bool": np.bool_}
EVERY = {**PLAIN, "float8": ml_dtypes.float8_e4m3fn, "int4": ml_dtypes.int4, "float4": ml_dtypes.float4_e2m1fn}
some = settings(max_examples=2)
shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
ranked = hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5)
filled = hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=5)
VIEWS = ("plain", "reversed", "spread", "transposed", "repeated")
views = st.sampled_from(VIEWS)
seeds = st.integers(0, 99)


def draw(shape: Sequence[int], dtype: Any, seed: int) -> Array:
    """Return random small multiples of 0.25 for floats, small integers, or booleans."""
    whole: Array = np.random.default_rng(seed).integers(-6, 7, tuple(shape))
    kind = storage(np.zeros((), dtype))[1]
    if kind.is_float:
        return (whole * 0.25).astype(dtype)
    if dtype is np.bool_:
        even: Array = whole % 2 == 0
        return even
    return (np.abs(whole) if np.dtype(dtype).kind == "u" else whole).astype(dtype)


class View:
    """A strided view ``value`` of the graph input ``base``, created by a node that does not copy (such as Slice)."""

    def __init__(self, value: Array, kind: str, name: str) -> None:
        self.name = name
        self.input = f"{name}_base"
        self.constants: dict[str, Array] = {}
        self.nodes: list[NodeProto] = []
        if value.ndim == 0:
            kind = "plain"
        if kind == "repeated":
            self.base = np.zeros((1, *value.shape[1:]), value.dtype)
            self.base[: len(value)] = value[:1]
            value = np.broadcast_to(self.base, value.shape)
            self._node("Expand", np.array(value.shape))
        elif kind == "reversed":
            self.base = value[..., ::-1]
            self._node("Slice", *(np.array([i]) for i in (-1, -(2**62), value.ndim - 1, -1)))
        elif kind == "spread":
            self.base = np.ones((2 * len(value) + 1, *value.shape[1:]), value.dtype)
            self.base[1::2] = value
            self._node("Slice", *(np.array([i]) for i in (1, 2**62, 0, 2)))
        elif kind == "transposed":
            self.base = value.T
            self._node("Transpose")
        else:
            self.base = value
            self._node("Identity")
        self.value = value

    def _node(self, op_type: str, *constants: Array) -> None:
        names = [f"{self.name}_{i}" for i in range(len(constants))]
        self.constants.update(zip(names, constants, strict=True))
        self.nodes.append(helper.make_node(op_type, [self.input, *names], [self.name]))


def run(
    op_type: str,
    inputs: Sequence[View],
    host: Sequence[Array | None] = (),
    attributes: Mapping[str, Any] | None = None,
    outputs: int = 1,
    dynamic: bool = False,
) -> list[Array]:
    """Return the outputs of one operator. ``host`` are further, constant inputs; None omits an input."""
    names = [view.name for view in inputs] + [f"host_{i}" if x is not None else "" for i, x in enumerate(host)]
    constants = {f"host_{i}": x for i, x in enumerate(host) if x is not None}
    nodes, infos = [], []
    for view in inputs:
        constants |= view.constants
        nodes += view.nodes
        infos.append(helper.make_tensor_value_info(view.input, storage(view.base)[1].onnx, view.base.shape))
    results = [f"y{i}" for i in range(outputs)]
    nodes.append(helper.make_node(op_type, names, results, **(attributes or {})))
    graph = helper.make_graph(
        nodes,
        "views",
        infos,
        [helper.make_empty_tensor_value_info(name) for name in results],
        [numpy_helper.from_array(x, name) for name, x in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)])
    return run_model(model, [np.ascontiguousarray(view.base).reshape(view.base.shape) for view in inputs], dynamic)


def assert_equal(actual: Array, expected: Array, dtype: Any) -> None:
    assert actual.shape == expected.shape
    got = actual.astype(dtype) if storage(np.zeros((), dtype))[1].is_integer else actual.view(dtype)
    with np.errstate(invalid="ignore"):
        want = expected.astype(dtype)
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))


def wide(x: Array) -> Array:
    """Return floats as float64, in which NumPy computes the expected results."""
    return x if x.dtype.kind in "iub" else x.astype(np.float64)


@pytest.mark.parametrize("dtype", PLAIN.values(), ids=PLAIN)
@given(shape=shapes, kinds=st.tuples(views, views), seed=seeds, dynamic=st.booleans())
@some
def test_elementwise(
    dtype: type[np.generic], shape: tuple[int, ...], kinds: tuple[str, ...], seed: int, dynamic: bool
) -> None:
    a, b = View(draw(shape, dtype, seed), kinds[0], "a"), View(draw(shape, dtype, seed + 1), kinds[1], "b")
    op_type, function = ("Xor", np.logical_xor) if dtype is np.bool_ else ("Sub", np.subtract)
    (y,) = run(op_type, [a, b], dynamic=dynamic)
    assert_equal(y, function(wide(a.value), wide(b.value)), dtype)


@pytest.mark.parametrize("dtype", NUMBERS.values(), ids=NUMBERS)
@given(shape=ranked, kind=views, seed=seeds, data=st.data(), dynamic=st.booleans())
@some
def test_reduce(
    dtype: type[np.generic], shape: tuple[int, ...], kind: str, seed: int, data: st.DataObject, dynamic: bool
) -> None:
    x = View(draw(shape, dtype, seed), kind, "x")
    axes = tuple(data.draw(st.lists(st.integers(0, len(shape) - 1), unique=True, min_size=1)))
    (y,) = run("ReduceSum", [x], [np.array(axes)], {"keepdims": 0}, dynamic=dynamic)
    assert_equal(y, wide(x.value).sum(axes, dtype=wide(x.value).dtype), dtype)


@pytest.mark.parametrize("dtype", EVERY.values(), ids=EVERY)
@given(shape=filled, kinds=st.tuples(views, views), seed=seeds, data=st.data(), dynamic=st.booleans())
@some
def test_gather_and_scatter(
    dtype: type[np.generic],
    shape: tuple[int, ...],
    kinds: tuple[str, ...],
    seed: int,
    data: st.DataObject,
    dynamic: bool,
) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    x = View(draw(shape, dtype, seed), kinds[0], "x")
    count = data.draw(st.integers(0, 4))
    places = np.random.default_rng(seed).integers(-shape[axis], shape[axis], (*shape[:axis], count, *shape[axis + 1 :]))
    indices = View(places, kinds[1], "indices")
    if count:
        (y,) = run("GatherElements", [x, indices], (), {"axis": axis}, dynamic=dynamic)
        assert_equal(y, np.take_along_axis(x.value, indices.value, axis), dtype)
    else:
        (y,) = run("Gather", [x, View(np.array(-1), "plain", "last")], (), {"axis": axis}, dynamic=dynamic)
        assert_equal(y, x.value.take(-1, axis), dtype)
    # ``order`` is a permutation along the axis, so no element is written twice.
    order = np.argsort(np.random.default_rng(seed).random(shape), axis)
    updates = View(draw(shape, dtype, seed + 1), kinds[1], "updates")
    (y,) = run("ScatterElements", [x, View(order, "plain", "order"), updates], (), {"axis": axis}, dynamic=dynamic)
    expected = x.value.copy()
    np.put_along_axis(expected, order, updates.value, axis)
    assert_equal(y, expected, dtype)


SCANNED = {**FLOATS, "int64": np.int64}


@pytest.mark.parametrize("dtype", SCANNED.values(), ids=SCANNED)
@given(shape=ranked, kind=views, seed=seeds, reverse=st.booleans(), data=st.data(), dynamic=st.booleans())
@some
def test_scan(
    dtype: type[np.generic],
    shape: tuple[int, ...],
    kind: str,
    seed: int,
    reverse: bool,
    data: st.DataObject,
    dynamic: bool,
) -> None:
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    x = View(np.abs(draw(shape, np.int64, seed)).astype(dtype), kind, "x")
    (y,) = run("CumSum", [x], [np.array(axis)], {"reverse": int(reverse)}, dynamic=dynamic)
    values = np.flip(wide(x.value), axis) if reverse else wide(x.value)
    total = np.cumsum(values, axis, dtype=values.dtype)
    assert_equal(y, np.flip(total, axis) if reverse else total, dtype)


@pytest.mark.parametrize("dtype", NUMBERS.values(), ids=NUMBERS)
@given(shape=filled, kind=views, seed=seeds, data=st.data(), largest=st.booleans(), dynamic=st.booleans())
@some
def test_select(
    dtype: type[np.generic],
    shape: tuple[int, ...],
    kind: str,
    seed: int,
    data: st.DataObject,
    largest: bool,
    dynamic: bool,
) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    k = data.draw(st.integers(0, shape[axis]))
    x = View(draw(shape, dtype, seed), kind, "x")
    attributes = {"axis": axis, "largest": int(largest)}
    values, places = run("TopK", [x], [np.array([k])], attributes, 2, dynamic)
    order = np.sort(wide(x.value), axis)
    order = np.flip(order, axis) if largest else order
    assert_equal(values, order.take(range(k), axis), dtype)
    assert_equal(values, np.take_along_axis(x.value, places, axis), dtype)


@pytest.mark.parametrize("dtype", PLAIN.values(), ids=PLAIN)
@given(shape=ranked, kind=views, seed=seeds, dynamic=st.booleans())
@some
def test_compact(dtype: type[np.generic], shape: tuple[int, ...], kind: str, seed: int, dynamic: bool) -> None:
    x = View(draw(shape, dtype, seed), kind, "x")
    (y,) = run("NonZero", [x], dynamic=dynamic)
    np.testing.assert_array_equal(y, np.array(np.nonzero(x.value)))


PRODUCTS = {**FLOATS, "int64": np.int64}
sizes = st.tuples(st.integers(1, 5), st.integers(0, 9), st.integers(0, 20), st.integers(0, 9))


@pytest.mark.parametrize("dtype", PRODUCTS.values(), ids=PRODUCTS)
@given(size=sizes, kinds=st.tuples(views, views), seed=seeds, dynamic=st.booleans())
@some
def test_matmul(
    dtype: type[np.generic], size: tuple[int, ...], kinds: tuple[str, ...], seed: int, dynamic: bool
) -> None:
    batch, m, k, n = size
    a, b = View(draw((batch, m, k), dtype, seed), kinds[0], "a"), View(draw((k, n), dtype, seed + 1), kinds[1], "b")
    (y,) = run("MatMul", [a, b], dynamic=dynamic)
    assert_equal(y, wide(a.value) @ wide(b.value), dtype)


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
@given(batch=st.integers(0, 3), kinds=st.tuples(views, views), seed=seeds)
@some
def test_conv(dtype: type[np.generic], batch: int, kinds: tuple[str, ...], seed: int) -> None:
    x = View(draw((batch, 3, 6, 5), dtype, seed), kinds[0], "x")
    w = View(draw((4, 3, 3, 2), dtype, seed + 1), kinds[1], "w")
    (y,) = run("Conv", [x, w], (), {"pads": [1, 0, 1, 1], "strides": [2, 1]})
    padded = np.pad(wide(x.value), [(0, 0), (0, 0), (1, 1), (0, 1)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 2), (2, 3))[:, :, ::2]
    assert_equal(y, np.einsum("nchwij,ocij->nohw", windows, wide(w.value)), dtype)


POOLED = {**FLOATS, "int8": np.int8, "uint8": np.uint8}


@pytest.mark.parametrize("dtype", POOLED.values(), ids=POOLED)
@given(batch=st.integers(0, 3), kind=views, seed=seeds, dynamic=st.booleans())
@some
def test_pool(dtype: type[np.generic], batch: int, kind: str, seed: int, dynamic: bool) -> None:
    x = View(draw((batch, 2, 6, 5), dtype, seed), kind, "x")
    windows = np.lib.stride_tricks.sliding_window_view(wide(x.value), (2, 4), (2, 3))
    (y,) = run("MaxPool", [x], (), {"kernel_shape": [2, 4]}, dynamic=dynamic)
    assert_equal(y, windows.max((4, 5)), dtype)
    if dtype in FLOATS.values():
        (y,) = run("AveragePool", [x], (), {"kernel_shape": [2, 4]}, dynamic=dynamic)
        assert_equal(y, windows.mean((4, 5)), dtype)


@pytest.mark.parametrize("dtype", EVERY.values(), ids=EVERY)
@given(batch=st.integers(0, 3), kind=views, seed=seeds, dynamic=st.booleans())
@some
def test_resize(dtype: type[np.generic], batch: int, kind: str, seed: int, dynamic: bool) -> None:
    x = View(draw((batch, 2, 4), dtype, seed), kind, "x")
    attributes = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    (y,) = run("Resize", [x], [None, np.array([1, 1, 2], np.float32)], attributes, dynamic=dynamic)
    assert_equal(y, x.value.repeat(2, 2), dtype)
    if dtype in FLOATS.values():
        attributes = {"mode": "linear", "coordinate_transformation_mode": "asymmetric"}
        (y,) = run("Resize", [x], [None, np.array([1, 1, 2], np.float32)], attributes, dynamic=dynamic)
        values = wide(x.value)
        after = np.concatenate([values[..., 1:], values[..., -1:]], 2)
        assert_equal(y, np.stack([values, (values + after) / 2], 3).reshape(batch, 2, 8), dtype)


@pytest.mark.parametrize("dtype", EVERY.values(), ids=EVERY)
@given(shape=ranked, kind=views, seed=seeds, dynamic=st.booleans())
@some
def test_pad_and_tile(dtype: type[np.generic], shape: tuple[int, ...], kind: str, seed: int, dynamic: bool) -> None:
    x = View(draw(shape, dtype, seed), kind, "x")
    (y,) = run("Pad", [x], [np.array([1, 2]), None, np.array([len(shape) - 1])], dynamic=dynamic)
    expected = np.pad(wide(x.value.astype(np.float32)), [(0, 0)] * (len(shape) - 1) + [(1, 2)])
    assert_equal(y, expected, dtype)
    (y,) = run("Tile", [x], [np.array([2] * len(shape))], dynamic=dynamic)
    assert_equal(y, np.tile(x.value, [2] * len(shape)), dtype)
