"""An ONNX Runtime plugin execution provider: Numba CUDA kernels run by a plain C library, on a GPU or an emulated
device.

::

    import onnxruntime, ort_cuda_plugin
    ort_cuda_plugin.register()
    session = onnxruntime.InferenceSession("model.onnx", providers=["CudaPluginExecutionProvider"])

Importing this package imports neither ONNX Runtime nor Numba.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .abi.errors import Error
from .plugin_library import get_ep_name, get_ep_names, get_library_path

if TYPE_CHECKING:
    from .abi.core import PluginError
    from .abi.result_table import Table
    from .api import devices, explain, register, session, unregister
    from .arrays import CudaArray, as_cuda_array, bind_input, bind_output
    from .clusters.claims.claims import NodeVerdict
    from .custom.short_form import op
    from .ep.device.devices import DeviceInfo
    from .ep.nodes.plan_history import PlanVariant, plan_variants
    from .ep.options.option_types import ProviderOptions
    from .ep.options.options import OptionError
    from .memory import memory_stats, set_limit, trim
    from .profiles.collect import Profile
    from .profiles.measure import profile
    from .progress.events import Progress, on_progress
    from .sessions.requirement import PlacementError, require

__version__ = "0.1.0"

__all__ = [
    "CudaArray",
    "DeviceInfo",
    "Error",
    "NodeVerdict",
    "OptionError",
    "PlacementError",
    "PlanVariant",
    "PluginError",
    "Profile",
    "Progress",
    "ProviderOptions",
    "Table",
    "as_cuda_array",
    "bind_input",
    "bind_output",
    "counters",
    "devices",
    "explain",
    "get_ep_name",
    "get_ep_names",
    "get_library_path",
    "memory_stats",
    "on_progress",
    "op",
    "plan_variants",
    "profile",
    "register",
    "require",
    "reset_counters",
    "session",
    "set_limit",
    "trim",
    "unregister",
]

_LAZY = {
    "CudaArray": "arrays",
    "as_cuda_array": "arrays",
    "bind_input": "arrays",
    "bind_output": "arrays",
    "devices": "api",
    "explain": "api",
    "memory_stats": "memory",
    "op": "custom.short_form",
    "register": "api",
    "require": "sessions.requirement",
    "session": "api",
    "set_limit": "memory",
    "trim": "memory",
    "unregister": "api",
    "DeviceInfo": "ep.device.devices",
    "NodeVerdict": "clusters.claims.claims",
    "OptionError": "ep.options.options",
    "PlacementError": "sessions.requirement",
    "PluginError": "abi.core",
    "Profile": "profiles.collect",
    "profile": "profiles.measure",
    "ProviderOptions": "ep.options.option_types",
    "Table": "abi.result_table",
    "PlanVariant": "ep.nodes.plan_history",
    "plan_variants": "ep.nodes.plan_history",
    "Progress": "progress.events",
    "on_progress": "progress.events",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .uninterrupted import imported

    return getattr(imported(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def counters() -> dict[str, int]:
    """Return the counters of this process, by name.

    These count events: ``python_calls`` (from C into Python), ``runs``, ``launches``, ``library_calls``,
    ``library_refusals`` (calls that a library refuses, which kernels of the plugin replace), ``copies_h2d``,
    ``copies_d2h``, ``copies_d2d``, ``copies_peer`` and ``bytes_peer`` (tensors copied between devices of a session, and
    their bytes), ``weight_bytes_streamed`` (copied in Runs because of the option ``weight_budget``),
    ``plan_variants_built``, ``plan_hits``, ``host_value_reads``, ``device_loops`` (loops in plans that Runs enqueued,
    without loops within loops), ``device_loop_iterations`` (iterations of all loops before which the host read a flag),
    ``outputs_redirected`` (outputs that share memory with another tensor and needed a copy), ``kernels_compiled``,
    ``kernel_cache_hits``, ``candidates_measured`` (by the option ``autotune``), ``graph_captures``, ``graph_replays``,
    ``graph_updates`` (nodes of automatic CUDA graphs that got new addresses), ``graph_fallbacks`` (warm Runs without a
    graph), and one ``graph_fallbacks_...`` for each reason.

    These are present amounts: ``device_bytes_in_use``, ``pinned_bytes_in_use``, ``weight_bytes``, ``host_weight_bytes``
    (weights that Runs copy to the device), ``streams_live`` and ``graphs_live``. `plan_variants` says for which shapes
    variants were built.

    Examples:
        >>> session = ort_cuda_plugin.session("model.onnx")
        >>> before = ort_cuda_plugin.counters()["runs"]
        >>> outputs = session.run(None, {"x": array})
        >>> ort_cuda_plugin.counters()["runs"] - before
        1
    """
    from .abi.core import counters as read

    return read()


def reset_counters() -> None:
    """Set the counters of events to 0. Present amounts, such as bytes in use, do not change.

    Examples:
        >>> ort_cuda_plugin.reset_counters()
        >>> ort_cuda_plugin.counters()["launches"]
        0
    """
    from .abi.core import reset_counters as reset

    reset()
