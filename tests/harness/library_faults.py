"""Process of test_library_faults.py: runs calls of stand-in libraries that are wrong, slow, refused, or fail.

``python library_faults.py FAKE_CUBLASLT.so FAKE_CUDNN.so`` prints a JSON list.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import numpy as np

import ort_cuda_plugin
from kernel_harness import device
from library_images import ATTENTION
from library_refusals import Run, attention, epilogue
from library_scenarios import number, offer, use
from ort_cuda_plugin.ep import boundary
from ort_cuda_plugin.ep.device import substitutes
from ort_cuda_plugin.program.steps.libraries import Refusals

HOW = ("refused", "failing", "wrong", "slow")
CALLS: dict[str, tuple[str, Run]] = {
    "product_bias_relu_float32": ("cublaslt", lambda: epilogue("product, bias, ReLU", 1, "float32")),
    "product_residual_float16": ("cublaslt", lambda: epilogue("product, residual", 1, "float16")),
    "product_batched_bias_residual_relu_float32": ("cublaslt", lambda: epilogue("products, all", 1, "float32")),
    "convolution_2d*_bias_relu_float32": ("cudnn", lambda: epilogue("convolution, ReLU", 1, "float32")),
    "convolution_3d*_bias*_float16": ("cudnn", lambda: epilogue("volumes, all", 1, "float16")),
    "attention*_float16": ("cudnn", lambda: attention(next(iter(ATTENTION.values())))),
}
"""Pattern of a call's description -> (library, function that makes the call and returns the largest error)."""


def main(cublaslt: str, cudnn: str) -> list[dict[str, Any]]:
    """Return the largest error and the numbers of refusals, faulty calls and all calls, for each call and fault.

    Each call is also made without a fault.
    """
    fakes = {"cublaslt": use("cublaslt", 0, cublaslt), "cudnn": use("cudnn", 1, cudnn)}
    offer("cublaslt", "cudnn")
    boundary.attach_own()
    vars(substitutes)["refusal_cache"] = lambda: None
    results = []
    for call, (library, run) in CALLS.items():
        for how in ("", *HOW):
            vars(device())["refusals"] = Refusals()
            fake = fakes[library]
            fault = (ctypes.c_char * 128).in_dll(fake, "fake_fault")
            fault.value = f"{how}:{call}".encode() if how else b""
            before, struck, runs = ort_cuda_plugin.counters(), number(fake, "fake_faults"), number(fake, "fake_runs")
            with np.errstate(all="ignore"):
                error = run()
            refusals = ort_cuda_plugin.counters()["library_refusals"] - before["library_refusals"]
            found = {"call": call, "how": how, "error": error, "refusals": refusals}
            found |= {"faults": number(fake, "fake_faults") - struck, "runs": number(fake, "fake_runs") - runs}
            results.append(found)
            fault.value = b""
    return results


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
