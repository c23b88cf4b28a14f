"""Forces the sliced-K tile of GEMMs and convolutions on tensor cores, for tests of a single tile."""

from __future__ import annotations

import pytest

from ort_cuda_plugin.kernels.gemm.tile_shapes import TileConfig
from ort_cuda_plugin.schedule import conv, gemm


def use_team(monkeypatch: pytest.MonkeyPatch, team: TileConfig | None) -> None:
    """Use this tile for all GEMMs and convolutions, whatever their sizes; None: tiles without sliced-K."""
    for module in (gemm, conv):
        monkeypatch.setattr(module, "choose_tile_config", lambda *args, **more: team)
