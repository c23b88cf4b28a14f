"""Compiled models of one session: what it writes, and what it loads."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..abi import host
from ..abi.core import ffi
from ..clusters.claims import Claims, NodeVerdict, decline
from ..context.capture import ContextTarget
from ..context.errors import ContextError
from ..context.reader import Loaded, Session
from ..context.writer import ContextCluster, ContextWriter
from ..model.ir import Graph, Node
from ..program.lowering import DeviceProperties, LoweringOptions
from .context_nodes import ContextOutput, ContextReader, context_node, is_context, model_path
from .libraries import load_libraries
from .lost_nodes import is_compiled_model, why_not_loaded
from .open_device import OpenDevice, kernel_library
from .options import Options

ALLOW_VARIABLE = "ORT_CUDA_PLUGIN_CONTEXT_ALLOW_HOST_CODE"


def allows_host_code(options: Options) -> bool:
    """Whether code for this computer's CPU may come from a context."""
    return options.context_allow_host_code or os.environ.get(ALLOW_VARIABLE) == "1"


class ContextSession:
    """``entries`` are the session's entries."""

    def __init__(self, entries: Mapping[str, str]) -> None:
        self.output = ContextOutput.of(entries)
        self._reader = ContextReader(entries.get("ep.context_file_path", ""))
        self._writer: ContextWriter | None = None  # of the one file of all clusters

    def without_bodies(self, graph: Graph, claims: Claims) -> Claims:
        """The claims, but none in the body of a node: ONNX Runtime has no place for a context there."""
        if self.output is None or not graph.is_subgraph:
            return claims
        reason = "it is in the body of a control-flow operator, and a compiled model has no contexts there"
        return Claims([], [], [decline(node, "control-flow", reason) for node in graph.nodes])

    def claim(self, graph: Graph, verdicts: Sequence[NodeVerdict]) -> tuple[list[Node], list[NodeVerdict]]:
        """The nodes that stand for clusters of ours, and the verdicts with theirs."""
        found = [node for node in graph.nodes if is_context(node)]
        mended = []
        for node, verdict in zip(graph.nodes, verdicts, strict=True):
            if is_context(node):
                verdict = replace(verdict, supported=True, kind="", reason="")
            elif is_compiled_model(node):
                verdict = decline(node, verdict.kind, why_not_loaded(node))
            mended.append(verdict)
        return found, mended

    def load(
        self,
        graphs: Sequence[tuple[Graph, Any]],
        device: OpenDevice,
        properties: DeviceProperties,
        asked: Options,
        options: LoweringOptions,
    ) -> list[Loaded | None]:
        """For each graph that is a context node the cluster that it stands for, None for the others.

        Raises:
            ContextError: a context cannot be read, or does not fit its node.
        """
        nodes = [
            graph.nodes[0] if len(graph.nodes) == 1 and is_context(graph.nodes[0]) else None for graph, _ in graphs
        ]
        if self.output is not None and any(nodes):
            raise ContextError("the model is compiled already: compile the model that it was made of")
        session = Session(device.target, properties, options, allows_host_code(asked))
        found = iter(
            self._reader.read([(node, ort_graph) for node, (_, ort_graph) in zip(nodes, graphs, strict=True) if node])
        )
        clusters: list[Loaded | None] = []
        for node in nodes:
            if node is None:
                clusters.append(None)
                continue
            context, name = next(found)
            inputs = [None if value is None else value.dtype for value in node.inputs]
            outputs = [None if value is None else value.dtype for value in node.outputs]
            clusters.append(context.cluster(name, session, inputs, outputs))
        return clusters

    def writer(
        self, device: OpenDevice, properties: DeviceProperties, asked: Options, options: LoweringOptions
    ) -> ContextWriter:
        """What collects clusters for the next `nodes`."""
        assert self.output is not None
        if self._writer is not None:
            return self._writer
        targets = [ContextTarget(device.target, properties)]
        if asked.context_architectures:
            libraries = load_libraries() - (frozenset() if asked.enable_cudnn else {"cudnn"})
            targets = [
                ContextTarget(
                    target, DeviceProperties(target.is_emulated, frozenset() if target.is_emulated else libraries)
                )
                for target in asked.context_architectures
            ]
        shapes = [dict(alternative) for alternative in asked.context_shapes]
        writer = ContextWriter(options, targets, kernel_library().get_many, shapes)
        if not self.output.embed:
            self._writer = writer
        return writer

    def partition_name(self, fused: str) -> str:
        """What the context calls the cluster of a fused node."""
        return (self.output.prefix if self.output is not None else "") + fused

    def nodes(self, written: Sequence[tuple[ContextCluster, ContextWriter]], ort_graphs: Sequence[Any]) -> list[Any]:
        """Writes the context and makes the ``OrtNode *`` for each cluster, for ONNX Runtime to own.

        Raises:
            ContextError: it cannot be written.
        """
        output = self.output
        assert output is not None
        name = b""
        if written and not output.embed:
            path = output.binary_path(model_path(ort_graphs[0]))
            written[0][1].write(path)
            name = path.name.encode()
        made: list[Any] = []
        try:
            for (cluster, writer), ort_graph in zip(written, ort_graphs, strict=True):
                attributes: dict[str, int | str] = {
                    "embed_mode": int(output.embed),
                    "partition_name": cluster.name,
                    "hardware_architecture": ",".join(writer.architectures),
                    "onnx_model_filename": Path(model_path(ort_graph)).name,
                    "notes": f"{len(cluster.graph.nodes)} nodes",
                }
                payload = writer.to_bytes() if output.embed else name
                fused = cluster.name.removeprefix(output.prefix)
                made.append(context_node(fused, cluster.inputs, cluster.outputs, payload, attributes))
        except BaseException:
            for node in made:
                host.api().ReleaseNode(node)
            raise
        return made


def give(nodes: Sequence[Any], ep_context_nodes: Any) -> None:
    """Hands nodes to ONNX Runtime (``OrtNode **``, NULL where it wants none)."""
    if ep_context_nodes != ffi.NULL:
        for index, node in enumerate(nodes):
            ep_context_nodes[index] = node
