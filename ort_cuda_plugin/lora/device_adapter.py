"""LoRA adapter in device memory, loaded from an adapter file of ONNX Runtime.

ONNX Runtime keeps the parameters of its own ``LoraAdapter`` in host memory, because the code that loads adapters has no
data transfer to devices of a plugin. So each Run with a ``LoraAdapter`` copies all its parameters to the device.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnxruntime as ort

from ..api import chosen_device
from ..model.ort.ort_schema import TENSOR_TYPES


class DeviceAdapter:
    """The parameters of a LoRA adapter, in device memory.

    A Run reads them as inputs, without a copy. They stay on the device until no object refers to them.

    Args:
        path: a file that ``onnxruntime.AdapterFormat.export_adapter`` or Olive has written.
        emulate: True for the emulated device, False for a GPU, None as `ort_cuda_plugin.session` chooses.
        provider_options: the provider options of the session; ``device_id`` selects the device.

    Raises: FileNotFoundError: there is no such file. ValueError: it is not an adapter file, or has a parameter that is
        not a tensor of numbers. Others: those of `ort_cuda_plugin.session`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        emulate: bool | None = None,
        provider_options: Mapping[str, object] | None = None,
    ) -> None:
        on_host = _read(Path(path))
        options = {key: str(value) for key, value in (provider_options or {}).items()}
        memory = chosen_device(emulate, options).memory_info(ort.OrtDeviceMemoryType.DEFAULT)
        device = ("gpu", memory.device_id, memory.device_vendor_id)
        self.parameters: dict[str, Any] = {
            name: ort.OrtValue.ortvalue_from_shape_and_type(value.shape(), value.element_type(), *device)
            for name, value in on_host.items()
        }
        """Feeds for ``session.run``: an ``OrtValue`` on the device for each name of a model input."""
        self._copy(on_host)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all parameters."""
        return sum(value.tensor_size_in_bytes() for value in self.parameters.values())

    def bind(self, binding: Any) -> None:
        """Bind all parameters as inputs of an ``onnxruntime.IOBinding``, in place of those of an earlier adapter."""
        for name, value in self.parameters.items():
            binding.bind_ortvalue_input(name, value)

    def update(self, path: str | os.PathLike[str]) -> None:
        """Overwrite the parameters with those of another adapter file, at the same addresses.

        Bindings and CUDA graphs that ONNX Runtime has captured then use the new adapter. No Run may be in progress.

        Raises: FileNotFoundError, ValueError: as for the class; also ValueError if names, shapes or types differ.
        """
        on_host = _read(Path(path))
        found, expected = (_signature(values) for values in (on_host, self.parameters))
        for name in sorted(found.keys() | expected.keys()):
            if found.get(name) != expected.get(name):
                raise ValueError(
                    f"{path}: parameter {name}: got {found.get(name, 'none')}, expected {expected.get(name, 'none')}. "
                    "Create a DeviceAdapter for this file"
                )
        self._copy(on_host)

    def _copy(self, on_host: Mapping[str, Any]) -> None:
        # ONNX Runtime refuses to copy tensors without elements.
        names = [name for name, value in on_host.items() if math.prod(value.shape())]
        if names:
            ort.copy_tensors([on_host[name] for name in names], [self.parameters[name] for name in names])


def _signature(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the type and the shape of each parameter, as text for users."""
    return {name: f"{value.data_type()} {list(value.shape())}" for name, value in values.items()}


def _read(path: Path) -> dict[str, Any]:
    """Return the parameters of an adapter file, in host memory. Raises the errors that `DeviceAdapter` names."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file. Pass the path of an adapter file")
    try:
        parameters: dict[str, Any] = ort.AdapterFormat.read_adapter(os.fspath(path)).get_parameters()
    except Exception as error:  # ONNX Runtime raises several types for damaged files
        raise ValueError(
            f"{path}: not an adapter file of ONNX Runtime ({error}). Write it with onnxruntime.AdapterFormat, or with "
            "Olive's convert-adapters"
        ) from error
    for name, value in parameters.items():
        if value.data_type() not in TENSOR_TYPES or value.data_type() == "tensor(string)":
            raise ValueError(
                f"{path}: parameter {name}: got the type {value.data_type()}, expected a tensor of numbers"
            )
    return parameters
