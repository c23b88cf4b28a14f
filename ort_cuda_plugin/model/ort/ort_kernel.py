"""Reader of a kernel's node through ORT's ``OrtKernelInfo``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from ...abi.core import ffi, lib
from ..ir import Array, AttrValue, Constant, DType, Graph, Node, Value
from .ort_calls import OrtCallError, OrtCalls, elements, stored_bytes, text

ReadDevice = Callable[[int, bytearray], None]
"""Type of a function that copies device memory at an address into a buffer."""


def read_operator(ort: OrtCalls, info: Any) -> tuple[str, str, int]:
    """Return domain, type and version of the operator; ``info`` is ``const OrtKernelInfo *``."""
    domain = _string(ort, "KernelInfo_GetOperatorDomain", info)
    version = int(ort.out("KernelInfo_GetOperatorSinceVersion", "int", info))
    return "" if domain == "ai.onnx" else domain, _string(ort, "KernelInfo_GetOperatorType", info), version


def read_name(ort: OrtCalls, info: Any) -> str:
    """Return the name of the kernel's node."""
    return _string(ort, "KernelInfo_GetNodeName", info)


def read_attributes(ort: OrtCalls, info: Any, kinds: Mapping[str, str]) -> dict[str, AttrValue]:
    """Return the node's attributes among ``kinds``, which maps names to Python annotations."""
    found = {name: _attribute(ort, info, name, kind) for name, kind in kinds.items()}
    return {name: value for name, value in found.items() if value is not None}


def read_node(
    ort: OrtCalls,
    info: Any,
    attributes: Mapping[str, str],
    read_device: ReadDevice,
    passed_on: Collection[int] = (),
) -> Graph:
    """Return a graph that consists of the kernel's node. Constant inputs become initializers, others graph inputs.

    Args:
        ort: calls of the OrtApi.
        info: ``const OrtKernelInfo *``.
        attributes: the attributes that the node may have, with their Python annotations. OrtKernelInfo cannot list
            a node's attributes.
        read_device: reads constants that ORT has moved to the device.
        passed_on: indices of inputs that are read in each Run even if they are constant, not as initializers.

    Raises:
        OrtCallError: a call of ORT's API failed.
    """
    domain, op_type, version = read_operator(ort, info)
    inputs = [_value(ort, info, "Input", index) for index in range(_count(ort, info, "Input"))]
    outputs = [_value(ort, info, "Output", index) for index in range(_count(ort, info, "Output"))]
    for index, value in enumerate(inputs):
        if value is not None and index not in passed_on:
            value.initializer = _constant(ort, info, index, value, read_device)
    # If the node reads a value twice, the graph has one input for it.
    by_name = {value.name: value for value in reversed(inputs) if value is not None}
    unique = [None if value is None else by_name[value.name] for value in inputs]
    node = Node(
        name=read_name(ort, info),
        op_type=op_type,
        domain=domain,
        since_version=version,
        inputs=tuple(unique),
        outputs=tuple(outputs),
        attributes=read_attributes(ort, info, attributes),
    )
    fed = [value for value in dict.fromkeys(unique) if value is not None and value.initializer is None]
    return Graph(node.label, [node], fed, [value for value in outputs if value is not None], {domain: version})


def _string(ort: OrtCalls, function: str, *arguments: Any) -> str:
    size = ffi.new("size_t *")
    ort.call(function, *arguments, ffi.NULL, size)
    out = ffi.new("char[]", max(size[0], 1))
    ort.call(function, *arguments, out, size)
    return text(out)


def _count(ort: OrtCalls, info: Any, side: str) -> int:
    return int(ort.out(f"KernelInfo_Get{side}Count", "size_t", info))


def _value(ort: OrtCalls, info: Any, side: str, index: int) -> Value | None:
    name = _string(ort, f"KernelInfo_Get{side}Name", info, index)
    if not name:
        return None
    type_info = ort.out(f"KernelInfo_Get{side}TypeInfo", "OrtTypeInfo *", info, index)
    try:
        return Value(name, *ort.tensor_type(type_info))
    finally:
        ort.api.ReleaseTypeInfo(type_info)


def _constant(ort: OrtCalls, info: Any, index: int, value: Value, read_device: ReadDevice) -> Constant | None:
    """Return the `Constant` of a constant input of known shape; None for another input, or an unsupported type."""
    tensor = ffi.new("const OrtValue **")
    is_constant = ffi.new("int *")
    ort.call("KernelInfoGetConstantInput_tensor", info, index, is_constant, tensor)
    dtype, shape = value.dtype, value.shape
    if not is_constant[0] or dtype is None or not dtype.is_supported or shape is None:
        return None
    dims = tuple(dim for dim in shape if isinstance(dim, int))
    if len(dims) != len(shape):
        return None
    return Constant.of(_contents(ort, tensor[0], dtype, dims, read_device), dtype)


def _contents(ort: OrtCalls, tensor: Any, dtype: DType, dims: tuple[int, ...], read_device: ReadDevice) -> Array:
    memory = ort.out("GetTensorMemoryInfo", "const OrtMemoryInfo *", tensor)
    kind = ffi.new("OrtMemoryInfoDeviceType *")
    ort.api.MemoryInfoGetDeviceType(memory, kind)
    if kind[0] == lib.OrtMemoryInfoDeviceType_CPU:
        return ort.tensor_data(tensor, dtype, dims).copy()
    data = bytearray(stored_bytes(dtype, dims))
    read_device(int(ffi.cast("uintptr_t", ort.out("GetTensorData", "const void *", tensor))), data)
    return elements(np.frombuffer(data, np.uint8), dtype, dims)


def _attribute(ort: OrtCalls, info: Any, name: str, kind: str) -> AttrValue | None:
    """Return the value of an attribute; None if the node lacks it.

    Raises TypeError if `READERS` lacks the annotation ``kind``.
    """
    read = READERS.get(kind.removesuffix(" | None"))
    if read is None:
        raise TypeError(f"attribute {name}: a kernel cannot read the type {kind}; supported: {', '.join(READERS)}")
    try:
        return read(ort, info, name.encode())
    except OrtCallError:  # the node lacks the attribute
        return None


def _integer(ort: OrtCalls, info: Any, name: bytes) -> int:
    return int(ort.out("KernelInfoGetAttribute_int64", "int64_t", info, name))


def _number(ort: OrtCalls, info: Any, name: bytes) -> float:
    return float(ort.out("KernelInfoGetAttribute_float", "float", info, name))


def _text(ort: OrtCalls, info: Any, name: bytes) -> str:
    return _string(ort, "KernelInfoGetAttribute_string", info, name)


def _array(ort: OrtCalls, info: Any, name: bytes, suffix: str, element: str) -> list[Any]:
    size = ffi.new("size_t *")
    ort.call(f"KernelInfoGetAttributeArray_{suffix}", info, name, ffi.NULL, size)
    data = ffi.new(f"{element}[]", size[0])
    if size[0]:
        ort.call(f"KernelInfoGetAttributeArray_{suffix}", info, name, data, size)
    return list(data)


def _integers(ort: OrtCalls, info: Any, name: bytes) -> tuple[int, ...]:
    return tuple(int(x) for x in _array(ort, info, name, "int64", "int64_t"))


def _numbers(ort: OrtCalls, info: Any, name: bytes) -> tuple[float, ...]:
    return tuple(float(x) for x in _array(ort, info, name, "float", "float"))


def _tensor(ort: OrtCalls, info: Any, name: bytes) -> Constant | None:
    allocator = ort.out("GetAllocatorWithDefaultOptions", "OrtAllocator *")
    tensor = ort.out("KernelInfoGetAttribute_tensor", "OrtValue *", info, name, allocator)
    try:
        return ort.tensor_constant(tensor)
    finally:
        ort.api.ReleaseValue(tensor)


def _texts(ort: OrtCalls, info: Any, name: bytes) -> tuple[str, ...]:
    allocator = ort.out("GetAllocatorWithDefaultOptions", "OrtAllocator *")
    out, size = ffi.new("char ***"), ffi.new("size_t *")
    ort.call("KernelInfoGetAttributeArray_string", info, name, allocator, out, size)
    found = tuple(text(out[0][i]) for i in range(size[0]))
    for i in range(size[0]):
        ort.call("AllocatorFree", allocator, out[0][i])
    ort.call("AllocatorFree", allocator, out[0])
    return found


READERS: Mapping[str, Callable[[OrtCalls, Any, bytes], AttrValue | None]] = {
    "int": _integer,
    "float": _number,
    "str": _text,
    "Constant": _tensor,
    "tuple[int, ...]": _integers,
    "Ints": _integers,
    "tuple[float, ...]": _numbers,
    "tuple[str, ...]": _texts,
}
"""Annotation of an attribute parameter in an operator's function -> function that reads an attribute of this type."""
