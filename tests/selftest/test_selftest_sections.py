"""Each section of the selftest finds wrong kernels and driver calls; sessions that avoid these are right."""

from __future__ import annotations

from pathlib import Path

import pytest

from device_faults import faults
from ort_cuda_plugin.selftest.sections.case import Verdict
from ort_cuda_plugin.selftest.selftest import selftest
from ort_cuda_plugin.selftest.table import SECTIONS
from ort_cuda_plugin.selftest.worker import Request
from selftests import InProcess, own_quarantine

CHECKS = {
    "gemm": "product 1x64x48, float",
    "convolution": "convolution 1x1, float",
    "attention": "attention, 1 query, float",
    "reduction": "reductions of integers, int64",
    "order": "largest 1 of 33, float",
    "elementwise": "arithmetic of 7, float16",
    "movement": "scatters, int64",
    "recurrence": "RNN of 16, float",
    "image": "resize, nearest, float",
    "quantization": "quantization of 67, int8",
}
"""A check of each section that launches kernels."""


def test_the_checks_are_those_of_all_sections() -> None:
    assert [*CHECKS, "driver"] == [section.name for section in SECTIONS]


@pytest.mark.parametrize("section", CHECKS)
def test_a_wrong_element_is_found_and_quarantined_and_the_next_session_is_right(section: str, tmp_path: Path) -> None:
    runner = InProcess(CHECKS[section])
    with own_quarantine(tmp_path), faults("kernel=*"):
        report = selftest(runner, [section], is_quick=True)
        assert report.has_failed
        assert report.quarantined
        assert report.unresolved == []
        again = runner.run(Request(section, is_quick=True, with_quarantine=True))
        assert [result for result in again.results if result.verdict is not Verdict.PASS] == []
    with own_quarantine(tmp_path):
        assert not selftest(runner, [section], is_quick=True).has_failed
        assert selftest(runner, [section], is_quick=True).quarantined == []


@pytest.mark.parametrize("section", CHECKS)
def test_a_kernel_that_writes_nothing_is_found_although_memory_held_the_right_result(section: str) -> None:
    runner = InProcess(CHECKS[section])
    assert not selftest(runner, [section], is_quick=True, stores=False).has_failed
    with faults("idle=*"):
        report = selftest(runner, [section], is_quick=True, stores=False)
    assert {result.verdict for result in report.results} == {Verdict.FAIL}, report.results


@pytest.mark.parametrize(
    ("call", "check"),
    [
        ("MemHostAlloc", "pinned memory"),
        ("EventElapsedTime", "streams and events"),
        ("GraphInstantiate", "automatic graphs"),
        ("MemsetD8Async", "copies between host and device"),
    ],
)
def test_an_unsupported_call_fails_the_check_that_needs_it(call: str, check: str) -> None:
    with faults(f"unsupported={call}"):
        report = selftest(InProcess(check), ["driver"], is_quick=True, stores=False)
    assert [result.verdict for result in report.results] == [Verdict.FAIL]


@pytest.mark.parametrize(
    ("section", "check", "verdict"),
    [
        ("convolution", "convolution one pixel, double", Verdict.PASS),
        ("recurrence", "GRU of 1, double", Verdict.SKIPPED),
    ],
)
def test_a_type_that_the_reference_lacks_is_not_a_failed_check(section: str, check: str, verdict: Verdict) -> None:
    report = InProcess(check).run(Request(section))
    assert report.results
    assert {result.verdict for result in report.results} == {verdict}, report.results


@pytest.mark.full
def test_a_quick_selftest_of_the_emulated_device_passes() -> None:
    runner = InProcess()
    report = selftest(runner, [section.name for section in SECTIONS], is_quick=True, stores=False)
    assert [result for result in report.results if result.verdict is Verdict.FAIL] == []
    assert len([result for result in report.results if result.verdict is Verdict.PASS]) > 500
