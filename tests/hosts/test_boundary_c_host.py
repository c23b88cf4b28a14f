"""A C application, linked only to ONNX Runtime and started with an empty environment, runs a model on the plugin.

How the library finds Python is tested with copies of it: in an environment, outside of any, and without a Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from c_programs import COUNTED, build_host
from destruction_orders import OVERWRITE_FREED
from environments import borrow_packages, environment_folder
from hostile import HostileFolder
from isolated import ROOT, add_model
from ort_cuda_plugin import get_library_path
from profiles import Profile

PACKAGE = ROOT / "ort_cuda_plugin"
LIBRARY = "libort_cuda_plugin.so"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the application beside its model; return the path of the executable."""
    folder = tmp_path_factory.mktemp("c_host")
    add_model(folder / "add.onnx")
    return build_host("host", folder)


def run(
    host: Path, library: Path | str, folder: Path = Path("/"), /, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [str(host), str(library), str(host.parent / "add.onnx")]
    return subprocess.run(command, env=COUNTED | environment, cwd=folder, capture_output=True, text=True, timeout=600)


def test_a_run_has_a_profile_of_its_own(host: Path, tmp_path: Path) -> None:
    variables = {"ORT_CUDA_PLUGIN_PYTHON": sys.executable, "ORT_CUDA_PLUGIN_CACHE_DIR": str(tmp_path)}
    folder = tmp_path / "profiles"
    folder.mkdir()
    command = [str(host), get_library_path(), str(host.parent / "add.onnx"), str(folder)]
    done = subprocess.run(command, env=COUNTED | variables, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
    (path,) = folder.iterdir()
    profile = Profile(str(path))
    (kernel,), (node,) = profile.kernels, profile.nodes()
    assert kernel.args["nodes"] == ["add"]
    assert profile.within(node) == [kernel]


def copy_package(site: Path) -> Path:
    shutil.copytree(PACKAGE, site / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    return site / PACKAGE.name / LIBRARY


def test_the_host_runs_a_model_and_exits_with_0(host: Path, tmp_path: Path) -> None:
    variables = {"ORT_CUDA_PLUGIN_PYTHON": sys.executable, "ORT_CUDA_PLUGIN_CACHE_DIR": str(tmp_path)}
    done = run(host, get_library_path(), **variables, **OVERWRITE_FREED)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_the_environment_that_the_library_is_installed_in_is_found(host: Path, tmp_path: Path) -> None:
    site = environment_folder(tmp_path / "env")
    borrow_packages(site)
    library = copy_package(site)
    # These variables of the host must have no effect on the embedded interpreter.
    bad = dict.fromkeys(("PYTHONHOME", "PYTHONPATH", "PATH"), "/nonexistent")
    done = run(host, library, **bad, ORT_CUDA_PLUGIN_CACHE_DIR=str(tmp_path / "cache"))
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_the_environment_beside_a_source_tree_is_found_and_no_other(host: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    library = copy_package(tree)
    environment_folder(tmp_path / "venv")
    done = run(host, library)
    assert done.returncode == 1
    assert "found no Python" in done.stderr
    borrow_packages(environment_folder(tree / ".venv"))
    done = run(host, library, ORT_CUDA_PLUGIN_CACHE_DIR=str(tmp_path / "cache"))
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_an_environment_without_the_dependencies_is_named(host: Path, tmp_path: Path) -> None:
    library = copy_package(environment_folder(tmp_path / "env"))
    done = run(host, library)
    assert done.returncode == 1
    assert "cannot load the Python package of CudaPluginExecutionProvider: ModuleNotFoundError" in done.stderr
    assert str(tmp_path / "env") in done.stderr


def test_without_any_python_the_host_gets_a_status(host: Path, tmp_path: Path) -> None:
    library = Path(shutil.copy(get_library_path(), tmp_path))
    done = run(host, library)
    assert done.returncode == 1
    assert "RegisterExecutionProviderLibrary: found no Python for CudaPluginExecutionProvider" in done.stderr
    assert "ORT_CUDA_PLUGIN_PYTHON" in done.stderr


@pytest.mark.parametrize(
    ("interpreter", "message"),
    [("/nonexistent", "cannot be executed"), ("/bin/sh", "expected an interpreter of Python 3.11")],
)
def test_a_wrong_interpreter_is_named(host: Path, tmp_path: Path, interpreter: str, message: str) -> None:
    library = Path(shutil.copy(get_library_path(), tmp_path))
    done = run(host, library, ORT_CUDA_PLUGIN_PYTHON=interpreter)
    assert done.returncode == 1
    assert interpreter in done.stderr
    assert message in done.stderr


# ---- untrusted folders and variables ----


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> HostileFolder:
    """Make a working folder that looks like an environment, a home folder and a Python installation at once."""
    folder = HostileFolder(tmp_path_factory.mktemp("working") / "hostile")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for place in (f".local/lib/{version}/site-packages", f"lib/{version}/site-packages", f"lib/{version}", version):
        for name in ("sitecustomize.py", "usercustomize.py", "os.py", "encodings/__init__.py", "numba.py"):
            folder.add(folder.folder / place / name)
        folder.add(folder.folder / place / "hostile.pth", "import os; ")
    folder.add(folder.folder / "startup.py")
    for name in (f"{version.replace('.', '')}._pth", "python3._pth", "python._pth", "host._pth"):
        (folder.folder / name).write_text(f"{version}\n.\nimport site\n")
    (folder.folder / "pyvenv.cfg").write_text("home = .\ninclude-system-site-packages = true\n")
    (folder.folder / "bin").mkdir()
    (folder.folder / "bin" / "python3").symlink_to(Path(sys.executable).resolve())
    return folder


HOSTILE_ENVIRONMENT = {
    "PYTHONPATH": ".:",
    "PYTHONHOME": ".",
    "PYTHONSTARTUP": "startup.py",
    "PYTHONUSERBASE": ".local",
    "PYTHONPLATLIBDIR": "lib",
    "PYTHONINSPECT": "1",
    "PYTHONSAFEPATH": "",
    "HOME": ".",
    "PATH": ".:bin",
}


def test_no_code_comes_from_the_working_folder_of_a_host(host: Path, hostile: HostileFolder, tmp_path: Path) -> None:
    site = environment_folder(tmp_path / "env")
    borrow_packages(site)
    library = copy_package(site)
    cache = str(tmp_path / "cache")
    done = run(host, library, hostile.folder, **HOSTILE_ENVIRONMENT, ORT_CUDA_PLUGIN_CACHE_DIR=cache)
    assert hostile.ran() == []
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_no_code_comes_from_the_home_folder_that_a_host_names(
    host: Path, hostile: HostileFolder, tmp_path: Path
) -> None:
    """Outside of a virtual environment, an interpreter by default loads packages from the user's home folder."""
    library = Path(shutil.copy(get_library_path(), tmp_path))
    interpreter = str(Path(sys.executable).resolve())
    for home in (".", str(hostile.folder)):
        environment = HOSTILE_ENVIRONMENT | {"HOME": home, "ORT_CUDA_PLUGIN_PYTHON": interpreter}
        del environment["PYTHONUSERBASE"]
        done = run(host, library, hostile.folder, **environment)
        assert hostile.ran() == []
        assert "cannot load the Python package" in done.stderr  # so the interpreter did start


def test_a_package_in_a_folder_of_the_users_finds_its_dependencies_there(host: Path, tmp_path: Path) -> None:
    system = environment_folder(tmp_path)
    (system / "_cffi_backend.py").write_text('__version__ = "of an old package"\n')
    site = tmp_path / "home" / ".local" / "lib" / system.parent.name / "site-packages"
    site.mkdir(parents=True)
    borrow_packages(site)
    done = run(host, copy_package(site), ORT_CUDA_PLUGIN_CACHE_DIR=str(tmp_path / "cache"))
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.parametrize("interpreter", ["bin/python3", "./bin/python3", "python3"])
def test_a_relative_interpreter_is_refused(
    host: Path, hostile: HostileFolder, tmp_path: Path, interpreter: str
) -> None:
    library = Path(shutil.copy(get_library_path(), tmp_path))
    done = run(host, library, hostile.folder, ORT_CUDA_PLUGIN_PYTHON=interpreter)
    assert done.returncode == 1
    assert f"ORT_CUDA_PLUGIN_PYTHON: {interpreter} is not an absolute path" in done.stderr
    assert hostile.ran() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("given_away", ["bin", "bin/python3"])
def test_an_interpreter_that_somebody_else_put_above_the_package_is_not_taken(
    host: Path, tmp_path: Path, given_away: str
) -> None:
    environment_folder(tmp_path / "shared")
    site = tmp_path / "shared" / "mine" / "site-packages"
    site.mkdir(parents=True)
    library = copy_package(site)
    assert "cannot load the Python package" in run(host, library).stderr
    os.chown(tmp_path / "shared" / given_away, 12345, 12345, follow_symlinks=False)
    done = run(host, library)
    assert str(tmp_path) not in done.stderr.replace(str(site), "")
