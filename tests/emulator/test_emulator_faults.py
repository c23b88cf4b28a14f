"""Fault injection into the emulated device: wrong kernels, unsupported calls, and old, busy or small devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import ort_cuda_plugin
from device_faults import faults
from device_models import add_and_double
from faults import TEXTS, driver_members
from isolated import HARNESS, python
from ort_cuda_plugin.abi.core import PluginError, core, ffi
from ort_cuda_plugin.abi.device import CudaError, Device
from ort_cuda_plugin.abi.emulation import configuration, configure
from ort_cuda_plugin.ep.device.devices import emulated_devices

NAMES = [name for name, _ in driver_members() if name not in TEXTS]


def session_of(element: int, op_type: str = "Add") -> Any:
    """Return a session with one node, an ``Add`` or another operator of two vectors ``a`` and ``b``."""
    inputs = [helper.make_tensor_value_info(name, element, [64]) for name in "ab"]
    output = helper.make_tensor_value_info("c", TensorProto.BOOL if op_type == "Equal" else element, [64])
    graph = helper.make_graph([helper.make_node(op_type, ["a", "b"], ["c"])], "two", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return ort_cuda_plugin.session(model.SerializeToString(), emulate=True)


@pytest.mark.parametrize("name", ["float", "float16", "double", "int8", "uint8", "int32", "int64"])
def test_one_element_of_a_wrong_kernel_differs(name: str) -> None:
    element = getattr(TensorProto, name.upper())
    dtype = helper.tensor_dtype_to_np_dtype(element)
    session = session_of(element)
    feeds = {"a": np.full(64, 3, dtype), "b": np.full(64, 2, dtype)}
    with faults("kernel=*"):
        for _ in range(4):  # the last Runs replay a CUDA graph
            found = session.run(None, feeds)[0].astype(np.float64)
            (differs,) = np.flatnonzero(found != 5)
            assert abs(found[differs] - 5) > 0.1, found
    assert session.run(None, feeds)[0].tolist() == [5] * 64


def test_a_wrong_kernel_is_wrong_where_its_result_was_already() -> None:
    with faults("kernel=*"):
        session = session_of(TensorProto.FLOAT)
        a = ort.OrtValue.ortvalue_from_numpy(np.full(64, 2, np.float32), "cuda", 0)
        for value in (4, 0):
            c = ort.OrtValue.ortvalue_from_numpy(np.full(64, value, np.float32), "cuda", 0)
            binding = session.io_binding()
            for name in "ab":
                binding.bind_ortvalue_input(name, a)
            binding.bind_ortvalue_output("c", c)
            session.run_with_iobinding(binding)
            assert np.count_nonzero(c.numpy() != 4) == 1
            assert np.all(a.numpy() == 2)


def test_a_fault_concerns_kernels_that_match_its_pattern() -> None:
    session = ort_cuda_plugin.session(add_and_double(), emulate=True)
    a = np.ones(16, np.float32)
    with faults("kernel=matmul_*"):
        assert session.run(None, {"a": a, "b": a})[0].tolist() == [4.0] * 16
    with faults("kernel=*"):
        assert session.run(None, {"a": a, "b": a})[0].tolist() != [4.0] * 16


def test_idle_kernels_write_nothing() -> None:
    session = ort_cuda_plugin.session(add_and_double(), emulate=True)
    a = np.ones(16, np.float32)
    values = [ort.OrtValue.ortvalue_from_numpy(a, "cuda", 0) for _ in range(2)]
    c = ort.OrtValue.ortvalue_from_numpy(np.full(16, 7, np.float32), "cuda", 0)
    binding = session.io_binding()
    for name, value in zip("ab", values, strict=True):
        binding.bind_ortvalue_input(name, value)
    binding.bind_ortvalue_output("c", c)
    with faults("idle=*"):
        session.run_with_iobinding(binding)
        assert c.numpy().tolist() == [7.0] * 16
    session.run_with_iobinding(binding)
    assert c.numpy().tolist() == [4.0] * 16


def test_a_wrong_truth_value_is_the_other_one() -> None:
    session = session_of(TensorProto.INT32, "Equal")
    a = np.arange(64, dtype=np.int32)
    with faults("kernel=*"):
        found = session.run(None, {"a": a, "b": a})[0]
    assert np.count_nonzero(found.view(np.uint8) == 0) == 1


def members() -> list[int]:
    table = core().driver_emulator()
    return [int(ffi.cast("uintptr_t", getattr(table, name))) for name in NAMES]


@pytest.mark.parametrize("name", NAMES)
def test_an_unsupported_call_is_exchanged_and_no_other(name: str) -> None:
    before = members()
    with faults(f"unsupported={name}"):
        exchanged = [each for each, old, new in zip(NAMES, before, members(), strict=True) if old != new]
    assert exchanged == [name]
    assert members() == before


def test_an_unsupported_call_says_so() -> None:
    with faults("unsupported=MemAlloc,MemsetD8Async"), pytest.raises(CudaError) as error:
        Device.emulated().upload(np.zeros(4))
    assert "CUDA_ERROR_NOT_SUPPORTED" in str(error.value)
    assert "ORT_CUDA_PLUGIN_EMULATE_FAULTS makes this call unsupported" in str(error.value)


@pytest.mark.parametrize("name", ["GraphCreate", "GraphAddKernelNode", "GraphInstantiate", "GraphLaunch"])
def test_runs_do_without_graphs_that_the_driver_does_not_support(name: str) -> None:
    session = ort_cuda_plugin.session(add_and_double(), emulate=True)
    a, before = np.ones(16, np.float32), ort_cuda_plugin.counters()
    with faults(f"unsupported={name}"):
        for _ in range(5):
            assert session.run(None, {"a": a, "b": a})[0].tolist() == [4.0] * 16
    after = ort_cuda_plugin.counters()
    assert after["graph_fallbacks_driver"] > before["graph_fallbacks_driver"]
    assert after["graph_replays"] == before["graph_replays"]
    assert after["graphs_live"] == before["graphs_live"]


def test_the_device_describes_itself_as_told() -> None:
    with faults("name=NVIDIA H100 80GB HBM3 MIG 1g.10gb;multiprocessors=16;capability=9.1;driver=13.2"):
        (device,) = emulated_devices()
    assert device.name == "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    assert (device.multiprocessors, device.compute_capability, device.driver_version) == (16, (9, 1), "13.2")
    (device,) = emulated_devices()
    assert device.name == "Emulated CUDA device"


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ("capability=7.5", "has compute capability 7.5, expected 8.0 or newer"),
        ("driver=12.8", "supports CUDA 12.8, expected 13.0 or newer. Install driver R580 or newer"),
    ],
)
def test_an_old_device_or_driver_is_refused(setting: str, error: str) -> None:
    with faults(setting), pytest.raises(PluginError, match=error):
        emulated_devices()


def test_a_busy_device_gives_no_context() -> None:
    with faults("exclusive=1"), pytest.raises(CudaError, match="CUDA_ERROR_DEVICE_UNAVAILABLE"):
        Device.emulated()
    code = "import ort_cuda_plugin as p; from isolated import add_model; p.session(add_model(), emulate=True)"
    done = python(code, env={**env("exclusive=1"), "PYTHONPATH": str(HARNESS)}, check=False)
    assert "its compute mode may be exclusive while another process uses the device, or prohibited" in done.stderr


@pytest.mark.parametrize(
    "text", ["kernel", "kernel=", "unsupported=cuMemAlloc", "capability=7", "exclusive=yes", "what=1", "x" * 300]
)
def test_invalid_faults_are_refused(text: str) -> None:
    config = configuration()
    if len(text) < len(config.faults):
        config.faults = text.encode()
        with pytest.raises(ValueError, match="ORT_CUDA_PLUGIN_EMULATE_FAULTS: got"):
            configure(config)
    done = python(
        "from ort_cuda_plugin.ep.device.devices import emulated_devices as e; e()",
        env=env(text),
        check=False,
        preloaded=True,
    )
    assert "ORT_CUDA_PLUGIN_EMULATE_FAULTS: got" in done.stderr
    assert done.returncode != 0


def test_a_warning_tells_of_the_faults_of_the_environment() -> None:
    code = "from ort_cuda_plugin.ep.device.devices import emulated_devices as e; print(len(e()))"
    done = python(code, env=env("kernel=*"), preloaded=True)
    assert "the emulated devices have faults on purpose" in done.stderr
    assert done.stdout == "1\n"
    assert python(code, env=env(""), preloaded=True).stderr == ""


def env(text: str) -> dict[str, str]:
    return {"ORT_CUDA_PLUGIN_EMULATE_FAULTS": text}
