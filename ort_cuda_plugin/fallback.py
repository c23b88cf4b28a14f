"""Disables ONNX Runtime's fallback, which after an error recreates the ``InferenceSession`` on the CPU provider.

One wrong option would make an application that uses the plugin in place of another provider run on the CPU, with only a
line on stdout. ``enable_fallback=0`` makes the session raise the error instead. The parameter is not documented, and no
session option has the same effect, so `raise_instead` changes its default.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_CHANGED = "_ort_cuda_plugin_raises"


def raise_instead(onnxruntime: ModuleType, is_ours: Callable[[str], bool]) -> None:
    """Make sessions that name the plugin's provider raise an error if they cannot be created; other sessions still
    fall back. An ``enable_fallback`` that the application passes has priority. Safe to call again.
    """
    original = onnxruntime.InferenceSession.__init__
    if hasattr(original, _CHANGED):
        return

    @functools.wraps(original)
    def init(
        self: Any,
        path_or_bytes: Any,
        sess_options: Any = None,
        providers: Sequence[Any] | None = None,
        provider_options: Any = None,
        **kwargs: Any,
    ) -> None:
        if any(is_ours(name) for name in _names(providers)):
            kwargs.setdefault("enable_fallback", 0)
        original(self, path_or_bytes, sess_options, providers, provider_options, **kwargs)

    setattr(init, _CHANGED, True)
    onnxruntime.InferenceSession.__init__ = init


def _names(providers: Any) -> list[str]:
    """Return the provider names in the ``providers`` argument of an application. ONNX Runtime checks them later."""
    entries = list(providers) if isinstance(providers, Sequence) else []
    first = [entry[0] if isinstance(entry, tuple) and entry else entry for entry in entries]
    return [name for name in first if isinstance(name, str)]
