"""The build: contents of a wheel, and the error that a user without a compiler sees."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import build_wheels
import ort_cuda_plugin
from isolated import ROOT

GENERATED = (
    "__pycache__",
    "*.so",
    "ort_abi.h",
    "build",
    "dist",
    "*.egg-info",
    ".*_cache",
    ".hypothesis",
    ".git",
    ".nox",
    ".venv",
)


def archive_of(call: str, source: Path, output: Path, **environment: str) -> Path:
    """Return the archive that a call of the build backend makes."""
    code = f"import sys; from setuptools import build_meta; print(build_meta.{call}(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(output)]
    done = subprocess.run(command, cwd=source, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return output / done.stdout.splitlines()[-1]


@pytest.mark.full
def test_the_source_distribution_is_complete_and_makes_a_wheel_for_every_python_from_3_11_on(tmp_path: Path) -> None:
    tree, source = tmp_path / "tree", tmp_path / f"ort_cuda_plugin-{ort_cuda_plugin.__version__}"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*GENERATED))
    there = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}
    with tarfile.open(archive_of("build_sdist", tree, tmp_path)) as sdist:
        if hasattr(tarfile, "data_filter"):  # exists since Python 3.11.4
            sdist.extraction_filter = tarfile.data_filter
        sdist.extractall(tmp_path)
    unpacked = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    assert there <= unpacked
    assert {name for name in unpacked - there if ".egg-info/" not in name} == {"PKG-INFO", "setup.cfg"}

    wheel = archive_of("build_wheel", source, tmp_path, CFLAGS="-O0")
    assert f"-{ort_cuda_plugin.__version__}-cp311-abi3-linux_" in wheel.name
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    for name in (
        "libort_cuda_plugin.so",
        "_bridge.abi3.so",
        "py.typed",
        "abi/tables.py",
        "conformance/cuda_kernels.json",
        "gpus/devices/h100.json",
        "gpus/multiprocessors.json",
    ):
        assert f"ort_cuda_plugin/{name}" in names
    assert not [name for name in names if name.startswith(("csrc_shim", "tests", "build_", "noxfile", "bench"))]
    build_wheels.check_contents(wheel, source)
    assert "0 ABI version mismatches and 0 ABI violations" in " ".join(build_wheels.abi3_report(wheel).split())
    assert build_wheels.oldest_glibc(wheel) > 16
    metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    always = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra" not in line]
    assert always == ["Requires-Dist: cffi>=2", "Requires-Dist: numpy>=2"]


def test_the_readme_of_the_package_has_no_links_into_the_source_tree() -> None:
    assert not re.findall(r"\]\((?!https://)", (ROOT / "docs" / "package_index.md").read_text())


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
    environment = {**os.environ, "CFLAGS": "-O0"}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.[os]*")}
    assert any(path.suffix == ".o" for path in before)
    subprocess.run(command, env=environment, check=True, capture_output=True)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.[os]*")} == before


def test_the_library_takes_little_of_what_the_loader_keeps_for_thread_local_data() -> None:
    """The loader reserves little static thread-local storage, and libraries loaded earlier take some of it."""
    elf = Path(ort_cuda_plugin.get_library_path()).read_bytes()
    (table,) = struct.unpack_from("<Q", elf, 32)
    size, count = struct.unpack_from("<HH", elf, 54)
    headers = [struct.unpack_from("<IIQQQQQQ", elf, table + size * index) for index in range(count)]
    pt_tls = 7
    (memory_bytes,) = [header[6] for header in headers if header[0] == pt_tls]
    assert memory_bytes <= 512
