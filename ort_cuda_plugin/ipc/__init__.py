"""Device tensors that processes share, and events that order their work, by handles of CUDA IPC.

::

    from ort_cuda_plugin import ipc

    handle = ipc.get_handle(value)               # the exporter sends this picklable object to the other process

    with ipc.open_handle(handle) as tensor:      # the importer: the same memory, without a copy
        y = session.run_with_ort_values(None, {"x": tensor.ortvalue()})

The exporter keeps ``value`` alive until the importer has closed the tensor. docs/external_resources.md has the rules.
"""

from __future__ import annotations

from .events import Event, open_event
from .handles import EventHandle, MemoryHandle
from .tensors import ImportedTensor, get_handle, open_handle

__all__ = ["Event", "EventHandle", "ImportedTensor", "MemoryHandle", "get_handle", "open_event", "open_handle"]
