"""Converts values between NumPy and ONNX Runtime, with the element types that its Python API does not convert."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

Array = NDArray[Any]

_SUB_BYTE: dict[int, tuple[Any, int]] = {
    onnx.TensorProto.INT4: (ml_dtypes.int4, 4),
    onnx.TensorProto.UINT4: (ml_dtypes.uint4, 4),
    onnx.TensorProto.INT2: (ml_dtypes.int2, 2),
    onnx.TensorProto.UINT2: (ml_dtypes.uint2, 2),
    onnx.TensorProto.FLOAT4E2M1: (ml_dtypes.float4_e2m1fn, 4),
}
"""Element types of fewer than 8 bits, with their number of bits."""
_WHOLE_BYTE = {
    onnx.TensorProto.BFLOAT16: ml_dtypes.bfloat16,
    onnx.TensorProto.FLOAT8E4M3FN: ml_dtypes.float8_e4m3fn,
    onnx.TensorProto.FLOAT8E4M3FNUZ: ml_dtypes.float8_e4m3fnuz,
    onnx.TensorProto.FLOAT8E5M2: ml_dtypes.float8_e5m2,
    onnx.TensorProto.FLOAT8E5M2FNUZ: ml_dtypes.float8_e5m2fnuz,
    onnx.TensorProto.FLOAT8E8M0: ml_dtypes.float8_e8m0fnu,
}


USER_DEFINED = 256
"""NumPy's first type number of user-defined types."""


def is_plain(value: Any) -> bool:
    """Return whether ONNX Runtime takes the value's element type from NumPy directly."""
    if value is None or isinstance(value, list):
        return True
    return int(value.dtype.num) < USER_DEFINED


def to_ort_value(array: Array) -> Any:
    """Return an OrtValue in host memory; elements of fewer than 8 bits are packed, the first in the lowest bits."""
    import onnxruntime as ort

    if is_plain(array):
        return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array).reshape(array.shape))
    element_type = helper.np_dtype_to_tensor_dtype(array.dtype)
    value = ort.OrtValue.ortvalue_from_shape_and_type(list(array.shape), element_type)
    data = np.ascontiguousarray(array)
    if element_type in _SUB_BYTE:
        bits = _SUB_BYTE[element_type][1]
        codes = np.zeros(-(-data.size * bits // 8) * 8 // bits, np.uint8)
        codes[: data.size] = data.view(np.uint8).reshape(-1) & ((1 << bits) - 1)
        places = codes.reshape(-1, 8 // bits) << np.arange(0, 8, bits, dtype=np.uint8)
        data = np.bitwise_or.reduce(places, axis=1)
    ctypes.memmove(value.data_ptr(), data.ctypes.data, data.nbytes)
    return value


def from_ort_value(value: Any) -> Any:
    """Return the contents of an OrtValue as an array, of ml_dtypes' type if NumPy has none; a list for a sequence."""
    if not value.is_tensor() or value.element_type() not in (*_SUB_BYTE, *_WHOLE_BYTE):
        contents = value.numpy()  # a view of memory that is freed with the value
        return contents.copy() if isinstance(contents, np.ndarray) else contents
    shape, element_type = tuple(value.shape()), value.element_type()
    count = int(np.prod(shape, dtype=np.int64))
    if element_type in _WHOLE_BYTE:
        dtype = np.dtype(_WHOLE_BYTE[element_type])
        raw = ctypes.string_at(value.data_ptr(), count * dtype.itemsize)
        return np.frombuffer(raw, dtype).reshape(shape)
    sub_byte, bits = _SUB_BYTE[element_type]
    packed = np.frombuffer(ctypes.string_at(value.data_ptr(), (count * bits + 7) // 8), np.uint8)
    codes = (packed[:, None] >> np.arange(0, 8, bits, dtype=np.uint8) & ((1 << bits) - 1)).reshape(-1)[:count]
    if element_type in (onnx.TensorProto.INT4, onnx.TensorProto.INT2):
        sign = 1 << (bits - 1)
        codes = ((codes.astype(np.int8) ^ sign) - sign).view(np.uint8)
    return codes.view(sub_byte).reshape(shape)


def difference(actual: Any, expected: Any, rtol: float, atol: float) -> str:
    """Describe the difference of two values in one line; "" if they agree by the rules of ONNX's test runner.

    The relative tolerance of bfloat16 is at least 2**-6.
    """
    if isinstance(expected, list) or isinstance(actual, list):
        if not isinstance(actual, list) or not isinstance(expected, list) or len(actual) != len(expected):
            return "a different sequence"
        return next((text for a, e in zip(actual, expected, strict=True) if (text := difference(a, e, rtol, atol))), "")
    if expected is None or actual is None:
        if actual is expected:
            return ""
        return "no value instead of a tensor" if actual is None else "a tensor instead of no value"
    actual = np.asarray(actual)
    if actual.shape != expected.shape:
        return f"shape {actual.shape} instead of {expected.shape}"
    if expected.dtype.kind in "OSU":
        return "" if np.array_equal(actual.astype(object), expected.astype(object)) else "different strings"
    if actual.dtype != expected.dtype:
        return f"element type {actual.dtype} instead of {expected.dtype}"
    if expected.dtype == ml_dtypes.bfloat16:
        rtol = max(rtol, 2**-6)
    if expected.dtype.kind not in "biu" and not is_plain(expected):
        actual, expected = actual.astype(np.float32), expected.astype(np.float32)
    elif expected.dtype.kind == "V":
        actual, expected = actual.astype(np.int32), expected.astype(np.int32)
    close = np.isclose(actual, expected, rtol=rtol, atol=atol, equal_nan=True)
    if close.all():
        return ""
    index = np.unravel_index(int(np.argmin(close)), close.shape)
    wrong = close.size - int(close.sum())
    return f"{wrong} of {close.size} elements, the first {actual[index]} instead of {expected[index]}"
