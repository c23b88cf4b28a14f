"""The build: what a wheel holds, and what a user without a compiler reads."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import ort_cuda_plugin
from isolated import ROOT


@pytest.fixture
def source_tree(tmp_path: Path) -> Path:
    """A copy of what the build needs, without anything built."""
    tree = tmp_path / "tree"
    generated = shutil.ignore_patterns("__pycache__", "*.so", "ort_abi.h")
    for name in ("csrc_shim", "ort_cuda_plugin"):
        shutil.copytree(ROOT / name, tree / name, ignore=generated)
    for name in ("build_plugin.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    return tree


def test_a_wheel_holds_library_and_bridge_for_every_python_from_3_11_on(source_tree: Path, tmp_path: Path) -> None:
    code = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=source_tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert f"-{ort_cuda_plugin.__version__}-cp311-abi3-linux_" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("libort_cuda_plugin.so", "_bridge.abi3.so", "py.typed", "abi/tables.py"):
        assert f"ort_cuda_plugin/{name}" in names
    assert not [name for name in names if name.startswith(("csrc_shim", "tests", "build_plugin"))]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "needs a C compiler and found none of gcc, cc, clang"),
        ({"CC": "no-such-cc -O3"}, "'no-such-cc' named by $CC"),
    ],
)
def test_a_missing_compiler_is_an_error_that_says_what_to_install(
    environment: dict[str, str], message: str, tmp_path: Path
) -> None:
    variables = {**os.environ, "PATH": str(tmp_path), "CC": "", **environment}
    done = subprocess.run(
        [sys.executable, str(ROOT / "build_plugin.py"), "--output", str(tmp_path), "--work", str(tmp_path / "work")],
        env=variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_build_without_changes_compiles_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "build_plugin.py"), "--output", str(tmp_path), "--work", str(tmp_path / "o")]
    subprocess.run(command, check=True, capture_output=True)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.[os]*")}
    assert any(path.suffix == ".o" for path in before)
    subprocess.run(command, check=True, capture_output=True)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.[os]*")} == before


def test_the_library_takes_little_of_what_the_loader_keeps_for_thread_local_data() -> None:
    """Else a process that has loaded a few libraries of that kind before cannot load it."""
    elf = Path(ort_cuda_plugin.get_library_path()).read_bytes()
    (table,) = struct.unpack_from("<Q", elf, 32)
    size, count = struct.unpack_from("<HH", elf, 54)
    headers = [struct.unpack_from("<IIQQQQQQ", elf, table + size * index) for index in range(count)]
    pt_tls = 7
    (memory_bytes,) = [header[6] for header in headers if header[0] == pt_tls]
    assert memory_bytes <= 512
