"""ONNX's own node tests, of every operator in the table, on the emulated device."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, numpy_helper
from onnx.backend.test.loader import load_model_tests

from kernel_harness import run_model, storage
from ort_cuda_plugin.graph.ir import Unsupported
from ort_cuda_plugin.graph.node_lowering import NodeError
from ort_cuda_plugin.ops import registry

OPERATORS = sorted({operator.name for operator in registry.operators() if operator.domain == ""})

DECLINED = [
    # Inputs that a model normally has as constants; as graph inputs they decide ranks or which axis is which.
    r"an axis that is not known before the Run",
    r"has a number of elements that is not known before the Run",
    r"is computed on the device",
    r"is no tensor",
    r"with T\d? = (f64|bf16|f16|[iu]\d+)$",
    r"output \d of \w+ is not implemented",
    r"has element type (object|str\d*|complex)",
    r"a cast to STRING",
]
"""What cases of implemented operators are declined for. A case that is declined for another reason fails."""

RUN_TIME_AXES = {"CumSum", "Squeeze", "Unsqueeze"}
"""Operators all of whose cases have such inputs; tests of our own cover them."""

DISPUTED = {
    "test_resize_downsample_scales_cubic_align_corners",
    "test_resize_downsample_scales_linear_align_corners",
}
"""Cases whose expected values neither ONNX Runtime's CPU provider nor the plugin gives; these two agree."""

DRAWN = re.compile(r"test_(bernoulli|training_dropout(?!_zero_ratio))")
"""Cases that expect what NumPy's generator drew: types and shapes are compared."""

EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


@functools.cache
def cases() -> dict[str, list[Any]]:
    """By operator; models of several nodes (functions written out) under ""."""
    table = set(OPERATORS)
    result = defaultdict(list)
    for case in load_model_tests(kind="node"):
        if case.name in DISPUTED:
            continue
        kinds = [node.op_type for node in case.model.graph.node]
        if all(kind in table for kind in kinds):
            result[kinds[0] if len(kinds) == 1 else ""].append(case)
    return result


def as_array(value: Any) -> np.ndarray:
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)


def as_float(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)


def check(case: Any) -> str:
    """Runs a case; returns why it was declined, "" where it ran."""
    inputs, expected = (list(map(as_array, arrays)) for arrays in case.data_sets[0])
    for x in (*inputs, *expected):
        try:
            storage(x)
        except ValueError:
            return f"has element type {x.dtype.name}"
    try:
        actual = run_model(case.model, inputs)
    except Unsupported as error:
        return error.reason
    except NodeError as error:
        if isinstance(error.__cause__, Unsupported):
            return error.reason
        raise
    for got, want in zip(actual, expected, strict=True):
        assert got.shape == want.shape, case.name
        assert got.dtype == storage(want)[0].dtype, case.name
        if DRAWN.match(case.name):
            continue
        integers = want.dtype.isbuiltin == 2 and storage(want)[1].is_integer
        got = got.astype(want.dtype) if integers else got.view(want.dtype)
        relative = max(case.rtol, 4 * EPSILON.get(want.dtype.name, 0))
        absolute = max(case.atol, 1e-6, EPSILON.get(want.dtype.name, 0))
        np.testing.assert_allclose(as_float(got), as_float(want), relative, absolute, err_msg=case.name)
    return ""


def run_all(chosen: list[Any]) -> int:
    ran = 0
    for case in chosen:
        reason = check(case)
        assert not reason or any(re.search(pattern, reason, re.IGNORECASE) for pattern in DECLINED), (
            f"{case.name}: {reason}"
        )
        ran += not reason
    return ran


@pytest.mark.parametrize("operator", OPERATORS)
def test_node_cases_of_onnx_pass_or_are_declined_for_a_known_reason(operator):
    chosen = cases()[operator]
    if not chosen:
        pytest.skip(f"ONNX has no case of {operator} alone")
    ran = run_all(chosen)
    assert ran or operator in RUN_TIME_AXES, f"every case of {operator} is declined"


@pytest.mark.slow
def test_functions_of_onnx_written_out_as_nodes_pass():
    assert run_all(cases()[""]) > 100
