"""Plugins in compiled models: recorded launches need none of the author's code, calls need the creator."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from c_programs import COUNTED, build_host
from contexts import compile_model, container_of, load, nothing_compiled
from custom_models import in_place_of, launches, model, random_rows
from isolated import HARNESS, python
from ort_cuda_plugin import get_library_path
from ort_cuda_plugin.custom.kernels.kernels import cuda_kernel
from ort_cuda_plugin.custom.plugin import Phase, register_creator, unregister_creator
from ort_cuda_plugin.custom.plugin.fields import PluginFieldCollection
from ort_cuda_plugin.custom.plugin.stored import stored_callback
from ort_cuda_plugin.ep.contexts.context_session import ALLOW_VARIABLE
from plugins import ProbeCreator
from test_kernels import SIGNATURE, SOURCE, shift, shift_in_numpy
from test_plugin_sessions import counter_model, examples, probe_model, run_probe, top_model
from test_plugin_sessions import model as plugin_model

__all__ = ["examples"]


def test_a_recorded_enqueue_needs_none_of_the_authors_python(tmp_path: Path, examples: None) -> None:
    compile_model(top_model(k=4, threshold=0.5), tmp_path / "top.onnx")
    compile_model(counter_model(), tmp_path / "counter.onnx")
    code = f"""
        import numpy as np
        from contexts import load, nothing_compiled, container_of
        from pathlib import Path
        from ort_cuda_plugin.custom.registry import current

        x = np.arange(-50, 50, dtype=np.float32)
        folder = Path({str(tmp_path)!r})
        with nothing_compiled():
            top, counter = load(folder / "top.onnx"), load(folder / "counter.onnx")
            for _ in range(2):
                print([array.tolist() for array in top.run(None, {{"x": x}})])
                print(counter.run(["counted"], {{"x": x}})[0].tolist())
        print(current().operators)
    """
    done = python(code, env={"PYTHONPATH": str(HARNESS)})
    found = "[[-49.0, -48.0, -47.0, -46.0], [99, 98, 97, 96], 4]"
    assert done.stdout.splitlines() == [found, "[200]", found, "[300]", "[]"]


def test_a_c_host_runs_a_plugin_of_a_compiled_model(tmp_path: Path) -> None:
    """The model computes c = (twice(a) - a) + b, so the host, which knows no plugin, finds the sum that it expects."""
    nodes = [
        helper.make_node("Probe", ["a"], ["twice"], domain="test.plugins", each_run=0),
        helper.make_node("Sub", ["twice", "a"], ["again"]),
        helper.make_node("Add", ["again", "b"], ["c"]),
    ]
    values = [(name, TensorProto.FLOAT, [8]) for name in "abc"]
    creator = register_creator(ProbeCreator())
    try:
        compile_model(
            plugin_model(nodes, values[:2], values[2:]), tmp_path / "m.onnx", context_architectures="emulated"
        )
    finally:
        unregister_creator(creator)
    variables = COUNTED | {
        "ORT_CUDA_PLUGIN_PYTHON": sys.executable,
        "ORT_CUDA_PLUGIN_CACHE_DIR": str(tmp_path / "cache"),
        ALLOW_VARIABLE: "1",
    }
    command = [str(build_host("host", tmp_path)), get_library_path(), str(tmp_path / "m.onnx")]
    done = subprocess.run(command, env=variables, cwd="/", capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
    assert not list((tmp_path / "cache").glob("*.kernel"))


def test_the_cubin_of_a_kernel_is_in_the_compiled_model(tmp_path: Path) -> None:
    with in_place_of("Sign", launches(cuda_kernel(SOURCE, "shift", SIGNATURE, numba_twin=shift))):
        compile_model(model(), tmp_path / "m.onnx", context_architectures="sm_90,emulated")
    rows = container_of(tmp_path / "m_CudaPluginExecutionProvider.bin").index["kernels"]
    (own,) = (row for row in rows if row["entry"] == "shift")
    assert (own["arch"], own["signature"]) == ("sm_90", list(SIGNATURE))
    assert own["metadata"]["static_shared_bytes"] >= 256
    x = random_rows(5)
    with nothing_compiled():
        (y,) = load(tmp_path / "m.onnx").run(None, {"x": x})
    np.testing.assert_allclose(y, -(2 * np.exp(x) + 3), rtol=1e-5)


def test_a_twin_in_numpy_cannot_be_stored(tmp_path: Path) -> None:
    kernel = cuda_kernel(SOURCE, "shift", SIGNATURE, numpy_twin=shift_in_numpy)
    with in_place_of("Sign", launches(kernel)):
        with pytest.raises(Exception, match="calls Python code, the NumPy counterpart of kernel shift"):
            compile_model(model(), tmp_path / "m.onnx", context_architectures="emulated")
        compile_model(model(), tmp_path / "m.onnx", context_architectures="sm_90")


def test_an_enqueue_of_each_run_needs_its_creator(tmp_path: Path) -> None:
    creator = register_creator(ProbeCreator())
    try:
        compile_model(probe_model(), tmp_path / "m.onnx")
    finally:
        unregister_creator(creator)
    with pytest.raises(
        Exception, match=r"plugin Probe-1 of namespace 'test.plugins': each Run of this compiled model calls it"
    ):
        load(tmp_path / "m.onnx")
    seen = []

    def create(name: str, fields: PluginFieldCollection, phase: Phase) -> Any:
        seen.append((name, phase, fields.get("each_run")))
        return None if len(seen) == 1 else original.create_plugin(name, fields, phase)

    original = ProbeCreator()
    creator = register_creator(ProbeCreator(create_plugin=create))
    try:
        with pytest.raises(Exception, match="create_plugin with each_run = 1 returned no plugin"):
            load(tmp_path / "m.onnx")
        run_probe(load(tmp_path / "m.onnx"), 5)
    finally:
        unregister_creator(creator)
    assert seen == [("mine", Phase.RUNTIME, 1)] * 2


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "module"},
        {"name": 3},
        {"fields": [["a", "INT65", ""]]},
        {"fields": [["a", "INT64", "*"]]},
        {"tactic": -1},
        {"given": [True, True]},
        {"inputs": [["FLOAT32", "HWC9"]]},
        {"wild": []},
        {"tensors": [["FLOAT32", 1]]},
    ],
)
def test_a_damaged_callback_is_refused(changes: dict[str, Any]) -> None:
    row = {
        "kind": "plugin",
        "name": "Probe",
        "version": "1",
        "namespace": "test.plugins",
        "node": "mine",
        "fields": [],
        "tactic": 0,
        "given": [True],
        "inputs": [["FLOAT32", "LINEAR"]],
        "outputs": [["FLOAT32", "LINEAR"]],
        "wild": [[]],
        "has_workspace": False,
        "tensors": [["FLOAT32", 1], ["FLOAT32", 1]],
    }
    assert stored_callback(row).num_dims == 2
    with pytest.raises((ValueError, TypeError, KeyError)):
        stored_callback({**row, **changes})
