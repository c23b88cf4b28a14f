"""Expected results of convolutions, pooling and GEMMs in float64: from onnx.reference or, where it is wrong, NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from onnx.reference import ReferenceEvaluator

from kernel_harness import Array, make_model, run_op


def check_op(
    op_type: str,
    inputs: Sequence[Array | None],
    attributes: Mapping[str, Any] | None = None,
    *,
    opset: int = 21,
    outputs: int = 1,
    constant: Sequence[int] = (),
    dynamic: bool = False,
    tolerance: float | None = None,
) -> None:
    """Assert that the emulated device matches the reference, relative to the largest expected value."""
    results = run_op(op_type, inputs, attributes, opset, outputs=outputs, constant=constant, dynamic=dynamic)
    exact = [None if x is None else x.astype(np.float64) if x.dtype.kind == "f" else x for x in inputs]
    feeds = {f"x{i}": x for i, x in enumerate(exact) if x is not None}
    model = make_model(op_type, exact, attributes, opset, outputs=outputs)
    first = next(x for x in inputs if x is not None)
    for result, wanted in zip(results, ReferenceEvaluator(model).run(None, feeds), strict=True):
        check_close(result, wanted, tolerance_of(first) if tolerance is None else tolerance)


def tolerance_of(x: Array) -> float:
    """Return the maximum error of sums in x's element type, relative to the largest result; 0 for integers."""
    return {"float16": 2e-3, "float32": 2e-6, "float64": 1e-14}.get(x.dtype.name, 0)


def check_close(result: Array, wanted: Array, tolerance: float) -> None:
    assert result.shape == wanted.shape
    scale = np.abs(wanted).max(initial=0)
    error = np.abs(result.astype(np.float64) - wanted).max(initial=0)
    assert error <= tolerance * scale, f"error {error} of {scale}"


def windows(x: Array, attributes: Mapping[str, Any]) -> Iterator[tuple[tuple[int, ...], Array, int]]:
    """Yield for each output pixel of a pooling: its index, x's values in the window [n, c, ...], and the number of
    window elements including padding.
    """
    kernel, strides = attributes["kernel_shape"], attributes["strides"]
    rank = len(kernel)
    begin, end = attributes["pads"][:rank], attributes["pads"][rank:]
    counts = []
    for n, k, s, b, e in zip(x.shape[2:], kernel, strides, begin, end, strict=True):
        count = (n + b + e - k) // s + 1
        if attributes["ceil_mode"]:
            count = -(-(n + b + e - k) // s) + 1
            count -= (count - 1) * s >= n + b
        counts.append(count)
    for place in np.ndindex(*counts):
        starts = [p * s - b for p, s, b in zip(place, strides, begin, strict=True)]
        inside = [slice(max(o, 0), max(o + k, 0)) for o, k in zip(starts, kernel, strict=True)]
        values = x[:, :, *inside]
        ends = [min(o + k, n + e) for o, k, n, e in zip(starts, kernel, x.shape[2:], end, strict=True)]
        yield place, values, math.prod(last - o for last, o in zip(ends, starts, strict=True))


def pool(x: Array, attributes: Mapping[str, Any], function: Callable[[Array, int], Array]) -> Array:
    """Pool x: apply ``function`` to the values [n, c, window] and the window's size with padding, per output pixel."""
    parts: dict[tuple[int, ...], Array] = {
        place: function(values.reshape(*x.shape[:2], -1).astype(np.float64), covered)
        for place, values, covered in windows(x, attributes)
    }
    result: Array = np.empty((*x.shape[:2], *(1 + n for n in max(parts))))
    for place, value in parts.items():
        places: tuple[Any, ...] = (slice(None), slice(None), *place)
        result[places] = value
    return result


def conv_transpose(x: Array, w: Array, b: Array, attributes: Mapping[str, Any]) -> Array:
    """Return the transposed convolution of x and w: each input element adds a scaled copy of the kernel."""
    group, strides, dilations = attributes["group"], attributes["strides"], attributes["dilations"]
    rank = x.ndim - 2
    begin, end = attributes["pads"][:rank], attributes["pads"][rank:]
    rows = w.shape[1]
    full = [
        (n - 1) * s + (k - 1) * d + 1 + extra
        for n, s, k, d, extra in zip(
            x.shape[2:], strides, w.shape[2:], dilations, attributes["output_padding"], strict=True
        )
    ]
    result = np.zeros((x.shape[0], rows * group, *full))
    result += b.reshape(1, -1, *[1] * rank)
    channels = x.shape[1] // group
    for g in range(group):
        mine = slice(g * channels, (g + 1) * channels)
        for tap in np.ndindex(*w.shape[2:]):
            product = np.einsum("nc...,cr->nr...", x[:, mine].astype(np.float64), w[mine, :, *tap])
            where = [
                slice(t * d, t * d + (n - 1) * s + 1, s)
                for t, d, n, s in zip(tap, dilations, x.shape[2:], strides, strict=True)
            ]
            result[:, g * rows : (g + 1) * rows, *where] += product
    return result[:, :, *[slice(b, n - e) for b, n, e in zip(begin, full, end, strict=True)]]


def lrn(x: Array, size: int, alpha: float, beta: float, bias: float) -> Array:
    squares = np.pad(x.astype(np.float64) ** 2, [(0, 0), ((size - 1) // 2, size // 2), (0, 0), (0, 0)])
    total = sum(squares[:, i : i + x.shape[1]] for i in range(size))
    return x / (bias + alpha / size * total) ** beta


def noise(seed: int, shape: Sequence[int], dtype: str = "float32") -> Array:
    generator = np.random.default_rng(seed)
    if dtype.startswith(("int", "uint")):
        return generator.integers(0, 50, shape).astype(dtype)
    return generator.standard_normal(shape).astype(dtype)
