"""The package's exceptions have one base, `ort_cuda_plugin.Error`."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ort_cuda_plugin
from isolated import add_model
from ort_cuda_plugin.abi.message_texts import did_you_mean
from ort_cuda_plugin.models import find_model

INTERNAL = {
    "Absent": "a PermissionError, which the caches handle",
    "BudgetTooSmall": "the session and the commands turn it into an error of the option",
    "CallError": "of a callback: C makes it the error of the Run",
    "DeviceLost": "the selftest replaces the process",
    "FileChanged": "an OSError, which the reader of files handles",
    "NotFoldable": "ends the evaluation of an expression",
    "NoSubstitute": "of a callback: C makes it the error of the Run",
    "PluginFailure": "of a callback: C makes it the error of the Run",
    "Refused": "of a callback: C makes it the error of the Run",
    "Skipped": "ends a part of the selftest",
    "StageError": "the division into stages turns it into an error of the option",
    "UnforeseenShapes": "of a callback: C makes it the error of the Run",
    "UnknownValue": "the lowering of one node handles it",
    "UnsupportedIR": "the compiler handles it",
    "Untrusted": "a PermissionError, which the caches handle",
    "UserError": "ends a command with its exit code",
    "WorkerDied": "the selftest replaces the process",
    "Wrong": "a failed check of the selftest",
}
"""Exceptions that reach no caller, with what becomes of them."""


def exceptions() -> Iterator[type[Exception]]:
    """Yield the exceptions that the package's modules define, except private ones."""
    for module in pkgutil.walk_packages(ort_cuda_plugin.__path__, "ort_cuda_plugin."):
        if module.name not in {"ort_cuda_plugin.__main__", "ort_cuda_plugin.libort_cuda_plugin"}:
            importlib.import_module(module.name)
    for name, module_of in sorted(sys.modules.items()):
        if name.startswith("ort_cuda_plugin"):
            for _, value in inspect.getmembers(module_of, inspect.isclass):
                if issubclass(value, Exception) and value.__module__ == name and not value.__name__.startswith("_"):
                    yield value


def test_every_exception_that_reaches_a_caller_has_the_base() -> None:
    without = {kind.__name__ for kind in exceptions() if not issubclass(kind, ort_cuda_plugin.Error)}
    assert without == INTERNAL.keys()


def test_the_base_catches_a_wrong_option_and_a_missing_model() -> None:
    with pytest.raises(ort_cuda_plugin.Error, match="no_such_option"):
        ort_cuda_plugin.session(add_model(), emulate=True, provider_options={"no_such_option": 1})
    with pytest.raises(ort_cuda_plugin.Error, match="no_such_model"):
        find_model("no_such_model")


def test_an_exception_keeps_its_former_base() -> None:
    assert issubclass(ort_cuda_plugin.OptionError, ValueError)
    assert issubclass(ort_cuda_plugin.PluginError, RuntimeError)


def test_one_function_suggests_names() -> None:
    package = Path(ort_cuda_plugin.__file__).parent
    using = {path.name for path in package.rglob("*.py") if "get_close_matches" in path.read_text(encoding="utf-8")}
    assert using == {"message_texts.py"}
    assert did_you_mean("comit", ["commit", "compile"]) == "did you mean 'commit'?"
    assert did_you_mean("x", ["commit", "compile"]) == ""
