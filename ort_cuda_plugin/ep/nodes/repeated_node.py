"""A fused node for a search such as BeamSearch: first, step and last clusters; C repeats the step cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...abi import host
from ...abi.core import check, core, ffi, new_error
from ...clusters.nodes.repetition import Part, Repetition
from ...model.ir import Graph
from ..device.open_device import OpenDevice
from .fused_node import FusedNode


class RepeatedNode:
    """Owns an ``ocp_repeat``. ``fuse`` compiles a graph to a cluster, which the caller owns.

    ``inputs`` names the fused node's inputs, in its order.

    Raises:
        NodeError, PluginError: as `FusedNode.prepare`.
    """

    def __init__(
        self,
        repetition: Repetition,
        inputs: Sequence[str],
        device: OpenDevice,
        fuse: Callable[[str, Graph], FusedNode],
    ) -> None:
        by_name = {value.name: value for value in repetition.node.reads()}
        values = [by_name[name] for name in inputs]
        self._kept: list[Any] = []
        spec = ffi.new("ocp_repeat_spec *")
        for name, part in zip(("first", "step", "last"), repetition.parts, strict=True):
            fused = fuse(f"{repetition.node.name}_{name}", part.graph)
            self._fill(getattr(spec, name), fused, part, repetition.sources(part, values), name != "last")
        types = [value.dtype.ort if value.dtype is not None else 0 for value in repetition.states]
        spec.num_inputs, spec.num_states = len(values), len(types)
        spec.state_types = self._numbers(types)
        error = new_error()
        self.pointer = core().repeat_create(device.pointer, spec, error)
        check(error)
        self._device, self._inputs = device, inputs

    def compute_info(self) -> Any:
        """Return the ``OrtNodeComputeInfo *`` of the fused node, which ORT holds until the session ends."""
        names, _kept = host.texts(self._inputs)
        error = new_error()
        info = core().compute_info_of_repeat(self.pointer, self._device.pointer, names, error)
        check(error)
        return info

    def close(self) -> None:
        """Release the ``ocp_repeat``. No Run may be active. The owner of the clusters releases these afterwards."""
        core().repeat_release(self.pointer)
        self.pointer = ffi.NULL

    def _fill(self, to: Any, fused: FusedNode, part: Part, sources: Sequence[int], gives_states: bool) -> None:
        results = part.results if gives_states else ()
        to.cluster = fused.pointer
        to.num_sources, to.num_results = len(sources), len(results)
        to.sources, to.results = self._numbers(sources), self._numbers(results)

    def _numbers(self, values: Sequence[int]) -> Any:
        array = ffi.new("uint32_t[]", list(values))
        self._kept.append(array)
        return array
