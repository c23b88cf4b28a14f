"""Callbacks by which an application reads and writes context files itself (ONNX Runtime 1.31 and later).

tests/hosts/test_boundary_versions.py tests the callbacks of ONNX Runtime 1.28 to 1.30. Older versions have none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest

from contexts import (
    BINARY,
    assert_same,
    compile_model,
    context_nodes,
    load,
    nothing_compiled,
    row_model,
    rows,
    settings,
)

pytestmark = pytest.mark.skipif(
    not hasattr(ort.SessionOptions, "set_ep_context_data_read_func"), reason="onnxruntime 1.31 has these functions"
)
FEED = [{"x": rows(2, 3)}]


class Application:
    """An application that keeps context files in memory. With ``fails`` its write callback raises OSError."""

    def __init__(self, fails: bool = False) -> None:
        self.files: dict[str, bytes] = {}
        self.fails = fails

    def write(self, name: str, data: Any) -> None:
        if self.fails:
            raise OSError("the application's disk is full")
        self.files[name] = data.read()

    def read(self, name: str, out: Any) -> None:
        data = self.files[name]
        out.allocate(len(data))
        out.write(data)

    def compiler(self, source: bytes) -> Any:
        compiler = ort.ModelCompiler(settings(), source, embed_compiled_data_into_model=False)._model_compiler
        compiler.set_ep_context_data_write_func(self.write)
        return compiler

    def load(self, model: Path | bytes, limit: int = 1 << 30) -> ort.InferenceSession:
        options = settings(options={"context_allow_host_code": "1"})
        options.set_ep_context_data_read_func(self.read, limit)
        return ort.InferenceSession(model if isinstance(model, bytes) else str(model), options)


def test_the_application_writes_and_reads_the_file(tmp_path: Path) -> None:
    application = Application()
    application.compiler(row_model()).compile_to_file(str(tmp_path / "m_ctx.onnx"))
    assert [path.name for path in tmp_path.iterdir()] == ["m_ctx.onnx"]
    assert list(application.files) == [BINARY.format("m")]
    with nothing_compiled():
        assert_same(application.load(tmp_path / "m_ctx.onnx"), row_model(), FEED)
    (tmp_path / BINARY.format("m")).write_bytes(application.files[BINARY.format("m")])  # load() has no read callback
    assert_same(load(tmp_path / "m_ctx.onnx"), row_model(), FEED)


def test_model_and_context_in_memory(tmp_path: Path) -> None:
    """Without a path, compile_to_bytes and compile_to_stream pass the context to the application's write callback."""
    application, other = Application(), Application()
    data = application.compiler(row_model()).compile_to_bytes()
    pieces: list[bytes] = []
    other.compiler(row_model()).compile_to_stream(pieces.append)
    (node,) = context_nodes(onnx.load_from_string(b"".join(pieces)))
    assert [node["ep_cache_context"]] == [name.encode() for name in other.files]
    assert application.files == other.files
    assert_same(application.load(data), row_model(), FEED)


def test_what_goes_wrong_with_the_applications_functions_is_told(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="the application's disk is full"):
        Application(fails=True).compiler(row_model()).compile_to_file(str(tmp_path / "m_ctx.onnx"))
    assert not list(tmp_path.iterdir())
    compiled = compile_model(row_model(), tmp_path / "m_ctx.onnx")
    application = Application()  # has no file: the context beside the model must not be used instead
    with pytest.raises(Exception, match=r"INVALID_GRAPH.*reads context files failed for 'm_CudaPlugin"):
        application.load(tmp_path / "m_ctx.onnx")
    application.files[BINARY.format("m")] = b"something else"
    with pytest.raises(Exception, match=r"INVALID_GRAPH.*is damaged"):
        application.load(tmp_path / "m_ctx.onnx")
    with pytest.raises(Exception, match=r"INVALID_GRAPH.*that reads context files failed"):
        application.load(tmp_path / "m_ctx.onnx", limit=4)
    application.files[BINARY.format("m")] = b""
    with pytest.raises(Exception, match=r"INVALID_GRAPH.*(gives no context file|is damaged)"):
        application.load(tmp_path / "m_ctx.onnx")
    next(each for each in compiled.graph.node[0].attribute if each.name == "ep_cache_context").s = b"../m.bin"
    application.files["../m.bin"] = b"anything"
    with pytest.raises(Exception, match=r"INVALID_GRAPH.*expected a relative path without"):
        application.load(compiled.SerializeToString())
