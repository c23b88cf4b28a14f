"""docs/float16.md shows what `compare --find nonfinite` prints for its example."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from document_blocks import blocks
from ort_cuda_plugin.cli import main
from ort_cuda_plugin.cli.exit_codes import ExitCode

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "float16.md"


def test_the_command_prints_what_the_page_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, command, output = [*blocks(DOCUMENT.read_text())][:3]
    monkeypatch.chdir(tmp_path)
    exec(made.text, {})
    words = re.sub("^ort-cuda-plugin ", "", command.text).split()
    assert main([*words, "--device", "emulated"]) == ExitCode.MISMATCH
    assert capsys.readouterr().out == output.text
