"""Fresh processes for tests whose subject is process-wide: registration, interpreter exit, fork, environment."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, helper

ROOT = Path(__file__).resolve().parents[2]
HARNESS = ROOT / "tests" / "harness"
"""The folder of this module, for the paths of processes that import others of it."""


def python(
    code: str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    timeout: float = 600,  # of a slow machine with a cold cache
    check: bool = True,
    root: Path = ROOT,
) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` in a new interpreter with the package in ``root`` on its path, before PYTHONPATH's folders.

    ``check``: it has to exit with 0, and none of its threads with an exception.
    """
    environment = {**os.environ, **(env or {})}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), environment.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        cwd=root,  # which the interpreter puts on its path first
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if check:
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Exception in thread" not in done.stderr, done.stderr
    return done


def add_model(path: Path | None = None, dims: Sequence[int | str] = (8,)) -> bytes:
    """c = a + b of floats of that shape, as bytes; also written to ``path``."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name in "abc"]
    graph = helper.make_graph([helper.make_node("Add", ["a", "b"], ["c"], name="add")], "add", values[:2], values[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    if path is not None:
        onnx.save(model, path)
    return bytes(model.SerializeToString())
