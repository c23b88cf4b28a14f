"""The file of launch times that ``ORT_CUDA_PLUGIN_EMULATE_PROFILE`` asks for."""

from __future__ import annotations

import re
from pathlib import Path

from device_models import add_and_double
from isolated import python

CODE = """
import sys
import numpy as np
import ort_cuda_plugin
session = ort_cuda_plugin.session(bytes.fromhex(sys.argv[1]), emulate=True)
x = np.ones(2000, np.float32)
for _ in range(2):
    session.run(None, {"a": x, "b": x})
print(ort_cuda_plugin.counters()["launches"])
"""


def test_each_launch_adds_a_line(tmp_path: Path) -> None:
    path = tmp_path / "launches"
    done = python(CODE, add_and_double().hex(), env={"ORT_CUDA_PLUGIN_EMULATE_PROFILE": str(path)}, preloaded=True)
    lines = path.read_text().splitlines()
    assert len(lines) == int(done.stdout) > 0
    assert all(re.fullmatch(r"\w+ \(\d+,1,1\) \(\d+,1,1\) \d+", line) for line in lines)


def test_a_file_that_cannot_be_written_is_reported_and_the_run_is_right(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "launches"
    done = python(CODE, add_and_double().hex(), env={"ORT_CUDA_PLUGIN_EMULATE_PROFILE": str(path)}, preloaded=True)
    assert f"ORT_CUDA_PLUGIN_EMULATE_PROFILE: {path} cannot be written" in done.stderr
    assert int(done.stdout) > 0
