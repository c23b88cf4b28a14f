"""EPContext nodes: writes them for the clusters of a session, and reads the contexts that they name."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...abi import host
from ...abi.core import ffi, lib
from ...context import workspace
from ...context.reader import Context
from ...context.storage.container import Container
from ...context.storage.errors import ContextError
from ...context.storage.files import Buffer, ModelFolder, check_name, open_context
from ...model.ir import Node
from ...model.open_file import OpenFile, native_path
from ...plugin_library import EP_NAME, plugin_version
from ..session.model_paths import CONTEXT_PATH, EXTERNAL_FOLDER, created_session_path, is_virtual
from .context_callbacks import ContextCallbacks
from .context_sources import SourceFinder

OP_TYPE, DOMAIN = "EPContext", "com.microsoft"
SOURCE = EP_NAME
MAX_EMBEDDED_BYTES = 2**31 - 2**20
"""Maximum bytes of a context inside a model file; protobuf limits the file to 2 GiB."""


@dataclass(frozen=True)
class ContextOutput:
    """How a session writes a compiled model: the session entries ``ep.context_*``.

    With ``shares`` several sessions write one file, and the session with ``is_last`` completes it.
    ``initializers_name`` is the file for initializers of other providers' nodes, "" if the model holds them.
    """

    file_path: str
    embed: bool
    prefix: str
    shares: bool
    is_last: bool
    initializers_name: str

    @staticmethod
    def of(entries: Mapping[str, str]) -> ContextOutput | None:
        """Read the session entries; return None if the session writes no compiled model."""
        if entries.get("ep.context_enable", "0") != "1":
            return None
        return ContextOutput(
            native_path(entries.get("ep.context_file_path", "")),
            entries.get("ep.context_embed_mode", "0") == "1",
            entries.get("ep.context_node_name_prefix", ""),
            entries.get("ep.share_ep_contexts", "0") == "1",
            entries.get("ep.stop_share_ep_contexts", "0") == "1",
            native_path(entries.get("ep.context_model_external_initializers_file_name", "")),
        )

    def compiled_path(self, model_path: str) -> Path | None:
        """Return the file to which ONNX Runtime writes the compiled model; None if no entry names it and the model
        comes from memory.
        """
        if self.file_path or not model_path:
            return Path(self.file_path) if self.file_path else None
        path = Path(model_path)
        return path.with_name(f"{path.stem}_ctx.onnx")

    def binary_path(self, model_path: str, is_named: bool = False) -> Path:
        """Return the path [model]_[ep].bin of the context file, next to the compiled model.

        If the model's path is unknown, return model_[ep].bin with ``is_named`` (the caller needs only a file name),
        else raise.

        Raises:
            ContextError: neither the model nor ep.context_file_path has a path.
        """
        if not self.file_path and not model_path and is_named:
            return Path(f"model_{EP_NAME}.bin")
        if not self.file_path and not model_path:
            raise ContextError(
                "ep.context_enable=1: the model comes from memory, and the path of the compiled model is not known. "
                "Set ep.context_file_path to this path, or ep.context_embed_mode to 1"
            )
        path = Path(self.file_path or model_path)
        return path.with_name(f"{path.stem.removesuffix('_ctx')}_{EP_NAME}.bin")


def is_context(node: Node) -> bool:
    """Return whether a node holds a context that this plugin compiled."""
    return (node.op_type, node.domain, node.attributes.get("source")) == (OP_TYPE, DOMAIN, SOURCE)


def context_node(
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    context: bytes,
    attributes: Mapping[str, int | str],
) -> Any:
    """Make an ``OrtNode *`` that ONNX Runtime will own. ONNX Runtime matches it to the fused node by name.

    ``context`` is the contents of the context, or the path of the file that has them; ``attributes`` are the node's
    other attributes.

    Raises:
        ContextError: the contents are too large for a model.
        OrtError: ONNX Runtime cannot make the node.
    """
    if len(context) > MAX_EMBEDDED_BYTES:
        raise ContextError(
            f"context in the compiled model: got {len(context)} bytes, expected at most {MAX_EMBEDDED_BYTES}. Set "
            "ep.context_embed_mode=0, which writes the context to a file"
        )
    written: dict[str, int | bytes] = {
        "main_context": 1,
        "ep_cache_context": context,
        "source": SOURCE.encode(),
        "ep_sdk_version": plugin_version().encode(),
        "max_size": 0,
        **{
            key: value.encode(errors="surrogateescape") if isinstance(value, str) else value
            for key, value in attributes.items()
        },
    }
    api = host.api()
    made = ffi.new("OrtOpAttr *[]", len(written))
    node = ffi.new("OrtNode **")
    try:
        for index, (key, value) in enumerate(written.items()):
            slot = ffi.new("OrtOpAttr **")
            if isinstance(value, int):
                data, length, kind = ffi.new("int64_t *", value), 1, lib.ORT_OP_ATTR_INT
            else:
                data, length, kind = ffi.from_buffer(value), len(value), lib.ORT_OP_ATTR_STRING
            host.check_status(api.CreateOpAttr(key.encode(), data, length, kind, slot))
            made[index] = slot[0]
        ins, outs = host.texts(inputs), host.texts(outputs)
        host.check_status(
            api.GetModelEditorApi().CreateNode(
                OP_TYPE.encode(),
                DOMAIN.encode(),
                name.encode(),
                ins[0],
                len(inputs),
                outs[0],
                len(outputs),
                made,
                len(made),
                node,
            )
        )
    finally:
        for attribute in made:  # ONNX Runtime sets the pointers of attributes that the node took over to NULL
            if attribute != ffi.NULL:
                api.ReleaseOpAttr(attribute)
    return node[0]


class ContextReader:
    """Reads the contexts that nodes hold or name, and finds their source models.

    ``callbacks`` of the application may read the files. ``entries`` are the session's entries.
    """

    def __init__(self, entries: Mapping[str, str], sources: SourceFinder, callbacks: ContextCallbacks) -> None:
        self._entries = entries
        self._sources = sources
        self._callbacks = callbacks
        self._files: dict[Hashable, Context] = {}
        self._embedded: list[Context] = []
        # The state of the application's callback has an unknown lifetime, so sessions do not share contexts that the
        # callback reads.
        self._shares = entries.get("ep.share_ep_contexts", "0") == "1" and not callbacks.reads
        self._is_last = entries.get("ep.stop_share_ep_contexts", "0") == "1"

    def read(self, nodes: Sequence[ContextNode]) -> list[tuple[Context, str]]:
        """Return the context of each node, and the name of the node's partition in the context.

        Raises:
            ContextError: a context cannot be read, or the data are not a context.
        """
        own = [self._own_context(each) for each in nodes]
        found = [self._partition(each.node, context) for each, context in zip(nodes, own, strict=True)]
        for each, (context, name) in zip(nodes, found, strict=True):
            self._find_source(each.node, each.model_path, context, name)
        if self._shares:
            self._take(found)
        return found

    def _take(self, found: Sequence[tuple[Context, str]]) -> None:
        """Mark the partitions that this session loaded as taken in `context.workspace`, which sessions share."""
        for key, file in self._files.items():
            for context, name in found:
                if context is file:
                    workspace.take(key, name)
        if self._is_last:
            workspace.end(self._files)

    def _find_source(self, node: Node, model_path: str, context: Context, name: str) -> None:
        """Give the context the source model with the weights of a partition, if the context does not store them."""
        wanted = context.source_of(name)
        if wanted is None or wanted[0] in context.constants.sources:
            return
        file = node.attributes.get("onnx_model_filename", "") or wanted[1]
        if not isinstance(file, str):
            raise ContextError(
                f"node {node.label}: attribute onnx_model_filename is not a string. Compile the model again"
            )
        folder = self._folder_with(file, model_path)
        context.constants.sources[wanted[0]] = self._sources.find(folder, file)

    def _own_context(self, each: ContextNode) -> Context | None:
        """Return the context that a node with main_context=1 holds or names; None for another node."""
        node = each.node
        if node.attributes.get("main_context", 1) != 1:
            return None
        if each.payload is None:
            raise ContextError(f"node {node.label}: attribute ep_cache_context is missing. Compile the model again")
        if node.attributes.get("embed_mode", 1) == 1:
            self._embedded.append(Context(Container(each.payload, f"the context in node {node.name!r}")))
            return self._embedded[-1]
        try:
            return self._file(bytes(each.payload).decode(), each.model_path)
        except UnicodeDecodeError as error:
            raise ContextError(
                f"node {node.label}: attribute ep_cache_context is not a file name. Compile the model again"
            ) from error

    def _partition(self, node: Node, context: Context | None) -> tuple[Context, str]:
        name = node.attributes.get("partition_name", "")
        if not isinstance(name, str) or not name:
            raise ContextError(
                f"node {node.label}: attribute partition_name: got {name!r}, expected the name of a partition. "
                "Compile the model again"
            )
        if context is not None:
            return context, name
        for other in (*self._embedded, *self._files.values()):
            if name in other.partitions:
                return other, name
        raise ContextError(
            f"node {node.label}: no EPContext node with main_context=1 contains partition {name!r}. Compile the "
            "model again"
        )

    def _folders(self, model_path: str) -> Iterator[ModelFolder]:
        """Yield the folders that may hold files of the model, the most likely one first: the model's own folder, then
        those of paths in session entries.
        """
        named = native_path(self._entries.get(CONTEXT_PATH, ""))
        last = ""
        if is_virtual(model_path, self._entries):
            model_path, last = created_session_path(), model_path
        for path in (model_path, named, last):
            if path:
                yield ModelFolder.of(path)

    def _folder_with(self, name: str, model_path: str) -> ModelFolder | None:
        """Return the first folder that has the file, else the first folder; None if there are no folders."""
        folders = [*self._folders(model_path)]
        return next((folder for folder in folders if folder.has(name)), folders[0] if folders else None)

    def _file(self, name: str, model_path: str) -> Context:
        folder = self._folder_with(name, model_path)
        if folder is None and not self._callbacks.reads:
            raise ContextError(
                f"context file {name!r} cannot be found, because the model comes from memory: set ep.context_file_path "
                "to the path of the compiled model"
            )
        key: Hashable = name
        if folder is not None and not self._callbacks.reads:
            key = os.path.realpath(folder.path), name
        if key not in self._files:
            container = self._container(key, folder, name, model_path)
            self._files[key] = Context(container)
            if self._shares and workspace.find(key) is not container:
                workspace.add(key, container, self._files[key].partitions)
        return self._files[key]

    def _container(self, key: Hashable, folder: ModelFolder | None, name: str, model_path: str) -> Container:
        """Return the container in a file, which the application's callback reads if there is one.

        If the file is gone, return the container that another session has read.
        """
        known = workspace.find(key) if self._shares else None
        subject = f"context file {name!r}"
        if folder is None or self._callbacks.reads:
            check_name(name, subject)
            return Container(self._callbacks.read(name), subject)
        if known is not None and not folder.has(name):
            return known
        file = self._open(folder, name, model_path)
        return known if known is not None and known.data is file else Container(file, subject)

    def _open(self, folder: ModelFolder, name: str, model_path: str) -> OpenFile:
        try:
            return open_context(folder, name)
        except ContextError as error:
            if folder.has(name) or not is_virtual(model_path, self._entries):
                raise
            raise ContextError(
                f"{error}. With {EXTERNAL_FOLDER} ONNX Runtime does not say where the model is: set {CONTEXT_PATH} to "
                "the path of the compiled model"
            ) from error


def model_path(ort_graph: Any) -> str:
    path = ffi.new("const char **")
    host.check_status(host.api().Graph_GetModelPath(ort_graph, path))
    return native_path(host.text(path[0]))


def only_node(ort_graph: Any) -> Any:
    """Return the ``const OrtNode *`` of a graph with one node."""
    nodes = ffi.new("const OrtNode *[1]")
    host.check_status(host.api().Graph_GetNodes(ort_graph, nodes, 1))
    return nodes[0]


@dataclass(frozen=True)
class ContextIdentity:
    """Identifies a context node: its name, its partition, and its context file ("" if the node holds the context)."""

    name: str
    partition: str
    file: str

    def find(self, nodes: Sequence[ContextNode]) -> int:
        """Return the index of the node with this identity in ``nodes``, the claimed nodes without a kernel so far.

        Raises:
            ContextError: no node has this identity, or several nodes have it, whose contexts may differ.
        """
        found = [index for index, node in enumerate(nodes) if node.identity == self]
        if not found:
            raise ContextError(
                f"{OP_TYPE} node {self.name!r}: ONNX Runtime asks for a kernel, but the session has not claimed the "
                f"node: got partition {self.partition!r}, expected one of "
                f"{sorted({n.identity.partition for n in nodes})}. Report the model"
            )
        if len(found) > 1 and not self.file:
            raise ContextError(
                f"{OP_TYPE} node {self.name!r}: the name must identify the node, because ONNX Runtime runs it alone: "
                f"got {len(found)} nodes of this name and partition, expected 1. Give each node another name"
            )
        return found[0]


@dataclass(frozen=True)
class ContextNode:
    """An EPContext node of the model at ``model_path``. It runs one partition of a context.

    ``payload`` is its attribute ep_cache_context, None if it has none.
    """

    node: Node
    payload: Buffer | None
    model_path: str

    @staticmethod
    def of(node: Node, ort_node: Any, ort_graph: Any) -> ContextNode:
        """Describe a node; ``ort_node`` is its ``const OrtNode *``, ``ort_graph`` the graph that contains it."""
        return ContextNode(node, _payload(ort_node), model_path(ort_graph))

    @property
    def identity(self) -> ContextIdentity:
        is_file = self.node.attributes.get("embed_mode", 1) == 0 and self.payload is not None
        file = bytes(self.payload or b"").decode(errors="replace") if is_file else ""
        return ContextIdentity(self.node.name, str(self.node.attributes.get("partition_name", "")), file)


def _payload(ort_node: Any) -> Buffer | None:
    api = host.api()
    attribute, size = ffi.new("const OrtOpAttr **"), ffi.new("size_t *")
    host.check_status(api.Node_GetAttributeByName(ort_node, b"ep_cache_context", attribute))
    if attribute[0] == ffi.NULL:
        return None
    # The first call fails on purpose: it returns the number of bytes. Its status is not an error.
    status = api.ReadOpAttr(attribute[0], lib.ORT_OP_ATTR_STRING, ffi.NULL, 0, size)
    if status != ffi.NULL:
        api.ReleaseStatus(status)
    data = bytearray(size[0])
    if size[0]:
        kind = lib.ORT_OP_ATTR_STRING
        host.check_status(api.ReadOpAttr(attribute[0], kind, ffi.from_buffer(data), size[0], size))
    return memoryview(data)
