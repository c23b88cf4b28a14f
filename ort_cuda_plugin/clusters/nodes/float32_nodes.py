"""Computation of float16 and bfloat16 nodes in float32, for the option ``keep_float32``.

A listed node reads float32 tensors, so its operator's function computes a float32 result. This module converts what
the node reads, and rounds what it returns to the type that the model declares. Between two listed nodes the value
stays float32: the second node reads the result before the rounding, and dead code elimination drops a rounded tensor
that no other node reads. The conversions are elementwise steps, which fuse with their neighbors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ...model.ir import HALVES, AttrValue, DType, Node, Value
from ...ops.registry import is_built_in, lookup
from ...passes.analysis.magnitude_bounds import MagnitudeBounds
from ...program.expressions.scalar import cast
from ...program.lowering.context import Lowering
from ...program.lowering.elementwise import elementwise
from ...program.steps.containers import Operand
from ...program.steps.tensor import Tensor

_SMALL_CONSTANT = 2**12
"""Maximum bytes of a constant that the host converts. Kernels convert larger ones when they load them."""

_VIEWS = frozenset({"Expand", "Flatten", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators that move elements, mostly without a step: listed nodes on both sides of them exchange float32."""

_BY_TYPE = {
    "BitCast": "it reinterprets the bits of 16-bit elements",
    "RandomUniform": "a rounded number could be the upper limit, which is not in the interval",
    "RandomUniformLike": "a rounded number could be the upper limit, which is not in the interval",
    "Range": "the type determines the number of elements",
}
"""Operators that would give another result in float32, and not only a more precise one; each with the reason."""

_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype", "output_datatype")
"""Attributes that name the element type of an operator's result."""

_INSTEAD: Mapping[int | str, int | str] = {
    DType.FLOAT16.onnx: DType.FLOAT32.onnx,
    DType.BFLOAT16.onnx: DType.FLOAT32.onnx,
    "FLOAT16": "FLOAT",
    "BFLOAT16": "FLOAT",
}
"""Value of a type attribute -> the value with which the operator returns float32."""


AUTOMATIC = "auto"
"""Entry of the option for the nodes that value range analysis finds."""
LARGEST_FLOAT16 = 65504.0


def listing_names(name: str, outputs: Iterable[str], domain: str, op_type: str) -> tuple[str, ...]:
    """Return the texts with which ``keep_float32`` lists a node.

    These are its name, the names of its outputs, its type, and its type after its domain. ONNX Runtime keeps the name
    of the last output of nodes that it fuses.
    """
    return name, *outputs, op_type, f"{domain or 'ai.onnx'}.{op_type}"


def names_of(node: Node) -> tuple[str, ...]:
    """Return the `listing_names` of a node."""
    outputs = (value.name for value in node.outputs if value is not None)
    return listing_names(node.name, outputs, node.domain, node.op_type)


def is_listed(entries: Collection[str], node: Node) -> bool:
    """Return whether one of the option's entries names the node."""
    return any(name in entries for name in names_of(node))


def why_no_float32(node: Node) -> str:
    """Return why the plugin does not compute a listed node in float32; "" if it does."""
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    if node.has_subgraphs:
        return "list the nodes in its bodies instead"
    if any(value.is_container for value in values):
        return "it reads or returns a sequence or an optional value"
    if any(value is not None and value.dtype is None for value in node.outputs):
        return "ONNX Runtime does not know the type of its result"
    if not node.domain and node.op_type in _BY_TYPE:
        return _BY_TYPE[node.op_type]
    if not any(value.dtype in HALVES for value in values):
        return "it reads and returns no float16 or bfloat16"
    return _unsupported_input(node)


def _why_not_automatic(node: Node) -> str:
    """Return why value range analysis may not choose the node; "" if it may choose it."""
    if not is_built_in(node.domain, node.op_type, node.since_version):
        return "it may be a custom operator"
    return why_no_float32(node)


def _unsupported_input(node: Node) -> str:
    """Return which 16-bit input the operator does not support in float32; "" if there is none."""
    if not is_built_in(node.domain, node.op_type, node.since_version):
        return ""
    operator = lookup(node.domain, node.op_type, node.since_version)
    for index, value in enumerate(node.inputs[: len(operator.inputs)]):
        types = operator.types.get(operator.constraint(index), frozenset({DType.FLOAT32}))
        if value is not None and value.dtype in HALVES and DType.FLOAT32 not in types:
            return f"{operator.name} does not support float32 for input {index}"
    return ""


class Float32Nodes:
    """The nodes of a graph that are computed in float32, and their results before the rounding to 16 bits.

    With the entry `AUTOMATIC` these are also the nodes whose results may exceed float16 according to value range
    analysis, and those that read such a result. The analysis needs the recorded steps, so a claim cannot use it.
    """

    def __init__(self, entries: Collection[str], *, is_claim: bool) -> None:
        self._entries = frozenset(entries) - {AUTOMATIC}
        self._bounds = MagnitudeBounds() if AUTOMATIC in entries and not is_claim else None
        self._num_noted = 0
        self._beyond: dict[Value, float] = {}
        self._results: dict[Value, Tensor] = {}
        self._converted: dict[Tensor, Tensor] = {}
        self.reports: list[str] = []
        """A line for each node that value range analysis has found."""

    def has(self, node: Node) -> bool:
        """Return whether the node is listed, and computed in float32."""
        return bool(self._entries) and is_listed(self._entries, node) and not why_no_float32(node)

    def reads_beyond(self, node: Node) -> bool:
        """Return whether the node reads a float32 result beyond float16, and can be computed in float32."""
        return any(value in self._beyond for value in node.inputs) and not _why_not_automatic(node)

    def carries(self, node: Node) -> bool:
        """Return whether the node returns a view of a float32 result, and is not computed in float32 itself."""
        return not node.domain and node.op_type in _VIEWS and node.inputs[0] in self._results

    def carry(self, node: Node, results: Sequence[Operand]) -> None:
        """Record the float32 results of a node that `carries`, for listed nodes that read them."""
        for value, result in zip(node.outputs, results, strict=False):
            if value is not None and isinstance(result, Tensor):
                self._results[value] = result

    def exceeds(self, ctx: Lowering, node: Node, results: Sequence[Operand]) -> bool:
        """Return whether float16 results of the node, which was just lowered, may exceed float16."""
        return bool(self._excess(ctx, node, results)) and not _why_not_automatic(node)

    def note(self, ctx: Lowering, node: Node, results: Sequence[Operand], *, is_listed: bool) -> None:
        """Record which results of the node, which was just lowered in float32, exceed float16."""
        if self._bounds is None:
            return
        excess = self._excess(ctx, node, results)
        self._beyond |= excess
        if not is_listed:
            reached = ", ".join(f"{value.name} up to {bound:.3g}" for value, bound in excess.items())
            why = f"its values may exceed float16: {reached}" if excess else "it reads values that may exceed float16"
            self.reports.append(f"keep_float32=auto computes node {node.label} in float32, because {why}")

    def _excess(self, ctx: Lowering, node: Node, results: Sequence[Operand]) -> dict[Value, float]:
        """Return the float16 values of the node whose bounds exceed float16, with the bounds."""
        if self._bounds is None:
            return {}
        for step in ctx.trace.steps[self._num_noted :]:
            self._bounds.note(step)
        self._num_noted = len(ctx.trace.steps)
        found: dict[Value, float] = {}
        for value, result in zip(node.outputs, results, strict=False):
            if value is not None and value.dtype is DType.FLOAT16 and isinstance(result, Tensor):
                bound = self._bounds.of(result)
                if bound is not None and bound > LARGEST_FLOAT16:
                    found[value] = bound
        return found

    def inputs(self, ctx: Lowering, node: Node, operands: Sequence[Operand | None]) -> list[Operand | None]:
        """Return the node's operands with float32 in place of 16-bit elements."""
        return [
            self._results.get(value) or self._in_float32(ctx, x)
            if value is not None and isinstance(x, Tensor) and x.dtype in HALVES
            else x
            for value, x in zip(node.inputs, operands, strict=True)
        ]

    def node(self, node: Node) -> Node:
        """Return the node with float32 in place of a 16-bit type that one of its attributes names."""
        changed: dict[str, AttrValue] = {
            name: _INSTEAD[value]
            for name in _TYPE_ATTRIBUTES
            if isinstance(value := node.attributes.get(name), int | str) and value in _INSTEAD
        }
        return replace(node, attributes={**node.attributes, **changed}) if changed else node

    def rounded(self, ctx: Lowering, value: Value, result: Tensor) -> Tensor:
        """Return the result in the 16-bit type that the model declares; listed nodes read ``result`` itself.

        A result that has this type already, or a type that is not 16-bit, is returned as it is.
        """
        dtype = value.dtype
        if dtype not in HALVES or result.dtype is not DType.FLOAT32:
            return result
        self._results[value] = result
        source = ctx.before_widening(result)
        if source is not None and source.dtype is dtype:
            return source
        beside = ctx.rounded_beside(result, dtype)
        if beside is not None:
            self._num_noted = min(self._num_noted, len(ctx.trace.steps) - 1)  # the last step has a further result
            return beside
        return elementwise(ctx, lambda x: cast(x, dtype), result)

    def _in_float32(self, ctx: Lowering, x: Tensor) -> Tensor:
        """Return x in float32. Two calls with one tensor return one tensor."""
        if x not in self._converted:
            if x.is_constant and x.nbytes <= _SMALL_CONSTANT:
                self._converted[x] = ctx.derived("float32", (x,), (), x.static_shape, DType.FLOAT32)
            else:
                self._converted[x] = elementwise(ctx, lambda element: cast(element, DType.FLOAT32), x)
            ctx.note_widening(x, self._converted[x])
        return self._converted[x]
