"""Finds the source models of compiled models that store no weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...abi import host
from ...abi.core import ffi
from ...context.storage.constants import Source
from ...context.storage.errors import ContextError
from ...context.storage.files import ModelFolder
from ...context.storage.source_model import SourceModel
from ...model.open_file import native_path
from ..session.model_paths import EXTERNAL_FOLDER

BUFFER_SINCE = 29
"""N of the first ONNX Runtime 1.N in which an application can pass the source model in memory."""
WEIGHTLESS_ENTRIES = ("ep.enable_weightless", "ep.enable_weightless_ep_context_nodes", "ep.enable_weightless_mode")
"""Session entries that ask for a compiled model without weights, one per version of ONNX Runtime; "0" means no."""


class SourceFinder:
    """Finds source models. ``entries`` are the session's entries, ``session_options`` its ``const OrtSessionOptions
    *``.
    """

    def __init__(self, entries: Mapping[str, str], session_options: Any) -> None:
        self._path = native_path(entries.get("ep.context_source_model_path", ""))
        self._folder = native_path(entries.get(EXTERNAL_FOLDER, ""))
        self._buffer = _buffer(session_options)  # the buffer lives as long as the session
        self._found: dict[tuple[str, str], SourceModel] = {}

    @property
    def paths(self) -> list[str]:
        """Return the path of the source model that the application names, as a list; empty if it names none."""
        return [self._path] if self._path else []

    def find(self, folder: ModelFolder | None, file: str) -> Source:
        """Find the source model: the one that the application gives, else ``file`` in ``folder``.

        Raises: ContextError: the source model cannot be read, or its location is unknown.
        """
        key = (str(folder), file)
        if key not in self._found:
            self._found[key] = self._open(folder, file)
        return Source(file, self._found[key])

    def of_model(self, path: str, output_folder: Path | None) -> Source:
        """Return the source model that a compiled model in ``output_folder`` will look for; ``path``: the model that is
        being compiled.

        Raises:
            ContextError: as `find`.
        """
        path = path or self._path
        if not path:
            if self._buffer is not None:
                return self.find(None, "")
            raise ContextError(
                "the model comes from memory, and a compiled model without weights needs its source: set "
                "ep.context_source_model_path to the model's path"
            )
        folder = ModelFolder.of(path)
        # The compiled model will open this path relative to its own folder, so links to folders are resolved.
        name = Path(os.path.realpath(folder.path)) / Path(path).name
        if output_folder is not None and name.is_relative_to(output_folder.resolve()):
            file = str(name.relative_to(output_folder.resolve()))
        else:
            file = name.name
        subject = f"source model {path!r}"
        data = folder.open(name.name, subject)
        return Source(file, SourceModel(data, subject, self._external_folder(Path(path))))

    def external_files(self, path: str) -> list[Path]:
        """Return the files with external data of the model at ``path``, as far as they are known."""
        if not path:
            return []
        try:
            return self.of_model(path, None).model.external_files()
        except ContextError:  # the model is not in the ONNX format; other formats have no external data
            return []

    def _open(self, folder: ModelFolder | None, file: str) -> SourceModel:
        if self._buffer is not None:
            return SourceModel(self._buffer, "the source model in memory", self._external_folder(None))
        if self._path:
            folder, file = ModelFolder.of(self._path), Path(self._path).name
        subject = f"source model {file!r}"
        if folder is None or not file:
            raise ContextError(
                f"the compiled model has no weights, and the path of its {subject} is not known: set "
                "ep.context_source_model_path to the path of the source model"
            )
        try:
            data = folder.open(file, subject)
        except ContextError as error:
            raise ContextError(
                f"{error}. The compiled model has no weights of its own: set ep.context_source_model_path to the path "
                "of its source model"
            ) from error
        return SourceModel(data, subject, self._external_folder(folder.path / file))

    def _external_folder(self, model: Path | None) -> ModelFolder | None:
        """Return the folder of the external data of the source at ``model``; None if the model is in memory."""
        beside = None if model is None else ModelFolder.of(model)
        if self._folder:
            return ModelFolder(Path(self._folder), Path(self._folder) if beside is None else beside.home)
        return beside


def _buffer(session_options: Any) -> memoryview | None:
    """Return the source model that the application passes in memory; None if it passes none."""
    if host.api_version() < BUFFER_SINCE:
        return None
    data, size = ffi.new("const void **"), ffi.new("size_t *")
    host.check_status(host.ep_api().SessionOptionsGetWeightlessSourceModelBuffer(session_options, data, size))
    return None if data[0] == ffi.NULL else memoryview(ffi.buffer(data[0], size[0])).toreadonly()
