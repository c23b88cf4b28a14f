"""Errors of Runs in sessions as applications make them, with ONNX Runtime's fallback to the CPU left on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from isolated import ROOT, add_model, python

START = """
import os, signal, sys
import numpy as np, onnxruntime as ort, ort_cuda_plugin as plugin
plugin.register(emulate=True)
ort.set_default_logger_severity(4)
session = ort.InferenceSession(bytes.fromhex(sys.argv[1]), providers=["CudaPluginExecutionProvider"])
def feeds(rows):
    return {"a": np.ones((rows, 1024), np.float32), "b": np.ones((1, 1024), np.float32)}
def runs(rows):
    before = plugin.counters()["runs"]
    session.run(None, feeds(rows))
    return plugin.counters()["runs"] > before
def error_of(call):
    try:
        call()
    except Exception as error:
        assert session.get_providers()[0] == "CudaPluginExecutionProvider", (error, session.get_providers())
        return str(error)
    raise AssertionError("no error")
assert runs(1)
"""

CAUSES = {
    "no memory for an input": """
plugin.trim()
plugin.set_limit(0, 2_000_000)
assert "out of memory" in error_of(lambda: runs(1000))
plugin.set_limit(0, None)
assert runs(1)
""",
    "no memory for an output": """
plugin.trim()
plugin.set_limit(0, 8_000_000)
assert "output" in (message := error_of(lambda: runs(1000))) and "out of memory" in message, message
plugin.set_limit(0, None)
assert runs(1)
""",
    "no memory for values of the application": """
plugin.trim()
plugin.set_limit(0, 2_000_000)
values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feeds(1000).items()}
assert "out of memory" in error_of(lambda: session.run_with_ort_values(None, values))
plugin.set_limit(0, None)
assert runs(1)
""",
    "a fork": """
child = os.fork()
if child == 0:
    signal.alarm(60)
    try:
        os._exit(0 if "was forked" in error_of(lambda: runs(1)) else 1)
    except BaseException as error:
        print(error, flush=True)
    os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert runs(1)
""",
}


@pytest.mark.parametrize("cause", CAUSES)
def test_an_error_of_a_run_leaves_the_session_on_the_provider(cause: str) -> None:
    code = START + CAUSES[cause]
    python(code, add_model(dims=["rows", 1024]).hex(), env={"CUDA_VISIBLE_DEVICES": ""}, timeout=120, preloaded=True)


def test_no_error_has_the_code_that_makes_onnxruntime_leave_the_provider() -> None:
    sources = [path for folder in ("csrc_shim", "ort_cuda_plugin") for path in (ROOT / folder).rglob("*.[chp]*")]
    using = [path for path in sources if _fails_with_ep_fail(path)]
    assert len(sources) > 300
    assert using == []


def _fails_with_ep_fail(path: Path) -> bool:
    if path.suffix not in (".c", ".h", ".py") or path.name in ("ort_abi.h", "structs.py"):
        return False
    code = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
    return "ORT_EP_FAIL" in code or re.search(r"\bort_code = 11\b", code) is not None
