"""Process of test_library_refusals.py: runs library calls that stand-ins refuse, so that substitutes replace them.

``python library_refusals.py FAKE_CUBLASLT.so FAKE_CUDNN.so FOLDER SEED`` prints a JSON list. For each case the seed
chooses the library function that fails; "all" runs each case with each function. ``python library_refusals.py
remembered FAKE_CUBLASLT.so FOLDER`` prints the result of `remembered`. FOLDER is for the cache of refusals.
"""

from __future__ import annotations

import ctypes
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import helper, parser

import ort_cuda_plugin
from device_models import model
from faults import Fault, Faults
from kernel_harness import Array, device, run_model
from library_engines import halved
from library_epilogues import CASES, TYPES, expected, values
from library_images import ATTENTION, HALF, NETS, exact, net
from library_scenarios import number, offer, use
from nn_reference import noise
from ort_cuda_plugin.compiler.caches.refusal_cache import RefusalCache
from ort_cuda_plugin.ep import boundary
from ort_cuda_plugin.ep.device import open_device, substitutes
from ort_cuda_plugin.program.steps.libraries import Refusals

FUNCTIONS = {
    "cublaslt": [
        "cublasLtCreate",
        "cublasLtMatmulDescCreate",
        "cublasLtMatmulDescSetAttribute",
        "cublasLtMatrixLayoutCreate",
        "cublasLtMatrixLayoutSetAttribute",
        "cublasLtMatmulPreferenceCreate",
        "cublasLtMatmulPreferenceSetAttribute",
        "cublasLtMatmulAlgoGetHeuristic",
        "cublasLtMatmul",
    ],
    "cudnn": [
        "cudnnCreate",
        "cudnnSetStream",
        "cudnnBackendCreateDescriptor",
        "cudnnBackendFinalize",
        "cudnnBackendSetAttribute",
        "cudnnBackendGetAttribute",
        "cudnnBackendExecute",
    ],
}
"""The functions of each library that may fail, in the order in which a library call of the plugin uses them."""

TRANSPOSED = """(float[2, 3, 7, 5] x, float[2, 3, 7, 6] w) => (float[2, 3, 5, 6] y) {
    t = Transpose<perm = [0, 1, 3, 2]>(x) p = MatMul(t, w) two = Constant<value_float = 0.5>() y = Mul(p, two) }"""

Run = Callable[[], float]
"""Type of a function that runs a model with calls of one library, and returns the largest error."""


def largest_error(found: list[Array], wanted: list[Array], dtype: Any) -> float:
    pairs = zip(found, wanted, strict=True)
    return max(float(np.max(np.abs(a.view(dtype).astype(np.float64) - b) / np.maximum(np.abs(b), 1))) for a, b in pairs)


def epilogue(name: str, seed: int, type_name: str) -> float:
    case = CASES[name]
    inputs = values(case, seed)
    narrow = {key: value.astype(TYPES[type_name]) for key, value in inputs.items()}
    graph = case.model([case.sums(case.bias), *case.nodes], narrow, seed % 2 == 1)
    return largest_error(run_model(graph, [narrow[key] for key in "xr"]), [expected(case, inputs)], TYPES[type_name])


def network(text: str, half: bool) -> float:
    graph, inputs = net(text, 2)
    dtype = np.float16 if half else np.float32
    found = run_model(halved(graph) if half else graph, [x.astype(dtype) for x in inputs])
    return largest_error(found, exact(graph, inputs[0]), dtype)


def attention(text: str) -> float:
    return network(text, half=True)


def transposed() -> float:
    x, w = (np.random.default_rng(seed).standard_normal((2, 3, 7, 5 + seed)).astype(np.float32) for seed in (0, 1))
    graph = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> transposed {TRANSPOSED}')
    return largest_error(run_model(graph, [x, w]), [0.5 * np.swapaxes(x, -1, -2) @ w], np.float32)


def cases() -> Iterator[tuple[str, str, Run]]:
    """Yield library, name and `Run` of models that cover each kind of call with its epilogues, types and layouts."""
    yield "cublaslt", "transposed", transposed
    for seed, name in enumerate(CASES):
        for type_name in TYPES if seed % 3 == 0 else ("float32", "float16"):
            library = "cublaslt" if name.startswith("product") else "cudnn"
            yield library, f"{name}, {type_name}", lambda n=name, s=seed, t=type_name: epilogue(n, s, t)  # type: ignore[misc]
    for name in ("residual", "activations", "line", "volume"):
        for half in (False, True) if name in HALF else (False,):
            yield "cudnn", f"{name}, {half}", lambda t=NETS[name], h=half: network(t, h)  # type: ignore[misc]
    for name, text in ATTENTION.items():
        yield "cudnn", name, lambda t=text: attention(t)  # type: ignore[misc]


def remembered(cublaslt: str, folder: str) -> dict[str, Any]:
    """Run sessions after a refusal: in this process, in a next one, with a new library version, in a capture, after a
    loss of the device.

    Return for each its refusals, its searches for algorithms, and its calls into Python; for the last its error.
    """
    fake = use("cublaslt", 0, cublaslt)
    cache = RefusalCache(Path(folder))
    open_device.OpenDevice.keeps_refusals = True  # type: ignore[assignment,method-assign]
    for module in (substitutes, open_device):
        vars(module)["refusal_cache"] = lambda: cache
    source = model(
        [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Relu", ["p"], ["y"])],
        {"x": [8, 8], "w": [8, 8]},
        {"y": [8, 8]},
    )
    faults = Faults()
    results: dict[str, Any] = {}

    def run(name: str, runs: int, session: Any = None, **options: str) -> Any:
        """Do Runs of a session, by default a new one, and record its counts. Python calls of the first Run are left
        out.
        """
        before, searches = ort_cuda_plugin.counters(), number(fake, "fake_searches")
        session = session or ort_cuda_plugin.session(source, emulate=True, provider_options=options)
        python = 0
        x, w = (ort.OrtValue.ortvalue_from_numpy(noise(seed, (8, 8)), "cuda", 0) for seed in (1, 2))
        binding = session.io_binding()
        binding.bind_ortvalue_input("x", x)
        binding.bind_ortvalue_input("w", w)
        y = ort.OrtValue.ortvalue_from_numpy(np.zeros((8, 8), np.float32), "cuda", 0)
        binding.bind_ortvalue_output("y", y)
        for position in range(runs):
            called = ort_cuda_plugin.counters()["python_calls"]
            session.run_with_iobinding(binding)
            np.testing.assert_allclose(y.numpy(), np.maximum(x.numpy() @ w.numpy(), 0), rtol=1e-5, atol=1e-5)
            python += ort_cuda_plugin.counters()["python_calls"] - called if position else 0
        refusals = ort_cuda_plugin.counters()["library_refusals"] - before["library_refusals"]
        results[name] = [refusals, number(fake, "fake_searches") - searches, python]
        return session

    faults.may_fail(fake)
    faults.arm(Fault("cublasLtMatmul", 1, 1, "on"))
    run("refused", 6)
    faults.arm(None)
    run("same process", 2)
    opened = open_device.use_device(device().info)
    vars(opened).pop("refusals")
    run("next process", 2)
    vars(open_device)["library_versions"] = lambda names: {"cublaslt": "14.0"}
    vars(opened).pop("refusals")
    run("new version", 2)
    vars(opened).pop("refusals")
    faults.arm(Fault("cublasLtCreate", 1, 1, "on"))
    run("captured", 8, enable_cuda_graph="1")
    vars(opened).pop("refusals")
    faults.arm(None)
    session = run("before loss", 2)
    faults.arm(Fault("cublasLtMatmul", 1, 719, "lost"))
    try:
        run("lost", 1, session)
    except Exception as error:
        results["lost"] = str(error)
    return results


def main(cublaslt: str, cudnn: str, folder: str, seed: str) -> list[dict[str, Any]]:
    """Return a row for each refused case: the failing function, the error of the result, and the numbers of refusals,
    of calls that the stand-in computed, and of warnings.
    """
    fakes = {"cublaslt": use("cublaslt", 0, cublaslt), "cudnn": use("cudnn", 1, cudnn)}
    offer("cublaslt", "cudnn")
    boundary.attach_own()
    cache = RefusalCache(Path(folder))
    vars(substitutes)["refusal_cache"] = lambda: cache
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ort_cuda_plugin").addHandler(handler)
    failing = ""
    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)(lambda name: name.decode() == failing)
    results = []
    for position, (library, name, run) in enumerate(cases()):
        fake, known = fakes[library], FUNCTIONS[library]
        chosen = known if seed == "all" else [known[(int(seed) + position) % len(known)]]
        for failing in chosen:
            vars(device())["refusals"] = Refusals()
            ctypes.c_void_p.in_dll(fake, "fake_fails").value = ctypes.cast(function, ctypes.c_void_p).value
            before, computed = ort_cuda_plugin.counters(), number(fake, "fake_runs")
            warnings.clear()
            error = run()
            after = ort_cuda_plugin.counters()
            results.append(
                {
                    "case": name,
                    "function": failing,
                    "error": error,
                    "refusals": after["library_refusals"] - before["library_refusals"],
                    "computed": number(fake, "fake_runs") - computed,
                    "warnings": len([text for text in warnings if "replaces the call" in text]),
                }
            )
            ctypes.c_void_p.in_dll(fake, "fake_fails").value = None
    return results


if __name__ == "__main__":
    print(json.dumps(remembered(*sys.argv[2:]) if sys.argv[1] == "remembered" else main(*sys.argv[1:])))
