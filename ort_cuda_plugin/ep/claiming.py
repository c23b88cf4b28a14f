"""Answers ``GetCapability``: the clusters of nodes that the provider runs, and why it declines others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..abi import host
from ..abi.core import ffi
from ..clusters.claims.claims import NodeVerdict, claim, decline
from ..clusters.claims.fed_values import fed_values
from ..clusters.cycle_collection import paused
from ..model.ir import Graph, Node
from ..ops.registry import CHANNELS_LAST_DOMAIN
from .contexts.context_nodes import ContextNode, is_context
from .session.float32_report import Float32Report
from .session.lost_nodes import described, is_probably_lost
from .session.verdict_record import VerdictRecord
from .session_state import Session

IMPLICIT_INPUTS_SINCE = 28
"""N of the first ONNX Runtime 1.N that passes to a fused node the outer values that only bodies in it read.

A body is the graph of an If, Loop or Scan node.
"""


class Claiming:
    """Claims nodes of a session's graphs.

    Attributes:
        record: the verdicts of all nodes.
        opsets: the opset versions that the graphs import, by domain.
        fed: the names of the model's inputs.
        fed_values: the names of the model's inputs without an initializer, and of values computed from their elements.
        read_by_bodies: the names of values that bodies of control flow read.
        float32: the nodes that the option keep_float32 names.
        single_contexts: the EPContext nodes that ORT runs by registry kernels, by the names of their outputs.
        is_in_body: whether the latest graph is the body of a control-flow node.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.record = VerdictRecord(session.identity.ep_name)
        self.opsets: dict[str, int] = {}
        self.fed: set[str] = set()
        self.fed_values: set[str] = set()
        self.read_by_bodies: set[str] = set()
        self.float32 = Float32Report(session.options.keep_float32)
        self.single_contexts: dict[tuple[str, ...], ContextNode] = {}
        self.is_in_body = False

    @paused()
    def claim(self, ort_graph: Any, info: Any) -> None:
        """Claim the nodes of ``ort_graph`` (``const OrtGraph *``) that the device can run."""
        session = self._session
        graph = session.read_graph(ort_graph)
        self.opsets.update(graph.opsets)
        self.is_in_body = graph.parent is not None
        nodes = _nodes(ort_graph)

        def has_kernel(node: Node) -> bool:
            return _has_kernel(info, _parent(ort_graph) if node is graph.parent else nodes[node.index])

        claims = session.contexts.claims_without_analysis(graph) or claim(
            graph,
            session.properties(),
            session.options.lowering,
            session.ranks,
            session.identity.ep_name,
            passes_implicit_inputs=host.api_version() >= IMPLICIT_INPUTS_SINCE,
            single_nodes=session.single_nodes,
            budget=session.budget,
            has_kernel=has_kernel,
            claim_unprofitable_nodes=session.options.claim_unprofitable_nodes,
            compiled=session.compiled,
        )
        claims = session.contexts.without_bodies(graph, claims)
        singly = [cluster for cluster in claims.clusters if self._runs_singly(graph, cluster, nodes, info)]
        fused = [cluster for cluster in claims.clusters if cluster not in singly]
        stored, verdicts = session.contexts.claim(graph, claims.verdicts)
        if session.may_be_cut:
            cut = {node for cluster in fused for node in cluster}
            reason = f"the plugin runs it only fused with other nodes, and {session.may_be_cut}"
            verdicts = [
                decline(node, "control-flow", reason) if node in cut else verdict
                for node, verdict in zip(graph.nodes, verdicts, strict=True)
            ]
            fused = []
        for node in stored:
            if session.may_be_cut and _has_kernel(info, nodes[node.index]):
                singly.append([node])
                outputs = tuple("" if value is None else value.name for value in node.outputs)
                self.single_contexts[outputs] = ContextNode.of(node, nodes[node.index], ort_graph)
            else:
                fused.append([node])
        self._report(graph, verdicts, fused)
        self.record.add(graph, verdicts, fused)
        self.float32.add(graph, verdicts, [*fused, *singly])
        if not fused:
            self._report_float32()  # without a fused node ORT may never call `compile`, which else writes the report
        self.read_by_bodies.update(value.name for node in graph.nodes for value in node.implicit_inputs)
        if graph.parent is None:
            self.fed.update(value.name for value in graph.inputs)
            self.fed_values.update(fed_values(graph))
        fusion = ffi.new("OrtNodeFusionOptions *")
        fusion.ort_version_supported = host.api_version()
        for cluster in fused:
            # The cluster in a context has overridable initializers among its inputs, so ORT must not drop them.
            fusion.drop_constant_initializers = not is_context(cluster[0])
            members = ffi.new("const OrtNode *[]", [nodes[node.index] for node in cluster])
            host.check_status(host.ep_api().EpGraphSupportInfo_AddNodesToFuse(info, members, len(members), fusion))
        for (node,) in [*singly, *([node] for node in claims.singles)]:
            host.check_status(host.ep_api().EpGraphSupportInfo_AddSingleNode(info, nodes[node.index]))

    def fused(self, clusters: Mapping[str, Graph], devices: Mapping[str, int]) -> None:
        """Record that ORT has replaced the latest clusters by fused nodes; arguments as for `VerdictRecord.fused`."""
        self._report_float32()
        self.record.fused(clusters, devices)

    def _report_float32(self) -> None:
        """Write the warnings about the option keep_float32 to the log, once."""
        for warning in self.float32.warnings():
            self._session.log("WARNING", warning)

    def _runs_singly(self, graph: Graph, cluster: list[Node], nodes: list[Any], info: Any) -> bool:
        """Return whether ORT runs the cluster by a kernel of the registry.

        The plugin chooses this for nodes that have a kernel and no bodies, unless the session writes a compiled model:
        for all of them if `Session.single_nodes` is set, for example because ORT writes the optimized model. Otherwise
        it chooses this for a node that is alone in its cluster and has inputs that determine shapes: ORT passes these
        inputs to a registry kernel in host memory, but to a fused node in device memory.
        """
        if len(cluster) > 1 or cluster[0].has_subgraphs or self._session.contexts.output is not None:
            return False
        if not (self._session.single_nodes or self._decides_shapes(graph, cluster[0])):
            return False
        return _has_kernel(info, nodes[cluster[0].index])

    def _decides_shapes(self, graph: Graph, node: Node) -> bool:
        """Return whether the node has an input that the host reads, other than a constant."""
        opset = graph.opsets.get(node.domain, node.since_version)
        host_inputs = self._session.operators.implementations(node, opset)[0].host_inputs
        inputs = [node.inputs[index] for index in host_inputs if index < len(node.inputs)]
        return any(value is not None and value.initializer is None for value in inputs)

    def _report(self, graph: Graph, verdicts: list[NodeVerdict], fused: list[list[Node]]) -> None:
        declined = [pair for pair in zip(graph.nodes, verdicts, strict=True) if not pair[1].supported]
        for node, verdict in declined:
            if (node.domain, node.provider) == (CHANNELS_LAST_DOMAIN, self._session.identity.ep_name):
                # ONNX Runtime offers the node to no other provider, and its error does not name the reason.
                self._session.log(
                    "ERROR",
                    f"prefer_nhwc=1: ONNX Runtime converted node {node.label} to channels-last, but no kernel supports "
                    f"{described(node)}: {verdict.reason}. Set prefer_nhwc=0",
                )
            elif is_probably_lost(node):
                self._session.log(
                    "WARNING",
                    f"{verdict.op_type} node {verdict.name!r} is left to other providers ({verdict.kind}): "
                    f"{verdict.reason}; the session fails if none of them runs {described(node)}",
                )
            else:
                label = f"{verdict.op_type} node {verdict.name!r}"
                self._session.log("INFO", f"{label} is left to other providers ({verdict.kind}): {verdict.reason}")
        claimed = len(verdicts) - len(declined)
        counts = f"the plugin runs {claimed} of {len(verdicts)} nodes (fused nodes: {len(fused)})"
        self._session.log("INFO", f"graph {graph.name!r}: {counts}")


def _parent(ort_graph: Any) -> Any:
    """Return the ``const OrtNode *`` whose body the graph is."""
    out = ffi.new("const OrtNode **")
    host.check_status(host.api().Graph_GetParentNode(ort_graph, out))
    return out[0]


def _has_kernel(info: Any, node: Any) -> bool:
    out = ffi.new("const OrtKernelDef **")
    host.check_status(host.ep_api().EpGraphSupportInfo_LookUpKernel(info, node, out))
    return bool(out[0] != ffi.NULL)


def _nodes(ort_graph: Any) -> list[Any]:
    count = ffi.new("size_t *")
    host.check_status(host.api().Graph_GetNumNodes(ort_graph, count))
    nodes = ffi.new("const OrtNode *[]", count[0])
    host.check_status(host.api().Graph_GetNodes(ort_graph, nodes, count[0]))
    return list(nodes)
