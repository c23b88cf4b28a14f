"""Runs code in new Python processes, for tests of process-wide behavior: registration, exit, fork, environment."""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from fork_server import Server

ROOT = Path(__file__).resolve().parents[2]
HARNESS = ROOT / "tests" / "harness"
"""The folder of this module, for the PYTHONPATH of processes that import its modules."""


def python(
    code: str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    timeout: float = 600,  # seconds; enough for a slow machine with an empty kernel cache
    check: bool = True,
    root: Path = ROOT,
    preloaded: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a new process that imports the package from ``root``.

    With ``check``, assert that it exits with 0, and that no thread ends with an exception.

    With ``preloaded`` the process is a child of the fork server, which has imported numpy, onnx and most of the
    package. It starts faster, but a test of imports, of another version of the package, or of a variable that an import
    reads needs a new interpreter.
    """
    environment = {**os.environ, **(env or {})}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), environment.get("PYTHONPATH", "")]))
    code = textwrap.dedent(code)
    if preloaded:
        assert root == ROOT, "the fork server has imported the package of this checkout"
        early = [name for name in env or {} if name.startswith(("LD_", "NUMBA_"))]
        assert not early, f"{early}: only a new interpreter reads these"
        done = _fork_server().run(code, arguments, environment, root, timeout)
    else:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=root,  # python -c puts the working folder first on sys.path: it must be `root`, too
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    if check:
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Exception in thread" not in done.stderr, done.stderr
    return done


@functools.cache
def _fork_server() -> Server:
    """Start the fork server of this process."""
    server = Server({**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])})
    atexit.register(server.close)
    return server


def add_model(path: Path | None = None, dims: Sequence[int | str] = (8,)) -> bytes:
    """Return the model c = a + b for float32 tensors of shape ``dims``; also write it to ``path``, if given."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name in "abc"]
    graph = helper.make_graph([helper.make_node("Add", ["a", "b"], ["c"], name="add")], "add", values[:2], values[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    if path is not None:
        onnx.save(model, path)
    return bytes(model.SerializeToString())
