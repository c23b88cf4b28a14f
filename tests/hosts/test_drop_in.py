"""The plugin under the built-in execution provider's name: what its documentation shows runs as it stands there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from isolated import ROOT, add_model, python
from ort_versions import api_version

NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "ORT_CUDA_PLUGIN_EMULATE": "0"}
VERSION = api_version(onnxruntime.__version__)
by_name = pytest.mark.skipif(VERSION < 28, reason="asks no plugin for the provider that CUDAExecutionProvider names")
REGISTER = """
import warnings
warnings.simplefilter("error")
import numpy as np, onnxruntime, ort_cuda_plugin
ort = onnxrt = onnxruntime
ort_cuda_plugin.register(as_="CUDAExecutionProvider", emulate=True)
"""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Return a folder with the models that the samples name."""

    def save(file: str, inputs: str, outputs: str) -> None:
        x = helper.make_tensor_value_info(inputs, TensorProto.FLOAT, [3, 2])
        y = helper.make_tensor_value_info(outputs, TensorProto.FLOAT, [3, 1])
        weight = numpy_helper.from_array(np.array([[1], [2]], np.float32), "W")
        graph = helper.make_graph([helper.make_node("MatMul", [inputs, "W"], [outputs])], "g", [x], [y], [weight])
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / file)

    save("matmul_2.onnx", "X", "Y")
    save("model.onnx", "input", "output")
    return tmp_path


def sample(code: str, folder: Path) -> None:
    """Run ``code`` in ``folder``, with warnings as errors, and check that it ran on the device."""
    begin = f"import os; os.chdir({str(folder)!r})\n"
    end = "\nassert ort_cuda_plugin.counters()['runs'] > 0\n"
    done = python(REGISTER + begin + code + end, env=NO_GPU, preloaded=True)
    assert "CUDAExecutionProvider" not in done.stderr, done.stderr  # ORT's warnings name it


@by_name
def test_the_sample_of_cuda_graphs(models: Path) -> None:
    sample(
        """
providers = [("CUDAExecutionProvider", {"enable_cuda_graph": True})]
x = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=np.float32)
y = np.array([[0.0], [0.0], [0.0]], dtype=np.float32)
x_ortvalue = onnxrt.OrtValue.ortvalue_from_numpy(x, "cuda", 0)
y_ortvalue = onnxrt.OrtValue.ortvalue_from_numpy(y, "cuda", 0)
session = onnxrt.InferenceSession("matmul_2.onnx", providers=providers)
io_binding = session.io_binding()
io_binding.bind_ortvalue_input("X", x_ortvalue)
io_binding.bind_ortvalue_output("Y", y_ortvalue)
session.run_with_iobinding(io_binding)
expected_y = np.array([[5.0], [11.0], [17.0]], dtype=np.float32)
np.testing.assert_allclose(expected_y, y_ortvalue.numpy(), rtol=1e-05, atol=1e-05)
session.run_with_iobinding(io_binding)
np.testing.assert_allclose(expected_y, y_ortvalue.numpy(), rtol=1e-05, atol=1e-05)
x_ortvalue.update_inplace(np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]], dtype=np.float32))
session.run_with_iobinding(io_binding)
np.testing.assert_allclose(10 * expected_y, y_ortvalue.numpy(), rtol=1e-05, atol=1e-05)
assert ort_cuda_plugin.counters()["graphs_live"] == 1
""",
        models,
    )


@by_name
def test_the_samples_of_options(models: Path) -> None:
    sample(
        """
X = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=np.float32)
for options in (
    {
        "device_id": 0,
        "arena_extend_strategy": "kNextPowerOfTwo",
        "gpu_mem_limit": 2 * 1024 * 1024 * 1024,
        "cudnn_conv_algo_search": "EXHAUSTIVE",
        "do_copy_in_default_stream": True,
    },
    {"cudnn_conv_use_max_workspace": "1"},
    {"cudnn_conv1d_pad_to_nc1d": "1"},
    {"enable_cuda_graph": "1"},
    {"use_tf32": 0, "tunable_op_enable": "1", "tunable_op_tuning_enable": "1"},
    {"has_user_compute_stream": "0", "user_compute_stream": "0"},
):
    providers = [("CUDAExecutionProvider", options), "CPUExecutionProvider"]
    sess_options = ort.SessionOptions()
    session = ort.InferenceSession("model.onnx", sess_options=sess_options, providers=providers)
    assert session.get_providers() == ["CUDAExecutionProvider", "CPUExecutionProvider"]
    if "enable_cuda_graph" not in options:
        np.testing.assert_allclose(session.run(None, {"input": X})[0], [[5], [11], [17]], rtol=1e-6)
""",
        models,
    )


@by_name
def test_the_samples_of_io_binding(models: Path) -> None:
    sample(
        """
X = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=np.float32)
expected = np.array([[5], [11], [17]], np.float32)
session = onnxruntime.InferenceSession("model.onnx", providers=["CUDAExecutionProvider"])

ortvalue = onnxruntime.OrtValue.ortvalue_from_numpy(X, "cuda", 0)
assert (ortvalue.device_name(), ortvalue.data_type(), ortvalue.is_tensor()) == ("cuda", "tensor(float)", True)
assert np.array_equal(ortvalue.numpy(), X)
np.testing.assert_array_equal(session.run(["output"], {"input": ortvalue})[0], expected)

io_binding = session.io_binding()
io_binding.bind_cpu_input("input", X)
io_binding.bind_output("output")
session.run_with_iobinding(io_binding)
np.testing.assert_array_equal(io_binding.copy_outputs_to_cpu()[0], expected)

X_ortvalue = onnxruntime.OrtValue.ortvalue_from_numpy(X, "cuda", 0)
Y_ortvalue = onnxruntime.OrtValue.ortvalue_from_shape_and_type([3, 1], np.float32, "cuda", 0)
io_binding = session.io_binding()
io_binding.bind_ortvalue_input("input", X_ortvalue)
io_binding.bind_ortvalue_output("output", Y_ortvalue)
session.run_with_iobinding(io_binding)
np.testing.assert_array_equal(Y_ortvalue.numpy(), expected)
""",
        models,
    )


@pytest.mark.skipif(VERSION < 31, reason='binds addresses of "cuda" as those of no vendor')
def test_the_samples_of_io_binding_by_address(models: Path) -> None:
    sample(
        """
X = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=np.float32)
expected = np.array([[5], [11], [17]], np.float32)
session = onnxruntime.InferenceSession("model.onnx", providers=["CUDAExecutionProvider"])

X_ortvalue = onnxruntime.OrtValue.ortvalue_from_numpy(X, "cuda", 0)
io_binding = session.io_binding()
io_binding.bind_input(name="input", device_type=X_ortvalue.device_name(), device_id=0, element_type=np.float32,
                      shape=X_ortvalue.shape(), buffer_ptr=X_ortvalue.data_ptr())
io_binding.bind_output("output")
session.run_with_iobinding(io_binding)
np.testing.assert_array_equal(io_binding.copy_outputs_to_cpu()[0], expected)

Y_ortvalue = onnxruntime.OrtValue.ortvalue_from_shape_and_type([3, 1], np.float32, "cuda", 0)
io_binding = session.io_binding()
io_binding.bind_input(name="input", device_type=X_ortvalue.device_name(), device_id=0, element_type=np.float32,
                      shape=X_ortvalue.shape(), buffer_ptr=X_ortvalue.data_ptr())
io_binding.bind_output(name="output", device_type=Y_ortvalue.device_name(), device_id=0, element_type=np.float32,
                       shape=Y_ortvalue.shape(), buffer_ptr=Y_ortvalue.data_ptr())
session.run_with_iobinding(io_binding)
np.testing.assert_array_equal(Y_ortvalue.numpy(), expected)

io_binding = session.io_binding()
io_binding.bind_input(name="input", device_type=X_ortvalue.device_name(), device_id=0, element_type=np.float32,
                      shape=X_ortvalue.shape(), buffer_ptr=X_ortvalue.data_ptr())
io_binding.bind_output("output", "cuda")
session.run_with_iobinding(io_binding)
ort_output = io_binding.get_outputs()[0]
assert ort_output.device_name() == "cuda"
np.testing.assert_array_equal(ort_output.numpy(), expected)

""",
        models,
    )


@by_name
def test_both_names_serve_one_process() -> None:
    python(
        """
import sys, numpy as np, onnxruntime as ort, ort_cuda_plugin as plugin
model, x = bytes.fromhex(sys.argv[1]), np.ones(8, np.float32)
own = plugin.register(emulate=True)
other = plugin.register(as_="CUDAExecutionProvider", emulate=True)
assert [d.ep_name for d in own + other] == ["CudaPluginExecutionProvider", "CUDAExecutionProvider"]
assert other[0].ep_metadata["cuda_device_name"] == own[0].ep_metadata["name"]
assert other[0].ep_metadata["cuda_compute_capability"] == own[0].ep_metadata["compute_capability"]
assert len(plugin.devices()) == 1
for name in ("CudaPluginExecutionProvider", "CUDAExecutionProvider"):
    assert name in ort.get_available_providers()
    session = ort.InferenceSession(model, providers=[(name, {"use_tf32": "0"})])
    assert session.get_providers()[0] == name
    np.testing.assert_array_equal(session.run(None, {"a": x, "b": x})[0], x + x)
    try:
        ort.InferenceSession(model, providers=[(name, {"no_such_option": "1"})], enable_fallback=0)
    except Exception as error:
        assert "no_such_option" in str(error), error
    else:
        raise AssertionError("accepted")
assert plugin.counters()["runs"] == 2
del session
plugin.unregister()
assert not {"CudaPluginExecutionProvider", "CUDAExecutionProvider"} & {d.ep_name for d in ort.get_ep_devices()}
""",
        add_model().hex(),
        env=NO_GPU,
        preloaded=True,
    )


WRONG_OPTION = """
import sys, onnxruntime as ort
def outcome(*providers, **arguments):
    try:
        return ort.InferenceSession(bytes.fromhex(sys.argv[1]), providers=providers, **arguments).get_providers()[0]
    except Exception as error:
        return "no_such_option" if "no_such_option" in str(error) else str(error)
"""


@by_name
def test_a_session_that_names_the_provider_in_place_of_the_built_in_one_does_not_fall_back() -> None:
    python(
        WRONG_OPTION
        + """
import ort_cuda_plugin as plugin
own, cuda = [(name, {"no_such_option": "1"}) for name in ("CudaPluginExecutionProvider", "CUDAExecutionProvider")]
plugin.register(emulate=True)
assert outcome(own) == "CPUExecutionProvider"
plugin.register(as_="CUDAExecutionProvider", emulate=True)
plugin.register(as_="CUDAExecutionProvider", emulate=True)
assert outcome(cuda) == outcome(cuda, "CPUExecutionProvider") == "no_such_option"
assert outcome(own) == "CPUExecutionProvider"  # only the name that was asked for does without the fallback
assert outcome("CUDAExecutionProvider", provider_options=[cuda[1]]) == "no_such_option"
assert outcome(cuda, enable_fallback=1) == "CPUExecutionProvider"
assert outcome("CUDAExecutionProvider") == "CUDAExecutionProvider"
plugin.unregister()
assert outcome(cuda) == "CPUExecutionProvider"
plugin.register(as_="CudaPluginExecutionProvider", emulate=True)
assert outcome(own) == "no_such_option"
plugin.unregister()
plugin.register(emulate=True)
assert outcome(own) == "CPUExecutionProvider"
""",
        add_model().hex(),
        env=NO_GPU,
        preloaded=True,
    )


@pytest.mark.parametrize(
    "register",
    [
        "plugin.register(emulate=True)",
        "ort.register_execution_provider_library('any.virtual', plugin.get_library_path())",
    ],
)
def test_a_variable_gives_every_registration_the_name(register: str) -> None:
    code = f"import onnxruntime as ort, ort_cuda_plugin as plugin\n{register}\n"
    code += "assert {d.ep_name for d in ort.get_ep_devices()} == {'CPUExecutionProvider', 'CUDAExecutionProvider'}"
    python(code, env={**NO_GPU, "ORT_CUDA_PLUGIN_AS": "CUDAExecutionProvider"}, preloaded=True)


def test_the_registration_name_can_be_the_providers() -> None:
    python(
        """
import onnxruntime as ort, ort_cuda_plugin as plugin
ort.register_execution_provider_library("CUDAExecutionProvider.virtual", plugin.get_library_path())
assert {d.ep_name for d in ort.get_ep_devices()} == {"CPUExecutionProvider", "CUDAExecutionProvider"}
assert len(plugin.register(as_="CUDAExecutionProvider")) == 1
""",
        env=NO_GPU,
        preloaded=True,
    )


def test_other_names_are_refused() -> None:
    code = "import ort_cuda_plugin as plugin\nplugin.register({})"
    done = python(code.format("as_='TensorrtExecutionProvider'"), env=NO_GPU, check=False, preloaded=True)
    assert "ValueError: as_='TensorrtExecutionProvider': use CudaPluginExecutionProvider or CUDAEx" in done.stderr
    done = python(code.format(""), env={**NO_GPU, "ORT_CUDA_PLUGIN_AS": "cuda"}, check=False, preloaded=True)
    assert "ValueError: ORT_CUDA_PLUGIN_AS='cuda': use CudaPluginExecutionProvider or CUDAEx" in done.stderr


@pytest.mark.skipif(VERSION >= 28, reason="has no such limit")
def test_a_version_that_asks_no_plugin_for_that_name_is_warned_of() -> None:
    code = (
        'import ort_cuda_plugin as plugin\nprint(plugin.register(as_="CUDAExecutionProvider", emulate=True)[0].ep_name)'
    )
    done = python(code, env=NO_GPU, preloaded=True)
    assert done.stdout == "CUDAExecutionProvider\n"
    assert "in providers=[...] ONNX Runtime reserves this name for its own provider: got version 1." in done.stderr


# ---- ort-cuda-plugin exec ----


def executed(
    *arguments: str,
    env: dict[str, str] | None = None,
    command: str = "exec",
    device: Sequence[str] = ("--emulate",),
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), (env or {}).get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "ort_cuda_plugin", command, *device, "--", *arguments],
        cwd=ROOT,
        env={**os.environ, **NO_GPU, **(env or {}), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )


APPLICATION = """
import importlib.util, multiprocessing, sys
import numpy as np

def work(model):
    import onnxruntime
    assert onnxruntime.get_available_providers()[0] == "CUDAExecutionProvider"
    assert onnxruntime.get_device() == "GPU"
    session = onnxruntime.InferenceSession(model, providers=onnxruntime.get_available_providers())
    assert session.get_providers()[0] == "CUDAExecutionProvider"
    x = np.ones(8, np.float32)
    return float(session.run(None, {"a": x, "b": x})[0].sum())

if __name__ == "__main__":
    assert "onnxruntime" not in sys.modules
    assert importlib.util.find_spec("onnxruntime") is not None
    model = sys.argv[1]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(work(model), pool.apply(work, (model,)))
"""


@by_name
def test_exec_gives_a_program_and_its_children_the_provider(tmp_path: Path) -> None:
    add_model(tmp_path / "add.onnx")
    (tmp_path / "app.py").write_text(APPLICATION)
    done = executed(sys.executable, "-W", "error", str(tmp_path / "app.py"), str(tmp_path / "add.onnx"))
    assert (done.returncode, done.stdout) == (0, "16.0 16.0\n"), done.stderr
    assert "; 1 of 1 node ran on CUDAExecutionProvider (Emulated CUDA device)\n" in done.stderr


def test_with_gives_a_program_the_provider_under_its_own_name(tmp_path: Path) -> None:
    add_model(tmp_path / "add.onnx")
    code = (
        "import onnxruntime; "
        f"session = onnxruntime.InferenceSession({str(tmp_path / 'add.onnx')!r}, "
        "providers=['CudaPluginExecutionProvider']); print(session.get_providers()[0])"
    )
    done = executed(sys.executable, "-W", "error", "-c", code, command="with")
    assert (done.returncode, done.stdout) == (0, "CudaPluginExecutionProvider\n"), done.stderr
    assert "ort-cuda-plugin with -- python app.py" in executed(command="with").stderr


@pytest.mark.parametrize(
    ("command", "name"),
    [pytest.param("exec", "CUDAExecutionProvider", marks=by_name), ("with", "CudaPluginExecutionProvider")],
)
def test_a_wrong_option_of_a_program_is_an_error(command: str, name: str) -> None:
    code = WRONG_OPTION + f'print(outcome(({name!r}, {{"no_such_option": "1"}}), "CPUExecutionProvider"))'
    done = executed(sys.executable, "-c", code, add_model().hex(), command=command)
    assert (done.returncode, done.stdout) == (0, "no_such_option\n"), done.stderr


def test_exec_leaves_other_programs_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.HIDDEN = __file__")
    code = "import sys; print(HIDDEN, 'ort_cuda_plugin' in sys.modules, sys.modules['sitecustomize'].__file__)"
    done = executed(sys.executable, "-c", code, env={"PYTHONPATH": str(tmp_path)})
    hidden = tmp_path / "sitecustomize.py"
    assert done.stdout == f"{hidden} False {hidden}\n", done.stderr
    assert executed(sys.executable, "-c", "raise SystemExit(7)").returncode == 7


def test_exec_uses_the_emulated_device_only_if_asked() -> None:
    program = (sys.executable, "-c", "import os; print(os.environ['ORT_CUDA_PLUGIN_EMULATE'])")
    refused = executed(*program, device=())
    assert (refused.returncode, refused.stdout) == (3, "")
    assert "no CUDA device" in refused.stderr
    assert "Use the emulated device: --device emulated" in refused.stderr
    for device, value in ((("--device", "auto"), "0"), (("--emulate",), "0"), ((), "1")):
        done = executed(*program, device=device, env={"ORT_CUDA_PLUGIN_EMULATE": value})
        assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_exec_says_what_is_missing() -> None:
    done = executed()
    assert done.returncode == 2
    assert "the program to run is missing" in done.stderr
    done = executed("no-such-program")
    assert done.returncode == 2
    assert "program 'no-such-program': not found in PATH" in done.stderr


def test_a_program_whose_registration_fails_goes_on_and_says_so() -> None:
    done = executed(
        sys.executable,
        "-c",
        "import os, sys; os.environ['ORT_CUDA_PLUGIN_EMULATE'] = 'perhaps'\n"
        "import onnxruntime; print(onnxruntime.get_device())\n"
        "onnxruntime.InferenceSession(bytes.fromhex(sys.argv[1]), providers=['CUDAExecutionProvider'])",
        add_model().hex(),
    )
    assert done.stdout.startswith("CPU\n")
    assert "the plugin could not be registered: ORT_CUDA_PLUGIN_EMULATE='perhaps'" in done.stderr.splitlines()[-1]
    assert "ort-cuda-plugin exec: ValueError: ORT_CUDA_PLUGIN_EMULATE='perhaps'" in done.stderr
