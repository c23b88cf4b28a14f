"""Builds the source distribution and a wheel for each architecture, checks them, and runs a model with them.

``zig cc`` of PyPI's ``ziglang`` compiles for both architectures and an old glibc, on any machine. The wheels are made
from the source distribution, unpacked elsewhere. ``nox -s wheels`` runs this file with the tools of the extra
``wheels``.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURES = ("x86_64", "aarch64")
GLIBC = "2.27"
"""glibc version that the wheels are compiled for; it introduced the symbol versions of `logf` and others that they use.
"""
PLATFORM = "manylinux_2_28"
TRY = """
import sys
import numpy as np
import ort_cuda_plugin
session = ort_cuda_plugin.session(sys.argv[1], emulate=True)
values = np.load(sys.argv[2])
results = session.run(None, {name: values[name] for name in (entry.name for entry in session.get_inputs())})
for result, expected in zip(results, (values[entry.name] for entry in session.get_outputs()), strict=True):
    np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-5)
if sys.argv[3:] == ["warm"]:
    assert not {"numba", "llvmlite", "onnx"} & set(sys.modules)
    assert ort_cuda_plugin.counters()["kernels_compiled"] == 0
print(sys.version.split()[0], ort_cuda_plugin.get_library_path())
"""
PREPARE = """
import sys
import numpy as np
import onnx
import onnxruntime
from ort_cuda_plugin import models
model, _ = models.before_softmax(onnx.load(models.find_model("light_squeezenet")))
model = models.with_noise_weights(model, 0)
onnx.save(model, sys.argv[1])
feeds = models.random_inputs(model)
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
results = session.run(None, feeds)
np.savez(sys.argv[2], **feeds, **dict(zip((entry.name for entry in session.get_outputs()), results, strict=True)))
"""


def run(*command: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Run a command and return its output. Raises SystemExit if it fails."""
    words = list(map(str, command))
    variables = {**os.environ, **(env or {})}
    done = subprocess.run(words, cwd=cwd, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{shlex.join(words)}\n{done.stdout}\nexit {done.returncode}")
    return done.stdout


def backend(call: str, source: Path, output: Path, settings: str = "None", **env: str) -> Path:
    """Call a function of setuptools' build backend in the folder ``source``, and return the archive that it makes."""
    code = f"import sys; from setuptools import build_meta; print(build_meta.{call}(sys.argv[1], {settings}))"
    return output / run(sys.executable, "-c", code, output, cwd=source, env=env).splitlines()[-1]


def source_distribution(output: Path) -> Path:
    return backend("build_sdist", ROOT, output)


def wheel(sdist: Path, architecture: str, output: Path) -> Path:
    """Build the wheel of an architecture outside of the checkout, and return its path."""
    platform = f"{PLATFORM}_{architecture}"
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        (source,) = Path(folder).iterdir()
        compiler = [sys.executable, "-m", "ziglang", "cc", "-target", f"{architecture}-linux-gnu.{GLIBC}"]
        settings = f'{{"--build-option": ["--plat-name", "{platform}"]}}'
        built = backend("build_wheel", source, output, settings, CC=shlex.join(compiler))
        check_contents(built, source)
    if oldest_glibc(built) > int(PLATFORM.rpartition("_")[2]):
        raise SystemExit(f"{built.name} needs glibc 2.{oldest_glibc(built)}")
    print(f"{built.name}: needs what manylinux_2_{oldest_glibc(built)} has\n{abi3_report(built)}")
    return built


def oldest_glibc(built: Path) -> int:
    """Return the N of the oldest manylinux_2_N that the wheel supports. Raises SystemExit if the wheel needs a library
    of this machine.
    """
    report = run(sys.executable, "-m", "auditwheel", "show", built)
    oldest = re.search(r'the following platform tag:\s+"manylinux_2_(\d+)_', report)
    if oldest is None:
        raise SystemExit(f"{built.name} is for this machine only:\n{report}")
    return int(oldest[1])


def abi3_report(built: Path) -> str:
    """Return abi3audit's report. Raises SystemExit if a wheel needs more than the limited API."""
    return run(sys.executable, "-m", "abi3audit", "--strict", "--summary", built)


def check_contents(built: Path, source: Path) -> None:
    """Raise SystemExit if a wheel has debugging information or names a folder of this machine."""
    with zipfile.ZipFile(built) as archive:
        for name in archive.namelist():
            content = archive.read(name)
            if name.endswith(".so") and (b".debug_info" in content or b".symtab" in content):
                raise SystemExit(f"{built.name}: {name} is not stripped")
            if str(source).encode() in content or str(ROOT).encode() in content:
                raise SystemExit(f"{built.name}: {name} has the path of the folder that it was built in")


def smoke(built: Path, interpreters: Sequence[str]) -> None:
    """Run light_squeezenet with the compiler, then from its cache without the compiler, in a new environment of each
    interpreter.

    No C compiler is on the path, and the working folder has no checkout.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, values, program, prepare = (folder / n for n in ("m.onnx", "v.npz", "try.py", "prepare.py"))
        program.write_text(TRY)
        prepare.write_text(PREPARE)
        variables = {"ORT_CUDA_PLUGIN_CACHE_DIR": str(folder / "cache"), "PATH": "", "PYTHONPATH": ""}
        full = environment(folder / "full", sys.executable, f"{built}[cpu]")
        run(full, prepare, model, values, cwd=folder, env=variables)
        print(run(full, program, model, values, cwd=folder, env=variables).strip(), size(folder / "full"))
        for number, interpreter in enumerate(interpreters):
            bare = environment(folder / f"bare{number}", interpreter, str(built), "onnxruntime>=1.26,<1.33")
            print(run(bare, program, model, values, "warm", cwd=folder, env=variables).strip(), size(bare.parents[1]))
            shutil.rmtree(bare.parents[1])


def environment(folder: Path, interpreter: str, *packages: str) -> Path:
    """Make an environment with these packages and nothing else; return its interpreter."""
    run(interpreter, "-m", "venv", "--without-pip", folder)
    run(sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "-q", "--no-compile", *packages)
    return folder / "bin" / "python"


def size(folder: Path) -> str:
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    installed = sum(path.stat().st_size for path in files if path.suffix != ".pyc")
    return f"{installed / 2**20:.0f} MiB in {folder.name}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="folder for the archives")
    parser.add_argument("--arch", action="append", choices=ARCHITECTURES, help="only this architecture (repeatable)")
    parser.add_argument(
        "--python", action="append", default=[], metavar="PATH", help="another interpreter to try the wheel with"
    )
    parser.add_argument("--no-smoke", action="store_true", help="do not try the wheel")
    arguments = parser.parse_args(argv)
    output = arguments.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    for stale in [*output.glob("*.whl"), *output.glob("*.tar.gz")]:
        stale.unlink()
    archives = [source_distribution(output)]
    for architecture in arguments.arch or ARCHITECTURES:
        archives.append(wheel(archives[0], architecture, output))
    print(run(sys.executable, "-m", "twine", "check", "--strict", *archives))
    of_this_machine = [path for path in archives if path.name.endswith(f"_{os.uname().machine}.whl")]
    if of_this_machine and not arguments.no_smoke:
        smoke(of_this_machine[0], [sys.executable, *arguments.python])
    for archive in archives:
        print(f"{archive} {archive.stat().st_size / 2**20:.2f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
