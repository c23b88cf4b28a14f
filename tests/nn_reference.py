"""What operators of ops/nn.py and ops/matmul.py should give, in float64 by onnx.reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from kernel_harness import Array, make_model, run_op
from onnx.reference import ReferenceEvaluator


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
    """Asserts that the emulated device gives what the reference gives, relative to the largest expected value."""
    results = run_op(op_type, inputs, attributes, opset, outputs=outputs, constant=constant, dynamic=dynamic)
    exact = [None if x is None else x.astype(np.float64) if x.dtype.kind == "f" else x for x in inputs]
    feeds = {f"x{i}": x for i, x in enumerate(exact) if x is not None}
    model = make_model(op_type, exact, attributes, opset, outputs=outputs)
    expected = ReferenceEvaluator(model).run(None, feeds)
    first = next(x for x in inputs if x is not None)
    if tolerance is None:
        tolerance = {"float16": 2e-3, "float32": 2e-6, "float64": 1e-14}.get(first.dtype.name, 0)
    for result, wanted in zip(results, expected, strict=True):
        assert result.shape == wanted.shape
        scale = np.abs(wanted).max(initial=0)
        error = np.abs(result.astype(np.float64) - wanted).max(initial=0)
        assert error <= tolerance * scale, f"error {error} of {scale}"


def noise(seed: int, shape: Sequence[int], dtype: str = "float32") -> Array:
    generator = np.random.default_rng(seed)
    if dtype.startswith(("int", "uint")):
        return generator.integers(0, 50, shape).astype(dtype)
    return generator.standard_normal(shape).astype(dtype)
