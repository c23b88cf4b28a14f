"""Locations of the files of compiled models: beside the model, through links, and in session entries."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from contexts import BINARY, compile_model, settings
from ort_versions import api_version
from session_pair import FLOAT, info

WEIGHT = np.arange(32 * 32, dtype=np.float32).reshape(32, 32) / 512
X = np.ones((2, 32), np.float32)
FOLDER = "session.model_external_initializers_file_folder_path"


def source(path: Path, weight: np.ndarray = WEIGHT, external: bool = True) -> None:
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [info("x", FLOAT, ["n", 32])],
        [info("y", FLOAT, None)],
        [numpy_helper.from_array(weight, "w")],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(made, path, save_as_external_data=external, location=f"{path.name}_data", size_threshold=16)


def result(model: Path | bytes, entries: dict[str, str] | None = None, **options: str) -> np.ndarray:
    made = settings(entries, {"context_allow_host_code": "1", **options})
    session = ort.InferenceSession(model if isinstance(model, bytes) else str(model), made, enable_fallback=0)
    (y,) = session.run(None, {"x": X})
    return np.asarray(y)


def as_in_the_hub(cache: Path) -> Path:
    """Arrange files as the Hugging Face hub's cache does: move them to ``blobs`` and leave links in ``snapshots/rev``.

    Return the folder of the links.
    """
    snapshot = cache / "snapshots" / "rev"
    (cache / "blobs").mkdir()
    for number, path in enumerate(sorted(snapshot.rglob("*.*"))):
        target = cache / "blobs" / f"{number:064x}"
        path.rename(target)
        path.symlink_to(os.path.relpath(target, path.parent))
    return snapshot


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of links to a source model and two compiled models, with weights (full) and without (light)."""
    cache = tmp_path_factory.mktemp("hub")
    onnx_folder = cache / "snapshots" / "rev" / "onnx"
    onnx_folder.mkdir(parents=True)
    source(onnx_folder / "model.onnx")
    for name, weightless in (("full", "0"), ("light", "1")):
        compile_model(str(onnx_folder / "model.onnx"), onnx_folder / f"{name}_ctx.onnx", context_weightless=weightless)
    return as_in_the_hub(cache) / "onnx"


def test_models_load_from_a_folder_of_links(hub: Path) -> None:
    for name in ("model.onnx", "full_ctx.onnx", "light_ctx.onnx"):
        np.testing.assert_allclose(result(hub / name), X @ WEIGHT, rtol=1e-6)
    entries = {"ep.context_file_path": str(hub / "light_ctx.onnx")}
    np.testing.assert_allclose(result((hub / "light_ctx.onnx").read_bytes(), entries), X @ WEIGHT, rtol=1e-6)
    entries["ep.context_source_model_path"] = str(hub / "model.onnx")
    np.testing.assert_allclose(result((hub / "light_ctx.onnx").read_bytes(), entries), X @ WEIGHT, rtol=1e-6)


def test_new_weights_come_from_a_folder_of_links(hub: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / "rev"
    snapshot.mkdir(parents=True)
    for name in ("light_ctx.onnx", BINARY.format("light")):
        shutil.copyfile(hub / name, snapshot / name)
    source(snapshot / "model.onnx", WEIGHT * 2)
    as_in_the_hub(tmp_path)
    np.testing.assert_allclose(result(snapshot / "light_ctx.onnx", context_refit="1"), X @ WEIGHT * 2, rtol=1e-6)
    entries = {"ep.context_source_model_path": str(snapshot / "model.onnx")}
    refitted = result(hub / "light_ctx.onnx", entries, context_refit="1")
    np.testing.assert_allclose(refitted, X @ WEIGHT * 2, rtol=1e-6)


@pytest.mark.parametrize("weightless", ["0", "1"])
def test_models_in_a_folder_of_links_are_compiled(tmp_path: Path, weightless: str) -> None:
    """The compiled model refers to its source by the link's name, not by the name of the link's target."""
    snapshot = tmp_path / "snapshots" / "rev"
    snapshot.mkdir(parents=True)
    source(snapshot / "model.onnx")
    as_in_the_hub(tmp_path)
    compiled = compile_model(str(snapshot / "model.onnx"), snapshot / "m_ctx.onnx", context_weightless=weightless)
    (name,) = (a.s for node in compiled.graph.node for a in node.attribute if a.name == "onnx_model_filename")
    assert name == b"model.onnx"
    np.testing.assert_allclose(result(snapshot / "m_ctx.onnx"), X @ WEIGHT, rtol=1e-6)


def test_links_that_leave_both_folders_are_refused(hub: Path, tmp_path: Path) -> None:
    for name in ("light_ctx.onnx", "model.onnx"):
        shutil.copyfile(hub / name, tmp_path / name)
    (tmp_path / BINARY.format("light")).symlink_to(hub / BINARY.format("light"))
    with pytest.raises(Exception, match=r"INVALID_GRAPH.*symbolic link to .* leaves the model's folder; copy the file"):
        result(tmp_path / "light_ctx.onnx")


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Return a function that writes src/m.onnx, src/m.onnx_data and out/m_ctx.onnx, compiled from it.

    The function returns the folder src and the path of m_ctx.onnx.
    """

    def make(weightless: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("apart")
        for name in ("src", "out"):
            (folder / name).mkdir()
        source(folder / "src" / "m.onnx")
        compile_model(str(folder / "src" / "m.onnx"), folder / "out" / "m_ctx.onnx", context_weightless=weightless)
        return folder / "src", folder / "out" / "m_ctx.onnx"

    return make


def test_the_folder_of_external_data_is_not_that_of_the_context(apart: Callable[[str], tuple[Path, Path]]) -> None:
    """With the entry `FOLDER`, ONNX Runtime reports a path in that folder as the model's path, even if it is wrong.

    The plugin must still find the context file beside the model.
    """
    folder, compiled = apart("0")
    for entries in ({}, {FOLDER: str(folder)}, {FOLDER: str(folder), "ep.context_file_path": str(compiled)}):
        np.testing.assert_allclose(result(compiled, entries), X @ WEIGHT, rtol=1e-6)
    with pytest.raises(Exception, match=r"INVALID_GRAPH.*does not say where the model is: set ep.context_file_path"):
        result(compiled.read_bytes(), {FOLDER: str(folder)})
    entries = {FOLDER: str(folder), "ep.context_file_path": str(compiled)}
    np.testing.assert_allclose(result(compiled.read_bytes(), entries), X @ WEIGHT, rtol=1e-6)


def test_a_model_without_weights_finds_external_data_where_they_moved(
    apart: Callable[[str], tuple[Path, Path]],
) -> None:
    folder, compiled = apart("1")
    (folder / "m.onnx").rename(compiled.parent / "m.onnx")
    np.testing.assert_allclose(result(compiled, {FOLDER: str(folder)}), X @ WEIGHT, rtol=1e-6)
    with pytest.raises(Exception, match=r"INVALID_GRAPH.*external data 'm.onnx_data' .* cannot be read"):
        result(compiled)


@pytest.mark.skipif(api_version(ort.__version__) < 28, reason="the entry is for models from memory")
def test_a_model_is_compiled_whose_external_data_are_elsewhere(tmp_path: Path) -> None:
    for name in ("model", "data"):
        (tmp_path / name).mkdir()
    source(tmp_path / "model" / "m.onnx")
    (tmp_path / "model" / "m.onnx_data").rename(tmp_path / "data" / "m.onnx_data")
    entries = {
        FOLDER: str(tmp_path / "data"),
        "ep.context_enable": "1",
        "ep.context_file_path": str(tmp_path / "model" / "m_ctx.onnx"),
    }
    made = settings(entries, {"context_weightless": "1"})
    ort.InferenceSession(str(tmp_path / "model" / "m.onnx"), made)
    compiled = tmp_path / "model" / "m_ctx.onnx"
    np.testing.assert_allclose(result(compiled, {FOLDER: str(tmp_path / "data")}), X @ WEIGHT, rtol=1e-6)


def test_the_models_own_folder_comes_before_that_of_an_entry(tmp_path: Path) -> None:
    """For a model loaded from a path, ep.context_file_path counts only if the model's own folder lacks the context."""
    for number, name in enumerate(("own", "other"), 1):
        (tmp_path / name).mkdir()
        source(tmp_path / name / "m.onnx", WEIGHT * number)
        compile_model(str(tmp_path / name / "m.onnx"), tmp_path / name / "m_ctx.onnx")
    entries = {"ep.context_file_path": str(tmp_path / "other" / "m_ctx.onnx")}
    compiled = tmp_path / "own" / "m_ctx.onnx"
    np.testing.assert_allclose(result(compiled, entries), X @ WEIGHT, rtol=1e-6)
    with pytest.raises(Exception, match=r"INVALID_GRAPH.*has no partition"):
        result(compiled.read_bytes(), entries)
    (tmp_path / "own" / BINARY.format("m")).rename(tmp_path / "other" / BINARY.format("m"))
    np.testing.assert_allclose(result(compiled, entries), X @ WEIGHT, rtol=1e-6)
