"""An installed cuDNN has a plan for each form that the plugin asks for: it plans for a device that is not there."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

from build_plugin import compiler
from c_programs import ROOT, SOURCES
from ort_cuda_plugin.ep.libraries import LIBRARIES, candidates


def build(source: str, target: Path, *more: str | Path) -> Path:
    flags = ["-std=gnu11", "-O1", f"-I{ROOT / 'csrc_shim'}"]
    subprocess.run([*compiler(), *flags, SOURCES / source, *more, "-o", target, "-ldl"], check=True)
    return target


def test_cudnn_has_a_plan_for_each_form_of_each_convolution(tmp_path: Path) -> None:
    site_packages = Path(sysconfig.get_paths()["purelib"])
    found = [path for path in candidates(LIBRARIES[1], site_packages) if Path(path).is_absolute()]
    if not found:
        pytest.skip(f"{LIBRARIES[1].package} is not installed")
    build("stub_libcuda.c", tmp_path / "libcuda.so.1", "-shared", "-fPIC")
    program = build("cudnn_engines.c", tmp_path / "cudnn_engines", ROOT / "csrc_shim" / "base" / "error.c")
    folders = [tmp_path, *site_packages.glob("nvidia/*/lib")]
    done = subprocess.run(
        [program, found[0], SOURCES / "h100.json"],
        env=os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) > 500, done.stdout
