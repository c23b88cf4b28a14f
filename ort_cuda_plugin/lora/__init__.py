"""LoRA adapters whose parameters stay on the device.

::

    from ort_cuda_plugin.lora import DeviceAdapter
    adapter = DeviceAdapter("french.onnx_adapter")
    session.run(None, {"x": x, **adapter.parameters})
"""

from __future__ import annotations

from .compiled_model import restore_default_inputs
from .device_adapter import DeviceAdapter

__all__ = ["DeviceAdapter", "restore_default_inputs"]
