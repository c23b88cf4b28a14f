"""Compiled models of one session: those that it writes, and those that it loads."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...abi import host
from ...abi.core import ffi
from ...abi.flags import flag_variable
from ...clusters.claims.claims import Claims, NodeVerdict, decline
from ...clusters.search.search import is_search
from ...compiler.targets import Target
from ...context.capture import ContextTarget
from ...context.compatibility import compatibility_info
from ...context.fits import runs_on
from ...context.reader import Loaded, Session
from ...context.storage.errors import ContextError
from ...context.storage.files import refuse_to_replace
from ...context.writer import ContextCluster, ContextRequest, ContextWriter
from ...model.ir import Graph, Node
from ...program.lowering.context import DeviceProperties, LoweringOptions
from ..device.devices import emulated_properties
from ..device.libraries import load_libraries
from ..device.open_device import OpenDevice, kernel_library
from ..options.options import Options
from ..session.lost_nodes import is_compiled_model, why_not_loaded
from ..session.model_paths import created_session_path, is_virtual
from .context_callbacks import ContextCallbacks
from .context_nodes import ContextNode, ContextOutput, ContextReader, context_node, is_context
from .context_sources import WEIGHTLESS_ENTRIES, SourceFinder

ALLOW_VARIABLE = "ORT_CUDA_PLUGIN_CONTEXT_ALLOW_HOST_CODE"


def allows_host_code(options: Options | None = None) -> bool:
    """Return whether ``options``, or `ALLOW_VARIABLE` for all sessions, allow a session to run CPU code of contexts."""
    return (options is not None and options.context_allow_host_code) or bool(flag_variable(ALLOW_VARIABLE))


class ContextSession:
    """Writes and loads the compiled models of a session.

    ``entries`` are the session's entries, ``session_options`` its ``const OrtSessionOptions *``.
    """

    def __init__(self, entries: Mapping[str, str], session_options: Any) -> None:
        self.output = ContextOutput.of(entries)
        self._entries = entries
        self._sources = SourceFinder(entries, session_options)
        self._callbacks = ContextCallbacks(session_options)
        self._reader = ContextReader(entries, self._sources, self._callbacks)
        self._asks_weightless = any(entries.get(key, "0") != "0" for key in WEIGHTLESS_ENTRIES)
        self._binary: _Binary | None = None
        self.compatibility: Any = ffi.new("char[]", b"")  # what ORT writes to the model; ORT keeps the pointer
        # Each cluster for which ORT will request an EPContext node, its context (or the name of the context file), and
        # the node's other attributes.
        self._written: list[tuple[ContextCluster, bytes, Mapping[str, int | str]]] = []

    def without_bodies(self, graph: Graph, claims: Claims) -> Claims:
        """Return the claims without those that a context cannot hold: bodies of control flow, and searches.

        A session that writes no compiled model keeps all claims.
        ONNX Runtime writes no EPContext nodes into such bodies. A search (for example BeamSearch) consists of several
        clusters, and a partition of a context is one cluster.
        """
        if self.output is not None and any(is_search(node) for (node, *_) in claims.clusters):
            reason = "a compiled model cannot contain BeamSearch, GreedySearch or similar operators"
            verdicts = [
                decline(node, "control-flow", reason) if is_search(node) else verdict
                for node, verdict in zip(graph.nodes, claims.verdicts, strict=True)
            ]
            return Claims([c for c in claims.clusters if not is_search(c[0])], claims.singles, verdicts)
        if self.output is None or not graph.is_subgraph:
            return claims
        reason = (
            "it is in the body of a control-flow operator, and a compiled model contains only nodes of the main graph"
        )
        return Claims([], [], [decline(node, "control-flow", reason) for node in graph.nodes])

    def claims_without_analysis(self, graph: Graph) -> Claims | None:
        """Return claims that decline all nodes if each node holds a context; None if a node needs analysis.

        `claim` then claims the nodes with contexts.
        """
        if not graph.nodes or not all(map(is_context, graph.nodes)):
            return None
        return Claims(
            [],
            [],
            [
                decline(node, "op", "it contains a compiled model, which the plugin loads without analysis")
                for node in graph.nodes
            ],
        )

    def claim(self, graph: Graph, verdicts: Sequence[NodeVerdict]) -> tuple[list[Node], list[NodeVerdict]]:
        """Return the nodes with contexts of this plugin, and all verdicts, in which these nodes are now supported."""
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
        nodes: Sequence[ContextNode],
        device: OpenDevice,
        properties: DeviceProperties,
        asked: Options,
        options: LoweringOptions,
    ) -> list[Loaded]:
        """Load the clusters of context nodes.

        Raises:
            ContextError: a context cannot be read, or does not fit its node.
        """
        if self.output is not None and nodes:
            raise ContextError("ep.context_enable=1: the model is compiled already. Compile its source model")
        session = Session(
            device.target,
            properties,
            options,
            allows_host_code(asked),
            asked.context_refit,
            device.info.driver_version,
        )
        clusters = []
        for each, (context, name) in zip(nodes, self._reader.read(nodes), strict=True):
            inputs = [None if value is None else value.dtype for value in each.node.inputs]
            outputs = [None if value is None else value.dtype for value in each.node.outputs]
            clusters.append(context.cluster(name, session, inputs, outputs))
        return clusters

    def write(self, clusters: Sequence[ContextCluster], request: ContextRequest, model: str) -> None:
        """Compile clusters, and write the context file unless the nodes embed the context. ``model`` is the path
        that ONNX Runtime's graph states for the model.

        Raises:
            ContextError: the context cannot be written.
            NodeError, KernelCompileError: as `ContextWriter.add`.
        """
        output = self.output
        assert output is not None
        source = created_session_path() if is_virtual(model, self._entries) else model
        self.compatibility = ffi.new("char[]", compatibility_info(request.architectures).encode())
        if request.weightless or self._asks_weightless:
            folder = None if output.embed and not output.file_path else output.binary_path(model).parent
            request = replace(request, source=self._sources.of_model(source, folder))
        if self._binary is None:
            self._binary = _shared_binary() if output.shares and not output.embed else _Binary()
        self._protect_sources(output, model, source, request, self._binary)
        attributes: dict[str, int | str] = {
            "embed_mode": int(output.embed),
            "hardware_architecture": ",".join(request.architectures),
            "onnx_model_filename": Path(source).name if request.source is None else request.source.file,
        }
        payloads: list[bytes] = []
        names: list[str] = []
        if output.embed:
            if output.shares:
                raise ContextError(
                    "ep.context_embed_mode=1: with ep.share_ep_contexts=1 all sessions write one context file. "
                    "Set ep.context_embed_mode=0"
                )
            for cluster in clusters:
                writer = ContextWriter(kernel_library().get_many)
                names.append(writer.add(cluster, request))
                payloads.append(writer.to_bytes())
        elif clusters:
            path = output.binary_path(model, is_named=self._callbacks.writes)
            file, names = self._binary.write(clusters, request, path, output.is_last, self._callbacks)
            payloads = [file.encode(errors="surrogateescape")] * len(clusters)
        self._written = [
            (cluster, payload, {**attributes, "partition_name": name, "notes": f"{len(cluster.graph.nodes)} nodes"})
            for cluster, payload, name in zip(clusters, payloads, names, strict=True)
        ]

    def _protect_sources(
        self, output: ContextOutput, model: str, source: str, request: ContextRequest, binary: _Binary
    ) -> None:
        """Check that no file of the source models is overwritten.

        One case is allowed: a compiled model that stores its weights may replace its own source model.

        Raises:
            ContextError: a file of the source models would be overwritten.
        """
        compiled = output.compiled_path(model)
        beside: dict[str, Path | None] = {"context file": None, "file of initializers": None}
        if not output.embed and not self._callbacks.writes:
            beside["context file"] = binary.path or output.binary_path(model)
        if output.initializers_name and compiled is not None:
            beside["file of initializers"] = compiled.parent / output.initializers_name
        models = [Path(path) for path in (source, *self._sources.paths) if path]
        external = self._sources.external_files(source)
        if request.source is not None:
            binary.weights += [*models, *request.source.model.external_files()]
        everything = {"compiled model": compiled, **beside}
        refuse_to_replace(everything, binary.weights, "which has weights that the compiled model does not store")
        refuse_to_replace(everything, external, "which has external data of the model that is being compiled")
        refuse_to_replace(beside, models, "which is the model that is being compiled")

    def partition_name(self, fused: str) -> str:
        """Return the name of a fused node's partition in the context."""
        return (self.output.prefix if self.output is not None else "") + fused

    def nodes(self) -> list[Any]:
        """Return an ``OrtNode *`` for each cluster that was written, for ONNX Runtime to own.

        Raises:
            ContextError: a context is larger than an attribute of a model can be.
        """
        assert self.output is not None
        made: list[Any] = []
        try:
            for cluster, payload, attributes in self._written:
                fused = cluster.name.removeprefix(self.output.prefix)
                made.append(context_node(fused, cluster.inputs, cluster.outputs, payload, attributes))
        except BaseException:
            for node in made:
                host.api().ReleaseNode(node)
            raise
        finally:
            self._written = []
        return made


class _Binary:
    """A context file of one session, or of a group of sessions whose first session names the file.

    Attributes:
        path: the file, None before anything is written.
        weights: other files, with weights that the context file does not store.
    """

    def __init__(self) -> None:
        self._writer = ContextWriter(kernel_library().get_many)
        self.path: Path | None = None
        self.weights: list[Path] = []
        self._lock = threading.Lock()

    def write(
        self,
        clusters: Sequence[ContextCluster],
        request: ContextRequest,
        path: Path,
        is_last: bool,
        callbacks: ContextCallbacks,
    ) -> tuple[str, list[str]]:
        """Add clusters, and write all clusters added so far, because ONNX Runtime is about to free their constants.

        If the application has a write callback, the callback gets the contents, and no file is written. Return the
        names of the file and of the partitions.
        """
        with self._lock:
            try:
                self.path = self.path or path
                if self.path.parent.resolve() != path.parent.resolve():
                    raise ContextError(
                        "models that share a context file must be written to one folder: got "
                        f"{str(path.parent)!r}, expected that of the first model, {str(self.path.parent)!r}"
                    )
                names = [self._writer.add(cluster, request) for cluster in clusters]
                if callbacks.writes:
                    callbacks.write(self.path.name, self._writer.detach())
                else:
                    self._writer.write(self.path)
            except BaseException:
                _end_group(self)  # the writer may refer to constants that are about to be freed: no session may go on
                raise
            if is_last:
                _end_group(self)
            return self.path.name, names


_group: list[_Binary] = []
"""The context file that the sessions with ep.share_ep_contexts=1 write; empty before the first and after the last."""
_group_lock = threading.Lock()


def _shared_binary() -> _Binary:
    with _group_lock:
        if not _group:
            _group.append(_Binary())
        return _group[0]


def _end_group(binary: _Binary) -> None:
    with _group_lock:
        if binary in _group:
            _group.remove(binary)


def request_of(
    device: OpenDevice, properties: DeviceProperties, asked: Options, options: LoweringOptions
) -> ContextRequest:
    """Return the request for a context that corresponds to the options of a session.

    If the session's device can run a target's code, the target's plans avoid what is quarantined on this device.
    """
    targets = [ContextTarget(device.target, properties)]
    if asked.context_architectures:
        for_gpus = any(not target.is_emulated for target in asked.context_architectures)
        libraries = load_libraries() if for_gpus else frozenset()  # logs a warning for libraries that are missing
        libraries -= frozenset() if asked.enable_cudnn else {"cudnn"}
        targets = [
            ContextTarget(target, _target_properties(target, device, properties, libraries))
            for target in asked.context_architectures
        ]
    shapes = [dict(alternative) for alternative in asked.context_shapes]
    return ContextRequest(options, targets, shapes, asked.context_weightless)


def _target_properties(
    target: Target, device: OpenDevice, properties: DeviceProperties, libraries: frozenset[str]
) -> DeviceProperties:
    """Return the properties for which plans of a target are built; ``properties`` are those of the session's device."""
    if target.is_emulated:
        found, is_for_device = emulated_properties(), device.target.is_emulated
    else:
        found = DeviceProperties.gpu(target.compute_capability, libraries=libraries)
        is_for_device = not device.target.is_emulated and runs_on(target.arch, device.target.compute_capability)
    return replace(found, quarantine=properties.quarantine) if is_for_device else found


def give(nodes: Sequence[Any], ep_context_nodes: Any) -> None:
    """Store nodes in the array ``ep_context_nodes`` (``OrtNode **``) of ONNX Runtime; NULL: it wants none."""
    if ep_context_nodes != ffi.NULL:
        for index, node in enumerate(nodes):
            ep_context_nodes[index] = node
