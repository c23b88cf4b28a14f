"""Processes of test_nn_libraries.py: each runs one scenario with a stand-in library, which cannot be unloaded.

``python library_scenarios.py SCENARIO FAKE.so`` calls the function named SCENARIO (cublaslt, cudnn, graphs, ...), and
prints its result as JSON.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
from onnx import helper
from onnx.reference import ReferenceEvaluator

import ort_cuda_plugin
from device_models import model
from executor_harness import FLOAT, TestCluster
from kernel_harness import device, run_model
from library_engines import halved
from nn_reference import check_op, noise
from ort_cuda_plugin.abi.core import PluginError, core, ffi, new_error
from ort_cuda_plugin.clusters import cluster
from ort_cuda_plugin.compiler.caches import timing_cache
from ort_cuda_plugin.compiler.caches.plan_cache import PlanCache
from ort_cuda_plugin.ep import boundary
from ort_cuda_plugin.ep.device.measuring import tuner_of
from ort_cuda_plugin.ep.device.open_device import OpenDevice
from ort_cuda_plugin.ep.nodes.fused_node import FusedNode
from ort_cuda_plugin.kernels.library import dense_batches
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.plan.format import Param, Plan, PlanInput, PlanOutput, Record, RecordKind, Ref, RefKind
from ort_cuda_plugin.program.lowering.context import LoweringOptions
from ort_cuda_plugin.program.steps.libraries import CONV, MATMUL, LibraryProblem, ProblemFlags


def use(name: str, number: int, path: str) -> ctypes.CDLL:
    """Load a stand-in library, and let lowering for the emulated device use it."""
    error = new_error()
    assert core().library_load(number, path.encode(), error) == 0, ffi.string(error.text)
    fake = ctypes.CDLL(path)
    translate = int(ffi.cast("uintptr_t", core().emu_host_pointer))
    ctypes.c_void_p.in_dll(fake, "fake_translate").value = translate
    offer(name)
    return fake


_properties = OpenDevice.properties


def offer(*names: str) -> None:
    """Make the emulated device report that it has these libraries."""
    OpenDevice.properties = lambda self: replace(_properties(self), libraries=frozenset(names))  # type: ignore[method-assign]


def number(fake: ctypes.CDLL, name: str) -> int:
    return ctypes.c_int64.in_dll(fake, name).value


TUNED: dict[str, Any] = {"tunable_op_enable": True, "tunable_op_tuning_enable": True}
"""Options with which the algorithms of cuBLASLt are measured."""


def set_options(**options: Any) -> None:
    vars(cluster)["LoweringOptions"] = lambda: LoweringOptions(**options)


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
        check_op(
            "Gemm", [noise(1, (5, 7)), noise(2, (7, 6)), noise(3, (5, 6))], {"alpha": 0.5, "beta": 2.0}, dynamic=dynamic
        )
        check_op("Gemm", [noise(1, (5, 7)), noise(2, (7, 6)), noise(3, (5, 1))], dynamic=dynamic)
    runs = number(fake, "fake_runs")
    # Problems that the library must not get: a MatMul with two batch dimensions that do not collapse, and a float16
    # Gemm whose C has a shape that the library cannot add. Its call would round the accumulators to float16 before C
    # is added.
    check_op("MatMul", [noise(1, (2, 1, 5, 7)), noise(2, (1, 3, 7, 6))])
    check_op("Gemm", [noise(seed, shape, "float16") for seed, shape in enumerate([(5, 7), (7, 6), (5, 1)])])
    own = number(fake, "fake_runs") - runs
    for options in ({"use_tf32": True}, {"use_tf32": False}, {"deterministic": True}):
        set_options(**options)
        check_op("MatMul", [noise(1, (5, 7)), noise(2, (7, 6))])
        computes.append((number(fake, "fake_compute"), number(fake, "fake_reductions")))
    return {
        "runs": runs,
        "own": own,
        "computes": computes,
        "heads": heads(fake),
        "alive": number(fake, "fake_descriptors"),
    }


HEADS = """<ir_version: 10, opset_import: ["" : 20]> heads (float[B, 9, 3, 5] x, float[B, 11, 3, 5] y)
    => (float[B, 9, 3, 5] z) {
    q = Transpose<perm = [0, 2, 1, 3]>(x) k = Transpose<perm = [0, 2, 3, 1]>(y) v = Transpose<perm = [0, 2, 1, 3]>(y)
    s = MatMul(q, k) o = MatMul(s, v) z = Transpose<perm = [0, 2, 1, 3]>(o) }"""


def heads(fake: ctypes.CDLL) -> list[float]:
    """Return the number of calls and the largest error of attention GEMMs with operands copied to make batches dense.

    Such copies are made for large GEMMs; the limit is lowered so that the small model has them.
    """
    before, dense_batches.MUCH_WORK = dense_batches.MUCH_WORK, 1
    runs = number(fake, "fake_runs")
    x, y = noise(1, (2, 9, 3, 5)), noise(2, (2, 11, 3, 5))
    (found,) = run_model(onnx.parser.parse_model(HEADS), [x, y])
    dense_batches.MUCH_WORK = before
    exact = np.einsum("bqhd,bkhd,bkhe->bqhe", x, y, y, dtype=np.float64)
    return [number(fake, "fake_runs") - runs, float(np.max(np.abs(found - exact)))]


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


def put(fake: ctypes.CDLL, name: str, value: int) -> None:
    ctypes.c_int64.in_dll(fake, name).value = value


def set_pointer(fake: ctypes.CDLL, name: str, function: Any) -> None:
    ctypes.c_void_p.in_dll(fake, name).value = int(ffi.cast("uintptr_t", function))


def measured_products(path: str) -> dict[str, Any]:
    """Return a GEMM's chosen algorithm and number of calls for several options. The third algorithm is the fastest."""
    fake = use("cublaslt", 0, path)
    put(fake, "fake_fastest", 2)
    results = {}
    cases: dict[str, dict[str, Any]] = {
        "measured": TUNED,
        "limited": TUNED | {"tunable_op_max_tuning_duration_ms": 1},
        "deterministic": TUNED | {"deterministic": True},
        "not": {},
    }
    for name, options in cases.items():
        set_options(**options)
        before = number(fake, "fake_runs")
        check_op("MatMul", [noise(1, (5, 7)), noise(2, (7, 6))])
        results[name] = [number(fake, "fake_algorithm"), number(fake, "fake_runs") - before]
    put(fake, "fake_wrong", 2)
    set_options(**TUNED)
    check_op("MatMul", [noise(1, (5, 7)), noise(2, (7, 6))])
    check_op("MatMul", [noise(1, (3, 1, 7)), noise(2, (3, 7, 6))])
    results["wrong"] = [number(fake, "fake_algorithm")]
    return {**results, "alive": number(fake, "fake_descriptors")}


def tuned(path: str) -> dict[str, Any]:
    """Autotune a GEMM; return the numbers of measured candidates, library calls and stored timing files, and the
    program as text.
    """
    fake = use("cublaslt", 0, path)
    before = number(fake, "fake_runs")
    with tempfile.TemporaryDirectory() as folder:
        vars(timing_cache)["cache_folder"] = lambda: Path(folder)
        tuner = tuner_of(device(), device().properties())
        product = helper.make_node("MatMul", ["x", "w"], ["y"])
        proto = onnx.load_from_string(model([product], {"x": (5, 7), "w": (7, 6)}, {"y": (5, 6)}))
        compiled = cluster.CompiledCluster(read_model(proto), device().properties(), tuner=tuner)
        texts: list[str] = []
        compiled.show_program = texts.append
        fused = FusedNode("tuned", compiled, device())
        fused.prepare()
        fused.close()
        kept = len(list(Path(folder).glob("timings/*.times")))
    measured = ort_cuda_plugin.counters()["candidates_measured"]
    runs = number(fake, "fake_runs") - before
    alive = number(fake, "fake_descriptors")
    return {"measured": measured, "runs": runs, "kept": kept, "text": "".join(texts), "alive": alive}


def searches(path: str) -> dict[str, Any]:
    """Run a convolution with different options; return for each the heuristic mode, the engine, the calls, the size of
    the last dimension, and the number of fused operations.
    """
    fake = use("cudnn", 1, path)
    put(fake, "fake_fastest", 1)
    names = ("fake_mode", "fake_engine", "fake_runs", "fake_columns", "fake_operations")
    results = {}
    cases: dict[str, dict[str, Any]] = {
        "heuristic": {},
        "default": {"cudnn_conv_algo_search": "DEFAULT"},
        "exhaustive": {"cudnn_conv_algo_search": "EXHAUSTIVE"},
        "deterministic": {"cudnn_conv_algo_search": "EXHAUSTIVE", "deterministic": True},
        "column": {"cudnn_conv1d_pad_to_nc1d": False},
        "bare": {"fuse_conv_bias": False},
    }
    for name, options in cases.items():
        set_options(**options)
        put(fake, "fake_runs", 0)
        check_op("Conv", [noise(1, (1, 4, 9)), noise(2, (6, 4, 3)), noise(3, (6,))], constant=[1])
        results[name] = [number(fake, value) for value in names]
    put(fake, "fake_wrong", 1)
    set_options(cudnn_conv_algo_search="EXHAUSTIVE")
    check_op("Conv", [noise(1, (2, 4, 9, 5)), noise(2, (6, 4, 3, 3)), noise(3, (6,))], constant=[1])
    results["wrong"] = [number(fake, "fake_engine")]
    return {**results, "alive": number(fake, "fake_descriptors")}


def shifted(session: Any, feeds: dict[str, Any], shift: int, moved: str) -> Any:
    """Run with input ``moved`` bound ``shift`` elements after the start of its allocation; return the first output."""
    binding = session.io_binding()
    kept = []
    for name, x in feeds.items():
        elements = shift if name == moved else 0
        memory = np.concatenate([np.zeros(elements, x.dtype), x.reshape(-1)])
        kept.append(ort.OrtValue.ortvalue_from_numpy(memory, "cuda", 0))
        address = kept[-1].data_ptr() + elements * x.itemsize
        binding.bind_input(name, "cuda", 0, x.dtype, x.shape, address)
    binding.bind_output(session.get_outputs()[0].name, "cuda", 0)
    session.run_with_iobinding(binding)
    return binding.copy_outputs_to_cpu()[0]


ALIGNED = {
    "cublaslt": """(float16[9, 16] x, float16[16, 24] w, float16[24] b, float16[9, 24] r) => (float16[9, 24] y) {
        p = MatMul(x, w) q = Add(p, r) s = Add(q, b) y = Relu(s) }""",
    "cudnn": """(float16[2, 8, 7, 6] x, float16[16, 8, 3, 3] w, float16[16] b, float16[2, 16, 5, 4] r)
        => (float16[2, 16, 5, 4] y) { p = Conv(x, w, b) q = Add(p, r) y = Relu(q) }""",
}


def alignments(path: str) -> dict[str, Any]:
    """Run calls with one input at different alignments; return the largest errors, and the number of calls.

    The stand-in aborts the process if a pointer is less aligned than it was told, or than the library assumes.
    """
    name = "cudnn" if "cudnn" in Path(path).name else "cublaslt"
    fake = use(name, int(name == "cudnn"), path)
    results: dict[str, Any] = {}
    source = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> shifted {ALIGNED[name]}')
    shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in source.graph.input}
    feeds = {key: noise(seed, tuple(shape)).astype(np.float16) for seed, (key, shape) in enumerate(shapes.items())}
    exact: Any = ReferenceEvaluator(halved(source, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16))
    (wanted,) = exact.run(None, {key: x.astype(np.float64) for key, x in feeds.items()})
    for graphs in ("0", "1"):
        session = ort_cuda_plugin.session(
            source.SerializeToString(), emulate=True, provider_options={"automatic_cuda_graphs": graphs}
        )
        for moved in feeds:
            for shift in (0, 1, 2, 4, 8, 1, 1, 1):
                found = shifted(session, feeds, shift, moved)
                error = float(np.max(np.abs(found - wanted)) / np.max(np.abs(wanted)))
                results[moved] = max(results.get(moved, 0.0), error)
        del session
    gc.collect()
    return {"errors": results, "calls": number(fake, "fake_runs"), "alive": number(fake, "fake_descriptors")}


def graphs(path: str) -> dict[str, Any]:
    """Count CUDA graph events of sessions with a GEMM call that enqueues work on the stream, computes at once, waits
    for the stream, or enqueues different work each time.
    """
    fake = use("cublaslt", 0, path)
    driver = core().driver_emulator()

    source = model(
        [helper.make_node("MatMul", ["x", "one"], ["p"]), helper.make_node("Mul", ["p", "x"], ["y"])],
        {"x": [8, 8], "one": [8, 8]},
        {"y": [8, 8]},
    )
    set_pointer(fake, "fake_capturing", driver.StreamIsCapturing)
    results: dict[str, Any] = {}
    for name, copy, wait, runs in (
        ("enqueued", driver.MemcpyDtoDAsync, ffi.NULL, 6),
        ("computed", ffi.NULL, ffi.NULL, 6),
        ("waits", driver.MemcpyDtoDAsync, driver.StreamSynchronize, 6),
        ("varies", driver.MemcpyDtoDAsync, ffi.NULL, 40),
    ):
        put(fake, "fake_varies", name == "varies")
        set_pointer(fake, "fake_copy", copy)
        set_pointer(fake, "fake_wait", wait)
        session = ort_cuda_plugin.session(source, emulate=True)
        before = ort_cuda_plugin.counters()
        kept = []
        for seed in range(runs):
            x = ort.OrtValue.ortvalue_from_numpy(noise(seed, (8, 8)), "cuda", 0)
            one = ort.OrtValue.ortvalue_from_numpy(np.eye(8, dtype=np.float32), "cuda", 0)
            kept += [x, one, *session.run_with_ort_values(None, {"x": x, "one": one})]
        for seed in range(runs):
            np.testing.assert_array_equal(kept[3 * seed + 2].numpy(), noise(seed, (8, 8)) ** 2)
        after = ort_cuda_plugin.counters()
        results[name] = {key: after[key] - before[key] for key in after if "graph" in key or key == "library_calls"}
    return {**results, "cold": number(fake, "fake_cold")}


def threads(path: str) -> dict[str, Any]:
    """Count how often two threads used one library handle or plan at once, with one stream and with a stream each."""
    fake = use("cudnn", 1, path)
    put(fake, "fake_slow", 5000)
    source = model(
        [helper.make_node("Conv", ["x", "w"], ["y"], kernel_shape=[1, 1])],
        {"x": [1, 2, 3, 3], "w": [2, 2, 1, 1]},
        {"y": [1, 2, 3, 3]},
    )
    x, w = noise(1, (1, 2, 3, 3)), noise(2, (2, 2, 1, 1))
    results = {}
    for name, unified in (("one", "1"), ("each", "0")):
        options = {"use_ep_level_unified_stream": unified, "automatic_cuda_graphs": "0"}
        session = ort_cuda_plugin.session(source, emulate=True, provider_options=options)
        with ThreadPoolExecutor(4) as pool:
            runs = [pool.submit(session.run, None, {"x": x, "w": w}) for _ in range(32)]
        for y in (run.result()[0] for run in runs):
            np.testing.assert_allclose(y, np.einsum("nchw,dc->ndhw", x, w[:, :, 0, 0]), rtol=1e-5, atol=1e-6)
        results[name] = number(fake, "fake_shared")
        if name == "one":
            results["handles_one"] = number(fake, "fake_handles")
        del session, runs
    return results


def kept_plans(path: str) -> dict[str, Any]:
    """Count cuDNN plans that are built, and loaded from the plan cache: in a first and a second session, a steady Run,
    another size, with measurements, and with damaged cache entries.
    """
    os.environ["FAKE_CUDNN_SAVES"] = "1"
    fake = use("cudnn", 1, path)
    folder = Path(path).parent / "plans"
    cache = PlanCache(folder)
    vars(boundary)["plan_cache"] = lambda: cache
    source = model(
        [helper.make_node("Conv", ["x", "w"], ["y"], kernel_shape=[1, 1])],
        {"x": ["n", 2, 3, 3], "w": [2, 2, 1, 1]},
        {"y": ["n", 2, 3, 3]},
    )
    sessions: list[Any] = []
    results: dict[str, Any] = {}

    def run(name: str, images: int, **options: str) -> None:
        """Do a Run, in a new session if there are options, and record its counts of plans."""
        before = [number(fake, key) for key in ("fake_plans_built", "fake_plans_loaded")]
        if options:
            sessions.append(ort_cuda_plugin.session(source, emulate=True, provider_options=options))
        x, w = noise(images, (images, 2, 3, 3)), noise(2, (2, 2, 1, 1))
        y = sessions[-1].run(None, {"x": x, "w": w})[0]
        np.testing.assert_allclose(y, np.einsum("nchw,dc->ndhw", x, w[:, :, 0, 0]), rtol=1e-5, atol=1e-6)
        after = [number(fake, key) for key in ("fake_plans_built", "fake_plans_loaded")]
        results[name] = [now - then for now, then in zip(after, before, strict=True)]

    plain = {"automatic_cuda_graphs": "0"}
    run("first", 1, **plain)
    run("second", 1, **plain)
    calls = ort_cuda_plugin.counters()["python_calls"]
    run("again", 1)
    results["python"] = ort_cuda_plugin.counters()["python_calls"] - calls
    run("size", 2)
    run("deterministic", 1, deterministic="1", **plain)
    run("measured", 1, cudnn_conv_algo_search="EXHAUSTIVE", **plain)
    run("measured again", 1, cudnn_conv_algo_search="EXHAUSTIVE", **plain)
    for entry in folder.glob("*.plan"):
        entry.write_bytes(entry.read_bytes().replace(b"fake plan", b"fake plot"))
    run("damaged", 1, **plain)
    for entry in folder.glob("*.plan"):  # valid cache entries with contents that the library refuses
        body = b"another plan"
        entry.write_bytes(cache.magic + hashlib.sha256(body).digest() + body)
    run("unknown", 1, **plain)
    run("mended", 1, **plain)
    results["entries"] = len(list(folder.glob("*.plan")))
    sessions.clear()
    gc.collect()
    results["alive"] = number(fake, "fake_descriptors")
    return results


def plans_at_once(path: str) -> dict[str, Any]:
    """Count the plans that first Runs build, load from the cache, and build at the same time: in a first session, a
    second one, and for another size.
    """
    os.environ["FAKE_CUDNN_SAVES"] = "1"
    fake = use("cudnn", 1, path)
    put(fake, "fake_building_takes", 50000)
    cache = PlanCache(Path(path).parent / "plans")
    vars(boundary)["plan_cache"] = lambda: cache
    sizes = (1, 1, 2, 2, 2)  # kernel sizes; the first two convolutions are equal problems
    nodes = [
        helper.make_node("Conv", [f"y{i}" if i else "x", f"w{i}"], [f"y{i + 1}"], kernel_shape=[size, size])
        for i, size in enumerate(sizes)
    ]
    weights = {f"w{i}": (2, 2, size, size) for i, size in enumerate(sizes)}
    source = model(nodes, {"x": ["n", 2, 9, 9], **weights}, {"y5": ["n", 2, 6, 6]})
    feeds = {name: noise(seed, shape) for seed, (name, shape) in enumerate(weights.items())}
    wanted: Any = ReferenceEvaluator(source)
    results: dict[str, Any] = {}
    sessions: list[Any] = []
    for name, images in (("first", 1), ("second", 1), ("size", 2)):
        before = [number(fake, key) for key in ("fake_plans_built", "fake_plans_loaded")]
        put(fake, "fake_most_at_once", 0)
        if name != "size":
            sessions.append(ort_cuda_plugin.session(source, emulate=True))
        given = {"x": noise(images, (images, 2, 9, 9)), **feeds}
        np.testing.assert_allclose(sessions[-1].run(None, given)[0], wanted.run(None, given)[0], rtol=1e-4, atol=1e-4)
        after = [number(fake, key) for key in ("fake_plans_built", "fake_plans_loaded")]
        results[name] = [*(now - then for now, then in zip(after, before, strict=True))]
        results[name].append(number(fake, "fake_most_at_once"))
    sessions.clear()
    gc.collect()
    results["alive"] = number(fake, "fake_descriptors")
    return results


def many_sizes(path: str) -> dict[str, Any]:
    """Run a GEMM with more sizes than its problem caches; return the most live descriptors and number of searches."""
    fake = use("cublaslt", 0, path)
    source = model([helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": ["n", 3], "w": [3, 2]}, {"y": ["n", 2]})
    session = ort_cuda_plugin.session(source, emulate=True)
    w = noise(2, (3, 2))
    most = 0
    for rows in [*range(2, 302), 2]:
        x = noise(rows, (rows, 3))
        np.testing.assert_allclose(session.run(None, {"x": x, "w": w})[0], x @ w, rtol=1e-5, atol=1e-6)
        most = max(most, number(fake, "fake_descriptors"))
    searches = number(fake, "fake_searches")
    del session
    gc.collect()
    return {"most": most, "searches": searches, "alive": number(fake, "fake_descriptors")}


def plans(path: str) -> dict[str, Any]:
    """Return the errors for plans with wrong parameters of a library call, and for impossible sizes."""
    use("cublaslt", 0, str(Path(path).with_name("libcublaslt.so")))
    use("cudnn", 1, path)
    fields = PlanInput(FLOAT, 1, 0), PlanOutput(FLOAT, (0,), 0)
    x, out = Param.pointer(Ref(RefKind.INPUT, 0)), Param.pointer(Ref(RefKind.OUTPUT, 0))
    product = LibraryProblem(MATMUL, FLOAT, ProblemFlags(0))
    finished = LibraryProblem(
        MATMUL, FLOAT, ProblemFlags.BIAS | ProblemFlags.RESIDUAL | ProblemFlags.GELU, beta=1.0
    )  # fmt: skip
    convolution = LibraryProblem(CONV, FLOAT, ProblemFlags.BIAS | ProblemFlags.RELU, rank=2)
    ones = {product: 11, finished: 11, convolution: 5 + 2 * 7 + 1}
    pointers = {product: 4, finished: 6, convolution: 5}

    def attempt(problem: LibraryProblem, params: list[Param]) -> str:
        record = Record(RecordKind.LIBRARY, 0, tuple(params))
        plan = Plan(1, fields[:1], fields[1:], ("Call_1",), (), records=(record,), problems=(0,))
        error = new_error()
        spec = ffi.new("ocp_problem_spec *", asdict(problem))
        with TestCluster() as cluster:
            made = core().problem_create(spec, error)
            assert made != ffi.NULL, ffi.string(error.text)
            core().cluster_add_problem(cluster.pointer, made, error)
            try:
                cluster.add(plan)
                cluster.run(np.ones(4096, np.float32))
            except PluginError as failure:
                return str(failure)
            finally:
                core().problem_release(made)
        return ""

    results: dict[str, list[str]] = {"right": [], "parameters": [], "sizes": []}
    for problem, count in ones.items():
        addresses, numbers = [out] + [x] * (pointers[problem] - 1), [Param.i64(value=1)] * count
        # 0 images, or 0 batches: the call computes nothing and must succeed.
        empty = 0 if problem is convolution else 6
        numbers[empty] = Param.i64(value=0)
        results["right"].append(attempt(problem, addresses + numbers))
        for wrong in (
            addresses[1:] + numbers,
            [*addresses, x, *numbers],
            addresses + numbers[1:],
            [*addresses, *numbers[1:], Param.i32(value=1)],
        ):
            results["parameters"].append(attempt(problem, wrong))
        for place, size in ((empty, -1), (1, -5), (3 if problem is convolution else 2, 0)):
            results["sizes"].append(
                attempt(problem, addresses + [*numbers[:place], Param.i64(value=size), *numbers[place + 1 :]])
            )
    return results


if __name__ == "__main__":
    scenario, path = sys.argv[1:]
    scenarios = {
        "cublaslt": cublaslt,
        "cudnn": cudnn,
        "alignments": alignments,
        "graphs": graphs,
        "plans": plans,
        "measured_products": measured_products,
        "tuned": tuned,
        "searches": searches,
        "threads": threads,
        "many_sizes": many_sizes,
        "kept_plans": kept_plans,
        "plans_at_once": plans_at_once,
    }
    print(json.dumps(scenarios[scenario](path)))
