"""The plugin in the oldest ONNX Runtime, one in the middle, and the installed one.

The other versions are installed with pip into pytest's cache folder, beside nothing else.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import onnxruntime
import pytest

from device_models import with_cpu_nodes
from isolated import add_model, python
from ort_cuda_plugin.abi.tables import NEWEST_API, OLDEST_API

VERSIONS = [f"1.{OLDEST_API}.0", "1.28.0", onnxruntime.__version__]

CODE = """
import sys, numpy as np, onnxruntime as ort, ort_cuda_plugin as plugin
from ort_cuda_plugin.abi import host
assert ort.__version__ == sys.argv[1], (ort.__version__, ort.__file__)
for model, rows in ((sys.argv[2], 8), (sys.argv[3], 8), (sys.argv[3], 5)):
    session = plugin.session(bytes.fromhex(model), emulate=True)
    x = np.arange(rows, dtype=np.float32)
    for _ in range(3):
        np.testing.assert_array_equal(session.run(None, {"a": x, "b": x})[0], x + x)
    del session
session = plugin.session(bytes.fromhex(sys.argv[4]), emulate=True)
for rows in (3, 7):
    x = np.arange(4 * rows, dtype=np.float32).reshape(rows, 4)
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], np.tile(x, (8, 1)))
del session
print(host.api_version())
plugin.unregister()
"""


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def path(version: str, pytestconfig: pytest.Config) -> str:
    """The PYTHONPATH that makes ``version`` the one that is imported."""
    if version == onnxruntime.__version__:
        return ""
    assert pytestconfig.cache is not None
    folder = Path(pytestconfig.cache.mkdir("onnxruntime")) / version
    if not folder.exists():
        partial = folder.with_suffix(f".{os.getpid()}")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(partial)]
        subprocess.run([*command, f"onnxruntime=={version}"], check=True)
        try:
            partial.rename(folder)
        except OSError:  # another worker was faster
            assert folder.exists()
    return str(folder)


def test_models_run_with_the_newest_api_that_both_sides_have(version: str, path: str) -> None:
    models = [add_model().hex(), add_model(dims=["n"]).hex(), with_cpu_nodes(1, rounds=2).hex()]
    done = python(CODE, version, *models, env={"PYTHONPATH": path})
    assert int(done.stdout) == min(NEWEST_API, int(version.split(".")[1]))
