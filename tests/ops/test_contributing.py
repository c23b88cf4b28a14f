"""The example in CONTRIBUTING.md for adding an operator: it is in the sources, and it is sufficient."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import numpy as np
import pytest

import test_ops
from kernel_harness import run_op
from ort_cuda_plugin.model.ir import NodeError, Unsupported
from ort_cuda_plugin.ops import registry
from ort_cuda_plugin.ops.onnx.math import activation

ROOT = Path(__file__).resolve().parents[2]
SECTION = (ROOT / "CONTRIBUTING.md").read_text().split("## Add an operator\n")[1].split("\n## ")[0]
OPERATOR, LINE = map(textwrap.dedent, re.findall(r"```python\n(.*?) *```", SECTION, re.DOTALL))


def test_the_example_stands_in_the_sources() -> None:
    assert OPERATOR in (ROOT / "ort_cuda_plugin/ops/onnx/math/activation.py").read_text()
    assert LINE in (ROOT / "tests/ops/test_ops.py").read_text()


def test_the_example_alone_makes_the_operator_run(monkeypatch: pytest.MonkeyPatch) -> None:
    list(registry.operators())  # load all operators before removing one
    x = np.array([[-1.0, 0.5, 1.0], [1.5, np.inf, np.nan]], np.float32)
    monkeypatch.delitem(registry._table, ("", "ThresholdedRelu"))
    with pytest.raises((NodeError, Unsupported), match="ThresholdedRelu is not implemented"):
        run_op("ThresholdedRelu", [x])
    exec(OPERATOR, dict(vars(activation)))
    (expected_of,) = eval(f"{{{LINE}}}", dict(vars(test_ops))).values()
    for dynamic in (False, True):
        (actual,) = run_op("ThresholdedRelu", [x], dynamic=dynamic)
        np.testing.assert_array_equal(actual, expected_of(x))


def test_the_commands_of_the_section_exist() -> None:
    from ort_cuda_plugin.cli import COMMANDS

    commands = re.findall(r"`ort-cuda-plugin (\w+) --write (\S+)`", SECTION)
    assert len(commands) == 3
    assert all(command in COMMANDS and (ROOT / path).exists() for command, path in commands)
