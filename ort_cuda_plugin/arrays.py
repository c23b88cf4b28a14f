"""Shares device arrays of other libraries (CuPy, PyTorch, Numba, JAX) with sessions, without a copy.

The protocols are DLPack (version 1.0, https://dmlc.github.io/dlpack/latest/python_spec.html) and the CUDA array
interface (version 3, https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html).
"""

from __future__ import annotations

import ctypes
import math
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from .abi.core import core, driver_error_text, ffi, lib
from .abi.device import CudaError, Device
from .ep.device.identity import is_our_name
from .model.ir import DType
from .plugin_library import get_ep_name

if TYPE_CHECKING:
    import onnxruntime as ort


class SupportsDlpack(Protocol):
    """An array that DLPack can share."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, Any]: ...


class SupportsCudaArrayInterface(Protocol):
    """An array with the CUDA array interface."""

    @property
    def __cuda_array_interface__(self) -> Any: ...


DeviceArray: TypeAlias = "SupportsDlpack | SupportsCudaArrayInterface"
"""An array in CUDA memory, of CuPy, PyTorch, Numba or JAX."""

_DL_CUDA, _DL_CUDA_MANAGED = 2, 13
_LEGACY_STREAM = 1
"""Number of CUDA's default stream in both protocols."""

DLPACK_TYPES = {
    (0, 8): DType.INT8,
    (0, 16): DType.INT16,
    (0, 32): DType.INT32,
    (0, 64): DType.INT64,
    (1, 8): DType.UINT8,
    (1, 16): DType.UINT16,
    (1, 32): DType.UINT32,
    (1, 64): DType.UINT64,
    (2, 16): DType.FLOAT16,
    (2, 32): DType.FLOAT32,
    (2, 64): DType.FLOAT64,
    (4, 16): DType.BFLOAT16,
    (6, 8): DType.BOOL,
}
"""Element types by DLPack's type code and bits."""


def bind_input(binding: ort.IOBinding, name: str, array: DeviceArray) -> None:
    """Bind a device array as the input ``name`` of an ``onnxruntime.IOBinding``, without a copy.

    The binding keeps ``array`` alive. The call waits for the work that produces the contents of the array: on the
    stream that the CUDA array interface names, or with DLPack on the default stream.

    Args:
        array: an object with ``__dlpack__`` or ``__cuda_array_interface__``, C-contiguous and on the session's device.

    Raises:
        TypeError: the array has neither protocol, is not in CUDA memory, or has an element type that ONNX lacks.
        ValueError: the array is not contiguous, or its memory belongs to no known device.

    Examples:
        ``x`` may also be an array of CuPy, PyTorch, Numba or JAX.

        >>> session = ort_cuda_plugin.session("model.onnx", emulate=True)
        >>> x = ort_cuda_plugin.as_cuda_array(ort.OrtValue.ortvalue_from_numpy(array, "cuda", 0))
        >>> binding = session.io_binding()
        >>> ort_cuda_plugin.bind_input(binding, "x", x)
        >>> binding.bind_output("y")
        >>> session.run_with_iobinding(binding)
        >>> binding.copy_outputs_to_cpu()[0].shape
        (2, 4)
    """
    memory = _describe(array, f"input {name!r}")
    binding._iobinding.bind_input(name, memory.ort_device(), memory.dtype.onnx, list(memory.shape), memory.address)
    _keep(binding, ("input", name), memory)


def bind_output(binding: ort.IOBinding, name: str, array: DeviceArray) -> None:
    """Bind a device array as the memory of the output ``name``. The array must have the output's shape and element
    type.

    Arguments and errors as in `bind_input`; also ValueError if the array is read-only.

    Examples:
        >>> session = ort_cuda_plugin.session("model.onnx", emulate=True)
        >>> memory = ort.OrtValue.ortvalue_from_shape_and_type([2, 4], np.float32, "cuda", 0)
        >>> binding = session.io_binding()
        >>> binding.bind_cpu_input("x", array)
        >>> ort_cuda_plugin.bind_output(binding, "y", ort_cuda_plugin.as_cuda_array(memory))
        >>> session.run_with_iobinding(binding)
        >>> memory.numpy().shape
        (2, 4)
    """
    memory = _describe(array, f"output {name!r}")
    if memory.is_read_only:
        raise ValueError(f"output {name!r}: the array is read-only. Bind a writable array")
    binding._iobinding.bind_output(name, memory.ort_device(), memory.dtype.onnx, list(memory.shape), memory.address)
    _keep(binding, ("output", name), memory)


class CudaArray:
    """View of an ``onnxruntime.OrtValue`` in device memory with both protocols, without a copy.

    ``cupy.asarray(view)``, ``torch.as_tensor(view)`` and ``numba.cuda.as_cuda_array(view)`` share the value's memory
    and keep the value alive. The Run that computes the value must have finished, which is so when ``run`` has returned.

    Examples:
        >>> devices = ort_cuda_plugin.register(emulate=True)
        >>> value = ort.OrtValue.ortvalue_from_numpy(array, "cuda", 0)
        >>> ort_cuda_plugin.as_cuda_array(value).__cuda_array_interface__["typestr"]
        '<f4'
    """

    def __init__(self, value: ort.OrtValue) -> None:
        self.value = value
        self.shape = tuple(value.shape())
        self.dtype = DType(value.element_type())

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.dtype is DType.BFLOAT16 or not self.dtype.is_supported:
            raise AttributeError(
                f"CudaArray: the CUDA array interface has no type for {self.dtype.name}. Use DLPack, for example "
                "torch.from_dlpack"
            )
        return {
            "shape": self.shape,
            "typestr": np.dtype(self.dtype.numpy).str,
            "data": (self.value.data_ptr() if math.prod(self.shape) else 0, False),
            "strides": None,
            "stream": None,
            "version": 3,
        }

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        if options.get("copy") or options.get("dl_device") not in (None, self.__dlpack_device__()):
            raise BufferError(
                "CudaArray: __dlpack__ can only share the memory, but the caller asked for a copy or another device. "
                "Leave out copy and dl_device, and copy the resulting array"
            )
        return self.value.__dlpack__(stream=stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.value.__dlpack_device__()
        return device


def as_cuda_array(value: ort.OrtValue) -> CudaArray:
    """Return a view of an ``onnxruntime.OrtValue`` for other libraries, without a copy.

    Raises:
        TypeError: ``value`` is not an OrtValue, or not a tensor in device memory.

    Examples:
        >>> devices = ort_cuda_plugin.register(emulate=True)
        >>> value = ort.OrtValue.ortvalue_from_numpy(array, "cuda", 0)
        >>> ort_cuda_plugin.as_cuda_array(value).shape
        (2, 8)
    """
    if not hasattr(value, "is_tensor"):
        raise TypeError(f"value: expected an onnxruntime.OrtValue, got {type(value).__name__}")
    if not value.is_tensor() or value.device_name() == "cpu":
        raise TypeError(
            "value: expected a tensor in device memory, got a tensor in host memory or a value that is not a tensor. "
            "Call numpy() on a tensor in host memory"
        )
    return CudaArray(value)


# ---- descriptions of arrays ----


@dataclass(frozen=True)
class ArrayMemory:
    """The memory of an array. ``owner`` keeps ``address`` valid."""

    owner: Any
    address: int
    shape: tuple[int, ...]
    dtype: DType
    is_read_only: bool
    device: Device

    def ort_device(self) -> Any:
        from onnxruntime.capi.onnxruntime_inference_collection import OrtDevice

        vendor = offered_memory_info(self.device, "the array").device_vendor_id
        return OrtDevice.make("gpu", self.device.ordinal, vendor)._get_c_device()


def offered_memory_info(device: Device, what: str) -> Any:
    """Return the ``OrtMemoryInfo`` under which ONNX Runtime knows the device. Errors call the device's array ``what``.

    Raises:
        ValueError: the plugin does not offer the device to ONNX Runtime.
    """
    import onnxruntime as ort

    wanted = (str(device.ordinal), str(int(device.is_emulated)))
    for offered in ort.get_ep_devices():
        known = offered.ep_metadata
        if is_our_name(offered.ep_name) and (known.get("cuda_device_id"), known.get("emulated")) == wanted:
            return offered.memory_info(ort.OrtDeviceMemoryType.DEFAULT)
    raise ValueError(
        f"{what} is on {'emulated' if device.is_emulated else 'CUDA'} device {device.ordinal}, which {get_ep_name()} "
        "does not offer to ONNX Runtime. Call ort_cuda_plugin.register first, or copy the tensor to a device that "
        "register returns"
    )


_kept: weakref.WeakKeyDictionary[Any, dict[tuple[str, str], ArrayMemory]] = weakref.WeakKeyDictionary()


def _keep(binding: Any, key: tuple[str, str], memory: ArrayMemory) -> None:
    _kept.setdefault(binding, {})[key] = memory


def memory_of(value: Any, what: str) -> ArrayMemory:
    """Return the memory of an ``onnxruntime.OrtValue``, or of an array of another library.

    ``what`` names it in errors, which are those of `as_cuda_array` and `bind_input`.
    """
    if not hasattr(value, "is_tensor"):
        return _describe(value, what)
    view = as_cuda_array(value)
    address = value.data_ptr() if math.prod(view.shape) else 0
    device = _device_of(address, math.prod(view.shape), what)
    return ArrayMemory(value, address, view.shape, view.dtype, False, device)


def _describe(array: Any, what: str) -> ArrayMemory:
    if hasattr(array, "__dlpack__") and array.__dlpack_device__()[0] in (_DL_CUDA, _DL_CUDA_MANAGED):
        return _from_dlpack(array, what)
    if hasattr(array, "__cuda_array_interface__"):
        return _from_interface(array, array.__cuda_array_interface__, what)
    raise TypeError(
        f"{what}: expected an array in CUDA memory, with __cuda_array_interface__ or __dlpack__; got "
        f"{type(array).__name__}. For host memory use IOBinding.bind_cpu_input or IOBinding.bind_output"
    )


def _from_interface(array: Any, interface: dict[str, Any], what: str) -> ArrayMemory:
    address, is_read_only = interface["data"]
    shape = tuple(interface["shape"])
    if interface.get("mask") is not None:
        raise TypeError(f"{what}: masked arrays are not supported. Fill the masked elements with a value first")
    try:
        element = np.dtype(interface["typestr"])
        dtype = DType.from_numpy(element)
    except (KeyError, TypeError, ValueError):
        dtype = DType.STRING
    if not dtype.is_supported:
        raise TypeError(
            f"{what}: got an array of type {interface['typestr']!r}, but the plugin has no device tensors of this "
            "element type. Convert the array first"
        )
    strides = interface.get("strides")
    if strides is not None:
        _check_contiguous(shape, [stride / element.itemsize for stride in strides], what)
    device = _device_of(int(address), math.prod(shape), what)
    stream = interface.get("stream")
    if stream is not None:
        device.call("StreamSynchronize", ffi.cast("CUstream", int(stream)))
    return ArrayMemory(array, int(address), shape, dtype, bool(is_read_only), device)


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _from_dlpack(array: Any, what: str) -> ArrayMemory:
    # The capsule is read but not consumed, so its destructor releases the array.
    capsule = array.__dlpack__(stream=_LEGACY_STREAM)
    tensor = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    shape = tuple(tensor.shape[: tensor.ndim])
    dtype = DLPACK_TYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        raise TypeError(
            f"{what}: got an array of DLPack type code {tensor.code} with {tensor.bits} bits and {tensor.lanes} lanes, "
            "but the plugin has no device tensors of this element type. Convert the array first"
        )
    if dtype is DType.UINT8 and str(getattr(array, "dtype", "")).rpartition(".")[2].startswith("bool"):
        dtype = DType.BOOL  # older producers of DLPack describe bool as uint8
    if tensor.strides:
        _check_contiguous(shape, tensor.strides[: tensor.ndim], what)
    address = (tensor.data or 0) + tensor.byte_offset
    device = _device_of(address, math.prod(shape), what)
    device.call("StreamSynchronize", ffi.cast("CUstream", _LEGACY_STREAM))
    return ArrayMemory((array, capsule), address, shape, dtype, False, device)


def _check_contiguous(shape: tuple[int, ...], strides: Any, what: str) -> None:
    expected = 1
    for dim, stride in zip(reversed(shape), reversed(list(strides)), strict=True):
        if dim > 1 and stride != expected and math.prod(shape):
            raise ValueError(f"{what}: got an array that is not C-contiguous. Pass a contiguous copy")
        expected *= dim


def _device_of(address: int, size: int, what: str) -> Device:
    """Return the device that owns the memory, according to its driver."""
    ordinal = ffi.new("int *")
    drivers = [(core().driver_cuda(ffi.new("const char **")), False), (core().driver_emulator(), True)]
    for driver, is_emulated in drivers:
        if driver == ffi.NULL or is_emulated != bool(core().emu_owns(address)):
            continue
        result = driver.PointerGetAttribute(ordinal, 9, address)
        if result == lib.CUDA_SUCCESS:
            return Device(driver, ordinal[0], is_emulated=is_emulated)
        if result != lib.CUDA_ERROR_INVALID_VALUE:
            raise CudaError("PointerGetAttribute", result, driver_error_text(driver, result))
    if size == 0:
        raise ValueError(
            f"{what}: the device of an array without elements is unknown. Bind an input by IOBinding.bind_cpu_input, "
            "as a NumPy array of the same shape, an output by IOBinding.bind_output"
        )
    raise ValueError(
        f"{what}: address {address:#x} of the array is not in the memory of any {get_ep_name()} device. Copy the array "
        "to a device that ort_cuda_plugin.devices lists"
    )
