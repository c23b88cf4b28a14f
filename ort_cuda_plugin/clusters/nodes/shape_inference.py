"""Shape inference of custom operators, for ONNX Runtime."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from ...custom.operator import CustomOperator
from ...custom.registry import Snapshot
from ...model.ir import AttrValue, DeclinedLayout, DType, Graph, Node, Value
from ...program.expressions.symbolic import Dim, Expr, is_read_back, single_atom
from ...program.lowering.context import Buffer, DeviceProperties, LoweringOptions
from .node_lowering import InputSymbols, NodeLowering, symbolic_input

NamedShape: TypeAlias = "tuple[int | str, ...]"

_fresh = itertools.count()


def unknown_dim() -> str:
    """Return a new name for an unknown dimension, since ONNX Runtime assumes equal sizes for equal names."""
    return f"ocp_unknown_{next(_fresh)}"


def infer_results(
    operator: CustomOperator, inputs: Sequence[Value | None], attributes: Mapping[str, AttrValue]
) -> list[tuple[DType, NamedShape]]:
    """Return type and shape of each result of ``operator``; a dimension is an integer or a name.

    The name of a computed dimension is the text of its expression. Raises Unsupported, InvalidModel, ZeroDivisionError
    or OverflowError if the operator has no results for these inputs.
    """
    named = [None if value is None else _with_names(value) for value in inputs]
    outputs = tuple(Value(f"output {number}", None, None) for number in range(len(operator.outputs)))
    node = Node("", operator.name, operator.domain, operator.version, tuple(named), outputs, attributes)
    used = [value for value in named if value is not None]
    graph = Graph("", [node], used, [], {operator.domain: operator.version})
    graph.operators = Snapshot.of(operator)
    symbols = InputSymbols()

    def read_host_input(buffer: Buffer, count: int) -> tuple[Dim, ...]:
        # Each node needs new names: ONNX Runtime assumes equal sizes for equal names.
        return symbols.host_values(buffer, [1] * count, unknown_dim())

    lowering = NodeLowering(
        graph, DeviceProperties(), LoweringOptions(), read_host_input, record=False, guesses=symbols
    )
    for index, value in enumerate(used):
        lowering.add_input(value, symbolic_input(symbols, value, index))
    try:
        lowering.lower(node)
    except DeclinedLayout as error:
        return [
            (dtype, tuple(unknown_dim() if dim is None else _name_of(dim) for dim in dims))
            for dtype, dims in error.results
        ]
    made = [lowering.tensors[value] for value in outputs if value in lowering.tensors]
    return [(tensor.dtype, tuple(map(_name_of, tensor.shape))) for tensor in made]


def _with_names(value: Value) -> Value:
    shape = None if value.shape is None else tuple(unknown_dim() if dim is None else dim for dim in value.shape)
    return Value(value.name, value.dtype, shape, value.initializer)


def _name_of(dim: Dim) -> int | str:
    if isinstance(dim, int):
        return dim
    assert isinstance(dim, Expr)
    text = repr(dim)
    known = single_atom(dim)
    is_whole = "..." not in text and not is_read_back(dim)
    return text if is_whole and (known is None or known.op is not None or known.name) else unknown_dim()
