"""Files of Python that register operators, as the command line takes them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


class NoOperatorsFileError(ValueError):
    """The path names no Python file."""


def load_operators(file: str) -> None:
    """Runs a Python file that registers operators, with whatever errors that has. Raises NoOperatorsFileError."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None or not Path(file).is_file():
        raise NoOperatorsFileError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)
    spec.loader.exec_module(module)
