"""Copies between host and device come after the work whose results they read or replace, on every path."""

from __future__ import annotations

import pytest

from copy_paths import VARIANTS
from isolated import HARNESS, python


@pytest.mark.parametrize(("variant", "seed"), [("plain", 1), ("plain", 2), *((variant, 3) for variant in VARIANTS)])
def test_no_copy_runs_ahead_of_what_it_copies(variant: str, seed: int) -> None:
    environment = {
        "PYTHONPATH": str(HARNESS),
        "ORT_CUDA_PLUGIN_EMULATE_STREAMS": "adversarial",
        "ORT_CUDA_PLUGIN_EMULATE_SEED": str(seed),
        "ORT_CUDA_PLUGIN_EMULATE_DEVICES": "2",
    }
    done = python(
        "import copy_paths, sys; copy_paths.main(*sys.argv[1:])",
        str(seed),
        "3",
        variant,
        env=environment,
        preloaded=True,
    )
    assert done.stdout == "{}\n"
