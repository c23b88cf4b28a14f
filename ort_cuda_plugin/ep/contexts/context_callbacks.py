"""The application's callbacks for reading and writing files of compiled models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...abi import host
from ...abi.core import core, ffi
from ...context.storage.errors import ContextError
from ...context.storage.files import Buffer

STABLE_SINCE, EXPERIMENTAL_SINCE = 31, 28
"""N of the first ONNX Runtime 1.N that has getters of the application's callbacks: in OrtEpApi, and as experimental
functions that are looked up by name.
"""
_READ = "OrtStatus *(*)(void *, const char *, OrtAllocator *, void **, size_t *)"
_WRITE = "OrtStatus *(*)(void *, const char *, const void *, size_t)"
_GET_CONFIG = "OrtStatus *(*)(const OrtSessionOptions *, OrtEpContextConfig **)"
_GET = "OrtStatus *(*)(const OrtEpContextConfig *, void **, void **)"


class ContextCallbacks:
    """The read and write functions that the application set in its session options; valid as long as the session."""

    def __init__(self, session_options: Any) -> None:
        self._read: tuple[Any, Any] | None = None
        self._write: tuple[Any, Any] | None = None
        if host.host_version() >= STABLE_SINCE:
            table = host.ep_api()
            self._find(
                session_options,
                table.SessionOptionsGetEpContextConfig,
                table.ReleaseEpContextConfig,
                table.EpContextConfigGetEpContextDataReadFunc,
                table.EpContextConfigGetEpContextDataWriteFunc,
            )
        elif host.host_version() >= EXPERIMENTAL_SINCE:
            functions = [
                _experimental(
                    "SessionOptions_GetEpContextConfig",
                    "OrtStatus *(*)(const OrtSessionOptions *, OrtEpContextConfig **)",
                ),
                _experimental("ReleaseEpContextConfig", "void (*)(OrtEpContextConfig *)"),
                _experimental("EpContextConfig_GetEpContextDataReadFunc", _GET),
                _experimental("EpContextConfig_GetEpContextDataWriteFunc", _GET),
            ]
            if all(function != ffi.NULL for function in functions):
                self._find(session_options, *functions)

    @property
    def reads(self) -> bool:
        """Whether the application reads the files. If so, the plugin does not."""
        return self._read is not None

    @property
    def writes(self) -> bool:
        """Whether the application writes the files."""
        return self._write is not None

    def read(self, name: str) -> Buffer:
        """Return a view of the contents of the file that a node names. Their memory is freed with the view.

        Raises: ContextError: the application's function fails.
        """
        assert self._read is not None
        function, state = self._read
        allocator, data, size = ffi.new("OrtAllocator **"), ffi.new("void **"), ffi.new("size_t *")
        host.check_status(host.api().GetAllocatorWithDefaultOptions(allocator))
        try:
            host.check_status(function(state, name.encode(errors="surrogateescape"), allocator[0], data, size))
        except host.OrtError as error:
            raise ContextError(
                f"the application's function that reads context files failed for {name!r}: {error}"
            ) from error
        finally:
            owned = ffi.NULL if data[0] == ffi.NULL else ffi.gc(data[0], _freeing(allocator[0]))
        if owned == ffi.NULL:
            return b""
        return memoryview(ffi.buffer(owned, size[0]))  # the view keeps `owned` alive

    def write(self, name: str, data: Buffer) -> None:
        """Pass the contents of a file to the application.

        Raises:
            ContextError: the application's function fails.
        """
        assert self._write is not None
        function, state = self._write
        try:
            host.check_status(function(state, name.encode(errors="surrogateescape"), ffi.from_buffer(data), len(data)))
        except host.OrtError as error:
            raise ContextError(
                f"the application's function that writes context files failed for {name!r}: {error}"
            ) from error

    def _find(self, session_options: Any, get: Any, release: Any, get_read: Any, get_write: Any) -> None:
        slot = ffi.new("OrtEpContextConfig **")
        host.check_status(get(session_options, slot))
        self._config = ffi.gc(slot[0], release)  # keeps the objects that the callbacks need
        self._read = _pair(get_read, slot[0], _READ)
        self._write = _pair(get_write, slot[0], _WRITE)


def _pair(get: Any, config: Any, kind: str) -> tuple[Any, Any] | None:
    """Return a callback of the application and its state pointer; None if the application set no callback."""
    function, state = ffi.new("void **"), ffi.new("void **")
    host.check_status(get(config, function, state))
    return None if function[0] == ffi.NULL else (ffi.cast(kind, function[0]), state[0])


def _experimental(name: str, kind: str) -> Any:
    """Return an experimental function of OrtEpApi; NULL if this version of ONNX Runtime lacks it."""
    return ffi.cast(kind, host.api().GetExperimentalFunction(f"OrtEpApi_{name}_SinceV28".encode()))


def _freeing(allocator: Any) -> Callable[[Any], None]:
    def free(data: Any) -> None:
        if core().host_api() != ffi.NULL:
            host.check_status(host.api().AllocatorFree(allocator, data))

    return free
