"""Protocol Buffers wire format: reads the fields of a message, and encodes fields.

https://protobuf.dev/programming-guides/encoding describes the format.
"""

from __future__ import annotations

from collections.abc import Iterator

_ONE_BYTE = 128
_DAMAGED = "the bytes are not those of an ONNX model"


def field(number: int, value: int | str | bytes) -> bytes:
    """Encode a field: an integer as a varint, text or bytes with their length."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    groups = bytearray()
    while value >= _ONE_BYTE:
        groups.append(value & 127 | 128)
        value >>= 7
    return bytes([*groups, value])


def messages(data: memoryview, number: int) -> Iterator[memoryview]:
    """Yield the contents of all length-delimited fields (messages, texts, bytes) with a field number."""
    for n, value in fields(data):
        if n == number and isinstance(value, memoryview):
            yield value


def message(data: memoryview, number: int) -> memoryview:
    """Return the contents of the first length-delimited field with a field number, or empty contents."""
    return next(messages(data, number), memoryview(b""))


def text(data: memoryview, number: int) -> str:
    """Return the first text with a field number, or "". Raises ValueError if it is not UTF-8."""
    return str(message(data, number), "utf-8")


def numbers(data: memoryview) -> Iterator[int]:
    """Yield the integers of a packed field. Raises ValueError if the last integer is incomplete."""
    at = 0
    while at < len(data):
        value, at = _read_varint(data, at)
        yield value


def fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield the number and the integer or bytes of each field. Raises ValueError if the message is malformed."""
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _read_varint(data, at)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(kind, -1)
        if kind == 2:
            size, at = _read_varint(data, at)
        if size < 0 or at + size > len(data):
            raise ValueError(_DAMAGED)
        yield key >> 3, data[at : at + size]
        at += size


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """Decode the varint at an offset; return its value and the offset after it."""
    value = shift = 0
    while at < len(data) and shift <= 63:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < _ONE_BYTE:
            return value, at
    raise ValueError(_DAMAGED)
