"""The runner of ONNX's backend tests: verdicts, values, crashes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ort_cuda_plugin.conformance import runner
from ort_cuda_plugin.conformance.cases import load_cases
from ort_cuda_plugin.conformance.report import render
from ort_cuda_plugin.conformance.values import difference, from_ort_value, is_plain, to_ort_value
from ort_cuda_plugin.conformance.verdict import Outcome, Verdict, judge


@pytest.mark.parametrize(
    ("key", "verdict"),
    [
        ("node/add", Verdict.ON_EP),
        ("node/shape", Verdict.ON_EP),
        ("pytorch-converted/Conv2d", Verdict.ON_EP),
        ("node/string_concat", Verdict.PARTLY),
        ("node/if", Verdict.PARTLY),
    ],
)
def test_a_case_gets_its_verdict(key: str, verdict: Verdict) -> None:
    outcome = judge(load_cases()[key], optimised=False)
    assert outcome.verdict is verdict, outcome.reason
    assert bool(outcome.reason) == (verdict is not Verdict.ON_EP)
    assert outcome.cpu_passes


@pytest.mark.parametrize(
    "dtype",
    [np.float32, np.int64, np.bool_, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4, ml_dtypes.uint4]
    + [ml_dtypes.int2, ml_dtypes.uint2, ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu],
    ids=lambda dtype: np.dtype(dtype).name,
)
@pytest.mark.parametrize("shape", [(3,), (2, 3), ()])
def test_values_survive_the_way_through_onnx_runtime(dtype: type, shape: tuple[int, ...]) -> None:
    values = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape).astype(dtype)
    back = from_ort_value(to_ort_value(values))
    assert back.dtype == values.dtype
    assert back.shape == shape
    np.testing.assert_array_equal(back.astype(np.float32), values.astype(np.float32))
    assert is_plain(values) == (np.dtype(dtype).isbuiltin == 1)


@pytest.mark.parametrize(
    ("actual", "expected", "text"),
    [
        (np.ones(2), np.ones(3), "shape"),
        (np.ones(2, np.float32), np.ones(2), "element type"),
        (np.array([1.0, 2.0]), np.array([1.0, 2.1]), "1 of 2 elements, the first 2.0 instead of 2.1"),
        ([np.ones(1)], [], "another sequence"),
        (None, np.ones(1), "missing"),
        (np.array(["a"]), np.array(["b"], dtype=object), "other strings"),
    ],
)
def test_differences_are_named(actual: object, expected: object, text: str) -> None:
    assert text in difference(actual, expected, 1e-3, 1e-7)


def test_equal_values_with_nan_do_not_differ() -> None:
    assert difference(np.array([np.nan, np.inf]), np.array([np.nan, np.inf]), 1e-3, 1e-7) == ""


def test_a_worker_that_crashes_costs_one_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = "import sys; sys.stdin.readline(); import os; os.abort()"
    real = runner.subprocess.Popen
    started = []

    def start(command: list[str], **options: object) -> object:
        started.append(command)
        return real([command[0], "-c", broken] if len(started) == 1 else command, **options)

    monkeypatch.setattr(runner.subprocess, "Popen", start)
    crashed, fine = runner.run(["node/abs", "node/add"], optimised=False, jobs=1)
    assert (crashed.verdict, fine.verdict) == (Verdict.FAILED, Verdict.ON_EP)
    assert "crashed" in crashed.reason


def test_the_report_lists_every_test_that_is_not_on_the_ep() -> None:
    outcomes = [Outcome("node/a", Verdict.ON_EP, "", True), Outcome("node/b", Verdict.PARTLY, "x | y", True)]
    text = render(outcomes, outcomes)
    assert "| passed on the EP | 1 | 1 |" in text
    assert "| node/b | x \\| y |" in text
    assert "node/a" not in text
