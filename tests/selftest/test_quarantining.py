"""What the selftest quarantines for the checks that failed."""

from __future__ import annotations

from typing import Any

import pytest

from ort_cuda_plugin.program.steps.quarantine import Quarantine, QuarantinedSchedule, schedule_kinds
from ort_cuda_plugin.program.steps.schedule import Engine, Schedule
from ort_cuda_plugin.selftest.quarantining import quarantined_by
from ort_cuda_plugin.selftest.sections.case import Result, Verdict

CALL = {"family": "gemm", "operand": "f16", "engine": "library"}


def call(epilogue: str, passes: bool, **more: Any) -> Result:
    verdict = Verdict.PASS if passes else Verdict.FAIL
    return Result(f"product, {epilogue}", verdict, case=epilogue, epilogue=epilogue, **{**CALL, **more})


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([call("bias", False), call("none", True)], ["gemm f16 library with epilogue bias"]),
        ([call("bias", False), call("residual", True)], ["gemm f16 library with epilogue bias"]),
        # No call of the same kind is known to be right.
        ([call("bias", False)], ["gemm f16 library"]),
        ([call("bias", False), call("none", True, operand="f32")], ["gemm f16 library"]),
        ([call("bias", False), call("none", True, engine="simt")], ["gemm f16 library"]),
        # Another call with the same epilogue is right: the size decides, not the epilogue.
        ([call("bias", False), call("bias", True)], ["gemm f16 library"]),
        # Calls with an epilogue compute the same product as the wrong call without one.
        ([call("none", False), call("bias", True)], ["gemm f16 library"]),
    ],
)
def test_the_epilogue_of_a_library_call_is_quarantined_if_others_are_right(
    results: list[Result], expected: list[str]
) -> None:
    assert [*map(str, quarantined_by(results))] == expected


def test_calls_with_another_epilogue_stay_allowed() -> None:
    entry = QuarantinedSchedule("gemm", "f16", "library", "", epilogue="bias, ReLU")
    quarantine = Quarantine((entry,))
    library = Schedule(Engine.LIBRARY)
    assert quarantine.names_epilogues
    assert quarantine.covering(schedule_kinds("gemm", "f16", library, "bias, ReLU"))
    assert not quarantine.covering(schedule_kinds("gemm", "f16", library, "bias"))
    assert not quarantine.covering(schedule_kinds("gemm", "f32", library, "bias, ReLU"))
    every = Quarantine((QuarantinedSchedule("gemm", "f16", "library", ""),))
    assert not every.names_epilogues
    assert every.covering(schedule_kinds("gemm", "f16", library, "bias"))
