"""docs/custom_kernels.md: its examples run as they are written, each section a module."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest

import ort_cuda_plugin
from custom_operators import kept_registry
from isolated import ROOT
from ort_cuda_plugin.cli import main
from ort_cuda_plugin.custom import Float16, Lowering, launch, op
from ort_cuda_plugin.custom.kernels.kernels import Kernel

SECTIONS = dict(
    re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", (ROOT / "docs" / "custom_kernels.md").read_text(), re.M | re.S)
)
EXAMPLES = {title: "".join(re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)) for title, text in SECTIONS.items()}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    ort_cuda_plugin.register(emulate=True)
    with kept_registry():
        yield


def test_commands_load_operators_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path, model = tmp_path / "swish.py", tmp_path / "model.onnx"
    code, text = EXAMPLES["Ten lines"].split("session = ")[0].split("model = ")
    path.write_text(code)
    made: dict[str, Any] = {}
    exec(code.split("@op")[0] + "model = " + text, made)  # code that makes the model
    onnx.save(made["model"], model)
    arguments = ["explain", str(model), "--device", "emulated", "--json"]
    assert main([*arguments, "--operators", str(path)]) == 0
    assert [verdict["supported"] for verdict in json.loads(capsys.readouterr().out)] == [True, True]
    (tmp_path / "more_operators.py").write_text("NAME = 'table'")
    path.write_text("import more_operators\nraise KeyError(more_operators.NAME)")
    with pytest.raises(SystemExit):
        main([*arguments, "--operators", str(path)])
    assert "swish.py: running this file failed with KeyError: 'table'" in capsys.readouterr().err


def run(title: str, folder: Path) -> ModuleType:
    """Run the example as a separate module, which checks its results itself."""
    path = folder / "example.py"
    path.write_text(EXAMPLES[title])
    spec = importlib.util.spec_from_file_location("example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def squares(kernel: Kernel, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return what an operator that launches ``kernel`` makes of a float16 vector."""

    @op("my.domain::Square")
    def square(ctx: Lowering, x: Float16) -> Float16:
        y = ctx.empty(x.shape, x.dtype)
        launch(ctx, kernel, 1, 64, [ctx.contiguous(x), y], writes=[y])
        return y

    text = '<ir_version: 8, opset_import: ["my.domain" : 1]> g (float16[n] x) => (y) { y = my.domain.Square (x) }'
    session = ort_cuda_plugin.session(onnx.parser.parse_model(text).SerializeToString(), emulate=True)
    found: np.ndarray[Any, Any] = session.run(None, {"x": x})[0]
    return found


@pytest.mark.parametrize("title", [title for title, code in EXAMPLES.items() if code])
def test_the_example_runs(title: str, tmp_path: Path) -> None:
    if title == "Kernels from elsewhere":
        pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")
    module = run(title, tmp_path)
    if title == "Ten lines":
        operator = EXAMPLES[title].split("@op")[1].split("\n\n\n")[0]
        assert len(operator.splitlines()) <= 10
        ort_cuda_plugin.reset_counters()
        module.session.run(None, {"x": module.x, "w": module.w})
        assert ort_cuda_plugin.counters()["launches"] == 1  # fused into the GEMM
        assert ort_cuda_plugin.counters()["python_calls"] == 0
    if title == "A kernel in Numba":
        with pytest.raises(Exception, match=r"CircularPad-1: size of dimension 1 = 1: less than the padding 2"):
            module.session.run(None, {"x": np.zeros((3, 1), np.float32)})
        x = np.array([0.5, 3, -2], np.float16)
        np.testing.assert_array_equal(squares(module.square, x), x * x)
    if title == "State in the application's memory":
        ort_cuda_plugin.reset_counters()
        module.session.run_with_iobinding(module.binding)
        assert (ort_cuda_plugin.counters()["launches"], ort_cuda_plugin.counters()["copies_d2d"]) == (1, 0)
