"""Direct convolution and pooling: image borders, all strip sizes, and the padding of a launch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kernel_harness import Array, make_model, run_op
from nn_reference import check_close, check_op, conv_transpose, noise, pool, tolerance_of
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.compiler.compile import compile_kernel
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.targets import Target
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.kernels.conv.direct_conv import Phases, rows_of_thread, strip_shape
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.model.recipes import pack_strips
from ort_cuda_plugin.program.lowering.context import DeviceProperties

EVERY_FORM = pytest.mark.parametrize("form", ["emulated", "gpu"], indirect=True)
"""Operators lowered for the emulated device and for a GPU; the emulated device runs both."""


@pytest.fixture
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    properties = DeviceProperties(emulated=request.param == "emulated")
    monkeypatch.setattr(OpenDevice, "properties", lambda self: properties)
    return iter(())


def kernels(
    op_type: str, inputs: list[Array], attributes: Mapping[str, Any] | None = None, *, emulated: bool = True
) -> list[KernelSpec]:
    """Return the kernels that an operator launches on the emulated device or on a GPU."""
    model = make_model(op_type, inputs, attributes, constant=range(1, len(inputs)))
    return CompiledCluster(read_model(model, False), DeviceProperties(emulated=emulated)).prepare().kernels


# ---- convolutions ----


@EVERY_FORM
@pytest.mark.parametrize("dilation", [1, 8])
@pytest.mark.parametrize("rows", [1, 3, 11])
def test_conv_at_borders_and_between_them(form: None, rows: int, dilation: int) -> None:
    inputs = [noise(1, (2, 5, 7, 83)), noise(2, (rows, 5, 3, 3)), noise(3, (rows,))]
    reach = 2 * dilation
    pads = [dilation, dilation - 1, reach - 1, reach + 1]
    check_op("Conv", inputs, {"pads": pads, "dilations": [dilation] * 2}, constant=[1])


@EVERY_FORM
@pytest.mark.parametrize("stride", [2, 3])
def test_conv_with_a_stride(form: None, stride: int) -> None:
    inputs = [noise(1, (1, 4, 9, 150)), noise(2, (6, 2, 3, 5)), noise(3, (6,))]
    attributes = {"strides": [1, stride], "pads": [0, 2, 1, 2], "group": 2}
    check_op("Conv", inputs, attributes, constant=[1], dynamic=True)


@EVERY_FORM
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_conv_of_each_type(form: None, dtype: str) -> None:
    inputs = [noise(1, (1, 6, 5, 70), dtype), noise(2, (4, 6, 3, 3), dtype), noise(3, (4,), dtype)]
    check_op("Conv", inputs, {"pads": [1, 1, 1, 1]}, constant=[1])
    check_op("Conv", inputs, {"pads": [1, 1, 1, 1], "strides": [1, 2]})


@EVERY_FORM
@pytest.mark.parametrize("op_type", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("constant", [True, False])
def test_bfloat16_accumulates_in_float32(form: None, op_type: str, constant: bool) -> None:
    x, w = (noise(seed, shape).astype(ml_dtypes.bfloat16) for seed, shape in ((1, (1, 4, 3, 40)), (2, (4, 4, 3, 3))))
    attributes: dict[str, Any] = {"pads": [1, 1, 1, 1]}
    (result,) = run_op(op_type, [x, w], attributes, 22, constant=[1] * constant)
    (wanted,) = run_op(op_type, [x.astype(np.float32), w.astype(np.float32)], attributes, 22)
    check_close(result.view(ml_dtypes.bfloat16).astype(np.float64), wanted.astype(np.float64), 2**-8)


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("rows", [2, 17])
def test_conv_packs_weights_before_or_in_the_run(constant: bool, rows: int) -> None:
    inputs = [noise(1, (2, 6, 5, 50)), noise(2, (2 * rows, 3, 1, 2)), noise(3, (2 * rows,))]
    check_op("Conv", inputs, {"group": 2}, constant=[1] * constant)


@EVERY_FORM
def test_conv_in_three_dimensions(form: None) -> None:
    inputs = [noise(1, (2, 3, 4, 5, 40)), noise(2, (2, 3, 2, 3, 3))]
    check_op("Conv", inputs, {"pads": [1, 0, 2, 0, 1, 2], "dilations": [1, 2, 1]}, constant=[1])


def test_a_kernel_that_padding_covers_more_than_the_image() -> None:
    check_op("Conv", [noise(1, (1, 2, 2, 3)), noise(2, (1, 2, 3, 3))], {"pads": [4, 5, 4, 60]}, constant=[1])


def lanes(specs: list[KernelSpec]) -> tuple[int, int]:
    """Return (output channels, output pixels) per thread, or per block of an implicit GEMM, of the one convolution."""
    (found,) = [match for spec in specs if (match := re.match(r"conv2d_(\d+)x(\d+)", spec.name))]
    return int(found[1]), int(found[2])


@pytest.mark.parametrize(("rows", "limit"), [(1, 1.1), (2, 1.1), (3, 1.1), (8, 1.1), (16, 1.1), (24, 1.4), (64, 1.1)])
def test_few_lanes_of_a_convolution_are_padding(rows: int, limit: float) -> None:
    """Padding adds at most 10 % (24 channels: 40 %) to the work. From 17 channels on, GEMM tiles have 16 to 64 rows."""
    thread_rows, width = lanes(kernels("Conv", [noise(1, (1, 4, 4, 1024)), noise(2, (rows, 4, 3, 3))], {}))
    columns = 1022
    computed = -(-rows // thread_rows) * thread_rows * (-(-columns // width) * width)
    assert computed <= limit * rows * columns


def test_a_thread_has_as_many_rows_as_leave_few_empty() -> None:
    assert [rows_of_thread(rows, emulated=True) for rows in (1, 3, 8, 9, 12, 17)] == [1, 3, 8, 5, 6, 6]
    assert [rows_of_thread(rows, emulated=False) for rows in (1, 2, 3, 9, 17, 96)] == [1, 2, 4, 12, 12, 16]


def test_a_gpu_loads_four_weights_of_a_strip_at_once() -> None:
    """Groups of four channels are too small for tensor cores, so this is a direct convolution."""
    inputs = [noise(1, (1, 8, 4, 64), "float16"), noise(2, (16, 4, 3, 3), "float16")]
    (spec,) = kernels("Conv", inputs, {"group": 2}, emulated=False)
    ptx = compile_kernel(spec, Target.cuda(9, 0)).ptx
    assert b"ld.global.v4.f32" in ptx
    assert b"ld.global.f32" not in ptx


# ---- transposed convolutions ----


@EVERY_FORM
@pytest.mark.parametrize(
    ("kernel", "stride", "dilation"), [(2, 2, 1), (4, 2, 1), (3, 2, 1), (3, 1, 1), (2, 3, 1), (3, 2, 2), (4, 4, 3)]
)
def test_conv_transpose_is_one_convolution_for_each_phase(form: None, kernel: int, stride: int, dilation: int) -> None:
    attributes: dict[str, Any] = {
        "group": 2,
        "strides": [stride, stride],
        "dilations": [dilation, 1],
        "pads": [1, 0, 0, 1],
        "output_padding": [stride - 1, 0],
    }
    x, w, b = noise(1, (2, 4, 4, 37)), noise(2, (4, 3, kernel, kernel)), noise(3, (6,))
    (result,) = run_op("ConvTranspose", [x, w, b], attributes, constant=[1], dynamic=True)
    check_close(result, conv_transpose(x, w, b, attributes), tolerance_of(x))


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_conv_transpose_of_each_type(dtype: str) -> None:
    attributes: dict[str, Any] = {
        "group": 1, "strides": [2, 2], "dilations": [1, 1], "pads": [1] * 4, "output_padding": [0, 0]
    }  # fmt: skip
    x, w, b = noise(1, (1, 9, 3, 40), dtype), noise(2, (9, 2, 4, 4), dtype), noise(3, (2,), dtype)
    (result,) = run_op("ConvTranspose", [x, w, b], attributes)
    check_close(result, conv_transpose(x, w, b, attributes), tolerance_of(x))


@pytest.mark.parametrize("kernel", [(2, 2), (4, 3), (1, 5)])
@pytest.mark.parametrize("strides", [(1, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("dilations", [(1, 1), (2, 3)])
def test_each_tap_is_in_one_phase(
    kernel: tuple[int, int], strides: tuple[int, int], dilations: tuple[int, int]
) -> None:
    phases = Phases.transposed(kernel, strides, dilations)
    assert len(phases.table) == math.prod(strides)
    assert sorted(phases.taps) == list(range(math.prod(kernel)))
    for entry in phases.table:
        own = phases.taps[entry[-1] : entry[-1] + entry[2] * entry[5]]
        for place, tap in enumerate(own):
            for axis, (number, k) in enumerate(zip(divmod(place, entry[5]), divmod(tap, kernel[1]), strict=True)):
                # Input index that the tap reads, relative to (o + pad) // stride for an output index o.
                reached = entry[3 * axis + 1] + number * phases.steps[axis]
                assert reached * strides[axis] + k * dilations[axis] == entry[3 * axis]


@pytest.mark.parametrize("transposed", [False, True])
def test_packed_strips_hold_the_rows_of_a_thread_side_by_side(transposed: bool) -> None:
    group, rows, channels = 2, 5, 3
    shape = (group * channels, rows, 2, 2) if transposed else (group * rows, channels, 2, 2)
    weights, taps = noise(1, shape), (3, 1, 0, 2)
    packed = pack_strips(weights, strip_shape(shape, group, rows, 4), taps, transposed)
    assert packed.shape == (2, 2, 3, 4, 4)
    for g, row, channel, tap in np.ndindex(group, rows, channels, 4):
        position = divmod(taps[tap], 2)
        first = (g * channels + channel, row) if transposed else (g * rows + row, channel)
        assert packed[g, row // 4, channel, tap, row % 4] == weights[(*first, *position)]
    assert not packed[:, 1, :, :, 1:].any()


# ---- pooling ----


@EVERY_FORM
@pytest.mark.parametrize(("kernel", "stride", "dilation"), [(2, 2, 1), (3, 2, 1), (5, 1, 1), (3, 1, 4), (2, 3, 1)])
@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool"])
def test_pooling_at_borders_and_between_them(form: None, op_type: str, kernel: int, stride: int, dilation: int) -> None:
    x = noise(1, (2, 2, 6, 141))
    attributes: dict[str, Any] = {
        "kernel_shape": [min(kernel, 3), kernel], "strides": [1, stride], "pads": [1, 0, 0, 1], "ceil_mode": 1
    }  # fmt: skip
    if dilation > 1:
        check_op(op_type, [x], attributes | {"dilations": [1, dilation], "ceil_mode": 0}, dynamic=True, opset=19)
        return
    largest = op_type == "MaxPool"
    (result,) = run_op(op_type, [x], attributes, dynamic=True)
    wanted = pool(x, attributes, lambda values, covered: values.max(-1) if largest else values.mean(-1))
    check_close(result, wanted, tolerance_of(x))


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "uint8"])
def test_max_pool_of_each_type(dtype: str) -> None:
    x = noise(1, (1, 2, 5, 70), dtype)
    attributes: dict[str, Any] = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4, "ceil_mode": 0}
    (result,) = run_op("MaxPool", [x], attributes)
    np.testing.assert_array_equal(result, pool(x, attributes, lambda values, _: values.max(-1)).astype(dtype))


@EVERY_FORM
def test_average_pool_counts_padding_where_asked(form: None) -> None:
    x = noise(1, (1, 2, 3, 5, 66))
    attributes: dict[str, Any] = {
        "kernel_shape": [2, 3, 3], "strides": [1, 2, 1], "pads": [1, 1, 2, 0, 1, 1], "ceil_mode": 0,
    }  # fmt: skip
    (result,) = run_op("AveragePool", [x], attributes | {"count_include_pad": 1})
    wanted = pool(x, attributes, lambda values, covered: values.sum(-1) / covered)
    check_close(result, wanted, tolerance_of(x))


# ---- reductions over whole images ----


@EVERY_FORM
@pytest.mark.parametrize("columns", [1025, 4096, 10_007])
def test_long_rows_are_reduced_piece_by_piece(form: None, columns: int) -> None:
    x = noise(1, (3, columns))
    for op_type in ("ReduceSum", "ReduceMax", "ReduceMean"):
        check_op(op_type, [x, np.array([1])], constant=[1], tolerance=1e-5)
    x[1, columns - 3] = x[1, 40] = 9
    check_op("ArgMax", [x], {"axis": 1})
    check_op("ArgMax", [x], {"axis": 1, "select_last_index": 1})
    check_op("Softmax", [x], {"axis": 1}, tolerance=1e-5)


@EVERY_FORM
@pytest.mark.parametrize("op_type", ["GlobalAveragePool", "GlobalMaxPool"])
def test_global_pooling_of_large_images(form: None, op_type: str) -> None:
    check_op(op_type, [noise(1, (2, 3, 65, 67))], tolerance=1e-5)


def test_the_dimensions_of_an_image_are_one_row_of_a_reduction() -> None:
    (spec,) = kernels("ReduceMean", [noise(1, (1, 4, 64, 64)), np.array([2, 3])])
    assert "quotient" not in spec.source


def test_lines_of_single_places_are_one_line() -> None:
    """Images of width 1, as in exported audio networks: the height is treated as one contiguous line."""
    inputs = [noise(1, (1, 4, 1024, 1)), noise(2, (4, 1, 5, 1)), noise(3, (4,))]
    attributes = {"group": 4, "pads": [2, 0, 2, 0], "dilations": [1, 3]}
    assert lanes(kernels("Conv", inputs, attributes)) == (1, 64)
    check_op("Conv", inputs, attributes, constant=[1])
    check_op("Conv", inputs, {**attributes, "strides": [2, 2]}, constant=[1], dynamic=True)
    check_op("Conv", [noise(1, (1, 4, 9, 1)), noise(2, (4, 4, 3, 1))], {"pads": [1, 0, 0, 1]}, constant=[1])


@pytest.mark.parametrize("columns", [4, 10, 27])
@pytest.mark.parametrize("pads", [0, 1])
def test_the_last_strip_ends_with_the_last_position(columns: int, pads: int) -> None:
    """The last strip is shifted back to end at the image's border, so that it reads no element outside.

    Pixels that two strips compute are stored by one of them.
    """
    x, w, b = noise(1, (2, 3, 2, columns)), noise(2, (3, 3, 1, 3)), noise(3, (3,))
    attributes = {"pads": [0, pads, 0, pads]}
    check_op("Conv", [x, w, b], attributes, constant=[1])
    check_op("Conv", [x, w, b], attributes, constant=[1], dynamic=True)
    _, width = lanes(kernels("Conv", [x, w, b], attributes))
    assert width <= max(8, columns if pads == 0 else 2 * columns)
