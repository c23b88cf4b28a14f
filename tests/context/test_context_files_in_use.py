"""Files that change while a session reads them: the session fails with an error and never crashes.

Truncating a memory-mapped file would end the process with SIGBUS, so the plugin maps none.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from contexts import BINARY, compile_model, load, nothing_compiled, settings
from ort_cuda_plugin.model.open_file import FileChanged, OpenFile, open_file
from session_pair import FLOAT, info

WEIGHT = np.arange(128 * 256, dtype=np.float32).reshape(128, 256) / 65536
X = np.ones((2, 128), np.float32)
EXPECTED = X @ WEIGHT


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Return a folder with m.onnx, its weights m.data, and compiled models with weights (full) and without (light)."""
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [info("x", FLOAT, ["n", 128])],
        [info("y", FLOAT, None)],
        [numpy_helper.from_array(WEIGHT, "w")],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(made, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=16)
    compile_model(str(tmp_path / "m.onnx"), tmp_path / "full_ctx.onnx")
    compile_model(str(tmp_path / "m.onnx"), tmp_path / "light_ctx.onnx", context_weightless="1")
    return tmp_path


@contextmanager
def before_a_read(monkeypatch: pytest.MonkeyPatch, path: Path, act: Callable[[], None], least: int) -> Iterator[None]:
    """Call ``act`` once, before the next read of at least ``least`` bytes from the file at ``path``.

    The file gets its old contents back at the end of the block.
    """
    contents, real = path.read_bytes(), OpenFile.read_into
    done: list[bool] = []

    def read_into(file: OpenFile, target: memoryview, offset: int) -> None:
        if not done and len(target) >= least and file.path.resolve() == path.resolve():
            done.append(True)
            act()
        real(file, target, offset)

    monkeypatch.setattr(OpenFile, "read_into", read_into)
    try:
        yield
    finally:
        monkeypatch.undo()
        path.write_bytes(contents)
    assert done


@pytest.mark.parametrize(
    ("model", "file", "least"),
    [
        ("full_ctx.onnx", BINARY.format("full"), 1),
        ("full_ctx.onnx", BINARY.format("full"), WEIGHT.nbytes),
        ("light_ctx.onnx", BINARY.format("light"), 200),
        ("light_ctx.onnx", "m.onnx", 1),
        ("light_ctx.onnx", "m.data", WEIGHT.nbytes),
    ],
)
def test_a_file_that_becomes_shorter_while_it_is_read_is_an_error(
    models: Path, monkeypatch: pytest.MonkeyPatch, model: str, file: str, least: int
) -> None:
    path = models / file
    with (
        before_a_read(monkeypatch, path, lambda: os.truncate(path, 0), least),
        pytest.raises(Exception, match=r"INVALID_GRAPH.*changed while it was read; files that are in use must not"),
    ):
        load(models / model)
    np.testing.assert_allclose(load(models / model).run(None, {"x": X})[0], EXPECTED, rtol=1e-6)


@pytest.mark.parametrize(("model", "file"), [("full_ctx.onnx", BINARY.format("full")), ("light_ctx.onnx", "m.data")])
def test_a_file_that_is_written_while_it_is_read_gives_no_mixture(
    models: Path, monkeypatch: pytest.MonkeyPatch, model: str, file: str
) -> None:
    path = models / file

    def write() -> None:
        with path.open("r+b") as stream:
            stream.seek(path.stat().st_size // 2)
            stream.write(b"\xff" * 1000)
        os.utime(path, ns=(1, 1))

    with (
        before_a_read(monkeypatch, path, write, WEIGHT.nbytes),
        pytest.raises(Exception, match=r"INVALID_GRAPH.*(changed while it was read|the hash of .* does not match)"),
    ):
        load(models / model)


def test_external_data_that_become_shorter_are_an_error(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session reads the graph of an uncompiled model; the weight file is truncated before it reads the weights."""
    path = models / "m.data"
    with (
        before_a_read(monkeypatch, path, lambda: os.truncate(path, WEIGHT.nbytes // 2), WEIGHT.nbytes),
        pytest.raises(Exception, match=r"contents of 'w' cannot be read: .*m.data' changed while it was read"),
    ):
        ort.InferenceSession(str(models / "m.onnx"), settings(), enable_fallback=0)


def test_a_session_maps_no_file_of_a_compiled_model(models: Path) -> None:
    """Sessions still run after all files are deleted, also for sizes that need another plan."""
    sessions = [load(models / name) for name in ("full_ctx.onnx", "light_ctx.onnx")]
    mapped = Path("/proc/self/maps").read_text()
    assert str(models) not in mapped
    for path in models.iterdir():
        path.unlink()
    for session in sessions:
        with nothing_compiled():
            np.testing.assert_allclose(session.run(None, {"x": X})[0], EXPECTED, rtol=1e-6)
        many = np.ones((3000, 128), np.float32)
        np.testing.assert_allclose(session.run(None, {"x": many})[0], many @ WEIGHT, rtol=1e-5)


def handles(folder: Path) -> int:
    """Return the number of this process's open file descriptors for files in a folder."""
    found = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(os.path.realpath(path).startswith(str(folder)) for path in found)


def test_files_are_closed_with_their_sessions(models: Path) -> None:
    """Three sessions on one context file share one file descriptor."""
    sessions = [load(models / "full_ctx.onnx") for _ in range(3)]
    assert handles(models) == 1
    del sessions
    gc.collect()
    assert handles(models) == 0


def test_a_handle_is_shared_until_the_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"first")
    first = open_file(path)
    assert open_file(path) is first
    first.check_unchanged()
    path.write_bytes(b"second")
    second = open_file(path)
    assert second is not first
    assert bytes(second.read(0, 6)) == b"second"
    with pytest.raises(FileChanged, match="files that are in use must not change"):
        first.check_unchanged()
    with pytest.raises(FileChanged):
        second.read(1, 6)
    assert bytes(second.read(6, 0)) == b""
