"""What options of sessions change in the plans that a session makes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import ort_cuda_plugin
from ort_cuda_plugin.ep.open_device import OpenDevice
from ort_cuda_plugin.ep.provider import last_provider
from ort_cuda_plugin.kernels.library_attention import attention_form
from ort_cuda_plugin.program.lowering import DeviceProperties


def attention_model() -> bytes:
    shape = [2, 8, 16]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("q", "k", "v", "y")]
    nodes = [
        helper.make_node("Transpose", ["k"], ["t"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "t"], ["s"]),
        helper.make_node("Softmax", ["s"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "v"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "attention", values[:3], values[3:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return bytes(model.SerializeToString())


@pytest.mark.parametrize(("kernels", "apart"), [("0", False), ("1", False), ("17", False), ("16", True)])
def test_the_kernels_of_attention_are_kept_apart_on_request(kernels: str, apart: bool, tmp_path: Path) -> None:
    options = {"sdpa_kernel": kernels, "program_folder": str(tmp_path)}
    session = ort_cuda_plugin.session(attention_model(), emulate=True, provider_options=options)
    rng = np.random.default_rng(0)
    feed = {name: rng.normal(size=(2, 8, 16)).astype(np.float32) for name in "qkv"}
    cpu = ort.InferenceSession(attention_model(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, feed)[0], cpu.run(None, feed)[0], rtol=1e-5, atol=1e-6)
    (program,) = [file.read_text() for file in tmp_path.glob("*.txt")]
    emitted = program.rpartition("after emitted")[2]
    assert ("attention_" not in emitted) == ("softmax" in emitted) == apart, emitted


@pytest.mark.parametrize(("kernels", "may"), [("0", True), ("8", True), ("24", True), ("1", False), ("16", False)])
def test_attention_is_cudnns_only_where_its_bit_is_set(kernels: str, may: bool) -> None:
    session = ort_cuda_plugin.session(attention_model(), emulate=True, provider_options={"sdpa_kernel": kernels})
    provider = last_provider()
    assert provider is not None
    assert provider._lowering_options().library_attention == may
    step: Any = SimpleNamespace(operands=(None, None, None), score_shape=(1, 64, 64))
    ctx: Any = SimpleNamespace(
        options=provider._lowering_options(), device=DeviceProperties(libraries=frozenset({"cudnn"}))
    )
    if not may:
        assert attention_form(ctx, step) is None
    del session


@pytest.mark.parametrize(("value", "offered"), [("1", {"cublaslt", "cudnn"}), ("0", {"cublaslt"})])
def test_cudnn_can_be_left_out(value: str, offered: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = DeviceProperties(libraries=frozenset({"cublaslt", "cudnn"}))
    session = ort_cuda_plugin.session(attention_model(), emulate=True, provider_options={"enable_cudnn": value})
    monkeypatch.setattr(OpenDevice, "properties", lambda self: libraries)
    provider = last_provider()
    assert provider is not None
    assert provider._properties().libraries == offered
    del session
