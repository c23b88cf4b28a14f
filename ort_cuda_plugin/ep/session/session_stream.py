"""Session stream: the one stream of all Runs of a session, if the application gives or asks for one."""

from __future__ import annotations

from typing import Any

from ...abi.core import check, core, ffi, new_error
from ...plugin_library import EP_NAME
from ..device.open_device import OpenDevice
from ..options.options import OptionError, Options


def session_stream(device: OpenDevice, options: Options) -> Any:
    """Return the ``ocp_stream *`` of all Runs, or NULL if each thread gets its own.

    Raises:
        OptionError: ``user_compute_stream`` is not a stream of the device's primary context.
        PluginError: the stream cannot be created.
    """
    out, error = ffi.new("ocp_stream **"), new_error()
    if options.user_compute_stream is not None:
        handle = ffi.cast("CUstream", options.user_compute_stream)
        if core().stream_adopt(device.pointer, handle, out, error):
            address = hex(options.user_compute_stream)
            text = ffi.string(error.text).decode(errors="replace")
            raise OptionError(f"{EP_NAME} option user_compute_stream={address}: {text}")
    elif options.use_ep_level_unified_stream:
        core().stream_create(device.pointer, out, error)
        check(error)
    return out[0]
