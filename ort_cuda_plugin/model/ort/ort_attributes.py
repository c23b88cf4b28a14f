"""Reader of ``OrtOpAttr`` through ORT's C API."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...abi.core import ffi, lib
from ..ir import Array, AttrValue, Constant, LongList
from .ort_calls import OrtCallError, OrtCalls

LONG = 1 << 12
"""Minimum length of a list attribute that becomes a `LongList`. Lists of sizes and axes are shorter."""


def read_attribute(ort: OrtCalls, attribute: Any) -> AttrValue | None:
    """Return the value of an attribute (``const OrtOpAttr *``); None if ORT cannot read it or the IR lacks its type."""
    try:
        return _readable(ort, attribute)
    except OrtCallError:
        return None


def _readable(ort: OrtCalls, attribute: Any) -> AttrValue | None:
    kind = ort.out("OpAttr_GetType", "OrtOpAttrType", attribute)
    if kind == lib.ORT_OP_ATTR_INT:
        return int(_data(ort, attribute, kind, "int64_t")[0])
    if kind == lib.ORT_OP_ATTR_INTS:
        return _numbers(_data(ort, attribute, kind, "int64_t"), np.int64)
    if kind == lib.ORT_OP_ATTR_FLOAT:
        return float(_data(ort, attribute, kind, "float")[0])
    if kind == lib.ORT_OP_ATTR_FLOATS:
        return _numbers(_data(ort, attribute, kind, "float"), np.float32)
    if kind == lib.ORT_OP_ATTR_STRING:
        return bytes(ffi.buffer(_data(ort, attribute, kind, "char"))).decode(errors="replace")
    if kind == lib.ORT_OP_ATTR_STRINGS:
        parts = bytes(ffi.buffer(_data(ort, attribute, kind, "char"))).split(b"\0")[:-1]
        texts = {part: part.decode(errors="replace") for part in set(parts)}  # long lists repeat few distinct strings
        return tuple(map(texts.__getitem__, parts))
    if kind == lib.ORT_OP_ATTR_TENSOR:
        return _tensor(ort, attribute)
    return None


def _numbers(data: Any, dtype: type[np.int64] | type[np.float32]) -> AttrValue:
    """Return a list of numbers as a tuple, or as a `LongList` if it is long."""
    array: Array = np.frombuffer(ffi.buffer(data), dtype)
    if len(array) < LONG:
        return tuple(array.tolist())
    array.flags.writeable = False
    return LongList(array)


def _data(ort: OrtCalls, attribute: Any, kind: int, element: str) -> Any:
    size = ffi.new("size_t *")
    # With a buffer of 0 bytes, ReadOpAttr stores the required size and returns a status, which is not an error here.
    status = ort.api.ReadOpAttr(attribute, kind, ffi.NULL, 0, size)
    if status != ffi.NULL:
        ort.api.ReleaseStatus(status)
    data = ffi.new(f"{element}[]", size[0] // ffi.sizeof(element))
    if size[0]:
        ort.call("ReadOpAttr", attribute, kind, data, size[0], size)
    return data


def _tensor(ort: OrtCalls, attribute: Any) -> Constant | None:
    tensor = ort.out("OpAttr_GetTensorAttributeAsOrtValue", "OrtValue *", attribute)
    try:
        return ort.tensor_constant(tensor)
    finally:
        ort.api.ReleaseValue(tensor)
