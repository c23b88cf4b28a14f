"""Calls of CUDA driver functions for the selftest, through the plugin's table of driver functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from ..abi.core import driver_error_text, ffi, lib
from ..ep.device.open_device import OpenDevice
from .device import Device
from .sections.case import difference


class Wrong(Exception):
    """A check failed; the message says how."""


class Driver:
    """Calls driver functions, as methods by their names without "cu", with the device's context current."""

    def __init__(self, device: OpenDevice, stack: ExitStack) -> None:
        self._device, self._stack = device, stack

    def __getattr__(self, name: str) -> Callable[..., None]:
        function = getattr(self._device.driver, name)

        def call(*arguments: Any) -> None:
            code = function(*arguments)
            if code != lib.CUDA_SUCCESS:
                raise Wrong(f"cu{name} failed: {driver_error_text(self._device.driver, code)}")

        return call

    def made(self, kind: str, make: str, destroy: str, *arguments: Any) -> Any:
        """Create a driver object with the function ``make``; ``destroy`` is called on it when the check ends."""
        out = ffi.new(f"{kind} *")
        getattr(self, make)(out, *arguments)
        self._stack.callback(getattr(self._device.driver, destroy), out[0])
        return out[0]

    @property
    def context(self) -> Any:
        """Return the device's context."""
        context = ffi.new("CUcontext *")
        self.CtxGetCurrent(context)
        return context[0]

    def destroyed_at_end(self, destroy: str, made: Any) -> None:
        """Call the driver function ``destroy`` on the object ``made`` when the check ends."""
        self._stack.callback(getattr(self._device.driver, destroy), made)

    def memory(self, nbytes: int) -> Any:
        return self.made("CUdeviceptr", "MemAlloc", "MemFree", nbytes)

    def stream(self) -> Any:
        return self.made("CUstream", "StreamCreate", "StreamDestroy", 1)  # 1: CU_STREAM_NON_BLOCKING

    def upload(self, address: Any, data: np.ndarray[Any, Any], stream: Any = ffi.NULL) -> None:
        self.MemcpyHtoDAsync(address, ffi.from_buffer(data), data.nbytes, stream)

    def download(self, address: Any, nbytes: int, stream: Any = ffi.NULL) -> np.ndarray[Any, Any]:
        data = np.zeros(nbytes, np.uint8)
        self.MemcpyDtoHAsync(ffi.from_buffer(data), address, nbytes, stream)
        self.StreamSynchronize(stream)
        return data


@contextmanager
def driver_of(device: Device) -> Iterator[Driver]:
    with device.opened.entered(), ExitStack() as stack:
        yield Driver(device.opened, stack)


def expect_same(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], what: str) -> None:
    if text := difference(found, expected, True):
        raise Wrong(f"{what}: {text}")
