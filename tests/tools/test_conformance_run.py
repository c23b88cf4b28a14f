"""ONNX's backend tests, all of them, compared with docs/conformance.md."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from ort_cuda_plugin.conformance.cases import load_cases
from ort_cuda_plugin.conformance.mode import Mode
from ort_cuda_plugin.conformance.report import WRITE_COMMAND, changes, read_verdicts, versions
from ort_cuda_plugin.conformance.runner import run
from ort_cuda_plugin.conformance.verdict import BAD, Outcome, Verdict

REPORT = Path(__file__).resolve().parents[2] / "docs" / "conformance.md"
# Each test uses all cores: xdist starts this file last, because it has few tests, when the cores become free.
JOBS = len(os.sched_getaffinity(0))


def assert_none_is_bad(outcomes: Sequence[Outcome]) -> None:
    bad = {outcome.key: f"{outcome.verdict}: {outcome.reason}" for outcome in outcomes if outcome.verdict in BAD}
    assert not bad, "\n".join(f"{key}: {text}" for key, text in bad.items())


@pytest.mark.full
@pytest.mark.parametrize("optimized", [False, True], ids=["as-written", "optimized"])
def test_every_verdict_is_the_reported_one_and_none_is_bad(optimized: bool) -> None:
    """Uses the checking mode with adversarial streams, as some faults show only for some orders of streams' work."""
    cases = load_cases()
    outcomes = run(list(cases.values()), Mode(optimized, check=True, seed=1), jobs=JOBS)
    assert_none_is_bad(outcomes)
    assert sum(outcome.verdict is Verdict.ON_EP for outcome in outcomes) > 1500
    text = REPORT.read_text()
    if versions() not in text:
        pytest.skip(f"{REPORT.name} is not of {versions()}: verdicts of other versions differ")
    reported = read_verdicts(text, cases)[optimized]
    assert not (changed := changes(reported, outcomes)), "\n".join(
        [f"{REPORT.name} is not what was found; to write it again: {WRITE_COMMAND}", *changed]
    )


@pytest.mark.full
def test_kernels_of_single_nodes_pass_what_clusters_pass() -> None:
    """Without clusters, the CPU computes shape arithmetic, so fewer tests run wholly on the EP."""
    outcomes = run(list(load_cases().values()), Mode(check=True, single_nodes=True), jobs=JOBS)
    assert_none_is_bad(outcomes)
    assert sum(outcome.verdict is Verdict.ON_EP for outcome in outcomes) > 1400
