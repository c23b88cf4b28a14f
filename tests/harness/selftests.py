"""Runs the selftest in the process of a test, so that the test can make kernels wrong, with a separate quarantine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ort_cuda_plugin.compiler.caches.quarantine_cache import QuarantineCache
from ort_cuda_plugin.ep.device import quarantined
from ort_cuda_plugin.passes.emission import emission
from ort_cuda_plugin.program.expressions import scalar as s
from ort_cuda_plugin.program.lowering.context import Lowering
from ort_cuda_plugin.program.steps.schedule import Engine
from ort_cuda_plugin.program.steps.steps import Contract
from ort_cuda_plugin.selftest.device import Device, describe
from ort_cuda_plugin.selftest.runner import SectionReport, result_of
from ort_cuda_plugin.selftest.worker import Request, run_section


class InProcess:
    """Runs checks on the emulated device of this process. ``only`` limits requests that do not name checks."""

    def __init__(self, *only: str) -> None:
        self.device = describe(Device(is_emulated=True))
        self._only = only

    def run(self, request: Request) -> SectionReport:
        report = SectionReport(request.section)
        if not request.only:
            request = replace(request, only=self._only)
        for event in run_section(Device(is_emulated=True), request):
            if "result" in event:
                report.results.append(result_of(event["result"]))
        return report


@contextmanager
def own_quarantine(folder: Path) -> Iterator[QuarantineCache]:
    """Within the block, store the quarantine in ``folder``."""
    cache = QuarantineCache(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quarantined, "quarantine_cache", lambda: cache)
        yield cache


@contextmanager
def wrong_products(*engines: Engine, tile: str = "") -> Iterator[None]:
    """Make the kernels of these engines for matrix products wrong where a result is at least 6.

    With ``tile``, the kernels with another tile stay right.
    """
    launch = vars(emission)["launch_contract"]

    def launch_wrong(ctx: Lowering, step: Contract) -> None:
        schedule = step.schedule
        has_tile = schedule is not None and (not tile or (schedule.tile is not None and schedule.tile.name == tile))
        if schedule is not None and schedule.engine in engines and has_tile:
            outputs = tuple((s.where(value >= 6.0, value + 1.0, value), y) for value, y in step.outputs)
            step = replace(step, outputs=outputs)
        launch(ctx, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emission, "launch_contract", launch_wrong)
        yield
