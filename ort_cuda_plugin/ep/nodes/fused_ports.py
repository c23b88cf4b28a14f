"""Inputs and outputs of a fused node, as ONNX Runtime's ``OrtNode`` has them, and of the cluster that it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...abi import host
from ...abi.core import check, core, ffi, new_error
from ...context.storage.errors import ContextError
from ...model.ir import Node, Value


def node_name(node: Any) -> str:
    """Return the name of a node (``const OrtNode *``)."""
    return _text("Node_GetName", node)


def value_names(node: Any, kind: str) -> list[str]:
    """Return the names of a node's inputs or outputs, in its order. ``kind`` is "Inputs" or "Outputs"."""
    count = ffi.new("size_t *")
    host.check_status(getattr(host.api(), f"Node_GetNum{kind}")(node, count))
    values = ffi.new("const OrtValueInfo *[]", count[0])
    host.check_status(getattr(host.api(), f"Node_Get{kind}")(node, values, count[0]))
    return [_text("GetValueInfoName", value) for value in values]


@dataclass(frozen=True)
class Ports:
    """The inputs and outputs of a cluster at the fused node that runs the cluster.

    ``names`` are those of the inputs. ``inputs`` and ``outputs`` are indices at the fused node.
    """

    names: list[str]
    inputs: list[int]
    outputs: list[int]


def ports_of(fused_node: Any) -> Ports:
    """Return the ports of a cluster that has the inputs and outputs of ``fused_node`` in the same order."""
    names = value_names(fused_node, "Inputs")
    return Ports(names, [*range(len(names))], [*range(len(value_names(fused_node, "Outputs")))])


def context_ports(context: Node, fused_node: Any) -> Ports:
    """Return the ports of the cluster of an EPContext node, which ``fused_node`` replaces.

    ONNX Runtime gives the fused node the outputs of the model first, then the other outputs in the order of the nodes
    that read them. It leaves out an output that nothing reads, and the repetition of an input.

    Raises:
        ContextError: the node omits an input, or nothing reads an output.
    """
    inputs, outputs = (value_names(fused_node, kind) for kind in ("Inputs", "Outputs"))
    read, made = _names(context.inputs), _names(context.outputs)
    for kind, names, there in (("input", read, inputs), ("output", made, outputs)):
        if missing := [index for index, name in enumerate(names) if name not in there]:
            raise ContextError(
                f"EPContext node {context.name!r}: {kind} {missing[0]} ({names[missing[0]]!r}) is not connected. Use "
                "the compiled model as it was written, or compile its source model again after the change"
            )
    return Ports(read, [inputs.index(name) for name in read], [outputs.index(name) for name in made])


def compute_info(ports: Ports, cluster: Any, device: Any) -> Any:
    """Make the ``OrtNodeComputeInfo *`` of a fused node that runs ``cluster`` (``ocp_cluster *``) on ``device``
    (``ocp_device *``). The cluster must live until ONNX Runtime releases the result.

    Raises:
        PluginError: out of memory.
    """
    names, kept = host.texts(ports.names)
    positions, counts = [*ports.inputs, *ports.outputs], (len(kept), len(ports.outputs))
    error = new_error()
    info = core().compute_info_create(cluster, device, names, positions, *counts, error)
    check(error)
    return info


def _names(values: Sequence[Value | None]) -> list[str]:
    return ["" if value is None else value.name for value in values]


def _text(function: str, owner: Any) -> str:
    out = ffi.new("const char **")
    host.check_status(getattr(host.api(), function)(owner, out))
    return host.text(out[0])
