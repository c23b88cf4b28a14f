"""ONNX's backend tests for opsets and attributes that the installed ONNX Runtime does not know yet.

ONNX Runtime cannot load these models, so the conformance run lacks them. Here they run without ONNX Runtime.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernel_harness import run_model
from ort_cuda_plugin.conformance.cases import Case, load_cases
from ort_cuda_plugin.conformance.report import read_groups
from ort_cuda_plugin.conformance.scope import is_random, out_of_scope
from ort_cuda_plugin.conformance.values import difference
from ort_cuda_plugin.model.ir import NodeError, Unsupported
from ort_cuda_plugin.model.onnx_graph import storage

REPORT = Path(__file__).resolve().parents[2] / "docs" / "conformance.md"


def unknown_to_the_host() -> list[Case]:
    """Return the tests that docs/conformance.md lists as unknown to ONNX Runtime by opset or attribute."""
    cases, groups = load_cases(), read_groups(REPORT.read_text())
    keys = [key for key, group in groups.items() if group.startswith("ONNX Runtime does not know the attribute")]
    keys += [key for key, group in groups.items() if group.startswith("ONNX Runtime does not know opset")]
    chosen = [cases[key] for key in keys if key in cases]
    return [case for case in chosen if not out_of_scope(case.model(), set()) and not is_random(case.model())]


def problem(case: Case) -> str:
    """Run a test case. Return the first difference or error as text, "" if there is none."""
    model = case.model()
    for inputs, expected in case.data_sets(model):
        try:
            actual = run_model(model, inputs)
        except (NodeError, Unsupported) as error:
            return str(error)
        for got, want in zip(actual, expected, strict=True):
            if text := difference(as_type_of(want, got), want, case.rtol, case.atol):
                return text
    return ""


def as_type_of(want: Any, got: Any) -> Any:
    """Convert a result to the type of ``want``: the harness returns types that NumPy lacks as stored integers."""
    if want.dtype.isbuiltin != 2 or got.dtype != storage(want)[0].dtype:
        return got
    return got.astype(want.dtype) if storage(want)[1].is_integer else np.ascontiguousarray(got).view(want.dtype)


@pytest.mark.full
def test_tests_that_the_host_does_not_know_yet_pass_without_it() -> None:
    cases = unknown_to_the_host()
    problems = {case.key: problem(case) for case in cases}
    assert len(cases) > 200
    assert not (bad := {key: text for key, text in problems.items() if text}), "\n".join(
        f"{key}: {text}" for key, text in bad.items()
    )
