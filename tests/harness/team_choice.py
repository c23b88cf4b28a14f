"""Which teams of warps products and convolutions on tensor cores have, for tests of one form."""

from __future__ import annotations

import pytest

from ort_cuda_plugin.kernels.conv import implicit_gemm_mma as matrix_conv
from ort_cuda_plugin.kernels.gemm import dispatch as contract
from ort_cuda_plugin.kernels.gemm.tile_shapes import Team


def use_team(monkeypatch: pytest.MonkeyPatch, team: Team | None) -> None:
    """All have this team, of whatever size they are; None: they have none."""
    for module in (contract, matrix_conv):
        monkeypatch.setattr(module, "choose_team", lambda *args, **more: team)
