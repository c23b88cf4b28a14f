"""Isolates the compiler from the working folder: neither it nor a worker process loads code or settings from there.

``sys.path`` of a worker process has the standard library, the folders from which this process would import the
compiler, and the interpreter's own site folders, in this order. The worker loads this package by its path.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from ort_cuda_plugin.compiler.nvidia_packages import CUDA_RUNTIME, import_folders, load_library

PACKAGE = Path(__file__).resolve().parents[2]
COMPILER_DISTRIBUTIONS = ("llvmlite", "numba", "numba-cuda", "numpy", "cuda-core", "cuda-bindings")

BOOTSTRAP = """
import json, site, sys
module, package, folders, arguments = json.loads(sys.argv[1])
for folder in folders:
    site.addsitedir(folder)
site.main()
from importlib import import_module, util
spec = util.spec_from_file_location(
    "ort_cuda_plugin", package + "/__init__.py", submodule_search_locations=[package]
)
sys.modules["ort_cuda_plugin"] = util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["ort_cuda_plugin"])
import_module(module).main(*arguments)
"""


def python_command(module: str, *arguments: str, distributions: Sequence[str]) -> list[str] | None:
    """Return a command line with which a new interpreter calls ``main(*arguments)`` of a module of this package.

    Returns None if no interpreter is known: in a program that embeds Python, sys.executable may be that program. Run
    the command in the working folder "/".
    """
    executable = sys.executable or ""
    if not os.path.isabs(executable) or not os.path.basename(executable).startswith("python"):
        return None
    plan = json.dumps([module, str(PACKAGE), distribution_folders(distributions), arguments])
    return [executable, "-I", "-S", "-c", BOOTSTRAP, plan]


def distribution_folders(names: Sequence[str]) -> list[str]:
    """Return the folders of sys.path that contain the distributions ``names``, in the order of sys.path.

    The working folder is left out.
    """
    trusted = import_folders()
    found = set()
    for name in names:
        distribution = next(iter(importlib.metadata.distributions(name=name, path=trusted)), None)
        if distribution is not None:
            found.add(str(distribution.locate_file("")))
    return [entry for entry in trusted if str(Path(entry)) in found]


# ---- Numba's settings file, .numba_config.yaml ----

NUMBA_SETTINGS = ".numba_config.yaml"
NO_FILE = os.devnull + "/none"


class _SettingsLoader(SourceFileLoader):
    """Loads Numba's configuration module with `NO_FILE` as settings file, instead of a file in the working folder."""

    def get_code(self, fullname: str) -> CodeType | None:
        code = super().get_code(fullname)
        if code is None:
            return None
        names = tuple(NO_FILE if constant == NUMBA_SETTINGS else constant for constant in code.co_consts)
        return code.replace(co_consts=names)


class _SettingsFinder(MetaPathFinder):
    modules = ("numba.core.config", "numba.cuda.core.config")

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.modules:
            return None
        others: list[Any] = [finder for finder in sys.meta_path if finder is not self]
        for finder in others:
            spec: ModuleSpec | None = finder.find_spec(name, path, target)
            if spec is not None:
                if isinstance(spec.loader, SourceFileLoader):
                    spec.loader = _SettingsLoader(name, spec.loader.path)
                return spec
        return None


def import_compiler() -> Any:
    """Import `ort_cuda_plugin.compiler.compile`, so that Numba reads its settings from the environment only.

    If the application has imported Numba before, its settings stay. Raises ImportError if a compiler tool is missing or
    cannot be imported.
    """
    if not any(isinstance(finder, _SettingsFinder) for finder in sys.meta_path):
        # Do not remove the finder afterwards: a concurrent import that iterates over sys.meta_path would skip another
        # finder.
        sys.meta_path.insert(0, _SettingsFinder())
    if "numba.cuda" not in sys.modules:
        load_library(CUDA_RUNTIME)
    try:
        return importlib.import_module("ort_cuda_plugin.compiler.compile")
    except Exception as error:  # numba-cuda loads libcudart, and raises a RuntimeError if there is none
        is_missing = isinstance(error, ImportError)
        raise ImportError(
            f"a kernel has to be compiled, and the compiler {'is not installed' if is_missing else 'does not load'} "
            f'({error}). `pip install "ort-cuda-plugin[cpu]"` installs it for the emulated device, `[cuda]` or `[gpu]` '
            "for GPUs; without a compiler, kernels come from a kernel cache that a process with the same version of "
            "the plugin has filled",
            name=error.name if isinstance(error, ImportError) else None,
        ) from error
