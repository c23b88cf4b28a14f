"""Detects whether a session writes its optimized model to a file, because ONNX Runtime cannot write fused nodes.

The C API can set the path of that file but not return it. So the plugin finds the field in memory: it creates session
options, sets a marker path through the API, searches the memory of the options for the marker, and then reads a
session's options at the offset of the marker only.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from ...abi import host
from ...abi.core import ffi
from ...model.ort.ort_calls import OrtCalls

_MARK: Final = b"/a path that nobody would choose, longer than what a string keeps inside itself"
_SEARCHED_WORDS: Final = 8
"""8-byte words of the session options to search: the path is among the first members of the far larger structure."""


def writes_optimized_model(session_options: Any) -> bool:
    """Return whether ``session_options`` (``const OrtSessionOptions *``) has an ``optimized_model_filepath``.

    Also False if this ORT does not store it as a std::string of libstdc++.
    """
    place = _place_of_path()
    return place is not None and _words(session_options)[place + 1] != 0


def _words(session_options: Any) -> list[int]:
    return list(ffi.cast("const uint64_t *", session_options)[0 : _SEARCHED_WORDS + 1])


@cache
def _place_of_path() -> int | None:
    """Return the index, in 8-byte words, of the path's string in the options: its address, followed by its length.

    Return None if the search does not find the marker.
    """
    ort = OrtCalls(host.api())
    plain = ort.out("CreateSessionOptions", "OrtSessionOptions *")
    marked = ort.out("CreateSessionOptions", "OrtSessionOptions *")
    try:
        ort.call("SetOptimizedModelFilePath", marked, _MARK)
        before, after = _words(plain), _words(marked)
        for place in range(_SEARCHED_WORDS):
            is_length = before[place + 1] == 0 and after[place + 1] == len(_MARK)
            if is_length and ffi.buffer(ffi.cast("const char *", after[place]), len(_MARK))[:] == _MARK:
                return place
        return None
    finally:
        ort.api.ReleaseSessionOptions(plain)
        ort.api.ReleaseSessionOptions(marked)
