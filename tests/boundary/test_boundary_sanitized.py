"""The whole library under AddressSanitizer and UndefinedBehaviorSanitizer, in stock ONNX Runtime."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from c_programs import build_host
from isolated import ROOT, add_model, python

CODE = """
import sys, threading, numpy as np, onnxruntime as ort, ort_cuda_plugin as plugin
model, root = bytes.fromhex(sys.argv[1]), sys.argv[2]
assert plugin.get_library_path().startswith(root)
def work(session, rows, columns):
    a, b = np.full((rows, columns), 2, np.float32), np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    np.testing.assert_array_equal(session.run(None, {"a": a, "b": b})[0], a + b)
for _ in range(3):
    sessions = [plugin.session(model, emulate=True) for _ in range(2)]
    threads = [threading.Thread(target=work, args=(session, rows, 7)) for session in sessions for rows in range(6)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    for shapes in (((2, 3), (2, 4)), ((1 << 12, 1 << 12), (1 << 12, 1 << 12))):  # cannot be added, does not fit
        try:
            sessions[0].run(None, {name: np.zeros(shape, np.float32) for name, shape in zip("ab", shapes)})
        except Exception as error:
            last = str(error)
        else:
            raise AssertionError(shapes)
    work(sessions[0], 3, 5)
    del sessions
    plugin.unregister()
assert plugin.counters()["device_bytes_in_use"] == 0
kept = plugin.session(model, emulate=True)
work(kept, 4, 4)
print("end")
"""


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the package with a library built for it."""
    root = tmp_path_factory.mktemp("sanitized")
    shutil.copytree(ROOT / "ort_cuda_plugin", root / "ort_cuda_plugin", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, str(ROOT / "build_plugin.py"), "--sanitize", "address,undefined"]
    subprocess.run([*command, "--output", str(root / "ort_cuda_plugin")], check=True, capture_output=True)
    return root


def runtime(library: str) -> str:
    command = ["cc", f"-print-file-name={library}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def variables() -> dict[str, str]:
    return {
        # AddressSanitizer looks up __cxa_throw when it starts, so libstdc++ has to be loaded by then: ORT throws.
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libstdc++.so.6')}",
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself does not free everything at exit
        "ORT_CUDA_PLUGIN_EMULATE_MEMORY": "64M",
    }


@pytest.mark.full
@pytest.mark.parametrize("streams", ["inline", "adversarial"])
def test_sessions_threads_and_errors_are_clean(sanitized: Path, variables: dict[str, str], streams: str) -> None:
    environment = variables | {"ORT_CUDA_PLUGIN_EMULATE_STREAMS": streams}
    model = add_model(dims=["n", "m"]).hex()
    done = python(CODE, model, str(sanitized), env=environment, root=sanitized)
    assert done.stdout == "end\n"
    assert "Sanitizer" not in done.stderr
    assert "runtime error" not in done.stderr


@pytest.mark.full
def test_a_host_in_c_is_clean(sanitized: Path, variables: dict[str, str], tmp_path: Path) -> None:
    host = build_host("host", tmp_path)
    add_model(tmp_path / "add.onnx")
    # Overwrite freed memory, so that ONNX Runtime, which is not instrumented, fails if it reads any.
    options = variables["ASAN_OPTIONS"] + ":max_free_fill_size=4096:free_fill_byte=165"
    environment = variables | {"ASAN_OPTIONS": options, "ORT_CUDA_PLUGIN_PYTHON": sys.executable}
    command = [str(host), str(sanitized / "ort_cuda_plugin" / "libort_cuda_plugin.so"), str(tmp_path / "add.onnx")]
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-8000:]
    assert "Sanitizer" not in done.stderr
    assert "runtime error" not in done.stderr
