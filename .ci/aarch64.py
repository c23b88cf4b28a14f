"""Runs a model and tests on an aarch64 CPU that QEMU emulates, in a root file system of Debian under build/aarch64.

Needs root, and Debian's packages debootstrap and qemu-user-static with binfmt_misc mounted. ``nox -s aarch64`` runs
this file with the tools of the extra ``wheels``. The first call makes the file system, in about ten minutes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from build_wheels import ROOT, run, source_distribution, wheel

SYSTEM = ROOT / "build" / "aarch64"
PACKAGES = SYSTEM / "usr" / "local" / "lib" / "python3.11" / "dist-packages"
EXTRAS = ("cpu", "cubins", "nvrtc")
TEST_PACKAGES = ("hypothesis", "ml_dtypes", "psutil", "pytest>=9,<10", "pytest-xdist", "setuptools>=77")
MODEL = "python3.11 -m ort_cuda_plugin run light_squeezenet --emulate --runs 1"
TESTS = (
    "tests/kernels/test_stack_frames.py",
    "tests/emulator/test_emulator_launch.py",
    "tests/emulator/test_emulator_memory.py",
)
"""Tests of what depends on the CPU: relocations, stack switches, stack bytes, pages, rounding modes.

Tests of the checking mode are not among them: under QEMU, its shadow memory took 22 GB.
"""


def make_system() -> None:
    """Make the root file system. Raises SystemExit if a tool is missing."""
    if (SYSTEM / "usr" / "bin" / "python3.11").exists():
        return
    if not shutil.which("debootstrap") or not Path("/proc/sys/fs/binfmt_misc/qemu-aarch64").exists():
        raise SystemExit(
            "no emulated aarch64 CPU: install debootstrap and qemu-user-static, mount binfmt_misc "
            "(mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc), and run update-binfmts --enable qemu-aarch64"
        )
    include = "python3.11,ca-certificates,gcc,libc6-dev"
    run("debootstrap", "--arch=arm64", "--variant=minbase", f"--include={include}", "bookworm", SYSTEM)


def install() -> None:
    """Install the plugin's wheel and its dependencies, and copy the checkout with the wheel's libraries to /src."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        built = wheel(source_distribution(folder), "aarch64", folder)
        place = ("--target", PACKAGES, "--python-platform", "aarch64-manylinux_2_31", "--python-version", "3.11")
        wanted = (f"ort-cuda-plugin[{','.join(EXTRAS)}] @ {built.as_uri()}", *TEST_PACKAGES)
        run("uv", "pip", "install", *place, "--constraint", ROOT / ".ci" / "lock.txt", *wanted)
        source = SYSTEM / "src"
        shutil.rmtree(source, ignore_errors=True)
        for file in run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines():
            (source / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, source / file)
        with zipfile.ZipFile(built) as archive:
            for file in archive.namelist():
                if file.endswith(".so"):
                    archive.extract(file, source)


def inside(command: str) -> int:
    """Run a shell command in the file system's /src, and return its exit status."""
    variables = "HOME=/root PYTHONPATH=/src ORT_CUDA_PLUGIN_CACHE_DIR=/tmp/kernels"
    return subprocess.run(["chroot", SYSTEM, "/bin/sh", "-c", f"cd /src && {variables} {command}"]).returncode


def main(argv: Sequence[str]) -> int:
    os.umask(0o022)
    make_system()
    install()
    # Without /proc, Python finds no path of libraries. The machine's /sys describes another CPU, so it stays outside.
    run("mount", "-t", "proc", "proc", SYSTEM / "proc")
    run("mount", "--bind", "/dev", SYSTEM / "dev")
    try:
        return inside(MODEL) or inside(f"python3.11 -m pytest -q -n 0 {' '.join(argv or TESTS)}")
    finally:
        run("umount", SYSTEM / "dev", SYSTEM / "proc")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
