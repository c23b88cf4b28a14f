"""What test_nn_libraries.py runs in processes of their own: a library stays loaded once it is.

``python library_scenarios.py cublaslt|cudnn FAKE.so`` prints one JSON object.
"""

from __future__ import annotations

import ctypes
import json
import sys
from dataclasses import replace
from typing import Any

from nn_reference import check_op, noise
from ort_cuda_plugin.abi.core import core, ffi, new_error
from ort_cuda_plugin.ep.open_device import OpenDevice
from ort_cuda_plugin.graph import cluster
from ort_cuda_plugin.graph.lowering import LoweringOptions


def use(name: str, number: int, path: str) -> ctypes.CDLL:
    """Loads the stand-in and has operators use it on the emulated device."""
    error = new_error()
    assert core().library_load(number, path.encode(), error) == 0, ffi.string(error.text)
    fake = ctypes.CDLL(path)
    translate = int(ffi.cast("uintptr_t", core().emu_host_pointer))
    ctypes.c_void_p.in_dll(fake, "fake_translate").value = translate
    properties = OpenDevice.properties
    OpenDevice.properties = lambda self: replace(properties(self), libraries=frozenset({name}))  # type: ignore[method-assign]
    return fake


def number(fake: ctypes.CDLL, name: str) -> int:
    return ctypes.c_int64.in_dll(fake, name).value


def set_options(**options: bool) -> None:
    cluster.LoweringOptions = lambda: LoweringOptions(**options)  # type: ignore[misc,assignment]


def cublaslt(path: str) -> dict[str, Any]:
    fake = use("cublaslt", 0, path)
    computes = []
    for dynamic in (False, True):
        check_op("MatMul", [noise(1, (5, 7)), noise(2, (7, 6))], dynamic=dynamic)
        check_op("MatMul", [noise(1, (2, 5, 7)), noise(2, (2, 7, 6))], dynamic=dynamic)
        check_op("MatMul", [noise(1, (2, 5, 7)), noise(2, (7, 6))], dynamic=dynamic)
        check_op("MatMul", [noise(1, (5, 7)), noise(2, (2, 7, 6))], dynamic=dynamic)
        check_op("MatMul", [noise(1, (1, 7)), noise(2, (7, 1))], dynamic=dynamic)
        check_op("MatMul", [noise(1, (0, 7)), noise(2, (7, 6))], dynamic=dynamic)
        for trans_a, trans_b in ((0, 0), (0, 1), (1, 0), (1, 1)):
            a, b = noise(1, (7, 5) if trans_a else (5, 7)), noise(2, (6, 7) if trans_b else (7, 6))
            check_op("Gemm", [a, b, noise(3, (6,))], {"transA": trans_a, "transB": trans_b}, dynamic=dynamic)
    runs = number(fake, "fake_runs")
    # What the library is not asked: two dimensions of batches that do not collapse, factors, other addends.
    check_op("MatMul", [noise(1, (2, 1, 5, 7)), noise(2, (1, 3, 7, 6))])
    check_op("Gemm", [noise(1, (5, 7)), noise(2, (7, 6)), noise(3, (5, 1))])
    check_op("Gemm", [noise(1, (5, 7)), noise(2, (7, 6))], {"alpha": 2.0})
    own = number(fake, "fake_runs") - runs
    for options in ({"use_tf32": True}, {"use_tf32": False}, {"deterministic": True}):
        set_options(**options)
        check_op("MatMul", [noise(1, (5, 7)), noise(2, (7, 6))])
        computes.append((number(fake, "fake_compute"), number(fake, "fake_reductions")))
    return {"runs": runs, "own": own, "computes": computes, "alive": number(fake, "fake_descriptors")}


def cudnn(path: str) -> dict[str, Any]:
    fake = use("cudnn", 1, path)
    cases: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
        ((2, 4, 7, 6), (6, 4, 3, 3), {"pads": [1, 1, 1, 1]}),
        ((1, 4, 7, 6), (6, 2, 3, 2), {"group": 2, "strides": [2, 1], "dilations": [1, 2]}),
        ((1, 4, 9), (3, 4, 3), {"strides": [2]}),
        ((1, 2, 4, 5, 6), (3, 2, 2, 3, 2), {"pads": [1, 0, 1, 1, 0, 1]}),
        ((0, 4, 7, 6), (6, 4, 3, 3), {}),
    ]
    for x, w, attributes in cases:
        for dynamic in (False, True):
            check_op("Conv", [noise(1, x), noise(2, w), noise(3, w[:1])], attributes, constant=[1], dynamic=dynamic)
    runs = number(fake, "fake_runs")
    check_op("Conv", [noise(1, (1, 4, 7, 6)), noise(2, (6, 4, 3, 3))], {"pads": [1, 0, 0, 0]})
    own = number(fake, "fake_runs") - runs
    engines = []
    for options in ({"use_tf32": True}, {"use_tf32": False}, {"use_tf32": True, "deterministic": True}):
        set_options(**options)
        check_op("Conv", [noise(1, (1, 4, 7, 6)), noise(2, (6, 4, 3, 3))])
        engines.append(number(fake, "fake_engine"))
    return {"runs": runs, "own": own, "engines": engines, "alive": number(fake, "fake_descriptors")}


if __name__ == "__main__":
    scenario, path = sys.argv[1:]
    result = {"cublaslt": cublaslt, "cudnn": cudnn}[scenario](path)
    print(json.dumps(result))
