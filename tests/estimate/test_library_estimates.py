"""Estimates of library calls against published measurements, and what layouts cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ort_cuda_plugin import gpus
from ort_cuda_plugin.estimate import libraries
from ort_cuda_plugin.estimate.model import estimate
from ort_cuda_plugin.estimate.work import Access, LibraryStep, Region, Work
from ort_cuda_plugin.gpus.constants import Constants
from ort_cuda_plugin.model.ir import DType

HALF, SINGLE = DType.FLOAT16.onnx, DType.FLOAT32.onnx


def product(m: int, n: int, k: int, dtype: int, flags: frozenset[str] = frozenset()) -> Work:
    itemsize = DType(dtype).itemsize
    sizes = [m * k * itemsize, k * n * itemsize, m * n * itemsize]
    regions = tuple(Region(kind, kind, size) for kind, size in zip(("input", "weight", "output"), sizes, strict=True))
    a, b, c = (Access(i, 0, sizes[i]) for i in range(3))
    step = LibraryStep(("n",), (a, b), (c,), "matmul", dtype, flags, 0, (m, n, k, k, n, n, 1, 0, 0, 0, 1 << 25))
    return Work(regions, (step,), (("float16", 2.0 * m * n * k, ("product",)),))


def convolution(images: int, channels: int, size: int, rows: int, kernel: int, *flags: str) -> LibraryStep:
    axis = (size, kernel, size, 1, 1, kernel // 2, kernel // 2)
    apart = rows if libraries.CHANNELS_LAST in flags else rows * size * size
    sizes = (images, channels, rows, 1, apart, *axis, *axis, 32 << 20)
    return LibraryStep(("n",), (), (), "conv", SINGLE, frozenset(flags), 2, sizes)


@pytest.mark.parametrize(
    ("device", "size", "measured"),
    [("h100", 8192, 736e12), ("h100", 4096, 760e12), ("h100", 2048, 645e12), ("rtx4090", 2040, 155.9e12)],
)
def test_large_products_take_what_was_published(device: str, size: int, measured: float) -> None:
    """The rates are from gpus/published.json, which also has TF32 and small GEMMs; test_accuracy.py compares those."""
    found = estimate(product(size, size, size, HALF), gpus.gpu(device))
    assert 2.0 * size**3 / found.seconds == pytest.approx(measured, rel=0.2)
    assert found.steps[0].bound == "tensor"


def test_a_product_of_one_row_takes_as_long_as_its_weights() -> None:
    h100 = gpus.gpu("h100")
    found = estimate(product(1, 8192, 28672, HALF), h100)
    step = found.steps[0]
    assert step.bound == "dram"
    assert found.roofline <= found.seconds <= 1.2 * found.roofline


def test_small_products_are_bound_by_their_launch() -> None:
    assert estimate(product(64, 64, 64, HALF), gpus.gpu("h100")).steps[0].bound == "launch"


def test_layouts_cost_transposes_or_the_tensor_cores() -> None:
    h100, constants = gpus.gpu("h100"), Constants()
    small = libraries.call(convolution(1, 64, 56, 64, 3, "TF32"), h100, constants)
    large = libraries.call(convolution(32, 256, 56, 64, 1, "TF32"), h100, constants)
    last = libraries.call(convolution(32, 256, 56, 64, 1, "TF32", libraries.CHANNELS_LAST), h100, constants)
    assert (small.tensor, small.transposed > 0, small.kernels) == (True, True, 4)
    assert (large.tensor, large.transposed) == (False, 0)
    assert (last.tensor, last.transposed, last.kernels) == (True, 0, 1)
    joined = convolution(32, 256, 56, 64, 1, "TF32", libraries.CHANNELS_LAST)
    joined = replace(joined, sizes=(*joined.sizes[:4], 128, *joined.sizes[5:]))
    apart = libraries.call(joined, h100, constants)
    assert (apart.transposed, apart.kernels) == (2 * 32 * 64 * 56 * 56 * 4, 2)
    assert large.seconds > 3 * last.seconds


def test_devices_say_where_their_figures_are_from() -> None:
    assert set(gpus.names()) == {"a100", "h100", "h200", "l4", "rtx4090", "rtx5090"}
    for name in gpus.names():
        gpu = gpus.gpu(name)
        assert any(source.startswith("https://") for source in gpu.sources.values())
        # Data sheets count two float32 operations, a fused multiply-add, per lane and clock.
        lanes = gpu.float32_lanes * gpu.multiprocessors * gpu.clock * 2
        assert lanes == pytest.approx(gpu.flops["float32"], rel=0.1), name


def test_long_attention_runs_at_about_half_of_the_peak() -> None:
    """FlashAttention-3's paper has 500 to 600 TFLOP/s for cuDNN on an H100, with heads of 128 and long sequences."""
    sizes = (2, 16, 8192, 8192, 128, 128, *[0] * 16, 1 << 25)
    step = LibraryStep(("n",), (), (), "attention", DType.FLOAT16.onnx, frozenset(), 0, sizes)
    call = libraries.call(step, gpus.gpu("h100"), Constants())
    assert call.flops == 4.0 * 2 * 16 * 8192 * 8192 * 128
    assert call.tensor
    assert 4e14 <= call.flops / call.seconds <= 6.5e14
