"""The steps of a search as a loop on the device: the decoder's caches get buffers of max_length keys.

::

    first tokens, first call of the decoder, choice   (nodes of the cluster)
    LOOP: decoder, choice of tokens                    (`step_node`, one DeviceLoop)
    results                                            (a node of the cluster)

`clusters.growing` lowers the decoder. The loop's states are the tokens, the caches and the search's own states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...kernels.elementwise.index_map import IndexMap, gather_map
from ...model.ir import DType, Graph, Node, Unsupported, Value
from ...ops import requirements as require
from ...ops.onnx.tensor.indexing import chosen_slices
from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import Dim, eq, sym_max
from ...program.lowering.context import Lowering
from ...program.lowering.elementwise import elementwise
from ...program.steps.containers import Operand
from ...program.steps.tensor import Tensor
from ..growing.body import GrowingBody, NodeByNode
from ..growing.table import READS_BUFFERS, RULES
from ..growing.values import PAST, BeamOfKey, Growing, Sizes
from ..nodes.device_loop import Iteration, LoopPlan, lower_loop
from ..nodes.repetition import FunctionNode, part
from .search_base import Given, Search


@dataclass(frozen=True)
class DecoderInputs:
    """The inputs of a decoder after the tokens, its first input.

    ``caches`` [.., keys, ..] grow along ``key_axis``; ``row_axis`` is their axis of sequences. The elements of
    ``counted`` grow by 1 in each step. ``masks`` [rows, keys] grow by a 1 in each row. If past and present caches share
    buffers, ``shared`` are past_sequence_length and perhaps beam_width and cache_indirection. All other inputs stay
    constant.
    """

    caches: Sequence[Value]
    key_axis: int
    row_axis: int
    counted: Sequence[Value] = ()
    masks: Sequence[Value] = ()
    shared: Sequence[Value] = ()


def loop_graph(
    kind: Search,
    decoder: Graph,
    inputs: DecoderInputs,
    nodes: Sequence[Node],
    first: Sequence[Value],
    states: Sequence[Value],
) -> Graph:
    """Return the cluster of a search: ``nodes`` compute ``first``; then come the loop and the results."""
    sequences, own = Value("sequences", DType.INT32, ("rows", "room")), kind.own_states()
    steps = step_node(kind, decoder, inputs, first, states, [sequences, *own])
    outputs = [value for value in kind.node.outputs if value is not None]
    return part(kind.node.name, [*nodes, steps, kind.end_node(sequences, own)], kind.inputs, outputs, kind.opsets).graph


def step_node(
    kind: Search,
    decoder: Graph,
    inputs: DecoderInputs,
    first: Sequence[Value],
    states: Sequence[Value],
    results: Sequence[Value],
) -> FunctionNode:
    """Return the node that runs all steps of a search after the first choice of tokens.

    ``first`` are the values of ``states`` after that choice: the flag "continue", the tokens, the decoder's inputs and
    the search's own states. ``results`` are the last tokens and own states.
    """
    node, given = kind.node, {name: x for name, x in kind.given.items() if name != "prefix_vocab_mask"}

    def lowered(lowering: NodeByNode, *tensors: Tensor) -> list[Operand]:
        known = dict(zip(states, tensors, strict=False))
        fed = dict(zip(given, tensors[len(states) :], strict=True))
        return _Steps(kind, decoder, inputs, lowering, states, known, fed).run(steps)

    steps = FunctionNode(
        node.name, node.op_type, node.domain, node.since_version, (*first, *given.values()), tuple(results),
        implicit_inputs=node.implicit_inputs, subgraphs={"decoder": decoder}, function=lowered,
    )  # fmt: skip
    return steps


class _Steps:
    """Lowers the steps of a search. ``known``: the states after the first choice. ``given``: the search's inputs."""

    def __init__(
        self,
        kind: Search,
        decoder: Graph,
        inputs: DecoderInputs,
        lowering: NodeByNode,
        states: Sequence[Value],
        known: dict[Value, Tensor],
        given: Given,
    ) -> None:
        self._kind, self._decoder, self._inputs = kind, decoder, inputs
        self._lowering, self._given, self._known = lowering, given, known
        self._goes_on, self._sequences, self._tokens = (known[value] for value in states[:3])
        self._own_values = states[len(states) - len(kind.own_states()) :]
        self._own = [known[value] for value in self._own_values]
        self._capacity = self._sequences.shape[1]
        self._first_keys = known[inputs.caches[0]].shape[inputs.key_axis]

    def run(self, node: FunctionNode) -> list[Operand]:
        ctx, inputs = self._lowering.ctx, self._inputs
        carried = {*self._decoder.inputs[:1], *inputs.caches, *inputs.counted, *inputs.masks, *inputs.shared}
        for value in self._decoder.inputs:
            if value not in carried:
                self._lowering.set(value, self._known[value])
        axes = inputs.row_axis, inputs.key_axis
        caches = [self._in_room(ctx, self._known[value], *axes, fill=0) for value in inputs.caches]
        self._masks = [self._in_room(ctx, self._known[value], 0, 1, fill=1) for value in inputs.masks]
        counted = [self._known[value] for value in inputs.counted]
        states = (self._sequences, self._tokens, *counted, *caches, *self._own)
        most = sym_max(self._capacity - self._first_keys - 1, 0)
        self._node = node
        sequences, *others = lower_loop(ctx, LoopPlan(node, most, self._goes_on, states, (), (), self._iteration))
        return [sequences, *others[len(others) - len(self._own) :]]

    def _in_room(self, ctx: Lowering, x: Tensor, row_axis: int, key_axis: int, *, fill: int) -> Tensor:
        """Return ``x``, padded with ``fill`` to the capacity along ``key_axis``."""
        shape = list(x.shape)
        # Several inputs determine the number of rows. One expression for it lets kernels write states in place.
        shape[row_axis], shape[key_axis] = self._sequences.shape[0], self._capacity
        require.dim(ctx, row_axis, shape[row_axis], **{"the decoder's K/V caches": x})
        count: Dim = x.shape[key_axis]

        def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
            return maps.source(x).at(c, c[key_axis] < maps.dim(count), fill)

        return gather_map(ctx, shape, x.dtype, element)

    def _iteration(self, iteration: Iteration) -> tuple[Tensor, Sequence[Operand], Sequence[Operand]]:
        """Lower one step: the decoder for the last tokens, and the choice of the next ones."""
        ctx, inputs, kind = self._lowering.ctx, self._inputs, self._kind
        sequences, tokens, *others = iteration.states
        counted, others = others[: len(inputs.counted)], others[len(inputs.counted) :]
        caches, own = others[: len(inputs.caches)], others[len(inputs.caches) :]
        past = self._keys(ctx, iteration.number, 0)
        body = GrowingBody(self._lowering, past, self._capacity, RULES, READS_BUFFERS)
        body.set(self._decoder.inputs[0], tokens)
        for value, x in zip(inputs.counted, counted, strict=True):
            body.set(value, x)
        for value, x in zip(inputs.masks, self._masks, strict=True):
            body.set(value, Growing(x, {1: 1}))
        for value, x in zip(inputs.caches, caches, strict=True):
            body.set(value, Growing(x, {inputs.key_axis: 0}, is_shared=bool(inputs.shared)))
        self._set_shared(body)
        for each in self._decoder.nodes:
            body.lower(each)
        ctx.node = self._node
        logits, *presents = self._results(body)
        named = {value.name: x for value, x in zip(self._own_values, own, strict=True)}
        given = {**self._given, **named, "sequences": sequences, "logits": logits}
        made = kind.choose(ctx, given, self._keys(ctx, iteration.number, 1), is_first=False)
        if made.rows is not None and not ctx.guard(eq(kind.beams(ctx, given), 1)):
            presents = [chosen_slices(ctx, x, inputs.row_axis, made.rows) for x in presents]
        later = [elementwise(ctx, lambda x: x + 1, x) for x in counted]
        return made.goes_on, [made.sequences, made.tokens, *later, *presents, *made.own], ()

    def _set_shared(self, body: GrowingBody) -> None:
        """Set the inputs of a decoder whose past and present share buffers."""
        ctx, beams = body.ctx, self._kind.beams(body.ctx, self._given)
        count = np.empty(1, dtype=object)
        count[0] = PAST
        fed = (Sizes(count, DType.INT32), ctx.host_tensor([beams], (1,), DType.INT32), BeamOfKey())
        for index, value in enumerate(self._inputs.shared):
            body.set(value, fed[index])

    def _keys(self, ctx: Lowering, number: Tensor, extra: int) -> Tensor:
        """Return the number of cached keys in iteration ``number``, plus ``extra``, int32 [1] on the device."""
        first = self._first_keys + extra

        def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
            return s.cast(maps.number(number) + maps.dim(first), DType.INT32)

        return gather_map(ctx, (1,), DType.INT32, element)

    def _results(self, body: GrowingBody) -> list[Tensor]:
        """Return the decoder's logits and caches."""
        logits, *presents = self._decoder.outputs
        if body.special(logits) is not None:
            raise Unsupported(
                "control-flow", f"the decoder's logits {logits.name!r} grow in each iteration; supported: a fixed shape"
            )
        found = [body.tensor(logits)]
        for value in presents:
            x = body.growing(value)
            if x is None or x.axes != {self._inputs.key_axis: 1}:
                raise Unsupported(
                    "control-flow",
                    f"the decoder's output {value.name!r} is not a cache with the keys of one token appended; "
                    f"supported: past + 1 keys along axis {self._inputs.key_axis}",
                )
            found.append(x.x)
        return found
