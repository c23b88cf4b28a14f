"""Protection of input files: a compilation never overwrites its source model or a file that its output needs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from contexts import BINARY, settings
from session_pair import FLOAT, info

WEIGHT = np.eye(32, dtype=np.float32)
X = np.ones((2, 32), np.float32)


def source(path: Path, data: str = "", in_a_body: bool = False) -> None:
    """Write a model with one MatMul, or with one in each branch of an If (``in_a_body``).

    ``data`` is the name of a file for the weights; with "" they are in the model.
    """
    weight = numpy_helper.from_array(WEIGHT, "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    initializers = [weight]
    inputs = [info("x", FLOAT, ["n", 32])]
    if in_a_body:
        bodies = {
            name: helper.make_graph(
                [helper.make_node("MatMul", ["x", f"w_{name}"], [name])],
                name,
                [],
                [info(name, FLOAT, None)],
                [numpy_helper.from_array(WEIGHT, f"w_{name}")],
            )
            for name in ("then", "else")
        }
        nodes = [
            helper.make_node("ReduceMax", ["x"], ["m"], keepdims=0),
            helper.make_node("Cast", ["m"], ["c"], to=onnx.TensorProto.BOOL),
            helper.make_node("If", ["c"], ["y"], then_branch=bodies["then"], else_branch=bodies["else"]),
        ]
        initializers = []
    graph = helper.make_graph(nodes, "g", inputs, [info("y", FLOAT, None)], initializers)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    if not data:
        onnx.save(made, path)
        return
    tensors = [t for node in made.graph.node for a in node.attribute for t in a.g.initializer] + [
        *made.graph.initializer
    ]
    with open(path.parent / data, "wb") as file:
        for tensor in tensors:
            place = file.tell()
            file.write(tensor.raw_data)
            tensor.ClearField("raw_data")
            tensor.data_location = onnx.TensorProto.EXTERNAL
            for key, value in {"location": data, "offset": place, "length": WEIGHT.nbytes}.items():
                tensor.external_data.add(key=key, value=str(value))
    path.write_bytes(made.SerializeToString())


def write(
    model: Path | bytes,
    output: Path,
    entries: Mapping[str, str] | None = None,
    weightless: bool = True,
    embed: bool = False,
) -> None:
    options = settings(entries, {"context_weightless": str(int(weightless))})
    compiler = ort.ModelCompiler(
        options,
        model if isinstance(model, bytes) else str(model),
        embed_compiled_data_into_model=embed,
    )
    compiler.compile_to_file(str(output))


@contextmanager
def refused(folder: Path, why: str) -> Iterator[None]:
    """Assert that the block fails with the reason ``why``, and that no file in ``folder`` changes."""
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with pytest.raises(Exception, match=rf"INVALID_GRAPH.*it would replace .*, {why}.*Write the compiled model to"):
        yield
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("embed", [False, True])
def test_a_model_that_keeps_the_weights_is_not_replaced(tmp_path: Path, embed: bool) -> None:
    """A weightless output may not overwrite its source, whether by path, symbolic link or hard link."""
    source(tmp_path / "m.onnx")
    (tmp_path / "link.onnx").symlink_to("m.onnx")
    os.link(tmp_path / "m.onnx", tmp_path / "hard.onnx")
    (tmp_path / "sub").mkdir()
    for name in ("m.onnx", "link.onnx", "hard.onnx", "sub/../m.onnx"):
        with refused(tmp_path, "which has weights that the compiled model does not store"):
            write(tmp_path / "m.onnx", tmp_path / name, embed=embed)
    with refused(tmp_path, "which has weights"):
        write(tmp_path / "link.onnx", tmp_path / "m.onnx", embed=embed)


def test_nor_is_the_one_that_the_application_names(tmp_path: Path) -> None:
    source(tmp_path / "m.onnx")
    entries = {"ep.context_source_model_path": str(tmp_path / "m.onnx")}
    with refused(tmp_path, "which has weights"):
        write((tmp_path / "m.onnx").read_bytes(), tmp_path / "m.onnx", entries)


def test_a_sessions_entries_replace_nothing(tmp_path: Path) -> None:
    """ONNX Runtime refuses to overwrite a compiled model; the plugin must protect the other files."""
    source(tmp_path / "m.onnx", BINARY.format("c"))
    entries = {"ep.context_enable": "1", "ep.context_file_path": str(tmp_path / "c.onnx")}
    with refused(tmp_path, "which has"):
        ort.InferenceSession(str(tmp_path / "m.onnx"), settings(entries, {"context_weightless": "1"}))
    entries["ep.context_file_path"] = str(tmp_path / "d.onnx")
    entries["ep.context_model_external_initializers_file_name"] = BINARY.format("c")
    with refused(tmp_path, "which has"):
        ort.InferenceSession(str(tmp_path / "m.onnx"), settings(entries))


@pytest.mark.parametrize("weightless", [False, True])
@pytest.mark.parametrize("in_a_body", [False, True])
def test_external_data_are_not_replaced(tmp_path: Path, weightless: bool, in_a_body: bool) -> None:
    """Neither the compiled model nor the context file may overwrite the source's external data."""
    data = BINARY.format("c")
    source(tmp_path / "m.onnx", data, in_a_body)
    with refused(tmp_path, "which has"):
        write(tmp_path / "m.onnx", tmp_path / data, weightless=weightless)
    with refused(tmp_path, "which has"):
        write(tmp_path / "m.onnx", tmp_path / "c.onnx", weightless=weightless)


def test_a_context_file_does_not_replace_its_source(tmp_path: Path) -> None:
    source(tmp_path / BINARY.format("c"))
    with refused(tmp_path, "which is the model that is being compiled"):
        write(tmp_path / BINARY.format("c"), tmp_path / "c.onnx", weightless=False)


def test_a_group_replaces_the_source_of_none(tmp_path: Path) -> None:
    """With ep.share_ep_contexts, one context file refers to the weights of all source models of the group."""
    for name in ("a.onnx", "b.onnx"):
        source(tmp_path / name)
    share = {"ep.share_ep_contexts": "1"}
    write(tmp_path / "a.onnx", tmp_path / "a_ctx.onnx", share)
    with refused(tmp_path, "which has weights"):
        write(tmp_path / "b.onnx", tmp_path / "a.onnx", {**share, "ep.stop_share_ep_contexts": "1"})
    write(tmp_path / "b.onnx", tmp_path / "b_ctx.onnx", {**share, "ep.stop_share_ep_contexts": "1"})


def test_a_compiled_model_with_weights_may_take_the_place_of_its_source(tmp_path: Path) -> None:
    """A compiled model that stores its weights does not need its source. ONNX Runtime also allows overwriting it."""
    source(tmp_path / "m.onnx")
    write(tmp_path / "m.onnx", tmp_path / "m.onnx", weightless=False)
    session = ort.InferenceSession(str(tmp_path / "m.onnx"), settings(options={"context_allow_host_code": "1"}))
    assert np.array_equal(session.run(None, {"x": X})[0], X)
