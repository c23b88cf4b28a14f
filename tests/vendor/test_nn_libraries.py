"""Calls of vendor libraries: stand-ins that compute get them, and on a GPU real ones, compared with our kernels."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from build_plugin import compiler
from c_programs import fake_library
from isolated import HARNESS, ROOT, python
from ort_cuda_plugin.abi.core import core, ffi, new_error
from ort_cuda_plugin.ep.device.devices import cuda_devices
from ort_cuda_plugin.ep.device.libraries import LIBRARIES, candidates
from ort_cuda_plugin.program.steps.libraries import ATTENTION, CONV, MATMUL, LibraryProblem, ProblemFlags

ENVIRONMENT: dict[str, str] = {}
"""Further environment variables of the processes that run scenarios."""


def run_scenario(name: str, folder: Path, library: str = "") -> dict[str, Any]:
    stand_in = fake_library(library or name, folder)
    result: dict[str, Any] = run_in_process("library_scenarios.py", name, str(stand_in))
    return result


def run_in_process(file: str, *arguments: str) -> Any:
    """Run a file of the harness in a new process, as a process never unloads a library; return the JSON it prints."""
    command = [sys.executable, str(HARNESS / file), *arguments]
    env = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], **ENVIRONMENT}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_cublaslt_gets_products_of_every_layout_and_computes_them_right(tmp_path: Path) -> None:
    result = run_scenario("cublaslt", tmp_path)
    assert result["runs"] >= 14
    assert result["own"] == 0  # library calls for problems that our kernels compute
    calls, error = result["heads"]
    assert calls == 2
    assert error < 1e-5
    tf32, float32, deterministic = result["computes"]
    assert tf32 == [77, 7]  # CUBLAS_COMPUTE_32F_FAST_TF32, every reduction scheme
    assert float32 == [68, 7]  # CUBLAS_COMPUTE_32F
    assert deterministic == [77, 6]  # no reductions in place
    assert result["alive"] == 0  # every descriptor was destroyed


def test_cudnn_gets_convolutions_and_an_engine_of_the_precision_asked_for(tmp_path: Path) -> None:
    result = run_scenario("cudnn", tmp_path)
    assert result["runs"] == 8
    assert result["own"] == 0
    assert result["engines"] == [0, 1, 1]  # the first has tensor cores and is not deterministic
    assert result["alive"] == 0


def test_a_library_is_measured_beside_our_kernels(tmp_path: Path) -> None:
    result = run_scenario("tuned", tmp_path, "cublaslt")
    assert result["measured"] == 3  # the library, a tiled GEMM, and one with a block per row
    assert result["runs"] > 5
    assert result["kept"] == 1
    assert all(name in result["text"] for name in ("measured ", "library", "simt 16x64x16", "gemv"))
    assert result["alive"] == 0


def test_the_time_of_a_substitute_is_not_the_time_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENVIRONMENT, "FAKE_REFUSES", "cublasLtMatmul")
    result = run_scenario("tuned", tmp_path, "cublaslt")
    assert result["measured"] == 2  # a tiled GEMM, and one with a block per row
    assert result["runs"] == 0
    assert "measured " in result["text"]
    assert "cuBLASLt: product" not in result["text"]


def test_the_fastest_algorithm_of_a_product_is_found_by_measuring(tmp_path: Path) -> None:
    result = run_scenario("measured_products", tmp_path, "cublaslt")
    algorithm, runs = result["measured"]
    assert algorithm == 2
    assert runs == 3 * 4 + result["not"][1]  # each of the three algorithms ran four times
    assert result["limited"] == [0, 4 + result["not"][1]]  # the first algorithm used up the time limit
    assert result["deterministic"] == result["not"]
    assert result["not"][0] == 0
    assert result["wrong"] != [2]  # the fastest algorithm computes a wrong element
    assert result["alive"] == 0


def test_options_decide_how_cudnn_gets_a_convolution(tmp_path: Path) -> None:
    result = run_scenario("searches", tmp_path, "cudnn")
    once = result["heuristic"][2]
    assert result["heuristic"] == [3, 0, once, 9, 2]  # CUDNN_HEUR_MODE_A; rows of 9 elements; convolution and bias
    assert result["default"] == [0, 0, once, 9, 2]  # CUDNN_HEUR_MODE_INSTANT
    assert result["exhaustive"] == [3, 1, 4 * 4 + once, 9, 2]  # two engines, which both heuristics name
    assert result["deterministic"] == [3, 1, once, 9, 2]  # the first engine is not deterministic
    assert result["column"] == [3, 0, once, 1, 2]
    assert result["bare"] == [3, 0, once, 9, 1]
    assert result["wrong"] == [0]  # the fastest engine computes a wrong element
    assert result["alive"] == 0


def is_apart(result: dict[str, Any]) -> bool:
    """Return whether the layouts of a residual and the convolution differ: a convolution of half types is NHWC, a
    residual that is an input of the model is not.
    """
    case: str = result["case"]
    return result["dtype"] != "float32" and case in ("convolution, residual", "convolution, all", "volumes, all")


def test_a_fused_call_is_the_exact_result_rounded_once(tmp_path: Path) -> None:
    stand_ins = [str(fake_library(name, tmp_path)) for name in ("cublaslt", "cudnn")]
    for result in run_in_process("library_epilogues.py", *stand_ins):
        fused, unfused = result["fused"], result["unfused"]
        runs = [1, 0] if result["case"].startswith("product") else [0, 1]
        assert fused["runs"] == unfused["runs"] == runs, result
        # The result is exact except for GELU.
        assert fused["error"] <= (1e-6 if "GELU" in result["case"] else 0) or is_apart(result), result
        # A Conv with its bias is one operator, which rounds once.
        rounds_twice = result["dtype"] != "float32" and result["case"] not in (
            "convolution, ReLU",
            "convolution, Concat",
        )
        assert unfused["error"] > 1e-4 if rounds_twice else unfused["error"] == fused["error"], result


def test_networks_of_channels_last_and_of_attention_compute_what_they_did(tmp_path: Path) -> None:
    stand_ins = [str(fake_library(name, tmp_path)) for name in ("cublaslt", "cudnn")]
    for result in run_in_process("library_images.py", *stand_ins):
        if "calls" in result:
            # 1x1 convolutions that write into a concatenation are GEMMs, which may write strided results.
            assert result["calls"] == [2, 3], result
            assert result["error"] <= 5e-6, result
            continue
        if "attention" in result:
            assert result["attention"] == 1, result
            assert result["error"] <= 2e-3, result
            continue
        calls, channels_last = result["runs"]
        assert calls == channels_last > 1, result
        assert result["operations"] == 3 or result["net"] != "activations", result
        assert result["error"] <= (1e-2 if result["half"] else 5e-6), result


@pytest.mark.parametrize("library", ["cublaslt", "cudnn"])
def test_an_input_may_lie_at_any_multiple_of_its_element(library: str, tmp_path: Path) -> None:
    result = run_scenario("alignments", tmp_path, library)
    assert result["calls"] > 4  # the stand-in computes nothing in graph replays
    assert max(result["errors"].values()) <= 1e-3, result
    assert result["alive"] == 0


def test_a_stand_in_names_the_pointer_that_is_less_aligned_than_declared(tmp_path: Path) -> None:
    code = """
    import ctypes, sys
    fake, words = ctypes.CDLL(sys.argv[1]), (ctypes.c_uint64 * 8)(0xA160, 0, 8, 8, 16, 16)
    handle = ctypes.create_string_buffer(64)
    nothing, address = ctypes.c_void_p(0), ctypes.c_void_p
    fake.cublasLtMatmul(handle, nothing, nothing, address(8), nothing, address(12), nothing, nothing, nothing, nothing,
                        nothing, nothing, words, nothing, ctypes.c_size_t(0), nothing)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(fake_library("cublaslt", tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == -signal.SIGABRT
    assert "cublasLtMatmul: the pointer B is 0xc, not a multiple of 8 bytes" in done.stderr


def test_library_calls_are_nodes_of_graphs_unless_they_cannot_be_captured(tmp_path: Path) -> None:
    result = run_scenario("graphs", tmp_path, "cublaslt")
    assert result["cold"] == 0  # the first call of a handle is never captured
    enqueued = result["enqueued"]
    assert (enqueued["graph_captures"], enqueued["graph_replays"], enqueued["library_calls"]) == (1, 4, 6)
    assert enqueued["graph_updates"] == 3 * 2  # both nodes have the address of x, which differs in each run
    assert enqueued["graph_fallbacks"] == 0
    # Each update of the graph fails. A new one is captured at once, then after 8 Runs without a graph, then after 16.
    assert (result["varies"]["graph_captures"], result["varies"]["graph_fallbacks_driver"]) == (4, 3)
    for name in ("computed", "waits"):
        assert result[name]["graph_captures"] == 0
        assert result[name]["graph_fallbacks_library"] == result[name]["graph_fallbacks"] == 4


def test_no_two_threads_use_one_handle_or_one_plan_at_once(tmp_path: Path) -> None:
    result = run_scenario("threads", tmp_path, "cudnn")
    assert result["handles_one"] == 1
    assert result["one"] == result["each"] == 0


def test_a_problem_keeps_the_sizes_that_were_used_last(tmp_path: Path) -> None:
    result = run_scenario("many_sizes", tmp_path, "cublaslt")
    assert result["searches"] == 301  # the first size was evicted and is prepared again
    assert result["most"] <= 4 * (128 + 1)  # an operation descriptor and three layouts per size
    assert result["alive"] == 0


def test_plans_are_kept_for_sessions_to_come(tmp_path: Path) -> None:
    result = run_scenario("kept_plans", tmp_path, "cudnn")
    assert result["first"] == [1, 0]  # plans that were built, and loaded
    assert result["second"] == [0, 1]
    assert result["again"] == [0, 0]
    assert result["python"] == 0
    assert result["size"] == result["deterministic"] == [1, 0]
    assert result["measured"] == [14, 0]  # each candidate starts a new search
    assert result["measured again"] == [0, 1]
    assert result["damaged"] == result["unknown"] == [1, 0]
    assert result["mended"] == [0, 1]
    assert result["entries"] == 4
    assert result["alive"] == 0


def test_the_plans_of_a_run_are_built_by_several_threads(tmp_path: Path) -> None:
    result = run_scenario("plans_at_once", tmp_path, "cudnn")
    for name in ("first", "size"):
        built, loaded, at_once = result[name]
        assert (built, loaded) == (4, 0)  # two of the five problems are equal
        assert at_once > 1 or os.cpu_count() == 1
    assert result["second"] == [0, 4, 0]
    assert result["alive"] == 0


def test_an_old_cudnn_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDNN_VERSION", "90700")
    code = f"""
    from ort_cuda_plugin.abi.core import core, ffi, new_error
    error = new_error()
    assert core().library_load(1, {os.fsencode(fake_library("cudnn", tmp_path))!r}, error)
    said = ffi.string(error.text)
    assert said == b"cuDNN 9.7.0 is too old, expected 9.8 or newer. Upgrade nvidia-cudnn-cu13", said
    """
    python(code, preloaded=True)


def test_versions_are_those_of_the_loaded_libraries(tmp_path: Path) -> None:
    code = f"""
    from ort_cuda_plugin.abi.core import core, new_error
    from ort_cuda_plugin.ep.device.libraries import library_versions
    names = frozenset(["cublaslt", "cudnn"])
    assert library_versions(names) == {{"cublaslt": "absent", "cudnn": "absent"}}
    for number, path in enumerate({[os.fsencode(fake_library(name, tmp_path)) for name in ("cublaslt", "cudnn")]!r}):
        assert not core().library_load(number, path, new_error())
    assert library_versions(names) == {{"cublaslt": "13.1.2", "cudnn": "9.12.0"}}
    """
    python(code, preloaded=True)


def test_plans_with_other_parameters_than_a_librarys_are_refused(tmp_path: Path) -> None:
    fake_library("cublaslt", tmp_path)
    result = run_scenario("plans", tmp_path, "cudnn")
    assert result["right"] == [""] * 3
    assert len(result["parameters"]) == 12
    assert all("do not match its library call" in text for text in result["parameters"])
    assert len(result["sizes"]) == 9
    assert all("the sizes of its tensors are inconsistent" in text for text in result["sizes"])


def test_a_problem_of_a_library_that_is_not_loaded_says_so() -> None:
    code = """
    from ort_cuda_plugin.abi.core import core, ffi, new_error
    error = new_error()
    spec = ffi.new("ocp_problem_spec *", {"kind": 0, "dtype": 1, "alpha": 1.0})
    assert core().problem_create(spec, error) == ffi.NULL
    assert ffi.string(error.text) == b"cuBLASLt is not loaded", ffi.string(error.text)
    """
    python(code, preloaded=True)


@pytest.mark.parametrize(
    "field",
    [
        {"kind": 3},
        {"kind": ATTENTION},
        {"kind": ATTENTION, "dtype": 10, "flags": ProblemFlags.RELU},
        {"dtype": 7},
        {"flags": 256},
        {"flags": ProblemFlags.RELU | ProblemFlags.GELU},
        {"flags": ProblemFlags.RESIDUAL},
        {"beta": 1.0},
        {"alpha": math.nan},
        {"alpha": math.inf},
        {"flags": ProblemFlags.RESIDUAL, "beta": math.inf},
        {"rank": 2},
        {"kind": CONV, "rank": 4},
        {"kind": CONV, "rank": 2, "flags": ProblemFlags.A_TRANSPOSED},
        {"kind": CONV, "rank": 2, "flags": ProblemFlags.BIAS | ProblemFlags.GELU},
        {"kind": CONV, "rank": 2, "flags": ProblemFlags.RELU},
        {"kind": CONV, "rank": 2, "flags": ProblemFlags.RESIDUAL, "beta": 1.0},
        {"kind": CONV, "rank": 2, "flags": ProblemFlags.BIAS, "dtype": 11},
        {"kind": CONV, "rank": 2, "alpha": 2.0},
        {"kind": CONV, "rank": 2, "flags": ProblemFlags.BIAS | ProblemFlags.SWISH},
        {"kind": CONV, "rank": 2, "flags": ProblemFlags.CHANNELS_LAST | ProblemFlags.RELU6},
        {"kind": CONV, "rank": 2, "flags": ProblemFlags.BIAS | ProblemFlags.CHANNELS_LAST | ProblemFlags.SWISH | 32},
        {"kind": CONV, "rank": 2, "flags": ProblemFlags.BIAS | ProblemFlags.RESIDUAL, "beta": 2.0},
    ],
    ids=str,
)
def test_problems_that_do_not_exist_are_refused(field: dict[str, float]) -> None:
    fields = {"kind": 0, "dtype": 1, "flags": 0, "rank": 0, "alpha": 1.0, "beta": 0.0, **field}
    spec = ffi.new("ocp_problem_spec *", fields)
    error = new_error()
    assert core().problem_create(spec, error) == ffi.NULL
    assert ffi.string(error.text).startswith(b"library call: unsupported combination")


def test_a_file_without_the_functions_is_refused_by_name(tmp_path: Path) -> None:
    source, path = tmp_path / "empty.c", tmp_path / "libempty.so"
    source.write_text("int cublasLtCreate;\n")
    subprocess.run([*compiler(), "-shared", "-fPIC", source, "-o", path], check=True)
    code = """
    import sys
    from ort_cuda_plugin.abi.core import core, ffi, new_error
    error = new_error()
    assert core().library_load(0, sys.argv[1].encode(), error) != 0
    assert b"has no function cublasLtDestroy" in ffi.string(error.text), ffi.string(error.text)
    assert core().library_load(1, b"/no/such/file.so", error) != 0
    assert b"cuDNN: /no/such/file.so" in ffi.string(error.text), ffi.string(error.text)
    """
    python(code, str(path), preloaded=True)


def test_pips_packages_come_before_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    (folder / "libcublasLt.so.13").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = list(candidates(LIBRARIES[0]))
    assert found == [str(folder / "libcublasLt.so.13"), "libcublasLt.so.13", "libcublasLt.so.12"]


def test_equal_problems_are_one() -> None:
    first = LibraryProblem(MATMUL, 1, ProblemFlags.TF32 | ProblemFlags.BIAS)
    assert first == LibraryProblem(MATMUL, 1, ProblemFlags.BIAS | ProblemFlags.TF32)
    assert len({first, LibraryProblem(MATMUL, 1, ProblemFlags.BIAS)}) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("use_tf32", [False, True])
def test_libraries_and_our_kernels_agree_on_a_gpu(use_tf32: bool) -> None:
    devices, why = cuda_devices()
    if not devices:
        pytest.skip(why)
    code = """
    import sys
    from dataclasses import replace
    sys.path.insert(0, sys.argv[1])
    import numpy as np
    import ort_cuda_plugin as plugin
    from kernel_harness import make_model
    from nn_reference import noise
    from ort_cuda_plugin.ep.device.open_device import OpenDevice
    from ort_cuda_plugin.ep.device.libraries import load_libraries
    use_tf32 = sys.argv[2] == "True"
    available = load_libraries()
    if not available:
        print("SKIP: neither cuBLASLt nor cuDNN is installed")
        raise SystemExit
    properties = OpenDevice.properties
    cases = [
        ("cublaslt", "MatMul", [noise(1, (3, 70, 50)), noise(2, (3, 50, 33))], {}),
        ("cublaslt", "Gemm", [noise(1, (70, 50)), noise(2, (33, 50)), noise(3, (33,))], {"transB": 1}),
        ("cublaslt", "MatMul", [noise(1, (1, 50), "float16"), noise(2, (50, 34), "float16")], {}),
        ("cudnn", "Conv", [noise(1, (2, 8, 14, 15)), noise(2, (16, 8, 3, 3)), noise(3, (16,))], {"pads": [1] * 4}),
        ("cudnn", "Conv", [noise(1, (2, 8, 14, 15)), noise(2, (16, 4, 3, 3))], {"group": 2, "strides": [2, 2]}),
        ("cudnn", "Conv", [noise(1, (1, 8, 9)), noise(2, (8, 8, 3))], {}),
        ("cudnn", "Conv", [noise(1, (2, 3, 14, 15)), noise(2, (16, 3, 3, 3)), noise(3, (16,))], {"pads": [1] * 4}),
        ("cudnn", "Conv", [noise(1, (2, 8, 9, 7), "float16"), noise(2, (16, 8, 3, 3), "float16")], {}),
    ]
    for library, op_type, inputs, attributes in cases:
        if library not in available:
            continue
        results = []
        for libraries in (available, frozenset()):
            OpenDevice.properties = lambda self: replace(properties(self), libraries=libraries)
            model = make_model(op_type, inputs, attributes, constant=range(1, len(inputs))).SerializeToString()
            session = plugin.session(model, emulate=False, provider_options={"use_tf32": str(int(use_tf32))})
            before = plugin.counters()["library_calls"]
            for _ in range(4):
                (result,) = session.run(None, {"x0": inputs[0]})
            assert (plugin.counters()["library_calls"] > before) == bool(libraries), (op_type, libraries)
            results.append(result.astype(np.float64))
        error = np.abs(results[0] - results[1]).max() / np.abs(results[1]).max()
        limit = 2e-3 if use_tf32 or inputs[0].dtype == np.float16 else 5e-6
        assert error <= limit, (op_type, attributes, error)
    """
    done = python(code, str(HARNESS), str(use_tf32), env={"ORT_CUDA_PLUGIN_EMULATE": "0"}, preloaded=True)
    if done.stdout.startswith("SKIP: "):
        pytest.skip(done.stdout.removeprefix("SKIP: ").strip())


@pytest.mark.gpu
def test_fused_calls_and_our_kernels_agree_on_a_gpu() -> None:
    devices, why = cuda_devices()
    if not devices:
        pytest.skip(why)
    code = """
    import sys
    from dataclasses import replace
    sys.path.insert(0, sys.argv[1])
    import numpy as np
    import onnxruntime as ort
    import ort_cuda_plugin as plugin
    from library_epilogues import CASES, expected, values
    from ort_cuda_plugin.ep.device.open_device import OpenDevice
    from ort_cuda_plugin.ep.device.libraries import load_libraries
    available = load_libraries()
    if len(available) < 2:
        print("SKIP: cuBLASLt or cuDNN is not installed")
        raise SystemExit
    properties = OpenDevice.properties
    for seed, (name, case) in enumerate(CASES.items()):
        # Our kernels round after each operator, a library once.
        for dtype, limits in ((np.float32, (1e-6, 1e-6)), (np.float16, (1e-3, 4e-3))):
            exact = values(case, seed)
            wanted = expected(case, exact).astype(np.float64)
            # Convolutions of half types have channels last: what is fed and what is fetched does not.
            ordered = dtype is np.float16 and "product" not in name
            narrow = {key: x.astype(dtype) for key, x in exact.items()}
            data = case.model([case.sums(case.bias), *case.nodes], narrow, bool(seed % 2)).SerializeToString()
            for libraries, limit in zip((available, frozenset()), limits):
                OpenDevice.properties = lambda self: replace(properties(self), libraries=libraries)
                options = {"use_tf32": "0", "automatic_cuda_graphs": "0"}
                session = plugin.session(data, emulate=False, provider_options=options)
                feeds = {"x": narrow["x"], "r": narrow["r"]}
                feeds = {value.name: feeds[value.name] for value in session.get_inputs()}
                session.run(None, feeds)
                before = plugin.counters()
                (result,) = session.run(None, feeds)
                after = plugin.counters()
                calls = {key: after[key] - before[key] for key in ("library_calls", "launches")}
                copies = int("Concat" in name)
                assert calls["library_calls"] == bool(libraries), (name, calls)
                assert calls["launches"] == copies + (not libraries) or (ordered and libraries), (name, calls)
                error = np.max(np.abs(result - wanted) / np.maximum(np.abs(wanted), 1.0))
                assert error <= (limits[1] if ordered else limit), (name, dtype, bool(libraries), error)
    """
    done = python(code, str(HARNESS), env={"ORT_CUDA_PLUGIN_EMULATE": "0"}, preloaded=True)
    if done.stdout.startswith("SKIP: "):
        pytest.skip(done.stdout.removeprefix("SKIP: ").strip())


@pytest.mark.gpu
def test_networks_agree_with_our_kernels_on_a_gpu() -> None:
    """Compares cuDNN and the plugin's kernels on networks with channels last between convolutions, and on attention."""
    devices, why = cuda_devices()
    if not devices:
        pytest.skip(why)
    code = """
    import sys
    from dataclasses import replace
    sys.path.insert(0, sys.argv[1])
    import numpy as np
    import ort_cuda_plugin as plugin
    from library_engines import halved
    from library_images import ATTENTION, NETS, net
    from ort_cuda_plugin.ep.device.open_device import OpenDevice
    from ort_cuda_plugin.ep.device.libraries import load_libraries
    available = load_libraries()
    if len(available) < 2:
        print("SKIP: cuBLASLt or cuDNN is not installed")
        raise SystemExit
    properties = OpenDevice.properties
    for name, text in (NETS | ATTENTION).items():
        model, (x,) = net(text, 2)
        for half in (False, True) if name in NETS else (True,):
            results = []
            for libraries in (available, frozenset()):
                OpenDevice.properties = lambda self: replace(properties(self), libraries=libraries)
                data = (halved(model) if half else model).SerializeToString()
                session = plugin.session(data, emulate=False)
                before = plugin.counters()["library_calls"]
                results.append(session.run(None, {"x": x.astype(np.float16) if half else x}))
                assert (plugin.counters()["library_calls"] > before) == bool(libraries), name
            for a, b in zip(*results, strict=True):
                error = np.max(np.abs(a.astype(np.float64) - b)) / np.max(np.abs(b.astype(np.float64)))
                assert error <= (1e-2 if half else 2e-3), (name, half, error)
    """
    done = python(code, str(HARNESS), env={"ORT_CUDA_PLUGIN_EMULATE": "0"}, preloaded=True)
    if done.stdout.startswith("SKIP: "):
        pytest.skip(done.stdout.removeprefix("SKIP: ").strip())
