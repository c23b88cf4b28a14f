"""Finds the path of a session's model, which ONNX Runtime does not always pass to the plugin.

If the session entry session.model_external_initializers_file_folder_path is set, the graph has the path of a file in
that folder, which need not exist. Python's ``InferenceSession`` knows the true path. An application in another language
gives it as ep.context_file_path.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from ...model.open_file import native_path

EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"
CONTEXT_PATH = "ep.context_file_path"
VIRTUAL_NAME = "virtual_model.onnx"


def is_virtual(path: str, entries: Mapping[str, str]) -> bool:
    """Return whether ONNX Runtime made up the path in a graph."""
    return bool(entries.get(EXTERNAL_FOLDER)) and os.path.basename(path) == VIRTUAL_NAME and not os.path.exists(path)


def created_session_path() -> str:
    """Return the path of the model for which this thread creates an ``InferenceSession`` in Python; "" for none."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        owner = frame.f_locals.get("self")
        if frame.f_globals.get("__name__") == "onnxruntime.capi.onnxruntime_inference_collection":
            path = getattr(owner, "_model_path", None)
            return native_path(path) if isinstance(path, str) else ""
    return ""
