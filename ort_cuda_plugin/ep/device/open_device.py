"""An opened device: its C object, its properties for lowering, and the modules loaded on it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

from ...abi import host
from ...abi.core import check, core, driver_error_text, ffi, lib, new_error
from ...abi.emulation import configuration
from ...compiler.caches.calibration_cache import stored_calibration
from ...compiler.caches.refusal_cache import refusal_cache
from ...compiler.caches.timing_cache import device_identity
from ...compiler.kernel import KernelSpec
from ...compiler.library.kernel_library import KernelLibrary
from ...compiler.library.shared_memory import declared_bytes, may_ask_in_launch
from ...compiler.targets import BuiltKernel, KernelImage, Target
from ...gpus import Gpu, recognized
from ...gpus.calibration import Calibration, ProbedDevice, Sizes
from ...plan.format import param_kind
from ...plugin_library import plugin_version
from ...program.lowering.context import DeviceProperties
from ...program.steps.libraries import Refusals
from .devices import DeviceInfo, DriverError, emulated_properties, executed_ptx, open_device
from .libraries import LIBRARIES, library_versions, load_libraries, load_stand_ins, opened_libraries

#: Bytes of shared memory that a block can have without an opt-in.
_DEFAULT_SHARED_BYTES = 48 * 1024


def target_of(info: DeviceInfo) -> Target:
    """Return the compilation target of a device. The emulated device's checking mode has a separate target."""
    if not info.emulated:
        return Target.cuda(*info.compute_capability)
    return Target.emulated(check=bool(configuration().check), ptx=executed_ptx())


class LoadedKernel:
    """A kernel's module on a device. Clusters share the module; the last cluster that releases it unloads it."""

    def __init__(self, module: Any, function: Any, name: str, spec: KernelSpec) -> None:
        self.module = module
        self.function = function
        self.name = ffi.new("char[]", name.encode())
        self.params = ffi.new("uint8_t[]", [param_kind(entry) for entry in spec.signature])
        self.users = 0


class OpenDevice:
    """An open device, shared by its sessions: one object per device and process. Thread safe."""

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info
        self.pointer = open_device(info)
        self.driver = core().driver_emulator() if info.emulated else core().driver_cuda(ffi.new("const char **"))
        self.release_substitutes: Callable[[], None] = lambda: None
        self._loaded: dict[KernelSpec, LoadedKernel] = {}
        self._lock = threading.Lock()
        self._library_users = 0

    @property
    def target(self) -> Target:
        """Return the target for which kernels of the device are compiled."""
        return target_of(self.info)

    def properties(self) -> DeviceProperties:
        """Return the device properties on which lowering may depend."""
        if self.info.emulated:
            return replace(emulated_properties(), libraries=load_stand_ins(), refusals=self.refusals)
        gpu = DeviceProperties.gpu(self.info.compute_capability, self.info.multiprocessors, load_libraries())
        return replace(gpu, refusals=self.refusals, calibration=self.calibration)

    @property
    def described(self) -> Gpu:
        """Return the description of the device's GPU model, or of the most similar model that is described."""
        return recognized(self.info.name, self.info.compute_capability, self.info.multiprocessors)

    @property
    def probe_sizes(self) -> Sizes:
        """Return the sizes of the probes that calibrate the device."""
        return Sizes.tiny() if self.info.emulated else Sizes.of(self.described)

    @cached_property
    def calibration(self) -> Calibration | None:
        """Return the rates that `ort-cuda-plugin calibrate` has measured with these `versions` and this plugin.

        None if there are none, and for the emulated device, whose times say nothing about a GPU.
        """
        return None if self.info.emulated else stored_calibration(self.probed)

    @property
    def probed(self) -> ProbedDevice:
        """Return the key of the device's calibration on disk: the GPU, and the versions for which the rates hold."""
        versions = {**self.versions, "plugin": plugin_version()}
        return ProbedDevice.of(self.info.name, self.info.compute_capability, self.info.multiprocessors, versions)

    def forget_calibration(self) -> None:
        """Drop the cached calibration, so that the next session reads it from disk."""
        self.__dict__.pop("calibration", None)

    @cached_property
    def refusals(self) -> Refusals:
        """Return the library calls that were refused on this device by the libraries and the driver in use."""
        return Refusals(refusal_cache().load(self.identity) if self.keeps_refusals else ())

    @property
    def keeps_refusals(self) -> bool:
        """Return whether refusals are stored on disk for later processes.

        On the emulated device only the refusals of the stand-in libraries in `STAND_INS_VARIABLE`'s folder are stored,
        not those of libraries that a test loads itself.
        """
        return not self.info.emulated or bool(load_stand_ins())

    @property
    def identity(self) -> str:
        """Return the device, its driver and its libraries as text; a refusal holds while the text is the same."""
        return device_identity(self.info.name, self.info.compute_capability, self.info.multiprocessors, self.versions)

    @property
    def versions(self) -> dict[str, str]:
        """Return the versions of the driver and of the libraries, "absent" for a library that does not work.

        Opens the libraries first, so that the versions are the same in each process and at any time.
        """
        opened = load_stand_ins() if self.info.emulated else opened_libraries()
        absent = {library.name: "absent" for library in LIBRARIES}
        return {"driver": str(self.info.driver_version), **absent, **library_versions(opened)}

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make the device's context current on this thread for the block, and restore the caller's afterwards.

        Raises:
            PluginError: the device is lost, or this is a forked child.
        """
        error, stay = new_error(), ffi.new("ocp_stay *")
        core().device_enter(self.pointer, stay, error)
        check(error)
        try:
            yield
        finally:
            core().device_leave(stay)

    @contextmanager
    def filling_new_memory(self, byte: int) -> Iterator[None]:
        """Fill each allocation of device memory with this byte, in all threads, while the block runs."""
        core().device_fill_new_memory(self.pointer, byte)
        try:
            yield
        finally:
            core().device_fill_new_memory(self.pointer, -1)

    def acquire_kernels(self, specs: Sequence[KernelSpec]) -> list[LoadedKernel]:
        """Compile and load the kernels of ``specs``, and hold them until `release_kernels`.

        Raises: KernelCompileError: a kernel does not compile. DriverError: the device rejects a kernel.
        """
        compiled = [spec for spec in specs if not isinstance(spec, BuiltKernel)]
        images = dict(zip(compiled, kernel_library().get_many(compiled, self.target), strict=True))
        images.update((spec, spec.image) for spec in specs if isinstance(spec, BuiltKernel))
        held: list[LoadedKernel] = []
        try:
            with self.entered(), self._lock:
                for spec in specs:
                    kernel = self._loaded.get(spec)
                    if kernel is None:
                        kernel = self._loaded[spec] = self._load(images[spec], spec)
                    kernel.users += 1
                    held.append(kernel)
        except BaseException:
            self.release_kernels(held)
            raise
        return held

    def release_kernels(self, kernels: Sequence[LoadedKernel]) -> None:
        """Release kernels that `acquire_kernels` returned. None of them may be running."""
        unused = []
        with self._lock:
            for kernel in kernels:
                kernel.users -= 1
                if kernel.users == 0:
                    unused.append(kernel)
            for spec in [spec for spec, kernel in self._loaded.items() if kernel.users == 0]:
                del self._loaded[spec]
        stay = ffi.new("ocp_stay *")
        if unused and core().device_enter_to_release(self.pointer, stay):
            for kernel in unused:
                self._unload(kernel.module)
            core().device_leave(stay)

    def hold_libraries(self) -> None:
        """Note that a cluster has library problems, until it calls `let_libraries_go`."""
        with self._lock:
            self._library_users += 1

    def let_libraries_go(self) -> None:
        """Note that a cluster has released its library problems. The last cluster also releases calls' substitutes."""
        with self._lock:
            self._library_users -= 1
            is_last = self._library_users == 0
        if is_last:
            self.release_substitutes()

    def synchronize(self) -> None:
        """Wait for all work on the plugin's streams, except for streams that are being captured.

        The driver refuses to wait for the whole device (cuCtxSynchronize) while any code captures a stream.

        Raises:
            PluginError: the device is lost, work failed, or this is a forked child.
        """
        error, stay = new_error(), ffi.new("ocp_stay *")
        # Releasing resources waits here, and must work even while the calling thread captures a CUDA graph.
        is_entered = core().device_enter_to_release(self.pointer, stay)
        core().device_synchronize(self.pointer, error)
        if is_entered:
            core().device_leave(stay)
        check(error)

    def read(self, address: int, data: bytearray) -> None:
        """Copy device memory at ``address`` to ``data``. No pending work may write there.

        Raises:
            DriverError: the copy failed.
            PluginError: there is no stream for the copy, or waiting for the copy failed.
        """
        if not data:
            return
        out, error = ffi.new("ocp_stream **"), new_error()
        with self.entered():
            core().stream_create(self.pointer, out, error)
            check(error)
            try:
                buffer, stream = ffi.from_buffer(data), core().stream_handle(out[0])
                result = self.driver.MemcpyDtoHAsync(buffer, address, len(data), stream)
                self._check(result, "cuMemcpyDtoHAsync", "weights")
                core().stream_synchronize(out[0], error)
                check(error)
            finally:
                core().stream_release(out[0])

    def _load(self, image: KernelImage, spec: KernelSpec) -> LoadedKernel:
        module, function = ffi.new("CUmodule *"), ffi.new("CUfunction *")
        kernel = f"kernel {image.entry}"
        data = ffi.from_buffer(image.data)
        result = self.driver.ModuleLoadData(module, data, len(image.data))
        if result == lib.CUDA_ERROR_OUT_OF_MEMORY and core().device_trim(
            self.pointer
        ):  # memory went back to the driver: try again
            result = self.driver.ModuleLoadData(module, data, len(image.data))
        self._check(result, "cuModuleLoadData", kernel)
        try:
            name = image.entry.encode()
            self._check(self.driver.ModuleGetFunction(function, module[0], name), "cuModuleGetFunction", kernel)
            dynamic = self.info.max_shared_bytes - declared_bytes(image)
            if may_ask_in_launch(spec) and dynamic > _DEFAULT_SHARED_BYTES:
                attribute = lib.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                result = self.driver.FuncSetAttribute(function[0], attribute, dynamic)
                self._check(result, "cuFuncSetAttribute", kernel)
        except BaseException:
            self._unload(module[0])
            raise
        return LoadedKernel(module[0], function[0], image.entry, spec)

    def _unload(self, module: Any) -> None:
        core().device_released(self.pointer, self.driver.ModuleUnload(module), b"cuModuleUnload")

    def _check(self, result: int, call: str, subject: str) -> None:
        if result != lib.CUDA_SUCCESS:
            raise DriverError(f"{call} failed for {subject}: {driver_error_text(self.driver, result)}")


@cache
def kernel_library() -> KernelLibrary:
    """Return the process's kernel library. ONNX Runtime's log says at level INFO which kernels it compiles."""
    library = KernelLibrary()
    library.log = lambda line: host.log("INFO", line)
    return library


_open: dict[tuple[bool, int], OpenDevice] = {}
_open_lock = threading.Lock()


def use_device(info: DeviceInfo) -> OpenDevice:
    """Return the open device of ``info``, and open it on first use.

    Raises:
        PluginError: the device does not exist or cannot be opened.
    """
    key = (info.emulated, info.ordinal)
    with _open_lock:
        device = _open.get(key)
        if device is None or device.info != info:  # the emulator was reconfigured after the device was opened
            device = _open[key] = OpenDevice(info)
        return device


def open_device_at(pointer: Any) -> OpenDevice:
    """Return the open device with this ``ocp_device *``."""
    with _open_lock:
        return next(device for device in _open.values() if device.pointer == pointer)
