"""Reads the initializers of an ONNX model without the onnx package, when a context without weights is loaded.

A model is untrusted input. An impossible value raises an error that names the model, and an offset outside of a file is
never read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...model.ir import Array, DType
from ...model.open_file import OpenFile, native_path
from ...model.ort.ort_calls import elements, stored_bytes
from .errors import ContextError
from .files import ModelFolder, Readable, read
from .hashing import array_digest, file_digest

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_GRAPH = 7  # field number in ModelProto
_INITIALIZER = 5  # field number in GraphProto
# Field numbers in TensorProto.
_DIMS, _DATA_TYPE, _INT32_DATA, _NAME, _RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 1, 2, 5, 8, 9, 13, 14
_EXTERNAL_LOCATION = "location"
_PARTS: Final[dict[str, dict[int, str]]] = {
    "model": {_GRAPH: "graph", 25: "function"},
    "graph": {1: "node", _INITIALIZER: "tensor", 15: "sparse tensor"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse tensor", 23: "sparse tensor"},
    "sparse tensor": {1: "tensor", 2: "tensor"},
}
"""Kind of message -> numbers of the fields that may contain tensors -> kind of message in such a field."""
_FIXED_DATA: Final[dict[int, np.dtype[Any]]] = {4: np.dtype("<f4"), 10: np.dtype("<f8")}
_VARINT_DATA: Final = {_INT32_DATA, 7, 11}
_MAX_DIMS = 64
_WINDOW = 1 << 16
"""Bytes that are read from the model at once while numbers are decoded."""

Span = tuple[int, int]


class _Malformed(Exception):
    """The bytes are not a Protocol Buffers message."""


class _Messages:
    """Reads Protocol Buffers messages in ``data``, which errors call ``subject``. Not thread safe."""

    def __init__(self, data: Readable, subject: str) -> None:
        self._data = data
        self._subject = subject
        self._window = b""
        self._start = 0
        self.whole = (0, len(data))

    def contents(self, span: Span) -> memoryview:
        """Return the bytes between two offsets. Raises ContextError if they cannot be read."""
        start, end = span
        return read(self._data, start, end - start, self._subject)

    def varint(self, position: int, end: int) -> tuple[int, int]:
        """Decode the varint at ``position``; return its value and the offset of the byte after it."""
        value = 0
        for shift in range(0, 70, 7):
            if position >= end:
                break
            if not 0 <= position - self._start < len(self._window):
                self._window = bytes(self.contents((position, min(position + _WINDOW, len(self._data)))))
                self._start = position
            byte = self._window[position - self._start]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & (1 << 64) - 1, position
        raise _Malformed

    def fields(self, span: Span) -> Iterator[tuple[int, int, int | Span]]:
        """Yield number, wire type and value of each field of a message. A value is an integer or offsets of bytes."""
        position, end = span
        while position < end:
            key, position = self.varint(position, end)
            number, kind = key >> 3, key & 7
            if kind == _VARINT:
                value, position = self.varint(position, end)
                yield number, kind, value
                continue
            if kind == _BYTES:
                length, position = self.varint(position, end)
            elif kind in (_FIXED32, _FIXED64):
                length = 4 if kind == _FIXED32 else 8
            else:
                raise _Malformed
            if length > end - position:
                raise _Malformed
            yield number, kind, (position, position + length)
            position += length

    def text(self, value: int | Span) -> str:
        return bytes(self.contents(_span(value))).decode()

    def numbers(self, value: int | Span) -> Iterator[int]:
        """Yield the numbers of a repeated field: its one number, or all numbers if the field is packed."""
        if isinstance(value, int):
            yield value
            return
        position, end = value
        while position < end:
            number, position = self.varint(position, end)
            yield number


def _span(value: int | Span) -> Span:
    if isinstance(value, int):
        raise _Malformed
    return value


@dataclass
class SourceTensor:
    """An initializer: type, shape, and location of its elements.

    ``dtype`` is None if its number is not a type of ONNX. ``span`` has the offsets of raw data in the model. ``pieces``
    are fields with typed data: (field number, number or offsets). ``external`` describes external data. ``span`` and
    ``external`` are None for data that is stored in another way.
    """

    name: str = ""
    dtype: DType | None = None
    dims: tuple[int, ...] = ()
    span: Span | None = None
    pieces: list[tuple[int, int | Span]] = field(default_factory=list)
    external: dict[str, str] | None = None

    @property
    def external_location(self) -> str:
        """Return the file with the elements, relative to the model; "" if they are in the model."""
        return "" if self.external is None else self.external.get(_EXTERNAL_LOCATION, "")


class SourceModel:
    """The initializers of a model's graph, by name. Errors call the model ``subject``.

    ``folder`` is the folder of the files with external data; None if the folder is not known.

    Raises:
        ContextError: ``data`` is not an ONNX model.
    """

    def __init__(self, data: Readable, subject: str, folder: ModelFolder | None) -> None:
        self.subject = subject
        self._data = data
        self._folder = folder
        self._messages = _Messages(data, subject)
        self._files: dict[str, OpenFile] = {}
        self.tensors: dict[str, SourceTensor] = {}
        try:
            for number, _, graph in self._messages.fields(self._messages.whole):
                for part, _, value in self._messages.fields(_span(graph)) if number == _GRAPH else ():
                    if part == _INITIALIZER:
                        tensor = self._tensor(_span(value))
                        self.tensors[tensor.name] = tensor
        except (_Malformed, UnicodeDecodeError) as error:
            raise ContextError(f"{subject} is not an ONNX model, or is damaged; use an intact ONNX model") from error

    def external_files(self) -> list[Path]:
        """Return the external data files of all tensors, also of those in subgraphs and functions."""
        if self._folder is None:
            return []
        return [self._folder.path / native_path(name) for name in dict.fromkeys(self._locations()) if name]

    def stored(self, tensor: SourceTensor) -> Array:
        """Return the bytes of an initializer as ONNX Runtime stores them, without a copy if the model has raw data.

        Raises: ContextError: the contents are missing or do not have the size of the shape; the file cannot be read.
        """
        source, start, length = self._place(tensor)
        found = np.frombuffer(read(source, start, length, self.subject), np.uint8)
        self._check_unchanged(source)
        return found

    def digest(self, tensor: SourceTensor) -> bytes:
        """Return the hash of the bytes of `stored` without holding all of them in memory. Raises ContextError."""
        source, start, length = self._place(tensor)
        if not isinstance(source, OpenFile):
            return array_digest(memoryview(source)[start : start + length])
        try:
            found = file_digest(source, start, length)
        except OSError as error:
            raise ContextError(f"{self.subject}: {error}") from error
        self._check_unchanged(source)
        return found

    def array(self, tensor: SourceTensor) -> Array:
        """Return the contents as an array for `Constant`. Raises ContextError as `stored`."""
        stored = self.stored(tensor)
        assert tensor.dtype is not None
        return elements(stored, tensor.dtype, tensor.dims)

    def _locations(self) -> Iterator[str]:
        waiting: list[tuple[str, Span]] = [("model", self._messages.whole)]
        try:
            while waiting:
                kind, span = waiting.pop()
                if kind == "tensor":
                    yield self._tensor(span).external_location
                    continue
                for number, _, value in self._messages.fields(span):
                    if part := _PARTS[kind].get(number):
                        waiting.append((part, _span(value)))
        except (_Malformed, UnicodeDecodeError) as error:
            raise ContextError(
                f"{self.subject} is not an ONNX model, or is damaged; use an intact ONNX model"
            ) from error

    def _place(self, tensor: SourceTensor) -> tuple[Readable, int, int]:
        """Return the source of an initializer's bytes, their offset, and how many they are. Raises ContextError."""
        if tensor.dtype is None or not tensor.dtype.is_supported:
            raise self._unreadable(tensor, "the plugin does not support its element type")
        wanted = stored_bytes(tensor.dtype, tensor.dims)
        if tensor.external is not None:
            return self._external(tensor, tensor.external, wanted)
        if tensor.span is not None:
            source: Readable = self._data
            start, end = tensor.span
        else:
            source = self._listed(tensor, tensor.dtype).data
            start, end = 0, len(source)
        if end - start != wanted:
            raise self._unreadable(tensor, f"it has {end - start} bytes, and shape {list(tensor.dims)} needs {wanted}")
        return source, start, wanted

    def _check_unchanged(self, source: Readable) -> None:
        """Check that a file has not changed since it was opened."""
        try:
            if isinstance(source, OpenFile):
                source.check_unchanged()
        except OSError as error:
            raise ContextError(f"{self.subject}: {error}") from error

    def _unreadable(self, tensor: SourceTensor, why: str) -> ContextError:
        return ContextError(f"initializer {tensor.name!r} of {self.subject} cannot be read: {why}")

    def _tensor(self, span: Span) -> SourceTensor:
        tensor = SourceTensor()
        dims: list[int] = []
        entries: dict[str, str] = {}
        is_external = False
        for number, _, value in self._messages.fields(span):
            if number == _DIMS:
                dims += self._messages.numbers(value)
            elif number == _DATA_TYPE and isinstance(value, int):
                tensor.dtype = DType._value2member_map_.get(value)  # type: ignore[assignment]
            elif number == _NAME:
                tensor.name = self._messages.text(value)
            elif number == _RAW_DATA:
                tensor.span = _span(value)
            elif number == _DATA_LOCATION:
                is_external = value == 1
            elif number == _EXTERNAL_DATA:
                pair = {part: self._messages.text(text) for part, _, text in self._messages.fields(_span(value))}
                entries[pair.get(1, "")] = pair.get(2, "")
            elif number in _FIXED_DATA or number in _VARINT_DATA:
                tensor.pieces.append((number, value))
        if len(dims) > _MAX_DIMS or any(dim >= 1 << 63 for dim in dims):
            raise _Malformed
        tensor.dims = tuple(dims)
        tensor.external = entries if is_external else None
        return tensor

    def _external(self, tensor: SourceTensor, entries: dict[str, str], wanted: int) -> tuple[OpenFile, int, int]:
        try:
            offset, length = int(entries.get("offset", 0)), int(entries.get("length", wanted))
        except ValueError as error:
            given = {name: entries[name] for name in ("offset", "length") if name in entries}
            raise self._unreadable(tensor, f"got {given} for its external data, expected integers") from error
        location = entries.get(_EXTERNAL_LOCATION, "")
        if self._folder is None:
            raise self._unreadable(
                tensor,
                f"the folder of its external data {location!r} is not known. Set "
                "session.model_external_initializers_file_folder_path to this folder",
            )
        if location not in self._files:
            subject = f"external data {location!r} of {self.subject}"
            self._files[location] = self._folder.open(location, subject)
        file = self._files[location]
        if offset < 0 or length != wanted or offset + length > len(file):
            raise self._unreadable(
                tensor,
                f"it has {length} bytes, and shape {list(tensor.dims)} needs {wanted}"
                if length != wanted
                else f"its bytes {offset} to {offset + length} are outside of {location!r} ({len(file)} bytes)",
            )
        return file, offset, length

    def _listed(self, tensor: SourceTensor, dtype: DType) -> Array:
        """Return the bytes of elements that are in the repeated field of their type, such as ``int32_data``."""
        parts: list[Array] = []
        try:
            for number, value in tensor.pieces:
                if number in _FIXED_DATA:
                    parts.append(np.frombuffer(self._messages.contents(_span(value)), _FIXED_DATA[number]))
                else:
                    parts.append(self._numbers(value))
        except (_Malformed, ValueError) as error:
            raise self._unreadable(tensor, "it is damaged") from error
        if not parts:
            return np.empty(0, np.uint8)
        whole = np.concatenate(parts)
        if whole.dtype == np.uint64:
            # Each number of the field holds the bits of an element, or a byte of packed elements.
            whole = whole.astype(f"<u{1 if dtype.is_packed else dtype.itemsize}")
        elif whole.dtype != dtype.numpy:
            raise self._unreadable(
                tensor, f"its elements are in the field for {whole.dtype}, expected the field for {dtype.short}"
            )
        return whole.view(np.uint8)

    def _numbers(self, value: int | Span) -> Array:
        if isinstance(value, tuple):  # `_Messages` is not thread safe, and another thread may use ``self._messages``
            packed = _Messages(bytes(self._messages.contents(value)), self.subject)
            return np.array([*packed.numbers(packed.whole)], np.uint64)
        return np.array([value], np.uint64)
