"""Finds the first node that turns finite inputs into infinities or NaN, and the float16 nodes to compute in float32.

One Run returns the results of all nodes as additional outputs. These outputs prevent fusion. In an ordinary Run a fused
kernel does not round intermediate values to float16, so it may overflow less. A second Run computes all nodes in
float32, and rounds only the outputs to float16. It shows which further results exceed the range of float16. The nodes
that return or read a result beyond this range have to be computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from ..clusters.nodes.float32_nodes import listing_names
from .bisection import Run, reads

WithOptions = Callable[[Mapping[str, str]], Run]
"""Type of a function that takes provider options. It returns a function that runs a model on the plugin with them and
with the user's options.
"""

_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16)
_HALF = ("float16", "bfloat16")


@dataclass(frozen=True)
class Nonfinite:
    """A tensor that is not finite everywhere. ``kind`` is "input", "weight" or "output" of the model, or "result"."""

    kind: str
    name: str
    dtype: str
    size: int
    positive_infinities: int
    negative_infinities: int
    nans: int

    def __str__(self) -> str:
        counts = {
            "inf": self.positive_infinities,
            "-inf": self.negative_infinities,
            "NaN": self.nans,
        }
        found = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        return f"{self.kind} {self.name} ({self.dtype}): {found} of {self.size} elements"


@dataclass(frozen=True)
class NonfiniteNode:
    """A node whose ``result`` is not finite although its inputs are, or has NaN although its inputs have none.

    ``number`` is the node's index in the graph. ``largest_input`` is the largest finite magnitude in its floating-point
    inputs, 0 if they have no finite element.
    """

    number: int
    name: str
    op_type: str
    result: Nonfinite
    largest_input: float


@dataclass(frozen=True)
class NonfiniteReport:
    """What is not finite in a Run.

    ``given`` are inputs and weights of the model. ``nodes`` turn finite inputs into nonfinite results; ``first_nan`` is
    the first node that turns inputs without NaN into NaN, None if none does. ``keep_float32`` is the value of the
    option that computes the overflowing float16 values in float32, "" if no option helps. ``outputs`` are the nonfinite
    outputs of the model, and ``outputs_kept`` the outputs that are nonfinite with the option as well.
    """

    given: list[Nonfinite]
    nodes: list[NonfiniteNode]
    first_nan: NonfiniteNode | None
    outputs: list[Nonfinite]
    keep_float32: str
    outputs_kept: list[Nonfinite]

    @property
    def is_finite(self) -> bool:
        """Return whether no node made a nonfinite value, and no output has one."""
        return not (self.nodes or self.first_nan or self.outputs)


def find_nonfinite(
    model: onnx.ModelProto, folder: Path, feeds: Mapping[str, Any], given_entries: str, run_with: WithOptions
) -> NonfiniteReport:
    """Return what is not finite in a Run with the inputs ``feeds``.

    ``folder`` has the model's external data. ``given_entries`` is the value of keep_float32 in the given options, ""
    if they do not have it. Raises the errors of the Runs, and those of reading external data.
    """
    graph = model.graph
    listed = {entry.strip() for entry in given_entries.split(",") if entry.strip()}
    whole = _with_all_results(model, listed)
    weights = _weights(model, folder)
    known = {**weights, **feeds}
    values = {**known, **whole.run(run_with({}), feeds)}
    constants = {name for node in graph.node if node.op_type == "Constant" for name in node.output}
    kinds = {**dict.fromkeys(weights, "weight"), **dict.fromkeys(feeds, "input"), **dict.fromkeys(constants, "weight")}
    given = [found for name, kind in kinds.items() if (found := nonfinite(kind, name, values.get(name))) is not None]
    nodes = [*_nodes(model, values, whole.bfloat16, lambda x: ~np.isfinite(x))]
    first_nan = next(_nodes(model, values, whole.bfloat16, np.isnan), None)
    wanted = [value.name for value in graph.output]
    outputs = _of_outputs(wanted, run_with({})(model, wanted, feeds))
    entries = _entries_of(model, whole, feeds, nodes, known, values, run_with) if nodes else []
    if not entries:
        return NonfiniteReport(given, nodes, first_nan, outputs, "", outputs)
    option = ",".join(dict.fromkeys([*sorted(listed), *entries]))
    kept = _of_outputs(wanted, run_with({"keep_float32": option})(model, wanted, feeds))
    return NonfiniteReport(given, nodes, first_nan, outputs, option, kept)


def nonfinite(kind: str, name: str, value: Any) -> Nonfinite | None:
    """Return the counts of infinities and NaN in a value; None if it is finite, or has no floating-point elements."""
    array = _as_float(value)
    if array is None or np.isfinite(array).all():
        return None
    counts = (int(np.count_nonzero(found)) for found in (np.isposinf(array), np.isneginf(array), np.isnan(array)))
    return Nonfinite(kind, name, np.asarray(value).dtype.name, array.size, *counts)


def _as_float(value: Any) -> np.ndarray[Any, Any] | None:
    """Return a tensor of floats as float32 or float64; None for other values."""
    if not isinstance(value, np.ndarray | np.generic) or value.dtype.name not in (*_HALF, "float32", "float64"):
        return None
    return np.asarray(value, np.float32) if value.dtype.name in _HALF else np.asarray(value)


def _of_outputs(names: Sequence[str], values: Sequence[Any]) -> list[Nonfinite]:
    pairs = zip(names, values, strict=True)
    return [found for name, value in pairs if (found := nonfinite("output", name, value)) is not None]


@dataclass(frozen=True)
class _Instrumented:
    """A model with the results ``names`` of its nodes as outputs. Those in ``bfloat16`` are cast to float32, because
    ONNX Runtime does not convert bfloat16 to arrays.
    """

    model: onnx.ModelProto
    outputs: list[str]
    names: list[str]
    bfloat16: frozenset[str]

    def run(self, run: Run, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Return the results by name."""
        return dict(zip(self.names, run(self.model, self.outputs, feeds), strict=True))


def _with_all_results(model: onnx.ModelProto, listed: Collection[str]) -> _Instrumented:
    """Return the model with the results of its nodes as outputs.

    Left out are results whose types are known and not floating-point tensors, and values between nodes that
    keep_float32 lists: as outputs, these would be rounded to 16 bits.
    """
    inferred = onnx.shape_inference.infer_shapes(model).graph
    types = {value.name: value.type for value in (*inferred.value_info, *inferred.output)}
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    inner = _values_between(model.graph, listed)
    made = [name for node in model.graph.node for name in node.output if name and name not in inner]
    names = [name for name in made if name not in types or types[name].tensor_type.elem_type in _FLOATS]
    shorts = {name for name in names if name in types and types[name].tensor_type.elem_type == TensorProto.BFLOAT16}
    outputs = [f"{name}/as_float32" if name in shorts else name for name in names]
    for name, output in zip(names, outputs, strict=True):
        if name in shorts:
            whole.graph.node.append(onnx.helper.make_node("Cast", [name], [output], to=TensorProto.FLOAT))
    declared = {value.name: value for value in model.graph.output}
    del whole.graph.output[:]
    whole.graph.output.extend(declared.get(name, onnx.ValueInfoProto(name=name)) for name in outputs)
    return _Instrumented(whole, outputs, names, frozenset(shorts))


def _values_between(graph: onnx.GraphProto, listed: Collection[str]) -> set[str]:
    """Return the results of listed nodes that only listed nodes read."""

    def is_listed(node: onnx.NodeProto) -> bool:
        names = listing_names(node.name, node.output, node.domain, node.op_type)
        return any(name in listed for name in names)

    made = {name for node in graph.node if is_listed(node) for name in node.output}
    read = {name for node in graph.node if not is_listed(node) for name in reads(node)}
    return made - read - {value.name for value in graph.output}


def _weights(model: onnx.ModelProto, folder: Path) -> dict[str, Any]:
    """Return the floating-point initializers by name."""
    tensors = (tensor for tensor in model.graph.initializer if tensor.data_type in _FLOATS)
    return {tensor.name: numpy_helper.to_array(tensor, base_dir=str(folder)) for tensor in tensors}


def _nodes(
    model: onnx.ModelProto, values: Mapping[str, Any], bfloat16: Collection[str], is_bad: Callable[[Any], Any]
) -> Iterator[NonfiniteNode]:
    """Yield in order the nodes that have an element for which ``is_bad`` holds in a result, but in no input."""

    def floats(names: Sequence[str]) -> list[np.ndarray[Any, Any]]:
        return [array for name in names if (array := _as_float(values.get(name))) is not None]

    for number, node in enumerate(model.graph.node):
        if node.op_type == "Constant":
            continue
        read = floats([*dict.fromkeys(reads(node))])
        if any(is_bad(array).any() for array in read):
            continue
        for name in filter(None, node.output):
            if any(is_bad(array).any() for array in floats([name])):
                finite = (np.abs(array[np.isfinite(array)]).max(initial=0) for array in read)
                result = nonfinite("result", name, values[name])
                assert result is not None
                if name in bfloat16:
                    result = replace(result, dtype="bfloat16")
                yield NonfiniteNode(number, node.name or name, node.op_type, result, float(max(finite, default=0.0)))
                break


def _entries_of(
    model: onnx.ModelProto,
    whole: _Instrumented,
    feeds: Mapping[str, Any],
    found: Sequence[NonfiniteNode],
    known: Mapping[str, Any],
    values: Mapping[str, Any],
    run_with: WithOptions,
) -> list[str]:
    """Return entries of keep_float32 for the nodes that return or read values beyond float16, in order."""
    if not any(node.result.dtype == "float16" for node in found):
        return []
    functions = {(each.domain, each.name): each for each in model.functions}
    types = sorted({inner.op_type for node in model.graph.node for inner in _nodes_of(node, functions)})
    results = whole.run(run_with({"keep_float32": ",".join(types)}), feeds)
    beyond = {node.result.name for node in found if node.result.dtype == "float16"}
    bad = {name for name, value in results.items() if nonfinite("result", name, value) is not None}
    bad |= {name for name, value in known.items() if nonfinite("input", name, value) is not None}
    for node in model.graph.node:
        causes = bad & {*reads(node)}
        if not causes or causes & beyond:  # else an infinite input or weight is the cause, such as a mask
            beyond |= {name for name in bad & {*node.output} if values[name].dtype.name == "float16"}
    listed = [node for node in model.graph.node if beyond & {*reads(node), *node.output}]
    return [
        _entry(node) if inner is node else inner.op_type if (node.domain, node.op_type) in functions else _entry(inner)
        for node in listed
        for inner in _nodes_of(node, functions)
    ]


def _nodes_of(
    node: onnx.NodeProto, functions: Mapping[tuple[str, str], onnx.FunctionProto]
) -> Iterator[onnx.NodeProto]:
    """Yield the node itself, or the nodes of its bodies or of its function.

    Functions may call each other, but not in a cycle: ONNX Runtime has run the model.
    """
    function = functions.get((node.domain, node.op_type))
    bodies = [body.node for attribute in node.attribute for body in (attribute.g, *attribute.graphs) if body.node]
    if function is None and not bodies:
        yield node
    for inner in (*(function.node if function is not None else ()), *(one for body in bodies for one in body)):
        yield from _nodes_of(inner, functions)


def _entry(node: onnx.NodeProto) -> str:
    """Return the entry that names a node: an output, which ONNX Runtime renames less often than nodes.

    If no output or node name can be an entry, return the operator type.
    """
    names = (name for name in (*node.output, node.name) if name and "," not in name and name == name.strip())
    return next(names, node.op_type)
