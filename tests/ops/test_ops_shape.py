"""Operators that move elements and compute shapes, compared with NumPy, and kernels on strided views."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx.reference import ReferenceEvaluator

from kernel_harness import make_model, run_model, run_op
from ort_cuda_plugin.abi.core import PluginError
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.model.ir import InvalidModel, NodeError, Unsupported
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.lowering.context import DeviceProperties

Array = np.ndarray
few = settings(max_examples=12)
dynamic = st.booleans()
dtypes = st.sampled_from(["float32", "float16", "int32", "int64", "bool", "int8"])
shapes = hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=6)


def numbered(shape: tuple[int, ...], dtype: str = "float32") -> Array:
    """Return elements numbered in C order, modulo 120 (bool: 2), which reveal misplaced elements."""
    values = np.arange(math.prod(shape)).reshape(shape)
    return (values % 2).astype(bool) if dtype == "bool" else (values % 120).astype(dtype)


def assert_same(actual: Array, expected: Array) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual, expected)


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


@given(shape=shapes, dtype=dtypes, data=st.data(), dynamic=dynamic)
@few
def test_slices_of_any_step_are_those_of_onnx(
    shape: tuple[int, ...], dtype: str, data: st.DataObject, dynamic: bool
) -> None:
    axes = data.draw(st.lists(st.integers(0, len(shape) - 1), unique=True, min_size=1))
    bound = st.integers(-9, 9) | st.sampled_from([2**63 - 1, -(2**63) + 1])
    starts, ends = ([data.draw(bound) for _ in axes] for _ in range(2))
    steps = [data.draw(st.integers(-3, 3).filter(bool)) for _ in axes]
    x = numbered(shape, dtype)
    index = [slice(None)] * x.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        # With a negative step, an end before the first element, or INT64_MAX, includes the first element: None in
        # Python. A start before the first element is clamped to it.
        if step < 0:
            start = max(start, -x.shape[axis])
        to_the_first = step < 0 and (end < -x.shape[axis] or end == 2**63 - 1)
        index[axis] = slice(start, None if to_the_first else end, step)
    inputs = [x, *(ints(*values) for values in (starts, ends, axes, steps))]
    (actual,) = run_op("Slice", inputs, constant=[1, 2, 3, 4], dynamic=dynamic)
    assert_same(actual, x[tuple(index)])


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("shape", "starts", "ends", "steps"),
    [
        ((2, 0, 3), (0, -1), (9, -(2**62)), (1, -1)),
        ((2, 3), (2, 3), (9, 9), (1, 1)),
        ((2, 3), (-9, -9), (0, 0), (-1, -2)),
    ],
)
def test_kernels_run_on_slices_without_elements_wherever_they_begin(
    shape: tuple[int, ...], starts: tuple[int, ...], ends: tuple[int, ...], steps: tuple[int, ...], dynamic: bool
) -> None:
    model = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": 18]>
        empty (float[{", ".join(map(str, shape))}] x) => (float y)
        <int64[2] s = {{{", ".join(map(str, starts))}}}, int64[2] e = {{{", ".join(map(str, ends))}}},
         int64[2] a = {{0, 1}}, int64[2] by = {{{", ".join(map(str, steps))}}}>
        {{ part = Slice (x, s, e, a, by)  y = ReduceSum <keepdims = 0> (part) }}
    """)
    assert_same(run_model(model, [numbered(shape)], dynamic)[0], np.array(0, np.float32))


@given(shape=shapes, dtype=dtypes, data=st.data(), dynamic=dynamic)
@few
def test_transposes_and_sums_of_transposes(
    shape: tuple[int, ...], dtype: str, data: st.DataObject, dynamic: bool
) -> None:
    perm = data.draw(st.permutations(range(len(shape))))
    x = numbered(shape, dtype)
    (actual,) = run_op("Transpose", [x], {"perm": perm}, dynamic=dynamic)
    assert_same(actual, np.transpose(x, perm))


@given(shape=shapes, dtype=dtypes, data=st.data(), dynamic=dynamic)
@few
def test_concat_puts_together_what_split_takes_apart(
    shape: tuple[int, ...], dtype: str, data: st.DataObject, dynamic: bool
) -> None:
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    x = numbered(shape, dtype)
    cuts = sorted(data.draw(st.lists(st.integers(0, x.shape[axis]), max_size=3)))
    parts = np.split(x, cuts, axis)
    (actual,) = run_op("Concat", parts, {"axis": axis}, dynamic=dynamic)
    assert_same(actual, x)
    sizes = ints(*(part.shape[axis] for part in parts))
    for got, part in zip(
        run_op("Split", [x, sizes], {"axis": axis}, outputs=len(parts), constant=[1], dynamic=dynamic),
        parts,
        strict=True,
    ):
        assert_same(got, part)


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "wrap"])
@given(shape=hnp.array_shapes(max_dims=3, min_side=2, max_side=5), dtype=dtypes, data=st.data(), dynamic=dynamic)
@few
def test_pad_in_every_mode(mode: str, shape: tuple[int, ...], dtype: str, data: st.DataObject, dynamic: bool) -> None:
    x = numbered(shape, dtype)
    low = -1 if mode == "constant" else 0
    counts = [(data.draw(st.integers(low, 7)), data.draw(st.integers(low, 7))) for _ in shape]
    pads = ints(*(begin for begin, _ in counts), *(end for _, end in counts))
    fill = np.ones((), x.dtype)
    inputs = [x, pads, fill] if mode == "constant" else [x, pads]
    (actual,) = run_op("Pad", inputs, {"mode": mode}, constant=[1], dynamic=dynamic)
    cropped = x[tuple(slice(max(-b, 0), dim - max(-e, 0)) for dim, (b, e) in zip(shape, counts, strict=True))]
    widths = [(max(b, 0), max(e, 0)) for b, e in counts]
    options: dict[str, Any] = {"mode": mode} | ({"constant_values": fill} if mode == "constant" else {})
    padded: np.ndarray = np.pad(cropped, widths, **options)
    assert_same(actual, padded)


@given(shape=shapes, dtype=dtypes, data=st.data(), dynamic=dynamic)
@few
def test_tile_and_expand_repeat_elements(
    shape: tuple[int, ...], dtype: str, data: st.DataObject, dynamic: bool
) -> None:
    x = numbered(shape, dtype)
    repeats = [data.draw(st.integers(0, 3)) for _ in shape]
    assert_same(run_op("Tile", [x, ints(*repeats)], constant=[1], dynamic=dynamic)[0], np.tile(x, repeats))
    narrow = x[tuple(slice(0, 1) if data.draw(st.booleans()) else slice(None) for _ in shape)]
    target = (2, *np.broadcast_shapes(narrow.shape, tuple(1 if d != 1 else 3 for d in narrow.shape)))
    (actual,) = run_op("Expand", [narrow, ints(*target)], constant=[1], dynamic=dynamic)
    assert_same(actual, np.broadcast_to(narrow, target))


@given(
    shape=hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=6),
    index_shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    dtype=dtypes,
    index_type=st.sampled_from(["int32", "int64"]),
    data=st.data(),
    dynamic=dynamic,
)
@few
def test_gather_takes_slices_along_an_axis(
    shape: tuple[int, ...],
    index_shape: tuple[int, ...],
    dtype: str,
    index_type: str,
    data: st.DataObject,
    dynamic: bool,
) -> None:
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    x = numbered(shape, dtype)
    indices = data.draw(hnp.arrays(index_type, index_shape, elements=st.integers(-x.shape[axis], x.shape[axis] - 1)))
    constant = data.draw(st.sampled_from([[], [1]]))
    (actual,) = run_op("Gather", [x, indices], {"axis": axis}, constant=constant, dynamic=dynamic)
    assert_same(actual, np.take(x, indices, axis))


def test_gather_outside_the_dimension_gives_zero_and_reads_nothing() -> None:
    x = np.ones((3, 2), np.float32)
    (actual,) = run_op("Gather", [x, ints(0, 3, -4, 2**40)])
    assert_same(actual, np.array([[1, 1], [0, 0], [0, 0], [0, 0]], np.float32))


@given(shape=hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=6), data=st.data(), dynamic=dynamic)
@few
def test_gather_and_scatter_elements_are_inverse(shape: tuple[int, ...], data: st.DataObject, dynamic: bool) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    x = numbered(shape)
    order = np.argsort(np.random.default_rng(1).random(shape), axis=axis)
    (gathered,) = run_op("GatherElements", [x, order], {"axis": axis}, dynamic=dynamic)
    assert_same(gathered, np.take_along_axis(x, order, axis))
    (scattered,) = run_op("ScatterElements", [np.zeros_like(x), order, gathered], {"axis": axis}, dynamic=dynamic)
    assert_same(scattered, x)


@given(dynamic=dynamic, length=st.integers(1, 3), batch=st.integers(0, 1))
@few
def test_gather_nd_and_scatter_nd_select_by_index_tuples(dynamic: bool, length: int, batch: int) -> None:
    x = numbered((3, 4, 2, 5))
    if batch + length > 4 or (batch and length > 3):
        return
    lead = (3, 2) if batch else (6,)
    limits = x.shape[batch : batch + length]
    random = np.random.default_rng(2)
    indices = np.stack([random.integers(-limit, limit, lead) for limit in limits], axis=-1)
    model = make_model("GatherND", [x, indices], {"batch_dims": batch})
    (expected,) = ReferenceEvaluator(model).run(None, {"x0": x, "x1": indices % np.array(limits)})
    declared = read_model(model, dynamic)
    declared.inputs[1].shape = indices.shape  # GatherND needs a static length of index tuples
    from kernel_harness import run_graph

    assert_same(run_graph(declared, [x, indices])[0], np.asarray(expected))
    if not batch:
        places = np.unique(indices % np.array(limits), axis=0)
        updates = -1 - numbered((len(places), *x.shape[length:]))
        expected = x.copy()
        expected[tuple(places.T)] = updates
        assert_same(run_op("ScatterND", [x, places, updates])[0], expected)


@given(
    shape=st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(1, 5)),
    k=st.integers(-6, 6),
    upper=st.booleans(),
    dynamic=dynamic,
)
@few
def test_triangles_and_one_hot(shape: tuple[int, ...], k: int, upper: bool, dynamic: bool) -> None:
    x = numbered(shape) + 1
    (actual,) = run_op("Trilu", [x, np.array(k)], {"upper": int(upper)}, constant=[1], dynamic=dynamic)
    assert_same(actual, (np.triu if upper else np.tril)(x, k))
    indices = numbered(shape[:2], "int64") % 9 - 4
    values = np.array([2.0, 5.0], np.float32)
    (actual,) = run_op("OneHot", [indices, np.array(4), values], {"axis": 1}, constant=[1], dynamic=dynamic)
    classes = np.where(indices < 0, indices + 4, indices)
    assert_same(actual, np.where(classes[:, None] == np.arange(4)[:, None], values[1], values[0]))


@given(shape=hnp.array_shapes(max_dims=4, min_side=1, max_side=6), data=st.data(), dynamic=dynamic)
@few
def test_reshape_copies_and_infers_dimensions(shape: tuple[int, ...], data: st.DataObject, dynamic: bool) -> None:
    x = numbered(shape)
    target = list(shape)
    inferred = data.draw(st.integers(0, len(shape) - 1))
    target[inferred] = -1
    for axis in range(len(shape)):
        if axis != inferred and data.draw(st.booleans()):
            target[axis] = 0
    assert_same(run_op("Reshape", [x, ints(*target)], constant=[1], dynamic=dynamic)[0], x)
    assert_same(run_op("Reshape", [x, ints(-1)], constant=[1], dynamic=dynamic)[0], x.reshape(-1))
    assert_same(run_op("Flatten", [x], {"axis": 1}, dynamic=dynamic)[0], x.reshape(shape[0], -1))


def test_a_shape_that_is_an_input_is_read_back() -> None:
    x = numbered((4, 6))
    assert_same(run_op("Reshape", [x, ints(3, -1)])[0], x.reshape(3, 8))
    assert_same(run_op("Expand", [x[:1], ints(5, 6)])[0], np.broadcast_to(x[:1], (5, 6)))
    assert_same(run_op("Tile", [x, ints(2, 1)])[0], np.tile(x, (2, 1)))
    assert_same(run_op("Slice", [x, ints(1), ints(-1), ints(1), ints(2)], constant=[3])[0], x[:, 1:-1:2])
    assert_same(run_op("Range", [np.array(7), np.array(-4), np.array(-3)])[0], np.arange(7, -4, -3))
    assert_same(run_op("ConstantOfShape", [ints(2, 3)])[0], np.zeros((2, 3), np.float32))


def test_a_shape_that_does_not_fit_is_an_error_of_the_run_that_names_the_node() -> None:
    with pytest.raises(PluginError, match=r"Reshape.*shape must have the product 24"):
        run_op("Reshape", [numbered((4, 6)), ints(5, 5)], dynamic=False)
    with pytest.raises((NodeError, InvalidModel), match="shape must have the product 24"):
        run_op("Reshape", [numbered((4, 6)), ints(5, 5)], constant=[1])


@pytest.mark.parametrize(
    ("operator", "shape"),
    [("Reshape", (-2, -3)), ("Reshape", (-6, -1)), ("Expand", (1, -3)), ("ConstantOfShape", (-2, -3))],
)
def test_a_negative_dimension_is_an_error_though_the_number_of_elements_fits(
    operator: str, shape: tuple[int, ...]
) -> None:
    inputs = {"Reshape": [numbered((2, 3)), ints(*shape)], "Expand": [numbered((1, 1)), ints(*shape)]}
    with pytest.raises(PluginError, match=rf"{operator}.* shape must be at least"):
        run_op(operator, inputs.get(operator, [ints(*shape)]))


@pytest.mark.parametrize("kept", [0, 2, 6])
def test_a_reshape_of_nothing_infers_from_the_dimensions_that_are_not_empty(kept: int) -> None:
    """With allowzero, the size of -1 follows from the other dimensions even if the tensor is empty (kept = 0)."""
    x = np.zeros((kept, 20, 16), np.float32)
    (actual,) = run_op("Reshape", [x, ints(kept, -1, 10)], {"allowzero": 1})
    assert actual.shape == (kept, 32, 10)


def test_a_reshape_of_nothing_that_tells_no_size_is_an_error_of_the_run() -> None:
    x = np.zeros((0, 7), np.float32)
    with pytest.raises((PluginError, NodeError), match=r"Reshape.* no -1 if another dimension of the result is 0"):
        run_op("Reshape", [x, ints(0, -1)])
    with pytest.raises((PluginError, NodeError), match=r"Reshape.*nonzero dimensions whose product divides 7"):
        run_op("Reshape", [x, ints(0, 3, -1)], {"allowzero": 1})


VIEWS = """
<ir_version: 8, opset_import: ["": 18]>
views (float[{dims}] x, float[{other}] z) => (y, total, best, soft)
{{
    two = Constant <value_ints = [2]> ()
    minus = Constant <value_ints = [-1]> ()
    far = Constant <value_ints = [-9223372036854775807]> ()
    one = Constant <value_ints = [1]> ()
    reversed = Slice (x, minus, far, one, minus)
    turned = Transpose <perm = [2, 0, 1]> (reversed)
    y = Add (turned, z)
    total = ReduceSum <keepdims = 0> (turned, two)
    best = ArgMax <axis = 1> (turned)
    soft = Softmax <axis = -1> (turned)
}}
"""


@given(shape=st.tuples(*[st.integers(1, 5) | st.just(40)] * 3), wide=st.booleans(), dynamic=dynamic)
@few
def test_kernels_read_views_of_any_strides(shape: tuple[int, ...], wide: bool, dynamic: bool) -> None:
    a, _, c = shape
    x = np.random.default_rng(3).random(shape, np.float32)
    z = np.ones((c, a if wide else 1, 1), np.float32)
    text = VIEWS.format(dims=",".join(map(str, shape)), other=",".join(map(str, z.shape)))
    actual = run_model(onnx.parser.parse_model(text), [x, z], dynamic)
    turned = np.transpose(x[:, ::-1], (2, 0, 1))
    soft = np.exp(turned - turned.max(-1, keepdims=True))
    expected = [turned + z, turned.sum(2), turned.argmax(1)[:, None], soft / soft.sum(-1, keepdims=True)]
    assert len(actual) == 4
    for got, want in zip(actual, expected, strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-5)


SHAPE_ARITHMETIC = """
<ir_version: 8, opset_import: ["": 17]>
heads (float[batch, sequence, hidden] x) => (y)
{
    shape = Shape (x)
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    heads = Constant <value_ints = [4]> ()
    axis = Constant <value_ints = [0]> ()
    minus = Constant <value_ints = [-1]> ()
    batch = Gather (shape, zero)
    sequence = Gather (shape, one)
    twice = Mul (batch, sequence)
    rows = Unsqueeze (twice, axis)
    target = Concat <axis = 0> (rows, heads, minus)
    y = Reshape (x, target)
}
"""


def test_shape_arithmetic_launches_nothing() -> None:
    model = onnx.parser.parse_model(SHAPE_ARITHMETIC)
    x = numbered((2, 3, 8))
    assert_same(run_model(model, [x])[0], x.reshape(6, 4, 2))
    cluster = CompiledCluster(read_model(model), DeviceProperties())
    cluster.prepare()
    assert not cluster.build([(2, 3, 8)], []).kernels


def test_what_is_not_implemented_is_declined_with_its_kind() -> None:
    square = np.ones((2, 2), np.int32)
    image, grid = np.ones((1, 1, 2, 2), bool), np.zeros((1, 2, 2, 2), np.float32)
    calls: list[tuple[str, str, Callable[[], object]]] = [
        ("alpha, beta.* is", "attribute", lambda: run_op("Gemm", [square, square], {"alpha": 2.0})),
        (
            "mode for X of type bool is",
            "dtype",
            lambda: run_op("GridSample", [image, grid], {"mode": "linear"}, 20),
        ),
    ]
    for error, kind, call in calls:
        with pytest.raises(NodeError, match=error) as caught:
            call()
        assert isinstance(caught.value.__cause__, Unsupported)
        assert caught.value.__cause__.kind == kind


def scalars(dtype: Any, *values: float) -> list[Array]:
    return [np.array(value, dtype) for value in values]


RANGES = [(1, 5, 2), (0.25, -1, -0.25), (0, 1, 0.1), (3, 3, 1), (5, 1, 1), (-1, 2, 3), (0, 300, 1)]


@pytest.mark.parametrize("limits", RANGES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("constant", [(), (0, 2), (0, 1, 2)])
def test_range_of_floats_has_the_elements_below_its_limit(
    limits: tuple[Any, ...], dtype: type[np.generic], constant: tuple[int, ...]
) -> None:
    start, limit, delta = scalars(dtype, *limits)
    stash = np.float32 if np.dtype(dtype).itemsize == 2 else dtype
    first, last, step = (x.astype(stash) for x in (start, limit, delta))
    steps = np.ceil(float(last - first) / float(step))
    expected = (first + np.arange(steps if steps > 0 else 0).astype(stash) * step).astype(dtype)
    opset = 27 if np.dtype(dtype).itemsize == 2 else 11
    actual = run_op("Range", [start, limit, delta], opset=opset, constant=constant)[0].view(dtype)
    assert actual.shape == expected.shape
    # start + i * delta may be rounded once (FMA) or twice.
    np.testing.assert_allclose(actual.astype(float), expected.astype(float), rtol=2 * float(ml_dtypes.finfo(dtype).eps))


def test_range_of_halves_counts_in_the_type_of_stash_type() -> None:
    # Counting in bfloat16 would stop at 256, since 256 + 1 rounds to 256.
    start, limit, delta = scalars(ml_dtypes.bfloat16, 250, 270, 1)
    for stash_type in (1, 11):
        (actual,) = run_op("Range", [start, limit, delta], {"stash_type": stash_type}, opset=27)
        assert_same(actual.view(ml_dtypes.bfloat16), np.arange(250, 270).astype(ml_dtypes.bfloat16))
    with pytest.raises(NodeError, match="stash_type must be one of 1, 11, got 10"):
        run_op("Range", [start, limit, delta], {"stash_type": 10}, opset=27)


@pytest.mark.parametrize("limits", [(1, 9, 2), (9, 1, -3), (0, 5, -1), (4, 4, 1)])
@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64])
@pytest.mark.parametrize("constant", [(), (2,), (0, 1, 2)])
def test_range_of_integers_is_that_of_python(
    limits: tuple[int, ...], dtype: type[np.generic], constant: tuple[int, ...]
) -> None:
    assert_same(run_op("Range", scalars(dtype, *limits), constant=constant)[0], np.arange(*limits, dtype=dtype))


RANGE_OF_COMPUTED = """
<ir_version: 8, opset_import: ["": 18]>
computed (float a, float b, float d) => (int64[n] y)
{
    start = Cast <to = 7> (a)
    limit = Cast <to = 7> (b)
    delta = Cast <to = 7> (d)
    y = Range (start, limit, delta)
}
"""


@pytest.mark.parametrize("limits", [(4, 16, 2), (16, 4, -5), (4, 16, -2)])
def test_range_of_integers_that_the_device_computes(limits: tuple[int, ...]) -> None:
    (y,) = run_model(onnx.parser.parse_model(RANGE_OF_COMPUTED), scalars(np.float32, *limits))
    assert_same(y, np.arange(*limits))


def test_range_of_floats_in_a_plan_for_the_sizes_of_a_run() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]>
        positions (float[n] x, float limit) => (float[n] sum)
        <float start = {0.0}, float delta = {0.5}>
        { places = Range (start, limit, delta)  sum = Add (x, places) }
    """)
    (total,) = run_model(model, [np.ones(4, np.float32), np.array(2, np.float32)])
    assert_same(total, np.array([1, 1.5, 2, 2.5], np.float32))


@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_range_with_a_delta_of_0_names_the_node(dtype: type[np.generic]) -> None:
    with pytest.raises(PluginError, match=r"y0 \(Range\)'?: (delta must not be 0|start, limit and delta must)"):
        run_op("Range", scalars(dtype, 1, 5, 0))
    with pytest.raises(NodeError, match=r"delta (must not be|other than) 0"):
        run_op("Range", scalars(dtype, 1, 5, 0), constant=[0, 1, 2])


def test_a_range_too_long_to_allocate_fails_the_run() -> None:
    with pytest.raises(PluginError, match=r"2\^60 bytes|memory"):
        run_op("Range", scalars(np.float32, 0, math.inf, 1))
