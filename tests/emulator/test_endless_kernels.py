"""A kernel that never ends: a warning names it, and SIGINT ends the launch."""

from __future__ import annotations

import re

import pytest

from isolated import HARNESS, python

RUN = """
import dataclasses
import signal
import sys
import threading

import numpy as np
import onnx

sys.path.insert(0, sys.argv[1])
from emulator_harness import apply, current

import ort_cuda_plugin
from ort_cuda_plugin.custom import Float32, Lowering, launch, numba_kernel, op

kernel = numba_kernel(sys.argv[2], name="endless")
apply(dataclasses.replace(current(), slow_milliseconds=1, check=int(sys.argv[3])))
handled = threading.Event()
signal.signal(signal.SIGINT, lambda *_: handled.set())


@op("my.domain::Endless", version=1)
def endless(ctx: Lowering, x: Float32) -> Float32:
    y = ctx.empty(x.shape, x.dtype)
    launch(ctx, kernel, 4, 64, [ctx.contiguous(x), y], writes=[y])
    return y


model = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["my.domain" : 1]> g (float[64] x) => (y) { y = my.domain.Endless (x) }'
)
session = ort_cuda_plugin.session(model.SerializeToString(), emulate=True)
ended = threading.Event()


def interrupt():
    while not ended.wait(0.01):
        signal.raise_signal(signal.SIGINT)


thread = threading.Thread(target=interrupt)
thread.start()
try:
    session.run(None, {"x": np.ones(64, np.float32)})
except Exception as error:
    print(error)
ended.set()
thread.join()
assert handled.is_set(), "the application's handler runs too"
"""
KERNEL = """
def kernel(x, y):
    i = cuda.threadIdx.x
    y[i] = x[i]
    while y[i] == x[i]:
        """
LOOPS = {
    "barriers": "cuda.syncthreads()",
    "warp operations": "cuda.syncwarp(0xffffffff)",
    "checked accesses": "y[i] = x[i]",
}


@pytest.mark.parametrize("loop", LOOPS)
def test_sigint_ends_a_kernel_that_never_ends(loop: str) -> None:
    kernel = KERNEL + LOOPS[loop]
    check = str(int(loop == "checked accesses"))
    done = python(RUN, str(HARNESS), kernel, check, env={"ORT_CUDA_PLUGIN_EMULATE_CHECK": check}, preloaded=True)
    assert re.search(r"interrupted: kernel endless_\w+, block \(\d,0,0\): SIGINT ended the launch after", done.stdout)
    said = (
        r"kernel endless_\w+ has run for \S+ seconds on the emulated device, and runs block \(\d,0,0\) of \(4,1,1\)(.*)"
    )
    (warning,) = re.findall(said, done.stderr)  # a launch warns once
    threads = "; 64 of the 64 threads of this block have not ended" if loop != "checked accesses" else ""
    assert warning.startswith(f"{threads}. Does a loop never end? SIGINT (Ctrl-C) ends the launch")
