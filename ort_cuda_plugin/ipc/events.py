"""Interprocess events: order between streams of several processes."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ..abi.core import core, driver_error_text, ffi, lib
from ..abi.device import CudaError, ignored_at_end
from ..ep.device.devices import DeviceInfo, open_device
from ..memory import find_device
from .handles import EventHandle, device_of_info, driver_call, find_uuid, uuid_of

if TYPE_CHECKING:
    from ..memory import DeviceLike


class SupportsGetHandle(Protocol):
    """A stream of ONNX Runtime: ``OrtSyncStream``."""

    def get_handle(self) -> int: ...


_OPEN_ADVICE = "A handle can be opened in another process than its creator, while the creator has not closed the event"

StreamLike: TypeAlias = "int | SupportsGetHandle | None"
"""A stream: its ``cudaStream_t`` as a number, an ``OrtSyncStream``, or None for the default stream."""


class Event:
    """A CUDA event that several processes share. Create it in one process, and open its `handle` in the others.

    `wait` orders a stream: work enqueued on it afterwards starts only when the work that preceded the newest `record`,
    in any process, has finished. If no process has recorded the event, `wait` has no effect: so tell the other process
    when you have called `record`. Neither call waits for the device.

    Args:
        device: a device from `ort_cuda_plugin.devices` or `register`, or an ordinal; None: the first device.

    Raises: ValueError: there is no such device. CudaError: the driver cannot create the event.

    Examples:
        >>> devices = ort_cuda_plugin.register(emulate=True)
        >>> from ort_cuda_plugin import ipc
        >>> event = ipc.Event(0)
        >>> event.record()
        >>> event.synchronize()
        >>> len(event.handle().event)
        64
    """

    def __init__(self, device: DeviceLike | None = None) -> None:
        self._event: Any = None
        self._open(find_device(device), "EventCreate", lib.CU_EVENT_INTERPROCESS | lib.CU_EVENT_DISABLE_TIMING)

    def _open(self, info: DeviceInfo, member: str, argument: Any, advice: str = "") -> None:
        self._opened_device, self._device = open_device(info), device_of_info(info)
        event = ffi.new("CUevent *")
        driver_call(self._device, member, event, argument, advice=advice)
        self._event = event[0]

    def handle(self) -> EventHandle:
        """Return a handle by which other processes open the event. Keep this object until all of them have closed it.

        Raises:
            ValueError: the event is closed, or another process created it.
        """
        handle = ffi.new("CUipcEventHandle *")
        try:
            self._call("IpcGetEventHandle", handle, self._opened())
        except CudaError as error:
            if error.code != lib.CUDA_ERROR_INVALID_HANDLE:
                raise
            raise ValueError(f"event: only the process that created it can export it ({error})") from error
        return EventHandle(bytes(ffi.buffer(handle)), uuid_of(self._device))

    def record(self, stream: StreamLike = None) -> None:
        """Record the event after the work that was enqueued on the stream. The stream must not be captured.

        Raises: ValueError: the event is closed. CudaError: the driver refuses.
        """
        self._call("EventRecord", self._opened(), _stream(stream))

    def wait(self, stream: StreamLike = None) -> None:
        """Make later work of the stream wait for the newest record. Errors are those of `record`."""
        self._call("StreamWaitEvent", _stream(stream), self._opened(), 0)

    def synchronize(self) -> None:
        """Wait in this thread for the newest record. Errors are those of `record`."""
        self._call("EventSynchronize", self._opened())

    def is_done(self) -> bool:
        """Return whether the work before the newest record has finished. Errors are those of `record`."""
        try:
            self._call("EventQuery", self._opened())
        except CudaError as error:
            if error.code != lib.CUDA_ERROR_NOT_READY:
                raise
            return False
        return True

    def close(self) -> None:
        """Destroy the event in this process. Work that is enqueued keeps its order. Safe to call twice.

        Raises: CudaError: the driver refuses, for example because another process still has the event open.
        """
        if self._event is not None:
            stay = ffi.new("ocp_stay *")
            if core().device_enter_to_release(self._opened_device, stay):  # not in a forked child
                event, self._event = self._event, None
                code = self._device.driver.EventDestroy(event)
                text = driver_error_text(self._device.driver, code)
                core().device_leave(stay)
                if code:
                    raise CudaError("cuEventDestroy", code, text)

    def __enter__(self) -> Event:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(*ignored_at_end):
            self.close()

    def _opened(self) -> Any:
        if self._event is None:
            raise ValueError("event: it is closed. Create or open an event")
        return self._event

    def _call(self, member: str, *arguments: Any) -> None:
        driver_call(self._device, member, *arguments)


def open_event(handle: EventHandle) -> Event:
    """Open an event that another process has created.

    Raises:
        TypeError: ``handle`` is not an EventHandle.
        ValueError: this process does not have the device.
        CudaError: the driver cannot open the handle.

    Examples:
        >>> def wait_for(handle, stream):  # in another process than the one that created the event
        ...     event = ipc.open_event(handle)
        ...     event.wait(stream)
    """
    if not isinstance(handle, EventHandle):
        raise TypeError(f"handle: expected an ort_cuda_plugin.ipc.EventHandle, got {type(handle).__name__}")
    driver_handle = ffi.new("CUipcEventHandle *")
    ffi.memmove(driver_handle, handle.event, len(handle.event))
    opened = Event.__new__(Event)
    opened._event = None
    opened._open(find_uuid(handle.device), "IpcOpenEventHandle", driver_handle[0], _OPEN_ADVICE)
    return opened


def _stream(stream: StreamLike) -> Any:
    number = 0 if stream is None else stream if isinstance(stream, int) else stream.get_handle()
    return ffi.cast("CUstream", number)
