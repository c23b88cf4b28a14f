"""Compiled models in a C application: they load and run without compiling a kernel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from c_programs import COUNTED, build_host
from contexts import compile_model
from isolated import add_model
from ort_cuda_plugin import get_library_path
from ort_cuda_plugin.ep.contexts.context_session import ALLOW_VARIABLE


def test_a_compiled_model_runs_in_a_c_host(tmp_path: Path) -> None:
    host = build_host("host", tmp_path)
    compile_model(add_model(), tmp_path / "add_ctx.onnx", context_architectures="sm_90,emulated")
    cache = tmp_path / "cache"
    variables = {"ORT_CUDA_PLUGIN_PYTHON": sys.executable, "ORT_CUDA_PLUGIN_CACHE_DIR": str(cache), ALLOW_VARIABLE: "1"}
    command = [str(host), get_library_path(), str(tmp_path / "add_ctx.onnx")]
    done = subprocess.run(command, env=COUNTED | variables, cwd="/", capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
    assert not list(cache.glob("*.kernel"))  # the cache has no kernel, so none was compiled
