"""Texts of a kernel for a page: its PTX for a GPU architecture, and the accesses that the checking mode checked."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ort_cuda_plugin.cli.exit_codes import ExitCode, UserError
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.model.ir import Array
from ort_cuda_plugin.program.analysis.verify import CHECK_VARIABLE

_check_call = re.compile(r"call void @ocp_emu_check_(load|store|atomic)\(.*, i32 (\d+)\)")
_VERBS = {"load": "loads", "store": "stores", "atomic": "atomic updates"}


def specs_of(plans: Iterable[Mapping[str, Any]]) -> list[KernelSpec]:
    """Return the kernels of all steps of plan records, each once."""
    return list(dict.fromkeys(spec for plan in plans for step in _steps(plan) if (spec := spec_of(step)) is not None))


def spec_of(step: Mapping[str, Any]) -> KernelSpec | None:
    """Return the kernel of a step of a plan record; None if the step launches none."""
    fields = step["kernel"]
    return None if fields is None else KernelSpec(**{**fields, "signature": tuple(fields["signature"])})


def _steps(plan: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from plan["once"]
    yield from plan["steps"]


def ptx_of(specs: Iterable[KernelSpec], architecture: str) -> dict[KernelSpec, str]:
    """Return the PTX, for an architecture such as ``sm_90``, of those kernels that GPUs run.

    Raises UserError for an unknown architecture, or a kernel that does not compile.
    """
    from ort_cuda_plugin.cli.models.kernel_report import ARCHITECTURES, is_for_gpus
    from ort_cuda_plugin.compiler.compile import KernelCompileError
    from ort_cuda_plugin.compiler.library.kernel_library import KernelLibrary

    targets = {target.arch: target for target in ARCHITECTURES}
    if architecture not in targets:
        raise UserError(ExitCode.USAGE, f"--ptx {architecture}: unknown architecture. Choose from {', '.join(targets)}")
    wanted = [spec for spec in specs if is_for_gpus(spec)]
    try:
        images = KernelLibrary(count=lambda name, by: None).get_many(wanted, targets[architecture])
    except KernelCompileError as error:
        raise UserError(ExitCode.MODEL_FAILED, f"--ptx {architecture}: {error}") from error
    return {spec: image.ptx.decode() for spec, image in zip(wanted, images, strict=True)}


def checked_accesses(specs: Iterable[KernelSpec]) -> dict[KernelSpec, str]:
    """Return for each kernel, as text, how many loads, stores and atomics of each size the checking mode checks.

    The text for a kernel that does not compile is the compiler's error.
    """
    from ort_cuda_plugin.compiler.compile import KernelCompileError, emulated_ir, kernel_ir
    from ort_cuda_plugin.compiler.targets import Target

    found = {}
    for spec in specs:
        try:
            text = emulated_ir(spec, kernel_ir(spec), Target.emulated(check=True))
        except KernelCompileError as error:
            found[spec] = str(error)
            continue
        counts = Counter((kind, int(size)) for kind, size in _check_call.findall(text))
        found[spec] = "\n".join(
            f"{count} {_VERBS[kind]} of {size} bytes" for (kind, size), count in sorted(counts.items())
        )
    return found


def checked_run(model: Path, operators: Sequence[Path], given: Mapping[str, Array]) -> str:
    """Run a model in the checking mode, in a separate process. Return its error, or "".

    ``operators`` are the files that register its custom operators. The inputs are ``given``; the others are random.

    Raises UserError for an input that a file cannot hold.
    """
    command = [sys.executable, "-m", "ort_cuda_plugin", "run", str(model), "--runs", "1", "--device", "emulated"]
    command += [part for file in operators for part in ("--operators", str(file))]
    environment = {**os.environ, CHECK_VARIABLE: "1"}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, array) in enumerate(given.items()):
            file = Path(folder) / f"{number}.npy"
            if array.dtype.kind in "OV":  # strings, bfloat16 and smaller floats
                said = f"--shapes {name}: a file of NumPy cannot hold its type {array.dtype}. Leave out --shapes"
                raise UserError(ExitCode.USAGE, said)
            np.save(file, array)
            command += ["--input", f"{name}={file}"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return (
        ""
        if done.returncode == 0
        else (
            done.stderr.strip()
            or f"the process that ran the model in checking mode ended with exit code {done.returncode}"
        )
    )
