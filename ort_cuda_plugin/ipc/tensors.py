"""Tensors in device memory that another process has exported or opens."""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..abi.core import PluginError, check, core, ffi, lib, new_error
from ..abi.device import CudaError, ignored_at_end
from ..arrays import DLPACK_TYPES, memory_of, offered_memory_info
from ..ep.device.devices import open_device
from ..model.ir import DType
from .handles import DTYPES, MemoryHandle, device_of_info, driver_call, find_uuid, uuid_of

if TYPE_CHECKING:
    import onnxruntime as ort

    from ..arrays import DeviceArray

_DL_CODES = {dtype: code for code, dtype in DLPACK_TYPES.items()}
_DL_CUDA = 2
_NVIDIA = 0x10DE
"""Vendor of the devices on which ONNX Runtime's ``OrtValue.from_dlpack`` makes values."""

#: First ONNX Runtime 1.N whose DLPack has bool and bfloat16.
_FULL_DLPACK = 32

_OPEN_ADVICE = (
    "A handle can be opened in another process than its exporter, while the exporter lives and has not freed the tensor"
)


def get_handle(value: ort.OrtValue | DeviceArray) -> MemoryHandle:
    """Return a handle by which another process opens a tensor in device memory.

    The contents are not copied: both processes read and write the same memory. The tensor must stay alive until each
    process that opened it has closed it; the returned handle keeps it alive. The handle gives access to the whole
    allocation of the driver that contains the tensor, so send it only to processes that you trust.

    Args:
        value: an ``OrtValue`` on a device of the plugin, or an array in CUDA memory with ``__dlpack__`` or
            ``__cuda_array_interface__`` (CuPy, PyTorch, Numba, JAX).

    Raises:
        TypeError: ``value`` is not a tensor in device memory, or DLPack lacks its element type.
        ValueError: the tensor has no elements, or CUDA cannot share its memory.
        CudaError: the driver cannot export the memory for another reason.

    Examples:
        >>> devices = ort_cuda_plugin.register(emulate=True)
        >>> value = ort.OrtValue.ortvalue_from_numpy(array, "cuda", 0)
        >>> from ort_cuda_plugin import ipc
        >>> handle = ipc.get_handle(value)
        >>> handle.shape, handle.dtype
        ((2, 8), 'float32')
    """
    memory = memory_of(value, "value")
    if memory.dtype not in _DL_CODES:
        raise TypeError(
            f"value: tensors of {memory.dtype.name} cannot be shared, because DLPack lacks the type. Share a view of "
            "the bytes as uint8"
        )
    device = memory.device
    base, handle = ffi.new("CUdeviceptr *"), ffi.new("CUipcMemHandle *")
    driver_call(device, "MemGetAddressRange", base, ffi.NULL, memory.address)
    try:
        driver_call(device, "IpcGetMemHandle", handle, base[0])
    except CudaError as error:
        if error.code != lib.CUDA_ERROR_INVALID_VALUE:
            raise
        raise ValueError(
            f"value: CUDA can share only memory of cuMemAlloc between processes ({error}). Copy the tensor to an "
            "OrtValue, and do not set arena.use_cuda_mempool; in PyTorch do not use expandable_segments"
        ) from error
    return MemoryHandle(
        memory=bytes(ffi.buffer(handle)),
        offset=memory.address - int(base[0]),
        shape=memory.shape,
        dtype=memory.dtype.name.lower(),
        device=uuid_of(device),
        _owner=memory,
    )


def open_handle(handle: MemoryHandle) -> ImportedTensor:
    """Open a tensor that another process has exported.

    Raises:
        TypeError: ``handle`` is not a MemoryHandle.
        ValueError: this process does not have the device.
        PluginError: the driver cannot open the handle, or the tensor does not lie in the exported memory.

    Examples:
        >>> def consume(handle):  # in another process than the exporter
        ...     with ipc.open_handle(handle) as tensor:
        ...         return tensor.ortvalue().numpy()
    """
    if not isinstance(handle, MemoryHandle):
        raise TypeError(f"handle: expected an ort_cuda_plugin.ipc.MemoryHandle, got {type(handle).__name__}")
    return ImportedTensor(handle)


class ImportedTensor:
    """A tensor in the device memory of another process, opened by `open_handle`.

    ``ortvalue()`` and ``__dlpack__`` share the memory without a copy, and keep it open. A ``with`` block closes the
    tensor at its end. An object that is deleted without `close` closes when no work and no tensor uses the memory.

    Attributes:
        shape: the dimensions.
        dtype: name of the element type, such as "float32".
    """

    def __init__(self, handle: MemoryHandle) -> None:
        self._lock = threading.Lock()  # another thread must not close the memory while a tensor is made
        self._memory: Any = None
        self.shape = handle.shape
        self.dtype = handle.dtype
        self._info = find_uuid(handle.device)
        address, memory, error = ffi.new("uint64_t *"), ffi.new("ocp_ipc_memory **"), new_error()
        device = open_device(self._info)
        if core().ipc_memory_open(device, handle.memory, handle.offset, handle.nbytes, address, memory, error):
            text = ffi.string(error.text).decode(errors="replace")
            raise PluginError(f"{text}. {_OPEN_ADVICE}", error.code)
        self._memory = memory[0]
        self._address = int(address[0])

    @property
    def is_open(self) -> bool:
        """Whether neither `close` nor the end of a ``with`` block has closed the tensor."""
        return self._memory is not None

    def ortvalue(self) -> ort.OrtValue:
        """Return an ``onnxruntime.OrtValue`` in the memory.

        Raises:
            TypeError: ONNX Runtime makes no such value from DLPack. Use `ort_cuda_plugin.bind_input` with this object.
            ValueError: the tensor is closed, or the plugin does not offer the device to ONNX Runtime.
        """
        import onnxruntime as ort

        with self._lock:
            self._check_open()
        vendor = offered_memory_info(device_of_info(self._info), "the tensor").device_vendor_id
        dtype, is_old = DTYPES[self.dtype], core().host_version() < _FULL_DLPACK
        if (dtype is DType.BFLOAT16 and is_old) or vendor != _NVIDIA:
            reason = (
                "while the process also has GPUs, ONNX Runtime makes no OrtValue of a tensor on an emulated device"
                if vendor != _NVIDIA
                else f"ONNX Runtime before 1.{_FULL_DLPACK} makes no OrtValue of a bfloat16 tensor"
            )
            raise TypeError(
                f"tensor: {reason} from DLPack. Pass the tensor to ort_cuda_plugin.bind_input or bind_output"
            )
        return ort.OrtValue.from_dlpack(
            _OldBools(self._capsule(DType.UINT8)) if dtype is DType.BOOL and is_old else self
        )

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        """Return an unversioned (pre-1.0) DLPack capsule.

        The application orders the work of the processes, so ``stream`` is not used.
        """
        if options.get("copy") or options.get("dl_device") not in (None, self.__dlpack_device__()):
            raise BufferError(
                "ImportedTensor: __dlpack__ can only share the memory, but the caller asked for a copy or for another "
                "device. Leave out copy and dl_device, and copy the resulting array"
            )
        return self._capsule(DTYPES[self.dtype])

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DL_CUDA, self._info.ordinal

    def _check_open(self) -> None:
        if self._memory is None:
            raise ValueError("tensor: it is closed. Open the handle again")

    def _capsule(self, dtype: DType) -> Any:
        code, bits = _DL_CODES[dtype]
        shape, error = ffi.new("int64_t[]", list(self.shape) or 1), new_error()
        spec = {"address": self._address, "code": code, "bits": bits, "rank": len(self.shape), "shape": shape}
        with self._lock:
            self._check_open()
            tensor = core().ipc_memory_tensor(self._memory, ffi.new("ocp_dlpack_spec *", spec), error)
        check(error)
        return _make_capsule(int(ffi.cast("uintptr_t", tensor)), _CAPSULE_NAME, _end_of_capsule)

    def close(self) -> None:
        """Wait for the work of sessions on the device, and close the memory. Tell the exporter afterwards.

        Wait for work on streams of your own before. A second call has no effect.

        Raises:
            PluginError: an OrtValue, an array or a binding still uses the memory, or the work failed. The tensor stays
                open.
        """
        error = new_error()
        with self._lock:
            if self._memory is not None:
                core().ipc_memory_close(self._memory, error)
                check(error)
                self._memory = None

    def __enter__(self) -> ImportedTensor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._release()  # the traceback of the error may hold values of the tensor

    def _release(self) -> None:
        with self._lock:
            memory, self._memory = self._memory, None
        if memory is not None:
            core().ipc_memory_release(memory)

    def __del__(self) -> None:
        with suppress(*ignored_at_end):
            self._release()


class _OldBools:
    """A capsule of booleans, described as uint8, with a ``dtype`` by which ONNX Runtime recognizes booleans.

    Only an ONNX Runtime older than `_FULL_DLPACK` needs this object, because its DLPack lacks bool.
    """

    dtype = "bool"

    def __init__(self, capsule: Any) -> None:
        self._bytes = capsule

    def __dlpack__(self) -> Any:
        return self._bytes


# ---- capsules of DLPack ----

_CAPSULE_NAME = ctypes.c_char_p(b"dltensor")
_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_make_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _Destructor)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _delete_tensor(capsule: int) -> None:
    """Delete the tensor of a capsule that no consumer has taken: a consumer renames the capsule."""
    if _is_valid(capsule, b"dltensor"):
        core().ipc_tensor_delete(ffi.cast("void *", _pointer_of(capsule, b"dltensor")))


_end_of_capsule = _Destructor(_delete_tensor)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_end_of_capsule))  # capsules may outlive this module
