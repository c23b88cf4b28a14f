"""What ONNX Runtime can ask of a compiled model before it loads it."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnxruntime.capi import _pybind_state

import ort_cuda_plugin
from contexts import compile_model, row_model
from ort_cuda_plugin.compiler.targets import Target
from ort_cuda_plugin.context.compatibility import Fit, compatibility_info, fit
from ort_cuda_plugin.ep.context_session import ALLOW_VARIABLE

KEY = f"ep_compatibility_info.{ort_cuda_plugin.get_ep_name()}"
KINDS = _pybind_state.OrtCompiledModelCompatibility


def info_of(model: onnx.ModelProto) -> str:
    return next(str(entry.value) for entry in model.metadata_props if entry.key == KEY)


def test_the_model_says_what_it_was_compiled_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = ort_cuda_plugin.register(emulate=True)[:1]
    ask = _pybind_state.get_model_compatibility_for_ep_devices
    own = info_of(compile_model(row_model(), tmp_path / "m_ctx.onnx"))
    assert ask(devices, own) == KINDS.EP_SUPPORTED_PREFER_RECOMPILATION  # nobody has allowed its code
    monkeypatch.setenv(ALLOW_VARIABLE, "1")
    assert ask(devices, own) == KINDS.EP_SUPPORTED_OPTIMAL
    other = info_of(compile_model(row_model(), tmp_path / "n_ctx.onnx", context_architectures="sm_90"))
    assert ask(devices, other) == KINDS.EP_SUPPORTED_PREFER_RECOMPILATION
    assert ask(devices, other.replace("format=1", "format=7")) == KINDS.EP_UNSUPPORTED
    for text in ("nonsense", "format=x", ";;=;"):
        assert ask(devices, text) == KINDS.EP_NOT_APPLICABLE


def test_each_part_of_the_line_counts() -> None:
    both = compatibility_info(["sm_90", "emulated"])
    assert fit(both, Target.cuda(9, 0), False) is Fit.OPTIMAL
    assert fit(both, Target.cuda(8, 0), False) is Fit.USABLE
    assert fit(both, Target.emulated(), True) is Fit.OPTIMAL
    assert fit(both, Target.emulated(), False) is Fit.USABLE
    assert fit(both, Target.emulated(check=True), True) is Fit.USABLE
    assert fit(both[:-1] + "z", Target.emulated(), True) is Fit.USABLE
    assert fit(both.replace("plans=", "plans=9"), Target.cuda(9, 0), False) is Fit.USABLE
