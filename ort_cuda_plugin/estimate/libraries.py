"""Cost model of cuBLASLt and cuDNN calls: arithmetic, bytes, and an efficiency by tile and number of tiles.

The model assumes the tile with the least time. A convolution is an implicit GEMM. cuDNN's tensor-core kernels read
NHWC: for another layout cuDNN transposes operands and results in its workspace, in every Run; if the workspace is too
small, cuDNN uses an engine without tensor cores. It writes a result with strided output pixels, as in a concatenation,
to the workspace first and copies it. tests/vendor/test_cudnn_engines.py compares the model with the reports of an
installed cuDNN, which needs no GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..gpus import Gpu
from ..gpus.constants import Constants
from ..gpus.library_times import ATTENTION_ROWS, CONVOLUTION, Rates, attention_time, library_time, tile_exponent
from ..model.ir import DType
from .work import LibraryStep

GROUPED = 0.25
"""Efficiency of a convolution with few channels per group, relative to the peak without tensor cores."""
CHANNELS_LAST = "CHANNELS_LAST"


@dataclass(frozen=True)
class Call:
    """A library call on a GPU.

    ``flops``: operations that the result needs; ``seconds``: time of the arithmetic; ``l2_bytes``: bytes that its tiles
    load; ``kernels``: number of kernels; ``transposed``: bytes moved by layout conversions; ``tensor``: tensor cores
    are used.
    """

    flops: float
    seconds: float
    l2_bytes: float
    kernels: int
    transposed: float
    tensor: bool


def call(step: LibraryStep, device: Gpu, constants: Constants) -> Call:
    make = {"matmul": _product, "conv": _convolution, "attention": _attention}[step.kind]
    return make(step, device, constants)


def arithmetic(step: LibraryStep) -> float:
    """Return the number of multiplications and additions that the call's result needs."""
    if step.kind == "matmul":
        m, n, k = step.sizes[:3]
        return 2.0 * m * n * k * step.sizes[6]
    if step.kind == "attention":
        batches, heads, rows, keys, depth, width = step.sizes[:6]
        return 2.0 * batches * heads * rows * keys * (depth + width)
    m, n, k, groups = _implicit(step)
    return 2.0 * m * n * k * groups


def peak_kind(dtype: int, tf32: bool) -> str:
    """Return the key in `Gpu.flops` of the peak rate for the ONNX type ``dtype``. Narrower types count as float16."""
    if dtype == DType.FLOAT32.onnx:
        return "tf32" if tf32 else "float32"
    return {DType.BFLOAT16.onnx: "bfloat16", DType.FLOAT64.onnx: "float64"}.get(dtype, "float16")


def _implicit(step: LibraryStep) -> tuple[int, int, int, int]:
    """Return m, n, k of a convolution's implicit GEMM, and the number of groups."""
    images, channels, rows, groups = step.sizes[:4]
    axes = [step.sizes[5 + 7 * axis : 12 + 7 * axis] for axis in range(step.rank)]
    places = math.prod(axis[2] for axis in axes)
    kernel = math.prod(axis[1] for axis in axes)
    return images * places, rows // groups, channels // groups * kernel, groups


def _distinct_bytes(step: LibraryStep, operand: str) -> int:
    """Return the bytes of a convolution's ``operand`` ("x", "weights" or "out"), each element once."""
    images, channels, rows, groups = step.sizes[:4]
    axes = [step.sizes[5 + 7 * axis : 12 + 7 * axis] for axis in range(step.rank)]
    elements = {
        "x": images * channels * math.prod(axis[0] for axis in axes),
        "weights": rows * (channels // groups) * math.prod(axis[1] for axis in axes),
        "out": images * rows * math.prod(axis[2] for axis in axes),
    }
    return elements[operand] * _itemsize(step)


def _itemsize(step: LibraryStep) -> int:
    return DType(step.dtype).itemsize


def _product(step: LibraryStep, device: Gpu, constants: Constants) -> Call:
    m, n, k, lda, ldb = step.sizes[:5]
    batches, kind = step.sizes[6], peak_kind(step.dtype, "TF32" in step.flags)
    # Tensor cores need rows that begin at multiples of 16 bytes; other rows are copied element by element.
    aligned = all(size * _itemsize(step) % 16 == 0 for size in (lda, ldb))
    factor = 1.0 if aligned else 0.6
    seconds, l2 = _tiled(m, n, k, batches, _itemsize(step), kind, device, constants, factor)
    return Call(arithmetic(step), seconds, l2, 1, 0.0, kind != "float32")


def _tiled(
    m: int, n: int, k: int, batches: int, itemsize: int, kind: str, device: Gpu, constants: Constants, factor: float
) -> tuple[float, float]:
    """Return the seconds of the arithmetic, and the bytes that the tiles load, for the fastest tile."""
    tensor = kind not in ("float32", "float64")
    rate = device.flops[kind] / device.multiprocessors * factor
    rate *= constants.tensor_library * device.library_share(kind) if tensor else constants.float32_library
    rates = Rates(device.multiprocessors, rate, device.l2_read * constants.l2, device.sharing, tile_exponent(kind))
    return library_time(m, n, k, batches, itemsize, rates)


def _attention(step: LibraryStep, device: Gpu, constants: Constants) -> Call:
    """Return the cost of attention. Each block has `ATTENTION_ROWS` queries of a head, and loads the head's K and V."""
    batches, heads, rows, keys, depth, width = step.sizes[:6]
    blocks = batches * heads * -(-rows // ATTENTION_ROWS)
    rate = device.flops[peak_kind(step.dtype, False)] / device.multiprocessors * device.tensor_share
    rate *= constants.tensor_library
    seconds = attention_time(batches * heads, rows, keys, depth + width, device.multiprocessors, rate)
    l2 = float(step.read_bytes) + blocks * keys * (depth + width) * _itemsize(step)
    return Call(arithmetic(step), seconds, l2, 1, 0.0, True)


def _convolution(step: LibraryStep, device: Gpu, constants: Constants) -> Call:
    m, n, k, groups = _implicit(step)
    kind, itemsize = peak_kind(step.dtype, "TF32" in step.flags), _itemsize(step)
    flops = arithmetic(step)
    read = float(step.read_bytes)
    if groups > 1 and (n < 16 or k < 16):
        return Call(flops, flops / (device.flops["float32"] * GROUPED), read, 1, 0.0, False)
    transposed = 0.0
    if kind not in ("float32", "float64") and CHANNELS_LAST not in step.flags:
        x, weights, out = (_distinct_bytes(step, operand) for operand in ("x", "weights", "out"))
        if (x + out) * 2 // itemsize > step.sizes[-1]:  # copies as 2-byte elements exceed the workspace's bytes
            kind = "float32"
        else:
            # A 1x1 filter has the same memory order in both layouts, so it is not transposed.
            transposed = 2.0 * (x + out + (weights if k > step.sizes[1] // groups else 0))
    kernels = 1 if not transposed else 4
    if CHANNELS_LAST in step.flags and step.sizes[4] != step.sizes[2]:  # a strided result goes through the workspace
        transposed += 2.0 * _distinct_bytes(step, "out")
        kernels += 1
    k += -k % (16 // itemsize)
    seconds, l2 = _tiled(m, n, k, groups, itemsize, kind, device, constants, CONVOLUTION)
    return Call(flops, seconds, max(l2, read), kernels, transposed, kind not in ("float32", "float64"))
