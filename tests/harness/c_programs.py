"""Builds C test programs from ``tests/c`` and all sources of the C library, plain or with sanitizers."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import onnxruntime

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "tests" / "c"

sys.path.insert(0, str(ROOT))

from build_plugin import Builder, compiler  # noqa: E402
from kernel_objects import KERNEL_FLAGS  # noqa: E402

SANITIZE = {"": [], "thread": ["-fsanitize=thread"], "address": ["-fsanitize=address,undefined"]}


def build_program(name: str, sources: list[str], sanitize: str = "") -> Path:
    """Build ``sources`` (files of ``tests/c``) and the C library; return the executable, cached if nothing changed.

    Without sanitizers, the objects of the library are those that ``build_plugin.py`` compiled.
    """
    work = ROOT / "build" / (f"tests-{sanitize}" if sanitize else "shim")
    flags = ["-O1", "-fno-omit-frame-pointer", *SANITIZE[sanitize]] if sanitize else []
    return Builder(work / "tests", work, flags).program(name, [SOURCES / source for source in sources])


# Disables glibc's cache of freed blocks for each thread. Otherwise, tests would count these blocks as leaks of Runs.
COUNTED = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}


def ort_library(folder: Path) -> Path:
    """Return a link in ``folder`` to the ONNX Runtime library of the installed wheel, under its soname."""
    link = folder / "libonnxruntime.so.1"
    if not link.exists():
        link.symlink_to(next((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.1.*")))
    return link


def build_host(name: str, folder: Path, source: Path | None = None) -> Path:
    """Build the application ``tests/c/<name>.c``, linked to the ONNX Runtime library of the installed wheel.

    ``source`` replaces that file. Headers in its folder are found.
    """
    library = ort_library(folder)
    target = folder / name
    command = ["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc_shim'}", "-o", str(target)]
    command += [str(source or SOURCES / f"{name}.c"), str(library), f"-Wl,-rpath,{folder}"]
    subprocess.run(command, check=True)
    return target


def build_kernels(folder: Path) -> Path:
    """Compile the kernels of ``tests/c/kernels.c`` to an object file for the emulated device."""
    image = folder / "kernels.o"
    flags = ["-O1", *KERNEL_FLAGS]
    source = SOURCES / "kernels.c"
    subprocess.run([*compiler(), *flags, f"-I{ROOT / 'csrc_shim'}", "-c", source, "-o", image], check=True)
    return image


def fake_library(name: str, folder: Path) -> Path:
    """Compile ``tests/c/fake_<name>.c``, a stand-in for a vendor library, once; return a copy's path in ``folder``."""
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O3", "-shared", "-fPIC"]
    command = [*compiler(), *flags, str(SOURCES / f"fake_{name}.c"), "-lm"]
    sources = (SOURCES / f"fake_{name}.c").read_bytes() + (SOURCES / "fake_library.h").read_bytes()
    key = hashlib.sha256(repr(command).encode() + sources).hexdigest()[:16]
    kept = ROOT / "build" / "stand-ins" / f"{name}-{key}.so"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(f".{os.getpid()}.tmp")
        subprocess.run([*command, "-o", partial], check=True)
        partial.replace(kept)
    return Path(shutil.copy(kept, folder / f"lib{name}.so"))


def run_program(*command: str | Path, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """Run a test program. Its sanitizers, if it has any, end it at the first finding."""
    environment = os.environ | {
        "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0:exitcode=86",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1:exitcode=86",
        "TSAN_OPTIONS": "halt_on_error=1:exitcode=86",
    }
    return subprocess.run(
        [str(part) for part in command], env=environment, capture_output=True, text=True, timeout=timeout
    )


def stand_ins(folder: Path) -> Path:
    """Compile the stand-ins of both libraries into a folder for ``ORT_CUDA_PLUGIN_EMULATE_LIBRARIES``."""
    for name in ("cublaslt", "cudnn"):
        fake_library(name, folder)
    return folder
