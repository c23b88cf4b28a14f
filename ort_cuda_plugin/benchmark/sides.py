"""The sides of a benchmark. A side is a provider with its settings, such as the CUDA provider with CUDA graphs.

Each side has a session, with inputs and outputs bound to memory of the side's device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ort_cuda_plugin
from ort_cuda_plugin.api import chosen_device, is_registered_as
from ort_cuda_plugin.comparison.differences import UNROUNDED_INPUTS
from ort_cuda_plugin.ep.device.identity import Identity
from ort_cuda_plugin.session_errors import only_ours

from ..abi.errors import Error

Feeds = Mapping[str, NDArray[np.generic]]
PLUGIN, CPU, CUDA, CUDA_GRAPH = "plugin", "cpu", "cuda", "cuda-graph"
SIDES = (PLUGIN, CPU, CUDA, CUDA_GRAPH)


class SideError(Error, RuntimeError):
    """A side that this installation of ONNX Runtime does not have, or that cannot run the model."""


class LackingSideError(SideError):
    """A side that cannot run a model; the plugin may be able to."""


def available(emulate: bool) -> list[str]:
    """Return the default sides of a comparison.

    They are the plugin, and the built-in CUDA provider without and with CUDA graphs if ONNX Runtime has it; else, and
    with ``emulate``, the plugin and the CPU provider.
    """
    import onnxruntime as ort

    return [PLUGIN, CUDA, CUDA_GRAPH] if not emulate and _has_cuda(ort) else [PLUGIN, CPU]


def _has_cuda(ort: ModuleType) -> bool:
    """Return whether ONNX Runtime has the built-in CUDA provider, and its name does not stand for the plugin."""
    return "CUDAExecutionProvider" in ort.get_available_providers() and not is_registered_as(Identity.CUDA)


def create_session(side: str, source: str | bytes, emulate: bool, profile_prefix: str = "") -> Any:
    """Create a session of one side.

    Raises SideError if ONNX Runtime lacks the CUDA provider or cannot load it, LackingSideError if only the plugin has
    an operator of a model for the CPU provider, and otherwise the errors of session creation.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    if profile_prefix:
        options.enable_profiling, options.profile_file_prefix = True, profile_prefix
    if side == PLUGIN:
        return ort_cuda_plugin.session(source, emulate=emulate, sess_options=options)
    if side == CPU:
        options.add_session_config_entry(*UNROUNDED_INPUTS)
        try:
            return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            if reason := only_ours(error):
                raise LackingSideError(f"{side}: {reason}") from error
            raise
    if not _has_cuda(ort):
        raise SideError(f"{side}: this ONNX Runtime has no CUDAExecutionProvider. Install onnxruntime-gpu")
    graph = {"enable_cuda_graph": "1" if side == CUDA_GRAPH else "0"}
    session = ort.InferenceSession(source, options, providers=[("CUDAExecutionProvider", graph)])
    if "CUDAExecutionProvider" not in session.get_providers():
        raise SideError(f"{side}: CUDAExecutionProvider could not be loaded. Read the reason in ONNX Runtime's log")
    return session


@dataclass
class Runner:
    """One side, ready to run: ``run`` returns when the results are complete."""

    side: str
    run: Callable[[], None]
    results: Callable[[], list[NDArray[np.generic]]]

    def seconds(self) -> float:
        begun = time.perf_counter()
        self.run()
        return time.perf_counter() - begun


def runner(side: str, session: Any, emulate: bool, feeds: Feeds, names: Sequence[str]) -> Runner:
    """Bind inputs and outputs to memory of the side's device. A first Run gives the outputs' shapes.

    Raises ValueError for an output that cannot be bound.
    """
    import onnxruntime as ort

    place = _place(side, emulate)
    inputs = {name: ort.OrtValue.ortvalue_from_numpy(array, *place) for name, array in feeds.items()}
    binding = session.io_binding()
    for name, value in inputs.items():
        binding.bind_ortvalue_input(name, value)
    results = session.run(list(names), dict(feeds))
    for name, value in zip(names, results, strict=True):
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufc":
            raise ValueError(
                f"output {name!r} is not a tensor of numbers, so it cannot stay on a device as this benchmark needs. "
                "Use `ort-cuda-plugin run`"
            )
    shapes = [(value.shape, value.dtype) for value in results]
    outputs = [ort.OrtValue.ortvalue_from_numpy(np.zeros(*each), *place) for each in shapes]
    for name, value in zip(names, outputs, strict=True):
        binding.bind_ortvalue_output(name, value)

    def run() -> None:
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()

    return Runner(side, run, lambda: [value.numpy() for value in outputs])


def _place(side: str, emulate: bool) -> tuple[Any, ...]:
    """Return the arguments with which ``OrtValue.ortvalue_from_numpy`` places a value on the side's device."""
    if side == PLUGIN:
        return plugin_place(emulate)
    return ("cpu" if side == CPU else "cuda", 0)


def plugin_place(emulate: bool) -> tuple[str, int, int]:
    """Return the arguments with which ``OrtValue.ortvalue_from_numpy`` places a value on the plugin's device.

    They are kind, number and vendor of the device.
    """
    import onnxruntime as ort

    memory = chosen_device(emulate, {}).memory_info(ort.OrtDeviceMemoryType.DEFAULT)
    return ("gpu", memory.device_id, memory.device_vendor_id)
