"""Edge cases of attributes, sizes and values: results as in ONNX Runtime, or an error that says what is wrong."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from emulator_harness import configured
from kernel_harness import make_model, run_op
from ort_cuda_plugin.abi.core import PluginError
from ort_cuda_plugin.abi.emulation import findings
from ort_cuda_plugin.ep.device.devices import LOWERING_VARIABLE
from ort_cuda_plugin.model.ir import NodeError
from ort_versions import api_version
from session_pair import FLOAT, INT64, Pair, floats, info
from test_ops_selection import check, on_cpu

Array = np.ndarray[Any, np.dtype[Any]]
SMALLEST, LARGEST = -(2**63), 2**63 - 1


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


def number(value: float, dtype: Any = np.int64) -> Array:
    return np.array(value, dtype)


# ---- sizes ----


@pytest.mark.parametrize("lowering", ["", "sm_90"])
def test_reductions_of_empty_rows_are_onnx_runtimes(lowering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One session reduces rows with and without elements. The checking mode reports threads that read beyond a row."""
    if lowering:
        monkeypatch.setenv(LOWERING_VARIABLE, lowering)
    operators = ("Mean", "Sum", "Max", "Prod", "LogSumExp")
    nodes = [helper.make_node(f"Reduce{name}", ["x", "axes"], [name], keepdims=0) for name in operators]
    nodes.append(helper.make_node("ReduceMean", ["codes", "axes"], ["mean of codes"], keepdims=0))
    inputs = [info("x", FLOAT, ["b", 4, "s", "n"]), info("codes", TensorProto.INT32, ["b", 4, "s", "n"])]
    outputs = [info(name, FLOAT, None) for name in operators] + [info("mean of codes", TensorProto.INT32, None)]
    with configured(check=1):
        pair = Pair(nodes, inputs, outputs, opset=18, axes=ints(2, 0, 3))
        for shape in ((2, 4, 3, 6), (2, 4, 0, 4), (0, 4, 2, 2), (2, 4, 3, 6)):
            pair.check(x=floats(*shape), codes=np.ones(shape, np.int32))
        assert not findings()


@pytest.mark.parametrize("step", [1, -1, 2, -2, 3, -3, 100, -100, 2**31, -(2**31), LARGEST, -LARGEST, SMALLEST])
def test_slices_are_onnx_runtimes_up_to_the_ends_of_64_bits(step: int) -> None:
    x = np.arange(10, dtype=np.float32)
    bounds = [SMALLEST, SMALLEST + 1, -11, -10, -1, 0, 9, 10, 2**31 - 1, LARGEST]
    pair = Pair(
        [helper.make_node("Slice", ["x", "start", "end", "axis", "step"], ["y"])],
        [info("x", FLOAT, [None]), *(info(name, INT64, [1]) for name in ("start", "end", "step"))],
        [info("y", FLOAT, None)],
        axis=ints(0),
    )
    for start in bounds:
        for end in bounds:
            pair.check(x=x, start=ints(start), end=ints(end), step=ints(step))
    (empty,) = pair.check(x=x[:0], start=ints(-1), end=ints(SMALLEST), step=ints(step))
    assert empty.shape == (0,)


@pytest.mark.parametrize("step", [LARGEST, SMALLEST, -1])
@pytest.mark.parametrize("dynamic", [False, True])
def test_slices_of_constant_bounds_at_the_ends_of_64_bits(step: int, dynamic: bool) -> None:
    x = np.arange(10, dtype=np.float32)
    for start, end in [(SMALLEST, LARGEST), (LARGEST, SMALLEST), (3, LARGEST), (3, SMALLEST)]:
        inputs = [x, ints(start), ints(end), ints(0), ints(step)]
        (expected,) = on_cpu(make_model("Slice", inputs), inputs)
        (actual,) = run_op("Slice", inputs, constant=[1, 2, 3, 4], dynamic=dynamic)
        np.testing.assert_array_equal(actual, expected, strict=True)


@pytest.mark.parametrize("sizes", [(3, 4), (0, 4), (3, 0)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_views_that_begin_at_the_end_lie_in_their_tensor(sizes: tuple[int, int], dynamic: bool) -> None:
    pair = Pair(
        [
            helper.make_node("Split", ["x", "parts"], ["whole", "nothing"]),
            helper.make_node("Slice", ["nothing", "one", "many", "one"], ["part"]),
            helper.make_node("Slice", ["x", "starts", "ends"], ["s"]),
            helper.make_node("ReduceSum", ["part"], ["of_part"]),
            helper.make_node("ReduceSum", ["s"], ["of_s"]),
        ],
        [info("x", FLOAT, [None, None] if dynamic else [*sizes])],
        [info("of_part", FLOAT, None), info("of_s", FLOAT, None)],
        parts=ints(sizes[0], 0),
        one=ints(1),
        many=ints(9),
        starts=ints(5, 1),
        ends=ints(9, 9),
    )
    assert pair.clusters == [["ReduceSum", "ReduceSum", "Slice", "Slice", "Split"]]
    pair.check(x=floats(*sizes))


@pytest.mark.parametrize("size", [0, 3])
def test_what_is_read_backward_lies_in_its_tensor(size: int) -> None:
    pair = Pair(
        [
            helper.make_node("Slice", ["x", "last", "before", "axis", "last"], ["r"]),
            helper.make_node("Pad", ["r", "pads"], ["y"]),
        ],
        [info("x", FLOAT, [None])],
        [info("y", FLOAT, None)],
        last=ints(-1),
        before=ints(SMALLEST),
        axis=ints(0),
        pads=ints(1, 2),
    )
    pair.check(x=floats(size))


@pytest.mark.parametrize(
    "limits",
    [
        (SMALLEST, SMALLEST + 3, 1),
        (LARGEST - 3, LARGEST, 2),
        (SMALLEST, LARGEST, 2**62),
        (SMALLEST, LARGEST, LARGEST),
        (LARGEST, SMALLEST, -(2**62)),
        (0, SMALLEST, -(2**60)),
        (SMALLEST, SMALLEST, -1),
        (LARGEST, LARGEST - 2, -1),
        (SMALLEST + 2, SMALLEST, -1),
        (2**53 + 1, 2**53 + 4, 1),
        (7, -7, -3),
    ],
)
def test_ranges_of_integers_are_exact_up_to_the_ends_of_64_bits(limits: tuple[int, int, int]) -> None:
    expected = np.array(range(*limits), np.int64)
    inputs = [number(limit) for limit in limits]
    for constant in [(), (2,), (0, 1, 2)]:
        (actual,) = run_op("Range", inputs, constant=constant)
        np.testing.assert_array_equal(actual, expected, strict=True)


@pytest.mark.parametrize("constant", [(), (2,)])
def test_a_step_of_range_without_a_magnitude_is_an_error_of_its_node(constant: tuple[int, ...]) -> None:
    inputs = [number(limit) for limit in (LARGEST, SMALLEST, SMALLEST)]
    with pytest.raises((NodeError, PluginError), match=r"\(Range\)'?: delta must be above -2\*\*63"):
        run_op("Range", inputs, constant=constant)


def test_a_range_of_too_many_elements_is_an_error_of_its_node() -> None:
    for limits in [(SMALLEST, LARGEST, 1), (LARGEST, SMALLEST, -1)]:
        with pytest.raises((NodeError, PluginError), match=r"\(Range\)'?: .*64"):
            run_op("Range", [number(limit) for limit in limits])


@pytest.mark.parametrize("limits", [(0, math.nan, 1), (math.nan, 1, 1), (0, 1, math.nan), (0, 1, 0)])
@pytest.mark.parametrize("constant", [(), (0, 1, 2)])
def test_a_range_of_floats_without_a_number_of_elements_is_an_error(limits: Any, constant: Any) -> None:
    with pytest.raises(
        (NodeError, PluginError),
        match=r"\(Range\)'?: start, limit and delta must have a quotient .* other than NaN, and delta must not be 0",
    ):
        run_op("Range", [number(limit, np.float32) for limit in limits], constant=constant)


@pytest.mark.parametrize(
    ("shapes", "axis"),
    [
        ([(3, 4), (0, 3)], 0),
        ([(0, 3), (3, 4)], 0),
        ([(3, 4), (0, 0)], 1),
        ([(2, 3, 4), (2, 0, 5), (2, 1, 4)], 1),
        ([(0, 3), (0, 4)], 0),
        ([(3, 0), (0, 4)], 0),
    ],
)
def test_the_other_dimensions_of_an_input_that_adds_nothing_to_concat_do_not_matter(shapes: Any, axis: int) -> None:
    names = [f"x{i}" for i in range(len(shapes))]
    pair = Pair(
        [helper.make_node("Concat", names, ["y"], axis=axis)],
        [info(name, FLOAT, [None] * len(shape)) for name, shape in zip(names, shapes, strict=True)],
        [info("y", FLOAT, None)],
    )
    feed = {name: floats(*shape) for name, shape in zip(names, shapes, strict=True)}
    pair.check(**feed)
    pair.check(**{name: floats(*shapes[0]) for name in names})
    pair.check(**feed)


def test_concat_refuses_rows_that_nothing_gives() -> None:
    """The CPU provider returns uninitialized memory for this contradiction, so the plugin reports an error."""
    with pytest.raises(PluginError, match=r"\(Concat\)': each input must have the size .* in dimension 1"):
        run_op("Concat", [floats(3, 4), floats(3, 0)], {"axis": 0}, dynamic=True)


@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool", "LpPool"])
@pytest.mark.parametrize(
    "attributes",
    [
        {"kernel_shape": [5, 5]},
        {"kernel_shape": [5, 5], "ceil_mode": 1},
        {"kernel_shape": [7, 3], "strides": [4, 1]},
        {"kernel_shape": [6, 6], "strides": [9, 9]},
        {"kernel_shape": [5, 5], "auto_pad": "VALID"},
        {"kernel_shape": [3, 3], "dilations": [2, 2]},
    ],
)
def test_pools_whose_window_is_larger_than_the_input_are_onnx_runtimes(op_type: str, attributes: Any) -> None:
    pair = Pair(
        [helper.make_node(op_type, ["x"], ["y"], **attributes)],
        [info("x", FLOAT, [None] * 4)],
        [info("y", FLOAT, None)],
        opset=19,
    )
    for size in (4, 9, 4):
        pair.check(x=floats(1, 2, size, size))


@pytest.mark.parametrize("op_type", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_convolution_to_no_channels_with_constant_weights(op_type: str, dynamic: bool) -> None:
    weights = floats(0, 2, 3, 3) if op_type == "Conv" else floats(2, 0, 3, 3)
    (result,) = run_op(op_type, [floats(1, 2, 5, 5), weights], constant=[1], dynamic=dynamic)
    assert result.shape == ((1, 0, 3, 3) if op_type == "Conv" else (1, 0, 7, 7))


def test_a_window_that_is_larger_by_more_than_a_stride_is_an_error_of_its_node() -> None:
    with pytest.raises(PluginError, match=r"\(MaxPool\)': the number of windows must be at least 0"):
        run_op("MaxPool", [floats(1, 1, 3, 3)], {"kernel_shape": [5, 5]}, dynamic=True)


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "wrap"])
def test_pad_adds_what_is_made_of_the_elements_that_it_leaves(mode: str) -> None:
    x = floats(4, 5)
    for pads in [(-1, -1, 2, 2), (1, 1, -2, -1), (-2, 0, 1, 0), (0, -3, 0, 1), (-1, -1, -1, -1)]:
        check("Pad", [x, ints(*pads)], constant=(1,), mode=mode)


def test_pad_has_nothing_to_add_to_an_axis_of_which_it_leaves_nothing() -> None:
    with pytest.raises(
        (NodeError, PluginError), match=r"\(Pad\)'?: data must have elements in each dimension that mode 'edge' pads"
    ):
        run_op("Pad", [floats(3, 4), ints(-3, 0, 3, 0)], {"mode": "edge"})


def test_an_empty_image_is_resized_to_nothing() -> None:
    pair = Pair(
        [helper.make_node("Resize", ["x", "", "", "sizes"], ["y"], mode="linear")],
        [info("x", FLOAT, [None] * 4)],
        [info("y", FLOAT, None)],
        sizes=ints(0, 2, 3, 5),
    )
    pair.check(x=floats(0, 2, 4, 5))


def test_shape_arithmetic_that_wraps_around_is_computed_on_the_device() -> None:
    pair = Pair(
        [
            helper.make_node("Shape", ["x"], ["n"]),
            helper.make_node("Mul", ["n", "large"], ["m"]),
            helper.make_node("Mul", ["m", "four"], ["y"]),
        ],
        [info("x", FLOAT, ["n"])],
        [info("y", INT64, [1])],
        large=ints(2**61),
        four=ints(8),
    )
    assert pair.check(x=floats(3))[0].tolist() == [0]


def test_constants_that_no_plan_can_hold_name_their_node() -> None:
    """With n = 0 no tensor is too large for memory, but its strides do not fit 64 bits."""
    nodes = [
        helper.make_node("Expand", ["x", "shape"], ["a"], "expand"),
        helper.make_node("Transpose", ["a"], ["b"], "transpose", perm=[2, 1, 0]),
        helper.make_node("Neg", ["b"], ["y"], "neg"),
    ]
    inputs = [info("x", TensorProto.FLOAT, [1, 1, "n"])]
    with pytest.raises(Exception, match=r"node (expand \(Expand\)|neg \(Neg\)): the integer \d+ does not fit 64 bits"):
        Pair(nodes, inputs, [info("y", FLOAT, None)], shape=ints(2**40, 2**40, 1))


# ---- values ----


def test_a_bound_of_clip_that_is_no_number_bounds_nothing() -> None:
    x = np.array([math.nan, 1, 5, math.inf, -math.inf], np.float32)
    for low, high in [(math.nan, 2), (0, math.nan), (math.nan, math.nan), (4, 2), (-math.inf, math.inf)]:
        check("Clip", [x, number(low, np.float32), number(high, np.float32)], constant=(1, 2))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_without_a_bound_clip_still_gives_finite_numbers(dtype: Any) -> None:
    x = np.array([math.nan, 1, 5, math.inf, -math.inf], dtype)
    for bounds in ([], [number(2, dtype)], [None, number(2, dtype)]):
        check("Clip", [x, *bounds])
    (bits,) = run_op("Clip", [x.astype(ml_dtypes.bfloat16)])
    assert bits.view(np.uint16)[3:].tolist() == [0x7F7F, 0xFF7F]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_integer_quotients_without_a_value_end_nothing(dtype: Any) -> None:
    """A division of the smallest integer by -1, or by 0, has a defined result; in the CPU provider it is a crash."""
    smallest = np.iinfo(dtype).min
    a, b = np.array([smallest, 7, 7], dtype), np.array([-1, 0, -1], dtype)
    assert run_op("Div", [a, b])[0].tolist() == [smallest, 0, -7]
    for fmod in (0, 1):
        assert run_op("Mod", [a, b], {"fmod": fmod})[0].tolist() == [0, 0, 0]


def test_remainders_of_64_bit_integers_are_exact() -> None:
    a, b = ints(SMALLEST + 1, LARGEST), ints(2, 10)
    assert run_op("Mod", [a, b], {"fmod": 1})[0].tolist() == [-1, 7]


@pytest.mark.parametrize(("size", "parts"), [(3, 4), (6, 4), (0, 3), (3, 5), (7, 5)])
def test_parts_of_a_split_beyond_the_dimension(size: int, parts: int) -> None:
    """The plugin computes an empty last part, and refuses a negative one, as the CPU provider of 1.32 does."""
    node = helper.make_node("Split", ["x"], [f"y{i}" for i in range(parts)], num_outputs=parts)
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [f"n{name}"]) for name in node.output]
    graph = helper.make_graph([node], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])], outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.arange(size, dtype=np.float32)
    if parts == 5 or api_version(ort.__version__) < 32:  # older CPU providers refuse the empty part, too
        with pytest.raises(Exception, match=r"Invalid num_outputs value|Invalid value in 'split'"):
            session.run(None, {"x": x})
    else:
        assert [part.size for part in session.run(None, {"x": x})] == [math.ceil(size / parts)] * (parts - 1) + [0]
    if parts == 5:
        with pytest.raises((NodeError, PluginError), match="the last of num_outputs parts must be at least 0"):
            run_op("Split", [x], {"num_outputs": parts}, 18, outputs=parts, dynamic=True)
        return
    found = run_op("Split", [x], {"num_outputs": parts}, 18, outputs=parts, dynamic=True)
    np.testing.assert_array_equal(np.concatenate(found), x)
    assert found[-1].size == 0


# ---- invalid inputs ----


@pytest.mark.parametrize(
    ("op_type", "inputs", "attributes", "outputs", "text"),
    [
        ("TopK", [floats(2, 4), ints(1, 1)], {}, 2, "k must have one element, got 2"),
        ("Trilu", [floats(3, 4), ints(1, 2)], {}, 1, "k must have one element, got 2"),
        ("CumSum", [floats(2, 3), ints(0, 1)], {}, 1, "axis must have one element, got 2"),
        ("OneHot", [ints(1), number(math.nan, np.float32), floats(2)], {}, 1, "depth must be finite, got nan"),
        ("Pad", [floats(3, 4), ints(1, 0, 0, 0), floats(2)], {}, 1, "an input that must have one element"),
        ("Pad", [floats(3, 4), ints(1, 0, 0, 0), floats(0)], {}, 1, "an input that must have one element"),
        ("Clip", [floats(3), floats(0)], {}, 1, "each of min and max must have one element"),
        ("Split", [floats(4, 2)], {"num_outputs": 3}, 2, "num_outputs must be 2, got 3"),
        (
            "Split",
            [floats(4, 2), ints(2, 2)],
            {"num_outputs": 2},
            2,
            "split and num_outputs must not be given together, got both",
        ),
        ("Split", [floats(3)], {"num_outputs": 5}, 5, "the last of num_outputs parts must be at least 0, got"),
        ("Split", [floats(7)], {"num_outputs": 5}, 5, "the last of num_outputs parts must be at least 0, got"),
        ("Reshape", [floats(2, 3), ints(6).reshape(1, 1)], {}, 1, "shape must have rank 1, got rank 2"),
    ],
)
def test_contradictions_are_refused_by_name(
    op_type: str, inputs: Any, attributes: Any, outputs: int, text: str
) -> None:
    for dynamic in (False, True):
        with pytest.raises((NodeError, PluginError), match=rf"\({op_type}\)'?: .*{text}"):
            run_op(op_type, inputs, attributes, outputs=outputs, dynamic=dynamic, constant=range(1, len(inputs)))
