"""No code and no settings are loaded from the working folder."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hostile import ROOT, HostileFolder
from isolated import python
from ort_cuda_plugin.compiler.library import isolation
from ort_cuda_plugin.compiler.nvidia_packages import nvidia_files

APPLICATION = """
import os, sys
sys.path.append(sys.argv[1])
from pathlib import Path
from ort_cuda_plugin.compiler.cache import KernelCache
from ort_cuda_plugin.compiler.library.compile_worker import WorkerClient
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.library.kernel_library import KernelLibrary
from ort_cuda_plugin.compiler.targets import Target
spec = KernelSpec("zero", ("*f32",), "def kernel(x):\\n    x[0] = float32(0)\\n")
targets = (Target.emulated(), Target.cuda(9, 0))
cache = KernelCache(Path(sys.argv[2]))
(worker,) = WorkerClient.start(cache)
worker.wait_ready()
images = [worker.compile(spec, target) for target in targets]
worker.close()
assert None not in images
assert images == [KernelLibrary(cache, print).get(spec, target) for target in targets]
"""


@pytest.mark.parametrize("isolated", [False, True], ids=["plain", "isolated"])
def test_a_cold_compilation_imports_nothing_from_the_working_folder(tmp_path: Path, isolated: bool) -> None:
    hostile = HostileFolder(tmp_path / "hostile")
    application = tmp_path / "application" / "main.py"
    application.parent.mkdir()
    application.write_text(APPLICATION)
    command = [sys.executable, *(["-I"] if isolated else []), str(application), str(ROOT), str(tmp_path / "cache")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=hostile.folder, env=environment, capture_output=True, text=True, timeout=600)
    assert hostile.ran() == []
    assert done.returncode == 0, done.stderr


def test_a_worker_of_the_conformance_tests_imports_nothing_from_the_working_folder(tmp_path: Path) -> None:
    hostile = HostileFolder(tmp_path / "hostile")
    program = "import sys; sys.path.append(sys.argv.pop(1)); from ort_cuda_plugin.cli import main; sys.exit(main())"
    command = [sys.executable, "-I", "-c", program, str(ROOT), "conformance", "node/add", "--jobs", "1"]
    done = subprocess.run(command, cwd=hostile.folder, capture_output=True, text=True, timeout=600)
    assert hostile.ran() == []
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_manifest_that_is_compiled_without_being_named_is_none_of_the_working_folder(tmp_path: Path) -> None:
    program = "import sys; sys.path.append(sys.argv[1]); from ort_cuda_plugin.cli.models import kernels as it"
    command = [sys.executable, "-I", "-c", f"{program}; print(it.DEFAULT_MANIFEST)", str(ROOT)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout.strip() == str(ROOT / "build" / "kernels.jsonl")


def test_numba_reads_no_settings_from_the_working_folder(tmp_path: Path) -> None:
    program = """
    import sys, types
    sys.path.append(sys.argv[1])
    sys.modules["yaml"] = types.ModuleType("yaml")  # without which Numba reads no such file
    sys.modules["yaml"].safe_load = lambda file: {"disable_jit": 1}
    opened = []
    sys.addaudithook(lambda event, a: opened.append(a[0]) if event == "open" and ".yaml" in str(a[0]) else None)
    from ort_cuda_plugin.compiler.library import kernel_library
    from ort_cuda_plugin.compiler.kernel import KernelSpec
    from ort_cuda_plugin.compiler.targets import Target
    spec = KernelSpec("zero", ("*f32",), "def kernel(x):\\n    x[0] = float32(0)\\n")
    kernel_library.compile_many([(spec, Target.emulated())], lambda *_: None, kernel_library.KernelCache())
    from numba.core import config
    print(opened, config.DISABLE_JIT)
    """
    (tmp_path / ".numba_config.yaml").write_text("disable_jit: 1\n")
    command = [sys.executable, "-I", "-c", textwrap.dedent(program), str(ROOT)]
    environment = os.environ | {"ORT_CUDA_PLUGIN_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.stdout == "[] 0\n", done.stderr


def test_a_helper_gets_the_folders_of_the_compiler_and_never_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, second, working) = (tmp_path / name for name in ("first", "second", "working"))
    for folder in (first, second, working):
        metadata = folder / "numba-99.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text("Metadata-Version: 2.1\nName: numba\nVersion: 99\n")
    monkeypatch.chdir(working)
    (tmp_path / "link").symlink_to(working)
    monkeypatch.setattr(sys, "path", ["", ".", "../first", str(working), str(tmp_path / "link"), str(second)])
    assert isolation.distribution_folders(["numba"]) == [str(second)]
    monkeypatch.setattr(sys, "path", [str(second), str(first)])
    assert isolation.distribution_folders(["numba", "absent"]) == [str(second)]
    monkeypatch.setattr(sys, "path", [f"{first}/", str(second)])
    assert isolation.distribution_folders(["numba"]) == [f"{first}/"]


@pytest.mark.parametrize("executable", [None, "", "/opt/app/bin/server", "python3", "bin/python3"])
def test_only_an_interpreter_with_an_absolute_path_is_started(
    monkeypatch: pytest.MonkeyPatch, executable: str | None
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    assert isolation.python_command("module", distributions=[]) is None


def test_libraries_of_nvidias_packages_are_found_in_each_folder_of_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuda-pathfinder, which Numba uses, would search the interpreter's site-packages only."""
    source, folder = tmp_path / "runtime.c", tmp_path / "packages" / "nvidia" / "cu13" / "lib"
    source.write_text("int cudaRuntimeGetVersion(int *version) { *version = 13050; return 0; }")
    folder.mkdir(parents=True)
    library = folder / "libcudart.so.13"
    flags = ["-shared", "-fPIC", "-Wl,-soname,libcudart.so.13"]
    subprocess.run([os.environ.get("CC", "cc"), *flags, "-o", library, source], check=True)
    code = """
    from ort_cuda_plugin.compiler.nvidia_packages import CUDA_RUNTIME, load_library
    load_library(CUDA_RUNTIME)
    from cuda.pathfinder import load_nvidia_dynamic_lib
    print(load_nvidia_dynamic_lib("cudart").abs_path)
    """
    assert python(code, env={"PYTHONPATH": str(tmp_path / "packages")}).stdout == f"{library}\n"
    monkeypatch.chdir(tmp_path / "packages")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    assert library not in nvidia_files("*/lib/libcudart.so.13")
