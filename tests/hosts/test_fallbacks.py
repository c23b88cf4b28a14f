"""Sessions that ask for the plugin and run on the CPU: the log, `require` and the report of `exec` name the reasons."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from isolated import ROOT, add_model, python
from ort_cuda_plugin.clusters.claims.claims import NodeVerdict
from ort_cuda_plugin.sessions.exit_report import report
from ort_cuda_plugin.sessions.outcome import Outcome

NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "ORT_CUDA_PLUGIN_EMULATE": "0"}
PREAMBLE = """
import logging, sys, onnx, onnxruntime as ort, ort_cuda_plugin as plugin
from onnx import TensorProto, helper

lines = []
class Lines(logging.Handler):
    def emit(self, record):
        lines.append((record.name, record.levelname, record.getMessage()))
logging.getLogger("ort_cuda_plugin").addHandler(Lines())
logging.getLogger("ort_cuda_plugin").propagate = False
own, cuda = "CudaPluginExecutionProvider", "CUDAExecutionProvider"
add = bytes.fromhex(sys.argv[1])

def strings(*more):
    # StringConcat has strings, which only the CPU provider supports.
    names = [helper.make_tensor_value_info(name, TensorProto.STRING, [2]) for name in "st"]
    nodes = [helper.make_node("StringConcat", ["s", "s"], ["t"], name="low"), *more]
    numbers = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [8]) for name in ("a", "b", "c")]
    inputs, outputs = ([names[0], *numbers[:2]], [names[1], numbers[2]]) if more else (names[:1], names[1:])
    graph = helper.make_graph(nodes, "strings", inputs, outputs)
    opsets = [helper.make_opsetid("", 20)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()

def raised(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except Exception as error:
        return error
    raise AssertionError("no error")

def only_line():
    (name, level, text), = lines
    lines.clear()
    assert (name, level) == ("ort_cuda_plugin.sessions", "WARNING"), (name, level)
    return text
"""


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return python(PREAMBLE + code, add_model().hex(), env=NO_GPU | variables, preloaded=True)


def test_each_fallback_to_the_cpu_is_logged_with_its_reason() -> None:
    run(
        """
plugin.register(emulate=True)
ort.InferenceSession(add, providers=[own])
assert lines == [], lines
ort.InferenceSession(add, providers=["CPUExecutionProvider"])
assert lines == [], lines

session = ort.InferenceSession(add, providers=[(own, {"no_such_option": "1"})])
text = only_line()
assert f"the session asked for {own} and runs on CPUExecutionProvider" in text, text
assert "has no option 'no_such_option'" in text and f"model of {len(add)} bytes (<string>:" in text, text

ort.InferenceSession(add, providers=[own], provider_options=[{"device_id": "7"}])
assert "device_id: there is no device 7. Choose one of 0 (" in only_line()
ort.InferenceSession(add, providers=[cuda])
assert "no provider 'CUDAExecutionProvider' is available. Call ort_cuda_plugin.register(as_='CUDAExec" in only_line()

ort.InferenceSession(strings(), providers=[own])
text = only_line()
assert f"no node of the session runs on {own}: StringConcat node 'low' (" in text, text

options = ort.SessionOptions()
device = [device for device in ort.get_ep_devices() if device.ep_name == own]
options.add_provider_for_devices(device, {"use_tf32": "perhaps"})
if int(ort.__version__.split(".")[1]) >= 32:  # which raises such errors of devices that the session names
    assert "use_tf32='perhaps': use 1 or 0" in str(raised(ort.InferenceSession, add, options))
else:
    session = ort.InferenceSession(add, options)
    assert "use_tf32='perhaps': use 1 or 0" in only_line()
    assert session.get_providers() == ["CPUExecutionProvider"]
"""
    )


def test_a_session_without_a_device_is_logged() -> None:
    run(
        """
assert plugin.register() == []
ort.InferenceSession(add, providers=[own])
text = only_line()
assert "no CUDA device: " in text and "set ORT_CUDA_PLUGIN_EMULATE=1" in text, text
"""
    )


def test_functions_of_the_package_do_not_log_what_they_raise_or_return() -> None:
    run(
        """
error = raised(plugin.session, strings(), emulate=True)
assert "StringConcat node 'low'" in str(error), error
assert [verdict.supported for verdict in plugin.explain(strings(), emulate=True)] == [False]
assert lines == [], lines
"""
    )


def test_a_fallback_in_a_run_is_logged_and_known() -> None:
    run(
        """
plugin.register(emulate=True)
session = ort.InferenceSession(add, providers=[own])
plugin.require(session)
try:
    raise RuntimeError("the Run failed")
except RuntimeError:
    session.set_providers(["CPUExecutionProvider"])  # what InferenceSession.run does
assert "the Run failed" in only_line()
assert "the Run failed" in str(raised(plugin.require, session))
session.set_providers([own])
plugin.require(session)
assert lines == [], lines
"""
    )


def test_a_name_in_a_model_cannot_forge_a_line_of_the_log() -> None:
    run(
        """
plugin.register(emulate=True)
model = onnx.load_from_string(strings())
model.graph.node[0].name = "low\\nWARNING forged"
ort.InferenceSession(model.SerializeToString(), providers=[own])
assert "\\n" not in only_line()
"""
    )


def test_require_raises_if_nodes_run_elsewhere() -> None:
    run(
        """
plugin.register(emulate=True)
mixed = ort.InferenceSession(strings(helper.make_node("Add", ["a", "b"], ["c"], name="add")), providers=[own])
assert lines == [], lines
error = raised(plugin.require, mixed)
assert isinstance(error, plugin.PlacementError) and isinstance(error, plugin.Error)
assert "1 of 2 nodes run on CPUExecutionProvider" in str(error) and "StringConcat node 'low'" in str(error), error
assert [verdict.name for verdict in error.verdicts] == ["low"]
plugin.require(mixed, nodes="any")
plugin.require(mixed, allow=["StringConcat"])
plugin.require(mixed, allow={"low"})
plugin.require(mixed, allow="low")
assert raised(plugin.require, mixed, allow=["Add"]).verdicts
plugin.require(plugin.session(add))

cpu = ort.InferenceSession(add, providers=["CPUExecutionProvider"])
error = raised(plugin.require, cpu, nodes="any")
assert "the application asked for CPUExecutionProvider. Create the session with" in str(error), error
ort.InferenceSession(strings(), providers=[own])
lines.clear()
for nodes in ("all", "any"):
    error = raised(plugin.require, ort.InferenceSession(strings(), providers=[own]), nodes=nodes)
    assert "no node runs on" in str(error) and "'low'" in str(error), error
error = raised(plugin.require, mixed, nodes="most")
assert isinstance(error, ValueError) and "nodes='most': expected one of 'all', 'any'" in str(error), error
assert isinstance(raised(plugin.require, "model.onnx"), TypeError)
"""
    )


def test_require_reads_the_record_of_onnx_runtime_for_earlier_sessions() -> None:
    run(
        """
from ort_cuda_plugin.plugin_library import get_library_path
ort.register_execution_provider_library("early.virtual", get_library_path())
early = ort.InferenceSession(add, providers=[own])
assert "was created before ort_cuda_plugin.register" in str(raised(plugin.require, early))
options = ort.SessionOptions()
options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
model = strings(helper.make_node("Add", ["a", "b"], ["c"], name="add"))
mixed = ort.InferenceSession(model, options, providers=[own])
assert "ONNX Runtime assigned it to CPUExecutionProvider" in str(raised(plugin.require, mixed))
plugin.require(mixed, allow=["StringConcat"])
"""
    )


# ---- the report of `ort-cuda-plugin exec` ----

APPLICATION = """
import sys, onnxruntime as ort
model = sys.argv[1]
for _ in range(2):
    ort.InferenceSession(model, providers=["CUDAExecutionProvider"])
ort.InferenceSession(model, providers=["CPUExecutionProvider"])
"""


def test_exec_reports_the_sessions_of_a_program(tmp_path: Path) -> None:
    model, program = tmp_path / "add.onnx", tmp_path / "app.py"
    add_model(model)
    program.write_text(APPLICATION.replace("CUDAExecutionProvider", "CudaPluginExecutionProvider"))
    done = subprocess.run(
        [sys.executable, "-m", "ort_cuda_plugin", "with", "--device", "emulated", "--", sys.executable, str(program)]
        + [str(model)],
        env={**os.environ, **NO_GPU, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    lines = done.stderr.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("ort-cuda-plugin with: process"))
    assert re.fullmatch(r"ort-cuda-plugin with: process \d+ created 3 sessions", lines[first])
    assert lines[first + 1 :] == [
        f"  {model} ({program}:5): asked for CudaPluginExecutionProvider; 1 of 1 node ran on "
        "CudaPluginExecutionProvider (Emulated CUDA device) (2 sessions)",
        f"  {model} ({program}:6): asked only for CPUExecutionProvider; all nodes ran on CPUExecutionProvider",
    ]


OURS, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


def verdict(name: str, reason: str) -> NodeVerdict:
    return NodeVerdict(name, "Loop", "", 16, not reason, kind="type" if reason else "", reason=reason)


@pytest.mark.parametrize(
    ("outcome", "lines"),
    [
        pytest.param(
            Outcome("m", "", (OURS,), (OURS, CPU), OURS, [verdict("a", ""), verdict("b", "x"), verdict("c", "x")], ""),
            [f"m: asked for {OURS}; 1 of 3 nodes ran on {OURS}, 2 on {CPU}", "  2 Loop nodes: x"],
            id="declined",
        ),
        pytest.param(
            Outcome("m", "a.py:1", (OURS,), (CPU,), "", (), "no device"),
            [f"m (a.py:1): asked for {OURS}; all nodes ran on {CPU}: no device"],
            id="fallback",
        ),
        pytest.param(
            Outcome("m", "a.py:1", (OURS,), (), "", (), "no file"),
            [f"m (a.py:1): asked for {OURS}; the session could not be created: no file"],
            id="not-created",
        ),
        pytest.param(
            Outcome("m", "", (), (CPU,), "", (), ""),
            [f"m: named no provider; all nodes ran on {CPU}"],
            id="unnamed",
        ),
        pytest.param(
            Outcome("m\n", "", (OURS,), (OURS, CPU), OURS, [verdict("b", "x\ny")], "claims failed"),
            [
                f"m\\n: asked for {OURS}; 0 of 1 node ran on {OURS}, 1 on {CPU}",
                "  claims failed",
                "  1 Loop node: x\\ny",
            ],
            id="hostile",
        ),
    ],
)
def test_the_report_names_each_kind_of_session(outcome: Outcome, lines: list[str]) -> None:
    assert list(report("exec", 7, [outcome])) == [
        f"ort-cuda-plugin exec: process 7 created {'1 session' if outcome.providers else '0 sessions'}",
        *(f"  {line}" for line in lines),
    ]
