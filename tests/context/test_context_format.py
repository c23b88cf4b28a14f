"""The script docs/list_context.py, which lists the contents of a context and has no dependencies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from contexts import BINARY, WEIGHT, compile_model, row_model
from isolated import ROOT

READER = ROOT / "docs" / "list_context.py"


def listed(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-I", str(READER), str(path)], capture_output=True, text=True)


def test_the_reader_is_short_and_lists_a_context(tmp_path: Path) -> None:
    assert len(READER.read_text().splitlines()) <= 60
    compile_model(row_model(), tmp_path / "m_ctx.onnx")
    path = tmp_path / BINARY.format("m")
    done = listed(path)
    assert done.returncode == 0, done.stderr
    assert f"constant 0: element type 1, shape [16, 8], {WEIGHT.nbytes} bytes" in done.stdout
    assert "operators: MatMul, Relu, Softmax" in done.stdout
    assert "for emulated: kernels [0" in done.stdout
    assert "plan 0: version" in done.stdout
    data = bytearray(path.read_bytes())
    data[WEIGHT.nbytes // 2] ^= 1
    path.write_bytes(data)
    assert "damaged" in listed(path).stderr
