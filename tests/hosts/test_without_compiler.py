"""An environment with the package's own requirements and ONNX Runtime: no compiler, no onnx, no rich."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np

from isolated import add_model, python

WARM = """
import sys
import numpy as np
import ort_cuda_plugin

session = ort_cuda_plugin.session(sys.argv[1], emulate=True)
feed = {name: np.arange(8, dtype=np.float32) for name in "ab"}
session.run(None, feed)
"""
WITHOUT = """
import contextlib, importlib.metadata, sys
import numpy as np
import onnxruntime

MISSING = ("cuda", "llvmlite", "ml_dtypes", "numba", "numba_cuda", "onnx", "rich")

class Missing:
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def version(distribution, version=importlib.metadata.version):
    if distribution.partition("-")[0] in (*MISSING, "nvidia"):
        raise importlib.metadata.PackageNotFoundError(distribution)
    return version(distribution)

assert not set(MISSING) & set(sys.modules)
sys.meta_path.insert(0, Missing())
importlib.metadata.version = version
import ort_cuda_plugin
from ort_cuda_plugin.cli import main
with contextlib.redirect_stdout(sys.stderr):
    print(main(["run", sys.argv[1]]), main(["info"]))
"""
RUN = """
session = ort_cuda_plugin.session(sys.argv[1], emulate=True)
np.save(sys.argv[2], session.run(None, {name: np.arange(8, dtype=np.float32) for name in "ab"})[0])
print(ort_cuda_plugin.counters()["kernels_compiled"], ort_cuda_plugin.counters()["kernel_cache_hits"])
try:
    ort_cuda_plugin.session(sys.argv[3], emulate=True)
except Exception as error:
    print(error)
"""
BECOME_ANOTHER_USER = """
# The interpreter may be root's alone: so all is imported before.
import os
from ort_cuda_plugin.ep.device.open_device import kernel_library
from ort_cuda_plugin.ops import registry
registry.lookup("", "Add", 14)
ort_cuda_plugin.explain(sys.argv[1], emulate=True)
kernel_library.cache_clear()
ort_cuda_plugin.reset_counters()
os.setgroups([]), os.setgid(12345), os.setuid(12345)
assert not os.access(os.environ["ORT_CUDA_PLUGIN_CACHE_DIR"], os.W_OK)
"""


def test_a_warm_cache_is_enough() -> None:
    """If the tests run as root, root writes the cache, and the warm process reads it as another user."""
    with tempfile.TemporaryDirectory() as folder:  # other users may enter its parents
        os.chmod(folder, 0o755)
        model, result, other = (Path(folder, name) for name in ("model.onnx", "out/y.npy", "other.onnx"))
        add_model(model)
        other.write_bytes(add_model(dims=(8, 8)).replace(b"Add", b"Mul"))
        result.parent.mkdir()
        result.parent.chmod(0o777)
        environment = {"ORT_CUDA_PLUGIN_CACHE_DIR": str(Path(folder, "cache")), "ORT_CUDA_PLUGIN_KERNEL_MANIFEST": ""}
        python(WARM, str(model), env=environment)
        program = WITHOUT + ("" if os.geteuid() else BECOME_ANOTHER_USER) + RUN
        done = python(program, *map(str, (model, result, other)), env=environment)
        counts, said = done.stdout.split("\n", 1)
        assert counts.split() == ["0", "1"]
        assert "the compiler is not installed" in said
        assert '`pip install "ort-cuda-plugin[cpu]"`' in said
        assert "a kernel cache" in said
        assert done.stderr.count("this command needs a package that is not installed. `pip install") == 1
        assert "\n3 0\n" in done.stderr
        np.testing.assert_array_equal(np.load(result), 2 * np.arange(8, dtype=np.float32))
