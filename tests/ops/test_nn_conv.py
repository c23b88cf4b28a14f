"""Convolutions on the emulated device, compared with onnx.reference in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernel_harness import make_model, run_op
from nn_reference import check_close, check_op, conv_transpose, noise, tolerance_of
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.kernels.conv.implicit_gemm_simt import OUTSIDE, packed_shape, patch_table
from ort_cuda_plugin.kernels.gemm.gemm_simt import FLAT
from ort_cuda_plugin.model.ir import NodeError
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.model.recipes import pack_tiles
from ort_cuda_plugin.program.lowering.context import DeviceProperties

few = settings(max_examples=25)


@st.composite
def convolutions(draw: st.DrawFn, rank: int) -> tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]:
    """Draw the shape of x, the shape of the weights, and attributes that fit them."""

    def per_axis(values: list[int]) -> list[int]:
        return draw(st.lists(st.sampled_from(values), min_size=rank, max_size=rank))

    group = draw(st.sampled_from([1, 1, 2, 3]))
    channels, rows = draw(st.integers(1, 6)), draw(st.sampled_from([1, 3, 8, 40]))
    kernel = per_axis([1, 2, 3])
    attributes: dict[str, Any] = {
        "group": group,
        "kernel_shape": kernel,
        "strides": per_axis([1, 2, 3]),
        "dilations": per_axis([1, 2]),
    }
    auto_pad = draw(st.sampled_from(["NOTSET", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"]))
    if auto_pad == "NOTSET":
        attributes["pads"] = per_axis([0, 1, 2]) + per_axis([0, 1, 2])
    else:
        attributes["auto_pad"] = auto_pad
        attributes["dilations"] = [1] * rank  # onnx.reference ignores dilation when it computes auto_pad
    size = [draw(st.integers((k - 1) * d + 1, 11)) for k, d in zip(kernel, attributes["dilations"], strict=True)]
    images = draw(st.sampled_from([0, 1, 2]))
    return (images, channels * group, *size), (rows * group, channels, *kernel), attributes


@few
@given(case=convolutions(2), bias=st.booleans(), constant=st.booleans(), dynamic=st.booleans())
def test_conv_2d_is_the_references(case: Any, bias: bool, constant: bool, dynamic: bool) -> None:
    x, w, attributes = case
    b = [noise(3, w[:1])] if bias else []
    check_op("Conv", [noise(1, x), noise(2, w), *b], attributes, constant=[1] * (constant or dynamic), dynamic=dynamic)


@settings(max_examples=8)
@given(case=st.one_of(convolutions(1), convolutions(3)), dynamic=st.booleans())
def test_conv_1d_and_3d_are_the_references(case: Any, dynamic: bool) -> None:
    x, w, attributes = case
    check_op("Conv", [noise(1, x), noise(2, w)], attributes, constant=[1], dynamic=dynamic)


@pytest.mark.parametrize("rows", [33, 64, 130])
def test_conv_with_each_tile(rows: int) -> None:
    check_op("Conv", [noise(1, (1, 20, 9, 10)), noise(2, (rows, 20, 3, 3))], {"pads": [1, 1, 1, 1]}, constant=[1])


@pytest.mark.parametrize("multiplier", [1, 2])
def test_depthwise_conv(multiplier: int) -> None:
    x, w, b = noise(1, (2, 8, 13, 12)), noise(2, (8 * multiplier, 1, 3, 3)), noise(3, (8 * multiplier,))
    check_op("Conv", [x, w, b], {"group": 8, "pads": [1, 1, 1, 1], "strides": [2, 1]}, constant=[1])


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("rows", [1, 16])
def test_conv_of_each_type(dtype: str, rows: int) -> None:
    inputs = [noise(1, (2, 8, 13, 12), dtype), noise(2, (rows, 8, 3, 3), dtype), noise(3, (rows,), dtype)]
    check_op("Conv", inputs, {"pads": [1, 2, 0, 1]}, constant=[1])


@pytest.mark.parametrize(("pad", "extra"), [(0, 0), (1, 2)])
def test_conv_transpose_of_windows_side_by_side_on_a_gpu(monkeypatch: pytest.MonkeyPatch, pad: int, extra: int) -> None:
    """With stride 3 and a 3x3 kernel, windows do not overlap. Padding cuts the first window; the size stays equal."""
    monkeypatch.setattr(OpenDevice, "properties", lambda self: DeviceProperties(emulated=False))
    x, w = noise(1, (2, 3, 4, 5)), noise(2, (3, 2, 3, 3))
    attributes = {"strides": [3, 3], "pads": [pad] * 4, "output_padding": [extra] * 2}
    (result,) = run_op("ConvTranspose", [x, w], attributes)
    whole = attributes | {"group": 1, "dilations": [1, 1]}
    check_close(result, conv_transpose(x, w, np.zeros(2, np.float32), whole), tolerance_of(x))


@settings(max_examples=12)
@example(rank=2, group=1, stride=3, dilation=1, pad=0, extra=0)
@example(rank=2, group=1, stride=3, dilation=1, pad=1, extra=2)
@given(
    rank=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 2]),
    stride=st.sampled_from([1, 2, 3]),
    dilation=st.sampled_from([1, 2]),
    pad=st.sampled_from([0, 1]),
    extra=st.sampled_from([0, 1, 2]),
)
def test_conv_transpose_adds_a_kernel_for_each_element(
    rank: int, group: int, stride: int, dilation: int, pad: int, extra: int
) -> None:
    attributes: dict[str, Any] = {"group": group, "strides": [stride] * rank, "dilations": [dilation] * rank}
    attributes |= {"pads": [pad] * (2 * rank), "output_padding": [min(extra, stride - 1)] * rank}
    x, w = noise(1, (2, 2 * group, *[5, 4][:rank])), noise(2, (2 * group, 3, *[3, 3][:rank]))
    b = noise(3, (3 * group,))
    (result,) = run_op("ConvTranspose", [x, w, b], attributes)
    check_close(result, conv_transpose(x, w, b, attributes), tolerance_of(x))


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER"])
def test_conv_transpose_pads_to_the_stride_times_the_input(auto_pad: str) -> None:
    (result,) = run_op(
        "ConvTranspose", [noise(1, (1, 1, 3)), noise(2, (1, 2, 4))], {"strides": [2], "auto_pad": auto_pad}
    )
    assert result.shape == (1, 2, 6)


def test_a_kernel_larger_than_the_padded_input_fails_the_run() -> None:
    with pytest.raises(Exception, match="the extent of a window on the padded input must be at most"):
        run_op("Conv", [noise(1, (1, 1, 2, 2)), noise(2, (1, 1, 3, 3))], dynamic=True, constant=[1])


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"pads": [-1, 0, 0, 0]}, "pads is .*; supported: entries of at least 0"),
        ({"kernel_shape": [2, 2]}, "kernel_shape must be .3, 3., got .2, 2."),
        ({"strides": [1]}, "strides must have 2 entries, got 1"),
        ({"strides": [0, 1]}, "strides must have entries of at least 1"),
        ({"group": 3}, "group must be positive and divide 2 input and 2 output channels, got 3"),
    ],
)
def test_attributes_that_make_no_sense_are_named(attributes: dict[str, Any], reason: str) -> None:
    with pytest.raises(NodeError, match=reason):
        run_op("Conv", [noise(1, (1, 2, 5, 5)), noise(2, (2, 2, 3, 3))], attributes)


def test_packed_weights_are_the_transposed_ones_in_whole_tiles() -> None:
    weights = noise(1, (6, 2, 3, 3))
    packed = pack_tiles(weights, packed_shape(weights.shape, 2, FLAT))
    assert packed.shape == (2, 32, 32)
    np.testing.assert_array_equal(packed[1, :18, :3], weights[3:].reshape(3, 18).T)
    assert not packed[:, 18:].any()
    assert not packed[:, :, 3:].any()


def test_patch_table_lists_the_places_of_a_patch() -> None:
    table = patch_table(2, (1, 2), (1, 3), 16)
    assert table[:4].tolist() == [[0, 0, 0, 0], [0, 3, 0, 0], [0, 0, 1, 0], [0, 3, 1, 0]]
    assert (table[4:, :2] == OUTSIDE).all()
    assert len(table) == 16


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("image", "kernel", "attributes"),
    [
        ((2, 5, 9), (20, 5, 3), {"pads": [1, 0], "strides": [2]}),
        ((3, 18, 4, 5), (24, 18, 3, 2), {"pads": [1, 0, 1, 1], "dilations": [2, 1]}),
        ((2, 6, 3, 4), (17, 6, 3, 4), {}),
        ((1, 4, 2, 3, 3), (18, 4, 1, 2, 2), {"strides": [1, 2, 1]}),
    ],
)
def test_convolutions_of_few_places_are_products(
    image: tuple[int, ...], kernel: tuple[int, ...], attributes: dict[str, Any], dynamic: bool, dtype: str
) -> None:
    """Convolutions with few output pixels become im2col and a GEMM, since tiles of pixels would be mostly empty.

    If the kernel covers the whole image, the GEMM reads the image without im2col.
    """
    inputs = [noise(1, image, dtype), noise(2, kernel, dtype), noise(3, kernel[:1], dtype)]
    check_op("Conv", inputs, attributes, constant=[1], dynamic=dynamic)
    model = make_model("Conv", inputs, attributes, constant=[1, 2])
    cluster = CompiledCluster(read_model(model, False), DeviceProperties(emulated=True))
    names = [spec.name for spec in cluster.prepare().kernels]
    assert all("conv" not in name or "d_" not in name for name in names), names
    assert len(names) == (1 if image[2:] == kernel[2:] else 2)
