"""Models of operator tests in the reference interpreter: all with ``pytest --interpret``, else one of `SHARE`.

A test that runs a model on the emulated device also compares the model's programs after each pass, on a device kind
that the model's digest chooses; with ``--interpret`` on all kinds.
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
"""1: all models, as ``pytest --interpret`` says. Worker processes inherit it."""
SHARE = 24
"""Without it one model in so many is interpreted, on one device kind."""


def interpret(
    model: onnx.ModelProto,
    inputs: Sequence[Array | np.generic],
    dynamic: bool = False,
    options: LoweringOptions | None = None,
) -> None:
    """Asserts that the programs of a model compute the same after each pass, if the model is among those chosen."""
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
