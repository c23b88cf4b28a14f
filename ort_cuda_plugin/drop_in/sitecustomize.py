"""Registers the plugin when a program imports onnxruntime; ``ort-cuda-plugin exec`` puts this module on PYTHONPATH.

Python imports the first ``sitecustomize`` on its path at each start, also in the program's child processes. So this
module imports nothing heavy, runs the ``sitecustomize`` that it hides, and does nothing in a program that never imports
onnxruntime.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


class _RegisteringLoader(Loader):
    """Loads onnxruntime with its own loader, then registers the plugin."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        # `_offer` imports onnxruntime on another thread, and waits for it. Mark the import as complete, so that the
        # other thread does not wait for this one.
        spec._initializing = False  # type: ignore[attr-defined]
        try:
            _offer(module)
        except Exception as error:
            print(f"ort-cuda-plugin {_command()}: {type(error).__name__}: {error}", file=sys.stderr)


class _Finder:
    """Finds onnxruntime as Python would without this module, and makes `_RegisteringLoader` its loader."""

    def __init__(self) -> None:
        self._searching = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if name != "onnxruntime" or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


def _command() -> str:
    """Return the command that started the program. Uses no name of the plugin, which may fail to be imported."""
    return "with" if os.environ.get("ORT_CUDA_PLUGIN_AS") == "CudaPluginExecutionProvider" else "exec"


def _offer(onnxruntime: ModuleType) -> None:
    """Register the plugin, and make onnxruntime describe itself as the wheel with CUDA."""
    import ort_cuda_plugin
    from ort_cuda_plugin.ep.device.identity import default_identity
    from ort_cuda_plugin.sessions.exit_report import report_at_exit
    from ort_cuda_plugin.sessions.observation import observe, refuse_fallback, registration_failed

    observe(onnxruntime)
    report_at_exit(_command())
    try:
        devices = ort_cuda_plugin.register()
    except Exception as error:
        registration_failed(str(error))
        raise
    if not devices:
        print(f"ort-cuda-plugin {_command()}: no CUDA device; onnxruntime uses the CPU", file=sys.stderr)
        return
    refuse_fallback(default_identity())
    priority: list[str] = onnxruntime.get_all_providers()
    available: Callable[[], list[str]] = onnxruntime.get_available_providers

    def get_available_providers() -> list[str]:
        """Return the names of the execution providers, the preferred ones first: programs pass the list to sessions."""
        return sorted(available(), key=lambda name: priority.index(name) if name in priority else -1)

    def get_device() -> str:
        return "GPU"

    onnxruntime.get_available_providers = get_available_providers  # type: ignore[attr-defined]
    onnxruntime.get_device = get_device  # type: ignore[attr-defined]


def _run_hidden() -> None:
    """Run the ``sitecustomize`` that Python would have imported without this one."""
    path = [folder for folder in sys.path if os.path.abspath(folder) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, _Finder())
    _run_hidden()
