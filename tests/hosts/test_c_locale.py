"""Paths that are not ASCII, in an interpreter whose file system encoding is ASCII, as in Triton 24.10."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from isolated import python
from ort_cuda_plugin.model.open_file import native_path

C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

APPLICATION = """
import os, sys
import numpy as np
import onnxruntime
import ort_cuda_plugin
assert sys.getfilesystemencoding() == "ascii", sys.getfilesystemencoding()
folder = os.fsencode(sys.argv[1]).decode("utf-8")  # ONNX Runtime takes UTF-8

def result(name):
    options = {"context_allow_host_code": 1}
    session = ort_cuda_plugin.session(f"{folder}/{name}", emulate=True, provider_options=options)
    return session.run(None, {"x": np.ones((2, 64), np.float32)})[0]

expected = result("gr\\xf6\\xdfe.onnx")
assert (expected == 64).all(), expected
for embed in "01":
    compiled = f"kont\\xe4xt{embed}_ctx.onnx"
    entries = {"enable": "1", "file_path": f"{folder}/{compiled}", "embed_mode": embed}
    options = onnxruntime.SessionOptions()
    for key, value in entries.items():
        options.add_session_config_entry(f"ep.context_{key}", value)
    ort_cuda_plugin.session(f"{folder}/gr\\xf6\\xdfe.onnx", emulate=True, sess_options=options)
    assert (result(compiled) == expected).all()
try:
    result("b\\xf6se.onnx")
except ort_cuda_plugin.Error as error:
    assert "The file is text" in str(error), ascii(str(error))
else:
    raise AssertionError("a text file was a model")
"""


def write_model(folder: Path) -> None:
    """Save a product whose weights are in a file of their own; both names have letters that ASCII lacks."""
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 64])],
        [numpy_helper.from_array(np.ones((64, 64), np.float32), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, folder / "größe.onnx", save_as_external_data=True, location="gewichtä.bin")


def test_files_whose_names_are_not_ascii_are_found_in_the_c_locale(tmp_path: Path) -> None:
    folder = tmp_path / "modèle"
    folder.mkdir()
    write_model(folder)
    (folder / "böse.onnx").write_text("kein Modell")
    assert (folder / "gewichtä.bin").stat().st_size == 64 * 64 * 4
    python(APPLICATION, str(folder), env=C_LOCALE)
    assert {path.name for path in folder.iterdir()} >= {
        "kontäxt0_ctx.onnx",
        "kontäxt0_CudaPluginExecutionProvider.bin",
        "kontäxt1_ctx.onnx",
    }


@pytest.mark.parametrize("path", ["", "model.onnx", "modèle/größe.onnx", "/a/\udcff.bin"])
def test_a_native_path_stays_as_it_is(path: str) -> None:
    assert native_path(path) == path
    assert native_path(native_path(path)) == path
