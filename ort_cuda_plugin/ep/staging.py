"""Staging: divides the clusters of a session over its devices, and records which device runs each cluster."""

from __future__ import annotations

from typing import Any

from ..model.ir import Graph
from .claiming import Claiming
from .contexts.context_nodes import is_context
from .nodes.fused_ports import value_names
from .nodes.staged_node import NamedStage, StagedCluster
from .session_state import Session


class Staging:
    """Divides clusters over the devices of a session. Clusters in bodies of control flow stay on the first device."""

    def __init__(self, session: Session, claiming: Claiming) -> None:
        self._session, self._claiming = session, claiming

    def divide(self, names: list[str], graphs: list[Graph], fused_nodes: list[Any]) -> dict[int, StagedCluster]:
        """Return the clusters with stages on several devices, by their index; the others run on the first device.

        ``fused_nodes`` are ``const OrtNode *``; ``names`` are their names.

        Raises:
            OptionError: the nodes cannot be divided, or their weights do not fit into the memory of the devices.
        """
        staged = self._stages(names, graphs, fused_nodes) if self._session.devices.are_several else {}
        clusters: dict[str, Graph] = {}
        devices: dict[str, int] = {}
        for index, (name, graph) in enumerate(zip(names, graphs, strict=True)):
            if index not in staged:
                clusters[name] = graph
                devices[name] = self._session.device.info.ordinal
                continue
            for stage in reversed(staged[index].stages):  # a node that several stages repeat belongs to the first one
                clusters[stage.name] = stage.graph
                devices[stage.name] = stage.device.info.ordinal
        self._claiming.fused(clusters, devices if self._session.devices.are_several else {})
        return staged

    def _stages(self, names: list[str], graphs: list[Graph], fused_nodes: list[Any]) -> dict[int, StagedCluster]:
        if self._claiming.is_in_body or not graphs:
            return {}
        devices = self._session.devices
        holds_context = any(is_context(node) for graph in graphs for node in graph.nodes)
        devices.require_fused_nodes({"a model that is compiled already (EPContext nodes)": holds_context})
        placed = devices.assign(graphs, self._session.log)
        staged: dict[int, StagedCluster] = {}
        for index, (name, graph, node) in enumerate(zip(names, graphs, fused_nodes, strict=True)):
            inputs, outputs = value_names(node, "Inputs"), value_names(node, "Outputs")
            stages = [
                NamedStage(f"{name}_stage{number}", devices.all[stage.device], stage)
                for number, stage in enumerate(devices.stages(graph, inputs, outputs, placed))
            ]
            if stages:
                staged[index] = StagedCluster(stages, inputs, outputs)
        return staged
