"""Lowering of If, Loop and Scan inside a plan: the taken branch, unrolled iterations, or a loop on the device.

The branch or the number of unrolled iterations must be known when the plan is built: from constants, shapes, or host
inputs, on which the plan is guarded. `device_loop` lowers a Loop or Scan that cannot be unrolled, and an If in its
body. Kernels of ONNX Runtime run all other control-flow nodes, with their bodies as subgraphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ...model.ir import MAX_SUBGRAPH_DEPTH, DType, Graph, InvalidModel, Node, UnknownRank, Unsupported, Value
from ...ops import requirements as require
from ...ops.axes import normalize_axis
from ...ops.onnx.tensor.indexing import select_index
from ...ops.onnx.tensor.slicing import concat
from ...program.expressions.symbolic import Dim, eq, is_read_back, lt, ne, select, sym_max
from ...program.lowering.host import defer_host
from ...program.lowering.views import unsqueeze
from ...program.steps.containers import Operand
from ...program.steps.tensor import BufferKind, Tensor
from .device_loop import Iteration, LoopPlan, Slices, Stack, carried_tensors, lower_if, lower_loop

if TYPE_CHECKING:
    from ...program.lowering.context import Lowering

MAX_UNROLLED_NODES = 1024
"""Maximum nodes of an unrolled Loop or Scan, over all iterations and inner bodies."""

_INT64_MAX = 2**63 - 1
MAX_EXPANDED_BYTES = 2**22
"""Maximum bytes of the constants of a body's cluster whose nodes the surrounding graph's plan may lower again."""

Inputs = Sequence[Operand | None]


@dataclass(frozen=True)
class CompiledBody:
    """A cluster in a control-flow body. ORT has replaced its nodes by a fused node with these inputs and outputs."""

    graph: Graph
    inputs: Sequence[Value]
    outputs: Sequence[Value]

    @cached_property
    def is_small(self) -> bool:
        constants = (value.initializer for value in self.graph.used_values)
        return sum(constant.nbytes for constant in constants if constant) <= MAX_EXPANDED_BYTES


@dataclass(frozen=True)
class CompiledBodies:
    """Clusters that ``provider`` compiled in bodies, by the names of their fused nodes.

    ORT presents bodies before the surrounding graph, whose claim therefore sees fused nodes in the bodies.
    """

    provider: str = ""
    by_name: Mapping[str, CompiledBody] = field(default_factory=dict)

    def find(self, node: Node) -> CompiledBody | None:
        """Return the cluster of the fused node ``node`` if the plan may contain its nodes instead, else None."""
        body = self.by_name.get(node.name) if node.provider and node.provider == self.provider else None
        return body if body is not None and body.is_small else None


class BodyLowering(Protocol):
    """The part of `NodeLowering` that lowers the nodes of a body into the program of the surrounding graph."""

    ctx: Lowering
    compiled: CompiledBodies

    def lower(self, node: Node) -> None: ...

    def operand(self, value: Value) -> Operand: ...

    def set(self, value: Value, operand: Operand) -> None: ...

    def spend_nodes(self, count: int) -> None: ...


def inline(lowering: BodyLowering, node: Node, inputs: Inputs) -> list[Operand]:
    """Lower the bodies of a node in place of the node, and return its results.

    Raises Unsupported for an unknown branch or number of iterations, and the errors of the body's nodes.
    """
    if not node.subgraphs:
        raise Unsupported(
            "control-flow",
            f"the bodies of {node.op_type} are nested too deeply; supported: up to {MAX_SUBGRAPH_DEPTH} levels of "
            "bodies",
        )
    if (node.domain, node.op_type) == ("", "If"):
        return _if(lowering, node, inputs)
    if (node.domain, node.op_type) == ("", "Loop"):
        return _loop(lowering, node, inputs)
    if (node.domain, node.op_type) == ("", "Scan"):
        return _scan(lowering, node, inputs) if node.since_version >= 9 else _scan_8(lowering, node, inputs)
    raise Unsupported("control-flow", f"{node.op_type}-{node.since_version} with a body is not implemented")


def unrolled_nodes(body: Graph, compiled: CompiledBodies) -> int:
    """Return the number of nodes of ``body``, with those of nested bodies and of clusters compiled in bodies."""
    clusters = [compiled.find(node) for node in body.all_nodes()]
    return sum(1 if cluster is None else len(cluster.graph.nodes) for cluster in clusters)


def expand(lowering: BodyLowering, cluster: CompiledBody, inputs: Inputs) -> list[Operand]:
    """Lower the nodes of a cluster in a body instead of its fused node; return its results."""
    for value, operand in zip(cluster.inputs, inputs, strict=True):
        if operand is not None:
            lowering.set(value, operand)
    for node in cluster.graph.nodes:
        lowering.lower(node)
    return [lowering.operand(value) for value in cluster.outputs]


def _body(lowering: BodyLowering, node: Node, name: str, arguments: Sequence[Operand]) -> list[Operand]:
    """Lower a body of ``node`` for these arguments, and return its results."""
    body = node.subgraphs.get(name)
    if body is None:
        raise InvalidModel(f"{node.op_type}: body {name!r} is missing")
    if len(arguments) != len(body.inputs):
        raise InvalidModel(f"{node.op_type}: body {name!r} has {len(body.inputs)} inputs, expected {len(arguments)}")
    for value, argument in zip(body.inputs, arguments, strict=True):
        lowering.set(value, argument)
    for inner in body.nodes:
        try:
            if inner.provider not in ("", lowering.compiled.provider):
                raise Unsupported("control-flow", f"ONNX Runtime has assigned {inner.label} to {inner.provider}")
            lowering.lower(inner)
        except UnknownRank as error:
            raise UnknownRank(_within(name, inner, error.reason)) from error
        except Unsupported as error:
            raise Unsupported(error.kind, _within(name, inner, error.reason)) from error
        except InvalidModel as error:
            raise InvalidModel(_within(name, inner, error.reason)) from error
    lowering.ctx.node = node
    return [lowering.operand(value) for value in body.outputs]


def _within(body: str, node: Node, reason: str) -> str:
    return f"in its {body}, node {node.label}: {reason}"


def _if(lowering: BodyLowering, node: Node, inputs: Inputs) -> list[Operand]:
    ctx = lowering.ctx
    condition = _scalar(node, inputs, 0, DType.BOOL)
    if ctx.is_in_loop and condition.host is None and condition.buffer.kind is not BufferKind.INPUT:
        return lower_if(ctx, node, condition, lambda name: _body(lowering, node, name, ()))
    (taken,) = ctx.host_constants(condition, "the condition of If", [1])
    if not ctx.guessed:
        return _body(lowering, node, "then_branch" if taken else "else_branch", ())
    branches = _valid_branches(lowering, node)
    results, others = branches[0], branches[-1]
    if len(results) != len(others):
        raise InvalidModel(f"If: the branches have {len(results)} and {len(others)} results, expected the same number")
    possible: list[Operand] = []
    for number, (x, other) in enumerate(zip(results, others, strict=True)):
        if not isinstance(x, Tensor) or not isinstance(other, Tensor):
            raise Unsupported(
                "control-flow",
                f"result {number} of If is not a tensor, and the branch is known only when the model runs",
            )
        if x.dtype is not other.dtype:
            types = f"{x.dtype.short} in one branch, {other.dtype.short} in the other"
            raise InvalidModel(f"If: result {number} is {types}, expected the same type")
        if x.rank != other.rank and ctx.trial is None:
            raise UnknownRank(f"result {number} of If has rank {x.rank} in one branch, {other.rank} in the other")
        possible.append(_either(ctx, x, other) if (ctx.trial or 0) % 2 == 0 else _either(ctx, other, x))
    ctx.guessed = True  # a Run may take either branch
    return possible


def _either(ctx: Lowering, x: Tensor, other: Tensor) -> Tensor:
    """Return a tensor with the type and shape of x, for a result of If whose branch is known only in a Run.

    This is x itself, or a stand-in if both branches have different tensors and x is small and of static shape. If the
    host requests the stand-in's elements, it gets those of ``other`` if a Run must read these back from the device,
    else those of ``x``.
    """
    if x is other or x.positions() is None:
        return x

    def contents(own: tuple[Dim, ...], others: tuple[Dim, ...]) -> tuple[Dim, ...]:
        if not any(map(is_read_back, others)):
            return own
        if len(own) != len(others):
            raise Unsupported(
                "control-flow",
                "a result of If has different numbers of elements in the two branches, and the device computes the "
                "elements in a branch; supported: elements that follow from input shapes",
            )
        return others

    return defer_host(ctx, ctx.stand_in(x.shape, x.dtype), (x, other), contents)


def _valid_branches(lowering: BodyLowering, node: Node) -> list[list[Operand]]:
    """Return the results of the valid branches; no Run takes an invalid branch.

    Raises InvalidModel if both branches are invalid.
    """
    results: list[list[Operand]] = []
    for name in ("then_branch", "else_branch"):
        try:
            results.append(_body(lowering, node, name, ()))
        except InvalidModel:
            if name == "else_branch" and not results:
                raise
    return results


def _loop(lowering: BodyLowering, node: Node, inputs: Inputs) -> list[Operand]:
    return _unrolled_or_on_device(
        lambda: _unrolled_loop(lowering, node, inputs), lambda: _loop_on_device(lowering, node, inputs)
    )


def _unrolled_or_on_device(
    unrolled: Callable[[], list[Operand]], on_device: Callable[[], list[Operand]]
) -> list[Operand]:
    """Return the results of the unrolled iterations, or else those of a loop on the device.

    Dead code elimination drops the steps of iterations that were unrolled in vain.
    """
    try:
        return unrolled()
    except UnknownRank:
        raise
    except Unsupported as error:
        why = error
    try:
        return on_device()
    except Unsupported as error:
        if isinstance(error, UnknownRank) or error.reason == why.reason:
            raise
        raise Unsupported(
            error.kind, f"{why.reason}; the node cannot be a loop on the device either: {error.reason}"
        ) from error


def _loop_on_device(lowering: BodyLowering, node: Node, inputs: Inputs) -> list[Operand]:
    ctx = lowering.ctx
    states = carried_tensors(node, _given(node, inputs[2:]))
    num_stacks = len(node.subgraphs["body"].outputs) - 1 - len(states)
    limit = _limit(ctx, node, inputs, host=num_stacks > 0)
    on = None if _is_missing(inputs, 1) else _scalar(node, inputs, 1, DType.BOOL)
    if on is not None and (num_stacks > 0 or on.host is not None):
        first = ctx.host_number(on, "the first condition of Loop")
        if first == 0:
            limit = 0
        elif first != 1 and not isinstance(limit, Tensor):
            limit = select(ne(first, 0), _INT64_MAX if limit is None else limit, 0)
        on = None
    if num_stacks > 0 and not isinstance(limit, Tensor):
        empty = [_no_rows(ctx, value) for value in node.subgraphs["body"].outputs[1 + len(states) :]]
        if limit is not None and ctx.settled(lt(0, limit)) is False:
            return [*states, *empty]

    def lower(iteration: Iteration) -> tuple[Tensor | None, Sequence[Operand], Sequence[Operand]]:
        holds = ctx.constant(np.array(True))
        results = _body(lowering, node, "body", (iteration.number, holds, *iteration.states))
        goes_on = _scalar(node, results, 0, DType.BOOL, "result of the body")
        is_constant = goes_on.host is not None and goes_on.host[0] == 1
        return None if is_constant else goes_on, results[1 : 1 + len(states)], results[1 + len(states) :]

    return lower_loop(ctx, LoopPlan(node, limit, on, states, (), (Stack(0, False),) * num_stacks, lower))


def _no_rows(ctx: Lowering, declared: Value) -> Tensor:
    """Return the stacked values of a Loop that runs no iteration. As in ONNX Runtime, symbolic dimensions are 0."""
    if declared.dtype is None or declared.shape is None:
        reason = f"the model does not declare the shape or the type of the body's result {declared.name!r}"
        raise Unsupported("control-flow", f"{reason}, which the Loop needs if no iteration runs")
    return ctx.empty((0, *(dim if isinstance(dim, int) else 0 for dim in declared.shape)), declared.dtype)


def _limit(ctx: Lowering, node: Node, inputs: Inputs, *, host: bool) -> Dim | Tensor | None:
    """Return the trip count of a Loop: a size, a tensor whose value only the device knows, or None if there is none.

    With ``host``, the trip count is a size, which the host may have to read back from the device.
    """
    if _is_missing(inputs, 0):
        return None
    trips = _scalar(node, inputs, 0, DType.INT64)
    if host or trips.host is not None or trips.buffer.kind is BufferKind.INPUT:
        return sym_max(ctx.host_number(trips, "the trip count of Loop"), 0)
    return ctx.contiguous(trips)


def _unrolled_loop(lowering: BodyLowering, node: Node, inputs: Inputs) -> list[Operand]:
    ctx = lowering.ctx
    trips = None if _is_missing(inputs, 0) else _scalar(node, inputs, 0, DType.INT64)
    on = ctx.constant(np.array(True)) if _is_missing(inputs, 1) else _scalar(node, inputs, 1, DType.BOOL)
    states = _given(node, inputs[2:])
    body = node.subgraphs.get("body")
    if body is None:
        raise InvalidModel("Loop: its body is missing")
    most = None if trips is None else _known_number(trips, "the trip count of Loop")
    size = unrolled_nodes(body, lowering.compiled)
    rows: list[list[Operand]] = []
    scanned = len(body.outputs) - 1 - len(states)
    if scanned < 0:
        raise InvalidModel(
            f"Loop: the body has {len(body.outputs)} results, expected at least a condition and {len(states)} "
            "loop-carried values"
        )
    count = 0
    while most is None or count < most:
        if not _known_number(on, "the condition of Loop"):
            break
        _check_count(max(most or 0, count + 1), size, "Loop")
        lowering.spend_nodes(size)
        number = ctx.constant(np.array(count, np.int64))
        results = _body(lowering, node, "body", (number, on, *states))
        on = _scalar(node, results, 0, DType.BOOL, "result of the body")
        results = results[1:]
        states = results[: len(states)]
        rows.append(results[len(states) :])
        count += 1
    outputs = list(states)
    for k in range(scanned):
        declared = body.outputs[1 + len(states) + k]
        outputs.append(_stacked(lowering, _tensors(node, (row[k] for row in rows)), 0, declared))
    return outputs


def _scan(lowering: BodyLowering, node: Node, inputs: Inputs) -> list[Operand]:
    return _unrolled_or_on_device(
        lambda: _unrolled_scan(lowering, node, inputs), lambda: _scan_on_device(lowering, node, inputs)
    )


def _scan_on_device(lowering: BodyLowering, node: Node, inputs: Inputs) -> list[Operand]:
    ctx = lowering.ctx
    body, initial, sequences = _parts_of_scan(node, inputs)
    states, count = carried_tensors(node, initial), len(sequences)
    axes = _numbers(node, "scan_input_axes", count)
    backwards = _numbers(node, "scan_input_directions", count)
    slices = [
        Slices(ctx.contiguous(ctx.materialize(x)), normalize_axis(axis, x.rank), bool(back))
        for x, axis, back in zip(sequences, axes, backwards, strict=True)
    ]
    length = _common_length(ctx, [each.x.shape[each.axis] for each in slices])
    num_stacks = len(body.outputs) - len(states)
    out_axes = _numbers(node, "scan_output_axes", num_stacks)
    reversed_ = _numbers(node, "scan_output_directions", num_stacks)
    stacks = tuple(Stack(axis, bool(back)) for axis, back in zip(out_axes, reversed_, strict=True))

    def lower(iteration: Iteration) -> tuple[Tensor | None, Sequence[Operand], Sequence[Operand]]:
        results = _body(lowering, node, "body", (*iteration.states, *iteration.slices))
        return None, results[: len(states)], results[len(states) :]

    return lower_loop(ctx, LoopPlan(node, length, None, states, tuple(slices), stacks, lower))


def _unrolled_scan(lowering: BodyLowering, node: Node, inputs: Inputs) -> list[Operand]:
    body, states, sequences = _parts_of_scan(node, inputs)
    count, scanned = len(sequences), len(body.outputs) - len(states)
    axes = [
        normalize_axis(axis, x.rank)
        for axis, x in zip(_numbers(node, "scan_input_axes", count), sequences, strict=True)
    ]
    backwards = _numbers(node, "scan_input_directions", count)
    states, rows = _steps_of_scan(lowering, node, states, [*zip(sequences, axes, backwards, strict=True)])
    outputs = list(states)
    out_axes, reversed_ = _numbers(node, "scan_output_axes", scanned), _numbers(node, "scan_output_directions", scanned)
    for k in range(scanned):
        parts = _tensors(node, (row[k] for row in rows))
        declared = body.outputs[len(states) + k]
        outputs.append(_stacked(lowering, parts[::-1] if reversed_[k] else parts, out_axes[k], declared))
    return outputs


def _scan_8(lowering: BodyLowering, node: Node, inputs: Inputs) -> list[Operand]:
    """Lower Scan-8, which scans each item of a batch (dimension 0 of all inputs) separately."""
    if not _is_missing(inputs, 0):
        raise Unsupported("control-flow", "Scan-8 with sequence_lens is not implemented")
    body, states, sequences = _parts_of_scan(node, inputs[1:])
    batched = _tensors(node, [*states, *sequences])
    if any(x.rank < 1 + (k >= len(states)) for k, x in enumerate(batched)):
        raise InvalidModel(
            "Scan-8: state variables must have a batch dimension, scanned inputs a batch and a sequence dimension, "
            f"got {len(states)} states and {len(sequences)} scanned inputs with the ranks {[x.rank for x in batched]}"
        )
    for x in batched[1:]:
        lowering.ctx.require(eq(batched[0].shape[0], x.shape[0]), "Scan-8: all inputs must have the same batch size")
    batch = _known(batched[0].shape[0], "the batch size of Scan")
    directions = _numbers(node, "directions", len(sequences))
    items: list[list[Tensor]] = []
    for number in range(batch):
        own = [select_index(lowering.ctx, x, 0, number) for x in batched]
        slices = [(x, 0, backward) for x, backward in zip(own[len(states) :], directions, strict=True)]
        last, rows = _steps_of_scan(lowering, node, own[: len(states)], slices)
        values = body.outputs[len(states) :]
        columns = [_tensors(node, (row[k] for row in rows)) for k in range(len(values))]
        scanned = [_stacked(lowering, parts, 0, value) for parts, value in zip(columns, values, strict=True)]
        items.append([*_tensors(node, last), *scanned])
    if not items:
        raise Unsupported("control-flow", "Scan-8 of an empty batch is not implemented")
    return [
        _stacked(lowering, parts, 0, value) for parts, value in zip(zip(*items, strict=True), body.outputs, strict=True)
    ]


def _parts_of_scan(node: Node, inputs: Inputs) -> tuple[Graph, list[Operand], list[Tensor]]:
    """Return the body of a Scan, the initial states, and the scanned inputs."""
    body, count = node.subgraphs.get("body"), node.attributes.get("num_scan_inputs")
    given = _given(node, inputs)
    if body is None:
        raise InvalidModel("Scan: its body is missing")
    if not isinstance(count, int) or not 0 < count <= len(given):
        raise InvalidModel(f"Scan: num_scan_inputs must be in [1, {len(given)}], the number of inputs, got {count}")
    states, sequences = given[:-count], _tensors(node, given[-count:])
    if len(body.outputs) < len(states):
        raise InvalidModel(
            f"Scan: the body has {len(body.outputs)} results, expected one for each of {len(states)} state variables"
        )
    return body, states, sequences


def _steps_of_scan(
    lowering: BodyLowering, node: Node, states: Sequence[Operand], scanned: Sequence[tuple[Tensor, int, int]]
) -> tuple[list[Operand], list[list[Operand]]]:
    """Return the last states, and per iteration the body's other results; ``scanned``: (tensor, axis, is backward)."""
    ctx = lowering.ctx
    length = _known(_common_length(ctx, [x.shape[axis] for x, axis, _ in scanned]), "the length of Scan")
    size = unrolled_nodes(node.subgraphs["body"], lowering.compiled)
    _check_count(length, size, "Scan")
    current = list(states)
    rows: list[list[Operand]] = []
    for step in range(length):
        lowering.spend_nodes(size)
        slices = [select_index(ctx, x, axis, length - 1 - step if back else step) for x, axis, back in scanned]
        results = _body(lowering, node, "body", (*current, *slices))
        current = results[: len(states)]
        rows.append(results[len(states) :])
    return current, rows


def _common_length(ctx: Lowering, lengths: Sequence[Dim]) -> Dim:
    for other in lengths[1:]:
        ctx.require(eq(lengths[0], other), "Scan: all scanned inputs must have the same length")
    return lengths[0]


def _stacked(lowering: BodyLowering, parts: Sequence[Tensor], axis: int, declared: Value) -> Tensor:
    """Stack tensors along a new dimension ``axis``; ``declared`` supplies type and shape if ``parts`` is empty."""
    ctx = lowering.ctx
    if not parts:
        shape = [dim for dim in declared.shape or [None] if isinstance(dim, int)]
        if declared.dtype is None or declared.shape is None or len(shape) != len(declared.shape):
            raise Unsupported(
                "control-flow",
                "no iteration runs, and the model does not declare the type and all sizes of the body's result "
                f"{declared.name!r}",
            )
        shape.insert(normalize_axis(axis, len(shape) + 1), 0)
        return ctx.empty(shape, declared.dtype)
    at = normalize_axis(axis, parts[0].rank + 1)
    for part in parts:
        if part.dtype is not parts[0].dtype:
            types = f"got {part.dtype.short}, expected {parts[0].dtype.short}"
            raise InvalidModel(f"{declared.name!r} must have the same element type in all iterations: {types}")
        require.shape(ctx, parts[0].shape, **{f"result {declared.name!r} of an iteration": part})
    return concat(ctx, *(unsqueeze(ctx, part, (at,)) for part in parts), axis=at)


def _known_number(x: Tensor, what: str) -> int:
    return _known(None if x.host is None else x.host[0], what)


def _known(value: Dim | None, what: str) -> int:
    if not isinstance(value, int):
        raise Unsupported(
            "control-flow",
            f"{what} is known only when the model runs; supported: values known when the session is created",
        )
    return value


def _check_count(iterations: int, size: int, what: str) -> None:
    if iterations * size > MAX_UNROLLED_NODES:
        nodes = f"{what} has {iterations} iterations of {size} nodes"
        raise Unsupported("cost", f"{nodes}; supported: up to {MAX_UNROLLED_NODES} nodes in all")


def _is_missing(inputs: Inputs, index: int) -> bool:
    return index >= len(inputs) or inputs[index] is None


def _scalar(node: Node, inputs: Inputs, index: int, dtype: DType, what: str = "input") -> Tensor:
    x = inputs[index] if index < len(inputs) else None
    if not isinstance(x, Tensor) or x.dtype is not dtype or x.size != 1:
        raise InvalidModel(f"{node.op_type}: {what} {index} must be a tensor of one {dtype.short} element, got {x!r}")
    return x


def _tensors(node: Node, operands: Iterable[Operand]) -> list[Tensor]:
    operands = list(operands)
    tensors = [x for x in operands if isinstance(x, Tensor)]
    if len(tensors) != len(operands):
        raise InvalidModel(
            f"{node.op_type}: got a sequence or an optional value as a state, a scanned input or a stacked result, "
            "expected a tensor"
        )
    return tensors


def _given(node: Node, inputs: Iterable[Operand | None]) -> list[Operand]:
    given = [x for x in inputs if x is not None]
    if len(given) != len(list(inputs)):
        what = "a loop-carried value" if node.op_type == "Loop" else "a state or a scanned input"
        raise InvalidModel(f"{node.op_type}: got an empty name as an input, expected {what}")
    return given


def _numbers(node: Node, name: str, count: int) -> tuple[int, ...]:
    value = node.attributes.get(name, (0,) * count)
    numbers = tuple(number for number in value if isinstance(number, int)) if isinstance(value, tuple) else ()
    if len(numbers) != count:
        raise InvalidModel(f"{node.op_type}: {name} must have {count} integers, got {value!r}")
    return numbers
