"""Kernel of a single node that ONNX Runtime runs unfused: a cluster of one node, mapped to the node's inputs and
outputs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from ...abi import host
from ...abi.core import check, core, ffi, new_error
from ...custom.operator import AttributeKind, CustomOperator
from ...custom.registry import Implementation, Snapshot
from ...model.ir import Graph, Node
from ...model.ort.ort_calls import OrtCalls
from ...model.ort.ort_kernel import read_attributes, read_name, read_node, read_operator
from ...ops.kernel_definitions import is_view
from ..contexts.context_nodes import ContextIdentity
from ..device.open_device import OpenDevice
from .fused_node import FusedNode
from .kernel_registry import CONTEXT_KERNEL

_ANNOTATIONS: Final[Mapping[AttributeKind, str]] = {
    AttributeKind.INT: "int",
    AttributeKind.INTS: "tuple[int, ...]",
    AttributeKind.FLOAT: "float",
    AttributeKind.FLOATS: "tuple[float, ...]",
    AttributeKind.STRING: "str",
    AttributeKind.STRINGS: "tuple[str, ...]",
    AttributeKind.TENSOR: "Constant",
}


def context_identity(info: Any) -> ContextIdentity | None:
    """Identify the context node of ``info`` (``const OrtKernelInfo *``); None for another node."""
    ort = OrtCalls(host.api())
    domain, op_type, _ = read_operator(ort, info)
    if (domain, op_type) != (CONTEXT_KERNEL.domain, CONTEXT_KERNEL.name):
        return None
    found = read_attributes(ort, info, {"partition_name": "str", "embed_mode": "int"})
    is_file = found.get("embed_mode", 1) == 0
    file = read_attributes(ort, info, {"ep_cache_context": "str"}).get("ep_cache_context", "") if is_file else ""
    return ContextIdentity(read_name(ort, info), str(found.get("partition_name", "")), str(file))


def read_kernel_node(info: Any, device: OpenDevice, operators: Snapshot, opsets: Mapping[str, int]) -> Graph:
    """Read the node of ``info`` (``const OrtKernelInfo *``), as `read_node` does.

    ``operators`` are the session's, ``opsets`` the versions of domains that its model imports.

    Raises: Unsupported: the plugin has no operator for the node. OrtCallError: a call of ORT's API failed.
    """
    ort = OrtCalls(host.api())
    domain, name, version = read_operator(ort, info)
    opset = opsets.get(domain, version)
    rows = operators.implementations(Node("", name, domain, version, (), (), {}), opset)
    annotations: dict[str, str] = {}
    for row in rows:
        annotations |= _annotations(row)
    # A kernel copies its constant inputs, and ORT then frees them. But ORT may let a view's output share the memory of
    # input 0, so a view reads this input in each Run, even if it is constant.
    passed_on = (0,) if any(is_view(row.domain, row.name) for row in rows) else ()
    graph = read_node(ort, info, annotations, device.read, passed_on)
    graph.opsets = {domain: opset}
    graph.operators = operators
    return graph


def _annotations(row: Implementation) -> dict[str, str]:
    if isinstance(row, CustomOperator):
        return {attribute.name: _ANNOTATIONS[attribute.kind] for attribute in row.attributes}
    return {name: str(parameter.annotation) for name, parameter in row.attributes.items()}


def kernel_impl(graph: Graph, fused: FusedNode, device: OpenDevice, shared: Collection[str]) -> Any:
    """Make an ``OrtKernelImpl *`` that runs ``fused``, the compiled ``graph``, for ORT to release.

    ``shared`` names constants that ORT must keep, because bodies of control flow read them.
    """
    (node,) = graph.nodes
    names = [value.name if value is not None else "" for value in node.inputs]
    inputs = [names.index(value.name) for value in graph.inputs]
    outputs = [index for index, value in enumerate(node.outputs) if value is not None]
    constants = [
        index
        for index, value in enumerate(node.inputs)
        if value is not None and value.initializer and value.name not in shared
    ]
    return _create(fused, device, inputs, outputs, constants)


def context_kernel(node: Node, fused: FusedNode, device: OpenDevice) -> Any:
    """Make an ``OrtKernelImpl *``, for ORT to release, that runs ``fused``, the cluster of a context node."""
    return _create(fused, device, range(len(node.inputs)), range(len(node.outputs)), ())


def _create(
    fused: FusedNode, device: OpenDevice, inputs: Sequence[int], outputs: Sequence[int], constants: Sequence[int]
) -> Any:
    """Create the kernel.

    ``inputs`` and ``outputs`` hold the node's index for each input and output of the cluster, ``constants`` the indices
    of inputs that the kernel has copied.
    """
    spec = ffi.new("ocp_node_kernel_spec *")
    positions = ffi.new("uint32_t[]", [*inputs, *outputs, *constants])
    spec.cluster = fused.pointer
    spec.device = device.pointer
    spec.num_inputs, spec.num_outputs, spec.num_constants = len(inputs), len(outputs), len(constants)
    spec.positions = positions
    error = new_error()
    kernel = core().node_kernel_create(spec, error)
    check(error)
    return kernel
