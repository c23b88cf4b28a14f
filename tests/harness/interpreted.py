"""Checks models of operator tests in the reference interpreter of programs (`programs`).

If a test runs a model on the emulated device, `interpret` also checks that the model's program computes the same after
each compiler pass. It does so for one in `SHARE` models, on one device kind; both follow from the model's hash. With
``pytest --interpret`` it checks all models on all device kinds.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence

import numpy as np
import onnx

from ort_cuda_plugin.model.onnx_graph import storage
from ort_cuda_plugin.program.lowering.context import LoweringOptions
from programs.states import DEVICES, CannotRunError, first_difference, record
from programs.values import Array

INTERPRET_VARIABLE = "ORT_CUDA_PLUGIN_TEST_INTERPRET"
"""Environment variable: "1" checks all models. ``pytest --interpret`` sets it, and worker processes inherit it."""
SHARE = 24
"""Without ``pytest --interpret``, one model in SHARE is checked."""


def interpret(
    model: onnx.ModelProto,
    inputs: Sequence[Array | np.generic],
    dynamic: bool = False,
    options: LoweringOptions | None = None,
) -> None:
    """Assert that the program of a model computes the same after each pass, if the model is among the chosen ones."""
    digest = zlib.crc32(model.SerializeToString(deterministic=True))
    kinds = list(DEVICES)
    if os.environ.get(INTERPRET_VARIABLE) != "1":
        if digest % SHARE:
            return
        kinds = [kinds[digest // SHARE % len(kinds)]]
    feeds = [np.asarray(storage(np.asarray(x))[0]) for x in inputs]
    for kind in kinds:
        try:
            found = first_difference(record(model, feeds, DEVICES[kind], options, dynamic), feeds)
        except CannotRunError:
            continue
        assert found is None, f"{kind}: {found}"
