"""Staged fused node: its stages run on several devices. C copies tensors between devices, and orders the streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...abi import host
from ...abi.core import check, core, ffi, new_error
from ...clusters.stages import Stage
from ...model.ir import Graph
from ..device.open_device import OpenDevice
from .fused_node import FusedNode


@dataclass(frozen=True)
class NamedStage:
    """A stage of a fused node, with the name of its cluster and with its device."""

    name: str
    device: OpenDevice
    stage: Stage

    @property
    def graph(self) -> Graph:
        """Return the nodes of the stage."""
        return self.stage.graph


@dataclass(frozen=True)
class StagedCluster:
    """The stages of a fused node, and the names of the fused node's inputs and outputs, in its order."""

    stages: Sequence[NamedStage]
    inputs: Sequence[str]
    outputs: Sequence[str]


class StagedNode:
    """The owner of an ``ocp_pipeline``.

    ``fuse`` compiles a stage to a cluster on the stage's device; the caller owns the cluster. ``devices`` are those of
    the session.

    Raises:
        NodeError, PluginError: as `FusedNode.prepare`.
    """

    def __init__(
        self, staged: StagedCluster, devices: Sequence[OpenDevice], fuse: Callable[[NamedStage], FusedNode]
    ) -> None:
        results = [value for stage in staged.stages for value in stage.graph.outputs]
        numbers = {name: number for number, name in enumerate([*staged.inputs, *(value.name for value in results)])}
        self._kept: list[Any] = []
        spec = ffi.new("ocp_pipeline_spec *")
        spec.stages = self._keep(ffi.new("ocp_pipeline_stage[]", len(staged.stages)))
        for to, stage in zip(spec.stages[0 : len(staged.stages)], staged.stages, strict=True):
            graph = stage.graph
            to.cluster, to.device = fuse(stage).pointer, devices.index(stage.device)
            to.num_sources, to.num_results = len(graph.inputs), len(graph.outputs)
            to.sources = self._numbers([numbers[value.name] for value in graph.inputs])
            to.only_shapes = self._numbers([int(value in stage.stage.only_shapes) for value in graph.inputs])
            to.results = self._numbers([numbers[value.name] for value in graph.outputs])
        spec.devices = self._keep(ffi.new("ocp_device *[]", [device.pointer for device in devices]))
        spec.types = self._numbers([0 if value.dtype is None else value.dtype.ort for value in results])
        spec.outputs = self._numbers([numbers[name] for name in staged.outputs])
        spec.num_devices, spec.num_stages = len(devices), len(staged.stages)
        spec.num_inputs, spec.num_values, spec.num_outputs = len(staged.inputs), len(numbers), len(staged.outputs)
        error = new_error()
        self.pointer = core().pipeline_create(spec, error)
        check(error)
        self._first, self._inputs = devices[0], staged.inputs

    def compute_info(self) -> Any:
        """Return the ``OrtNodeComputeInfo *`` of the fused node, which ORT holds until the session ends."""
        names, _kept = host.texts(self._inputs)
        error = new_error()
        info = core().compute_info_of_pipeline(self.pointer, self._first.pointer, names, error)
        check(error)
        return info

    def close(self) -> None:
        """Release the ``ocp_pipeline``. No Run may be active. The owner of the clusters releases them afterward."""
        core().pipeline_release(self.pointer)
        self.pointer = ffi.NULL

    def _keep(self, array: Any) -> Any:
        self._kept.append(array)
        return array

    def _numbers(self, values: Sequence[int]) -> Any:
        return self._keep(ffi.new("uint32_t[]", list(values)))
