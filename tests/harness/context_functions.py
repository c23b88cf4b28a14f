"""Compiled models whose files an application reads and writes by callbacks, in the C API of ONNX Runtime 1.28 to 1.30.

In these versions the functions that set the callbacks are experimental, and are looked up by name. ``main`` runs in a
process of its own.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

import ort_cuda_plugin
from contexts import BINARY, row_model, rows
from ort_cuda_plugin.abi import host
from ort_cuda_plugin.abi.core import ffi

COMPILE_API = {
    "CreateModelCompilationOptionsFromSessionOptions": 1,
    "SetInputModelPath": 2,
    "SetOutputModelPath": 4,
    "SetEpContextEmbedMode": 7,
    "CompileModel": 8,
}


def compile_call(name: str, parameters: str, *arguments: Any) -> None:
    slots = ffi.cast("void **", host.api().GetCompileApi())
    host.check_status(ffi.cast(f"OrtStatus *(*)({parameters})", slots[COMPILE_API[name]])(*arguments))


def by_name(name: str, *arguments: Any) -> None:
    function = host.api().GetExperimentalFunction(f"{name}_SinceV28".encode())
    assert function != ffi.NULL, name
    host.check_status(ffi.cast("OrtStatus *(*)(void *, void *, void *)", function)(*arguments))


class Application:
    """An application with read and write callbacks: ``files`` by name, and its session options in C."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.env, self.options = ffi.new("OrtEnv **"), ffi.new("OrtSessionOptions **")
        api = host.api()
        host.check_status(api.CreateEnv(2, b"test", self.env))
        host.check_status(api.CreateSessionOptions(self.options))
        devices, count = ffi.new("const OrtEpDevice *const **"), ffi.new("size_t *")
        host.check_status(api.GetEpDevices(self.env[0], devices, count))
        own = [devices[0][i] for i in range(count[0]) if ffi.string(api.EpDevice_EpName(devices[0][i])) == EP_NAME]
        keys, values = ffi.new("char[]", b"context_allow_host_code"), ffi.new("char[]", b"1")
        host.check_status(
            api.SessionOptionsAppendExecutionProvider_V2(
                self.options[0],
                self.env[0],
                ffi.new("const OrtEpDevice *[]", own[:1]),
                1,
                ffi.new("const char *[]", [keys]),
                ffi.new("const char *[]", [values]),
                1,
            )
        )
        self.write = ffi.callback("void *(void *, const char *, const void *, size_t)", self._write)
        self.read = ffi.callback("void *(void *, const char *, OrtAllocator *, void **, size_t *)", self._read)

    def _write(self, _: Any, name: Any, data: Any, size: int) -> Any:
        self.files[ffi.string(name).decode()] = bytes(ffi.buffer(data, size))
        return ffi.NULL

    def _read(self, _: Any, name: Any, allocator: Any, out: Any, size: Any) -> Any:
        data = self.files.get(ffi.string(name).decode())
        if data is None:
            return host.make_status(3, "the application has no such file")
        host.check_status(host.api().AllocatorAlloc(allocator, len(data), out))
        ffi.memmove(out[0], data, len(data))
        size[0] = len(data)
        return ffi.NULL

    def compile(self, source: Path, output: Path) -> None:
        made = ffi.new("void **")
        compile_call(
            "CreateModelCompilationOptionsFromSessionOptions",
            "void *, void *, void **",
            self.env[0],
            self.options[0],
            made,
        )
        compile_call("SetInputModelPath", "void *, const char *", made[0], ffi.new("char[]", bytes(source)))
        compile_call("SetOutputModelPath", "void *, const char *", made[0], ffi.new("char[]", bytes(output)))
        compile_call("SetEpContextEmbedMode", "void *, bool", made[0], False)
        by_name("OrtCompileApi_ModelCompilationOptions_SetEpContextDataWriteFunc", made[0], self.write, ffi.NULL)
        compile_call("CompileModel", "void *, void *", self.env[0], made[0])

    def load(self, path: Path) -> None:
        """Create a session without running it. Raises OrtError."""
        by_name("OrtApi_SessionOptions_SetEpContextDataReadFunc", self.options[0], self.read, ffi.NULL)
        session = ffi.new("OrtSession **")
        host.check_status(host.api().CreateSession(self.env[0], bytes(path), self.options[0], session))
        host.api().ReleaseSession(session[0])


EP_NAME = ort_cuda_plugin.get_ep_name().encode()


def main() -> None:
    ort_cuda_plugin.register(emulate=True)
    binary = BINARY.format("m")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "m.onnx").write_bytes(row_model())
        application = Application()
        application.compile(folder / "m.onnx", folder / "m_ctx.onnx")
        assert sorted(path.name for path in folder.iterdir()) == ["m.onnx", "m_ctx.onnx"], [*folder.iterdir()]
        assert list(application.files) == [binary]
        before = ort_cuda_plugin.counters()["plan_variants_built"]
        application.load(folder / "m_ctx.onnx")
        assert ort_cuda_plugin.counters()["plan_variants_built"] == before
        # The bytes that the write callback got are a valid context file, next to the compiled model.
        (folder / binary).write_bytes(application.files.pop(binary))
        options = ort.SessionOptions()
        options.add_provider_for_devices(ort_cuda_plugin.register(emulate=True)[:1], {"context_allow_host_code": "1"})
        x = rows(2, 3)
        (actual,) = ort.InferenceSession(str(folder / "m_ctx.onnx"), options).run(None, {"x": x})
        (expected,) = ort.InferenceSession(row_model(), providers=["CPUExecutionProvider"]).run(None, {"x": x})
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
        try:  # the file exists on disk, but the application's read callback no longer has it
            application.load(folder / "m_ctx.onnx")
        except host.OrtError as error:
            print(error.code, error)
        else:
            sys.exit("a session without its file")
