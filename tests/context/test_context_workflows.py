"""The workflows of ONNX Runtime's EPContext design: compiling models, and running compiled models."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest
from onnx import helper, parser

import ort_cuda_plugin
from contexts import (
    BINARY,
    assert_same,
    compile_model,
    container_of,
    context_nodes,
    load,
    nothing_compiled,
    row_model,
    rows,
    settings,
    two_clusters,
)
from isolated import HARNESS, python
from ort_cuda_plugin.plugin_library import plugin_version

FLOAT16 = onnx.TensorProto.FLOAT16
SHAPES = [(2, 3), (1, 1), (5, 7), (1, 9), (33, 2)]
FEEDS = [{"x": rows(*shape)} for shape in SHAPES]


@pytest.mark.parametrize("embed", [False, True])
def test_ep_context_enable_and_embed_mode(tmp_path: Path, embed: bool) -> None:
    source = row_model()
    compiled = compile_model(source, tmp_path / "m_ctx.onnx", embed)
    binary = tmp_path / BINARY.format("m")
    assert binary.exists() is not embed
    assert [node.op_type for node in compiled.graph.node] == ["EPContext"]
    assert not compiled.graph.initializer
    (node,) = context_nodes(compiled)
    assert node["source"] == b"CudaPluginExecutionProvider"
    assert node["embed_mode"] == int(embed)
    assert node["main_context"] == 1
    assert node["hardware_architecture"] == b"emulated"
    assert node["ep_sdk_version"]
    assert node["partition_name"] == compiled.graph.node[0].name.encode()
    assert node["notes"] == b"3 nodes"
    assert node["max_size"] == 0
    if not embed:
        assert node["ep_cache_context"] == binary.name.encode()
    with nothing_compiled():
        assert_same(load(tmp_path / "m_ctx.onnx"), source, FEEDS)


CPU_READERS = """<ir_version: 9, opset_import: ["" : 17]>
    readers (float[n, 4] x) => (float[n, 4] y, float[n, 4] c, float[n, 4] d)
    { a = Exp(x)  b = Neg(x)  y = Abs(x)
      s = Cast<to = 8>(b)  t = Cast<to = 8>(a)  c = Cast<to = 1>(s)  d = Cast<to = 1>(t) }"""


def test_outputs_that_nodes_of_the_cpu_provider_read(tmp_path: Path) -> None:
    """ONNX Runtime orders the outputs of a fused node by their readers, which differ before and after compilation."""
    source = parser.parse_model(CPU_READERS).SerializeToString()
    compiled = compile_model(source, tmp_path / "m_ctx.onnx")
    assert [list(node.output) for node in compiled.graph.node if node.op_type == "EPContext"] == [["a", "b", "y"]]
    assert_same(load(tmp_path / "m_ctx.onnx"), source, [{"x": rows(3, 1).reshape(-1, 4)}])


def test_an_output_without_readers_is_refused(tmp_path: Path) -> None:
    compiled = compile_model(parser.parse_model(CPU_READERS).SerializeToString(), tmp_path / "m_ctx.onnx")
    compiled.graph.value_info.append(compiled.graph.output.pop(0))
    onnx.save(compiled, tmp_path / "cut_ctx.onnx")
    with pytest.raises(Exception, match=r"EPContext node .*: output 2 \('y'\) is not connected"):
        load(tmp_path / "cut_ctx.onnx")


def test_compile_in_a_source_tree_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python finds the metadata of a package only where it is installed, not in a source tree on PYTHONPATH."""
    installed = importlib.metadata.version

    def version(package: str) -> str:
        if package == "ort-cuda-plugin":
            raise importlib.metadata.PackageNotFoundError(package)
        return installed(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    plugin_version.cache_clear()
    try:
        compiled = compile_model(row_model(), tmp_path / "m_ctx.onnx", embed=False)
    finally:
        plugin_version.cache_clear()
    (node,) = context_nodes(compiled)
    assert node["ep_sdk_version"] == b"unknown"
    assert container_of(tmp_path / BINARY.format("m")).index["made_by"] == {"plugin": "unknown"}


def test_ep_context_file_path_has_a_default(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(row_model())
    ort.InferenceSession(str(tmp_path / "m.onnx"), settings({"ep.context_enable": "1"}))
    (node,) = context_nodes(onnx.load(tmp_path / "m_ctx.onnx"))
    assert node["onnx_model_filename"] == b"m.onnx"
    assert (tmp_path / BINARY.format("m")).exists()
    with nothing_compiled():
        assert_same(load(tmp_path / "m_ctx.onnx"), row_model(), FEEDS)


def test_ep_context_enable_is_off_by_default(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(row_model())
    ort.InferenceSession(str(tmp_path / "m.onnx"), settings({"ep.context_enable": "0"}))
    ort.InferenceSession(str(tmp_path / "m.onnx"), settings({"ep.context_file_path": str(tmp_path / "m_ctx.onnx")}))
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def test_session_model_external_initializers_file_folder_path(tmp_path: Path) -> None:
    """The source model is loaded from memory, its external data from a folder. The compiled model needs neither."""
    model = onnx.load_from_string(row_model())
    folder, out = tmp_path / "external_data_folder", tmp_path / "model_folder"
    folder.mkdir()
    out.mkdir()
    onnx.save(model, folder / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=64)
    entries = {
        "ep.context_enable": "1",
        "ep.context_file_path": str(out / "m_ctx.onnx"),
        "session.model_external_initializers_file_folder_path": str(folder),
    }
    ort.InferenceSession((folder / "m.onnx").read_bytes(), settings(entries))
    (folder / "m.data").unlink()
    assert sorted(path.name for path in out.iterdir()) == [BINARY.format("m"), "m_ctx.onnx"]
    with nothing_compiled():
        assert_same(load(out / "m_ctx.onnx"), row_model(), FEEDS)


def test_ep_cache_context_may_name_a_file_in_a_subfolder(tmp_path: Path) -> None:
    compiled = compile_model(row_model(), tmp_path / "m_ctx.onnx")
    (tmp_path / "sub").mkdir()
    (tmp_path / BINARY.format("m")).rename(tmp_path / "sub" / "c.bin")
    next(each for each in compiled.graph.node[0].attribute if each.name == "ep_cache_context").s = b"sub/c.bin"
    onnx.save(compiled, tmp_path / "m_ctx.onnx")
    with nothing_compiled():
        assert_same(load(tmp_path / "m_ctx.onnx"), row_model(), FEEDS[:1])


@pytest.mark.parametrize("embed", [False, True])
def test_cpu_nodes_stand_beside_context_nodes(tmp_path: Path, embed: bool) -> None:
    source = two_clusters()
    compiled = compile_model(source, tmp_path / "m_ctx.onnx", embed)
    assert [node.op_type for node in compiled.graph.node] == ["EPContext", "Cast", "Cast", "EPContext"]
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ([] if embed else [BINARY.format("m")]) + ["m_ctx.onnx"]
    with nothing_compiled():
        assert_same(load(tmp_path / "m_ctx.onnx"), source, FEEDS)


@pytest.mark.parametrize("from_memory", [False, True])
@pytest.mark.parametrize("embed", [False, True])
def test_model_compiler(tmp_path: Path, from_memory: bool, embed: bool) -> None:
    source = two_clusters()
    (tmp_path / "m.onnx").write_bytes(source)
    given = source if from_memory else str(tmp_path / "m.onnx")
    compiler = ort.ModelCompiler(settings(), given, embed_compiled_data_into_model=embed)
    compiler.compile_to_file(str(tmp_path / "out_ctx.onnx"))
    assert (tmp_path / BINARY.format("out")).exists() is not embed
    with nothing_compiled():
        assert_same(load(tmp_path / "out_ctx.onnx"), source, FEEDS)


def test_model_compiler_to_memory(tmp_path: Path) -> None:
    source = row_model()
    data = ort.ModelCompiler(settings(), source, embed_compiled_data_into_model=True).compile_to_bytes()
    with nothing_compiled():
        assert_same(load(data), source, FEEDS)
    with pytest.raises(Exception, match=r"INVALID_GRAPH.*Set ep\.context_file_path"):
        ort.ModelCompiler(settings(), source, embed_compiled_data_into_model=False).compile_to_bytes()


def test_a_model_in_memory_finds_its_context_by_ep_context_file_path(tmp_path: Path) -> None:
    source = row_model()
    compile_model(source, tmp_path / "m_ctx.onnx")
    data = (tmp_path / "m_ctx.onnx").read_bytes()
    with pytest.raises(Exception, match=r"INVALID_GRAPH.*set ep\.context_file_path"):
        load(data)
    with nothing_compiled():
        assert_same(load(data, file_path=tmp_path / "m_ctx.onnx"), source, FEEDS)


def test_models_of_two_compilations_are_merged(tmp_path: Path) -> None:
    """ep.context_node_name_prefix makes partition names unique. ONNX Runtime requires unique node names as well."""
    source = row_model()
    parts = [compile_model(source, tmp_path / f"{name}_ctx.onnx", prefix=f"{name}_") for name in "ab"]
    assert [context_nodes(part)[0]["partition_name"][:2] for part in parts] == [b"a_", b"b_"]  # type: ignore[index]
    merged = onnx.ModelProto()
    merged.CopyFrom(parts[0])
    merged.graph.node.add().CopyFrom(parts[1].graph.node[0])
    merged.graph.node[1].name += "_second"
    merged.graph.node[1].output[0] = "second"
    merged.graph.output.add().CopyFrom(parts[1].graph.output[0])
    merged.graph.output[1].name = "second"
    onnx.save(merged, tmp_path / "both.onnx")
    one = load(tmp_path / "both.onnx")
    x = rows(2, 4)
    first, second = one.run(None, {"x": x})
    (expected,) = ort.InferenceSession(source, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    assert abs(first - expected).max() < 1e-5
    assert (first == second).all()


def test_a_node_without_a_context_of_its_own_finds_its_partition(tmp_path: Path) -> None:
    source = two_clusters()
    compiled = compile_model(source, tmp_path / "m_ctx.onnx")
    last = compiled.graph.node[3]
    last.attribute.remove(next(each for each in last.attribute if each.name == "ep_cache_context"))
    next(each for each in last.attribute if each.name == "main_context").i = 0
    onnx.save(compiled, tmp_path / "m_ctx.onnx")
    with nothing_compiled():
        assert_same(load(tmp_path / "m_ctx.onnx"), source, FEEDS)


def test_nodes_of_other_sources_are_left_alone(tmp_path: Path) -> None:
    compiled = compile_model(row_model(), tmp_path / "m_ctx.onnx", embed=False)
    next(each for each in compiled.graph.node[0].attribute if each.name == "source").s = b"QNN"
    with pytest.raises(Exception, match="EPContext"):
        load(compiled.SerializeToString())


def test_a_compiled_model_is_not_compiled_again(tmp_path: Path) -> None:
    compile_model(row_model(), tmp_path / "m_ctx.onnx")
    with pytest.raises(Exception, match="compiled already"):
        ort.ModelCompiler(settings(), str(tmp_path / "m_ctx.onnx")).compile_to_file(str(tmp_path / "again.onnx"))


LOADER = """
import sys
class Missing:
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ("numba", "llvmlite", "onnx", "numba_cuda"):
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Missing())
import numpy as np, onnxruntime as ort
import ort_cuda_plugin as plugin
options = ort.SessionOptions()
options.log_severity_level = 3
options.add_provider_for_devices(plugin.register(emulate=True)[:1], {})
session = ort.InferenceSession(sys.argv[1], options)
data = np.load(sys.argv[2])
def run():
    for name in data.files:
        if name.startswith("x"):
            (y,) = session.run(None, {"x": data[name]})
            np.testing.assert_allclose(y, data["y" + name[1:]], rtol=1e-5, atol=1e-5)
"""


def saved_runs(source: bytes, path: Path) -> None:
    import numpy as np

    cpu = ort.InferenceSession(source, providers=["CPUExecutionProvider"])
    pairs: dict[str, Any] = {}
    for number, feed in enumerate(FEEDS):
        pairs[f"x{number}"] = feed["x"]
        pairs[f"y{number}"] = cpu.run(None, feed)[0]
    np.savez(path, **pairs)


def test_loading_needs_no_compiler(tmp_path: Path) -> None:
    """Loading imports neither Numba nor llvmlite nor onnx, and needs no kernel cache."""
    source = row_model()
    compile_model(source, tmp_path / "m_ctx.onnx", context_architectures="sm_90,emulated")
    saved_runs(source, tmp_path / "runs.npz")
    code = """
    run()
    counters = plugin.counters()
    assert counters["kernels_compiled"] == counters["kernel_cache_hits"] == counters["plan_variants_built"] == 0
    assert not {"numba", "llvmlite", "onnx"} & set(sys.modules)
    print("ort_cuda_plugin.ops.onnx.math.matmul" in sys.modules)
    """
    arguments = (str(tmp_path / "m_ctx.onnx"), str(tmp_path / "runs.npz"))
    environment = {"ORT_CUDA_PLUGIN_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(HARNESS)}
    allowed = {**environment, "ORT_CUDA_PLUGIN_CONTEXT_ALLOW_HOST_CODE": "1"}
    looked_at_operators = [python(LOADER + _dedented(code), *arguments, env=allowed).stdout for _ in range(2)]
    assert looked_at_operators == ["True\n", "False\n"]  # the first process caches kernel definitions on disk


def test_host_code_of_a_context_needs_permission(tmp_path: Path) -> None:
    source = row_model()
    compile_model(source, tmp_path / "m_ctx.onnx")
    before = ort_cuda_plugin.counters()
    assert_same(load(tmp_path / "m_ctx.onnx", host_code=False), source, FEEDS)
    after = ort_cuda_plugin.counters()
    made = ("kernels_compiled", "kernel_cache_hits")
    assert sum(after[name] - before[name] for name in made) > 0  # the session compiled the stored graph
    assert after["plan_variants_built"] > before["plan_variants_built"]
    saved_runs(source, tmp_path / "runs.npz")
    code = """
    try:
        run()
    except Exception as error:
        print(error)
    """
    environment = {"ORT_CUDA_PLUGIN_CACHE_DIR": str(tmp_path / "cache")}
    arguments = (str(tmp_path / "m_ctx.onnx"), str(tmp_path / "runs.npz"))
    done = python(LOADER + _dedented(code), *arguments, env=environment, check=False)
    assert "ORT_CUDA_PLUGIN_CONTEXT_ALLOW_HOST_CODE=1" in done.stdout + done.stderr


def _dedented(code: str) -> str:
    return "\n".join(line[4:] for line in code.splitlines())


def test_a_context_of_another_model_is_refused(tmp_path: Path) -> None:
    compiled = compile_model(row_model(), tmp_path / "m_ctx.onnx")
    half = row_model(helper.make_node("Cast", ["y"], ["h"], to=FLOAT16), output="h", kind=FLOAT16)
    compile_model(half, tmp_path / "n_ctx.onnx")
    node = compiled.graph.node[0]
    other = BINARY.format("n").encode()
    next(each for each in node.attribute if each.name == "ep_cache_context").s = other
    onnx.save(compiled, tmp_path / "m_ctx.onnx")
    with pytest.raises(Exception, match=r"INVALID_GRAPH.*has no partition"):
        load(tmp_path / "m_ctx.onnx")
    (name,) = (row["name"] for row in container_of(tmp_path / other.decode()).index["partitions"])
    next(each for each in node.attribute if each.name == "partition_name").s = name.encode()
    onnx.save(compiled, tmp_path / "m_ctx.onnx")
    with pytest.raises(Exception, match=r"INVALID_GRAPH.*the outputs of .* are"):
        load(tmp_path / "m_ctx.onnx")
