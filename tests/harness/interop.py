"""A host of ONNX Runtime's interop API: imports files in memory, and runs sessions on tensors in them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ort_cuda_plugin
from ort_cuda_plugin.abi.core import ffi
from ort_cuda_plugin.abi.host import OrtError, api, check_status
from timelines import SharedFile

OPAQUE_FD = 3  # ORT_EXTERNAL_MEMORY_HANDLE_TYPE_VK_MEMORY_OPAQUE_FD
TIMELINE_FD = 2  # ORT_EXTERNAL_SEMAPHORE_VK_TIMELINE_SEMAPHORE_OPAQUE_FD
FLOAT = 1
VERSION = 24


def ep_devices() -> list[Any]:
    """Return the plugin's ``OrtEpDevice *`` of emulated devices, by ordinal."""
    ort_cuda_plugin.register(emulate=True)
    env, devices, count = ffi.new("OrtEnv **"), ffi.new("const OrtEpDevice *const **"), ffi.new("size_t *")
    check_status(api().CreateEnv(3, b"interop", env))
    check_status(api().GetEpDevices(env[0], devices, count))
    found = [devices[0][i] for i in range(count[0])]
    return [each for each in found if ffi.string(api().EpDevice_EpName(each)) == b"CudaPluginExecutionProvider"]


class Interop:
    """An importer of one device, and what it has imported. Methods raise OrtError for a status of ONNX Runtime."""

    def __init__(self, ordinal: int = 0) -> None:
        self.device = ep_devices()[ordinal]
        self.table = api().GetInteropApi()
        self.importer = ffi.new("OrtExternalResourceImporter **")
        check_status(self.table.CreateExternalResourceImporterForDevice(self.device, self.importer))

    def can_import(self, function: str, kind: int) -> bool:
        out = ffi.new("bool *")
        check_status(getattr(self.table, function)(self.importer[0], kind, out))
        return bool(out[0])

    def memory(self, file: SharedFile | int, nbytes: int, offset: int = 0, **changes: Any) -> Any:
        """Import memory; an ``int`` is a file descriptor. After a failure the descriptor of a file is closed here."""
        members = {"handle_type": OPAQUE_FD, "size_bytes": nbytes, "offset_bytes": offset}
        return self._import("ImportMemory", "OrtExternalMemory", file, **members | changes)

    def semaphore(self, file: SharedFile | int, **changes: Any) -> Any:
        return self._import("ImportSemaphore", "OrtExternalSemaphore", file, **{"type": TIMELINE_FD} | changes)

    def _import(self, function: str, kind: str, file: SharedFile | int, **members: Any) -> Any:
        fd = file if isinstance(file, int) else file.exported()
        members = {"version": VERSION, "native_handle": ffi.cast("void *", fd)} | members
        out = ffi.new(f"{kind}Handle **")
        try:
            check_status(getattr(self.table, function)(self.importer[0], ffi.new(f"{kind}Descriptor *", members), out))
        except OrtError:
            if not isinstance(file, int):
                os.close(fd)  # the import failed, so this process still owns the descriptor
            raise
        return out[0]

    def tensor(self, memory: Any, shape: Sequence[int], offset: int = 0, dtype: int = FLOAT, **changes: Any) -> Any:
        dims = ffi.new("int64_t[]", list(shape)) if shape else ffi.NULL
        members = {"version": VERSION, "element_type": dtype, "shape": dims, "rank": len(shape)}
        desc = ffi.new("OrtExternalTensorDescriptor *", members | {"offset_bytes": offset} | changes)
        out = ffi.new("OrtValue **")
        check_status(self.table.CreateTensorFromMemory(self.importer[0], memory, desc, out))
        return out[0]

    def stream(self) -> Any:
        out = ffi.new("OrtSyncStream **")
        check_status(api().CreateSyncStreamForEpDevice(self.device, ffi.NULL, out))
        return out[0]

    def wait(self, semaphore: Any, stream: Any, value: int) -> None:
        check_status(self.table.WaitSemaphore(self.importer[0], semaphore, stream, value))

    def signal(self, semaphore: Any, stream: Any, value: int) -> None:
        check_status(self.table.SignalSemaphore(self.importer[0], semaphore, stream, value))

    def download(self, tensor: Any, count: int, stream: Any) -> NDArray[np.float32]:
        """Return ``count`` float32 elements of a tensor, copied in the order of the stream, which this waits for."""
        values = np.empty(count, np.float32)
        info, host = ffi.new("OrtMemoryInfo **"), ffi.new("OrtValue **")
        check_status(api().CreateCpuMemoryInfo(0, 0, info))
        pointer, shape = ffi.cast("void *", values.ctypes.data), ffi.new("int64_t[]", [count])
        check_status(api().CreateTensorWithDataAsOrtValue(info[0], pointer, values.nbytes, shape, 1, FLOAT, host))
        api().ReleaseMemoryInfo(info[0])
        try:
            env = ffi.new("OrtEnv **")
            check_status(api().CreateEnv(3, b"interop", env))
            tensors = ffi.new("const OrtValue *[]", [tensor]), ffi.new("OrtValue *[]", [host[0]])
            check_status(api().CopyTensors(env[0], *tensors, stream, 1))
        finally:
            api().ReleaseValue(host[0])
        return values

    def release_memory(self, memory: Any) -> None:
        self.table.ReleaseExternalMemoryHandle(memory)

    def release_semaphore(self, semaphore: Any) -> None:
        self.table.ReleaseExternalSemaphoreHandle(semaphore)

    def close(self) -> None:
        self.table.ReleaseExternalResourceImporter(self.importer[0])


class BoundSession:
    """A session on a stream, whose Runs do not wait, with tensors bound to its inputs and outputs."""

    def __init__(
        self, interop: Interop, model: bytes, stream: Any, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
    ) -> None:
        env = ffi.new("OrtEnv **")
        check_status(api().CreateEnv(3, b"interop", env))
        settings = ffi.new("OrtSessionOptions **")
        check_status(api().CreateSessionOptions(settings))
        handle = int(ffi.cast("uintptr_t", api().SyncStream_GetHandle(stream)))
        entries = {"user_compute_stream": str(handle), "has_user_compute_stream": "1"}
        texts = [[ffi.new("char[]", text.encode()) for text in part] for part in (entries, entries.values())]
        keys, values = (ffi.new("const char *[]", part) for part in texts)
        devices = ffi.new("const OrtEpDevice *[]", [interop.device])
        check_status(
            api().SessionOptionsAppendExecutionProvider_V2(settings[0], env[0], devices, 1, keys, values, len(entries))
        )
        self.session = ffi.new("OrtSession **")
        check_status(api().CreateSessionFromArray(env[0], model, len(model), settings[0], self.session))
        api().ReleaseSessionOptions(settings[0])
        self.run_options = ffi.new("OrtRunOptions **")
        check_status(api().CreateRunOptions(self.run_options))
        entry = (b"disable_synchronize_execution_providers", b"1")
        check_status(api().AddRunConfigEntry(self.run_options[0], *entry))
        self.binding = ffi.new("OrtIoBinding **")
        check_status(api().CreateIoBinding(self.session[0], self.binding))
        for name, value in inputs.items():
            check_status(api().BindInput(self.binding[0], name.encode(), value))
        for name, value in outputs.items():
            check_status(api().BindOutput(self.binding[0], name.encode(), value))

    def run(self) -> None:
        check_status(api().RunWithBinding(self.session[0], self.run_options[0], self.binding[0]))

    def close(self) -> None:
        api().ReleaseIoBinding(self.binding[0])
        api().ReleaseRunOptions(self.run_options[0])
        api().ReleaseSession(self.session[0])
