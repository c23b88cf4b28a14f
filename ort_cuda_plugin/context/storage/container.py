"""Container format of contexts: a header, aligned arrays and a JSON index (``docs/context_format.md``).

A container is untrusted input. Each number is checked before it is used, and the contents of an array are compared with
its hash before anything reads them.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ...model.open_file import OpenFile
from .errors import ContextError
from .files import Buffer, Readable, read, write_whole
from .hashing import array_digest, in_pieces, read_array

MAGIC = b"\x89OCPCTX\n"
VERSION = (1, 2)
HEADER = struct.Struct("<8sHHIQQQ32s")
"""Header fields: magic, major and minor version, 0, size of the file, offset, size and SHA-256 of the index.

Sizes and offsets are in bytes.
"""
FIRST_ARRAY = 128
ALIGNMENT = 64
MAX_INDEX_BYTES = 1 << 28
MAX_ARRAYS = 1 << 20

Json: TypeAlias = Any


@dataclass(frozen=True)
class _Array:
    """The contents of an array: in memory, in a file, or from the function ``contents``."""

    nbytes: int
    digest: bytes
    contents: Readable | Callable[[], Buffer]
    offset: int = 0

    def pieces(self) -> Iterator[Buffer]:
        """Yield the contents block by block, so that memory never holds all of a file. Raises ContextError."""
        if callable(self.contents):
            data = self.contents()
            if len(memoryview(data)) != self.nbytes:
                raise ContextError(
                    f"a weight changed while the model was compiled: got {len(memoryview(data))} bytes, expected "
                    f"{self.nbytes}. Compile the model again, and do not change its weights meanwhile"
                )
            yield data
        else:
            for start, length in in_pieces(self.nbytes):
                yield read(self.contents, self.offset + start, length, "the compiled model that was written before")


class Builder:
    """Collects arrays for a container; equal ones are stored once."""

    def __init__(self) -> None:
        self.arrays: list[_Array] = []
        self._numbers: dict[tuple[int, bytes], int] = {}

    def add(self, data: Buffer | np.ndarray[Any, Any], again: Callable[[], Buffer] | None = None) -> int:
        """Add an array and return its number. The contents must not change until the container is written.

        ``again`` returns the contents when the container is written, so that memory need not hold them until then.
        """
        if isinstance(data, np.ndarray):
            data = array_bytes(data)
        view = memoryview(data)
        digest = array_digest(view)
        number = self._numbers.setdefault((len(view), digest), len(self.arrays))
        if number == len(self.arrays):
            self.arrays.append(_Array(len(view), digest, again or view))
        return number

    def pieces(self, contents: dict[str, Json]) -> Iterator[Buffer]:
        """Yield the bytes of the container. ``contents`` is its index without ``arrays``.

        Raises:
            ContextError: the container would have more arrays, or a longer index, than a reader accepts.
        """
        rows = []
        position = FIRST_ARRAY
        for array in self.arrays:
            rows.append([position, array.nbytes, array.digest.hex()])
            position = _aligned(position + array.nbytes)
        index = to_json({"arrays": rows, **contents})
        if len(rows) > MAX_ARRAYS or len(index) > MAX_INDEX_BYTES:
            raise ContextError(
                f"the context is too large: got {len(rows)} arrays and an index of {len(index)} bytes, expected at most"
                f" {MAX_ARRAYS} and {MAX_INDEX_BYTES}. Compile for fewer architectures or shapes"
            )
        digest = hashlib.sha256(index).digest()
        header = HEADER.pack(MAGIC, *VERSION, 0, position + len(index), position, len(index), digest)
        yield header.ljust(FIRST_ARRAY, b"\0")
        for array in self.arrays:
            yield from array.pieces()
            yield bytes(_aligned(array.nbytes) - array.nbytes)
        yield index

    def to_bytes(self, contents: dict[str, Json]) -> bytes:
        """Return the container in memory. Raises as `pieces`."""
        return b"".join(self.pieces(contents))

    def write(self, path: Path, contents: dict[str, Json]) -> None:
        """Write the container atomically: readers see all of it, or the previous file at ``path``.

        Raises:
            ContextError: as `pieces`, or the file cannot be written.
        """
        self._keep(write_whole(path, self.pieces(contents), f"context {path}"))

    def detach(self, contents: dict[str, Json]) -> bytes:
        """Return the container in memory; from then on, read arrays from the returned bytes. Raises as `pieces`."""
        data = self.to_bytes(contents)
        self._keep(data)
        return data

    def _keep(self, container: Readable) -> None:
        """Read the arrays from the written container from now on, so that their sources may be freed."""
        position = FIRST_ARRAY
        for number, array in enumerate(self.arrays):
            self.arrays[number] = replace(array, contents=container, offset=position)
            position = _aligned(position + array.nbytes)


class Container:
    """A container in ``data``. Errors call the container ``subject``; ``index`` is its parsed JSON index.

    Raises:
        ContextError: the bytes are damaged, or not a container of a version that this code reads.
    """

    def __init__(self, data: Readable, subject: str) -> None:
        self.subject = subject
        self.data = data
        self.index = self._read_index()
        self._places = self._read_places()
        self._checked: set[int] = set()

    def damaged(self, what: str) -> ContextError:
        """Return the error for a context that contradicts itself."""
        return ContextError(f"{self.subject} is damaged ({what}); compile the model again")

    def digest(self, number: Json) -> bytes:
        """Return the hash of an array. Raises ContextError if the array does not exist."""
        return self._place(number)[2]

    def array(self, number: Json) -> memoryview:
        """Return the contents of an array, checked against its hash.

        If the container is a file, each call reads them anew.

        Raises:
            ContextError: the array does not exist, or its contents are not those that were stored.
        """
        offset, length, digest = self._place(number)
        if isinstance(self.data, OpenFile):
            try:
                view, found = read_array(self.data, offset, length)
            except OSError as error:
                raise ContextError(f"{self.subject}: {error}") from error
        else:
            view = memoryview(self.data)[offset : offset + length]
            found = digest if number in self._checked else array_digest(view)
            self._checked.add(number)
        if found != digest:
            raise self.damaged(f"the hash of array {number} does not match")
        return view

    def _place(self, number: Json) -> tuple[int, int, bytes]:
        if type(number) is not int or not 0 <= number < len(self._places):
            raise self.damaged(f"it has no array {number!r}")
        return self._places[number]

    def _read_index(self) -> dict[str, Json]:
        if len(self.data) < HEADER.size:
            raise self.damaged(f"it has {len(self.data)} bytes, and its header alone {HEADER.size}")
        header = read(self.data, 0, HEADER.size, self.subject)
        magic, major, minor, zero, size, offset, length, digest = HEADER.unpack(header)
        if magic != MAGIC:
            raise ContextError(
                f"{self.subject} begins with {magic!r}, expected {MAGIC!r} as in contexts of this plugin. Compile the "
                "model again"
            )
        if major != VERSION[0]:
            raise ContextError(
                f"{self.subject} has format {major}.{minor}, this plugin reads {VERSION[0]}.x; compile the model again"
            )
        if size != len(self.data):
            raise self.damaged(f"it has {len(self.data)} bytes, expected {size}")
        if zero:
            raise self.damaged(f"a reserved number in its header is {zero}, expected 0")
        if length > MAX_INDEX_BYTES or not FIRST_ARRAY <= offset <= size or offset + length != size:
            raise self.damaged(
                f"its index has {length} bytes at offset {offset}, expected up to {MAX_INDEX_BYTES} bytes at the end "
                f"of {size} bytes"
            )
        text = bytes(read(self.data, offset, length, self.subject))
        if hashlib.sha256(text).digest() != digest:
            raise self.damaged("the hash of its index does not match")
        try:
            index = parse_json(text)
        except ValueError as error:
            raise self.damaged(f"its index is malformed: {error}") from error
        if not isinstance(index, dict):
            raise self.damaged("its index is not a JSON object")
        self._end = offset
        return index

    def _read_places(self) -> list[tuple[int, int, bytes]]:
        rows = self.index.get("arrays")
        if not isinstance(rows, list) or len(rows) > MAX_ARRAYS:
            raise self.damaged(f"its index needs a list 'arrays' of at most {MAX_ARRAYS} entries")
        places: list[tuple[int, int, bytes]] = []
        end = FIRST_ARRAY
        for number, row in enumerate(rows):
            try:
                offset, length, digest = row
                places.append((offset, length, bytes.fromhex(digest)))
            except (TypeError, ValueError) as error:
                raise self.damaged(f"the entry of array {number} is malformed") from error
            if type(offset) is not int or type(length) is not int or length < 0:
                raise self.damaged(f"the entry of array {number} is malformed")
            # Offsets must ascend, so a comparison with the previous array's end excludes any overlap.
            if offset % ALIGNMENT or offset < end or offset + length > self._end:
                raise self.damaged(
                    f"array {number} has {length} bytes at offset {offset}, expected a multiple of {ALIGNMENT} from "
                    f"{end} on, and an end of at most {self._end}, where the index begins"
                )
            end = offset + length
        return places


def array_bytes(array: np.ndarray[Any, Any]) -> memoryview:
    """Return the bytes of an array, without a copy if they are in C order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def to_json(value: Json) -> bytes:
    """Return a JSON text of ASCII characters."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def parse_json(text: bytes) -> Json:
    """Parse a JSON text. Raises ValueError if it is malformed, names a key twice, or nests too deeply."""

    def unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a JSON object has the same key twice")
        return found

    def no_constant(name: str) -> None:
        raise ValueError(f"{name} is not a JSON number")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
    except RecursionError:
        raise ValueError("its JSON nests too deeply") from None


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT
