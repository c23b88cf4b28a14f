"""The plugin in the oldest ONNX Runtime, in others since, and in the installed one, with one list of models.

pip installs the other versions into pytest's cache folder, without their dependencies.
"""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from pathlib import Path

import onnxruntime
import pytest

from isolated import HARNESS, add_model, python
from ort_cuda_plugin.abi.tables import NEWEST_API, OLDEST_API
from version_models import CASES

OTHERS = [
    version for version in (f"1.{OLDEST_API}.0", "1.28.0", "1.30.0", "1.32.0") if version != onnxruntime.__version__
]


def install(folder: Path, versions: list[str]) -> None:
    """Install all missing versions, in parallel because their wheels are large."""
    partial = {version: folder / f"{version}.partial" for version in versions if not (folder / version).exists()}
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--upgrade", "--target"]
    started = [
        subprocess.Popen([*command, str(target), f"onnxruntime=={version}"]) for version, target in partial.items()
    ]
    assert [process.wait() for process in started] == [0] * len(started)
    for version, target in partial.items():
        target.rename(folder / version)


@pytest.fixture(scope="session")
def installed(pytestconfig: pytest.Config) -> Path:
    """Return the folder that has a folder for each other version; one worker installs, the others wait for it."""
    assert pytestconfig.cache is not None
    folder = Path(pytestconfig.cache.mkdir("onnxruntime"))
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        install(folder, OTHERS)
    return folder


#: Models for which the checking mode is too slow.
LARGE = ["light_squeezenet", "light_squeezenet, channels last"]


@pytest.mark.full
@pytest.mark.parametrize("streams", ["inline", "adversarial"])
@pytest.mark.parametrize("version", [*OTHERS, onnxruntime.__version__])
def test_models_run_with_the_newest_api_that_both_sides_have(version: str, streams: str, installed: Path) -> None:
    checked = streams == "adversarial"
    environment = {
        "PYTHONPATH": ":".join([str(HARNESS)] + [str(installed / version)] * (version in OTHERS)),
        "ORT_CUDA_PLUGIN_EMULATE_STREAMS": streams,
        "ORT_CUDA_PLUGIN_EMULATE_CHECK": str(int(checked)),
    }
    left_out = LARGE if checked else []
    done = python("import sys, version_models; version_models.main(*sys.argv[1:])", version, *left_out, env=environment)
    assert json.loads(done.stdout) == {
        "api": min(NEWEST_API, int(version.split(".")[1])),
        "done": [name for name in CASES if name not in left_out],
        "wrong copies": {},
    }


@pytest.mark.full
@pytest.mark.parametrize("version", OTHERS)
def test_a_session_prints_no_warning_about_the_version(version: str, installed: Path) -> None:
    """Schemas of other versions differ from the operator table, but a user could do nothing about a warning."""
    code = "import sys, ort_cuda_plugin; ort_cuda_plugin.session(bytes.fromhex(sys.argv[1]), emulate=True)"
    done = python(code, add_model().hex(), env={"PYTHONPATH": str(installed / version)})
    assert "CudaPlugin" not in done.stderr
    assert "ort_cuda_plugin" not in done.stderr


@pytest.mark.full
@pytest.mark.parametrize("version", [each for each in OTHERS if 28 <= int(each.split(".")[1]) < 31])
def test_an_application_reads_and_writes_files_of_compiled_models(version: str, installed: Path) -> None:
    """These versions look up the functions that set the callbacks by name.

    tests/context/test_context_callbacks.py tests later versions.
    """
    environment = {"PYTHONPATH": f"{HARNESS}:{installed / version}"}
    done = python("import context_functions; context_functions.main()", env=environment)
    assert "10 the application's function that reads context files failed" in done.stdout  # 10: INVALID_GRAPH
    assert "the application has no such file" in done.stdout


@pytest.mark.full
@pytest.mark.parametrize("version", ["1.26.0", "1.28.0"])
def test_a_session_that_selects_among_devices_gets_operators_once(version: str, installed: Path) -> None:
    """These versions refuse a domain of custom operators that two devices offer."""
    environment = {"PYTHONPATH": f"{HARNESS}:{installed / version}", "ORT_CUDA_PLUGIN_EMULATE_DEVICES": "2"}
    done = python("import automatic_selection; automatic_selection.main()", env=environment)
    assert done.stdout == "created\n"


IMPORTS = """
import sys
import numpy as np, onnxruntime as ort
from interop import BoundSession, Interop
from isolated import add_model
from timelines import SharedFile, Timeline
interop, file, timeline = Interop(), SharedFile(4096), Timeline()
memory, semaphore, stream = interop.memory(file, 4096), interop.semaphore(timeline), interop.stream()
a, b, c = (interop.tensor(memory, [8], offset) for offset in (0, 256, 512))
session = BoundSession(interop, add_model(), stream, {"a": a, "b": b}, {"c": c})
interop.wait(semaphore, stream, 1)
session.run()
interop.signal(semaphore, stream, 2)
file.array(np.float32, 0, 8)[:] = 3
file.array(np.float32, 256, 8)[:] = np.arange(8)
timeline.signal(1)
timeline.wait(2)
print(ort.__version__, *file.array(np.float32, 512, 8).astype(int))
"""


@pytest.mark.full
@pytest.mark.parametrize("version", OTHERS)
def test_memory_and_semaphores_are_imported(version: str, installed: Path) -> None:
    environment = {"PYTHONPATH": f"{HARNESS}:{installed / version}"}
    assert python(IMPORTS, env=environment).stdout == f"{version} 3 4 5 6 7 8 9 10\n"
