"""The kernel of one node that ONNX Runtime runs by itself: a cluster of one node, called at the node's positions."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ..abi import host
from ..abi.core import check, core, ffi, new_error
from ..model.ir import Graph
from ..model.ort_calls import OrtCalls
from ..model.ort_kernel import read_node, read_operator
from ..ops.kernel_definitions import is_view
from ..ops.registry import lookup
from .fused_node import FusedNode
from .open_device import OpenDevice


def read_kernel_node(info: Any, device: OpenDevice) -> Graph:
    """The node of ``info`` (``const OrtKernelInfo *``), as `read_node` has it.

    Raises:
        Unsupported: the operator table does not have it.
        OrtCallError: ORT does not say what it must.
    """
    ort = OrtCalls(host.api())
    operator = lookup(*read_operator(ort, info))
    annotations = {name: str(parameter.annotation) for name, parameter in operator.attributes.items()}
    # ORT may have a view's output in the memory of its input, which it would free if the kernel took it over.
    passed_on = (0,) if is_view(operator) else ()
    return read_node(ort, info, annotations, device.read, passed_on)


def kernel_impl(graph: Graph, fused: FusedNode, device: OpenDevice, shared: Collection[str]) -> Any:
    """An ``OrtKernelImpl *`` that runs ``fused``, the compiled ``graph``, for ORT to release.

    ``shared`` names constants that ORT must keep, because it hands them to bodies.
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
