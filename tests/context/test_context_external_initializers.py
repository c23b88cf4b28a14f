"""Initializers of CPU nodes in a compiled model: stored in the model itself, or in a separate external-data file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from contexts import BINARY, RNG, assert_same, load, nothing_compiled, row_model, rows, settings

ON_CPU = RNG.standard_normal((600, 8), dtype=np.float32)
SMALL = RNG.standard_normal((1, 600), dtype=np.float32)
FEED = [{"x": rows(2, 3)}]


def source() -> bytes:
    """Return a model with CDist nodes, which the CPU provider runs. They read the initializers on_cpu and small."""
    nodes = [
        helper.make_node("Flatten", ["y"], ["f"], axis=2),
        helper.make_node("CDist", ["f", "on_cpu"], ["p"], domain="com.microsoft", metric="euclidean"),
        helper.make_node("CDist", ["p", "small"], ["z"], domain="com.microsoft", metric="euclidean"),
    ]
    model = onnx.load_from_string(row_model(*nodes, output="z", on_cpu=ON_CPU, small=SMALL))
    model.opset_import.add(domain="com.microsoft", version=1)
    return bytes(model.SerializeToString())


def assert_stored(path: Path, external: str, names: set[str], initializers: set[str]) -> None:
    """Assert that the compiled model has ``initializers``, and that those in ``names`` are stored in the file
    ``external``.
    """
    compiled = onnx.load(path, load_external_data=False)
    assert [node.op_type for node in compiled.graph.node] == ["EPContext", "CDist", "CDist"]
    assert {tensor.name for tensor in compiled.graph.initializer} == initializers
    outside = [tensor for tensor in compiled.graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]
    assert {tensor.name for tensor in outside} == names
    assert {entry.value for tensor in outside for entry in tensor.external_data if entry.key == "location"} == (
        {external} if names else set()
    )


def check(path: Path, other_files: set[str]) -> None:
    assert {each.name for each in path.parent.iterdir()} - {path.name, "m.onnx"} == other_files
    with nothing_compiled():
        assert_same(load(path), source(), FEED)


@pytest.mark.parametrize("from_memory", [False, True])
def test_ep_context_model_external_initializers_file_name(tmp_path: Path, from_memory: bool) -> None:
    """The session entry moves all initializers of CPU nodes to the named file; without it they stay in the model."""
    (tmp_path / "m.onnx").write_bytes(source())
    model = source() if from_memory else str(tmp_path / "m.onnx")
    for name in ("", "cpu.data"):
        entries = {"ep.context_enable": "1", "ep.context_file_path": str(tmp_path / "m_ctx.onnx")}
        if name:
            entries["ep.context_model_external_initializers_file_name"] = name
        ort.InferenceSession(model, settings(entries))
        both = {"on_cpu", "small"}
        assert_stored(tmp_path / "m_ctx.onnx", name, both if name else set(), both)
        check(tmp_path / "m_ctx.onnx", {BINARY.format("m")} | ({name} if name else set()))
        (tmp_path / "m_ctx.onnx").unlink()


@pytest.mark.parametrize("from_memory", [False, True])
@pytest.mark.parametrize(("threshold", "outside"), [(0, {"on_cpu", "small"}), (4096, {"on_cpu"}), (1 << 20, set())])
def test_model_compiler_with_a_file_of_initializers(
    tmp_path: Path, from_memory: bool, threshold: int, outside: set[str]
) -> None:
    """ModelCompiler moves initializers above a size threshold, in bytes, to the named file."""
    (tmp_path / "m.onnx").write_bytes(source())
    model: Any = source() if from_memory else str(tmp_path / "m.onnx")
    compiler = ort.ModelCompiler(
        settings(),
        model,
        embed_compiled_data_into_model=True,
        external_initializers_file_path="cpu.data",
        external_initializers_size_threshold=threshold,
    )
    compiler.compile_to_file(str(tmp_path / "m_ctx.onnx"))
    assert_stored(tmp_path / "m_ctx.onnx", "cpu.data", outside, {"on_cpu", "small"})
    assert (tmp_path / "cpu.data").exists() or not outside
    check(tmp_path / "m_ctx.onnx", {"cpu.data"} if (tmp_path / "cpu.data").exists() else set())


@pytest.mark.parametrize("external", ["", "cpu.data"])
def test_a_source_in_memory_with_external_data(tmp_path: Path, external: str) -> None:
    """A session entry names the folder of the external data. The compiled model loads after their deletion."""
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    made = onnx.load_from_string(source())
    onnx.save(made, tmp_path / "from" / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    data = (tmp_path / "from" / "m.onnx").read_bytes()
    entries = {
        "ep.context_enable": "1",
        "ep.context_file_path": str(tmp_path / "to" / "m_ctx.onnx"),
        "session.model_external_initializers_file_folder_path": str(tmp_path / "from"),
    }
    if external:
        entries["ep.context_model_external_initializers_file_name"] = external
    ort.InferenceSession(data, settings(entries))
    (tmp_path / "from" / "m.data").unlink()
    check(tmp_path / "to" / "m_ctx.onnx", {BINARY.format("m")} | ({external} if external else set()))
