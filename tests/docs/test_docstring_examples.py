"""The examples in the docstrings of the public names run, as `help` shows them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import ort_cuda_plugin
from isolated import HARNESS, python

EXAMPLES = """
import doctest, inspect, os, sys
import numpy as np
import onnxruntime as ort
import ort_cuda_plugin
from document_blocks import prepare

os.chdir(sys.argv[1])
names = prepare() | {"ort": ort, "ort_cuda_plugin": ort_cuda_plugin}
parser, runner = doctest.DocTestParser(), doctest.DocTestRunner()
for name in sorted(ort_cuda_plugin.__all__, key=lambda name: name == "unregister"):
    text = inspect.getdoc(getattr(ort_cuda_plugin, name)) or ""
    runner.run(parser.get_doctest(text, dict(names), name, None, 0))
print(runner.summarize(verbose=False))
"""


def test_each_public_name_has_an_example() -> None:
    without = [
        name for name in ort_cuda_plugin.__all__ if ">>> " not in (inspect.getdoc(getattr(ort_cuda_plugin, name)) or "")
    ]
    assert without == []


def test_the_examples_run(tmp_path: Path) -> None:
    env = {"ORT_CUDA_PLUGIN_EMULATE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(HARNESS)}
    done = python(EXAMPLES, str(tmp_path), env=env, preloaded=True)
    counts = re.search(r"TestResults\(failed=0, attempted=(\d+)", done.stdout)
    assert counts, done.stdout
    assert int(counts[1]) >= len(ort_cuda_plugin.__all__)
