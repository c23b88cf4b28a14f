"""Compiled models on a device with a quarantine: which of their kernels run, which are compiled again, and warnings."""

from __future__ import annotations

import copy
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import parser

import ort_cuda_plugin
from c_programs import COUNTED, build_host
from contexts import BINARY, assert_same, compile_model, container_of, load, nothing_compiled, rewrite
from isolated import HARNESS, python
from kernel_harness import device
from ort_cuda_plugin import get_library_path
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.clusters.nodes.ranks import Ranks
from ort_cuda_plugin.compiler.targets import Target
from ort_cuda_plugin.context.capture import capture
from ort_cuda_plugin.context.reader import Context, Loaded, Session, StoredCluster
from ort_cuda_plugin.context.storage.container import Container
from ort_cuda_plugin.ep.contexts.context_session import ALLOW_VARIABLE
from ort_cuda_plugin.ep.device import quarantined
from ort_cuda_plugin.ep.device.substitutes import NoSubstitute, RefusedCall, Substitutes
from ort_cuda_plugin.model.ir import DType
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.program.lowering.context import DeviceProperties, LoweringOptions
from ort_cuda_plugin.program.steps.libraries import MATMUL, LibraryProblem, ProblemFlags
from ort_cuda_plugin.program.steps.quarantine import (
    Quarantine,
    Quarantined,
    QuarantinedOperator,
    QuarantinedSchedule,
    ScheduleKind,
)
from ort_cuda_plugin.program.steps.schedule import Engine
from selftests import own_quarantine, wrong_products

SOURCE = parser.parse_model(
    '<ir_version: 10, opset_import: ["": 23]> g (float[33, 130] x, float[130, 65] w) => (float[33, 65] y) '
    "{ p = MatMul(x, w) y = Relu(p) }"
).SerializeToString()
TILE = "64x64x16"
REASON = "product 33x130x65: 3 elements are wrong"
TILE_IS_WRONG = QuarantinedSchedule("gemm", "f32", "simt", TILE, REASON)
ALL_ARE_WRONG = [QuarantinedSchedule("gemm", "f32", engine.value, "", REASON) for engine in (Engine.SIMT, Engine.GEMV)]
OPERATOR_IS_WRONG = QuarantinedOperator("Relu", "f32", "Relu, float: 2 elements are wrong")
UNRELATED: list[Quarantined] = [
    QuarantinedSchedule("gemm", "f16", "simt", TILE, REASON),
    QuarantinedSchedule("gemm", "f32", "simt", "8x8x8", REASON),
    QuarantinedSchedule("convolution", "f32", "simt", "", REASON),
    QuarantinedOperator("Relu", "f16", REASON),
    QuarantinedOperator("Softmax", "f32", REASON),
]
RNG = np.random.default_rng(5)
FEED = {"x": RNG.integers(-2, 3, (33, 130)).astype(np.float32), "w": RNG.integers(-2, 3, (130, 65)).astype(np.float32)}


def quarantine(*entries: Quarantined) -> None:
    assert quarantined.store(quarantined.identity_of(device()), entries)


def kinds(path: Path, arch: str = "emulated") -> list[ScheduleKind]:
    (partition,) = container_of(path).index["partitions"]
    (row,) = [row for row in partition["targets"] if row["arch"] == arch]
    return [ScheduleKind(*kind) for kind in row["schedules"]]


def built() -> int:
    return ort_cuda_plugin.counters()["plan_variants_built"]


def test_quarantined_schedules_of_a_compiled_model_are_replaced_with_a_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m_ctx.onnx"
    with own_quarantine(tmp_path / "quarantine"), wrong_products(Engine.SIMT, tile=TILE):
        compile_model(SOURCE, path)
        assert kinds(tmp_path / BINARY.format("m")) == [ScheduleKind("gemm", "f32", "simt", TILE)]
        quarantine(*UNRELATED)
        with nothing_compiled(), pytest.raises(AssertionError):  # the context has the wrong kernel
            assert_same(load(path, severity=2), SOURCE, [FEED])
        assert "quarantine" not in capfd.readouterr().err
        quarantine(TILE_IS_WRONG)
        before = built()
        assert_same(load(path, severity=2), SOURCE, [FEED])
        assert built() > before
    said = capfd.readouterr().err
    assert "is compiled again" in said
    assert (
        f"gemm f32 simt {TILE} is not used on this device because it failed ort-cuda-plugin selftest: {REASON}" in said
    )
    assert "runs quarantined" not in said


def test_a_model_that_is_compiled_with_a_quarantine_avoids_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Code for devices that the quarantine does not hold for is not changed by it."""
    with own_quarantine(tmp_path / "quarantine"), wrong_products(Engine.SIMT, tile=TILE):
        compile_model(SOURCE, tmp_path / "free_ctx.onnx", context_architectures="sm_90")
        for_gpus = kinds(tmp_path / BINARY.format("free"), "sm_90")
        of_gpu = QuarantinedSchedule("gemm", "f32", for_gpus[0].engine, "", REASON)
        quarantine(TILE_IS_WRONG, of_gpu)
        compile_model(SOURCE, tmp_path / "own_ctx.onnx")
        compile_model(SOURCE, tmp_path / "several_ctx.onnx", context_architectures="sm_90,emulated")
        for name in ("own", "several"):
            (kind,) = kinds(tmp_path / BINARY.format(name))
            assert kind[:3] == ("gemm", "f32", "simt")
            assert kind.tile != TILE
            with nothing_compiled():
                assert_same(load(tmp_path / f"{name}_ctx.onnx", severity=2), SOURCE, [FEED])
        assert kinds(tmp_path / BINARY.format("several"), "sm_90") == for_gpus
    assert "quarantine" not in capfd.readouterr().err


def test_stored_plans_run_with_a_warning_if_no_other_kernel_is_left(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m_ctx.onnx"
    compile_model(SOURCE, path)
    with own_quarantine(tmp_path / "quarantine"):
        quarantine(*ALL_ARE_WRONG)
        with nothing_compiled():
            assert_same(load(path, severity=2), SOURCE, [FEED])
    said = capfd.readouterr().err
    assert "runs quarantined kernels: gemm f32 simt is not used on this device" in said
    assert "no kernel is left for the node on this device" in said
    assert "Results may be wrong. Compile the source model again on this device" in said
    assert "is compiled again" not in said


def test_quarantined_operators_of_a_compiled_model_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m_ctx.onnx"
    compile_model(SOURCE, path)
    with own_quarantine(tmp_path / "quarantine"):
        quarantine(OPERATOR_IS_WRONG)
        for host_code in (True, False):  # runs the stored plans, then compiles the stored graph
            assert_same(load(path, host_code, severity=2), SOURCE, [FEED])
            said = capfd.readouterr().err
            assert (
                f"runs quarantined operators: Relu f32 is not used on this device because it failed {SELFTEST}: Relu"
                in said
            )
            assert "Compile the source model again on this device" in said
        compiled = compile_model(SOURCE, tmp_path / "n_ctx.onnx")
        assert [node.op_type for node in compiled.graph.node] == ["EPContext", "Relu"]
        assert_same(load(tmp_path / "n_ctx.onnx", severity=2), SOURCE, [FEED])
    assert "quarantine" not in capfd.readouterr().err


SELFTEST = "ort-cuda-plugin selftest"


def test_a_context_that_does_not_record_its_schedules_is_compiled_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    compile_model(SOURCE, tmp_path / "m_ctx.onnx")
    file = tmp_path / BINARY.format("m")
    (tmp_path / "whole.bin").write_bytes(file.read_bytes())
    whole = container_of(tmp_path / "whole.bin")
    index = copy.deepcopy(whole.index)
    del index["partitions"][0]["targets"][0]["schedules"]
    rewrite(whole, file, index, {})
    with own_quarantine(tmp_path / "quarantine"):
        for entry, is_kept in ((OPERATOR_IS_WRONG, True), (TILE_IS_WRONG, False)):
            quarantine(entry)
            with nothing_compiled() if is_kept else nullcontext():
                assert_same(load(tmp_path / "m_ctx.onnx", severity=2), SOURCE, [FEED])
            said = capfd.readouterr().err
            assert ("it does not record its schedules, and gemm f32 simt 64x64x16 are quarantined" in said) != is_kept


def in_cache(folder: Path, *entries: Quarantined) -> dict[str, str]:
    """Quarantine the entries in a kernel cache without kernels; return the variables of a process that uses it."""
    with own_quarantine(folder / "quarantine"):
        quarantine(*entries)
    return {"ORT_CUDA_PLUGIN_CACHE_DIR": str(folder), ALLOW_VARIABLE: "1"}


def test_without_a_compiler_the_stored_plans_run_with_a_warning(tmp_path: Path) -> None:
    compile_model(SOURCE, tmp_path / "m_ctx.onnx")
    np.savez(tmp_path / "feed.npz", x=FEED["x"], w=FEED["w"])
    code = """
import sys
class Missing:
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ("numba", "llvmlite"):
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Missing())
import numpy as np
from contexts import load
from pathlib import Path
feed = dict(np.load(sys.argv[2]))
(y,) = load(Path(sys.argv[1]), severity=2).run(None, feed)
np.testing.assert_array_equal(y, np.maximum(feed["x"] @ feed["w"], 0))
"""
    variables = in_cache(tmp_path / "cache", TILE_IS_WRONG) | {"PYTHONPATH": str(HARNESS)}
    said = python(code, str(tmp_path / "m_ctx.onnx"), str(tmp_path / "feed.npz"), env=variables).stderr
    assert f"runs quarantined kernels: gemm f32 simt {TILE} is not used on this device" in said
    assert "It cannot be compiled again: a kernel has to be compiled, and the compiler is not installed" in said
    assert said.count("EP Error") == 0


def test_a_c_host_gets_the_warning(tmp_path: Path) -> None:
    host = build_host("host", tmp_path)
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> add (float[8] a, float[8] b) => (float[8] c) { c = Add(a, b) }'
    )
    compile_model(model.SerializeToString(), tmp_path / "add_ctx.onnx")
    variables = in_cache(tmp_path / "cache", QuarantinedOperator("Add", "f32", REASON))
    command = [str(host), get_library_path(), str(tmp_path / "add_ctx.onnx")]
    env = COUNTED | variables | {"ORT_CUDA_PLUGIN_PYTHON": sys.executable}
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
    assert (
        f"runs quarantined operators: Add f32 is not used on this device because it failed {SELFTEST}: {REASON}"
        in done.stderr
    )


LARGE = parser.parse_model(
    '<ir_version: 10, opset_import: ["": 23]> g (float16[4096, 4096] x, float16[4096, 4096] w) '
    "=> (float16[4096, 4096] y) { y = MatMul(x, w) }"
)
GPU = DeviceProperties.gpu((9, 0), libraries=frozenset({"cublaslt"}))
LIBRARY_IS_WRONG = Quarantine((QuarantinedSchedule("gemm", "f16", "library", "", REASON),))


def captured_kinds(properties: DeviceProperties) -> set[ScheduleKind]:
    graph = read_model(LARGE)
    names = [value.name for value in graph.inputs], [value.name for value in graph.outputs]
    ranks = Ranks()
    return capture(CompiledCluster(graph, properties, LoweringOptions(), *names, ranks, set()), ranks).schedules


def test_library_calls_are_recorded_and_avoided() -> None:
    assert captured_kinds(GPU) == {ScheduleKind("gemm", "f16", "library", "", "none")}
    (kind,) = captured_kinds(replace(GPU, quarantine=LIBRARY_IS_WRONG))
    assert kind[:3] == ("gemm", "f16", "mma")


def loaded_for_gpu(container: Container, quarantine: Quarantine) -> Loaded:
    session = Session(Target.cuda(8, 6), replace(GPU, quarantine=quarantine), LoweringOptions(), False)
    context = Context(container)
    ((name, row),) = context.partitions.items()
    ports = [[DType(port["dtype"]) for port in row[kind]] for kind in ("inputs", "outputs")]
    return context.cluster(name, session, *ports)


def test_of_several_targets_one_without_quarantined_schedules_is_used(tmp_path: Path) -> None:
    compile_model(SOURCE, tmp_path / "m_ctx.onnx", context_architectures="sm_80,sm_86", enable_cudnn="0")
    container = container_of(tmp_path / BINARY.format("m"))
    rows = container.index["partitions"][0]["targets"]
    for row, engine in zip(rows, ("mma", "library"), strict=True):
        row["libraries"], row["schedules"] = [], [["gemm", "f16", engine, ""]]
    arches = []
    for entries in ((), LIBRARY_IS_WRONG.entries, (QuarantinedSchedule("gemm", "f16", "mma", ""),)):
        cluster = loaded_for_gpu(container, Quarantine(entries)).cluster
        assert isinstance(cluster, StoredCluster)
        arches.append(cluster.arch)
    assert arches == ["sm_86", "sm_80", "sm_86"]
    rows[0]["schedules"] = rows[1]["schedules"]
    loaded = loaded_for_gpu(container, LIBRARY_IS_WRONG)
    assert isinstance(loaded.cluster, CompiledCluster)
    assert "gemm f16 library is not used on this device" in loaded.why
    assert loaded.otherwise is not None
    stored = loaded.otherwise(ImportError("no compiler"))
    assert isinstance(stored.cluster, StoredCluster)
    assert stored.cluster.arch == "sm_86"
    assert "gemm f16 library" in stored.warning
    assert "It cannot be compiled again: no compiler." in stored.warning


def test_a_substitute_of_a_library_call_avoids_the_quarantine(tmp_path: Path) -> None:
    """The call multiplies float32 64x64 matrices. Its sizes: m, n, k; pitches; one batch, its pitches; workspace."""
    problem = LibraryProblem(MATMUL, DType.FLOAT32.ort, ProblemFlags(0))
    call = RefusedCall("cuBLASLt", problem, (64, 64, 64, 64, 64, 64, 1, 0, 0, 0, 0), "a test says so", lasts=False)
    substitutes = Substitutes(device())
    try:
        with own_quarantine(tmp_path):
            substitutes.pointer(call)
            quarantine(*ALL_ARE_WRONG)
            substitutes.release()
            with pytest.raises(
                NoSubstitute, match="no kernel is left for the node on this device; gemm f32 simt is not used"
            ):
                substitutes.pointer(call)
    finally:
        substitutes.release()
