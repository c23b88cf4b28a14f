"""Which sliced-K tile GEMMs and convolutions on tensor cores have, for tests of one tile."""

from __future__ import annotations

import pytest

from ort_cuda_plugin.kernels.gemm.tile_shapes import TileConfig
from ort_cuda_plugin.schedule import conv, gemm


def use_team(monkeypatch: pytest.MonkeyPatch, team: TileConfig | None) -> None:
    """All have this tile, of whatever size they are; None: tiles without sliced-K."""
    for module in (gemm, conv):
        monkeypatch.setattr(module, "choose_tile_config", lambda *args, **more: team)
