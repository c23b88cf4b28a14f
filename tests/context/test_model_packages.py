"""Model packages of ONNX Runtime 1.32: a package has variants of a model, and each device gets the one that fits it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import ort_cuda_plugin
from contexts import assert_same, compile_model, nothing_compiled, row_model, rows, settings

pytestmark = pytest.mark.skipif(not hasattr(ort, "ModelPackage"), reason="model packages need ONNX Runtime 1.32")

OWN = "CudaPluginExecutionProvider"


def compatibility(model: onnx.ModelProto) -> str:
    (value,) = (entry.value for entry in model.metadata_props if entry.key == f"ep_compatibility_info.{OWN}")
    return str(value)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ort.ModelPackageContext:
    """Return a package of `row_model`: for the CPU, uncompiled, for another CPU's emulated device, and for this one."""
    monkeypatch.setenv("ORT_CUDA_PLUGIN_CONTEXT_ALLOW_HOST_CODE", "1")
    (tmp_path / "model.onnx").write_bytes(row_model())
    compiled = compile_model(str(tmp_path / "model.onnx"), tmp_path / "model_ctx.onnx")
    ours = compatibility(compiled)
    field = next(part for part in ours.split(";") if part.startswith("cpu="))

    def variant(ep: str, file: str, **more: str) -> dict[str, object]:
        return {"ep": ep, "executor_info": {"ort": {"model_file": str(tmp_path / file)}}, **more}

    variants = {
        "cpu": variant("CPUExecutionProvider", "model.onnx"),
        "source": variant(OWN, "model.onnx"),
        "other": variant(OWN, "missing.onnx", compatibility_string=ours.replace(field, "cpu=0123456789abcdef")),
        "ours": variant(OWN, "model_ctx.onnx", compatibility_string=ours),
    }
    written = ort.ModelPackage()
    written.set_component_inline("rows", json.dumps({"variants": variants}))
    written.set_layout("installed")
    written.commit(str(tmp_path / "package"))
    return ort.ModelPackageContext(str(tmp_path / "package"))


@pytest.mark.parametrize("own_options", [False, True])
def test_a_device_gets_the_variant_that_was_compiled_for_it(
    package: ort.ModelPackageContext, own_options: bool
) -> None:
    options = settings()
    component = package.select_component("rows", ort.ModelPackageOptions(options))
    assert component.get_selected_variant_name() == "ours"
    with nothing_compiled():
        session = component.create_session(options if own_options else None)
        assert_same(session, row_model(), [{"x": rows(2, 3)}])
    ort_cuda_plugin.require(session)


def test_require_names_the_variant_of_another_provider(package: ort.ModelPackageContext) -> None:
    options = ort.SessionOptions()
    options.add_provider_for_devices([each for each in ort.get_ep_devices() if each.ep_name.startswith("CPU")], {})
    session = package.select_component("rows", ort.ModelPackageOptions(options)).create_session()
    assert np.isfinite(session.run(None, {"x": rows(1, 1)})[0]).all()
    with pytest.raises(ort_cuda_plugin.PlacementError, match=r"variant 'cpu' of .*: the session runs on CPUExec"):
        ort_cuda_plugin.require(session)
