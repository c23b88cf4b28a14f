"""The execution provider of one session: reads its options, claims nodes, and compiles clusters."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..abi.core import core, ffi
from ..clusters.claims.claims import NodeVerdict, search_clusters
from ..clusters.cluster import CompiledCluster
from ..clusters.nodes.control_flow import CompiledBodies, CompiledBody
from ..clusters.search.search import is_search, order_ports
from ..clusters.transposition import transposition
from ..context.reader import Loaded
from ..context.storage.errors import MissingCompiler
from ..context.writer import ContextCluster
from ..model.ir import DType, Graph, Node, NodeError, Unsupported
from ..ops.registry import channels_last_operators
from ..progress.events import reported
from .claiming import Claiming
from .contexts.context_nodes import ContextIdentity, ContextNode, is_context, model_path, only_node
from .contexts.context_session import give, request_of
from .device.identity import Identity
from .device.measuring import given_tuner, tuner_of
from .device.open_device import OpenDevice
from .factory import memory_info
from .nodes.fused_node import FusedNode
from .nodes.fused_ports import Ports, compute_info, context_ports, node_name, ports_of, value_names
from .nodes.kernel_registry import number_of
from .nodes.node_kernel import context_identity, context_kernel, kernel_impl, read_kernel_node
from .nodes.program_files import ProgramFiles
from .nodes.repeated_node import RepeatedNode
from .nodes.staged_node import NamedStage, StagedCluster, StagedNode
from .options.dynamic_options import parse_changes
from .options.options import Options
from .session import current_session
from .session.guards import describe
from .session.session_stream import session_stream
from .session.verdict_record import VerdictRecord
from .session_state import Session
from .staging import Staging


def last_provider() -> Provider | None:
    """Return the provider of the session that this thread created last; None if there is none that is alive."""
    found: Provider | None = current_session.provider()
    return found


def last_verdicts() -> list[NodeVerdict]:
    """Return the verdicts of the session that this thread created last, also if that failed; [] without a session."""
    record: VerdictRecord | None = current_session.record()
    return [] if record is None else record.verdicts


class Provider:
    """The control plane of an ``OrtEp``.

    Attributes:
        claiming: claims the nodes, and has their verdicts.
        failure: the error of ``get_capability``, which ORT only logs; "" if there was none.
        fused_nodes: the compiled clusters, in the order of compilation.
        operators_with_kernels: `number_of` for the custom operators that ORT may run by registry kernels; 0: none.
    """

    def __init__(self, metadata: list[Any], session_options: Any, logger: Any, identity: Identity) -> None:
        self.session = session = Session(metadata, session_options, logger, identity)
        self.device = session.device
        self._changing = threading.Lock()
        self.device_memory = memory_info(self.device.info)
        session.devices.configure_arenas(session.log)
        prefer_nhwc = session.options.prefer_nhwc
        operators = channels_last_operators() if prefer_nhwc else ()
        self._channels_last_names = [ffi.new("char[]", name.encode()) for name in operators]
        names = [*self._channels_last_names, ffi.NULL]
        self.channels_last = ffi.new("const char *[]", names) if prefer_nhwc else ffi.NULL
        self.stream = session_stream(self.device, session.options)
        self.claiming = Claiming(session)
        self._staging = Staging(session, self.claiming)
        self.failure = ""
        self.operators_with_kernels = number_of(session.operators) if session.single_nodes else 0
        self.fused_nodes: list[FusedNode] = []
        self._repeated: list[RepeatedNode | StagedNode] = []
        self._loaded_contexts: list[tuple[ContextNode, Loaded]] | None = None  # contexts without a kernel yet
        self._transpositions: dict[tuple[tuple[int, ...], DType], FusedNode] = {}
        self._transposition_lock = threading.Lock()
        current_session.begin(self, self.claiming.record)

    @property
    def options(self) -> Options:
        """Return the options; some may change while the session lives."""
        return self.session.options

    @property
    def verdicts(self) -> list[NodeVerdict]:
        """Return one verdict per node of the main graph, and then of the bodies in it.

        After ORT has changed layouts, or replaced declined nodes by their function bodies, it asks for claims again;
        then the verdicts of the new nodes replace those of the old nodes.
        """
        return self.claiming.record.verdicts

    @property
    def values(self) -> dict[str, str]:
        """Return the type and shape of each value of the nodes in `verdicts`, as text, by name."""
        return self.claiming.record.values

    def close(self) -> None:
        """Release clusters, weights and kernels. ORT has released the compute infos before.

        Raises: PluginError, DriverError: the device is lost or work failed; host memory is released nevertheless.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self.session.progress.close)
            for close in [*(each.close for each in self.fused_nodes), *(each.close for each in self._repeated)]:
                stack.callback(close)
            self.fused_nodes, self._repeated = [], []
            stack.callback(core().stream_release, self.stream)
            # Work of a Run may be unfinished if the application owns the stream, or asked ORT not to wait for it.
            for device in self.session.devices.all:
                device.synchronize()

    def set_dynamic_options(self, values: dict[str, str]) -> None:
        """Change options of the living session. Runs may be in flight on other threads.

        Raises: OptionError: a key cannot change or a value is invalid; no option was changed then.
        """
        with self._changing:
            changes = parse_changes(values, self.options, self.session.identity)
            if changes.memory_limit is not None:
                self.session.devices.set_limit(changes.memory_limit)
            self.session.options = changes.options
            for fused in self.fused_nodes:
                fused.use_graphs(self.options.min_num_runs_before_cuda_graph_capture, self.options.max_automatic_graphs)
        if changes.ignored:
            self.session.log("INFO", f"dynamic options that the plugin ignores: {', '.join(changes.ignored)}")

    # ---- claims ----

    def get_capability(self, ort_graph: Any, info: Any) -> None:
        """Claim the nodes of ``ort_graph`` (``const OrtGraph *``) that the device can run."""
        try:
            self.claiming.claim(ort_graph, info)
        except BaseException as error:
            self.failure = describe(error)[1]
            raise

    # ---- compilation ----

    def compile(self, ort_graphs: list[Any], fused_nodes: list[Any], infos: Any, context_nodes: Any) -> None:
        """Compile each claimed cluster, or load it from its context if the model is compiled already.

        ``infos`` (``OrtNodeComputeInfo **``) gets one entry for each cluster, and so does ``context_nodes``
        (``OrtNode **``) if the session writes a compiled model.
        """
        graphs = [self.session.read_graph(ort_graph) for ort_graph in ort_graphs]
        names = [node_name(node) for node in fused_nodes]
        staged = self._staging.divide(names, graphs, fused_nodes)
        properties, options = self.session.properties(), self.options.lowering
        found = {
            index: ContextNode.of(graph.nodes[0], only_node(ort_graph), ort_graph)
            for index, (graph, ort_graph) in enumerate(zip(graphs, ort_graphs, strict=True))
            if len(graph.nodes) == 1 and is_context(graph.nodes[0])
        }
        clusters = self.session.contexts.load([*found.values()], self.device, properties, self.options, options)
        loaded = dict(zip(found, clusters, strict=True))
        is_for_others = False
        if self.session.contexts.output is not None:
            # Written before the loop below uploads the constants and releases their host copies.
            request = request_of(self.device, properties, self.options, options)
            is_for_others = self.device.target.arch not in request.architectures
            model = model_path(ort_graphs[0]) if ort_graphs else ""
            self.session.contexts.write(self._context_clusters(graphs, fused_nodes), request, model)
        self.session.weight_budget.divide(names, graphs, loaded)
        tracked = reported("planning clusters", graphs, lambda graph: f"{len(graph.nodes)} nodes")
        for index, (graph, node) in enumerate(zip(tracked, fused_nodes, strict=True)):
            if index in staged:
                infos[index] = self._compile_staged(node, staged[index])
            elif index in loaded:
                infos[index] = self._compute_info(node, loaded[index], context_ports(graph.nodes[0], node))
            else:
                infos[index] = self._compile_one(graph, node, later=is_for_others)
        if self.session.contexts.output is not None:
            give(self.session.contexts.nodes(), context_nodes)

    def _compile_staged(self, fused_node: Any, staged: StagedCluster) -> Any:
        def fuse(stage: NamedStage) -> FusedNode:
            cluster = self._cluster(stage.graph, fed=self.claiming.fed, compiled=self._bodies, device=stage.device)
            return self._fuse(stage.name, Loaded(cluster), device=stage.device)

        self._repeated.append(StagedNode(staged, self.session.devices.all, fuse))
        return self._repeated[-1].compute_info()

    @property
    def compatibility_info(self) -> Any:
        """Return the compatibility string (``const char *``) of the session's compiled model. It lives as long as the
        provider.
        """
        return self.session.contexts.compatibility

    def _context_clusters(self, graphs: list[Graph], fused_nodes: list[Any]) -> list[ContextCluster]:
        """Return the fused nodes as clusters for the compiled model that the session writes."""
        return [
            ContextCluster(
                self.session.contexts.partition_name(node_name(node)),
                graph,
                value_names(node, "Inputs"),
                value_names(node, "Outputs"),
                self.session.ranks,
                self.claiming.fed,
            )
            for graph, node in zip(graphs, fused_nodes, strict=True)
        ]

    def _compile_one(self, graph: Graph, fused_node: Any, later: bool) -> Any:
        inputs, outputs = value_names(fused_node, "Inputs"), value_names(fused_node, "Outputs")
        if self.session.budget is not None:
            self.session.budget.spend(graph.nodes)
        if is_search(graph.nodes[0]):
            return self._compile_search(graph.nodes[0], graph.opsets, fused_node)
        cluster = self._cluster(graph, inputs, outputs, fed=self.claiming.fed, compiled=self._bodies)
        info = self._compute_info(fused_node, Loaded(cluster), later=later)
        name = node_name(fused_node)
        self.session.compiled[name] = CompiledBody(graph, cluster.inputs, cluster.outputs)
        return info

    def _cluster(
        self,
        graph: Graph,
        inputs: Sequence[str] | None = None,
        outputs: Sequence[str] | None = None,
        *,
        fed: Collection[str],
        compiled: CompiledBodies | None = None,
        device: OpenDevice | None = None,
    ) -> CompiledCluster:
        """Compile the nodes of ``graph`` with the options of the session, by default for its first device.

        The other arguments are those of `CompiledCluster`.
        """
        tuner = given_tuner()
        if tuner is None and self._is_tuned:
            tuner = tuner_of(device or self.device, self.session.properties(device))
        properties, options, ranks = self.session.properties(device), self.options.lowering, self.session.ranks
        return CompiledCluster(graph, properties, options, inputs, outputs, ranks, fed, compiled, tuner=tuner)

    @property
    def _bodies(self) -> CompiledBodies:
        return CompiledBodies(self.session.identity.ep_name, self.session.compiled)

    @property
    def _is_tuned(self) -> bool:
        """Whether measured times choose kernels. The times vary, so the choice and the bits of results may vary."""
        return self.options.autotune and not self.options.deterministic

    def _compile_search(self, node: Node, opsets: Mapping[str, int], fused_node: Any) -> Any:
        session, options, inputs = self.session, self.options.lowering, value_names(fused_node, "Inputs")
        ep_name = session.identity.ep_name
        search = search_clusters(node, opsets, session.properties(), options, session.ranks, ep_name).found
        if isinstance(search, Graph):
            order_ports(search, node, inputs, value_names(fused_node, "Outputs"))
            return self._compute_info(fused_node, Loaded(self._cluster(search, fed=self.claiming.fed)))

        def fuse(name: str, part: Graph) -> FusedNode:
            return self._fuse(name, Loaded(self._cluster(part, fed=())))

        self._repeated.append(RepeatedNode(search, inputs, self.device, fuse))
        return self._repeated[-1].compute_info()

    def _compute_info(self, fused_node: Any, loaded: Loaded, ports: Ports | None = None, later: bool = False) -> Any:
        fused = self._fuse(node_name(fused_node), loaded, later)
        return compute_info(ports or ports_of(fused_node), fused.pointer, self.device.pointer)

    def create_kernel(self, info: Any) -> Any:
        """Make the ``OrtKernelImpl *`` of an unfused node. ``info`` is its ``const OrtKernelInfo *``.

        Raises:
            NodeError, PluginError: as `FusedNode.prepare`.
            Unsupported: the operator table does not have the operator.
            ContextError: as `ContextSession.load`.
        """
        if (identity := context_identity(info)) is not None:
            return self._create_context_kernel(identity)
        graph = read_kernel_node(info, self.device, self.session.operators, self.claiming.opsets)
        fused = self._fuse(graph.name, Loaded(self._cluster(graph, fed=())))
        return kernel_impl(graph, fused, self.device, self.claiming.read_by_bodies)

    def _create_context_kernel(self, identity: ContextIdentity) -> Any:
        """Return the kernel of a context node. The first call loads the contexts of all such nodes.

        ONNX Runtime may have renamed the node's values since the claim, but not the node.
        """
        if self._loaded_contexts is None:
            nodes = [*self.claiming.single_contexts.values()]
            properties, options = self.session.properties(), self.options.lowering
            loaded = self.session.contexts.load(nodes, self.device, properties, self.options, options)
            self._loaded_contexts = [*zip(nodes, loaded, strict=True)]
        index = identity.find([node for node, _ in self._loaded_contexts])
        node, one = self._loaded_contexts.pop(index)
        return context_kernel(node.node, self._fuse(node.node.name, one), self.device)

    def _fuse(self, name: str, loaded: Loaded, later: bool = False, device: OpenDevice | None = None) -> FusedNode:
        """Make a cluster's fused node on a device, by default the first one, and prepare it as far as possible.

        ``later`` as for `FusedNode.prepare`. A stored cluster with quarantined kernels is compiled again without them;
        if that fails, the session runs the stored kernels.
        """
        if loaded.otherwise is None:
            _tell(self.session, loaded)
            return self._prepared(name, loaded, later, device)
        try:
            fused = self._prepared(name, loaded, later)
        except (MissingCompiler, NodeError, Unsupported) as error:
            self.fused_nodes.pop().close()
            # The message of `MissingCompiler` repeats `Loaded.why`; its cause says what is missing.
            reason = error.__cause__ if isinstance(error, MissingCompiler) else error
            assert isinstance(reason, Exception)
            return self._fuse(name, loaded.otherwise(reason), later)
        _tell(self.session, loaded)
        return fused

    def _prepared(self, name: str, loaded: Loaded, later: bool, device: OpenDevice | None = None) -> FusedNode:
        cluster = loaded.cluster
        if self.options.program_folder and isinstance(cluster, CompiledCluster):
            files = ProgramFiles(Path(self.options.program_folder), name)
            cluster.show_program, cluster.show_plan = files.append_program, files.append_plan
        share = self.session.weight_budget.share(name)
        log = partial(self.session.log, "INFO")
        fused = FusedNode(name, cluster, device or self.device, loaded.why, log, share)
        self.fused_nodes.append(fused)
        fused.use_graphs(self.options.min_num_runs_before_cuda_graph_capture, self.options.max_automatic_graphs)
        fused.prepare(later)
        fused.refuse_capture(self.claiming.fed_values)
        return fused

    def transposition(self, permutation: tuple[int, ...], dtype: DType) -> FusedNode:
        """Return the fused node that permutes the axes of a tensor for a Scan, made on first use. Any thread may call
        this.

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


def _tell(session: Session, loaded: Loaded) -> None:
    """Log why a loaded cluster is compiled again, which quarantined code it runs, and which weights have new values."""
    for text in filter(None, (loaded.why, loaded.warning)):
        session.log("WARNING", text)
    if loaded.refitted:
        session.log("INFO", f"the source model has new values for these weights: {', '.join(loaded.refitted)}")
