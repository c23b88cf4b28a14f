"""Calls of ONNX Runtime's C API, and readers of its tensors and types."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from ...abi.core import ffi, lib
from ...abi.errors import Error
from ..ir import Array, Constant, DType
from ..packed import unpack_array


class OrtCallError(Error, RuntimeError):
    """A function of ORT's API failed; the message names it."""


class OrtCalls:
    """Calls functions of ``const OrtApi *``, or of ``const OrtEpApi *`` if ``ep_api`` is given."""

    def __init__(self, api: Any, ep_api: Any = None) -> None:
        self.api = api
        self.functions = api if ep_api is None else ep_api
        self._bound: dict[str, Any] = {}

    def call(self, name: str, *args: Any) -> None:
        function = self._bound.get(name)
        if function is None:
            function = self._bound[name] = getattr(self.functions, name)
        status = function(*args)
        if status:
            message = text(self.api.GetErrorMessage(status))
            self.api.ReleaseStatus(status)
            raise OrtCallError(f"{name}: {message}")

    def out(self, name: str, kind: str, *args: Any) -> Any:
        """Call a function whose last parameter is an out pointer to ``kind``; return the value that it stores."""
        out = ffi.new(_pointer_to(kind))
        self.call(name, *args, out)
        return out[0]

    def list(self, count_name: str, name: str, kind: str, owner: Any) -> list[Any]:
        count = self.out(count_name, "size_t", owner)
        if count == 0:
            return []
        items = ffi.new(f"{kind}[]", count)
        self.call(name, owner, items, count)
        return [*items]

    def tensor_data(self, tensor: Any, dtype: DType, dims: tuple[int, ...]) -> Array:
        """Return a view of the elements of an OrtValue in host memory; packed elements are unpacked into a copy."""
        size = stored_bytes(dtype, dims)
        if size == 0:
            return np.empty(dims, dtype.numpy)
        info = self.out("GetTensorTypeAndShape", "OrtTensorTypeAndShapeInfo *", tensor)
        try:
            actual = element_type(self.out("GetTensorElementType", "ONNXTensorElementDataType", info))
            count = self.out("GetTensorShapeElementCount", "size_t", info)
        finally:
            self.api.ReleaseTensorTypeAndShapeInfo(info)
        if actual is not dtype or count != math.prod(dims):
            found = "an unknown type" if actual is None else actual.name
            raise OrtCallError(f"tensor data: got {count} elements of {found}, expected {dtype.name}{list(dims)}")
        data = self.out("GetTensorData", "const void *", tensor)
        return elements(np.frombuffer(ffi.buffer(data, size), np.uint8), dtype, dims)

    def tensor_constant(self, tensor: Any) -> Constant | None:
        """Copy an OrtValue in host memory to a `Constant`; None if device memory cannot hold its element type."""
        info = self.out("GetTensorTypeAndShape", "OrtTensorTypeAndShapeInfo *", tensor)
        try:
            dtype = element_type(self.out("GetTensorElementType", "ONNXTensorElementDataType", info))
            rank = self.out("GetDimensionsCount", "size_t", info)
            dims = ffi.new("int64_t[]", rank)
            self.call("GetDimensions", info, dims, rank)
        finally:
            self.api.ReleaseTensorTypeAndShapeInfo(info)
        if dtype is None or not dtype.is_supported:
            return None
        return Constant.of(self.tensor_data(tensor, dtype, tuple(int(dim) for dim in dims)).copy(), dtype)

    def is_container(self, info: Any) -> bool:
        """Return whether a ``const OrtTypeInfo *`` has a known type that is not a dense tensor."""
        kinds = (lib.ONNX_TYPE_UNKNOWN, lib.ONNX_TYPE_TENSOR)
        return info != ffi.NULL and self.out("GetOnnxTypeFromTypeInfo", "ONNXType", info) not in kinds

    def tensor_type(self, info: Any) -> tuple[DType | None, tuple[int | str | None, ...] | None]:
        """Return element type and dimensions of a ``const OrtTypeInfo *``, None as in `Value` for what is unknown."""
        if info == ffi.NULL or self.out("GetOnnxTypeFromTypeInfo", "ONNXType", info) != lib.ONNX_TYPE_TENSOR:
            return None, None
        tensor = self.out("CastTypeInfoToTensorInfo", "const OrtTensorTypeAndShapeInfo *", info)
        if tensor == ffi.NULL:
            return None, None
        dtype = element_type(self.out("GetTensorElementType", "ONNXTensorElementDataType", tensor))
        if not self.api.TensorTypeAndShape_HasShape(tensor):
            return dtype, None
        rank = self.out("GetDimensionsCount", "size_t", tensor)
        dims, names = ffi.new("int64_t[]", rank), ffi.new("const char *[]", rank)
        self.call("GetDimensions", tensor, dims, rank)
        self.call("GetSymbolicDimensions", tensor, names, rank)
        return dtype, tuple(int(dim) if dim >= 0 else text(name) or None for dim, name in zip(dims, names, strict=True))


@cache
def _pointer_to(kind: str) -> Any:
    """Return the C type of a pointer to ``kind``."""
    return ffi.typeof(ffi.getctype(kind, "*"))


def text(pointer: Any) -> str:
    """Return the UTF-8 text of a ``const char *``; "" for NULL."""
    return "" if pointer == ffi.NULL else ffi.string(pointer).decode(errors="replace")


def element_type(number: int) -> DType | None:
    """Return the type with this number in ONNXTensorElementDataType; None if `DType` lacks it."""
    try:
        return DType.from_ort(int(number))
    except ValueError:  # undefined, or added to ONNX later
        return None


def stored_bytes(dtype: DType, dims: tuple[int, ...]) -> int:
    """Return the size in bytes of a tensor in ORT's packed storage."""
    return (math.prod(dims) * dtype.bits + 7) // 8


def elements(stored: Array, dtype: DType, dims: tuple[int, ...]) -> Array:
    """Convert bytes in ORT's packed storage to an array of ``dtype.numpy``."""
    return unpack_array(stored, dtype, dims) if dtype.is_packed else stored.view(dtype.numpy).reshape(dims)
