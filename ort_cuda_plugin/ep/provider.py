"""The execution provider of one session: reads its options, claims nodes, and compiles clusters."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..abi import host
from ..abi.core import check, core, ffi, lib, new_error
from ..clusters.claims.claims import NodeVerdict, claim, decline
from ..clusters.claims.fed_values import fed_values
from ..clusters.cluster import CompiledCluster
from ..clusters.nodes.control_flow import CompiledBodies, CompiledBody
from ..clusters.nodes.ranks import Ranks
from ..clusters.search.search import as_repetition, is_search
from ..clusters.transposition import transposition
from ..context.reader import Loaded
from ..context.storage.errors import ContextError
from ..context.writer import ContextCluster
from ..custom import registry as custom
from ..model.ir import DType, Graph, Node, Value
from ..model.ort.ort_graph import read_graph
from ..ops.registry import CHANNELS_LAST_DOMAIN, channels_last_operators
from ..program.lowering.context import DeviceProperties
from .contexts.context_nodes import ContextIdentity, ContextNode, is_context, model_path, only_node
from .contexts.context_session import ContextSession, give, request_of
from .device.devices import DeviceInfo
from .device.identity import EP_NAME, Identity
from .device.measuring import tuner_of
from .device.open_device import use_device
from .factory import memory_info
from .nodes.fused_node import FusedNode
from .nodes.kernel_registry import number_of
from .nodes.node_kernel import context_identity, context_kernel, kernel_impl, read_kernel_node
from .nodes.program_files import ProgramFiles
from .nodes.repeated_node import RepeatedNode
from .options import arena
from .options.dynamic_options import parse_changes
from .options.option_values import LOG_LEVELS
from .options.options import OptionError, Options, collect, parse
from .session import current_session
from .session.guards import describe
from .session.layering import rules_of_others
from .session.lost_nodes import described, is_probably_lost
from .session.optimized_model import writes_optimized_model
from .session.partitioning import goes_by_statistics, read_budget
from .session.verdict_record import VerdictRecord

IMPLICIT_INPUTS_SINCE = 28
"""First version of ORT (1.N) that passes a fused node the values that only bodies in it read."""


def last_provider() -> Provider | None:
    """Return the provider of the session that this thread created last, if it is alive."""
    found: Provider | None = current_session.provider()
    return found


def last_verdicts() -> list[NodeVerdict]:
    """Return the verdicts of the session that this thread created last, also if the creation failed."""
    record: VerdictRecord | None = current_session.record()
    return [] if record is None else record.verdicts


class Provider:
    """The control plane of an ``OrtEp``.

    Attributes: failure: the error of making the claims, which ORT only logs; "" if there was none. fused_nodes: the
        compiled clusters, in the order of compilation. operators_with_kernels: the `number_of` the custom operators
        that ORT may run by kernels; 0: none.
    """

    def __init__(self, metadata: list[Any], session_options: Any, logger: Any, identity: Identity) -> None:
        self._identity = identity
        self._changing = threading.Lock()
        self._logger = logger  # ORT's session logger; it is freed with the session, like this object
        entries = _entries("GetSessionOptionsConfigEntries", host.api(), session_options)
        self.options = Options()
        self._read_options(entries)
        self._contexts = ContextSession(entries, session_options)
        offered = [DeviceInfo.from_metadata(host.key_value_pairs(pairs)) for pairs in metadata]
        self.device = use_device(_choose(offered, self.options.device_id))
        others = rules_of_others(entries, identity, self.device.info, host.host_version())
        if others and self._contexts.output is not None:
            raise OptionError(
                f"ep.context_enable=1 with layering rules for {others}: ONNX Runtime fuses no nodes that rules may "
                "cut, so nothing would be compiled. Compile the model without the rules; a session that loads the "
                "compiled model may have them"
            )
        self._may_be_cut = f"layering rules for {others} may cut what it would be fused with" if others else ""
        self._budget = read_budget(entries, self._available_memory)
        self._single_nodes = (
            bool(others)
            or self.options.single_nodes
            or writes_optimized_model(session_options)
            or goes_by_statistics(entries, identity)
        )
        self.device_memory = memory_info(self.device.info)
        self._configure_arenas()
        self._channels_last_names = [ffi.new("char[]", name.encode()) for name in self._channels_last_operators()]
        names = [*self._channels_last_names, ffi.NULL]
        self.channels_last = ffi.new("const char *[]", names) if self.options.prefer_nhwc else ffi.NULL
        self.stream = self._session_stream()
        self._record = VerdictRecord(identity.ep_name)
        self.failure = ""
        custom.discover()
        self._operators = custom.current()
        self.operators_with_kernels = number_of(self._operators) if self._single_nodes else 0
        self._opsets: dict[str, int] = {}
        self.fused_nodes: list[FusedNode] = []
        self._repeated: list[RepeatedNode] = []
        self._compiled: dict[str, CompiledBody] = {}
        self._ranks = Ranks()  # kept, because ORT forgets the nodes that a fused node replaces
        self._fed: set[str] = set()  # names of the model's inputs
        self._fed_values: set[str] = set()  # names of inputs whose contents the application feeds
        self._read_by_bodies: set[str] = set()  # names of values
        self._single_contexts: dict[tuple[str, ...], ContextNode] = {}  # by the names of the node's outputs
        self._loaded_contexts: list[tuple[ContextNode, Loaded]] | None = None  # contexts without a kernel yet
        self._transpositions: dict[tuple[tuple[int, ...], DType], FusedNode] = {}
        self._transposition_lock = threading.Lock()
        current_session.begin(self, self._record)

    @property
    def verdicts(self) -> list[NodeVerdict]:
        """Return one verdict per node of the main graph, and then of the bodies in it.

        After ORT has changed layouts, or replaced declined nodes by their function bodies, it asks again; the new nodes
        then replace the old ones.
        """
        return self._record.verdicts

    @property
    def values(self) -> dict[str, str]:
        """Return the type and shape of each value of these nodes, as text."""
        return self._record.values

    def close(self) -> None:
        """Release clusters, weights and kernels. ORT has released the compute infos before.

        Raises: PluginError, DriverError: the device is lost or work failed; host memory is released nevertheless.
        """
        with contextlib.ExitStack() as stack:
            for fused in self.fused_nodes:
                stack.callback(fused.close)
            for repeated in self._repeated:
                stack.callback(repeated.close)
            self.fused_nodes, self._repeated = [], []
            stack.callback(core().stream_release, self.stream)
            # Runs can still be in flight, on a stream of the application or if it requested not to wait for them.
            self.device.synchronize()

    def _session_stream(self) -> Any:
        """Return the ``ocp_stream *`` of all Runs, or NULL if each thread gets its own."""
        out, error = ffi.new("ocp_stream **"), new_error()
        if self.options.user_compute_stream is not None:
            handle = ffi.cast("CUstream", self.options.user_compute_stream)
            if core().stream_adopt(self.device.pointer, handle, out, error):
                address = hex(self.options.user_compute_stream)
                text = ffi.string(error.text).decode(errors="replace")
                raise OptionError(f"{EP_NAME} option user_compute_stream={address}: {text}")
        elif self.options.use_ep_level_unified_stream:
            core().stream_create(self.device.pointer, out, error)
            check(error)
        return out[0]

    def _channels_last_operators(self) -> tuple[str, ...]:
        return channels_last_operators() if self.options.prefer_nhwc else ()

    def _configure_arenas(self) -> None:
        for memory, values in (
            (lib.OCP_DEVICE_MEMORY, self.options.device_arena),
            (lib.OCP_PINNED_MEMORY, self.options.pinned_arena),
        ):
            if warning := arena.configure(self.device.info, memory, values):
                self._log("WARNING", warning)

    def _available_memory(self) -> int:
        out, error = ffi.new("uint64_t *"), new_error()
        core().device_available(self.device.pointer, out, error)
        check(error)
        return int(out[0])

    def _log(self, level: str, message: str) -> None:
        if LOG_LEVELS.index(level) >= LOG_LEVELS.index(self.options.log_level):
            host.log(level, message, self._logger)

    def _read_options(self, session: dict[str, str]) -> None:
        environment = _entries("GetEnvConfigEntries", host.ep_api())
        self.options, ignored = parse(collect(session, environment, self._identity))
        if ignored:
            reasons = "; ".join(f"{key} ({why})" for key, why in ignored.items())
            self._log("WARNING", f"options without effect here: {reasons}")

    def set_dynamic_options(self, values: dict[str, str]) -> None:
        """Change options of the living session. Runs may be in flight on other threads.

        Raises: OptionError: a key cannot change or a value is invalid; no option was changed then.
        """
        with self._changing:
            changes = parse_changes(values, self.options, self._identity)
            if changes.memory_limit is not None:
                arena.set_limit(self.device.info, lib.OCP_DEVICE_MEMORY, changes.memory_limit)
            self.options = changes.options
            for fused in self.fused_nodes:
                fused.use_graphs(self.options.min_num_runs_before_cuda_graph_capture, self.options.max_automatic_graphs)
        if changes.ignored:
            self._log("INFO", f"dynamic options without effect here: {', '.join(changes.ignored)}")

    def _properties(self) -> DeviceProperties:
        properties = self.device.properties()
        return (
            properties
            if self.options.enable_cudnn
            else replace(properties, libraries=properties.libraries - frozenset({"cudnn"}))
        )

    # ---- claims ----

    def get_capability(self, ort_graph: Any, info: Any) -> None:
        """Claim the nodes of ``ort_graph`` (``const OrtGraph *``) that the device can run."""
        try:
            self._claim(ort_graph, info)
        except BaseException as error:
            self.failure = describe(error)[1]
            raise

    def _read_graph(self, ort_graph: Any) -> Graph:
        graph = read_graph(host.api(), ort_graph)
        graph.operators = self._operators
        return graph

    def _claim(self, ort_graph: Any, info: Any) -> None:
        graph = self._read_graph(ort_graph)
        self._opsets.update(graph.opsets)
        nodes = _nodes(ort_graph)

        def has_kernel(node: Node) -> bool:
            return _has_kernel(info, _parent(ort_graph) if node is graph.parent else nodes[node.index])

        claims = self._contexts.claims_without_analysis(graph) or claim(
            graph,
            self._properties(),
            self.options.lowering,
            self._ranks,
            self._identity.ep_name,
            passes_implicit_inputs=host.api_version() >= IMPLICIT_INPUTS_SINCE,
            single_nodes=self._single_nodes,
            budget=self._budget,
            has_kernel=has_kernel,
            claim_unprofitable_nodes=self.options.claim_unprofitable_nodes,
            compiled=self._compiled,
        )
        claims = self._contexts.without_bodies(graph, claims)
        singly = [cluster for cluster in claims.clusters if self._runs_singly(graph, cluster, nodes, info)]
        fused = [cluster for cluster in claims.clusters if cluster not in singly]
        stored, verdicts = self._contexts.claim(graph, claims.verdicts)
        if self._may_be_cut:
            cut = {node for cluster in fused for node in cluster}
            reason = f"it has no kernel of its own, and {self._may_be_cut}"
            verdicts = [
                decline(node, "control-flow", reason) if node in cut else verdict
                for node, verdict in zip(graph.nodes, verdicts, strict=True)
            ]
            fused = []
        for node in stored:
            if self._may_be_cut and _has_kernel(info, nodes[node.index]):
                singly.append([node])
                self._single_contexts[_names(node.outputs)] = ContextNode.of(node, nodes[node.index], ort_graph)
            else:
                fused.append([node])
        self._report(graph, verdicts, fused)
        self._record.add(graph, verdicts, fused)
        self._read_by_bodies.update(value.name for node in graph.nodes for value in node.implicit_inputs)
        if graph.parent is None:
            self._fed.update(value.name for value in graph.inputs)
            self._fed_values.update(fed_values(graph))
        fusion = ffi.new("OrtNodeFusionOptions *")
        fusion.ort_version_supported = host.api_version()
        for cluster in fused:
            # A compiled context took an initializer that an application may replace as an input.
            fusion.drop_constant_initializers = not is_context(cluster[0])
            members = ffi.new("const OrtNode *[]", [nodes[node.index] for node in cluster])
            host.check_status(host.ep_api().EpGraphSupportInfo_AddNodesToFuse(info, members, len(members), fusion))
        for (node,) in [*singly, *([node] for node in claims.singles)]:
            host.check_status(host.ep_api().EpGraphSupportInfo_AddSingleNode(info, nodes[node.index]))

    def _runs_singly(self, graph: Graph, cluster: list[Node], nodes: list[Any], info: Any) -> bool:
        """Whether ORT runs the cluster by a kernel of the registry.

        It must if it writes the model. It may for a node with no neighbours to fuse with: an input whose contents
        decide shapes is then in host memory, and need not be read back from the device.
        """
        if len(cluster) > 1 or cluster[0].has_subgraphs or self._contexts.output is not None:
            return False
        if not (self._single_nodes or self._decides_shapes(graph, cluster[0])):
            return False
        return _has_kernel(info, nodes[cluster[0].index])

    def _decides_shapes(self, graph: Graph, node: Node) -> bool:
        """Whether the node has an input that the host reads, other than a constant."""
        opset = graph.opsets.get(node.domain, node.since_version)
        host_inputs = self._operators.implementations(node, opset)[0].host_inputs
        inputs = [node.inputs[index] for index in host_inputs if index < len(node.inputs)]
        return any(value is not None and value.initializer is None for value in inputs)

    def _report(self, graph: Graph, verdicts: list[NodeVerdict], fused: list[list[Node]]) -> None:
        declined = [pair for pair in zip(graph.nodes, verdicts, strict=True) if not pair[1].supported]
        for node, verdict in declined:
            if (node.domain, node.provider) == (CHANNELS_LAST_DOMAIN, self._identity.ep_name):
                # ONNX Runtime asks no other provider, and its error does not name the reason.
                self._log(
                    "ERROR",
                    f"node {node.label} was made channels-last, but no kernel takes {described(node)}: "
                    f"{verdict.reason}; prefer_nhwc=0 leaves the layout alone",
                )
            elif is_probably_lost(node):
                self._log(
                    "WARNING",
                    f"{verdict.op_type} node {verdict.name!r} is left to other providers ({verdict.kind}): "
                    f"{verdict.reason}; the session fails if none of them runs {described(node)}",
                )
            else:
                label = f"{verdict.op_type} node {verdict.name!r}"
                self._log("INFO", f"{label} is left to other providers ({verdict.kind}): {verdict.reason}")
        claimed = len(verdicts) - len(declined)
        self._log("INFO", f"graph {graph.name!r}: {claimed} of {len(verdicts)} nodes claimed, in {len(fused)} clusters")

    # ---- compilation ----

    def compile(self, ort_graphs: list[Any], fused_nodes: list[Any], infos: Any, context_nodes: Any) -> None:
        """Compile each claimed cluster, or load what was compiled before.

        ``infos`` (``OrtNodeComputeInfo **``) gets one entry for each, and so does ``context_nodes`` (``OrtNode **``) if
        the session writes a compiled model.
        """
        graphs = [self._read_graph(ort_graph) for ort_graph in ort_graphs]
        names = [_text("Node_GetName", node) for node in fused_nodes]
        self._record.fused(dict(zip(names, graphs, strict=True)))
        properties, options = self._properties(), self.options.lowering
        found = {
            index: ContextNode.of(graph.nodes[0], only_node(ort_graph), ort_graph)
            for index, (graph, ort_graph) in enumerate(zip(graphs, ort_graphs, strict=True))
            if len(graph.nodes) == 1 and is_context(graph.nodes[0])
        }
        clusters = self._contexts.load([*found.values()], self.device, properties, self.options, options)
        loaded = dict(zip(found, clusters, strict=True))
        is_for_others = False
        if self._contexts.output is not None:  # before the device takes over the constants
            request = request_of(self.device, properties, self.options, options)
            is_for_others = self.device.target.arch not in request.architectures
            model = model_path(ort_graphs[0]) if ort_graphs else ""
            self._contexts.write(self._context_clusters(graphs, fused_nodes), request, model)
        for index, (graph, node) in enumerate(zip(graphs, fused_nodes, strict=True)):
            if index in loaded:
                self._tell(loaded[index])
                infos[index] = self._compute_info(node, loaded[index])
            else:
                infos[index] = self._compile_one(graph, node, later=is_for_others)
        if self._contexts.output is not None:
            give(self._contexts.nodes(), context_nodes)

    def _tell(self, loaded: Loaded) -> None:
        """Log notable facts about a cluster of a context."""
        if loaded.why:
            self._log("WARNING", loaded.why)
        if loaded.refitted:
            self._log("INFO", f"new weights: {', '.join(loaded.refitted)}")

    @property
    def compatibility_info(self) -> Any:
        """Return the compatibility string (``const char *``) of the session's compiled model. It lives as long as the
        provider.
        """
        return self._contexts.compatibility

    def _context_clusters(self, graphs: list[Graph], fused_nodes: list[Any]) -> list[ContextCluster]:
        """Return the clusters of a compiled model."""
        return [
            ContextCluster(
                self._contexts.partition_name(_text("Node_GetName", node)),
                graph,
                _value_names(node, "Inputs"),
                _value_names(node, "Outputs"),
                self._ranks,
                self._fed,
            )
            for graph, node in zip(graphs, fused_nodes, strict=True)
        ]

    def _compile_one(self, graph: Graph, fused_node: Any, later: bool) -> Any:
        inputs, outputs = _value_names(fused_node, "Inputs"), _value_names(fused_node, "Outputs")
        if self._budget is not None:
            self._budget.spend(graph.nodes)
        if is_search(graph.nodes[0]):
            return self._compile_repeated(graph, inputs)
        bodies = CompiledBodies(self._identity.ep_name, self._compiled)
        cluster = self._cluster(graph, inputs, outputs, fed=self._fed, compiled=bodies)
        info = self._compute_info(fused_node, Loaded(cluster), later)
        name = _text("Node_GetName", fused_node)
        self._compiled[name] = CompiledBody(graph, cluster.inputs, cluster.outputs)
        return info

    def _cluster(
        self,
        graph: Graph,
        inputs: Sequence[str] | None = None,
        outputs: Sequence[str] | None = None,
        *,
        fed: Collection[str],
        compiled: CompiledBodies | None = None,
    ) -> CompiledCluster:
        """Compile the nodes of ``graph`` with the options of the session. Arguments are those of `CompiledCluster`."""
        tuner = tuner_of(self.device, self._properties()) if self._is_tuned else None
        return CompiledCluster(
            graph,
            self._properties(),
            self.options.lowering,
            inputs,
            outputs,
            self._ranks,
            fed,
            compiled,
            tuner=tuner,
        )

    @property
    def _is_tuned(self) -> bool:
        """Whether kernels are chosen by measured times, which vary, and with them the bits of results."""
        return self.options.autotune and not self.options.deterministic

    def _compile_repeated(self, graph: Graph, inputs: list[str]) -> Any:
        def fuse(name: str, part: Graph) -> FusedNode:
            return self._fuse(name, Loaded(self._cluster(part, fed=())))

        repetition = as_repetition(graph.nodes[0], graph.opsets)
        self._repeated.append(RepeatedNode(repetition, inputs, self.device, fuse))
        return self._repeated[-1].compute_info()

    def _compute_info(self, fused_node: Any, loaded: Loaded, later: bool = False) -> Any:
        names, kept = host.texts(_value_names(fused_node, "Inputs"))
        fused = self._fuse(_text("Node_GetName", fused_node), loaded, later)
        error = new_error()
        info = core().compute_info_create(fused.pointer, self.device.pointer, names, len(kept), error)
        check(error)
        return info

    def create_kernel(self, info: Any) -> Any:
        """Make the ``OrtKernelImpl *`` of an unfused node. ``info`` is its ``const OrtKernelInfo *``.

        Raises:
            NodeError, PluginError: as `FusedNode.prepare`.
            Unsupported: the operator table does not have the operator.
            ContextError: as `ContextSession.load`.
        """
        if (identity := context_identity(info)) is not None:
            return self._create_context_kernel(identity)
        graph = read_kernel_node(info, self.device, self._operators, self._opsets)
        fused = self._fuse(graph.name, Loaded(self._cluster(graph, fed=())))
        return kernel_impl(graph, fused, self.device, self._read_by_bodies)

    def _create_context_kernel(self, identity: ContextIdentity) -> Any:
        """Return the kernel of a context node. The first call loads the contexts of all such nodes.

        ONNX Runtime may have given the node's values other names since it was claimed, but not the node.
        """
        if self._loaded_contexts is None:
            nodes = [*self._single_contexts.values()]
            properties, options = self._properties(), self.options.lowering
            loaded = self._contexts.load(nodes, self.device, properties, self.options, options)
            self._loaded_contexts = [*zip(nodes, loaded, strict=True)]
        found = [pair for pair in self._loaded_contexts if pair[0].identity == identity]
        if not found or (len(found) > 1 and not identity.file):
            raise ContextError(
                f"{len(found)} nodes with a context are called {identity.name!r}, so ONNX Runtime cannot run them one "
                "by one. Give each node another name"
            )
        self._loaded_contexts.remove(found[0])
        node, one = found[0]
        self._tell(one)
        return context_kernel(node.node, self._fuse(node.node.name, one), self.device)

    def _fuse(self, name: str, loaded: Loaded, later: bool = False) -> FusedNode:
        """Make a cluster's fused node on the device, and prepare it as far as possible; ``later`` as for
        `FusedNode.prepare`.
        """
        cluster = loaded.cluster
        if self.options.program_folder and isinstance(cluster, CompiledCluster):
            files = ProgramFiles(Path(self.options.program_folder), name)
            cluster.show_program, cluster.show_plan = files.append_program, files.append_plan
        fused = FusedNode(name, cluster, self.device, loaded.why, lambda line: self._log("INFO", line))
        self.fused_nodes.append(fused)
        fused.use_graphs(self.options.min_num_runs_before_cuda_graph_capture, self.options.max_automatic_graphs)
        fused.prepare(later)
        fused.refuse_capture(self._fed_values)
        return fused

    def transposition(self, permutation: tuple[int, ...], dtype: DType) -> FusedNode:
        """Return the fused node that transposes tensors of that rank for a Scan; it is made once. Any thread may call
        it.

        Raises: as `FusedNode.prepare`.
        """
        with self._transposition_lock:
            known = self._transpositions.get((permutation, dtype))
            if known is None:
                cluster = transposition(permutation, dtype, self.device.properties(), self.options.lowering)
                known = FusedNode("Transpose for Scan", cluster, self.device)
                self.fused_nodes.append(known)
                known.prepare()
                self._transpositions[permutation, dtype] = known
        return known


def _choose(offered: list[DeviceInfo], device_id: int | None) -> DeviceInfo:
    """Return the device that ORT selected, if the option agrees.

    Raises: OptionError: ORT selected no device, several, or another one.
    """
    if not offered:
        raise OptionError(f"{EP_NAME}: ONNX Runtime selected no device. Pass one to add_provider_for_devices")
    first, *others = dict.fromkeys(offered)
    if others:
        names = ", ".join(f"{info.ordinal} ({info.name})" for info in [first, *others])
        raise OptionError(
            f"a session of {EP_NAME} runs on one device, and was given the devices {names}: make a session for each"
        )
    if device_id is not None and first.ordinal != device_id:
        raise OptionError(
            f"{EP_NAME} option device_id={device_id}: the session was given the device {first.ordinal} ({first.name}); "
            "a session runs on one device, so add_provider_for_devices gets one and is called once"
        )
    return first


def _entries(function: str, table: Any, *arguments: Any) -> dict[str, str]:
    pairs = ffi.new("OrtKeyValuePairs **")
    host.check_status(getattr(table, function)(*arguments, pairs))
    try:
        return host.key_value_pairs(pairs[0])
    finally:
        host.api().ReleaseKeyValuePairs(pairs[0])


def _parent(ort_graph: Any) -> Any:
    """Return the ``const OrtNode *`` whose body the graph is."""
    out = ffi.new("const OrtNode **")
    host.check_status(host.api().Graph_GetParentNode(ort_graph, out))
    return out[0]


def _names(values: Sequence[Value | None]) -> tuple[str, ...]:
    return tuple("" if value is None else value.name for value in values)


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


def _text(function: str, owner: Any) -> str:
    out = ffi.new("const char **")
    host.check_status(getattr(host.api(), function)(owner, out))
    return host.text(out[0])


def _value_names(node: Any, kind: str) -> list[str]:
    """Return the names of a fused node's inputs or outputs, in its order."""
    count = ffi.new("size_t *")
    host.check_status(getattr(host.api(), f"Node_GetNum{kind}")(node, count))
    values = ffi.new("const OrtValueInfo *[]", count[0])
    host.check_status(getattr(host.api(), f"Node_Get{kind}")(node, values, count[0]))
    return [_text("GetValueInfoName", value) for value in values]
