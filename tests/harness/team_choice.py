"""Forces the warp groups of sliced-K schedules, for tests of one schedule."""

from __future__ import annotations

import pytest

from ort_cuda_plugin.kernels.conv import implicit_gemm_mma as matrix_conv
from ort_cuda_plugin.kernels.gemm import dispatch as contract
from ort_cuda_plugin.kernels.gemm.tile_shapes import Team


def use_team(monkeypatch: pytest.MonkeyPatch, team: Team | None) -> None:
    """Force this schedule for all sizes; None: no sliced-K."""
    for module in (contract, matrix_conv):
        monkeypatch.setattr(module, "choose_team", lambda *args, **more: team)
