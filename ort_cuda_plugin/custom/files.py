"""Runs Python files that register operators: the command line's ``--operators FILE``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from ..abi.errors import Error


class NoOperatorsFileError(Error, ValueError):
    """The path is not a Python file."""


def load_operators(file: str) -> None:
    """Run a Python file that registers operators. Exceptions of the file are passed on.

    Raises NoOperatorsFileError if there is no such Python file.

    The file can import modules in its folder; installed packages have priority.
    """
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None or not Path(file).is_file():
        raise NoOperatorsFileError(f"{file}: expected the path of an existing Python file (.py)")
    folder = str(Path(file).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)
    spec.loader.exec_module(module)
